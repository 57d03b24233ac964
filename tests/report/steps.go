// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/nvshare/nvshare/tests/quantile"
)

func preempt(data []byte) (*section, error) {
	type requests struct {
		P99 float64 `json:"p99_ms"`
	}
	r, err := decoded[struct {
		Limit float64  `json:"limit_percent"`
		Alone requests `json:"requests_alone"`
		Cells []struct {
			Kernel    int      `json:"kernel_ms"`
			HandOvers int      `json:"handovers"`
			Preempted int      `json:"preempted"`
			P50       float64  `json:"handover_p50_ms"`
			P99       float64  `json:"handover_p99_ms"`
			Max       float64  `json:"handover_max_ms"`
			Requests  requests `json:"requests"`
			Limited   float64  `json:"used_percent_with_limit"`
		} `json:"cells"`
	}](data)
	if err != nil {
		return nil, err
	}
	s := &section{Title: "Beside kernels that outlast turns",
		About: "Milliseconds from the revoke of the kernels' tenant to the grant of the other, with turns of 50 ms; a drain that is cut ends without the kernel. Then short requests of a latency tenant, and what the kernels' tenant used under a core limit.",
		Head:  []string{"kernels", "hand-overs", "of these cut", "p50 ms", "p99 ms", "longest ms", "requests, p99 ms (alone)", "used, under a limit"}}
	for _, c := range r.Cells {
		s.Rows = append(s.Rows, []string{fmt.Sprintf("%d ms", c.Kernel), fmt.Sprint(c.HandOvers), fmt.Sprint(c.Preempted), fmt.Sprintf("%.2f", c.P50), fmt.Sprintf("%.2f", c.P99), fmt.Sprintf("%.2f", c.Max),
			fmt.Sprintf("%.2f (%.2f)", c.Requests.P99, r.Alone.P99), fmt.Sprintf("%.2f of %.0f %%", c.Limited, r.Limit)})
	}
	return s, nil
}

func shares(data []byte) (*section, error) {
	cells, err := decoded[[]struct {
		Load    string `json:"load"`
		Case    string `json:"case"`
		Tenants []struct {
			Work  []float64 `json:"work"`
			Clock float64   `json:"clock"`
		} `json:"tenants"`
		Worst float64 `json:"worst_error"`
		Clock float64 `json:"worst_error_by_our_clock"`
	}](data)
	if err != nil {
		return nil, err
	}
	s := &section{Title: "Shares",
		About: "Percent of the GPU that each tenant got: by its work in windows of 5 s, of what it does alone (the median), and by the GPU time that it was billed. The errors are the worst of all windows and tenants, in percentage points.",
		Head:  []string{"load", "case", "by work, %", "billed, %", "error by work", "error of what was billed"}}
	for _, c := range cells {
		var work, billed []float64
		for _, t := range c.Tenants {
			if len(t.Work) > 0 {
				work = append(work, quantile.Of(t.Work, 0.5))
			}
			billed = append(billed, t.Clock)
		}
		s.Rows = append(s.Rows, []string{c.Load, c.Case, figures(work), figures(billed), fmt.Sprintf("%.2f", c.Worst), fmt.Sprintf("%.2f", c.Clock)})
	}
	return s, nil
}

func memory(data []byte) (*section, error) {
	r, err := decoded[struct {
		Limit float64 `json:"limit_bytes"`
		Cases []struct {
			Name   string `json:"name"`
			Report struct {
				Before    map[string]json.RawMessage `json:"before"` // by interface; a text if it has no answer
				Allocated float64                    `json:"allocated"`
			} `json:"report"`
			Error string `json:"error"`
		} `json:"cases"`
		Problems []string `json:"problems"`
	}](data)
	if err != nil {
		return nil, err
	}
	s := &section{Title: "Memory limits",
		About: "MiB that a process is told of at its start, by the driver, NVML, nvidia-smi and its framework (the least and the most that one of them says), and what it is given until it is refused more.",
		Head:  []string{"case, the limit", "told there are", "told are free", "given"}}
	for _, c := range r.Cases {
		var totals, free []float64
		for _, text := range c.Report.Before {
			var says struct{ Total, Free *float64 }
			if json.Unmarshal(text, &says) != nil {
				continue
			}
			if says.Total != nil {
				totals = append(totals, *says.Total)
			}
			if says.Free != nil {
				free = append(free, *says.Free)
			}
		}
		name, given := c.Name, "-"
		if strings.HasPrefix(name, "limit, ") {
			name += fmt.Sprintf(": %.0f MiB", r.Limit/(1<<20))
		}
		if c.Report.Allocated > 0 {
			given = fmt.Sprintf("%.0f", c.Report.Allocated/(1<<20))
		}
		if c.Error != "" {
			given = failed(c.Error)
		}
		if len(totals) > 0 || c.Error != "" { // else it only holds memory
			s.Rows = append(s.Rows, []string{name, mebibytes(totals), mebibytes(free), given})
		}
	}
	for _, p := range r.Problems {
		s.Rows = append(s.Rows, []string{failed(p), "-", "-", "-"})
	}
	return s, nil
}

