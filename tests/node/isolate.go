// SPDX-License-Identifier: Apache-2.0

package node

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// The program that calls Isolated runs three times: as the outer process, as
// process 1 of the new namespaces (it mounts, then reaps), and as the worker.
const (
	stageEnv    = "NVSHARE_NODE_STAGE"
	dirEnv      = "NVSHARE_NODE_DIR"
	stageInit   = "init"
	stageWorker = "worker"
)

// exitInterrupted is what the outer process returns after SIGINT or SIGTERM.
const exitInterrupted = 130

// privateDirs are empty in each node, and clusterDirs also in a node that runs
// Kubernetes.
var (
	privateDirs = []string{"/run", "/dev/shm"}
	clusterDirs = []string{"/var/lib", "/var/log"}
)

// killAfter is how long the worker may clean up after a signal.
const killAfter = 20 * time.Second

// Isolated calls inside in a private environment below parent. It returns inside's exit
// status, or 1 with a message on standard error if the environment cannot be made.
// inside gets a fresh work directory, whose base name starts with prefix. After a
// failure dir/log stays; everything else is removed. Call it early in main, with all
// state in arguments and environment, because it executes the program again.
func Isolated(parent, prefix string, inside func(dir string) int) int {
	return isolated(parent, prefix, 0, inside)
}

// IsolatedCluster is Isolated for a node that runs Kubernetes. Its network has no way
// out, /var/lib and /var/log are private too, and mounts propagate, because volumes of
// pods may ask for that.
func IsolatedCluster(parent, prefix string, inside func(dir string) int) int {
	return isolated(parent, prefix, unix.CLONE_NEWNET, inside)
}

func isolated(parent, prefix string, network uintptr, inside func(dir string) int) int {
	var status int
	var err error
	switch os.Getenv(stageEnv) {
	case stageInit:
		status, err = runInit(os.Getenv(dirEnv), network != 0)
	case stageWorker:
		dir := os.Getenv(dirEnv)
		// A nested use (the demo inside a test) starts with the first stage.
		os.Unsetenv(stageEnv)
		os.Unsetenv(dirEnv)
		return inside(dir)
	default:
		status, err = runOuter(parent, prefix, network)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return status
}

func runOuter(parent, prefix string, network uintptr) (status int, err error) {
	if os.Geteuid() != 0 {
		return 1, errors.New("an isolated node needs root for namespaces and mounts: run it as root (sudo)")
	}
	parent, err = filepath.Abs(parent)
	if err != nil {
		return 1, err
	}
	self, err := os.Executable()
	if err != nil {
		return 1, err
	}
	for _, path := range []string{parent, self} {
		if dir := replaced(path, network != 0); dir != "" {
			return 1, fmt.Errorf("%s is below %s, which the node replaces by an empty directory: move the clone, or set TMPDIR, to another place", path, dir)
		}
	}
	if err := os.MkdirAll(parent, 0o755); err != nil {
		return 1, err
	}
	sweep(parent, prefix)

	dir := filepath.Join(parent, fmt.Sprintf("%s%d", prefix, os.Getpid()))
	lock, err := makeWorkDir(dir)
	if err != nil {
		return 1, err
	}
	defer lock.Close()
	defer func() {
		keep := status != 0 && status != exitInterrupted
		err = errors.Join(err, removeWorkDir(dir, keep))
	}()

	signals := make(chan os.Signal, 4)
	signal.Notify(signals, unix.SIGINT, unix.SIGTERM, unix.SIGHUP)
	defer signal.Stop(signals)

	cmd, err := startStage(stageInit, dir, unix.CLONE_NEWNS|unix.CLONE_NEWPID|unix.CLONE_NEWIPC|unix.CLONE_NEWUTS|network)
	if err != nil {
		return 1, fmt.Errorf("start in new namespaces: %w", err)
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()

	interrupted := false
	var kill <-chan time.Time
	for {
		select {
		case <-signals:
			if !interrupted {
				interrupted = true
				kill = time.After(killAfter)
			}
			_ = cmd.Process.Signal(unix.SIGTERM)
		case <-kill:
			_ = cmd.Process.Kill()
		case <-done:
			// The kernel has ended every process of the pid namespace by now.
			if interrupted {
				return exitInterrupted, nil
			}
			return exitStatus(cmd.ProcessState.Sys().(syscall.WaitStatus)), nil
		}
	}
}

// replaced returns the directory above path that the node replaces by one of its
// own, or "" if the node's processes can see path.
func replaced(path string, cluster bool) string {
	dirs := privateDirs
	if cluster {
		dirs = append(slices.Clone(dirs), clusterDirs...)
	}
	for _, dir := range dirs {
		if strings.HasPrefix(path, dir+"/") {
			return dir
		}
	}
	return ""
}

// startStage executes this program again. The child dies with this process. Its
// parent-death signal belongs to the thread that started it, so the thread stays locked.
func startStage(stage, dir string, cloneflags uintptr) (*exec.Cmd, error) {
	runtime.LockOSThread()
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(self, os.Args[1:]...)
	cmd.Args[0] = os.Args[0]
	cmd.Env = append(os.Environ(), stageEnv+"="+stage, dirEnv+"="+dir)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: cloneflags, Pdeathsig: unix.SIGKILL}
	return cmd, cmd.Start()
}

// runInit is process 1 of the namespaces. It reaps the processes that daemons leave
// behind; the worker cannot, because os/exec waits for its own children there.
func runInit(dir string, cluster bool) (int, error) {
	if err := privateMounts(dir); err != nil {
		return 1, err
	}
	if cluster {
		if err := clusterMounts(); err != nil {
			return 1, err
		}
	}
	if err := unix.Sethostname([]byte("nvshare-node")); err != nil {
		return 1, fmt.Errorf("set host name: %w", err)
	}
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, unix.SIGINT, unix.SIGTERM, unix.SIGHUP)

	cmd, err := startStage(stageWorker, dir, 0)
	if err != nil {
		return 1, fmt.Errorf("start worker: %w", err)
	}
	worker := cmd.Process.Pid
	go func() {
		for range signals {
			_ = unix.Kill(worker, unix.SIGTERM)
		}
	}()
	for {
		var ws syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &ws, 0, nil)
		if errors.Is(err, syscall.EINTR) {
			continue
		}
		if err != nil {
			return 1, fmt.Errorf("wait for children: %w", err)
		}
		if pid == worker {
			return exitStatus(ws), nil
		}
	}
}

