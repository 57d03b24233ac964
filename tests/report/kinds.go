// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
)

func percent(v float64) string { return fmt.Sprintf("%.1f %%", 100*v) }

// decoded reads a file whose shape is T.
func decoded[T any](data []byte) (v T, err error) {
	err = json.Unmarshal(data, &v)
	return v, err
}

func programs(data []byte) (*section, error) {
	type ran struct {
		Way string  `json:"way"`
		Sum float64 `json:"sum"`
	}
	r, err := decoded[struct {
		Mixes []struct {
			Programs []string `json:"programs"`
			Runs     []ran    `json:"runs"`
		} `json:"mixes"`
	}](data)
	if err != nil {
		return nil, err
	}
	s := &section{Title: "Real programs that share a GPU",
		About: "The sum of the tenants' rates, each relative to the same program alone, natively, in the same run. More is better; `native` is the driver's own time slicing, the others are modes of nvshare.",
		Head:  []string{"programs"}, bars: &chart{unit: "of one alone"}}
	var ways []string
	for _, m := range r.Mixes {
		for _, run := range m.Runs {
			if !slices.Contains(ways, run.Way) {
				ways = append(ways, run.Way)
			}
		}
	}
	s.Head = append(s.Head, ways...)
	s.bars.series = ways
	for _, m := range r.Mixes {
		name := strings.Join(m.Programs, " + ")
		row, values := []string{name}, make([]float64, len(ways))
		for i, w := range ways {
			text := ""
			if j := slices.IndexFunc(m.Runs, func(run ran) bool { return run.Way == w }); j >= 0 {
				values[i] = m.Runs[j].Sum
				text = fmt.Sprintf("%.2f", values[i])
			}
			row = append(row, text)
		}
		s.Rows = append(s.Rows, row)
		s.bars.add(name, values...)
	}
	return s, nil
}

func makespan(data []byte) (*section, error) {
	r, err := decoded[struct {
		GPU   float64 `json:"gpu_mib"`
		Cases []struct {
			Kind     string  `json:"kind"`
			Promised float64 `json:"promised_of_gpu"`
			Tenants  int     `json:"tenants"`
			Memory   float64 `json:"tenant_mib"`
			Quantum  string  `json:"quantum"`
			Faster   float64 `json:"faster"`
		} `json:"cases"`
	}](data)
	if err != nil {
		return nil, err
	}
	s := &section{Title: "More memory than the GPU has",
		About: "Jobs whose memory does not fit together. The figure is the time that they take one after the other, divided by the time that they take together with nvshare: above 1 is better.",
		Head:  []string{"jobs use", "promised, of the GPU", "tenants", "quantum", "faster"}, bars: &chart{unit: "times as fast", series: []string{"together"}}}
	for _, c := range r.Cases {
		s.Rows = append(s.Rows, []string{c.Kind, fmt.Sprintf("%.3g", c.Promised), fmt.Sprintf("%d of %.3g GiB", c.Tenants, c.Memory/1024), c.Quantum, fmt.Sprintf("%.2f", c.Faster)})
		s.bars.add(fmt.Sprintf("%s, %.3g×, %d tenants, tq %s", c.Kind, c.Promised, c.Tenants, c.Quantum), c.Faster)
	}
	return s, nil
}

func priority(data []byte) (*section, error) {
	cells, err := decoded[[]struct {
		Native   bool    `json:"native"`
		Batch    int     `json:"batch_tenants"`
		Of       float64 `json:"batch_of_alone"`
		Requests struct {
			All    int     `json:"requests"`
			Behind int     `json:"behind"`
			P50    float64 `json:"p50_ms"`
			P99    float64 `json:"p99_ms"`
		} `json:"requests"`
	}](data)
	if err != nil {
		return nil, err
	}
	s := &section{Title: "Short requests beside tenants that saturate the GPU",
		About: "Milliseconds of a request, and what the other tenants get, of one alone. A request is late when the one before had not ended when it was due.",
		Head:  []string{"beside", "with", "p50 ms", "p99 ms", "late", "the others, of one alone"}}
	for _, c := range cells {
		with, others := "nvshare", "-"
		if c.Native {
			with = "the driver alone"
		}
		if c.Batch > 0 {
			others = percent(c.Of)
		}
		s.Rows = append(s.Rows, []string{fmt.Sprint(c.Batch), with, fmt.Sprintf("%.2f", c.Requests.P50), fmt.Sprintf("%.2f", c.Requests.P99), fmt.Sprintf("%d of %d", c.Requests.Behind, c.Requests.All), others})
	}
	return s, nil
}

