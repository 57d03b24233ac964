// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

const (
	memoryWithin  = 3 * time.Minute // the step
	mib           = 1 << 20
	memoryLimitMB = 6144
	memoryHeldMB  = 2048 // by another process of the same account
)

// told is one answer to "how much memory is there"; -1: it says nothing of it.
type told struct {
	Total, Free, Used float64
}

// memoryCase is one run of memory.py and what it reported.
type memoryCase struct {
	Name   string         `json:"name"`
	Report map[string]any `json:"report,omitempty"`
	Error  string         `json:"error,omitempty"`

	args   []string
	env    []string
	who    string
	cmd    *exec.Cmd
	in     io.WriteCloser
	report chan error
}

type memoryResult struct {
	Limit    int64         `json:"limit_bytes"`
	Cases    []*memoryCase `json:"cases"`
	Status   any           `json:"status_under_limit,omitempty"`
	Checks   []string      `json:"checks"`
	Problems []string      `json:"problems,omitempty"`
}

func (r *memoryResult) check(ok bool, format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	if ok {
		r.Checks = append(r.Checks, text)
	} else {
		r.Problems = append(r.Problems, text)
	}
}

// memoryLimit is the step: what processes are told and given without the
// shim, with it, and with a limit on their account.
func (b *bench) memoryLimit(ctx context.Context, work string) error {
	ctx, cancel := context.WithTimeout(ctx, memoryWithin)
	defer cancel()
	stderr := filepath.Join(work, "private", "memory.stderr")
	framework := "torch"
	if b.simulated {
		framework = "driver"
	}
	holder := &memoryCase{Name: "another process holds 2 GiB", args: []string{"driver", "hold", fmt.Sprint(memoryHeldMB)}, who: "holder"}
	jax := &memoryCase{Name: "limit, JAX", args: []string{"jax"}, who: "jax"}
	limited := []*memoryCase{{Name: "limit, driver API", args: []string{"driver", "exhaust"}, who: "driver"},
		{Name: "limit, a pool keeps what is freed", args: []string{"driver", "pool"}, who: "pool"}}
	unlimited := []*memoryCase{
		{Name: "native", args: []string{framework}, who: native},
		{Name: "shim, no limit", args: []string{framework}, who: shim1},
	}
	beside := &memoryCase{Name: "limit, beside the other process", args: []string{framework, "exhaust"}, who: "beside"}
	after := &memoryCase{Name: "limit removed", args: []string{"driver"}, who: "after"}
	if !b.simulated {
		limited = append(limited,
			&memoryCase{Name: "limit, PyTorch", args: []string{"torch", "exhaust"}, who: "torch"},
			&memoryCase{Name: "limit, PyTorch, expandable segments", args: []string{"torch", "exhaust"}, who: "expandable",
				env: []string{"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"}},
			&memoryCase{Name: "limit, PyTorch, cudaMallocAsync", args: []string{"torch", "exhaust"}, who: "async",
				env: []string{"PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync"}},
			jax)
	}
	r := &memoryResult{Limit: memoryLimitMB * mib}
	r.Cases = slices.Concat(unlimited, limited, []*memoryCase{holder, beside, after})
	// All import at once, and go on one by one.
	for _, c := range r.Cases {
		if err := c.start(ctx, b, stderr); err != nil {
			c.Error = err.Error()
		}
		defer c.end()
	}
	for _, c := range unlimited {
		c.finish(ctx)
		c.end()
	}
	if out, err := b.node.Ctl(ctx, "set", "--user", fmt.Sprint(os.Geteuid()), "--memory-limit", fmt.Sprintf("%dMi", memoryLimitMB)); err != nil {
		r.Problems = append(r.Problems, "set the limit: "+err.Error())
	} else {
		fmt.Println(strings.TrimSpace(out))
		for _, c := range limited {
			c.finish(ctx)
			c.end()
			r.limited(c, 0)
		}
		holder.finish(ctx)
		beside.finish(ctx)
		if out, err := b.node.Ctl(ctx, "-o", "json"); err == nil {
			r.Status = json.RawMessage(out)
		}
		if out, err := b.node.Ctl(ctx, "status"); err == nil {
			fmt.Println(out)
		}
		beside.end()
		holder.end()
		r.limited(beside, memoryHeldMB*mib)
		if _, err := b.node.Ctl(ctx, "set", "--user", fmt.Sprint(os.Geteuid()), "--memory-limit", "none"); err != nil {
			r.Problems = append(r.Problems, "remove the limit: "+err.Error())
		}
		after.finish(ctx)
		after.end()
		a, n := after.totals("before"), unlimited[0].totals("before")
		r.check(a["cuMemGetInfo"].Total == n["cuMemGetInfo"].Total && a["cuMemGetInfo"].Total > 0,
			"limit removed: cuMemGetInfo says %s, native %s", a["cuMemGetInfo"], n["cuMemGetInfo"])
	}
	for _, c := range r.Cases {
		c.print()
		if c.Error != "" {
			r.Problems = append(r.Problems, c.Name+": "+c.Error)
		}
	}
	for _, c := range r.Checks {
		fmt.Println("  ok      ", c)
	}
	for _, p := range r.Problems {
		fmt.Println("  PROBLEM ", p)
	}
	if data, err := os.ReadFile(stderr); err == nil && len(data) > 0 {
		if err := b.save("memory-stderr.txt", string(data)); err != nil {
			return err
		}
	}
	err := b.saveJSON("memory.json", r)
	if len(r.Problems) > 0 {
		err = errors.Join(err, fmt.Errorf("%d problems", len(r.Problems)))
	}
	return err
}

