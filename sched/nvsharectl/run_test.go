// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nvshare/nvshare/cdi"
	"github.com/nvshare/nvshare/sched/api"
)

// describing is a scheduler that notes who is described, and what the program has done
// by then.
type describing struct {
	fake
	told   []*api.DescribeContainerRequest
	before string // a file that the program makes
	early  bool   // it was there
	refuse error

	forgotten string
}

func (d *describing) ForgetContainer(_ context.Context, r *api.ForgetContainerRequest) (*api.ForgetContainerResponse, error) {
	d.forgotten = r.Id
	return &api.ForgetContainerResponse{}, nil
}

func (d *describing) DescribeContainer(_ context.Context, r *api.DescribeContainerRequest) (*api.DescribeContainerResponse, error) {
	d.told = append(d.told, r)
	_, err := os.Stat(d.before)
	d.early = d.early || err == nil
	return &api.DescribeContainerResponse{}, d.refuse
}

// ctlProcess runs nvsharectl as a process of its own.
func ctlProcess(t *testing.T, args string) (code int, out string) {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "NVSHARE_TEST_CTL="+args)
	text, _ := cmd.CombinedOutput()
	return cmd.ProcessState.ExitCode(), string(text)
}

// someLibrary is a library that every program can load, in place of the shim.
func someLibrary(t *testing.T) string {
	t.Helper()
	found, _ := filepath.Glob("/lib/*/libm.so.6")
	if len(found) == 0 {
		t.Skip("no library to stand for the shim is found")
	}
	return found[0]
}

// needsGroup skips a test where no program can be a tenant of its own.
func needsGroup(t *testing.T) {
	t.Helper()
	g, err := makeGroup(strings.Repeat("e", 64))
	if err != nil {
		t.Skipf("no cgroup can be made here: %v", err)
	}
	g.remove()
}

func TestRun(t *testing.T) {
	dir, shim := t.TempDir(), someLibrary(t)
	code, out := ctlProcess(t, "run --run-dir "+dir+" --shim "+shim+" --gpu 1 -- env")
	if code != 0 {
		t.Fatalf("exit %d, %s", code, out)
	}
	for _, want := range []string{"LD_PRELOAD=" + shim, "NVSHARE_RUN_DIR=" + dir, "CUDA_VISIBLE_DEVICES=1", "CUDA_DEVICE_ORDER=PCI_BUS_ID"} {
		if !strings.Contains(out, want+"\n") {
			t.Errorf("the program lacks %s in\n%s", want, out)
		}
	}
	if code, out := ctlProcess(t, "run --shim "+shim+" -- false"); code != 1 || out != "" {
		t.Errorf("the program's exit status: %d, %s", code, out)
	}
	if code, out := ctlProcess(t, "run --shim /none -- true"); code != exitFailed || !strings.Contains(out, "install nvshare") {
		t.Errorf("no shim: exit %d, %s", code, out)
	}
	if code, out := ctlProcess(t, "run --shim "+shim+" --memory-limit lots -- true"); code != exitUsage || !strings.Contains(out, "--memory-limit") {
		t.Errorf("a wrong limit: exit %d, %s", code, out)
	}
	if code, out := ctlProcess(t, "run --shim "+shim); code != exitUsage || !strings.Contains(out, "which program?") {
		t.Errorf("no program: exit %d, %s", code, out)
	}
	nothing := ""
	for _, field := range api.Fields {
		if strings.Contains(field.Usage, "none") {
			nothing += " --" + field.Key + " none"
		}
	}
	if code, out := ctlProcess(t, "run --shim "+shim+nothing+" -- true"); code != 0 || out != "" {
		t.Errorf("%s: exit %d, %s", nothing, code, out)
	}
}