// mebibytes is the range of sizes in bytes.
func mebibytes(v []float64) string {
	if len(v) == 0 {
		return "-"
	}
	least, most := slices.Min(v)/(1<<20), slices.Max(v)/(1<<20)
	if math.Round(least) == math.Round(most) {
		return fmt.Sprintf("%.0f", most)
	}
	return fmt.Sprintf("%.0f to %.0f", least, most)
}

func alloc(data []byte) (*section, error) {
	type spread struct{ Median float64 }
	r, err := decoded[struct {
		Median map[string]map[string]float64 `json:"median_ns"`
		Of     map[string]map[string]float64 `json:"of_native"`
		Torch  []struct {
			Allocator string               `json:"allocator"`
			Load      string               `json:"load"`
			Rates     map[string][]float64 `json:"rates"`
			Of        map[string]*spread   `json:"of_native"`
			Problem   string               `json:"problem"`
		} `json:"torch"`
	}](data)
	if err != nil {
		return nil, err
	}
	s := &section{Title: "Allocating memory",
		About: "The time of calls of the driver, natively, and with the shim and with swapping of that; the rates of PyTorch loads, by the medians of windows, the same way.",
		Head:  []string{"what", "native", "with the shim, of native", "with swapping, of native"}}
	for _, call := range []struct{ key, name string }{{"alloc", "cuMemAlloc"}, {"free", "cuMemFree"}, {"both", "both, by turns"}} {
		for _, size := range []struct {
			bytes int
			name  string
		}{{4 << 10, "4 KiB"}, {2 << 20, "2 MiB"}, {1 << 30, "1 GiB"}} {
			key := fmt.Sprintf("%s_%d_ns", call.key, size.bytes)
			if ns, ok := r.Median["native"][key]; ok {
				s.Rows = append(s.Rows, []string{call.name + ", " + size.name, fmt.Sprintf("%.0f ns", ns), percent(r.Of["shim"][key]), percent(r.Of["swap"][key])})
			}
		}
	}
	for _, t := range r.Torch {
		row := []string{fmt.Sprintf("PyTorch, %s, allocator %s", t.Load, t.Allocator), "-", "-", "-"}
		if t.Problem != "" {
			row[1] = failed(t.Problem)
		} else if rates := t.Rates["native"]; len(rates) > 0 {
			row[1] = fmt.Sprintf("%.1f steps/s", quantile.Of(rates, 0.5))
		}
		for i, way := range []string{"shim", "swap"} {
			if of := t.Of[way]; of != nil {
				row[2+i] = percent(of.Median)
			}
		}
		s.Rows = append(s.Rows, row)
	}
	return s, nil
}

func twoGPUs(data []byte) (*section, error) {
	type counted struct {
		Rate float64 `json:"rate"`
		Gap  float64 `json:"longest_gap_s"`
	}
	runs, err := decoded[[]struct {
		Backend string `json:"backend"`
		Windows []struct {
			Case    string                        `json:"case"`
			Tenants map[string]map[string]counted `json:"tenants"` // process, load@ordinal
		} `json:"windows"`
		Problems []string `json:"problems"`
	}](data)
	if err != nil {
		return nil, err
	}
	s := &section{Title: "Processes that use two GPUs",
		About: "The use of a GPU is the sum of the rates of what runs on it, relative to one process alone there. The longest pause is between two steps of one process, in seconds.",
		Head:  []string{"case", "use of GPU 0", "use of GPU 1", "longest pause on GPU 0, s", "on GPU 1, s"}}
	for _, r := range runs {
		var alone [2]float64
		for _, w := range r.Windows {
			var use, pause [2]float64
			for process, loads := range w.Tenants {
				for load, c := range loads {
					gpu := 0
					if process == "c" || strings.HasSuffix(load, "@1") { // c sees only GPU 1
						gpu = 1
					}
					use[gpu], pause[gpu] = use[gpu]+c.Rate, max(pause[gpu], c.Gap)
				}
			}
			row := []string{w.Case + " (" + r.Backend + ")", "-", "-", "-", "-"}
			for gpu := range 2 {
				if alone[gpu] == 0 { // the first windows are what the others compare with
					alone[gpu] = use[gpu]
				}
				if use[gpu] > 0 {
					row[1+gpu], row[3+gpu] = percent(use[gpu]/alone[gpu]), fmt.Sprintf("%.3f", pause[gpu])
				}
			}
			s.Rows = append(s.Rows, row)
		}
		for _, p := range r.Problems {
			s.Rows = append(s.Rows, []string{failed(p), "-", "-", "-", "-"})
		}
	}
	return s, nil
}

func starts(data []byte) (*section, error) {
	r, err := decoded[struct {
		Tenants int       `json:"tenants"`
		Seconds []float64 `json:"seconds"`
	}](data)
	if err != nil {
		return nil, err
	}
	s := &section{Title: "Programs that start together",
		About: "Seconds until PyTorch programs that start at the same time, with a native one beside them, have all used the GPU.",
		Head:  []string{"programs", "times", "p50 s", "longest s"}}
	if len(r.Seconds) > 0 {
		s.Rows = append(s.Rows, []string{fmt.Sprint(r.Tenants), fmt.Sprint(len(r.Seconds)), fmt.Sprintf("%.1f", quantile.Of(r.Seconds, 0.5)), fmt.Sprintf("%.1f", slices.Max(r.Seconds))})
	}
	return s, nil
}
