// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"unicode/utf8"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/manual"
)

func TestStatus(t *testing.T) {
	healthy := &fake{status: sample()}
	sick := &fake{status: sample()}
	sick.status.Problems = []string{
		"GPU 1: container cccccccccccc (pid 1004) is fenced: it did not release the GPU in time and may still use it",
		"GPU 1: container cccccccccccc (pid 1004): 3 entry points of CUDA bypass the shim; some of its work may not be scheduled",
	}
	sick.status.ProblemCodes = []api.ProblemCode{api.ProblemCode_PROBLEM_CODE_FENCED, api.ProblemCode_PROBLEM_CODE_BYPASS}
	empty := &fake{status: &api.StatusResponse{Version: "0.1.0", UptimeNs: 1, Problems: []string{"no GPU found"}}}
	for _, tc := range []struct {
		golden string
		fake   *fake
		args   []string
		code   int
	}{
		{"status.txt", healthy, nil, exitOK},
		{"status.txt", healthy, []string{"status"}, exitOK},
		{"status.json", healthy, []string{"-o", "json"}, exitOK},
		{"status.json", healthy, []string{"status", "-o", "json"}, exitOK},
		{"status-sick.txt", sick, []string{"status", "-o=table"}, exitFailed},
		{"status-sick.json", sick, []string{"status", "-o=json"}, exitFailed},
		{"status-empty.txt", empty, nil, exitFailed},
		{"status-empty.json", empty, []string{"-o", "json"}, exitFailed},
		{"status-wide.txt", healthy, []string{"-o", "wide"}, exitOK},
		{"status-swap.txt", &fake{status: swapped()}, nil, exitOK},
		{"status.yaml", healthy, []string{"-o", "yaml"}, exitOK},
		{"status-swap-wide.txt", &fake{status: swapped()}, []string{"-o", "wide"}, exitOK},
		{"status-swap.json", &fake{status: swapped()}, []string{"-o", "json"}, exitOK},
		{"status-gpu1.txt", &fake{status: sample()}, []string{"status", "--gpu", "1"}, exitOK},
		{"status-gpu1.txt", &fake{status: sample()}, []string{"--gpu", "gpu-51600000-0000-4000-8000-000000000001"}, exitOK},
	} {
		code, out, errs := ctl(append(tc.args, "--run-dir", serve(t, tc.fake))...)
		if code != tc.code || errs != "" {
			t.Errorf("%v: exit %d, %q, want %d", tc.args, code, errs, tc.code)
		}
		golden(t, tc.golden, out)
		if strings.HasSuffix(tc.golden, ".json") && !json.Valid([]byte(out)) {
			t.Errorf("%v: not JSON", tc.args)
		}
	}
}

func TestColour(t *testing.T) {
	sick := sample()
	sick.Problems = []string{"evil\x1b[2Jname (pid 1) is fenced"}
	var out bytes.Buffer
	printWide(streams{out: &out, colour: true}, sick)
	if !strings.Contains(out.String(), "\x1b[32mholding\x1b[0m") || !strings.Contains(out.String(), "\x1b[31m3\x1b[0m") {
		t.Errorf("no colours: %q", out.String())
	}
	var plain bytes.Buffer
	printWide(streams{out: &plain}, sick)
	if strings.Contains(plain.String(), "\x1b") {
		t.Errorf("colours or a tenant's control characters: %q", plain.String())
	}
	if stripped := strings.NewReplacer("\x1b[31m", "", "\x1b[32m", "", "\x1b[33m", "", "\x1b[0m", "").Replace(out.String()); stripped != plain.String() {
		t.Errorf("colours change the layout:\n%s\n%s", stripped, plain.String())
	}
}