// A program that does not start ends as in a shell, with a word about why.
func TestRunOfNoProgram(t *testing.T) {
	needsGroup(t)
	shim, dir := someLibrary(t), t.TempDir()
	text, script := filepath.Join(dir, "text"), filepath.Join(dir, "script")
	for path, mode := range map[string]os.FileMode{text: 0o644, script: 0o755} {
		if err := os.WriteFile(path, []byte("#!/nosuchshell\n"), mode); err != nil {
			t.Fatal(err)
		}
	}
	for _, flags := range []string{"", "--name mine "} {
		for _, tc := range []struct {
			program string
			code    int
			why     string
		}{
			{"nosuchprog", 127, "nosuchprog"},
			{dir + "/nosuchprog", 127, "no such file"},
			{script, 127, "no such file"},
			{text, 126, "permission denied"},
			{dir, 126, "is a directory"},
			{"sh -c exit${IFS}3", 3, ""},
			{"sh -c kill${IFS}-9${IFS}$$", 128 + 9, ""},
		} {
			cmd := exec.Command("/proc/self/exe")
			cmd.Env = append(os.Environ(), "NVSHARE_TEST_CTL=run --run-dir "+serve(t, &describing{})+" --shim "+shim+" "+flags+"-- "+tc.program)
			out, _ := cmd.CombinedOutput()
			status := cmd.ProcessState.Sys().(syscall.WaitStatus)
			code := status.ExitStatus()
			if status.Signaled() { // a program that nvsharectl has become
				code = 128 + int(status.Signal())
			}
			if code != tc.code || !strings.Contains(string(out), tc.why) || (len(out) > 0) != (tc.why != "") {
				t.Errorf("run %s-- %s: exit %d, %s", flags, tc.program, code, out)
			}
		}
	}
}

// An installation elsewhere (nvsharectl install --prefix) has its shim beside its programs.
func TestRunFindsTheShimOfItsPrefix(t *testing.T) {
	prefix := t.TempDir()
	self, shim := filepath.Join(prefix, "bin/nvsharectl"), filepath.Join(prefix, "lib", cdi.ShimFile)
	for from, to := range map[string]string{"/proc/self/exe": self, someLibrary(t): shim} {
		text, err := os.ReadFile(from)
		if err != nil {
			t.Fatal(err)
		}
		if err := replaceFile(to, text); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(self, 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(cdi.DefaultPaths.ShimDir); err == nil {
		t.Skip("the plugin's shim of this host goes before it")
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), "NVSHARE_TEST_CTL=run -- env")
	if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "LD_PRELOAD="+shim) {
		t.Errorf("%v, %s", err, out)
	}
}

// The program is shown GPUs as they were named: many programs read numbers, or UUIDs, and not both. CUDA
// counts GPUs by itself: where its numbers would be others, as beside a GPU that is lost, they are UUIDs.
func TestRunOnSomeGPUs(t *testing.T) {
	shim, r := someLibrary(t), sample()
	first, second := r.Gpus[0].Uuid, r.Gpus[1].Uuid
	for _, tc := range []struct {
		flags string
		code  int
		want  string
	}{
		{"--gpu 1", 0, "CUDA_VISIBLE_DEVICES=1\n"},
		{"--gpu 1", 0, "CUDA_DEVICE_ORDER=PCI_BUS_ID\n"},
		{"--gpu 1,0", 0, "CUDA_VISIBLE_DEVICES=1,0\n"},
		{"--gpu 1," + first, 0, "CUDA_VISIBLE_DEVICES=" + second + "," + first + "\n"},
		{"--gpu " + strings.ToLower(first), 0, "CUDA_VISIBLE_DEVICES=" + first + "\n"},
		{"--gpu 7", exitUsage, `--gpu "7": the scheduler knows no such GPU`},
		{"--gpu 0,7", exitUsage, `--gpu "7": the scheduler knows no such GPU`},
		{"--overlap small", exitUsage, "say on which GPU"},
		{"--overlap small --gpu 0,1", exitUsage, "has one GPU"},
	} {
		code, out := ctlProcess(t, "run --run-dir "+serve(t, &fake{status: r})+" --shim "+shim+" "+tc.flags+" -- env")
		if code != tc.code || !strings.Contains(out, tc.want) {
			t.Errorf("%s: exit %d, %s", tc.flags, code, out)
		}
	}
	lost := sample()
	lost.Gpus = lost.Gpus[1:]
	if code, out := ctlProcess(t, "run --run-dir "+serve(t, &fake{status: lost})+" --shim "+shim+" --gpu 1 -- env"); code != 0 || !strings.Contains(out, "CUDA_VISIBLE_DEVICES="+second+"\n") {
		t.Errorf("GPU 0 is lost: exit %d, %s", code, out)
	}
	if code, out := ctlProcess(t, "run --run-dir "+t.TempDir()+" --shim "+shim+" --gpu 0 --name mine -- env"); code != exitUnreachable {
		t.Errorf("a tenant without a scheduler: exit %d, %s", code, out)
	}
}

