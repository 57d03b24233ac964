// SPDX-License-Identifier: Apache-2.0

package api

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// TestGeneratedCode reproduces the committed code from control.proto.
func TestGeneratedCode(t *testing.T) {
	const protoc = "libprotoc 3.21.12"
	out, err := exec.Command("protoc", "--version").Output()
	if err != nil {
		t.Skipf("protoc is not installed: %v", err)
	}
	if have := string(bytes.TrimSpace(out)); have != protoc {
		t.Skipf("protoc is %q, the code is generated with %q", have, protoc)
	}
	dir := t.TempDir()
	if out, err := exec.Command("make", "generate", "OUT="+dir).CombinedOutput(); err != nil {
		t.Fatalf("make generate: %v\n%s", err, out)
	}
	for _, name := range []string{"control.pb.go", "control_ttrpc.pb.go"} {
		want, err := os.ReadFile(filepath.Join(dir, "sched", "api", name))
		if err != nil {
			t.Fatal(err)
		}
		have, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(have, want) {
			t.Errorf("%s is not what control.proto gives: run make -C sched/api generate", name)
		}
	}
}
