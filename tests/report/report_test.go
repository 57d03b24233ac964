// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"math"
	"net/url"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/nvshare/nvshare/tests/browser"
)

// results are the tree's own.
var results = []string{"../gpu/results", "../bench/results"}

// The report of the committed results has the rows that a reader compares, from the
// files that it names, real programs first.
func TestReportOfTheTree(t *testing.T) {
	dir := t.TempDir()
	if err := report(dir, results); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(filepath.Join(dir, "report.md"))
	if err != nil {
		t.Fatal(err)
	}
	text := string(data)
	for _, want := range []string{
		"Source: `../gpu/results/2026-11-22-h200-580.159.04/programs/programs.json`. 2026-11-22T14:35:35Z; commit 8c15173; NVIDIA H200 (143771 MiB); driver 580.159.04; Linux 6.18.44-fc-v657-gpu x86_64; cores: 16.",
		"| programs | native | on | auto | off |",
		"| decode + decode + decode | 3.29 | 0.98 | 2.56 | 2.79 |",
		"| 90 % GPU | 1.5 | 2 of 6 GiB | adaptive | 0.96 |",
		"| 8 | nvshare | 0.49 | 0.57 | 0 of 2000 | 92.1 % |",
		"with the peer `libvgpu.so`",
		"| one thread, one stream | launch | 2.7 | +3.8 | +0.0 |",
		"![Real programs that share a GPU](programs.svg)",
		"| train | not recorded | 12 | 1.04 | 208.61 | 201.60 |",
		"| decode | auto | 6 | 1.11 (1.00 to 1.31) | 308.93 | 283.44 |",
		"simulated GPU, 2 processors",
		"| decode + decode | 3.25 GiB | 1.5 | 0.49, 0.41 | 0.89 | 1.01 (0.90 to 1.11) | 1.3 % | 6.38, 6.34 | - |",
		"| decode + decode + decode | 5 GiB | - | failed: tenant 0: window: context canceled | - | - | - | - | - |",
		"| a process of 8 GiB comes back with its next call | 10 | 0.606 | 0.786 |",
		"| 19 servers of 4.5 GiB, of which 4 fit: one that was suspended | 123 | 0.646 | 0.986 |",
		"| torch | 8 GiB | 20 | 64 | 0.75 | 0.85 | 0.67 | 0.76 | 229 of 229 |",
		"| 6 × decode | group | - | 5.40 |",
		"| a decoder and a GEMM program, both members | group, limit of GEMM | 1.03, 0.74 | 1.77 |",
		"| a gang and a tenant on each GPU | gangs, turns of 100ms | 98.5 % | 98.8 % | - | - |",
		"| a gang and short requests on GPU 0 | gangs, turns of 100ms, auto | 92.2 % | 92.2 % | 0.49 | 0.56 |",
		"| two gangs | no gangs, turns of 100ms | 6.5 % | 6.5 % | - | - |",
		"| notebook + train | 5 GiB | 1.19 | 1.05, 0.79 | 1.84 | 1.78 (1.77 to 1.78) | 0.7 % | 8.30, 2.78 | natively 2.05, 3.16; alone 1.91, 2.77; together 2.53, 2.69 |",
		"| 50 ms | 237 | 60 | 5.86 | 10.89 | 11.52 | 0.41 (0.30) | 29.99 of 30 % |",
		"| gemm | limits 25/75 | 25.18, 74.10 | 24.44, 75.56 | 0.92 | 0.56 |",
		"| limit, PyTorch, expandable segments: 6144 MiB | 6144 | 6142 | 5888 |",
		"| native | 143156 to 143771 | 142535 | - |",
		"| cuMemAlloc, 4 KiB | 1702 ns | 114.7 % | 3.4 % |",
		"| PyTorch, gemm, allocator default | 609.5 steps/s | 100.0 % | 100.3 % |",
		"| b waits for GPU 1 (driver) | 100.0 % | 102.9 % | 0.002 | 2.006 |",
		"| c, which sees only GPU 1 (driver) | - | 99.9 % | - | 0.002 |",
		"| 6 | 3 | 4.2 | 4.7 |",
		"- `../gpu/results/2026-11-22-h200-580.159.04/rm-probe/rm-probe.json`",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("the report lacks %q", want)
		}
	}
	if first := strings.Index(text, "\n## "); !strings.HasPrefix(text[first:], "\n## Real programs") {
		t.Errorf("the report begins with %.40q", text[first:])
	}
	pictures, err := filepath.Glob(filepath.Join(dir, "*.svg"))
	if err != nil || len(pictures) < 3 {
		t.Fatalf("pictures: %v, %v", pictures, err)
	}
	for _, path := range pictures {
		wellFormed(t, path)
		if !strings.Contains(text, "("+filepath.Base(path)+")") {
			t.Errorf("the report does not show %s", path)
		}
	}
}

