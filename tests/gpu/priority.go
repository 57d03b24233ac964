// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

const (
	requestPeriodUS = 5000
	requestKernels  = 20
	requestKernelUS = 10

	// requestReady is how long a process has from its start to its first request.
	requestReady = 2 * time.Second
	// requestWithin bounds what is left of it after its last one was due.
	requestWithin = 20 * time.Second

	requestTarget = 2.6  // ms, p99
	batchTarget   = 0.98 // of one batch tenant alone

	// requestUser is the latency tenant.
	requestUser = firstUser + 900
)

// besideRequests are the numbers of batch tenants beside the latency tenant.
var besideRequests = []int{0, 1, 3, 8}

// requests is what short-request prints.
type requests struct {
	Requests    int       `json:"requests"`
	Behind      int       `json:"behind"` // due before the one before was done
	P50         float64   `json:"p50_ms"`
	P90         float64   `json:"p90_ms"`
	P99         float64   `json:"p99_ms"`
	P999        float64   `json:"p999_ms"`
	Max         float64   `json:"max_ms"`
	GPU         float64   `json:"gpu_p50_ms"` // first event to last
	GPU99       float64   `json:"gpu_p99_ms"`
	Percentiles []float64 `json:"percentiles_ms"` // 0 to 100, then 99.1, 99.2 to 100
	// The first that took more than 5 ms: when each was due, ns since 1970, and what it took, ms.
	Slow [][2]float64 `json:"slow,omitempty"`
}

// A requestCell is one latency tenant beside some batch tenants.
type requestCell struct {
	Native   bool              `json:"native"`
	Batch    int               `json:"batch_tenants"`
	Seconds  float64           `json:"seconds"`
	Requests requests          `json:"requests"`
	Rates    []float64         `json:"batch_rates,omitempty"`
	Sum      float64           `json:"batch_sum,omitempty"`
	Alone    float64           `json:"batch_alone,omitempty"` // one, natively
	Of       float64           `json:"batch_of_alone,omitempty"`
	Clock    float64           `json:"latency_percent_by_our_clock,omitempty"`
	Counters map[string]uint64 `json:"counters,omitempty"`
}

type priorityResult struct {
	PeriodUS int `json:"period_us"`
	Kernels  int `json:"kernels"`
	KernelUS int `json:"kernel_us"`
	// The part of the GPU's time that the latency tenant's requests take when
	// it is alone, percent.
	Own   float64        `json:"own_percent"`
	Cells []*requestCell `json:"-"` // a file of their own
}

// priorityStep measures short requests beside saturating tenants.
func (b *bench) priorityStep(ctx context.Context, _ string) error {
	load, beside := "gemm", besideRequests
	if b.simulated {
		load = "spin"
	}
	if b.simulated || b.cells.quick {
		beside = []int{0, 1, 3}
	}
	most := beside[len(beside)-1]
	p, err := b.pool(ctx, most, most)
	if err != nil {
		return err
	}
	if err := p.setShares(ctx); err != nil {
		return err
	}
	if err := p.quantum(ctx, longQuantum); err != nil {
		return err
	}
	if err := p.have(ctx, append(p.tenants[:most:most], p.natives[:most]...), same(load, 2*most)); err != nil {
		return err
	}
	if err := p.setShare(ctx, requestUser, share{Priority: "latency"}); err != nil {
		return err
	}
	r := priorityResult{PeriodUS: requestPeriodUS, Kernels: requestKernels, KernelUS: requestKernelUS}
	before, err := p.alone(ctx, p.natives[0], load)
	if err != nil {
		return err
	}
	var errs []error
	for _, n := range beside {
		for _, nat := range []bool{true, false} {
			c, err := b.requestCell(ctx, load, n, nat)
			if err != nil {
				errs = append(errs, fmt.Errorf("%d batch tenants, native %v: %w", n, nat, err))
				continue
			}
			r.Cells = append(r.Cells, c)
			if n == 0 && nat {
				r.Own = 100 * c.Requests.GPU * 1000 / requestPeriodUS
			}
		}
	}
	after, err := p.alone(ctx, p.natives[0], load)
	if err != nil {
		return err
	}
	held := len(errs) == 0
	for _, c := range r.Cells {
		if c.Alone = (before.Rate + after.Rate) / 2; c.Batch > 0 {
			c.Of = c.Sum / c.Alone
		}
		if !c.Native {
			held = held && c.Requests.P99 <= requestTarget && (c.Batch == 0 || c.Of >= batchTarget)
		}
		fmt.Println("  " + c.line())
	}
	fmt.Printf("  priority: the latency tenant's own work takes %.1f %% of the GPU's time; p99 at most %.1f ms and batch tenants at least %.0f %% of one alone: %s\n",
		r.Own, requestTarget, 100*batchTarget, holds(held))
	errs = append(errs, p.drop(ctx), b.savePriority(r))
	return errors.Join(errs...)
}