func TestSetShare(t *testing.T) {
	pod := &api.Container{Id: strings.Repeat("a", 64), Namespace: "ml", Pod: "train", Name: "main"}
	gpu0 := &api.ShareChange{Uuid: "GPU-x", OldMemoryBytes: 8 << 30, NewMemoryBytes: 4 << 30, UsedMemoryBytes: 1 << 30,
		Old: &api.Share{CoreLimit: 50, Priority: api.Priority_PRIORITY_LATENCY, Gang: "ml/ring"},
		New: &api.Share{CoreLimit: 25, CoreRequest: 10, Weight: 200, Priority: api.Priority_PRIORITY_BATCH, Gang: "true"}}
	over := &api.ShareChange{Uuid: "GPU-y", Index: 1, OldMemoryBytes: 0, NewMemoryBytes: 4e9, UsedMemoryBytes: 5 << 30}
	later := &api.ShareChange{NewMemoryBytes: 4e9, New: &api.Share{CoreLimit: 25}}
	latency, unspecified := api.Priority_PRIORITY_LATENCY, api.Priority_PRIORITY_UNSPECIFIED
	for _, tc := range []struct {
		args string
		want *api.SetShareRequest
		resp *api.SetShareResponse
		out  string
	}{
		{"set --container abc --memory-limit 8Gi", &api.SetShareRequest{Container: "abc", MemoryBytes: proto.Uint64(8 << 30)},
			&api.SetShareResponse{Container: pod, Changes: []*api.ShareChange{later, gpu0, over}},
			"GPU 0, ml/train/main: memory limit 8Gi → 4Gi\n" +
				"GPU 1, ml/train/main: memory limit none → 4G; 5Gi are in use: allocations fail until enough is freed\n"},
		{"set --container ml/train/main --core-limit 25 --core-request 10% --weight 200 --priority latency --gang ring --memory-limit 4096 --gpu 0",
			&api.SetShareRequest{Container: "ml/train/main", Gpu: "0", CoreLimit: proto.Uint32(25), CoreRequest: proto.Uint32(10), Weight: proto.Uint32(200),
				Priority: &latency, Gang: proto.String("ring"), MemoryBytes: proto.Uint64(4 << 30)},
			&api.SetShareResponse{Container: &api.Container{Id: strings.Repeat("b", 64)}, Changes: []*api.ShareChange{gpu0}},
			"GPU 0, container bbbbbbbbbbbb: memory limit 8Gi → 4Gi, core limit 50% → 25%, core request none → 10%, weight 100 → 200, priority latency → batch, gang ml/ring → of itself\n"},
		{"set --user 1000 --core-limit 25 --gang true",
			&api.SetShareRequest{Uid: proto.Uint32(1000), CoreLimit: proto.Uint32(25), Gang: proto.String("true")},
			&api.SetShareResponse{Uid: 1000, Changes: []*api.ShareChange{later, gpu0}},
			"GPU 0, user 1000: core limit 50% → 25%, gang ml/ring → of itself\n"},
		{"set --user 1000 --core-limit none --core-request none --weight none --priority none --gang none --memory-limit none",
			&api.SetShareRequest{Uid: proto.Uint32(1000), CoreLimit: proto.Uint32(0), CoreRequest: proto.Uint32(0), Weight: proto.Uint32(0),
				Priority: &unspecified, Gang: proto.String(""), MemoryBytes: proto.Uint64(0)}, &api.SetShareResponse{}, ""},
		{"set --user 1000 --memory-mode resident", &api.SetShareRequest{Uid: proto.Uint32(1000), MemoryMode: api.MemoryMode_MEMORY_MODE_RESIDENT.Enum()},
			&api.SetShareResponse{Uid: 1000, Changes: []*api.ShareChange{{Uuid: "GPU-x", Old: &api.Share{}, New: &api.Share{MemoryMode: api.MemoryMode_MEMORY_MODE_RESIDENT}}}},
			"GPU 0, user 1000: memory mode swap → resident\n"},
		{"set --user 1000 --core-limit 25", &api.SetShareRequest{Uid: proto.Uint32(1000), CoreLimit: proto.Uint32(25)},
			&api.SetShareResponse{Uid: 1000, Changes: []*api.ShareChange{later}}, // no GPU is known yet
			"GPUs found later, user 1000: core limit none → 25%\n"},
		{"set ml/train --core-limit 25", &api.SetShareRequest{Container: "ml/train", CoreLimit: proto.Uint32(25)}, &api.SetShareResponse{}, ""},
		{"set 1000 --core-limit 25", &api.SetShareRequest{Uid: proto.Uint32(1000), CoreLimit: proto.Uint32(25)}, &api.SetShareResponse{}, ""},
		{"set --user=1000 --memory-limit=0", &api.SetShareRequest{Uid: proto.Uint32(1000), MemoryBytes: proto.Uint64(0)}, &api.SetShareResponse{}, ""},
	} {
		f := &fake{share: tc.resp, status: sample()}
		code, out, errs := ctl(append(strings.Fields(tc.args), "--run-dir", serve(t, f))...)
		if code != exitOK || out != tc.out || errs != "" || !proto.Equal(f.setShare, tc.want) {
			t.Errorf("%s: exit %d, %q %q, request %v", tc.args, code, out, errs, f.setShare)
		}
	}
}