// The page shows a step of a run, by the link to it, and plays what was recorded, without a network. NVSHARE_TEST_SCREENSHOT
// is a directory for pictures of it.
func TestPageInBrowser(t *testing.T) {
	dir := t.TempDir()
	if err := report(dir, append([]string{"testdata/results"}, results...)); err != nil {
		t.Fatal(err)
	}
	page := filepath.Join(dir, "report.html")
	text, err := os.ReadFile(page)
	if needs := regexp.MustCompile(`(?:src|href)=|url\(|import `).FindString(string(text)); err != nil || len(text) > 1<<20 || needs != "" {
		t.Errorf("%v: the page has %d bytes, and needs others by %q", err, len(text), needs)
	}
	b := browser.Open(t)
	show := func(place string, width int) {
		b.Call("Page.navigate", map[string]any{"url": "about:blank"}, nil) // by the hash alone it would not load anew
		b.Show("file://"+page+"#"+url.QueryEscape(place), width, "light", `document.querySelector("#table td")`)
	}
	for place, wants := range map[string][]string{
		"": {`<option value="2026-11-2`, ` selected=""`, "<svg ", "<th>auto</th>"},
		"2026-11-22-h200-580.159.04/programs/programs.json": {"commit 8c15173; NVIDIA H200", "<svg ",
			`<td>decode + decode + decode</td><td class="number other">3.29</td><td class="number">0.98</td>`, `<section id="replay" hidden="">`},
	} {
		show(place, 1440)
		dom := fmt.Sprint(b.Eval(`document.documentElement.outerHTML`))
		for _, want := range wants {
			if !strings.Contains(dom, want) {
				t.Errorf("%s: the page lacks %q", place, want)
			}
		}
	}
	for _, width := range []int{360, 768, 1440} {
		for name, place := range map[string]string{"swap": "2026-11-27-h200-580.159.04/full/swap/swap.json", "servers": "simulated/servers.jsonl"} {
			show(place, width)
			if over := b.Eval(`document.documentElement.scrollWidth - innerWidth`); over != 0.0 {
				t.Errorf("%s, %d: the page is %v pixels wider than its window", name, width, over)
			}
			if drawn := b.Eval(`[...document.querySelectorAll("#stages canvas")].filter((c) => c.getContext("2d").getImageData(0, 0, c.width, c.height).data.some(Boolean)).length`); drawn.(float64) < 2 {
				t.Errorf("%s, %d: %v pictures are drawn", name, width, drawn)
			}
			b.Shoot(os.Getenv("NVSHARE_TEST_SCREENSHOT"), fmt.Sprintf("%s-%d", name, width))
		}
	}
	show("simulated/servers.jsonl", 768)
	plays(t, b)
	if len(b.Faults) > 0 {
		t.Errorf("the page has faults: %s", b.Faults)
	}
}

// plays plays the replay that is shown, from its begin to its end.
func plays(t *testing.T, b *browser.Tab) {
	const told = `document.querySelector(".tenants li").textContent`
	b.Eval(`at("case").value = "2"; at("way").value = "memory"; at("beside").value = "driver"; choose()`)
	whole := b.Eval(told)
	b.Eval(`at("time").value = 0; at("time").dispatchEvent(new Event("input"))`)
	if begin := fmt.Sprint(b.Eval(told)); begin != "server 1: 0 tokens, granted for 0.00 s, moved 0.0 GiB in, 0.0 out" {
		t.Errorf("at the begin the page tells %q", begin)
	}
	b.Eval(`at("speed").value = "4"; at("play").click()`)
	if says := b.Eval(`at("play").textContent`); says != "Pause" {
		t.Errorf("while it plays the button says %q", says)
	}
	b.Eval(`new Promise((done) => { const see = () => at("play").textContent === "Play" ? done() : requestAnimationFrame(see); see(); })`)
	if end := b.Eval(told); end != whole || !strings.Contains(fmt.Sprint(end), "moved 0.1 GiB in") {
		t.Errorf("at the end the page tells %q, and %q before", end, whole)
	}
	if titles := fmt.Sprint(b.Eval(`[...document.querySelectorAll("#stages h3")].map((h) => h.textContent).join()`)); titles != "memory: turns,driver" {
		t.Errorf("the replays are of %q", titles)
	}
}

