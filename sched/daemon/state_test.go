// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched"
)

// stateOfGPUs has n GPUs, each with a holder.
func stateOfGPUs(n int, epoch sched.Epoch) *state {
	s := &state{Version: stateVersion, BootID: "boot", GPUs: map[string]*gpuState{}}
	for i := range n {
		s.GPUs[fmt.Sprintf("GPU-51600000-0000-4000-8000-%012d", i)] = &gpuState{Epoch: epoch, Holders: []holderState{{PID: 7, StartTime: uint64(i), Epoch: epoch}}}
	}
	return s
}

func cannotExchange(string, string) error { return unix.EINVAL }

// Whatever was there, the file holds what was saved last, also after it grew
// and shrank by blocks; with and without the exchange of files.
func TestStateIsSaved(t *testing.T) {
	for name, swap := range map[string]func(a, b string) error{"exchange": exchange, "rename": cannotExchange} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "state.json")
			for i, gpus := range []int{1, 64, 64, 8, 0, 200, 1} {
				want := stateOfGPUs(gpus, sched.Epoch(i+1))
				if err := want.saveBy(path, swap); err != nil {
					t.Fatal(err)
				}
				if got, err := loadState(path, "boot"); err != nil || !reflect.DeepEqual(got, want) {
					t.Errorf("%d GPUs: read back %d, %v", gpus, len(got.GPUs), err)
				}
				info, err := os.Lstat(path)
				if err != nil || info.Size()%stateBlock != 0 || info.Size() == 0 || info.Mode() != 0o600 {
					t.Errorf("%d GPUs: %v bytes, mode %v, %v", gpus, info.Size(), info.Mode(), err)
				}
			}
		})
	}
}

// The padding is right at the edges of a block.
func TestStateFillsABlock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.json")
	seen := map[int64]bool{}
	for n := range 2 * stateBlock {
		s := &state{Version: stateVersion, BootID: string(bytes.Repeat([]byte{'x'}, n)), GPUs: map[string]*gpuState{}}
		if err := s.save(path); err != nil {
			t.Fatalf("%d bytes more: %v", n, err)
		}
		text, err := os.ReadFile(path)
		if err != nil || len(text)%stateBlock != 0 || text[len(text)-1] != '\n' {
			t.Fatalf("%d bytes more: %d in all, %v", n, len(text), err)
		}
		seen[int64(len(text))] = true
	}
	if len(seen) != 3 {
		t.Errorf("lengths %v", seen)
	}
}

// The other file is left over from a crash in the middle of a write, longer or
// shorter than what comes: it is never taken for the state.
func TestStateIgnoresTheOtherFile(t *testing.T) {
	for name, garbage := range map[string][]byte{
		"empty": {}, "short": []byte("{"), "long": bytes.Repeat([]byte("garbage"), 5000),
		"an older state": []byte(`{"version":1,"boot_id":"boot","gpus":{"GPU-x":{"epoch":99}}}`),
	} {
		dir := t.TempDir()
		path := filepath.Join(dir, "state.json")
		first := stateOfGPUs(3, 5)
		if err := first.save(path); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path+".tmp", garbage, 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := loadState(path, "boot"); err != nil || !reflect.DeepEqual(got, first) {
			t.Errorf("%s: before: %+v, %v", name, got, err)
		}
		for i, want := range []*state{stateOfGPUs(1, 6), stateOfGPUs(40, 7)} {
			if err := want.save(path); err != nil {
				t.Fatal(err)
			}
			if got, err := loadState(path, "boot"); err != nil || !reflect.DeepEqual(got, want) {
				t.Errorf("%s: save %d: %+v, %v", name, i, got, err)
			}
		}
	}
}

// A write that fails leaves the file as it was.
func TestStateSurvivesAFailedSave(t *testing.T) {
	for name, block := range map[string]func(tmp string) error{
		"directory": func(tmp string) error { return os.Mkdir(tmp, 0o755) },
		"pipe":      func(tmp string) error { return unix.Mkfifo(tmp, 0o666) },
		"link":      func(tmp string) error { return os.Symlink("victim", tmp) },
	} {
		dir := t.TempDir()
		path, victim := filepath.Join(dir, "state.json"), filepath.Join(dir, "victim")
		want := stateOfGPUs(2, 1)
		if err := errors.Join(want.save(path), os.WriteFile(victim, []byte("precious"), 0o600), block(path+".tmp")); err != nil {
			t.Fatal(err)
		}
		if err := stateOfGPUs(2, 2).save(path); err == nil {
			t.Errorf("%s: saved all the same", name)
		}
		if got, err := loadState(path, "boot"); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
		if text, err := os.ReadFile(victim); err != nil || string(text) != "precious" {
			t.Errorf("%s: the link was followed: %q, %v", name, text, err)
		}
	}
}