func TestErrors(t *testing.T) {
	notFound := &fake{err: status.Error(codes.NotFound, `GPU "9": no such UUID or index`)}
	outOfRange := &fake{err: status.Error(codes.InvalidArgument, "time quantum 1ns is below 1ms: give a time from 1ms to 24h0m0s")}
	broken := &fake{err: errors.New("it broke")}
	for _, tc := range []struct {
		args string
		fake *fake
		code int
		want string
	}{
		{"-T 0", nil, exitUsage, "not positive"},
		{"-T -5", nil, exitUsage, "not positive"},
		{"-T soon", nil, exitUsage, "--set-tq"},
		{"--set-tq=", nil, exitUsage, "no value"},
		{"-S maybe", nil, exitUsage, "neither on nor off nor auto"},
		{"-T abc", nil, exitUsage, "give seconds (45) or a unit (200ms)"},
		{"-S ON", nil, exitUsage, "neither on nor off nor auto"},
		{"-T 1 -S maybe", nil, exitUsage, "--anti-thrash"},
		{"-T 1 extra", nil, exitUsage, "extra"},
		{"config", nil, exitUsage, "give a subcommand: set, list or reset"},
		{"config sett turn-length 1", nil, exitUsage, "did you mean set?"},
		{"config set", nil, exitUsage, "a setting (turn-length, anti-thrash, swap-share) and its value"},
		{"config set turn-length", nil, exitUsage, "and its value"},
		{"config set turn-lenght 1", nil, exitUsage, "did you mean turn-length?"},
		{"config set quantum 1", nil, exitUsage, "there are turn-length, anti-thrash, swap-share"},
		{"config set turn-length soon", nil, exitUsage, "turn-length: "},
		{"config set anti-thrash maybe", nil, exitUsage, "anti-thrash: "},
		{"config set swap-share 51", nil, exitUsage, "swap-share: "},
		{"config reset", nil, exitUsage, "which setting (turn-length, anti-thrash, swap-share), or --all"},
		{"config reset turn-length --all", nil, exitUsage, "or --all"},
		{"config reset tq", nil, exitUsage, `"tq" is no setting`},
		{"config list -o wide", nil, exitUsage, "none of table, json, yaml"},
		{"config set turn-length 1 --gpu 9", notFound, exitFailed, `GPU "9"`},
		{"-T 1 -o json", nil, exitUsage, "--output"},
		{"status -T 1", nil, exitUsage, "unknown shorthand"},
		{"set", nil, exitUsage, "set what, and whose? give a tenant and a setting, like nvsharectl set ml/train-a/main --core-limit 25"},
		{"set --memory-limit 8Gi", nil, exitUsage, "whose? give a tenant's name, --container or --user"},
		{"set --container a --user 1 --memory-limit 8Gi", nil, exitUsage, "give one tenant, not 2: its name, --container or --user"},
		{"set --container a", nil, exitUsage, "--core-limit"},
		{"set --container a --core-limit 0", nil, exitUsage, "from 1 to 100, or none"},
		{"set --container a --core-limit 101", nil, exitUsage, "from 1 to 100"},
		{"set --container a --core-limit 2.5", nil, exitUsage, "from 1 to 100"},
		{"set --container a --core-limit=", nil, exitUsage, "--core-limit"},
		{"set --container a --core-request half", nil, exitUsage, "--core-request"},
		{"set --container a --weight 0", nil, exitUsage, "from 1 to 10000"},
		{"set --container a --priority high", nil, exitUsage, "batch or latency"},
		{"set --container a --gang a/b", nil, exitUsage, "--gang"},
		{"set --container a --core-limit 10 --memory-limit lots", nil, exitUsage, "--memory-limit"},
		{"set --container a --core-request 60", &fake{err: status.Error(codes.FailedPrecondition, "GPU 0: 60 % cannot be promised")}, exitFailed, "cannot be promised"},
		{"set --container a --memory-limit 8GB", nil, exitUsage, "did you mean 8G?"},
		{"set --container a --memory-limit 8", nil, exitUsage, "--memory-limit: \"8\" without a unit is 8 MiB, too little for any CUDA program (did you mean 8Gi?): give a unit, or none"},
		{"run --memory-limit 8 -- true", nil, exitUsage, "did you mean 8Gi?"},
		{"set --container a --memory-limit -1", nil, exitUsage, "a quantity such as 8Gi"},
		{"set --container a --memory-limit 8k", nil, exitUsage, "less than 1Mi"},
		{"set --user root --memory-limit 8Gi", nil, exitUsage, "not the number of a user"},
		{"set --user 4294967296 --memory-limit 8Gi", nil, exitUsage, "not the number of a user"},
		{"set --user 1 --core-limit 25 --list", nil, exitUsage, "--list changes nothing"},
		{"set ml/train --list", nil, exitUsage, "--list changes nothing"},
		{"set a b --memory-limit 8Gi", nil, exitUsage, "accepts at most 1 arg"},
		{"set a --user 1 --memory-limit 8Gi", nil, exitUsage, "give one tenant, not 2"},
		{"set --user 1 --clear", nil, exitUsage, "unknown flag: --clear\n"},
		{"set --list --container a", nil, exitUsage, "--list changes nothing"},
		{"drain --gpu 0 --timeout soon", nil, exitUsage, "--timeout"},
		{"set --container ab --memory-limit 8Gi", &fake{err: status.Error(codes.NotFound, `container "ab": no such`)}, exitFailed, `container "ab"`},
		{"-o xml", nil, exitUsage, "none of table, wide, json, yaml"},
		{"events -o yaml", nil, exitUsage, "none of text, json"},
		{"events extra", nil, exitUsage, "extra"},
		{"events --gpu 9", &fake{err: status.Error(codes.NotFound, `GPU "9": no such`)}, exitFailed, `GPU "9"`},
		{"top --delay 0s", nil, exitUsage, "not positive"},
		{"top --delay 1ms", nil, exitUsage, "at least 10ms"},
		{"top -n -1", nil, exitUsage, "--rounds: -1 is below 0: give how many tables to print, or 0 to go on"},
		{"top --gpu 9 --once", &fake{status: sample()}, exitFailed, "no such index or UUID"},
		{"--nonsense", nil, exitUsage, "unknown flag"},
		{"nonsense", nil, exitUsage, "unknown command"},
		{"status extra", nil, exitUsage, "extra"},
		{"cdi", nil, exitUsage, "generate, list or validate"},
		{"cdi lst", nil, exitUsage, "unknown command \"lst\" (did you mean list?)"},
		{"doctor tset", nil, exitUsage, "unknown command \"tset\" (did you mean test?)"},
		{"doctor inseid", nil, exitUsage, "unknown command \"inseid\"\n"},
		{"-T 1 --gpu 9", notFound, exitFailed, `GPU "9"`},
		{"-T 1ns", outOfRange, exitUsage, "nvsharectl: time quantum 1ns is below 1ms"},
		{"status", broken, exitFailed, "it broke"},
		{"status --gpu 9", &fake{status: sample()}, exitFailed, "no such index or UUID"},
		{"status --gpu 0", &fake{status: &api.StatusResponse{}}, exitFailed, "has no GPU (nvsharectl doctor"},
	} {
		dir := "/nonexistent"
		if tc.fake != nil {
			dir = serve(t, tc.fake)
		}
		code, out, errs := ctl(append(strings.Fields(tc.args), "--run-dir", dir)...)
		if code != tc.code || !strings.Contains(errs, tc.want) || out != "" {
			t.Errorf("%s: exit %d, %q, stderr %q; want %d and %q", tc.args, code, out, errs, tc.code, tc.want)
		}
	}
}

