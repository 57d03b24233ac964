// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/manual"
)

// execute runs the program until it ends by itself, at once in all these tests.
func execute(args ...string) (status int, out string, err error) {
	status = exitUsage
	cmd := command(&status)
	var b strings.Builder
	cmd.SetOut(&b)
	cmd.SetArgs(args)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	err = cmd.ExecuteContext(ctx)
	return status, b.String(), err
}

func TestUsage(t *testing.T) {
	dir := t.TempDir()
	for args, want := range map[string]string{
		"--tq 0":          "not positive",
		"--tq -5":         "not positive",
		"--tq abc":        "--tq",
		"--tq 1us":        "from 1ms to 24h0m0s",
		"--tq 25h":        "from 1ms to 24h0m0s",
		"--grace 0":       "not positive",
		"--grace 25h":     "--grace",
		"--anti-thrash x": "neither on nor off nor auto",
		"--nonsense":      "unknown flag",

		"--web-addr 0.0.0.0:9404": "needs a token",
		"--web-addr x":            "--web-addr",
		"--web-addr 1.2.3.4:1 --web-token-file /nowhere": "read the page's token",

		"--swap-memory lots":                     "--swap-memory",
		"--swap-memory -1Gi":                     "--swap-memory",
		"--swap-ready 101%":                      "--swap-ready",
		"--swap-ready -1%":                       "--swap-ready",
		"--swap-ready some":                      "--swap-ready",
		"--swap-share -1":                        "--swap-share",
		"--swap-share 51":                        "--swap-share",
		"--swap-memory 0 --suspend-after 1h":     "--swap-memory",
		"--swap-ready 10%":                       "--swap-memory auto",
		"--swap-memory 1Gi --suspend-after 1ms":  "--suspend-after",
		"--swap-memory 1Gi --suspend-after soon": "--suspend-after",
		"--swap-headroom x":                      "--swap-headroom",
		"--gpu-memory 10Ti5":                     "--gpu-memory",

		"--metrics --metrics-addr 9402": "--metrics-addr",
		"surplus":                       "surplus",

		"--control-group no-such-group": "--control-group",
		"--control-group -1":            "--control-group",
		"prepare":                       "like 65529:65529",
		"prepare --owner 65529":         "UID:GID",
		"prepare --owner 65529:x":       "UID:GID",
		"prepare --owner 1:2:3":         "UID:GID",
		"prepare --owner -1:-1":         "UID:GID",
	} {
		status, _, err := execute(append(strings.Fields(args), "--run-dir", dir)...)
		if err == nil || status != exitUsage || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: status %d, %v, want %q", args, status, err, want)
		}
	}
	if entries, _ := os.ReadDir(dir); len(entries) != 0 {
		t.Errorf("a wrong command line left behind %v", entries)
	}
	if _, out, err := execute("--help"); err != nil || !strings.Contains(out, "--tq") || !strings.Contains(out, "NVSHARE_RUN_DIR") {
		t.Errorf("help: %v, %s", err, out)
	}
}

func TestOptions(t *testing.T) {
	log := logrus.New()
	log.SetOutput(io.Discard)
	f := flags{runDir: "some/dir", quantum: "45", grace: "1500ms", antiThrash: "off", fenceAction: "kill"}
	f.tuning.add(&cobra.Command{})
	o, err := f.options(logrus.NewEntry(log))
	if err != nil || o.Quantum != 45*time.Second || o.Grace != 1500*time.Millisecond || o.Mode != sched.Concurrent || !filepath.IsAbs(o.RunDir) {
		t.Errorf("got %+v, %v", o, err)
	}
}

func TestStartFails(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	status, _, err := execute("--run-dir", file)
	if err == nil || status != exitFailed || !strings.Contains(err.Error(), file) {
		t.Errorf("status %d, %v", status, err)
	}
}