func containers(data []byte) (*section, error) {
	r, err := decoded[struct {
		Alone   float64 `json:"native_alone_products_per_s"`
		Windows []struct {
			Case    string  `json:"case"`
			Quantum string  `json:"quantum"`
			Rate    float64 `json:"products_per_s"`
			Of      float64 `json:"of_alone"`
		} `json:"windows"`
	}](data)
	if err != nil {
		return nil, err
	}
	s := &section{Title: "Two PyTorch containers",
		About: "Products of large matrices a second, of all containers together, and of one process alone without nvshare.",
		Head:  []string{"case", "quantum", "products/s", "of one alone"}}
	for _, w := range r.Windows {
		s.Rows = append(s.Rows, []string{w.Case, w.Quantum, fmt.Sprintf("%.1f", w.Rate), percent(w.Of)})
	}
	return s, nil
}

func tenants(data []byte) (*section, error) {
	cells, err := decoded[[]struct {
		Load    string  `json:"load"`
		Quantum string  `json:"quantum"`
		Tenants int     `json:"tenants"`
		Of      float64 `json:"of_native_alone"`
		Spread  float64 `json:"max_by_min"`
	}](data)
	if err != nil {
		return nil, err
	}
	s := &section{Title: "Many tenants",
		About: "What tenants that saturate the GPU get done together, of one alone; and the rate of the best tenant divided by the worst's.",
		Head:  []string{"load", "with", "tenants", "of one alone", "best by worst"}, bars: &chart{unit: "of one alone", series: []string{"together"}}}
	for _, c := range cells {
		with := "the driver alone"
		if c.Quantum != "" {
			with = "turns of " + c.Quantum
		}
		s.Rows = append(s.Rows, []string{c.Load, with, fmt.Sprint(c.Tenants), percent(c.Of), fmt.Sprintf("%.2f", c.Spread)})
		s.bars.add(fmt.Sprintf("%s, %s, %d", c.Load, with, c.Tenants), c.Of)
	}
	return s, nil
}

func matrix(data []byte) (*section, error) {
	type spread struct{ Median, Q1, Q3 float64 }
	type pair struct {
		Quantum string  `json:"quantum"`
		Of      float64 `json:"of_native"`
	}
	r, err := decoded[struct {
		Options struct {
			Peer string `json:"peer"`
		} `json:"options"`
		Cells []struct {
			Framework, Allocator, Load, Skipped string
			Shim                                *spread `json:"shim_of_native"`
			Peer                                *spread `json:"peer_of_native"`
			Beside                              []pair  `json:"beside"`
			Native                              *pair   `json:"native_pair"`
		} `json:"cells"`
	}](data)
	if err != nil {
		return nil, err
	}
	s := &section{Title: "Kinds of work",
		About: "One process with the shim, of native: the median of paired runs, and the quartiles. Then two processes together, of one alone, natively and by turns.",
		Head:  []string{"work", "with the shim", "two, the driver alone", "two, in turns"}}
	if r.Options.Peer != "" {
		s.Head = append(s.Head, "with the peer `"+r.Options.Peer[strings.LastIndex(r.Options.Peer, "/")+1:]+"`")
	}
	text := func(s *spread) string {
		if s == nil {
			return "-"
		}
		return fmt.Sprintf("%s (%s to %s)", percent(s.Median), percent(s.Q1), percent(s.Q3))
	}
	for _, c := range r.Cells {
		if c.Skipped != "" {
			continue
		}
		native, turns := "-", []string{}
		if c.Native != nil {
			native = percent(c.Native.Of)
		}
		for _, p := range c.Beside {
			turns = append(turns, p.Quantum+": "+percent(p.Of))
		}
		row := []string{c.Framework + " " + c.Allocator + " " + c.Load, text(c.Shim), native, strings.Join(turns, ", ")}
		if r.Options.Peer != "" {
			row = append(row, text(c.Peer))
		}
		s.Rows = append(s.Rows, row)
	}
	return s, nil
}

func handover(data []byte) (*section, error) {
	r, err := decoded[struct {
		Cases []struct {
			Quantum  string  `json:"quantum"`
			Kernel   float64 `json:"kernel_us"`
			Count    int     `json:"handovers"`
			Overlaps int     `json:"overlaps"`
			P50      float64 `json:"p50_ns"`
			P99      float64 `json:"p99_ns"`
			Busy     float64 `json:"busy"`
		} `json:"cases"`
	}](data)
	if err != nil {
		return nil, err
	}
	s := &section{Title: "Hand-over",
		About: "Milliseconds from the end of one tenant's last kernel to the start of the other's first, by the GPU's own clock.",
		Head:  []string{"quantum", "kernels", "hand-overs", "overlaps", "p50 ms", "p99 ms", "GPU busy"}}
	for _, c := range r.Cases {
		s.Rows = append(s.Rows, []string{c.Quantum, fmt.Sprintf("%.4g µs", c.Kernel), fmt.Sprint(c.Count), fmt.Sprint(c.Overlaps), fmt.Sprintf("%.2f", c.P50/1e6), fmt.Sprintf("%.2f", c.P99/1e6), percent(c.Busy)})
	}
	return s, nil
}

