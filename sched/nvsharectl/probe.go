// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/nvshare/nvshare/sched/cuda"
)

const (
	// probeKernel is how long a kernel of the probe takes, and probeBatch how many are
	// submitted at once.
	probeKernel = time.Millisecond
	probeBatch  = 4
	// probePiece is how much memory the probe takes at a time, bytes.
	probePiece = 16 << 20
)

// probed is what the program of doctor test has seen. It prints one line when it is
// ready, runs when it reads a line, and prints another at the end.
type probed struct {
	PID   uint32 `json:"pid"`
	Total uint64 `json:"total"` // size of the GPU's memory, as the program sees it, bytes
	Got   uint64 `json:"got"`   // memory, bytes
	Full  bool   `json:"full"`  // it wanted more memory, and CUDA said out of memory
	// After the run:
	Kernels int     `json:"kernels"` // of probeKernel each
	Seconds float64 `json:"seconds"`
	Wrong   int     `json:"wrong"` // words of its memory that are not as it wrote them
	Error   string  `json:"error,omitempty"`
}

type probeFlags struct {
	want  uint64
	total uint64 // the size that the GPU has to have, 0: any
	alone bool   // nobody says when to begin
	time  time.Duration
}

// probeCommand is the tiny CUDA program of doctor test.
func probeCommand(io streams) *cobra.Command {
	f := &probeFlags{}
	cmd := &cobra.Command{
		Use:    "probe",
		Short:  "The program that doctor test runs",
		Hidden: true,
		Args:   noWords,
		RunE: func(*cobra.Command, []string) error {
			report := func(p probed, err error) error {
				if err != nil {
					p.Error = err.Error()
				}
				line, _ := json.Marshal(p)
				_, _ = fmt.Fprintf(io.out, "%s\n", line)
				return err
			}
			d, err := cuda.Open()
			if err != nil {
				return report(probed{}, err)
			}
			p, err := f.run(d, func(p probed) error {
				_ = report(p, nil)
				return f.begin(p, os.Stdin)
			})
			return report(p, err)
		},
	}
	cmd.Flags().Uint64Var(&f.want, "bytes", 0, "`bytes` of memory to take")
	cmd.Flags().Uint64Var(&f.total, "total", 0, "the memory `limit`, in bytes, that the GPU has to show")
	cmd.Flags().BoolVar(&f.alone, "alone", false, "begin at once, and not with a line of standard input")
	cmd.Flags().DurationVar(&f.time, "time", 5*time.Second, "how long to run")
	return cmd
}

// begin returns when the program may start its work, or why it may not.
func (f *probeFlags) begin(p probed, in io.Reader) error {
	if f.total != 0 && p.Total != f.total {
		return fmt.Errorf("the GPU shows %d bytes of memory and not the limit of %d: this program is not held to it", p.Total, f.total)
	}
	if f.alone {
		return nil
	}
	_, err := bufio.NewReader(in).ReadString('\n')
	return err
}

func (f *probeFlags) run(d *cuda.Driver, ready func(probed) error) (p probed, err error) {
	var pieces []uint64
	p.PID = uint32(os.Getpid())
	word := p.PID | 1<<31
	for p.Got < f.want && !p.Full {
		at, full, err := d.Alloc(probePiece, word+uint32(len(pieces)))
		if err != nil && !full {
			return p, err
		}
		if p.Full = full; !full {
			pieces = append(pieces, at)
			p.Got += probePiece
		}
	}
	if p.Total, err = d.Total(); err != nil {
		return p, err
	}
	if err := d.Spin(1, uint64(probeKernel)); err != nil {
		return p, err
	}
	if err := ready(p); err != nil {
		return p, err
	}
	began := time.Now()
	for time.Since(began) < f.time {
		if err := d.Spin(probeBatch, uint64(probeKernel)); err != nil {
			return p, err
		}
		p.Kernels += probeBatch
	}
	p.Seconds = time.Since(began).Seconds()
	piece := make([]byte, probePiece)
	for i, at := range pieces {
		if err := d.Read(piece, at); err != nil {
			return p, err
		}
		p.Wrong += wrongWords(piece, word+uint32(i))
	}
	return p, nil
}

// wrongWords counts the words of a piece that are not the one that it was filled with. It is
// quick where all are right: a program that pauses between two reads loses its turn, and
// where memory is swapped each read then waits for all of it to move.
func wrongWords(piece []byte, word uint32) (wrong int) {
	if binary.NativeEndian.Uint32(piece) == word && bytes.Equal(piece[4:], piece[:len(piece)-4]) {
		return 0
	}
	for ; len(piece) > 0; piece = piece[4:] {
		if binary.NativeEndian.Uint32(piece) != word {
			wrong++
		}
	}
	return wrong
}