// The environment that the original's users know turns metrics on.
func TestMetricsFlags(t *testing.T) {
	options := func(args ...string) string {
		t.Helper()
		status := 0
		var addr string
		cmd := command(&status)
		cmd.RunE = func(cmd *cobra.Command, _ []string) error {
			addr = "none"
			if on, _ := cmd.Flags().GetBool("metrics"); on {
				addr, _ = cmd.Flags().GetString("metrics-addr")
			}
			return nil
		}
		cmd.SetArgs(args)
		if err := cmd.Execute(); err != nil {
			t.Fatal(err)
		}
		return addr
	}
	if got := options(); got != "none" {
		t.Errorf("without a word: %s", got)
	}
	if got := options("--metrics"); got != "0.0.0.0:9402" {
		t.Errorf("--metrics: %s", got)
	}
	t.Setenv("NVSHARE_METRICS_ENABLE", "1")
	t.Setenv("NVSHARE_METRICS_ADDR", "127.0.0.1:1")
	if got := options(); got != "127.0.0.1:1" {
		t.Errorf("by the environment: %s", got)
	}
	if got := options("--metrics=false"); got != "none" {
		t.Errorf("--metrics=false: %s", got)
	}
	t.Setenv("NVSHARE_METRICS_ENABLE", "0")
	if got := options(); got != "none" {
		t.Errorf("0: %s", got)
	}
}

// systemd's watchdog hears from a scheduler that answers.
func TestWatchdog(t *testing.T) {
	dir := t.TempDir()
	socket := &net.UnixAddr{Name: filepath.Join(dir, "notify"), Net: "unixgram"}
	l, err := net.ListenUnixgram("unixgram", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	t.Setenv("NOTIFY_SOCKET", socket.Name)
	t.Setenv("WATCHDOG_USEC", "30000")
	t.Setenv("WATCHDOG_PID", strconv.Itoa(os.Getpid()))
	status := exitUsage
	cmd := command(&status)
	cmd.SetArgs([]string{"--run-dir", filepath.Join(dir, "run"), "--simgpu", dir})
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- cmd.ExecuteContext(ctx) }()
	for heard := 0; heard < 3; {
		b := make([]byte, 256)
		l.SetReadDeadline(time.Now().Add(time.Minute))
		n, err := l.Read(b)
		if err != nil {
			t.Fatalf("heard %d times: %v", heard, err)
		}
		if strings.Contains(string(b[:n]), "WATCHDOG=1") {
			heard++
		}
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// The help of every command fits a terminal of 80 columns, and names what each flag wants, and
// not its type in Go.
func TestHelpFits(t *testing.T) {
	status := 0
	for _, problem := range manual.Unfit(command(&status)) {
		t.Error(problem)
	}
}

// TestGroupOfANameService: getent asks what Go's lookup does not.
func TestGroupOfANameService(t *testing.T) {
	dir := t.TempDir()
	script := "#!/bin/sh\n[ \"$*\" = 'group -- gpu-staff' ] || exit 2\necho 'gpu-staff:*:70123:ann,bob'\n"
	if err := os.WriteFile(filepath.Join(dir, "getent"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	if gid, err := groupNumber("gpu-staff"); err != nil || gid != 70123 {
		t.Errorf("gpu-staff: %d, %v", gid, err)
	}
	if gid, err := groupNumber("nobody-has-this"); err == nil {
		t.Errorf("a group that nobody knows: %d", gid)
	}
}

// A panic ends the program by a signal: with Go's own status for it, 2, systemd would take
// it for a wrong command line and not restart the scheduler.
func TestAPanicIsNoWrongCommandLine(t *testing.T) {
	const child = "NVSHARE_TEST_PANIC"
	if os.Getenv(child) != "" {
		if err := unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}); err != nil {
			t.Fatal(err)
		}
		os.Args = []string{"nvshare-scheduler", "--version"}
		main()
		go panic("test")
		select {}
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestAPanicIsNoWrongCommandLine$")
	cmd.Env = append(os.Environ(), child+"=1")
	out, err := cmd.CombinedOutput()
	if ws := cmd.ProcessState.Sys().(syscall.WaitStatus); !ws.Signaled() || !strings.Contains(string(out), "panic: test") {
		t.Errorf("%v, signaled: %t\n%.2000s", err, ws.Signaled(), out)
	}
}