func swap(data []byte) (*section, error) {
	type spread struct{ Median float64 }
	cases, err := decoded[[]struct {
		Name     string  `json:"name"`
		Tenant   float64 `json:"tenant_mib"`
		GPU      float64 `json:"gpu_mib"`
		Gap      spread  `json:"gap"`
		Limit    spread  `json:"of_limit"`
		Exchange spread  `json:"of_exchange"`
	}](data)
	if err != nil {
		return nil, err
	}
	s := &section{Title: "Two tenants change places in memory",
		About: "Seconds from the last kernel of one to the first of the other; and divided by what the link needs, and by what two bare processes need for the same exchange.",
		Head:  []string{"case", "tenants", "GPU", "switch s", "of the link's time", "of bare processes"}}
	for _, c := range cases {
		s.Rows = append(s.Rows, []string{c.Name, fmt.Sprintf("2 of %.4g GiB", c.Tenant/1024), fmt.Sprintf("%.4g GiB", c.GPU/1024), fmt.Sprintf("%.2f", c.Gap.Median), fmt.Sprintf("%.2f", c.Limit.Median), fmt.Sprintf("%.2f", c.Exchange.Median)})
	}
	return s, nil
}

func launch(data []byte) (*section, error) {
	r, err := decoded[struct {
		Native map[string]float64 `json:"native_median"`
		Added  map[string]float64 `json:"added_median_of_pairs"`
	}](data)
	if err != nil {
		return nil, err
	}
	s := &section{Title: "What the shim adds to a call of the real driver",
		About: "Nanoseconds; the median of paired runs.",
		Head:  []string{"call", "native ns", "added ns"}}
	for _, name := range []string{"launch", "launch_ex", "copy", "copy_uva", "event", "event_query", "alloc", "rt_launch", "rt_launch_ex", "rt_copy"} {
		if native, ok := r.Native[name+"_ns"]; ok {
			s.Rows = append(s.Rows, []string{name, fmt.Sprintf("%.0f", native), fmt.Sprintf("%+.0f", r.Added[name+"_ns"])})
		}
	}
	return s, nil
}

// calls are tests/bench's, which need no GPU.
func calls(data []byte) (*section, error) {
	type figures struct {
		Native float64                  `json:"native_ns"`
		Added  struct{ Median float64 } `json:"added_ns"`
	}
	r, err := decoded[struct {
		Date, Commit, CPU, Kernel string
		Cores                     int
		Peers                     []string
		Results                   []struct {
			Name    string
			Calls   []string
			Figures map[string]map[string]figures
		}
	}](data)
	if err != nil {
		return nil, err
	}
	s := &section{Title: "What the shim adds to a call of a driver that does nothing",
		About: "Nanoseconds; the median of paired runs. This needs no GPU.",
		Run:   run{Date: r.Date, Commit: r.Commit, Kernel: r.Kernel, Cores: fmt.Sprintf("%d, %s", r.Cores, r.CPU)},
		Head:  []string{"scenario", "call", "native ns", "shim, added ns"}}
	// tests/bench names the columns: shim, and a number and a name for each peer.
	libraries := []string{"shim"}
	for i := range r.Peers {
		if len(r.Results) == 0 {
			break
		}
		for name := range r.Results[0].Figures {
			if strings.HasPrefix(name, fmt.Sprintf("%d:", i+1)) {
				libraries = append(libraries, name)
				s.Head = append(s.Head, fmt.Sprintf("peer `%s`, added ns", name))
			}
		}
	}
	for _, result := range r.Results {
		for _, call := range result.Calls {
			row := []string{result.Name, call, ""}
			for _, library := range libraries {
				f, ok := result.Figures[library][call]
				if !ok {
					row = append(row, "-")
					continue
				}
				row[2] = fmt.Sprintf("%.1f", f.Native)
				row = append(row, fmt.Sprintf("%+.1f", f.Added.Median))
			}
			s.Rows = append(s.Rows, row)
		}
	}
	return s, nil
}
