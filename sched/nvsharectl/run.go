// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/cdi"
	"github.com/nvshare/nvshare/sched/api"
)

type runFlags struct {
	gpu, shim, name, user string
	byNumber              bool // CUDA has the same numbers for GPUs as gpu
	terms                 termFlags
	// groups makes the cgroup of a tenant of its own; tests replace it.
	groups func(id string) (group, error)
}

func startCommand(root *rootFlags, io streams) *cobra.Command {
	f := &runFlags{terms: termFlags{}, groups: makeGroup}
	cmd := &cobra.Command{
		Use:   "run [flags] -- PROGRAM [ARGUMENT...]",
		Short: "Run a program that shares GPUs, without a container",
		Long: `run starts a program with the shim. Without other flags the program counts to
its user. With a name or with a limit, a promise or a priority, which need
root, the program and its children are a tenant of their own until the program
ends.

With --user root starts the program as another user. Do not use sudo for that
after the --: it removes LD_PRELOAD, so what it starts has no shim, takes no
turns and has no limits.

Exit status: the program's, which nvsharectl becomes;
127: there is no such program; 126: it cannot be executed. What keeps
nvsharectl from starting it is 1, 2 or 3, as in other commands.`,
		Example: `  nvsharectl run -- python3 train.py
  sudo nvsharectl run --memory-limit 8Gi --core-limit 25 -- python3 train.py
  sudo nvsharectl run --user $USER --memory-limit 8Gi -- python3 train.py`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return errors.New("which program? give it after --, like nvsharectl run -- python3 train.py")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			return f.run(cmd, root.runDir, io, args)
		},
	}
	flags := cmd.Flags()
	flags.SetInterspersed(false) // what follows the program is the program's
	flags.StringVar(&f.gpu, "gpu", "", "show the program only the GPUs with these `indices or UUIDs`, by CUDA_VISIBLE_DEVICES in the same form; a promise holds on them")
	flags.StringVar(&f.name, "name", "", "the `name` of the tenant (default: that of the program)")
	flags.StringVar(&f.user, "user", "", "run the program as the user with this `name or number`, with all groups of that user; needs root")
	flags.StringVar(&f.shim, "shim", "", "`path` of the shim (default: where it is installed)")
	f.terms.add(flags, api.AllFields)
	return cmd
}

// runEngine is what the scheduler is told to be the engine of such a tenant.
const runEngine = "nvsharectl run"

// exitError is the exit status of a program that did not start.
type exitError struct {
	status int
	error
}

// noStart says that a program did not start, with the exit status of shells.
func noStart(why error) error {
	if errors.Is(why, exec.ErrNotFound) || errors.Is(why, fs.ErrNotExist) {
		return exitError{127, why}
	}
	return exitError{126, why}
}

func (f *runFlags) run(cmd *cobra.Command, runDir string, io streams, args []string) error {
	terms, _, err := f.terms.parse(cmd)
	if err != nil {
		return err
	}
	if err := terms.Consistent(); err != nil {
		return usageError{err}
	}
	shim, err := f.findShim()
	if err != nil {
		return err
	}
	as, err := f.as()
	if err != nil {
		return err
	}
	if filepath.Base(args[0]) == "sudo" {
		fmt.Fprintln(io.err, "nvsharectl: warning: sudo removes LD_PRELOAD: what it starts has no shim, takes no turns and has no limits; use --user")
	}
	own := terms != (api.Terms{}) || f.name != "" // a tenant of its own
	gpus, err := f.gpus(cmd.Context(), runDir, terms, own)
	if err != nil {
		return err
	}
	f.setEnvironment(runDir, shim, terms, gpus, as)
	path, err := exec.LookPath(args[0])
	if err != nil {
		return noStart(err)
	}
	if own {
		if err := f.becomeTenant(cmd.Context(), runDir, terms, gpus, filepath.Base(path)); err != nil {
			return err
		}
	}
	if as != nil {
		if err := as.become(); err != nil {
			return err
		}
	}
	return noStart(fmt.Errorf("run %s: %w", path, unix.Exec(path, args, os.Environ())))
}

// as returns the user that --user names; nil: none.
func (f *runFlags) as() (*person, error) {
	switch {
	case f.user == "":
		return nil, nil
	case os.Geteuid() != 0:
		return nil, fmt.Errorf("--user needs root: sudo nvsharectl run --user %s", f.user)
	}
	return findPerson(f.user)
}

