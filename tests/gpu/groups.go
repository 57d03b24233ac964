// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/nvshare/nvshare/cdi"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/tests/node"
)

// Members of an overlap group in pods. The other ways are processes without containers.
const (
	inPods     = "pods of a group"
	inPod      = "a pod"
	podsReport = 100 * time.Millisecond
)

// mpsBesideUsr: a group's pipe lies below /usr unless a container says otherwise, and these
// containers have the host's /usr, which nothing may be mounted on.
const mpsBesideUsr = api.MPSPipeEnv + "=/run/mps"

var podsOfGroup = map[string]string{"nvshare.com/gpu-overlap": "pods"}

// groupsInPods measures overlap groups whose members are pods: small kernels, and decoders.
func (b *bench) groupsInPods(ctx context.Context, work string) error {
	ctx, cancel := context.WithTimeout(ctx, 4*time.Minute)
	defer cancel()
	o := &overlapBench{bench: b, length: 4 * time.Second, r: overlapResult{Facts: map[string]string{}}}
	sim := ""
	if b.simulated {
		sim, o.length = node.SimGPU, time.Second
	}
	var err error
	if o.control, err = cdi.FindMPSControl(cdi.Options{SimDir: sim}); err != nil {
		return err
	}
	o.r.Control = o.control
	// As users have it by default; the node of the tests takes turns.
	if _, err := b.node.Ctl(ctx, "-S", "auto"); err != nil {
		return err
	}
	defer func() { _, _ = b.node.Ctl(context.WithoutCancel(ctx), "-S", "on") }()
	errs := []error{b.installSwap()}
	if o.chosen("groups, small kernels") {
		errs = append(errs, o.smallInPods(ctx))
	}
	if o.chosen("groups, decoders") && !b.simulated {
		errs = append(errs, o.decodersInPods(ctx, work))
	}
	return errors.Join(append(errs, b.saveJSON("groups-in-pods.json", o.r))...)
}

// smallInPods measures pods with kernels of 20 blocks beside the same programs under plain MPS.
func (o *overlapBench) smallInPods(ctx context.Context) error {
	const load = "20 blocks, 20 µs"
	alone := o.cell(ctx, load, native, 1, 20, 20)
	held, failed := true, alone.Error != ""
	for _, n := range []int{1, 2, 4, 8} {
		mps := o.cell(ctx, load, plainMPS, n, 20, 20)
		c := overlapCell{Load: load, Way: inPods, N: n}
		var err error
		if c.Rates, err = o.busyPods(ctx, n); err != nil {
			c.Error, failed = err.Error(), true
		}
		c.Sum = round(sumOf(c.Rates), 1)
		for _, c := range []*overlapCell{&mps, &c} {
			c.OfAlone = round(c.Sum/max(alone.Sum, 1), 3)
		}
		c.OfMPS = round(c.Sum/max(mps.Sum, 1), 3)
		held = held && c.OfMPS >= overlapTarget && (n != 4 || c.OfAlone >= smallTarget)
		o.r.Cells = append(o.r.Cells, mps, c)
		fmt.Printf("  %d pods of %s: %9.0f kernels/s, %.2f of one process alone, %.3f of plain MPS %s\n", n, load, c.Sum, c.OfAlone, c.OfMPS, c.Error)
	}
	fmt.Printf("  groups of pods: at least %.2f of plain MPS, four at least %.1f times one alone: %s\n", overlapTarget, smallTarget, holds(held))
	if failed {
		return errors.New("groups of pods: a row has no figure")
	}
	return nil
}