func (b *bench) savePriority(r priorityResult) error {
	cells := r.Cells
	r.Cells = nil
	return errors.Join(b.saveJSON("priority.json", r), saveCells(b.results, "priority-cells.json", cells))
}

func (b *bench) requestCell(ctx context.Context, load string, batch int, nat bool) (*requestCell, error) {
	p := b.shared
	workers := p.tenants[:batch]
	if nat {
		workers = p.natives[:batch]
	}
	length := 10 * time.Second
	if b.cells.quick || b.simulated {
		length = 1500 * time.Millisecond
	}
	s := soon(requestReady, length)
	s.lead = s.start - 1 // the batch tenants are in full swing by then
	c := &requestCell{Native: nat, Batch: batch, Seconds: length.Seconds()}
	var counts []counted
	bills, err := b.during(ctx, time.Second, func() error {
		said := make(chan error, 1)
		go func() { said <- b.requests(ctx, s, nat, &c.Requests) }()
		var err error
		counts, err = p.work(ctx, s, 0, workers, same(load, batch))
		return errors.Join(err, <-said)
	})
	if err != nil {
		return nil, err
	}
	for _, k := range counts {
		c.Rates = append(c.Rates, round(k.Rate, 2))
		c.Sum += k.Rate
	}
	if !nat {
		c.Counters = counters(bills)
		c.Clock = clockShare(bills, tenantOn{requestUser, 0}, s.start, s.end)
	}
	return c, nil
}

// requestArgs are short-request's: it begins at start, seconds of CLOCK_MONOTONIC (0: at once), and
// makes requests for so many seconds.
func requestArgs(start, length float64) []string {
	return []string{fmt.Sprintf("%.6f", start), fmt.Sprintf("%.3f", length),
		strconv.Itoa(requestPeriodUS), strconv.Itoa(requestKernels), strconv.Itoa(requestKernelUS)}
}

// requests runs the latency tenant.
func (b *bench) requests(ctx context.Context, s span, nat bool, into *requests) error {
	p := b.shared
	ctx, cancel := context.WithTimeout(ctx, requestReady+time.Duration((s.end-s.start)*float64(time.Second))+requestWithin)
	defer cancel()
	i := requestUser - firstUser
	if nat {
		i = -1
	}
	env, who, err := p.environ(i)
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, filepath.Join(p.dir, "short-request"), requestArgs(s.start, s.end-s.start)...)
	cmd.Env = append(cmd.Environ(), env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: who}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("short-request: %w: %s", err, strings.TrimSpace(stderr.String()))
	}
	return json.Unmarshal(out, into)
}

func (c *requestCell) line() string {
	how := "nvshare"
	if c.Native {
		how = "native"
	}
	line := fmt.Sprintf("short requests beside %d, %-7s p50 %6.2f  p99 %6.2f  p99.9 %6.2f  max %6.2f ms, %d behind", c.Batch, how,
		c.Requests.P50, c.Requests.P99, c.Requests.P999, c.Requests.Max, c.Requests.Behind)
	if c.Batch > 0 {
		line += fmt.Sprintf("; batch %.1f/s = %.2f %% of one alone", c.Sum, 100*c.Of)
	}
	if c.Counters["fences"] > 0 {
		line += fmt.Sprintf("; %d FENCES", c.Counters["fences"])
	}
	return line
}
