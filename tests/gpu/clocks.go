// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"sync"
)

// clocks is the GPU's state over some time: when it draws all the power it
// may, it clocks lower, and the same GPU time is less work.
type clocks struct {
	MHz     float64 `json:"sm_mhz"` // means
	Watts   float64 `json:"watts"`
	Samples int     `json:"samples"`
}

// A clockWatch reads the state of GPU 0 twice a second, as nvidia-smi tells
// it. It changes nothing. On a machine without nvidia-smi it knows nothing.
type clockWatch struct {
	stop func()
	mu   sync.Mutex
	all  []clockSample
}

type clockSample struct{ at, mhz, watts float64 }

func watchClocks(ctx context.Context) *clockWatch {
	ctx, cancel := context.WithCancel(ctx)
	w := &clockWatch{stop: cancel}
	cmd := exec.CommandContext(ctx, "nvidia-smi", "-i", "0", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "-lms", "500")
	out, err := cmd.StdoutPipe()
	if err != nil || cmd.Start() != nil {
		return w
	}
	done := make(chan struct{})
	w.stop = func() { cancel(); <-done }
	go func() {
		defer close(done)
		for lines := bufio.NewScanner(out); lines.Scan(); {
			if s, err := parseClocks(lines.Text()); err == nil {
				s.at = float64(monotonic()) / 1e9
				w.mu.Lock()
				w.all = append(w.all, s)
				w.mu.Unlock()
			}
		}
		_ = cmd.Wait()
	}()
	return w
}

func parseClocks(line string) (clockSample, error) {
	f := strings.Split(line, ",")
	if len(f) != 2 {
		return clockSample{}, fmt.Errorf("nvidia-smi said %q", line)
	}
	mhz, err := strconv.ParseFloat(strings.TrimSpace(f[0]), 64)
	if err != nil {
		return clockSample{}, err
	}
	watts, err := strconv.ParseFloat(strings.TrimSpace(f[1]), 64)
	return clockSample{mhz: mhz, watts: watts}, err
}

// between is the mean of a time, or nil.
func (w *clockWatch) between(from, to float64) *clocks {
	w.mu.Lock()
	defer w.mu.Unlock()
	c := &clocks{}
	for _, s := range w.all {
		if s.at >= from && s.at <= to {
			c.MHz += s.mhz
			c.Watts += s.watts
			c.Samples++
		}
	}
	if c.Samples == 0 {
		return nil
	}
	c.MHz /= float64(c.Samples)
	c.Watts /= float64(c.Samples)
	return c
}
