// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/nvshare/nvshare/tests/quantile"
)

func percent(v float64) string { return fmt.Sprintf("%.1f %%", 100*v) }

// decoded reads a file whose shape is T.
func decoded[T any](data []byte) (v T, err error) {
	err = json.Unmarshal(data, &v)
	return v, err
}

// An interval is a ratio with its 95 % interval. Early results have the ratio only.
type interval struct{ Ratio, Low, High float64 }

func (i *interval) UnmarshalJSON(data []byte) error {
	if json.Unmarshal(data, &i.Ratio) == nil {
		return nil
	}
	type plain interval
	return json.Unmarshal(data, (*plain)(i))
}

func (i *interval) String() string {
	switch {
	case i == nil:
		return "-"
	case i.High == 0:
		return fmt.Sprintf("%.2f", i.Ratio)
	}
	return fmt.Sprintf("%.2f (%.2f to %.2f)", i.Ratio, i.Low, i.High)
}

// figures are numbers of a cell, with two digits.
func figures(v []float64) string {
	var text []string
	for _, x := range v {
		text = append(text, fmt.Sprintf("%.2f", x))
	}
	return strings.Join(text, ", ")
}

// failed is what stands in the place of a result that could not be had.
func failed(problem string) string {
	first, _, _ := strings.Cut(problem, "\n")
	return "failed: " + strings.ReplaceAll(first, "|", "/")
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
			values[i] = math.NaN()
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

// servers compares the ways of a case with one server that had the same requests on the same GPU.
func servers(data []byte) (*section, error) {
	const one = "alone"
	type windows struct{ gpu, load, way string }
	tokens := map[windows][]float64{}
	at := map[string]string{} // the GPU of a case's ways
	var ways, loads []string
	var replays []replay
	for line := range bytes.Lines(data) {
		r, err := decoded[struct {
			GPU    string  `json:"gpu"`
			Case   string  `json:"case"`
			Way    string  `json:"way"`
			Tokens float64 `json:"tokens_per_s"`
			Shares struct {
				Way string `json:"way"`
			} `json:"shares"`
			Replay *recorded `json:"replay"`
		}](line)
		if err != nil {
			return nil, err
		}
		if r.Case == "" { // it says why a way has none
			continue
		}
		w := windows{r.GPU, r.Case, r.Way}
		tokens[w] = append(tokens[w], r.Tokens)
		played := func(p replay) bool { return p.Case == r.Case && p.Way == r.Way }
		if r.Replay != nil && !slices.ContainsFunc(replays, played) { // several GPUs may have one server each
			replays = append(replays, r.Replay.replay(r.Case, r.Way, r.Shares.Way))
		}
		if r.Way == one {
			continue
		}
		if !slices.Contains(ways, r.Way) {
			ways = append(ways, r.Way)
		}
		if !slices.Contains(loads, r.Case) {
			loads = append(loads, r.Case)
		}
		at[r.Case+" "+r.Way] = r.GPU
	}
	s := &section{Title: "Servers of language models",
		About: "Tokens per second of all servers together, relative to one server that has the GPU and the same requests: medians of windows. A case is the number of requests in flight; p: they come as a Poisson process; s: short prompts.",
		Head:  append([]string{"case"}, ways...), bars: &chart{unit: "of one server", series: ways}}
	slices.SortFunc(loads, func(a, b string) int { // several GPUs have some each
		return cmp.Or(cmp.Compare(number(a), number(b)), strings.Compare(a, b))
	})
	for _, load := range loads {
		row, values := []string{load}, make([]float64, len(ways))
		for i, way := range ways {
			gpu := at[load+" "+way]
			got, of := tokens[windows{gpu, load, way}], tokens[windows{gpu, load, one}]
			values[i] = math.NaN()
			text := "-"
			if len(got) > 0 && len(of) > 0 {
				values[i] = quantile.Of(got, 0.5) / quantile.Of(of, 0.5)
				text = percent(values[i])
			}
			row = append(row, text)
		}
		s.Rows = append(s.Rows, row)
		s.bars.add(load, values...)
		for _, p := range replays { // others are of one server with a part of the load
			if p.Case == load {
				s.replays = append(s.replays, p)
			}
		}
	}
	return s, nil
}

// number is what a text begins with.
func number(text string) (n int) {
	_, _ = fmt.Sscanf(text, "%d", &n)
	return n
}

func alone(data []byte) (*section, error) {
	cells, err := decoded[[]struct {
		Program   string      `json:"program"`
		Way       string      `json:"way"`
		Native    [][]float64 `json:"native"`
		Ratio     *interval   `json:"shim_of_native"`
		NativeCPU float64     `json:"native_cpu_ms"`
		ShimCPU   float64     `json:"shim_cpu_ms"`
	}](data)
	if err != nil {
		return nil, err
	}
	s := &section{Title: "Real programs that have the GPU to themselves",
		About: "The rate of processes with the shim, relative to native ones of the same program in the same windows, with a 95 % interval: 1 is no loss. CPU time is of a step, in milliseconds.",
		Head:  []string{"program", "way", "windows of each", "with the shim, of native", "CPU ms, native", "CPU ms, with the shim"},
		bars:  &chart{unit: "of native", series: []string{"with the shim"}}}
	for _, c := range cells {
		windows := 0
		for _, round := range c.Native {
			windows += len(round)
		}
		way := c.Way
		if way == "" {
			way = "not recorded"
		}
		s.Rows = append(s.Rows, []string{c.Program, way, fmt.Sprint(windows), c.Ratio.String(), fmt.Sprintf("%.2f", c.NativeCPU), fmt.Sprintf("%.2f", c.ShimCPU)})
		if c.Ratio != nil {
			s.bars.add(c.Program+", "+way, c.Ratio.Ratio)
		}
	}
	return s, nil
}

func oversub(data []byte) (*section, error) {
	cases, err := decoded[[]struct {
		Programs []string      `json:"programs"`
		GPU      float64       `json:"gpu_mib"`
		Promised float64       `json:"promised_of_gpu"`
		Of       []float64     `json:"of_alone"`
		Sum      float64       `json:"sum"`
		OfOwn    *interval     `json:"of_tenants_alone"`
		Longest  []float64     `json:"longest_gaps_s"`
		Answers  [][][]float64 `json:"answers_s"`
		Moving   float64       `json:"moving"`
		Problem  string        `json:"problem"`
	}](data)
	if err != nil {
		return nil, err
	}
	s := &section{Title: "Real programs whose memory does not fit together",
		About: "Rates together, each relative to the same program alone: natively, and as the same tenant, with a 95 % interval. A sum of 1 is what they get done one after the other. `moving` is the part of the time in which memory moves, `stood still` the longest gap between two steps of each, in seconds. Programs that have a user answer within a time: its median and its longest.",
		Head:  []string{"programs", "GPU made to look like", "memory, of the GPU", "each, of native alone", "sum", "sum, of the tenants alone", "moving", "stood still, s", "answers, s"},
		bars:  &chart{unit: "sum, of one alone", series: []string{"of native", "of the tenants"}}}
	for _, c := range cases {
		name, size := strings.Join(c.Programs, " + "), fmt.Sprintf("%.3g GiB", c.GPU/1024)
		switch {
		case c.Problem != "":
			s.Rows = append(s.Rows, []string{name, size, "-", failed(c.Problem), "-", "-", "-", "-", "-"})
		case c.Sum > 0: // else the run left it out
			own := math.NaN()
			if c.OfOwn != nil {
				own = c.OfOwn.Ratio
			}
			s.Rows = append(s.Rows, []string{name, size, fmt.Sprintf("%.3g", c.Promised), figures(c.Of), fmt.Sprintf("%.2f", c.Sum), c.OfOwn.String(), percent(c.Moving), figures(c.Longest), answers(c.Answers)})
			s.bars.add(fmt.Sprintf("%s, %.3g×", name, c.Promised), c.Sum, own)
		}
	}
	return s, nil
}

// answers are seconds, median and longest, of each program that has a user.
func answers(all [][][]float64) string {
	var text []string
	for _, of := range all {
		if len(of) == 3 {
			text = append(text, fmt.Sprintf("natively %s; alone %s; together %s", figures(of[0]), figures(of[1]), figures(of[2])))
		}
	}
	if len(text) == 0 {
		return "-"
	}
	return strings.Join(text, "; ")
}

func suspend(data []byte) (*section, error) {
	r, err := decoded[struct {
		MiB    float64 `json:"mib"`
		Rounds []struct {
			Off   float64 `json:"off"`
			On    float64 `json:"on"`
			Again float64 `json:"again"`
		} `json:"rounds"`
		Servers *struct {
			N      int                  `json:"servers"`
			MiB    float64              `json:"mib_each"`
			Fit    int                  `json:"fit_without_nvshare"`
			Errors []string             `json:"errors"`
			First  map[string][]float64 `json:"first_token_s"`
		} `json:"model_servers"`
	}](data)
	if err != nil {
		return nil, err
	}
	s := &section{Title: "Suspended programs, and many model servers on a small GPU",
		About: "Seconds. A process leaves the GPU with its context, and its next call brings it back; the same call while it is there is what that compares with. Servers answer by their first token: `resident` ones are on the GPU, `swapped` ones have memory on the host, `suspended` ones have left the GPU, `filed` ones are in files.",
		Head:  []string{"what", "times", "p50 s", "p99 s"}}
	add := func(what string, v []float64) {
		if len(v) > 0 {
			s.Rows = append(s.Rows, []string{what, fmt.Sprint(len(v)), fmt.Sprintf("%.3f", quantile.Of(v, 0.5)), fmt.Sprintf("%.3f", quantile.Of(v, 0.99))})
		}
	}
	var off, on, again []float64
	for _, round := range r.Rounds {
		off, on, again = append(off, round.Off), append(on, round.On), append(again, round.Again)
	}
	process := fmt.Sprintf("a process of %.3g GiB", r.MiB/1024)
	add(process+" leaves", off)
	add(process+" comes back with its next call", on)
	add(process+", the same call while it is there", again)
	if m := r.Servers; m != nil {
		servers := fmt.Sprintf("%d servers of %.3g GiB, of which %d fit", m.N, m.MiB/1024, m.Fit)
		for _, where := range []string{"resident", "swapped", "suspended", "filed"} {
			add(servers+": one that was "+where, m.First[where])
		}
		if n := len(m.Errors); n > 0 {
			s.Rows = append(s.Rows, []string{servers + ": requests that failed", fmt.Sprint(n), "-", "-"})
		}
	}
	return s, nil
}

func migrate(data []byte) (*section, error) {
	type pauses struct{ P50, P99 float64 }
	cases, err := decoded[[]struct {
		Program string     `json:"program"`
		MiB     float64    `json:"mib"`
		Steps   int        `json:"steps"`
		Same    int        `json:"same_results"`
		StepMs  float64    `json:"step_ms"`
		Moves   []struct{} `json:"moves"`
		Told    pauses     `json:"told_s"`
		Pause   pauses     `json:"pause_s"`
		Problem string     `json:"problem"`
	}](data)
	if err != nil {
		return nil, err
	}
	s := &section{Title: "A training that changes its GPU",
		About: "Seconds of a move: how much longer its longest step took than the median, and what the scheduler says. The results are compared bit by bit with those of the same training that stays.",
		Head:  []string{"program", "memory", "moves", "a step, ms", "pause p50", "pause p99", "by the scheduler, p50", "p99", "steps with the same result"}}
	for _, c := range cases {
		same := fmt.Sprintf("%d of %d", c.Same, c.Steps)
		if c.Steps == 0 {
			same = failed(c.Problem)
		}
		s.Rows = append(s.Rows, []string{c.Program, fmt.Sprintf("%.3g GiB", c.MiB/1024), fmt.Sprint(len(c.Moves)), fmt.Sprintf("%.0f", c.StepMs), fmt.Sprintf("%.2f", c.Pause.P50), fmt.Sprintf("%.2f", c.Pause.P99), fmt.Sprintf("%.2f", c.Told.P50), fmt.Sprintf("%.2f", c.Told.P99), same})
	}
	return s, nil
}

// overlap is of programs of one host, its part of decoders included; groupsInPods is of pods.
func overlap(data []byte) (*section, error) {
	return groups("Overlap groups: programs that run at the same time", data, "native", "mps", "group")
}

func groupsInPods(data []byte) (*section, error) {
	return groups("Overlap groups of pods", data, "native", "mps", "pods of a group")
}

// groups compares ways to run programs at the same time. The picture has the ways that are named.
func groups(title string, data []byte, ways ...string) (*section, error) {
	type cell struct {
		Load    string  `json:"load"`
		Way     string  `json:"way"`
		N       int     `json:"n"`
		OfAlone float64 `json:"of_one_alone_natively"`
		Error   string  `json:"error"`
	}
	r, err := decoded[struct {
		Cells  []cell `json:"cells"`
		Beside []struct {
			Way     string    `json:"way"`
			What    string    `json:"what"`
			OfAlone []float64 `json:"of_alone"`
			Sum     float64   `json:"sum_of_alone"`
			Error   string    `json:"error"`
		} `json:"beside"`
		Limits []cell `json:"limits"`
	}](data)
	if err != nil {
		return nil, err
	}
	s := &section{Title: title,
		About: "What programs do together, relative to one alone, natively; for different programs each relative to itself alone. `native` is the driver's time slicing, `mps` plain MPS, `group` and `pods of a group` an overlap group of nvshare. Groups with a core limit are relative to one member without it.",
		Head:  []string{"programs", "way", "each, of it alone", "together"},
		bars:  &chart{unit: "of one alone", series: ways}}
	bar := func(what, way string, sum float64) {
		i := slices.Index(ways, way)
		if i < 0 {
			return
		}
		at := slices.Index(s.bars.labels, what)
		if at < 0 {
			at = len(s.bars.labels)
			s.bars.add(what, slices.Repeat([]float64{math.NaN()}, len(ways))...)
		}
		s.bars.values[at][i] = sum
	}
	add := func(what, way string, each []float64, sum float64, problem string) {
		if problem != "" {
			s.Rows = append(s.Rows, []string{what, way, failed(problem), "-"})
			return
		}
		text := "-"
		if len(each) > 0 {
			text = figures(each)
		}
		s.Rows = append(s.Rows, []string{what, way, text, fmt.Sprintf("%.2f", sum)})
		bar(what, way, sum)
	}
	many := func(cells []cell, real bool) {
		for _, c := range cells {
			if (c.Load == "decode") == real && (c.OfAlone > 0 || c.Error != "") { // 0: what limits compare with
				add(fmt.Sprintf("%d × %s", c.N, c.Load), c.Way, nil, c.OfAlone, c.Error)
			}
		}
	}
	beside := func(real bool) {
		for _, c := range r.Beside {
			if strings.Contains(c.What, "decoder") != real {
				continue
			}
			sum := c.Sum
			if sum == 0 {
				for _, of := range c.OfAlone {
					sum += of
				}
			}
			add(c.What, c.Way, c.OfAlone, sum, c.Error)
		}
	}
	for _, real := range []bool{true, false} { // programs of people before made-up kernels
		many(r.Cells, real)
		beside(real)
	}
	many(r.Limits, false)
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

func rl(data []byte) (*section, error) {
	r, err := decoded[struct {
		Rollouts int     `json:"rollouts"`
		Promised float64 `json:"promised_of_gpu"`
		Reward   float64 `json:"reward_s"`
		Natively string  `json:"native_together"`
		Seconds  float64 `json:"together_s"`
		After    float64 `json:"one_after_the_other_s"`
		Most     float64 `json:"at_most"`
		Faster   float64 `json:"faster"`
		Same     bool    `json:"same_weights"`
		Out      float64 `json:"out_bytes"`
		In       float64 `json:"in_bytes"`
	}](data)
	if err != nil {
		return nil, err
	}
	weights := "as alone"
	if !r.Same {
		weights = "**not as alone**"
	}
	return &section{Title: "Two jobs that generate, score and train",
		About: "Their memory does not fit together. Faster: the time of as many iterations one after the other, natively, divided by that together with nvshare; at most, if nothing had to move. Natively at once: " + r.Natively,
		Head:  []string{"rollouts", "promised, of the GPU", "a reward s", "together s", "one after the other s", "faster", "at most", "GiB out, in", "weights"},
		Rows: [][]string{{fmt.Sprint(r.Rollouts), fmt.Sprintf("%.3g", r.Promised), fmt.Sprintf("%.1f", r.Reward), fmt.Sprintf("%.1f", r.Seconds), fmt.Sprintf("%.1f", r.After),
			fmt.Sprintf("%.2f", r.Faster), fmt.Sprintf("%.2f", r.Most), fmt.Sprintf("%.1f, %.1f", r.Out/(1<<30), r.In/(1<<30)), weights}}}, nil
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

func gang(data []byte) (*section, error) {
	cells, err := decoded[[]struct {
		Case     string             `json:"case"`
		Mode     string             `json:"mode"`
		Quantum  string             `json:"quantum"`
		Gangs    bool               `json:"gangs"`
		Of       map[string]float64 `json:"of_alone"`
		Use      []float64          `json:"use"`
		Requests *struct {
			P50 float64 `json:"p50_ms"`
			P99 float64 `json:"p99_ms"`
		} `json:"requests"`
		Problem string `json:"problem"`
	}](data)
	if err != nil {
		return nil, err
	}
	s := &section{Title: "Jobs on two GPUs",
		About: "Jobs with a process on each of two GPUs, and tenants of one GPU. The use of a GPU is the sum of the rates of its processes, each relative to itself alone: 1 is no loss.",
		Head:  []string{"case", "way", "use of GPU 0", "use of GPU 1", "requests p50, ms", "p99, ms"},
		bars:  &chart{unit: "use of the GPU", series: []string{"GPU 0", "GPU 1"}}}
	for _, c := range cells {
		way := "the driver alone"
		switch {
		case c.Gangs:
			way = "gangs, turns of " + c.Quantum
		case c.Quantum != "":
			way = "no gangs, turns of " + c.Quantum
		}
		if c.Mode == "auto" {
			way += ", auto"
		}
		p50, p99 := "-", "-"
		if c.Requests != nil {
			p50, p99 = fmt.Sprintf("%.2f", c.Requests.P50), fmt.Sprintf("%.2f", c.Requests.P99)
		}
		switch {
		case c.Problem != "":
			s.Rows = append(s.Rows, []string{c.Case, way, failed(c.Problem), "-", p50, p99})
		case len(c.Of) > 0 && len(c.Use) == 2: // else it is what the others compare with
			s.Rows = append(s.Rows, []string{c.Case, way, percent(c.Use[0]), percent(c.Use[1]), p50, p99})
			s.bars.add(c.Case+": "+way, c.Use...)
		case c.Requests != nil:
			s.Rows = append(s.Rows, []string{c.Case, way, "-", "-", p50, p99})
		}
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
		Name     string   `json:"name"`
		Tenant   float64  `json:"tenant_mib"`
		GPU      float64  `json:"gpu_mib"`
		Gap      spread   `json:"gap"`
		Limit    spread   `json:"of_limit"`
		Exchange spread   `json:"of_exchange"`
		Timeline timeline `json:"timeline"`
	}](data)
	if err != nil {
		return nil, err
	}
	s := &section{Title: "Two tenants change places in memory",
		About: "Seconds from the last kernel of one to the first of the other; and divided by what the link needs, and by what two bare processes need for the same exchange.",
		Head:  []string{"case", "tenants", "GPU", "switch s", "of the link's time", "of bare processes"}}
	for _, c := range cases {
		s.Rows = append(s.Rows, []string{c.Name, fmt.Sprintf("2 of %.4g GiB", c.Tenant/1024), fmt.Sprintf("%.4g GiB", c.GPU/1024), fmt.Sprintf("%.2f", c.Gap.Median), fmt.Sprintf("%.2f", c.Limit.Median), fmt.Sprintf("%.2f", c.Exchange.Median)})
		if p, ok := c.Timeline.replay(fmt.Sprintf("%s: 2 of %.4g GiB on %.4g GiB", c.Name, c.Tenant/1024, c.GPU/1024)); ok {
			s.replays = append(s.replays, p)
		}
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
	type cost struct {
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
			Figures map[string]map[string]cost
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