// A promise holds on the GPUs that the program is shown, and not on all: the scheduler is told
// them, and refuses one that is drained.
func TestRunAsTenantOfAGPU(t *testing.T) {
	needsGroup(t)
	d := &describing{fake: fake{status: sample()}}
	code, out := ctlProcess(t, "run --run-dir "+serve(t, d)+" --shim "+someLibrary(t)+" --gpu 1 --core-request 60 -- env")
	want := d.status.Gpus[1].Uuid
	if code != 0 || len(d.told) != 1 || !slices.Equal(d.told[0].Container.Gpus, []string{want}) || !strings.Contains(out, "CUDA_VISIBLE_DEVICES=1\n") {
		t.Errorf("exit %d, %s; told %v", code, out, d.told)
	}
}

// A program with a limit is a tenant of its own, which the scheduler knows before the
// program's first instruction. A scheduler that refuses keeps it from starting.
func TestRunAsTenant(t *testing.T) {
	needsGroup(t)
	shim, made := someLibrary(t), filepath.Join(t.TempDir(), "made")
	for _, refuse := range []error{nil, status.Error(codes.FailedPrecondition, "60 % cannot be promised")} {
		d := &describing{before: made, refuse: refuse}
		dir := serve(t, d)
		code, out := ctlProcess(t, "run --run-dir "+dir+" --shim "+shim+" --memory-limit 8Gi --core-request 60 --name mine -- touch "+made)
		if len(d.told) != 1 || d.early {
			t.Fatalf("exit %d, %s; told %v, early %v", code, out, d.told, d.early)
		}
		c := d.told[0].Container
		if c.Terms() != (api.Terms{MemoryLimit: 8 << 30, CoreRequest: 60}) || c.Name != "mine" || d.told[0].Pid == 0 || len(c.Id) != 64 {
			t.Errorf("told %v", d.told[0])
		}
		_, err := os.Stat(made)
		if ran := err == nil; ran != (refuse == nil) || (code == 0) != ran || !ran && !strings.Contains(out, "cannot be promised") {
			t.Errorf("exit %d, %s; it ran: %v", code, out, ran)
		}
		awaitNoGroup(t, c.Id)
		_ = os.Remove(made)
	}
	d := &describing{}
	if code, out := ctlProcess(t, "run --run-dir "+serve(t, d)+" --shim "+shim+" --name mine -- false"); code != 1 || out != "" {
		t.Errorf("the program's exit status: %d, %s", code, out)
	}
}

// Without root a program may have its user's limits, but no overlap group.
func TestRunWithoutRoot(t *testing.T) {
	f := &runFlags{groups: func(string) (group, error) { return group{}, fs.ErrPermission }}
	for want, terms := range map[string]api.Terms{"--user": {MemoryLimit: 8 << 30}, "needs root to be a tenant of its own (sudo nvsharectl run)": {Overlap: "small"}} {
		err := f.becomeTenant(t.Context(), "", terms, nil, "")
		if !errors.Is(err, fs.ErrPermission) || !strings.Contains(err.Error(), want) || terms.Overlap != "" && strings.Contains(err.Error(), "--user") {
			t.Errorf("%+v: %v", terms, err)
		}
	}
}

// awaitNoGroup waits until nothing is left of a tenant's cgroup.
func awaitNoGroup(t *testing.T, id string) {
	t.Helper()
	for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		left, _ := filepath.Glob("/sys/fs/cgroup/nvshare-" + id + "*")
		more, _ := filepath.Glob("/sys/fs/cgroup/*/nvshare-" + id + "*") // version 1
		if left = append(left, more...); len(left) == 0 {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("left behind: %v", left)
		}
	}
}

