// SPDX-License-Identifier: Apache-2.0

package judge

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
)

// Kind of work on a GPU.
type Kind uint8

// Kinds, with the numbers of tests/simgpu/shared.h.
const (
	Kernel Kind = 1
	HtoD   Kind = 2
	DtoH   Kind = 3
	DtoD   Kind = 4

	kindStart Kind = 64
	kindExit  Kind = 65
)

// Process is one process that used a GPU. Equal values mean the same process.
type Process struct {
	Tenant string `json:"tenant"`
	PID    uint32 `json:"pid"` // in the process's own pid namespace
	ID     string `json:"id"`  // unique within one source
}

// Interval is a piece of work, or several of one process without a gap between them.
// Submit <= Start <= End, in nanoseconds.
type Interval struct {
	GPU                string // UUID
	Process            Process
	Kind               Kind
	Submit, Start, End int64
	Busy               int64 // sum of durations, at most End-Start
	Count              int   // pieces of work
}

// Life is when a process took and left the GPU, in nanoseconds; 0 means unknown. Work
// after Exit never ran.
type Life struct {
	Process     Process
	Start, Exit int64
}

// Trace is the evidence.
type Trace struct {
	Intervals []Interval
	Lives     []Life
	Lost      uint64 // records that the log's ring no longer holds
}

// Add joins another trace. The two must share no process.
func (t *Trace) Add(o Trace) {
	t.Intervals = append(t.Intervals, o.Intervals...)
	t.Lives = append(t.Lives, o.Lives...)
	t.Lost += o.Lost
}

const (
	logMagic   = 0x31474c5355474d53
	logHeader  = 64
	recordSize = 64
)

// ErrLog says that a file is not a simulated GPU's log.
var ErrLog = errors.New("not a simulated GPU's log")

// ReadLog reads the log of a simulated GPU, which may be in use.
func ReadLog(path string) (Trace, error) { return ReadLogSince(path, math.MinInt64) }

// ReadLogSince is ReadLog without the work that ended before a time, ns, also if the ring no
// longer holds that: it need not be counted as lost.
func ReadLogSince(path string, since int64) (Trace, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return Trace{}, fmt.Errorf("read the simulated GPU's log: %w", err)
	}
	t, err := ParseLog(b, since)
	if err != nil {
		return Trace{}, fmt.Errorf("%s: %w", path, err)
	}
	return t, nil
}

// ParseLog decodes the bytes of a log (tests/simgpu/shared.h), without the work that ended
// before a time. Errors wrap ErrLog.
func ParseLog(b []byte, since int64) (Trace, error) {
	le := binary.LittleEndian
	if len(b) < logHeader || le.Uint64(b) != logMagic {
		return Trace{}, ErrLog
	}
	capacity, next := le.Uint64(b[8:]), le.Uint64(b[16:])
	if capacity == 0 || capacity > uint64(len(b)-logHeader)/recordSize {
		return Trace{}, fmt.Errorf("%w: it says %d records and has %d bytes", ErrLog, capacity, len(b))
	}
	var t Trace
	first := uint64(0)
	if next > capacity {
		first = next - capacity
		t.Lost = first
	}
	lives := map[Process]*Life{}
	var order []Process
	for i := first; i < next; i++ {
		r := b[logHeader+i%capacity*recordSize:][:recordSize]
		submit, start, end := int64(le.Uint64(r)), int64(le.Uint64(r[8:])), int64(le.Uint64(r[16:]))
		kind := Kind(r[43])
		if i == first && end < since { // what was before it ended before, too
			t.Lost = 0
		}
		if kind != kindStart && kind != kindExit && end < since {
			continue
		}
		p := Process{
			Tenant: string(bytes.TrimRight(r[44:64], "\x00")),
			PID:    le.Uint32(r[24:]),
			ID:     fmt.Sprintf("%d.%d", le.Uint16(r[40:]), le.Uint32(r[28:])),
		}
		life := lives[p]
		if life == nil {
			life = &Life{Process: p}
			lives[p] = life
			order = append(order, p)
		}
		switch kind {
		case kindStart:
			life.Start = start
		case kindExit:
			life.Exit = end
		default:
			iv := Interval{
				GPU: UUID(int(r[42])), Process: p, Kind: kind,
				Submit: submit, Start: start, End: end,
				Busy: end - start, Count: int(le.Uint32(r[36:])),
			}
			if busy := int64(le.Uint32(r[32:])); busy != 0 {
				iv.Busy = busy
			}
			if submit > start || start > end {
				return Trace{}, fmt.Errorf("%w: record %d runs backwards", ErrLog, i)
			}
			t.Intervals = append(t.Intervals, iv)
		}
	}
	for _, p := range order {
		t.Lives = append(t.Lives, *lives[p])
	}
	return t, nil
}

// UUID of a simulated GPU by its index on the node.
func UUID(index int) string {
	return fmt.Sprintf("GPU-51600000-0000-4000-8000-%012x", index)
}

// ReadRecords reads files that cuda-busy --record wrote. It drops a last line without a
// newline, which a killed process leaves.
func ReadRecords(paths ...string) (Trace, error) {
	var t Trace
	for _, path := range paths {
		f, err := os.Open(path)
		if err != nil {
			return Trace{}, fmt.Errorf("read records: %w", err)
		}
		ivs, err := ParseRecords(f, path)
		_ = f.Close() // only read
		if err != nil {
			return Trace{}, err
		}
		t.Intervals = append(t.Intervals, ivs...)
	}
	return t, nil
}

// ParseRecords decodes JSON lines; name is for errors.
func ParseRecords(r io.Reader, name string) ([]Interval, error) {
	var ivs []Interval
	in := bufio.NewReader(r)
	for n := 1; ; n++ {
		line, err := in.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			return ivs, nil
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		var rec struct {
			UUID   string `json:"uuid"`
			Tenant string `json:"tenant"`
			PID    uint32 `json:"pid"`
			Start  int64  `json:"start_ns"`
			End    int64  `json:"end_ns"`
		}
		if err := json.Unmarshal(line, &rec); err != nil {
			return nil, fmt.Errorf("%s:%d: %w", name, n, err)
		}
		if rec.UUID == "" || rec.Start > rec.End {
			return nil, fmt.Errorf("%s:%d: no uuid, or start_ns after end_ns", name, n)
		}
		ivs = append(ivs, Interval{
			GPU:     rec.UUID,
			Process: Process{Tenant: rec.Tenant, PID: rec.PID, ID: fmt.Sprintf("pid %d", rec.PID)},
			Kind:    Kernel, Submit: rec.Start, Start: rec.Start, End: rec.End,
			Busy: rec.End - rec.Start, Count: 1,
		})
	}
}