// An empty --gpu is a script's variable that is not set: it means no GPU, and not all.
func TestEmptyGPU(t *testing.T) {
	for _, args := range []string{
		"-S off --gpu=", "-T 1 --gpu=", "status --gpu=", "top --once --gpu=", "events --gpu=", "set --user 1 --core-limit 25 --gpu=",
		"config set turn-length 1 --gpu=", "config reset --all --gpu=", "suspend 1000 --gpu=", "resume 1000 --gpu=", "migrate 1000 --gpu=", "drain --gpu=", "run --gpu= -- true",
	} {
		f := &fake{status: sample(), share: &api.SetShareResponse{}} // moves panic
		code, out, errs := ctl(append([]string{"--run-dir", serve(t, f)}, strings.Fields(args)...)...)
		if code != exitUsage || f.set != nil || f.setShare != nil || out != "" || !strings.Contains(errs, "--gpu is empty") {
			t.Errorf("%v: exit %d, %q %q, asked %v %v", args, code, out, errs, f.set, f.setShare)
		}
	}
}

// full is an output that takes no more.
type full struct{}

func (full) Write([]byte) (int, error) { return 0, errors.New("no space left") }

// What cannot be printed is an error: a script that writes the status to a file learns it.
func TestOutputIsFull(t *testing.T) {
	dir := serve(t, &fake{status: sample()})
	for _, args := range []string{"version", "-o wide", "-o json", "set --list", "top --once --delay 10ms", "--help", "completion bash"} {
		var errs strings.Builder
		code := run(context.Background(), append(strings.Fields(args), "--run-dir", dir), streams{out: full{}, err: &errs})
		if code != exitFailed || errs.String() != "nvsharectl: print: no space left\n" {
			t.Errorf("%s: exit %d, %q", args, code, errs.String())
		}
	}
}