// setEnvironment makes the environment of this process that of the program.
func (f *runFlags) setEnvironment(runDir, shim string, terms api.Terms, gpus []string, as *person) {
	uid := uint32(os.Getuid())
	if as != nil {
		as.setEnvironment()
		uid = uint32(as.uid)
	}
	if terms.Overlap != "" {
		dir := api.OverlapDir(runDir, api.OverlapIn("", uid, terms.Overlap), gpus[0])
		for key, value := range api.OverlapEnvironment(filepath.Join(dir, api.OverlapPipe), terms) {
			os.Setenv(key, value)
		}
	}
	switch {
	case len(gpus) > 0 && !f.byNumber:
		os.Setenv(cdi.VisibleDevicesEnv, strings.Join(gpus, ","))
	case f.gpu != "": // else CUDA counts the fastest GPU first
		os.Setenv(cdi.VisibleDevicesEnv, f.gpu)
		os.Setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
	}
	os.Setenv(api.RunDirEnv, runDir)
	if others := os.Getenv(cdi.PreloadEnv); others != "" {
		shim += ":" + others
	}
	os.Setenv(cdi.PreloadEnv, shim)
}

func (f *runFlags) findShim() (string, error) {
	paths := shimPaths()
	if f.shim != "" {
		paths = []string{f.shim}
	}
	for _, path := range paths {
		if _, err := os.Stat(path); err == nil {
			return filepath.Abs(path)
		}
	}
	return "", fmt.Errorf("no shim is at %s: install nvshare, or name it with --shim", strings.Join(paths, ", "))
}

// overlapPatience bounds the start of an overlap group's MPS daemon, of which the scheduler
// tells before.
const overlapPatience = 15 * time.Second

// gpus returns the UUIDs of the GPUs that the program is shown: those of --gpu, and that of an
// overlap group, whose members have one. None: all, or no scheduler knows them, which a tenant
// of its own needs anyhow.
func (f *runFlags) gpus(ctx context.Context, runDir string, terms api.Terms, own bool) (uuids []string, err error) {
	if f.gpu == "" && terms.Overlap == "" {
		return nil, nil
	}
	r, err := askStatus(ctx, runDir)
	var unreachable *api.UnreachableError
	switch {
	case err != nil && !own && errors.As(err, &unreachable):
		return nil, nil
	case err != nil:
		return nil, err
	case f.gpu == "" && len(r.Gpus) == 1:
		return []string{r.Gpus[0].Uuid}, nil
	case f.gpu == "":
		return nil, usageError{errors.New("--overlap: say on which GPU with --gpu: a member of an overlap group has one")}
	}
	for name := range strings.SplitSeq(f.gpu, ",") {
		i := slices.IndexFunc(r.Gpus, func(g *api.GPU) bool { return isGPU(g, strings.TrimSpace(name)) })
		if i < 0 {
			return nil, usageError{fmt.Errorf("--gpu %.64q: the scheduler knows no such GPU (nvsharectl status lists them)", name)}
		}
		uuids = append(uuids, r.Gpus[i].Uuid)
	}
	f.byNumber = terms.Overlap == "" && countsAsCUDA(r.Gpus) && !strings.ContainsFunc(f.gpu, func(c rune) bool { return c != ',' && (c < '0' || c > '9') })
	if terms.Overlap != "" && len(uuids) > 1 {
		return nil, usageError{fmt.Errorf("--gpu %.64q: a member of an overlap group has one GPU", f.gpu)}
	}
	return uuids, nil
}

// countsAsCUDA tells whether CUDA counts GPUs, in the order of the PCI bus, as the scheduler does: not where
// one is lost, whose number the scheduler keeps, nor where MIG devices are.
func countsAsCUDA(gpus []*api.GPU) bool {
	for i, g := range gpus {
		if int(g.Index) != i || g.Fault != "" || !strings.HasPrefix(g.Uuid, "GPU-") {
			return false
		}
	}
	return true
}

