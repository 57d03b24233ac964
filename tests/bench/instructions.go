// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

var errNoValgrind = errors.New("no valgrind")

// instructions counts the instructions of a call, including the loop around it, in the
// calling thread. The same code gives the same number each time.
func (b *bench) instructions(ctx context.Context, l *library, s scenario, tenant *program) (map[string]float64, error) {
	valgrind, err := exec.LookPath("valgrind")
	if err != nil {
		return nil, errNoValgrind
	}
	dir, err := os.MkdirTemp(b.dir, "callgrind-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	wrap := []string{valgrind, "-q", "--tool=callgrind", "--separate-threads=yes", "--callgrind-out-file=" + dir + "/out"}
	for _, call := range s.Calls {
		wrap = append(wrap, "--dump-before=run_"+call, "--dump-after=run_"+call)
	}
	if _, err := b.once(ctx, l, s, tenant, wrap, "2", strconv.Itoa(perBatch)); err != nil {
		return nil, err
	}
	files, err := filepath.Glob(dir + "/out.*-01") // the first thread's
	if err != nil {
		return nil, err
	}
	totals := map[string][]float64{}
	for _, file := range files {
		call, total, err := parseDump(file)
		if err != nil {
			return nil, err
		}
		totals[call] = append(totals[call], total)
	}
	counts := map[string]float64{}
	for _, call := range s.Calls {
		if len(totals[call]) == 0 {
			return nil, fmt.Errorf("callgrind has not seen run_%s", call)
		}
		// The first batches differ, because symbols are unresolved and caches cold.
		counts[call] = quartile(totals[call], 2) / perBatch
	}
	return counts, nil
}

// parseDump reads what callgrind wrote at the end of a run_ function: the function's name
// and its number of instructions. Other dumps have no name.
func parseDump(file string) (call string, total float64, err error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return "", 0, err
	}
	for line := range strings.Lines(string(data)) {
		line = strings.TrimSpace(line)
		if name, ok := strings.CutPrefix(line, "desc: Trigger: --dump-after=run_"); ok {
			call = name
		}
		if n, ok := strings.CutPrefix(line, "totals: "); ok {
			if total, err = strconv.ParseFloat(n, 64); err != nil {
				return "", 0, fmt.Errorf("%s: %w", file, err)
			}
		}
	}
	return call, total, nil
}

// check compares the most common calls with the limits.
func (b *bench) check(ctx context.Context, w io.Writer) error {
	s := scenarios[0]
	s.Calls = slices.Sorted(maps.Keys(limits))
	before, err := b.instructions(ctx, nil, s, nil)
	if errors.Is(err, errNoValgrind) {
		fmt.Fprintln(w, "bench: no valgrind, the instructions of a launch are not counted")
		return nil
	}
	if err != nil {
		return err
	}
	after, err := b.instructions(ctx, &b.libraries[0], s, nil)
	if err != nil {
		return err
	}
	var said, over []string
	for _, call := range s.Calls {
		added := after[call] - before[call]
		said = append(said, fmt.Sprintf("%s %+.0f", call, added))
		// A batch ends with a synchronisation, which adds a fraction of an instruction
		// to each call.
		if math.Round(added) > limits[call] {
			over = append(over, fmt.Sprintf("%s: %+.1f instructions, the limit is %+.0f", call, added, limits[call]))
		}
	}
	fmt.Fprintln(w, "bench: instructions added per call:", strings.Join(said, ", "))
	if over != nil {
		return fmt.Errorf("the shim costs too much: %s", strings.Join(over, "; "))
	}
	return nil
}