func TestUnreachable(t *testing.T) {
	dir := t.TempDir()
	for _, args := range [][]string{nil, {"status"}, {"-T", "1"}, {"events"}, {"events", "-f"}, {"top"}, {"top", "--once"}, {"set", "--user", "1", "--memory-limit", "1Gi"}} {
		code, _, errs := ctl(append(args, "--run-dir", dir)...)
		if code != exitUnreachable || !strings.Contains(errs, "is nvshare-scheduler running") || !strings.Contains(errs, dir) {
			t.Errorf("%v: exit %d, %q", args, code, errs)
		}
	}
	l, err := net.Listen("unix", api.SocketPath(dir))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() { // a scheduler that dies while it is asked
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			conn.Close()
		}
	}()
	if code, _, errs := ctl("--run-dir", dir); code != exitUnreachable || !strings.Contains(errs, "no answer") {
		t.Errorf("exit %d, %q", code, errs)
	}
}

func TestHelp(t *testing.T) {
	code, out, errs := ctl("--help")
	if code != exitOK || errs != "" {
		t.Errorf("exit %d, %q", code, errs)
	}
	for _, want := range []string{"-T, --set-tq", "-S, --anti-thrash", "cdi", "set ", "config", "status", "top ", "events", "Exit status"} {
		if !strings.Contains(out, want) {
			t.Errorf("help lacks %q", want)
		}
	}
	if code, out, _ := ctl("--version"); code != exitOK || !strings.Contains(out, api.Version) {
		t.Errorf("--version: exit %d, %q", code, out)
	}
}