func TestPlaceOf(t *testing.T) {
	for path, want := range map[string][2]string{
		"/gpu/results/2026-11-28/servers/servers.jsonl": {"2026-11-28", "servers/servers.jsonl"},
		"/bench/results/20261122.json":                  {"bench", "20261122.json"},
	} {
		root, _, _ := strings.Cut(path, "results/")
		if run, step := placeOf(root+"results", path); run != want[0] || step != want[1] {
			t.Errorf("%s: %q, %q", path, run, step)
		}
	}
	if run, step := placeOf("/tmp/mine", "/tmp/mine/gemm/gemm.json"); run != "mine" || step != "gemm/gemm.json" {
		t.Errorf("%q, %q", run, step)
	}
}

func wellFormed(t *testing.T, path string) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for d := xml.NewDecoder(f); ; {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			return
		} else if err != nil {
			t.Fatalf("%s: %v", path, err)
		}
	}
}

// Each table has a column for each figure, and report.json has the same figures.
func TestTablesAreComplete(t *testing.T) {
	dir := t.TempDir()
	if err := report(dir, results); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(filepath.Join(dir, "report.json"))
	if err != nil {
		t.Fatal(err)
	}
	var r struct{ Sections []section }
	if err := json.Unmarshal(data, &r); err != nil {
		t.Fatal(err)
	}
	var seen []string
	for _, s := range r.Sections {
		seen = append(seen, s.Kind)
		if len(s.Rows) == 0 || s.Run.Date == "" || s.Run.Commit == "" {
			t.Errorf("%s: %d rows, run %+v", s.File, len(s.Rows), s.Run)
		}
		for _, row := range s.Rows {
			if len(row) != len(s.Head) {
				t.Errorf("%s: row %q for columns %q", s.File, row, s.Head)
			}
		}
	}
	for _, k := range kinds {
		if !slices.Contains(seen, k.pattern) {
			t.Errorf("the tree's results lack %s, or the report does not read it", k.pattern)
		}
	}
}