// becomeTenant puts this process into a cgroup of its own, which the scheduler takes for a
// container. It stays there as it becomes the program.
func (f *runFlags) becomeTenant(ctx context.Context, runDir string, terms api.Terms, gpus []string, program string) error {
	var random [32]byte
	if _, err := rand.Read(random[:]); err != nil {
		return err
	}
	id := hex.EncodeToString(random[:])
	g, err := f.groups(id)
	if err != nil {
		hint := "a program needs root to be a tenant of its own (sudo nvsharectl run)"
		var fixed api.Terms
		if fixed.Copy(terms, api.FixedFields); fixed == (api.Terms{}) && terms != fixed {
			hint += "; without root it has what root sets for its user: sudo nvsharectl set --user"
		}
		return fmt.Errorf("%w; %s", err, hint)
	}
	if err := g.removeLater(); err != nil {
		g.remove()
		return err
	}
	if err := g.add(os.Getpid()); err != nil {
		return err
	}
	req := &api.DescribeContainerRequest{Pid: uint32(os.Getpid()), Container: &api.Container{Id: id, Name: cmp.Or(f.name, program), Engine: runEngine, Gpus: gpus}}
	req.Container.SetTerms(terms)
	patience := callTimeout
	if terms.Overlap != "" {
		patience = overlapPatience
	}
	return callWithin(ctx, patience, runDir, func(ctx context.Context, c *api.Conn) error {
		_, err := c.DescribeContainer(ctx, req)
		return err
	})
}

// group is a cgroup that has the name of a container, in each hierarchy of the host.
type group struct{ dirs []string }

// makeGroup makes the cgroup in the hierarchy of version 2, or else in those of
// version 1.
func makeGroup(id string) (g group, err error) {
	name := "nvshare-" + id + ".scope"
	roots := []string{"/sys/fs/cgroup"}
	if _, err := os.Stat("/sys/fs/cgroup/cgroup.controllers"); err != nil {
		roots, _ = filepath.Glob("/sys/fs/cgroup/*")
	}
	err = errors.New("this host has no cgroup hierarchy in /sys/fs/cgroup")
	for _, root := range roots {
		if _, none := os.Stat(filepath.Join(root, "cgroup.procs")); none != nil || strings.Contains(root, "cpuset") {
			continue // a cgroup of cpuset takes nobody in before it has processors
		}
		dir := filepath.Join(root, name)
		if made := os.Mkdir(dir, 0o755); made != nil {
			err = made
			continue
		}
		g.dirs = append(g.dirs, dir)
	}
	if len(g.dirs) > 0 {
		err = nil
	}
	return g, err
}

func (g group) add(pid int) error {
	for _, dir := range g.dirs {
		if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0); err != nil {
			return err
		}
	}
	return nil
}

// removeLater starts a process that removes the cgroup when this one ends, whatever it has become by
// then. It is no child of the program, which may wait for all that it has.
func (g group) removeLater() error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	fd, err := unix.PidfdOpen(os.Getpid(), 0)
	if err != nil {
		return fmt.Errorf("open a pidfd: %w", err)
	}
	pidfd := os.NewFile(uintptr(fd), "pidfd")
	defer pidfd.Close()
	cmd := exec.Command("/bin/sh", append([]string{"-c", `"$0" "$@" &`, self, endedCommand}, g.dirs...)...)
	cmd.ExtraFiles, cmd.SysProcAttr = []*os.File{pidfd}, &syscall.SysProcAttr{Setsid: true} // no terminal ends it
	return cmd.Run()
}

const endedCommand = "run-ended"

// endedCmd is what removeLater starts. Children that outlive the program keep the cgroup, and the command: it ends with them.
func endedCmd() *cobra.Command {
	return &cobra.Command{
		Use: endedCommand, Short: "Remove the cgroup of a program that nvsharectl run has started", Hidden: true,
		RunE: func(_ *cobra.Command, dirs []string) error {
			for {
				if _, err := unix.Poll([]unix.PollFd{{Fd: 3, Events: unix.POLLIN}}, -1); err != unix.EINTR {
					for pause := 10 * time.Millisecond; !(group{dirs}).remove(); pause = min(2*pause, time.Second) {
						time.Sleep(pause)
					}
					return err
				}
			}
		},
	}
}

// remove takes the cgroup away, with those that the program has made in it. It returns false where a process is in one,
// and leaves them all: that process may be about to use one that is empty.
func (g group) remove() (gone bool) {
	gone = true
	for _, dir := range g.dirs {
		if hasProcess(dir) {
			gone = false
			continue
		}
		inner, _ := filepath.Glob(filepath.Join(dir, "*", "cgroup.procs"))
		for _, file := range inner {
			gone = group{[]string{filepath.Dir(file)}}.remove() && gone
		}
		gone = !errors.Is(os.Remove(dir), unix.EBUSY) && gone
	}
	return gone
}

// hasProcess says whether a process is in a cgroup, or in one that was made in it.
func hasProcess(dir string) (has bool) {
	_ = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Name() == "cgroup.procs" {
			pids, _ := os.ReadFile(path)
			has = has || len(pids) > 0
		}
		return nil
	})
	return has
}