func TestReplaceFile(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "spec.yaml")
	for _, text := range []string{"one", "two"} {
		if err := replaceFile(path, []byte(text)); err != nil {
			t.Fatal(err)
		}
		got, _ := os.ReadFile(path)
		st, err := os.Stat(path)
		if err != nil || string(got) != text || st.Mode() != 0o644 {
			t.Errorf("%q, mode %v, %v", got, st.Mode(), err)
		}
	}
	if left, _ := os.ReadDir(dir); len(left) != 1 {
		t.Errorf("left behind: %v", left)
	}
	if err := replaceFile(filepath.Join(path, "x"), nil); err == nil {
		t.Error("no error for a file as directory")
	}

	// A fresh host has no /etc/cdi; engines of every user must see into it.
	defer syscall.Umask(syscall.Umask(0o077))
	fresh := filepath.Join(dir, "etc", "cdi", "spec.yaml")
	if err := replaceFile(fresh, nil); err != nil {
		t.Error(err)
	} else if st, err := os.Stat(filepath.Dir(fresh)); err != nil || st.Mode().Perm() != 0o755 {
		t.Errorf("directory: %v, %v", st, err)
	}

	// "--output /dev/stdout" must not take it from the whole machine.
	stdout := filepath.Join(dir, "stdout")
	if err := os.Symlink("/proc/self/fd/1", stdout); err != nil {
		t.Fatal(err)
	}
	if err := replaceFile(stdout, nil); err == nil || !strings.Contains(err.Error(), stdout) {
		t.Errorf("a link was replaced: %v", err)
	}
	if _, err := os.Readlink(stdout); err != nil {
		t.Error(err)
	}
}

// TestMain is nvsharectl itself where a test needs it as another process.
func TestMain(m *testing.M) {
	if args, ok := os.LookupEnv("NVSHARE_TEST_CTL"); ok {
		ctx, stop := untilStopped()
		defer stop()
		words := strings.Fields(args)
		if len(os.Args) > 1 && os.Args[1] == endedCommand { // run has started it
			words = os.Args[1:]
		}
		os.Exit(run(ctx, words, streams{out: os.Stdout, err: os.Stderr}))
	}
	os.Exit(m.Run())
}

func TestPermissionDenied(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root to be somebody else")
	}
	dir := serve(t, &fake{status: sample()})
	for d := dir; d != os.TempDir() && d != "/"; d = filepath.Dir(d) {
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(api.SocketPath(dir), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "NVSHARE_TEST_CTL=--run-dir "+dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	out, err := cmd.CombinedOutput()
	if cmd.ProcessState.ExitCode() != exitFailed { // a scheduler may well answer
		t.Errorf("exit %v", err)
	}
	for _, want := range []string{"permission denied", api.SocketPath(dir), "sudo", "--control-group"} {
		if !strings.Contains(string(out), want) {
			t.Errorf("%q lacks %q", out, want)
		}
	}
}

// A command that changes the host's files says that it is for root.
func TestNeedsRoot(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root to be somebody else")
	}
	dir := t.TempDir()
	for d := dir; d != os.TempDir() && d != "/"; d = filepath.Dir(d) {
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "NVSHARE_TEST_CTL=cdi generate --simgpu "+simulated(t)+" --output "+dir+"/new.yaml")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	if out, _ := cmd.CombinedOutput(); cmd.ProcessState.ExitCode() != exitFailed || !strings.Contains(string(out), "permission denied (use sudo)") {
		t.Errorf("status %d, %s", cmd.ProcessState.ExitCode(), out)
	}
}

