// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// serversRow is a line of servers.jsonl: a window, or why a way has none.
type serversRow struct {
	Way, Case, Error string
	Tokens           float64 `json:"tokens_per_s"`
	Failed           int
	Shares           struct {
		Way string `json:"way"`
	}
	Promised float64
	Servers  []struct {
		Tokens float64 `json:"tokens_per_s"`
	}
	Replay struct {
		Tokens [][]float64
		Turns  [][]float64
		Slices []float64 `json:"slices_ms"`
	}
}

// asRoot returns the directory of the simulated GPU, for a test with tenants of their own users.
func asRoot(t *testing.T) (simgpu string) {
	t.Helper()
	simgpu = os.Getenv("NVSHARE_TEST_SIMGPU")
	if simgpu == "" {
		t.Skip("NVSHARE_TEST_SIMGPU is not set: make shell sets it")
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root, for tenants that are no users")
	}
	return simgpu
}

// runServers runs servers.py on the simulated GPU, where a model is a kernel that spins.
func runServers(t *testing.T, status int, args ...string) ([]serversRow, string) {
	t.Helper()
	simgpu := asRoot(t)
	gpu, err := os.MkdirTemp("", "nvshare-servers-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(gpu) })
	if out, err := exec.Command("sh", "-c", `cp -a "$1/." "$2" && mkdir -p "$2/run" && chmod -R a+rwX "$2" && echo gpus=2 >"$2/run/config"`, "sh", simgpu, gpu).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	results := t.TempDir()
	cmd := exec.Command("python3", append([]string{"servers.py", results, "--bundle", filepath.Dir(simgpu), "--model", "spin", "--scale", "0.05",
		"--seconds", "0.3", "--lead", "0.1", "--settle", "0.01", "--rounds", "1", "--some", "2", "--memory", "512"}, args...)...)
	cmd.Env = append(os.Environ(), "NVSHARE_SIMGPU="+gpu, "NVSHARE_SIMGPU_DIR="+gpu+"/run", "LD_LIBRARY_PATH="+gpu+"/lib")
	out, _ := cmd.CombinedOutput()
	if cmd.ProcessState.ExitCode() != status {
		log, _ := os.ReadFile(filepath.Join(results, "servers.log"))
		t.Fatalf("status %d, want %d\n%s%s", cmd.ProcessState.ExitCode(), status, out, log)
	}
	lines, err := os.ReadFile(filepath.Join(results, "servers.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	var rows []serversRow
	for line := range bytes.Lines(lines) {
		var row serversRow
		if err := json.Unmarshal(line, &row); err != nil {
			t.Fatalf("%v\n%s", err, line)
		}
		rows = append(rows, row)
	}
	table, err := os.ReadFile(filepath.Join(results, "servers.md"))
	if err != nil {
		t.Fatal(err)
	}
	return rows, string(table)
}

// Each way has a window of each of its cases, and one server those that it is compared with.
func TestServers(t *testing.T) {
	rows, table := runServers(t, 0, "--cases", "2,2ps", "--promised", "1.75")
	var got []string
	tokens := 0.0 // a short window on a busy machine may have none
	for _, r := range rows {
		tokens += r.Tokens
		got = append(got, r.Way+" "+r.Case)
		want := 2
		if r.Way == "alone" {
			want = 1
		}
		if r.Error != "" || r.Failed > 0 || len(r.Servers) != want {
			t.Errorf("%+v", r)
		}
		if r.Way == "memory" && r.Promised != 1.75 {
			t.Errorf("%g times the memory are promised", r.Promised)
		}
		if ours := !slices.Contains([]string{"alone", "driver", "mps"}, r.Way); ours != (r.Shares.Way != "") {
			t.Errorf("%s is shared by %q", r.Way, r.Shares.Way)
		} else if r.Way != "alone" && (ours != (len(r.Replay.Turns) > 0) || ours != (len(r.Replay.Slices) == 2) || len(r.Replay.Tokens) != want) {
			t.Errorf("%s has recorded %+v", r.Way, r.Replay)
		}
	}
	if tokens == 0 {
		t.Error("no token came")
	}
	slices.Sort(got)
	want := []string{"alone 1", "alone 1", "alone 2", "alone 2", "alone 2ps", "alone 2s", "auto 2", "auto 2ps", "driver 2", "driver 2ps",
		"group 2", "group 2ps", "latency 2", "limit 2", "memory 2", "mps 2", "mps 2ps"}
	if !slices.Equal(got, want) {
		t.Errorf("windows %q, want %q", got, want)
	}
	for _, says := range []string{"| case | one, tokens/s | driver | mps | auto | group | latency | limit | memory |\n", "\n| 2 | auto | ", "\n| 2ps | group | "} {
		if !strings.Contains(table, says) {
			t.Errorf("the table has not %q:\n%s", says, table)
		}
	}
}

// What stands before a peer's command reaches each server, with a folder of its own, and MPS runs where it is asked for.
func TestServersOfPeers(t *testing.T) {
	log := filepath.Join(t.TempDir(), "log")
	wrap := filepath.Join(t.TempDir(), "wrap")
	if err := os.WriteFile(wrap, []byte("#!/bin/sh\ntest -d \"$OWN\" && echo \"$OWN ${CUDA_MPS_PIPE_DIRECTORY-none}\" >>"+log+" && exec \"$@\"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	rows, table := runServers(t, 0, "--cases", "2", "--ways", "alone", "--peer", "wrapped=OWN={dir} "+wrap, "--peer", "half=CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50 OWN={dir} "+wrap)
	for _, way := range []string{"peer wrapped", "peer half"} {
		if !slices.ContainsFunc(rows, func(r serversRow) bool { return r.Way == way && r.Case == "2" && r.Error == "" && len(r.Servers) == 2 }) {
			t.Errorf("no window of %s: %+v", way, rows)
		}
	}
	if want := "| case | one, tokens/s | peer wrapped | peer half |\n"; !strings.Contains(table, want) || !strings.Contains(table, "- peer wrapped: `OWN={dir} ") {
		t.Errorf("the table has not %q:\n%s", want, table)
	}
	said, err := os.ReadFile(log)
	if err != nil {
		t.Fatal(err)
	}
	// Those that have no MPS start last, and in order.
	if !regexp.MustCompile(`^\S+/server-(0 \S+/pipe\n\S+/server-1|1 \S+/pipe\n\S+/server-0) \S+/pipe\n\S+/server-0 none\n\S+/server-1 none\n$`).Match(said) {
		t.Errorf("four servers say %q", said)
	}
}

func TestServersRefuseAPeer(t *testing.T) {
	for peer, says := range map[string]string{
		"/nowhere/library.so":             "LD_PRELOAD=/nowhere/library.so: no such file",
		"its=LD_PRELOAD=/nowhere/library": "LD_PRELOAD=/nowhere/library: no such file",
		"name":                            "no such file",
		"a name=X=1":                      "neither a library nor NAME=WORDS",
	} {
		out, err := exec.Command("python3", "-B", "servers.py", t.TempDir(), "--peer", peer).CombinedOutput()
		if err == nil || !strings.Contains(string(out), says) {
			t.Errorf("%s: %v, %s", peer, err, out)
		}
	}
}

// With several GPUs each has some of the cases, and one server of its own that they are compared with.
func TestServersOnSeveralGPUs(t *testing.T) {
	const gpu = "GPU-51600000-0000-4000-8000-00000000000"
	_, table := runServers(t, 0, "--cases", "2,4", "--ways", "alone,auto", "--gpus", gpu+"0,"+gpu+"1")
	for _, says := range []string{"\n| 2 | auto | ", "\n| 4 | auto | "} {
		if !strings.Contains(table, says) || strings.Contains(table, says+"-") {
			t.Errorf("the table has not %q:\n%s", says, table)
		}
	}
}

// A way whose servers do not start says so, and the others go on.
func TestServersThatDoNotStart(t *testing.T) {
	rows, table := runServers(t, 1, "--cases", "2", "--ways", "alone,driver,memory", "--model", "none")
	if i := slices.IndexFunc(rows, func(r serversRow) bool { return r.Way == "driver" && r.Error != "" }); i < 0 || !strings.Contains(table, "- driver failed: server 0 is not ready") {
		t.Errorf("%+v\n%s", rows, table)
	}
}

// The figures of the table are medians of windows, and parts of what one server does on the same GPU.
func TestServersTable(t *testing.T) {
	const script = `
import servers
args = servers.options(["--cases", "4,8", "--some", "8"])
def row(gpu, way, case, tokens):
    one = {"tokens_per_s": tokens, "in_flight": 4.0, "itl_ms": [2.0, 3.0], "ttft_ms": [None, None], "failed": 0}
    return dict(one, gpu=gpu, way=way, case=case, servers=[one])
rows = [row("a", "alone", "4", n) for n in (90.0, 100.0, 400.0)] + [row("b", "alone", "4", 50.0), row("b", "alone", "8", 160.0)]
rows += [row("a", "auto", "4", 95.0), row("b", "auto", "8", 120.0), {"gpu": "b", "way": "mps", "error": "none"}]
args.cases_said = ""
print(servers.table(args, rows))
requests = []
for due, stamps, finished in ((0.0, [0.1, 0.5, 1.2, 1.4], 1.4), (1.1, [1.6, 1.9, 2.5], 2.5), (1.2, [], 3.0)):
    r = servers.Request(due, b"")
    r.stamps, r.finished = stamps, finished
    requests.append(r)
print(servers.measured(requests, 1.0, 2.0))
print(servers.measured([], 1.0, 2.0)["ttft_ms"])
`
	cmd := exec.Command("python3", "-B", "-c", script)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, says := range []string{
		"| 4 | 100.0 | 95 % |\n| 8 | 160.0 | 75 % |\n",
		"| 8 | auto | 120.0 | 75 % | 240 % | 4.0 | 2.0, 3.0 | -, - |",
		"- mps failed: none",
		// Four tokens came in the second; a gap belongs to the second in which it ends; a request that still waits counts.
		"{'tokens_per_s': 4.0, 'in_flight': 2.1, 'itl_ms': [300.0, 700.0], 'ttft_ms': [800.0, 800.0], 'first_tokens': 2, 'failed': 0}",
		"[None, None]",
	} {
		if !strings.Contains(string(out), says) {
			t.Errorf("there is no %q:\n%s", says, out)
		}
	}
}
