// SPDX-License-Identifier: Apache-2.0

package readme

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// patience bounds each wait for an event. It does not measure speed.
const patience = 5 * time.Minute

// elsewhere names the tests that run the commands that begin so, with an engine, a
// cluster or a package manager.
var elsewhere = []struct{ begins, file, test string }{
	{"dpkg -i", "../release/release_test.go", "TestDeb"},
	{"rpm -i", "../release/release_test.go", "TestRPM"},
	{"mkdir nvshare && tar", "../release/release_test.go", "TestTarball"},
	{".build/release/nvsharectl install --start", "../engines/systemd_test.go", "TestUnderSystemd"},
	{"systemctl enable --now", "../engines/systemd_test.go", "TestUnderSystemd"},
	{"nvsharectl uninstall", "../engines/uninstall_test.go", "TestInstallAndUninstall"},
	{"podman run -d --name a ", "../engines/podman_test.go", "TestPodman"},
	{"podman run -d --name b ", "../engines/podman_test.go", "TestPodman"},
	{"podman exec a ", "../engines/podman_test.go", "TestPodman"},
	{"podman run --device nvshare.com/gpu=0 --annotation nvshare.com/gpu-overlap=", "../engines/podman_test.go", "TestPodman"},
	{"make demo", "../demo/demo_test.go", "TestDemo"},
	{"kubectl annotate", "../kubernetes/cluster_test.go", "TestCluster"},
	{"nvsharectl run --overlap", "../engines/systemd_test.go", "TestUnderSystemd"},
	{"nvsharectl run --memory-limit", "../../sched/nvsharectl/run_test.go", "TestRunAsTenant"},
	{"install -m 755 deployments/slurm/nvshare.sh", "../engines/slurm_test.go", "TestSlurm"},
	{"echo libnvshare.so | sudo tee -a /etc/apptainer/nvliblist.conf", "../engines/apptainer_test.go", "TestApptainer"},
	{"apptainer exec --nv ", "../engines/apptainer_test.go", "TestApptainer"},
	{"sbatch --gres=shard", "../engines/slurm_test.go", "TestSlurm"},
}

// others names the tests of blocks that are no commands, by their language.
var others = map[string]struct{ file, test string }{
	"yaml": {"../../plugin/request_test.go", "TestAnnotationsOfREADME"},
	"ini":  {"../engines/systemd_test.go", "TestUnderSystemd"},
}

// thereIs fails if a file has no such test.
func thereIs(t *testing.T, what, file, test string) {
	t.Helper()
	if text, err := os.ReadFile(file); err != nil || !strings.Contains(string(text), "func "+test+"(") {
		t.Errorf("%q is run by %s in %s, which is not there: %v", what, test, file, err)
	}
}

// isElsewhere tells whether a test of elsewhere runs a line, and fails if there is no such test.
func isElsewhere(t *testing.T, line string) bool {
	t.Helper()
	for _, e := range elsewhere {
		if strings.HasPrefix(line, e.begins) {
			thereIs(t, line, e.file, e.test)
			return true
		}
	}
	return false
}

func commands(t *testing.T, pages ...string) []string {
	t.Helper()
	all, err := Commands(pages...)
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// A bed is a scheduler and one tenant on a simulated GPU.
type bed struct {
	env  []string
	path string
	user string // the tenant
}

func build(t *testing.T) (dir string) {
	t.Helper()
	dir = os.Getenv("NVSHARE_TEST_SIMGPU")
	if dir == "" {
		t.Skip("SKIPPED: NVSHARE_TEST_SIMGPU names no simulated GPU: make test-unit does")
	}
	return filepath.Dir(dir)
}

func newBed(t *testing.T, gpus string, options ...string) *bed {
	t.Helper()
	built := build(t)
	dir := t.TempDir()
	if out, err := exec.Command("go", "build", "-o", dir, "../../sched/nvshare-scheduler", "../../sched/nvsharectl").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	sim := filepath.Join(dir, "simgpu")
	if err := errors.Join(os.MkdirAll(sim+"/run", 0o755), os.WriteFile(sim+"/run/config", []byte(gpus), 0o644),
		os.Symlink(filepath.Join(built, "simgpu"), sim+"/lib"), os.Mkdir(dir+"/run", 0o755)); err != nil {
		t.Fatal(err)
	}
	path := dir + ":" + os.Getenv("PATH")
	b := &bed{path: path, env: append(os.Environ(), "PATH="+path, "NVSHARE_RUN_DIR="+dir+"/run", "XDG_RUNTIME_DIR="+dir,
		"NVSHARE_SIMGPU="+sim, "NVSHARE_SIMGPU_DIR="+sim+"/run", "LD_LIBRARY_PATH="+sim+"/lib", "TMPDIR="+t.TempDir()), user: fmt.Sprint(os.Getuid())}
	b.start(t, "", append([]string{dir + "/nvshare-scheduler"}, options...)...)
	b.await(t, "the scheduler", "nvsharectl version")
	b.start(t, filepath.Join(built, "lib/libnvshare.so"), filepath.Join(built, "bin/cuda-busy"), "--seconds", "600")
	b.await(t, "the tenant", "nvsharectl status -o json | grep -q pid")
	return b
}

// start starts a program that ends with the test.
func (b *bed) start(t *testing.T, preload string, argv ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Env = append(b.env, "LD_PRELOAD="+preload)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	return cmd
}

func (b *bed) await(t *testing.T, what, command string) {
	t.Helper()
	var out []byte
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		cmd := exec.Command("sh", "-c", command)
		cmd.Env = b.env
		var err error
		if out, err = cmd.CombinedOutput(); err == nil {
			return
		}
	}
	t.Fatalf("%s does not answer: %s", what, out)
}