// The newest run has the picture, unless it compares two cases or fewer; one on a simulated GPU
// comes last, however new it is.
func TestOrderAndPictures(t *testing.T) {
	dir := t.TempDir()
	const cell = `{"program":"decode","way":"on","native":[[1]],"shim_of_native":{"ratio":0.9,"low":0.8,"high":1}}`
	for name, run := range map[string]struct {
		host, cells string
	}{
		"sim": {"2026-11-29T00:00:00Z\nsimulated GPU, 2 processors\n", cell + "," + cell + "," + cell},
		"one": {"2026-11-28T00:00:00Z\nNVIDIA H200, GPU-1, 580.1, 1 MiB\n", cell},
		"all": {"2026-11-27T00:00:00Z\nNVIDIA H200, GPU-1, 580.1, 1 MiB\n", cell + "," + cell + "," + cell},
	} {
		sub := filepath.Join(dir, name)
		if err := errors.Join(os.Mkdir(sub, 0o755), os.WriteFile(filepath.Join(sub, "host.txt"), []byte(run.host), 0o644),
			os.WriteFile(filepath.Join(sub, "alone.json"), []byte("["+run.cells+"]"), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	sections, _, err := collect([]string{dir})
	if err != nil || len(sections) != 3 {
		t.Fatalf("%d sections, %v", len(sections), err)
	}
	for i, want := range []string{"one", "all", "sim"} {
		if got := filepath.Base(filepath.Dir(sections[i].File)); got != want {
			t.Errorf("section %d is of %s, want %s", i, got, want)
		}
	}
	if pictured(sections, "alone.json") != sections[1] || pictured(sections[:1], "alone.json") != sections[0] {
		t.Error("the picture is not of the newest run with three cases")
	}
}

// A case is compared with the one server of its own GPU, by medians of windows.
func TestServers(t *testing.T) {
	s, err := servers([]byte(`{"gpu":"a","case":"8","way":"alone","tokens_per_s":100}
{"gpu":"b","case":"8","way":"alone","tokens_per_s":300,"replay":{"tick_ms":20,"tokens":[[1]]}}
{"gpu":"c","case":"8","way":"alone","tokens_per_s":300,"replay":{"tick_ms":20,"tokens":[[2]]}}
{"gpu":"a","case":"4","way":"alone","tokens_per_s":100,"replay":{"tick_ms":20,"tokens":[[1]]}}
{"gpu":"a","case":"8","way":"auto","tokens_per_s":70,"shares":{"way":"slices"},"replay":{"tick_ms":20,"tokens":[[1,2,0]],"turns":[[0,10,40]],"moves":[[0,0,10,-512]],"slices_ms":[2]}}
{"gpu":"a","case":"8","way":"auto","tokens_per_s":90}
{"gpu":"a","case":"8","way":"auto","tokens_per_s":2}
{"gpu":"b","case":"8","way":"memory","tokens_per_s":150}
{"gpu":"b","case":"32","way":"auto","tokens_per_s":150}
{"gpu":"b","case":"8p","way":"auto","tokens_per_s":1}
{"gpu":"b","way":"mps","error":"there is none"}
`))
	if err != nil {
		t.Fatal(err)
	}
	if len(s.replays) != 2 || !reflect.DeepEqual(s.replays[1], replay{Case: "8", Way: "auto", Note: "slices", Seconds: 0.04, Tokens: true, Step: 0.02,
		Names: []string{"server 1 (time slices of 2 ms)"}, Turns: [][3]float64{{0, 0.01, 0.04}}, Moves: [][4]float64{{0, 0, 0.01, -0.5}}, Lines: [][]float64{{1, 2, 0}}}) {
		t.Errorf("replays %+v", s.replays)
	}
	if want := [][]string{{"8", "70.0 %", "50.0 %"}, {"8p", "-", "-"}, {"32", "-", "-"}}; !slices.EqualFunc(s.Rows, want, slices.Equal) {
		t.Errorf("rows %q, want %q", s.Rows, want)
	}
}

// A bar of what was not measured is left out: it is not 0.
func TestChartLeavesOut(t *testing.T) {
	c := &chart{series: []string{"native", "group"}}
	c.add("x", math.NaN(), 2)
	text := c.svg("title")
	if strings.Contains(text, "NaN") || strings.Contains(text, ">0.00<") || strings.Count(text, ">2.00<") != 1 {
		t.Errorf("the chart: %s", text)
	}
}

// What is no result of ours is an error that names the file, and no empty report.
func TestBadResults(t *testing.T) {
	dir := t.TempDir()
	if err := report(filepath.Join(dir, "out"), []string{dir}); err == nil || !strings.Contains(err.Error(), "no results") {
		t.Errorf("of an empty directory: %v", err)
	}
	if err := report(filepath.Join(dir, "out"), []string{dir, dir + "/none"}); err == nil || !strings.Contains(err.Error(), dir+"/none") || !strings.Contains(err.Error(), "RESULTS=") {
		t.Errorf("of no directory: %v", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "programs.json"), []byte("[1]"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := report(filepath.Join(dir, "out"), []string{dir}); err == nil || !strings.Contains(err.Error(), "programs.json") {
		t.Errorf("of a broken file: %v", err)
	}
}

// What run.sh was asked for is for people, who repeat the run.
func TestCircumstances(t *testing.T) {
	dir := t.TempDir()
	host := "2026-11-26T03:00:00Z\ncommit 0123abc\nLinux 6.18 x86_64\nNVIDIA H200, GPU-1, 580.159.04, 143771 MiB, 5\n16\nrun.sh out --only gemm@30,decode programs\n"
	if err := os.WriteFile(filepath.Join(dir, "host.txt"), []byte(host), 0o644); err != nil {
		t.Fatal(err)
	}
	want := run{Date: "2026-11-26T03:00:00Z", Commit: "0123abc", Kernel: "Linux 6.18 x86_64", GPU: "NVIDIA H200 (143771 MiB)", Driver: "580.159.04", Cores: "16"}
	if got := circumstances(dir, dir); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

func TestRL(t *testing.T) {
	const of = `{"rollouts": 4480, "reward_s": 10.04, "native_together": "failed: out of memory", "together_s": 141.2, "one_after_the_other_s": 240.3,
		"at_most": 1.94, "faster": 1.702, "out_bytes": 429496729600, "in_bytes": 430570471424, "promised_of_gpu": 1.42, "same_weights": `
	for same, want := range map[string]string{
		"true":  "4480 | 1.42 | 10.0 | 141.2 | 240.3 | 1.70 | 1.94 | 400.0, 401.0 | as alone",
		"false": "4480 | 1.42 | 10.0 | 141.2 | 240.3 | 1.70 | 1.94 | 400.0, 401.0 | **not as alone**",
	} {
		s, err := rl([]byte(of + same + "}"))
		if err != nil {
			t.Fatal(err)
		}
		if got := strings.Join(s.Rows[0], " | "); got != want || len(s.Head) != len(s.Rows[0]) || !strings.Contains(s.About, "out of memory") {
			t.Errorf("%q, want %q; %s", got, want, s.About)
		}
	}
}
