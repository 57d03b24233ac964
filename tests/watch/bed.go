// SPDX-License-Identifier: Apache-2.0

package watch

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// Patience bounds every wait; it is longer than anything takes on any machine.
const Patience = 3 * time.Minute

// A Bed is a scheduler on simulated GPUs.
type Bed struct {
	Dir   string // of its own, with nvsharectl and nvshare-scheduler
	Build string // what make build and make simgpu filled
	Env   []string
	log   string
	all   []*exec.Cmd
}

// Compile compiles what beds run into a directory of build; go links nothing that is there
// already. root is the top of the tree.
func Compile(ctx context.Context, root, build string) error {
	compile := exec.CommandContext(ctx, "go", "build", "-o", programs(build)+"/", "./sched/nvshare-scheduler", "./sched/nvsharectl")
	compile.Dir = root
	if out, err := compile.CombinedOutput(); err != nil {
		return fmt.Errorf("go build: %w\n%s", err, out)
	}
	return nil
}

func programs(build string) string { return filepath.Join(build, "watch") }

// NewBed starts a scheduler in an empty directory. Compile comes before it; simgpu is the
// configuration of the simulated GPUs. After an error nothing runs; else the
// caller calls Close.
func NewBed(ctx context.Context, build, dir, simgpu string, args ...string) (b *Bed, err error) {
	sim := filepath.Join(dir, "sim")
	b = &Bed{Dir: dir, Build: build, log: filepath.Join(dir, "scheduler.log")}
	defer func() {
		if err != nil {
			b.Close()
		}
	}()
	if out, err := exec.CommandContext(ctx, "cp", "-r", programs(build)+"/.", dir).CombinedOutput(); err != nil {
		return b, fmt.Errorf("copy the programs: %w\n%s", err, out)
	}
	if err := errors.Join(os.MkdirAll(sim+"/run", 0o755), os.WriteFile(sim+"/run/config", []byte(simgpu), 0o644),
		os.Symlink(filepath.Join(build, "simgpu"), sim+"/lib"), os.Mkdir(dir+"/run", 0o755)); err != nil {
		return b, err
	}
	b.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"), "NVSHARE_RUN_DIR="+dir+"/run", "XDG_RUNTIME_DIR="+dir,
		"NVSHARE_SIMGPU="+sim, "NVSHARE_SIMGPU_DIR="+sim+"/run", "LD_LIBRARY_PATH="+sim+"/lib")
	log, err := os.Create(b.log)
	if err != nil {
		return b, err
	}
	defer log.Close()
	scheduler := exec.Command(filepath.Join(dir, "nvshare-scheduler"), args...)
	scheduler.Stdout, scheduler.Stderr = log, log
	if err := b.start(scheduler); err != nil {
		return b, err
	}
	return b, b.Await(ctx, func() error { _, err := b.Ctl(ctx, "version"); return err })
}

func (b *Bed) start(cmd *exec.Cmd) error {
	cmd.Env = append(b.Env, cmd.Env...)
	// A signal to the group ends also what a program has started.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return err
	}
	b.all = append(b.all, cmd)
	return nil
}

// Tenant starts a program of Build/bin with the shim, that counts to this user.
func (b *Bed) Tenant(program string, args ...string) error {
	cmd := exec.Command(filepath.Join(b.Build, "bin", program), args...)
	cmd.Env = []string{"LD_PRELOAD=" + b.Shim()}
	return b.start(cmd)
}

// Named starts a program of Build/bin as a tenant of its own, by nvsharectl run with these
// flags; root only.
func (b *Bed) Named(flags []string, program string, args ...string) error {
	return b.start(exec.Command(filepath.Join(b.Dir, "nvsharectl"), append(append(append([]string{"run", "--shim", b.Shim()}, flags...),
		"--", filepath.Join(b.Build, "bin", program)), args...)...))
}

// Shim is the shim that was built.
func (b *Bed) Shim() string { return filepath.Join(b.Build, "lib", "libnvshare.so") }

// Ctl runs nvsharectl and returns its output.
func (b *Bed) Ctl(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, filepath.Join(b.Dir, "nvsharectl"), args...)
	cmd.Env = b.Env
	out, err := cmd.CombinedOutput()
	if err != nil {
		err = fmt.Errorf("nvsharectl %s: %w\n%s", strings.Join(args, " "), err, out)
	}
	return string(out), err
}

// Await tries again until there is no error, for Patience.
func (b *Bed) Await(ctx context.Context, try func() error) error {
	ctx, cancel := context.WithTimeout(ctx, Patience)
	defer cancel()
	for {
		err := try()
		if err == nil {
			return nil
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
			said, _ := os.ReadFile(b.log)
			return fmt.Errorf("%w\nthe scheduler said:\n%s", err, said)
		}
	}
}

// Said awaits a line of the scheduler's log that has a text, and returns what follows it, up
// to a space or a quote.
func (b *Bed) Said(ctx context.Context, text string) (found string, err error) {
	return found, b.Await(ctx, func() error {
		log, err := os.ReadFile(b.log)
		if err != nil {
			return err
		}
		_, rest, there := strings.Cut(string(log), text)
		end := strings.IndexAny(rest, " \"\n")
		if !there || end < 0 {
			return fmt.Errorf("the scheduler does not say %q", text)
		}
		found = rest[:end]
		return nil
	})
}

// EndScheduler ends the scheduler.
func (b *Bed) EndScheduler() error {
	return b.all[0].Process.Signal(syscall.SIGTERM)
}

// Close ends the programs, the scheduler last.
func (b *Bed) Close() {
	for i := len(b.all) - 1; i >= 0; i-- {
		cmd := b.all[i]
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) // run removes its cgroup
		ended := time.AfterFunc(10*time.Second, func() { _ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) })
		_ = cmd.Wait()
		ended.Stop()
	}
}
