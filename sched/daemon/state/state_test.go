// SPDX-License-Identifier: Apache-2.0

package state

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/base"
)

// stateOfGPUs has n GPUs, each with a holder.
func stateOfGPUs(n int, epoch base.Epoch) *File {
	s := &File{Version: version, BootID: "boot", GPUs: map[string]*GPU{}}
	for i := range n {
		s.GPUs[fmt.Sprintf("GPU-51600000-0000-4000-8000-%012d", i)] = &GPU{Epoch: epoch, Holders: []Holder{{PID: 7, StartTime: uint64(i), Epoch: epoch}}}
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
				want := stateOfGPUs(gpus, base.Epoch(i+1))
				if err := want.save(path, swap); err != nil {
					t.Fatal(err)
				}
				if got, err := Load(path, "boot"); err != nil || !reflect.DeepEqual(got, want) {
					t.Errorf("%d GPUs: read back %d, %v", gpus, len(got.GPUs), err)
				}
				info, err := os.Lstat(path)
				if err != nil || info.Size()%block != 0 || info.Size() == 0 || info.Mode() != 0o600 {
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
	for n := range 2 * block {
		s := &File{Version: version, BootID: string(bytes.Repeat([]byte{'x'}, n)), GPUs: map[string]*GPU{}}
		if err := s.Save(path, nil); err != nil {
			t.Fatalf("%d bytes more: %v", n, err)
		}
		text, err := os.ReadFile(path)
		if err != nil || len(text)%block != 0 || text[len(text)-1] != '\n' {
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
		if err := first.Save(path, nil); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path+".tmp", garbage, 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := Load(path, "boot"); err != nil || !reflect.DeepEqual(got, first) {
			t.Errorf("%s: before: %+v, %v", name, got, err)
		}
		for i, want := range []*File{stateOfGPUs(1, 6), stateOfGPUs(40, 7)} {
			if err := want.Save(path, nil); err != nil {
				t.Fatal(err)
			}
			if got, err := Load(path, "boot"); err != nil || !reflect.DeepEqual(got, want) {
				t.Errorf("%s: save %d: %+v, %v", name, i, got, err)
			}
		}
	}
}

// notRegular puts something else where a file should be.
var notRegular = map[string]func(path string) error{
	"directory": func(path string) error { return os.Mkdir(path, 0o755) },
	"pipe":      func(path string) error { return unix.Mkfifo(path, 0o666) },
	"link":      func(path string) error { return os.Symlink("victim", path) },
}

// A write that fails leaves the file as it was.
func TestStateSurvivesAFailedSave(t *testing.T) {
	for name, block := range notRegular {
		dir := t.TempDir()
		path, victim := filepath.Join(dir, "state.json"), filepath.Join(dir, "victim")
		want := stateOfGPUs(2, 1)
		if err := errors.Join(want.Save(path, nil), os.WriteFile(victim, []byte("precious"), 0o600), block(path+".tmp")); err != nil {
			t.Fatal(err)
		}
		if err := stateOfGPUs(2, 2).Save(path, nil); err == nil {
			t.Errorf("%s: saved all the same", name)
		}
		if got, err := Load(path, "boot"); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
		if text, err := os.ReadFile(victim); err != nil || string(text) != "precious" {
			t.Errorf("%s: the link was followed: %q, %v", name, text, err)
		}
	}
}

func TestLoad(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.json")
	if s, err := Load(path, "boot"); err != nil || len(s.GPUs) != 0 || s.BootID != "boot" {
		t.Errorf("missing file: %+v, %v", s, err)
	}
	s := &File{Version: version, BootID: "boot", GPUs: map[string]*GPU{
		"GPU-1": {Epoch: 1<<60 + 1, Holders: []Holder{{PID: 5, StartTime: 6, Epoch: 7, Shared: true}}},
		"GPU-2": {Epoch: 3, Unrecorded: true, Way: sched.WayCohort},
	}}
	if err := s.Save(path, nil); err != nil {
		t.Fatal(err)
	}
	same, err := Load(path, "boot")
	if err != nil || same.GPUs["GPU-1"].Epoch != 1<<60+1 || same.GPUs["GPU-1"].Holders[0] != (Holder{5, 6, 7, true}) || !same.GPUs["GPU-2"].Unrecorded || same.GPUs["GPU-2"].Way != sched.WayCohort {
		t.Errorf("read back %+v, %v", same.GPUs["GPU-1"], err)
	}
	other, err := Load(path, "another boot")
	if err != nil || other.GPUs["GPU-1"].Epoch != 1<<60+1 || other.GPUs["GPU-1"].Holders != nil || other.GPUs["GPU-2"].Unrecorded || other.GPUs["GPU-2"].Way != sched.WayTurns {
		t.Errorf("after a reboot %+v, %v", other.GPUs["GPU-1"], err)
	}
}

func TestDecode(t *testing.T) {
	gpu := func(body string) string { return `{"version":2,"boot_id":"x","gpus":{"GPU-1":` + body + `}}` }
	for text, want := range map[string]string{
		`{"version":3,"boot_id":"x"}`:                       "version 3, this nvshare-scheduler reads 2: a newer nvshare-scheduler wrote it",
		`{"version":0,"boot_id":"x"}`:                       "damaged: version 0",
		`{"version":-1,"boot_id":"x"}`:                      "damaged: version -1",
		`{"boot_id":"x"}`:                                   "damaged: version 0",
		`{"version":2}`:                                     "no boot id",
		`{"version":1,"boot_id":"x"}`:                       "damaged: version 1",
		`{"version":"2","boot_id":"x"}`:                     "damaged",
		`[]`:                                                "damaged",
		`{"version":2,"boot_id":"x"}}`:                      "damaged",
		gpu(`{"epoch":-1}`):                                 "damaged",
		gpu(`{"epoch":4611686018427387905}`):                "epoch 4611686018427387905",
		gpu(`{"epoch":9,"holders":[{"pid":0,"epoch":9}]}`):  "holder",
		gpu(`{"epoch":9,"holders":[{"pid":5,"epoch":0}]}`):  "holder",
		gpu(`{"epoch":9,"holders":[{"pid":5,"epoch":10}]}`): "holder",
		gpu(`{"epoch":9,"holders":[` + strings.Repeat(`{"pid":5,"epoch":9},`, 70) + `{"pid":5,"epoch":9}]}`): "71 holders",
	} {
		if s, err := decode([]byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.100s: %+v, %v, want %q", text, s, err, want)
		}
	}
	for _, text := range []string{`{"version":2,"boot_id":"x"}`, gpu(`{"epoch":0}`), gpu(`{"epoch":9,"later":[1]}`) + "  \n\n"} {
		if _, err := decode([]byte(text)); err != nil {
			t.Errorf("%s: %v", text, err)
		}
	}
	// As many holders as the core hands out; and as an older scheduler wrote it, or a newer one.
	holders := strings.Builder{}
	for pid := 1; pid <= sched.MaxRecorded; pid++ {
		fmt.Fprintf(&holders, `{"pid":%d,"starttime":3,"epoch":%d},`, pid, pid)
	}
	many := `"epoch":99,"holders":[` + strings.TrimSuffix(holders.String(), ",") + `]`
	for text, want := range map[string]GPU{
		gpu(`{` + many + `}`):                   {},
		gpu(`{` + many + `,"unrecorded":true}`): {Unrecorded: true},
		gpu(`{` + many + `,"way":"slices"}`):    {Way: sched.WaySlices},
		gpu(`{` + many + `,"way":"driver"}`):    {Way: sched.WayDriver},
		gpu(`{` + many + `,"way":"another"}`):   {},
	} {
		s, err := decode([]byte(text))
		if err != nil {
			t.Errorf("%.100s: %v", text, err)
			continue
		}
		if g := s.GPUs["GPU-1"]; g.Unrecorded != want.Unrecorded || g.Way != want.Way || strings.Contains(text, "pid") && len(g.Holders) != sched.MaxRecorded {
			t.Errorf("%.100s: %d holders, others %t, way %v; want %+v", text, len(g.Holders), g.Unrecorded, g.Way, want)
		}
	}
}

// Only a regular file is read: others could have put a pipe there, for which a
// read would wait for ever, or a link to a file of theirs.
func TestOnlyRegularFilesAreRead(t *testing.T) {
	for name, block := range notRegular {
		dir := t.TempDir()
		path, victim := filepath.Join(dir, "state.json"), filepath.Join(dir, "victim")
		if err := errors.Join(stateOfGPUs(2, 1).Save(victim, nil), block(path)); err != nil {
			t.Fatal(err)
		}
		if s, err := Load(path, "boot"); !errors.Is(err, ErrNotRegular) || !strings.Contains(err.Error(), path) || len(s.GPUs) != 0 {
			t.Errorf("%s: %+v, %v", name, s, err)
		}
		if err := stateOfGPUs(2, 2).Save(path+".other", nil); err != nil {
			t.Errorf("%s: another file: %v", name, err)
		}
		// A record is put aside.
		if _, err := ReadRecord[struct{}](path, 1); !errors.Is(err, ErrNotRegular) || !strings.Contains(err.Error(), path+".damaged") {
			t.Errorf("%s: as a record: %v", name, err)
		}
		if err := WriteRecord(path, map[string]int{"version": 1}); err != nil {
			t.Errorf("%s: the record that replaces it: %v", name, err)
		}
		if _, err := ReadRecord[struct{}](path, 1); err != nil {
			t.Errorf("%s: the record that replaced it: %v", name, err)
		}
	}
}

// A record that cannot be read for once, as where descriptors are short, is put aside: the next
// one does not destroy it.
func TestRecordThatCannotBeRead(t *testing.T) {
	path := filepath.Join(t.TempDir(), "record.json")
	if err := WriteRecord(path, map[string]int{"version": 1}); err != nil {
		t.Fatal(err)
	}
	var was unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &was); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 0, Max: was.Max}); err != nil {
		t.Fatal(err)
	}
	_, err := ReadRecord[struct{}](path, 1)
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &was); err != nil {
		t.Fatal(err)
	}
	if !errors.Is(err, unix.EMFILE) {
		t.Fatal(err)
	}
	if err := WriteRecord(path, map[string]int{"version": 1, "next": 1}); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path + ".damaged"); err != nil {
		t.Error(err)
	}
}