// Whatever tenants are called, the status and top fit a terminal of 80 columns.
func TestScreensFit(t *testing.T) {
	r := swapped()
	r.Gpus[0].Clients[0].Container.Name = strings.Repeat("long-", 20) + "end"
	r.Gpus[0].Name = "NVIDIA H200 NVL with a name of many words"
	r.Gpus[0].Mode, r.Gpus[0].WayReason = api.Mode_MODE_AUTO, "each tenant keeps the GPU busy: 98 and 99 % of the time that it holds the GPU"
	var out bytes.Buffer
	terminal := streams{out: &out, size: func() (int, int) { return 24, 80 }}
	printStatus(terminal, r)
	printTop(terminal, sample(), r)
	for line := range strings.Lines(out.String()) {
		if n := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); n > 80 {
			t.Errorf("%d columns: %s", n, line)
		}
	}
	if !strings.Contains(out.String(), "long-end") {
		t.Error("the end of a long name is lost")
	}
}

// README's example is what the status prints.
func TestPageShowsTheStatus(t *testing.T) {
	user := func(uid uint32, state api.ClientState) *api.Client {
		c := client(uint64(uid), state, &api.Container{})
		c.Uid, c.Command, c.SinceNs = uid, "cuda-busy", 14e6
		return c
	}
	r := &api.StatusResponse{Version: "0.1.0", UptimeNs: 126e9, Clients: 2, Gpus: []*api.GPU{{
		Name: "NVIDIA H200", MemoryBytes: 141 << 30, Mode: api.Mode_MODE_AUTO, EffectiveMode: api.Mode_MODE_EXCLUSIVE, Way: "turns", WayCode: "core-limit", WayReason: "a tenant has a core limit, which turns hold exactly", QuantumNs: 100e6,
		Clients: []*api.Client{user(1001, api.ClientState_CLIENT_STATE_HOLDING), user(1000, api.ClientState_CLIENT_STATE_WAITING)},
		Memory:  []*api.MemoryAccount{{Container: &api.Container{}, Uid: 1001, UsedBytes: 4 << 30}, {Container: &api.Container{}, Uid: 1000, UsedBytes: 2 << 30, LimitBytes: 8 << 30}},
		Tenants: []*api.TenantUse{
			{Container: &api.Container{}, Uid: 1001, GotPermille: 749, WaitedPermille: 250},
			{Container: &api.Container{}, Uid: 1000, GotPermille: 250, WaitedPermille: 749, ThrottledNs: 1, Share: &api.Share{CoreLimit: 25}},
		}}}}
	var out bytes.Buffer
	printStatus(streams{out: &out}, r)
	page, err := os.ReadFile("../../deployments/watch.md")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(page), "```\n"+out.String()+"```\n") {
		t.Errorf("deployments/watch.md lacks\n%s", out.String())
	}
}

// Columns start at the same place in every line, whatever is in them.
func TestColumns(t *testing.T) {
	r := sample()
	r.Gpus[0].Clients[0].Container.Name = strings.Repeat("long-", 20)
	r.Gpus[0].Clients[1].Container.Namespace = "ünïcödé"
	r.Gpus[0].Name = "NVIDIA H200 NVL with a name of many words"
	var out bytes.Buffer
	printWide(streams{out: &out}, r)
	for i, block := range strings.Split(out.String(), "\n\n")[1:4] {
		lines := strings.Split(strings.TrimSpace(block), "\n")
		if i == 0 {
			lines = lines[:3] // the reason of a mode follows
		}
		for _, column := range []string{[]string{"GRANTS", "GETS", "HELD"}[i], "FOR"} {
			at := strings.Index(lines[0], column)
			for _, line := range lines[1:] {
				cells := []rune(line)
				if at < 2 || len(cells) <= at || cells[at-1] != ' ' || cells[at-2] != ' ' || cells[at] == ' ' {
					t.Errorf("%s is not aligned:\n%s", column, block)
					break
				}
			}
		}
	}
	if !strings.Contains(out.String(), "  1.5Gi  ") {
		t.Errorf("no memory:\n%s", out.String())
	}
}

// The help of every command fits a terminal of 80 columns, and names what each flag wants, and
// not its type in Go.
func TestHelpFits(t *testing.T) {
	ran := false
	for _, problem := range manual.Unfit(rootCommand(streams{}, &ran)) {
		t.Error(problem)
	}
}