// limited checks what a process under the limit was told and given, when
// others of the account had used already.
func (r *memoryResult) limited(c *memoryCase, used float64) {
	if c.Error != "" {
		return
	}
	limit := float64(r.Limit)
	for _, when := range []string{"before", "with_1g", "full", "freed", "pooled"} {
		says := c.totals(when)
		for _, source := range slices.Sorted(maps.Keys(says)) {
			t := says[source]
			if strings.HasPrefix(source, "jax") {
				r.check(t.Total <= limit, "%s: %s: %s says %s", c.Name, when, source, t)
				continue
			}
			ok := t.Total == limit && t.Free <= limit-used
			if when == "with_1g" && c.Report["first"] == nil {
				ok = ok && t.Free <= limit-used-1024*mib && (t.Used < 0 || t.Used >= 1024*mib)
			}
			r.check(ok, "%s: %s: %s says %s", c.Name, when, source, t)
		}
	}
	switch c.args[len(c.args)-1] {
	case "pool":
		kept, _ := c.Report["kept"].(float64)
		left, _ := c.Report["left"].(float64)
		free := c.totals("pooled")["cuMemGetInfo"].Free
		r.check(kept >= 3072*mib && free >= 0 && free <= limit-used-1024*mib-kept,
			"%s: it keeps %.0f MiB, and %.0f are free", c.Name, kept/mib, free/mib)
		r.check(c.Report["beside"] == "allocated 4 GiB" && left < kept,
			"%s: beside it: %v; then it keeps %.0f MiB", c.Name, c.Report["beside"], left/mib)
		return
	case "exhaust":
	default:
		return
	}
	got, _ := c.Report["allocated"].(float64)
	refused, _ := c.Report["refused"].(map[string]any)
	r.check(refused != nil && got <= limit-used && got >= limit-used-1024*mib,
		"%s: given %.0f MiB, then refused: %v", c.Name, got/mib, refused["type"])
	r.check(c.Report["again"] == "allocated 1 GiB", "%s: after freeing: %v", c.Name, c.Report["again"])
}

func (t told) String() string {
	text := fmt.Sprintf("total %.0f MiB", t.Total/mib)
	if t.Free >= 0 {
		text += fmt.Sprintf(", free %.0f", t.Free/mib)
	}
	if t.Used >= 0 {
		text += fmt.Sprintf(", used %.0f", t.Used/mib)
	}
	return text
}

// totals is what each source said, of those that said a total.
func (c *memoryCase) totals(when string) map[string]told {
	all := map[string]told{}
	sources, _ := c.Report[when].(map[string]any)
	for source, v := range sources {
		said, _ := v.(map[string]any)
		number := func(name string) float64 {
			if n, ok := said[name].(float64); ok {
				return n
			}
			return -1
		}
		if t := (told{number("total"), number("free"), number("used")}); t.Total >= 0 {
			all[source] = t
		}
	}
	return all
}

func (c *memoryCase) print() {
	fmt.Printf("  %s\n", c.Name)
	for _, when := range []string{"before", "with_1g", "full", "freed", "pooled"} {
		sources, _ := c.Report[when].(map[string]any)
		says := c.totals(when)
		for _, source := range slices.Sorted(maps.Keys(sources)) {
			if t, ok := says[source]; ok {
				fmt.Printf("    %-8s %-34s %s\n", when, source, t)
			} else {
				fmt.Printf("    %-8s %-34s %v\n", when, source, sources[source])
			}
		}
	}
	for _, k := range []string{"first", "allocated", "refused", "again", "nvidia-smi processes", "nvml"} {
		if v := c.Report[k]; v != nil {
			fmt.Printf("    %s: %v\n", k, v)
		}
	}
}

func (c *memoryCase) start(ctx context.Context, b *bench, stderr string) error {
	log, err := os.OpenFile(stderr, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	c.cmd = exec.CommandContext(ctx, b.python, append([]string{"-B", b.script("memory.py")}, c.args...)...)
	c.cmd.Env = append(append(os.Environ(), c.env...), b.tenantEnv(c.who, "")...)
	c.cmd.Stderr = log
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if c.in, err = c.cmd.StdinPipe(); err != nil {
		return err
	}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := c.cmd.Start(); err != nil {
		return err
	}
	c.report = make(chan error, 1)
	go func() {
		line, err := bufio.NewReader(out).ReadBytes('\n')
		if err == nil {
			err = json.Unmarshal(line, &c.Report)
		}
		c.report <- err
	}()
	return nil
}

// finish lets it go on and waits for its report.
func (c *memoryCase) finish(ctx context.Context) {
	if c.Error != "" {
		return
	}
	if _, err := io.WriteString(c.in, "\n"); err != nil {
		c.Error = err.Error()
		return
	}
	select {
	case err := <-c.report:
		if err != nil {
			c.Error = "no report: " + err.Error() + " (see memory-stderr.txt)"
		}
	case <-ctx.Done():
		c.Error = ctx.Err().Error()
	case <-time.After(time.Minute):
		c.Error = "no report within a minute"
	}
}

// end lets it end, as a program ends.
func (c *memoryCase) end() {
	if c.cmd == nil || c.cmd.ProcessState != nil || c.in == nil {
		return
	}
	_ = c.in.Close()
	kill := time.AfterFunc(quitWithin, func() { _ = c.cmd.Process.Kill() })
	defer kill.Stop()
	if err := c.cmd.Wait(); err != nil && c.Error == "" {
		c.Error = "it ended with " + err.Error()
	}
}