// nvsharectl becomes the program, so that signals, the keys of a terminal and a stop are the program's; and
// its cgroup goes when it ends, whatever ends it. What is no child of it can't make it wait.
func TestRunBecomesTheProgram(t *testing.T) {
	needsGroup(t)
	d := &describing{}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "NVSHARE_TEST_CTL=run --run-dir "+serve(t, d)+" --shim "+someLibrary(t)+" --name mine -- sh -c echo${IFS}$$;ps${IFS}-o${IFS}pid=${IFS}--ppid${IFS}$$|wc${IFS}-l;exec${IFS}sleep${IFS}1000")
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	var pid, children int
	if _, err := fmt.Fscan(out, &pid, &children); err != nil || pid != cmd.Process.Pid || children > 2 || d.told[0].Pid != uint32(pid) { // ps and wc
		t.Errorf("process %d, not %d, with %d children: %v", pid, cmd.Process.Pid, children, err)
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	awaitNoGroup(t, d.told[0].Container.Id)
}

// A child that outlives the program keeps the cgroup, and with the child it goes; so do those that the program made in it.
func TestRunIsOutlived(t *testing.T) {
	needsGroup(t)
	d := &describing{}
	program := filepath.Join(t.TempDir(), "program")
	if err := os.WriteFile(program, []byte(`#!/bin/sh
for d in /sys/fs/cgroup/nvshare-*.scope /sys/fs/cgroup/*/nvshare-*.scope; do
	! grep -qx $$ "$d/cgroup.procs" || mkdir -p "$d/a/b"
done 2>/dev/null
sleep 2 >/dev/null 2>&1 &
`), 0o755); err != nil {
		t.Fatal(err)
	}
	if code, out := ctlProcess(t, "run --run-dir "+serve(t, d)+" --shim "+someLibrary(t)+" --name mine -- "+program); code != 0 {
		t.Fatalf("exit %d, %s", code, out)
	}
	awaitNoGroup(t, d.told[0].Container.Id)
}

// A cgroup that a child has made and is not in yet, as an engine does before it starts a container, is not taken away from it.
func TestRunIsOutlivedByOneThatMakesCgroups(t *testing.T) {
	needsGroup(t)
	d, dir := &describing{}, t.TempDir()
	program := filepath.Join(dir, "program")
	if err := os.WriteFile(program, []byte(`#!/bin/sh
(
	cd "`+dir+`"
	for d in /sys/fs/cgroup/nvshare-*.scope /sys/fs/cgroup/*/nvshare-*.scope; do
		! grep -qx $$ "$d/cgroup.procs" || mkdir -p "$d/a/b"
	done 2>/dev/null
	echo >made
	while kill -0 $$; do sleep 0.01; done
	sleep 2
	ls -d /sys/fs/cgroup/nvshare-*.scope/a/b /sys/fs/cgroup/*/nvshare-*.scope/a/b >left
) >/dev/null 2>&1 &
while [ ! -e "`+dir+`/made" ]; do sleep 0.01; done
`), 0o755); err != nil {
		t.Fatal(err)
	}
	if code, out := ctlProcess(t, "run --run-dir "+serve(t, d)+" --shim "+someLibrary(t)+" --name mine -- "+program); code != 0 {
		t.Fatalf("exit %d, %s", code, out)
	}
	awaitNoGroup(t, d.told[0].Container.Id)
	if left, err := os.ReadFile(filepath.Join(dir, "left")); err != nil || !strings.Contains(string(left), d.told[0].Container.Id) {
		t.Errorf("its child had the cgroups %q, %v", left, err)
	}
}

// What nvsharectl was started to ignore, as by nohup and as a shell's script does in the
// background, its program ignores too.
func TestRunIgnoresWhatItIsToldTo(t *testing.T) {
	if signal.Ignored(syscall.SIGINT) {
		t.Skip("the tests themselves were started with SIGINT ignored")
	}
	needsGroup(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, flags := range []string{"", "--name mine "} {
		cmd := exec.Command("sh", "-c", "trap '' HUP INT; exec "+self)
		cmd.Env = append(os.Environ(), "NVSHARE_TEST_CTL=run --run-dir "+serve(t, &describing{})+" --shim "+someLibrary(t)+" "+flags+"-- grep SigIgn /proc/self/status")
		out, err := cmd.CombinedOutput()
		var ignored uint64 // others may have been ignored before
		if _, scanErr := fmt.Sscanf(string(out), "SigIgn:\t%x", &ignored); err != nil || scanErr != nil || ignored&3 != 3 {
			t.Errorf("run %s: %v, %s", flags, err, out)
		}
	}
}
