// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	stdio "io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/nvshare/nvshare/cdi"
	"github.com/nvshare/nvshare/sched/api"
)

// maxPiece bounds each file of a bundle, bytes.
const maxPiece = 16 << 20

func bundleCommand(root *rootFlags, f *doctorFlags, io streams) *cobra.Command {
	return &cobra.Command{
		Use:   "bundle [FILE|-]",
		Short: "Write what a bug report needs into one file",
		Long: `bundle writes findings, status, events, versions, CDI specs and the services'
logs into FILE, a tar.gz; - is standard output. No environment, command line or
file of a program is in it, but the names of users, pods and programs are. FILE
must not exist yet.`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			file := "nvshare-" + time.Now().UTC().Format("20060102-150405") + ".tar.gz"
			if len(args) > 0 {
				file = args[0]
			}
			if file == "-" { // kubectl exec: the image has no tar for kubectl cp
				return writeBundle(io.out, f.patient(cmd.Context(), root.runDir))
			}
			if err := fileBundle(file, f.patient(cmd.Context(), root.runDir)); err != nil {
				return fmt.Errorf("write %s: %w", file, err)
			}
			fmt.Fprintf(io.out, "%s\nLook into it before you give it away: it names users, pods and programs.\n", file)
			return nil
		},
	}
}

func fileBundle(file string, p *patient) (err error) {
	out, err := os.OpenFile(file, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	return writeBundle(out, p)
}

func writeBundle(out stdio.Writer, p *patient) error {
	z := gzip.NewWriter(out)
	t := tar.NewWriter(z)
	for _, piece := range p.pieces() {
		text, failed := piece.text()
		if failed != nil {
			text = append(text, []byte("not there: "+failed.Error()+"\n")...)
		}
		text = text[:min(len(text), maxPiece)]
		if err := t.WriteHeader(&tar.Header{Name: "nvshare/" + piece.name, Mode: 0o600, Size: int64(len(text)), ModTime: time.Now()}); err != nil {
			return err
		}
		if _, err := t.Write(text); err != nil {
			return err
		}
	}
	return errors.Join(t.Close(), z.Close())
}

// piece is one file of a bundle.
type piece struct {
	name string
	text func() ([]byte, error)
}

func (p *patient) pieces() []piece {
	all := []piece{
		{"doctor.json", func() ([]byte, error) { return safely(json.MarshalIndent(p.examine(), "", "  ")) }},
		{"status.json", func() ([]byte, error) {
			if p.status == nil {
				return nil, p.whyNot
			}
			return safely(json.MarshalIndent(plainStatus(p.status), "", "  "))
		}},
		{"events.jsonl", p.events},
		{"version.txt", func() ([]byte, error) { return []byte("nvsharectl " + api.Version + "\n"), nil }},
		{"uname.txt", p.output("uname", "-a")},
		{"driver.txt", p.read("/proc/driver/nvidia/version")},
		{"nvidia-smi.txt", p.output("nvidia-smi", "-q", "-d", "MEMORY,UTILIZATION,COMPUTE,ECC")},
		{"scheduler.log", p.output("journalctl", "--no-pager", "-n", "2000", "-u", "nvshare-scheduler")},
		{"plugin.log", p.output("journalctl", "--no-pager", "-n", "2000", "-u", "nvshare-plugin")},
	}
	for _, dir := range []string{"/etc/cdi", cdi.DefaultSpecDir} {
		specs, _ := filepath.Glob(p.at(dir) + "/*nvshare*")
		for _, spec := range specs {
			all = append(all, piece{"cdi" + strings.ReplaceAll(dir, "/", "-") + "-" + filepath.Base(spec), func() ([]byte, error) { return readSome(spec) }})
		}
	}
	return all
}

// events returns the events that the scheduler remembers, one a line.
func (p *patient) events() (text []byte, err error) {
	var all []*api.Event
	if err = call(p.ctx, p.runDir, func(ctx context.Context, c *api.Conn) (err error) {
		all, err = allEvents(ctx, c)
		return err
	}); err != nil {
		return nil, err
	}
	for _, e := range all {
		line, err := safely(json.Marshal(plain(e.ProtoReflect())))
		if err != nil {
			return text, err
		}
		text = append(append(text, line...), '\n')
	}
	return text, nil
}

// read returns what reads a file of the host.
func (p *patient) read(file string) func() ([]byte, error) {
	return func() ([]byte, error) { return readSome(p.at(file)) }
}

// readSome reads a file up to maxPiece.
func readSome(file string) ([]byte, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return stdio.ReadAll(stdio.LimitReader(f, maxPiece))
}

// output returns what runs a program of the host.
func (p *patient) output(name string, args ...string) func() ([]byte, error) {
	return func() ([]byte, error) {
		ctx, cancel := context.WithTimeout(p.ctx, callTimeout)
		defer cancel()
		cmd := exec.CommandContext(ctx, name, args...)
		cmd.WaitDelay = time.Second
		return cmd.CombinedOutput()
	}
}