// run runs a line of shell at the top of the tree.
func (b *bed) run(t *testing.T, line string) (status int, said string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, "sh", "-c", line)
	cmd.Dir, cmd.Env = "../..", b.env
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Errorf("%s: %v", line, err)
	}
	if ctx.Err() != nil {
		t.Errorf("%s did not end", line)
	}
	return cmd.ProcessState.ExitCode(), string(out)
}

// asTried puts the test's own tenant and programs where README has names, and lets
// commands end that would follow for ever.
func (b *bed) asTried(line string) string {
	for from, to := range map[string]string{
		"--container ml/train-a/main": "--user " + b.user,
		"why ml/train-a":              "why " + b.user,
		"run -- PROGRAM":              "run --shim .build/lib/libnvshare.so -- true",
		"so PROGRAM":                  "so .build/bin/cuda-busy --seconds 0.2",
		"--swap-memory 200Gi":         "--swap-memory 1Gi",                      // this machine may have less
		"events -f":                   "events -f & pid=$!; sleep 1; kill $pid", // it follows until then
		"doctor bundle":               "doctor bundle $XDG_RUNTIME_DIR/bundle.tar.gz",
	} {
		line = strings.ReplaceAll(line, from, to)
	}
	if line == "nvsharectl top" {
		line += " --once"
	}
	return line
}

func TestCommandsOfREADME(t *testing.T) {
	b := newBed(t, "gpus=1\n")
	all := commands(t, Pages("../..")...)
	if len(all) < 20 {
		t.Fatalf("found %d commands: the pattern is wrong", len(all))
	}
	for _, line := range all {
		t.Log(line)
		bare := strings.TrimPrefix(line, "sudo ")
		if isElsewhere(t, bare) {
			continue
		}
		words := strings.Fields(bare)
		switch {
		case words[0] == "make":
			if status, said := b.run(t, "make -n "+strings.Join(words[1:], " ")); status != 0 {
				t.Errorf("%s: status %d\n%s", line, status, said)
			}
		case words[0] == "nvsharectl" || strings.HasPrefix(words[0], "LD_PRELOAD=") || words[0] == "export":
			status, said := b.run(t, b.asTried(bare))
			// doctor's 1: this machine has faults of its own, like no plugin.
			if status != 0 && !(status == 1 && words[1] == "doctor") {
				t.Errorf("%s: status %d\n%s", line, status, said)
			}
		case strings.HasSuffix(words[0], "nvshare-scheduler"):
			// Another run directory, because the bed's has a scheduler.
			status, said := b.run(t, `dir=$(mktemp -d); `+"nvshare-scheduler --run-dir $dir "+b.asTried(strings.TrimSuffix(strings.Join(words[1:], " "), "&"))+
				` & pid=$!; tries=0; until nvsharectl --run-dir $dir version; do kill -0 $pid || exit 9; tries=$((tries + 1)); test $tries -lt 3600 || exit 8; sleep 0.05; done; kill $pid`)
			if status != 0 {
				t.Errorf("%s: status %d\n%s", line, status, said)
			}
		default:
			t.Errorf("nothing runs %q: run it here, or name its test in elsewhere", line)
		}
	}
}

// What is to be put into a file has a test, too.
func TestBlocksOfREADME(t *testing.T) {
	blocks, err := Blocks(Pages("../..")...)
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for _, block := range blocks {
		if block.Language == "sh" || block.Language == "" {
			continue
		}
		o, known := others[block.Language]
		if !known {
			t.Errorf("nothing tries what this block says: name its test in others\n%s", block.Text)
			continue
		}
		thereIs(t, block.Language, o.file, o.test)
		seen[block.Language] = true
	}
	if len(seen) != len(others) {
		t.Errorf("README has blocks of %v only", seen)
	}
}

// The commands of the simulated GPU's page, one after the other in one shell, do what the
// page says. Those for podman change the host: TestPodman has its like on a node of its own.
func TestCommandsOfSimulatedGPU(t *testing.T) {
	build(t)
	lines := commands(t, "../simgpu/README.md")
	podman := slices.IndexFunc(lines, func(line string) bool { return strings.HasPrefix(line, "make build ") })
	if podman < 0 {
		t.Fatal("the commands for podman are not there")
	}
	lines = lines[:podman]
	ctx, cancel := context.WithTimeout(t.Context(), 10*patience)
	defer cancel()
	said, err := os.Create(filepath.Join(t.TempDir(), "said"))
	if err != nil {
		t.Fatal(err)
	}
	defer said.Close()
	// Without -e: the status's 1 says that something is not well, like a plugin that is away.
	cmd := exec.CommandContext(ctx, "sh", "-uc", strings.Join(lines, "\n"))
	cmd.Dir, cmd.Stdout, cmd.Stderr = "../simgpu", said, said // a file, because the scheduler goes on
	cmd.Env = append(os.Environ(), "MAKEFLAGS=", "MAKELEVEL=", "LD_PRELOAD=", "TMPDIR="+t.TempDir())
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	err = cmd.Run()
	_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
	out, readErr := os.ReadFile(said.Name())
	if ctx.Err() != nil || readErr != nil {
		t.Fatalf("%v %v\n%s", err, readErr, out)
	}
	for _, want := range []string{"GPU 0", "turns", "overlaps: 0\n", "nvshare-scheduler has ended"} {
		if !strings.Contains(string(out), want) {
			t.Errorf("the commands do not say %q:\n%s", want, out)
		}
	}
}