// busyPods runs n pods of one group, and returns the kernels per second of each while all run.
func (o *overlapBench) busyPods(ctx context.Context, n int) ([]float64, error) {
	var pods []*node.Pod
	defer func() {
		for _, p := range pods {
			_ = p.Remove(context.WithoutCancel(ctx))
		}
	}()
	annotations := map[string]string{"nvshare.com/gpu": "nvshare.com/gpu=0"}
	maps.Copy(annotations, podsOfGroup)
	for i := range n {
		args := append([]string{"cuda-busy"}, busyProgram(20, 20, time.Minute)[1:]...)
		p, err := o.node.RunPod(ctx, fmt.Sprintf("small-%d-of-%d", i, n), annotations, node.ContainerSpec{
			Args: append(args, "--report-ms", fmt.Sprint(podsReport.Milliseconds()))})
		if err != nil {
			return nil, err
		}
		pods = append(pods, p)
	}
	read := func(reports int) (all []podReport, err error) {
		for _, p := range pods {
			err := node.Until(ctx, "reports of "+p.Name, func() error {
				lines := strings.Split(strings.TrimSpace(p.Log()), "\n")
				var r podReport
				if err := json.Unmarshal([]byte(lines[len(lines)-1]), &r); err != nil || r.Elapsed == 0 || len(lines) < reports {
					return fmt.Errorf("it printed %q", lines)
				}
				all = append(all, r)
				return nil
			})
			if err != nil {
				return nil, err
			}
		}
		return all, nil
	}
	if _, err := read(3); err != nil { // all work
		return nil, err
	}
	from, err := read(3)
	if err != nil {
		return nil, err
	}
	select {
	case <-time.After(o.length):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	to, err := read(3)
	if err != nil {
		return nil, err
	}
	rates := make([]float64, n)
	for i := range rates {
		rates[i] = round(float64(to[i].Launches-from[i].Launches)/max(to[i].Elapsed-from[i].Elapsed, 0.001), 1)
	}
	return rates, nil
}

// A podReport is a line of cuda-busy.
type podReport struct {
	Launches uint64  `json:"launches"`
	Elapsed  float64 `json:"elapsed_s"`
}

// decodersInPods measures decoders in pods of a group beside as many under plain MPS; and one
// natively and in a pod of its own, for what a container costs. All processes exist during all
// windows, and those of one way work at a time.
func (o *overlapBench) decodersInPods(ctx context.Context, work string) error {
	const load, most = "decode", 3
	rounds := 4
	if o.cells.quick {
		rounds = 3
	}
	if err := o.startMPS(ctx); err != nil {
		return err
	}
	defer o.stopMPS()
	m, err := o.matrixOfPods(work)
	if err != nil {
		return err
	}
	of := map[string][]*worker{}
	var pods []*node.Pod
	defer func() {
		o.quit(slices.Concat(of[native], of[plainMPS], of[inPod], of[inPods]))
		for _, p := range pods {
			_ = p.Remove(context.WithoutCancel(ctx))
		}
	}()
	start := func(way string, i int) error {
		if way == native || way == plainMPS {
			w, err := o.worker(ctx, way, i, nil)
			if err == nil {
				of[way] = append(of[way], w)
			}
			return err
		}
		name, annotations, env := "decoder", podsOfGroup, []string{mpsBesideUsr}
		if way == inPod {
			name, annotations, env = "single", nil, nil
		}
		// As the processes without containers have them, and no CUBLAS_WORKSPACE_CONFIG, which
		// the matrix sets: with it a small product costs PyTorch's CPU side 48 µs, else 12.
		for _, e := range os.Environ() {
			if strings.HasPrefix(e, "OMP_") || strings.HasPrefix(e, "MKL_") || strings.HasPrefix(e, "PYTORCH_") {
				env = append(env, e)
			}
		}
		w, pod, err := o.startPod(ctx, work, m, loadGroup{framework: "torch", allocator: "default", backend: "programs"}, name, i, annotations, env)
		if pod != nil {
			pods = append(pods, pod)
		}
		if w != nil {
			of[way] = append(of[way], w)
		}
		each := len(o.processors) / mostDecoders
		if err != nil || each == 0 {
			return err
		}
		// containerd starts it, so that it inherits no set of processors from here.
		return bind(w, o.processors.part(i, each))
	}
	for i := range most {
		ways := []string{plainMPS, inPods}
		if i == 0 {
			ways = append(ways, native, inPod)
		}
		if i > 0 && o.cells.quick {
			break
		}
		for _, way := range ways {
			if err := start(way, i); err != nil {
				return err
			}
		}
	}
	all := slices.Concat(of[native], of[plainMPS], of[inPod], of[inPods])
	if err := errors.Join(together(all, func(w *worker) error { return prepare(ctx, w, load) })...); err != nil {
		return err
	}
	first := len(o.r.Cells)
	for _, row := range []struct {
		n    int
		ways []string
	}{{most, []string{plainMPS, inPods}}, {1, []string{native, inPod, plainMPS, inPods}}} {
		if row.n > len(of[plainMPS]) {
			continue
		}
		cells, err := o.inTurn(ctx, row.ways, of, load, row.n, rounds)
		if err != nil {
			return err
		}
		mps := 0.0
		for _, c := range cells {
			fmt.Printf("  decoders: %d, %-15s median of %.2f steps/s; CPU %.2f s user, %.2f s system", row.n, c.Way, c.Rounds, c.User, c.System)
			switch c.Way {
			case plainMPS:
				mps = c.Sum
			case inPods:
				c.OfMPS = round(c.Sum/max(mps, 0.001), 3)
				fmt.Printf("; %.3f of plain MPS: %s", c.OfMPS, holds(c.OfMPS >= overlapTarget))
			}
			fmt.Println()
			o.r.Cells = append(o.r.Cells, c)
		}
	}
	decoders := o.r.Cells[first:]
	alone := decoders[slices.IndexFunc(decoders, func(c overlapCell) bool { return c.Way == native })].Sum
	for i := range decoders {
		decoders[i].OfAlone = round(decoders[i].Sum/max(alone, 0.001), 3)
	}
	status, err := o.node.Ctl(ctx, "status")
	return errors.Join(err, o.save("decoders-in-pods.txt", status))
}
