// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// A program that root starts for a user has the user's rights, and not root's: no sudo is needed
// under nvsharectl run, which would take the shim away.
func TestRunAsAnotherUser(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root to be somebody else")
	}
	needsGroup(t)
	want, err := exec.Command("sh", "-c", "id -u nobody; id -g nobody; id -G nobody; getent passwd nobody | cut -d: -f6; echo nobody nobody").Output()
	if err != nil {
		t.Skipf("there is no user nobody here: %v", err)
	}
	t.Setenv("HOME", "/root")
	shim := someLibrary(t)
	script := "id${IFS}-u;id${IFS}-g;id${IFS}-G;echo${IFS}$HOME;echo${IFS}$USER${IFS}$LOGNAME;echo${IFS}$LD_PRELOAD"
	for _, flags := range []string{"--user nobody", "--user 65534", "--user nobody --name mine"} {
		code, out := ctlProcess(t, "run --run-dir "+serve(t, &describing{})+" --shim "+shim+" "+flags+" -- sh -c "+script)
		if code != 0 || out != string(want)+shim+"\n" {
			t.Errorf("run %s: exit %d, %s want\n%s", flags, code, out, want)
		}
	}
	if code, out := ctlProcess(t, "run --shim "+shim+" --user nosuchuser -- true"); code != exitUsage || !strings.Contains(out, `--user: this host knows no user "nosuchuser"`) {
		t.Errorf("nobody: exit %d, %s", code, out)
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "NVSHARE_TEST_CTL=run --shim "+shim+" --user nobody -- true")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	if out, _ := cmd.CombinedOutput(); cmd.ProcessState.ExitCode() != exitFailed || !strings.Contains(string(out), "--user needs root") {
		t.Errorf("without root: exit %d, %s", cmd.ProcessState.ExitCode(), out)
	}
}

// sudo removes the shim: limits that would not hold are not given without a word.
func TestRunWarnsOfSudo(t *testing.T) {
	sudo := filepath.Join(t.TempDir(), "sudo")
	if err := os.WriteFile(sudo, []byte("#!/bin/sh\nexit 3\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if code, out := ctlProcess(t, "run --shim "+someLibrary(t)+" -- "+sudo+" true"); code != 3 || !strings.Contains(out, "warning: sudo removes LD_PRELOAD") || !strings.Contains(out, "use --user") {
		t.Errorf("exit %d, %s", code, out)
	}
}
