// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/wire"
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
		"--tq 0":             "not positive",
		"--tq -5":            "not positive",
		"--tq abc":           "--tq",
		"--tq 1us":           "from 1ms to 24h0m0s",
		"--tq 25h":           "from 1ms to 24h0m0s",
		"--grace 0":          "not positive",
		"--grace 25h":        "--grace",
		"--spin 9ms":         "--spin",
		"--spin -1ms":        "--spin",
		"--spin soon":        "--spin",
		"--anti-thrash auto": "neither on nor off",
		"--nonsense":         "unknown flag",
		"surplus":            "surplus",
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
	f := flags{runDir: "some/dir", quantum: "45", grace: "1500ms", antiThrash: "off", spin: wire.SpinTime}
	o, err := f.options(logrus.NewEntry(log))
	if err != nil || o.Quantum != 45*time.Second || o.Grace != 1500*time.Millisecond || o.Mode != sched.Concurrent || o.Spin != wire.SpinTime || !filepath.IsAbs(o.RunDir) {
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
