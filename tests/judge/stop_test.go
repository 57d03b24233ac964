// SPDX-License-Identifier: Apache-2.0

package judge

import (
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

const lockerEnv = "NVSHARE_TEST_LOCKER"

func TestMain(m *testing.M) {
	if path := os.Getenv(lockerEnv); path != "" {
		f, err := os.Open(path)
		for err == nil {
			if err = unix.Flock(int(f.Fd()), unix.LOCK_EX); err == nil {
				err = unix.Flock(int(f.Fd()), unix.LOCK_UN)
			}
		}
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// Whoever is stopped has no lock, though it has one for most of its time.
func TestStop(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), lockerEnv+"="+path)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	for range 50 {
		if err := Stop(cmd.Process.Pid); err != nil {
			t.Fatal(err)
		}
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
			t.Fatalf("it has the lock: %v", err)
		}
		if err := unix.Flock(int(f.Fd()), unix.LOCK_UN); err != nil {
			t.Fatal(err)
		}
		if err := cmd.Process.Signal(syscall.SIGCONT); err != nil {
			t.Fatal(err)
		}
	}
}
