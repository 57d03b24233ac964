// SPDX-License-Identifier: Apache-2.0

package layout

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// A program that `go build` left in its folder once came into a commit by accident.
func TestNoProgramIsTracked(t *testing.T) {
	out, err := exec.Command("git", "-C", "../..", "ls-files", "-z").Output()
	if err != nil {
		t.Skip("not a git checkout: nothing is tracked")
	}
	for _, name := range strings.Split(strings.TrimSuffix(string(out), "\x00"), "\x00") {
		f, err := os.Open(filepath.Join("../..", name))
		if err != nil {
			continue // deleted, and not yet committed
		}
		var magic [4]byte
		n, _ := f.Read(magic[:])
		f.Close()
		if bytes.Equal(magic[:n], []byte("\x7fELF")) {
			t.Errorf("%s is a compiled program", name)
		}
	}
}