func exitStatus(ws syscall.WaitStatus) int {
	if ws.Signaled() {
		return 128 + int(ws.Signal())
	}
	return ws.ExitStatus()
}

// privateMounts hides the machine's run-time state from the node, and the node's state
// from the machine. dir/private holds all container state, in memory.
func privateMounts(dir string) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	// Container engines need the resolver file, which may be below /run.
	resolv, _ := filepath.EvalSymlinks("/etc/resolv.conf")
	resolvData, _ := os.ReadFile(resolv)

	private := filepath.Join(dir, "private")
	for _, m := range []struct {
		source, target, fstype, data string
		flags                        uintptr
	}{
		{"proc", "/proc", "proc", "", unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC},
		{"nvshare-run", "/run", "tmpfs", "mode=0755", unix.MS_NOSUID | unix.MS_NODEV},
		{"nvshare-shm", "/dev/shm", "tmpfs", "mode=1777", unix.MS_NOSUID | unix.MS_NODEV},
		{"nvshare-node", private, "tmpfs", "mode=0755", 0},
	} {
		if err := unix.Mount(m.source, m.target, m.fstype, m.flags, m.data); err != nil {
			return fmt.Errorf("mount %s on %s: %w", m.fstype, m.target, err)
		}
	}
	if strings.HasPrefix(resolv, "/run/") {
		if err := os.MkdirAll(filepath.Dir(resolv), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(resolv, resolvData, 0o644); err != nil {
			return err
		}
	}
	if real, err := filepath.EvalSymlinks("/var/run"); err != nil || real != "/run" {
		return fmt.Errorf("/var/run leads to %q, not to /run: the node's files would mix with the machine's", real)
	}
	return nil
}

func clusterMounts() error {
	for _, dir := range clusterDirs {
		if err := unix.Mount("nvshare"+strings.ReplaceAll(dir, "/", "-"), dir, "tmpfs", unix.MS_NODEV, "mode=0755"); err != nil {
			return fmt.Errorf("mount tmpfs on %s: %w", dir, err)
		}
	}
	// These mounts do not reach the machine: they are no peers of the machine's.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SHARED, ""); err != nil {
		return fmt.Errorf("make mounts shared: %w", err)
	}
	return nil
}
