// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/state"
)

// startFound is start, with all GPUs found.
func startFound(t *testing.T, dir string, change func(*Options)) *scheduler {
	t.Helper()
	s := start(t, dir, change)
	s.await("the GPUs are found", func(r *api.StatusResponse) bool { return len(r.Gpus) == 2 })
	return s
}

func (s *scheduler) set(req *api.SetRequest) *api.SetResponse {
	s.t.Helper()
	r, err := dial(s.t, s).Set(s.t.Context(), req)
	if err != nil {
		s.t.Fatal(err)
	}
	return r
}

func (s *scheduler) expectSettings(i int, quantum time.Duration, mode api.Mode) {
	s.t.Helper()
	g := s.status().Gpus[i]
	if time.Duration(g.QuantumNs) != quantum || g.Mode != mode {
		s.t.Errorf("GPU %d: time quantum %v, %v, want %v, %v", i, time.Duration(g.QuantumNs), g.Mode, quantum, mode)
	}
}

const (
	exclusive  = api.Mode_MODE_EXCLUSIVE
	concurrent = api.Mode_MODE_CONCURRENT
	auto       = api.Mode_MODE_AUTO
)

// What is set live holds over restarts: for all GPUs, and for one.
func TestSettingsOutliveTheScheduler(t *testing.T) {
	dir := t.TempDir()
	quick := func(o *Options) { o.Quantum = time.Second }
	s := startFound(t, dir, quick)
	s.expectSettings(0, time.Second, exclusive)
	s.set(&api.SetRequest{QuantumNs: int64(3 * time.Second)})
	s.set(&api.SetRequest{Gpu: "1", Mode: concurrent})
	s.stop()

	s = startFound(t, dir, quick)
	s.expectSettings(0, 3*time.Second, exclusive)
	s.expectSettings(1, 3*time.Second, concurrent)
	r := s.set(&api.SetRequest{Gpu: gpuB.UUID, QuantumNs: int64(4 * time.Second), Mode: auto})
	if c := r.Changes; len(c) != 3 || c[0].Old != "3s" || c[0].New != "4s" || c[1].Old != "off" || c[1].New != "auto" {
		t.Errorf("changes %v", r.Changes)
	}
	s.stop()

	s = startFound(t, dir, quick)
	s.expectSettings(0, 3*time.Second, exclusive)
	s.expectSettings(1, 4*time.Second, auto)
	s.set(&api.SetRequest{QuantumNs: int64(5 * time.Second)}) // for all: what was said of one is gone, of this
	s.expectSettings(1, 5*time.Second, auto)
	s.stop()

	s = startFound(t, dir, quick)
	s.expectSettings(0, 5*time.Second, exclusive)
	s.expectSettings(1, 5*time.Second, auto)
}

// The latest word holds: of the command line too, once it is another one.
func TestChangedCommandLineWins(t *testing.T) {
	dir := t.TempDir()
	with := func(q time.Duration, m sched.Mode) func(*Options) {
		return func(o *Options) { o.Quantum, o.Mode = q, m }
	}
	s := startFound(t, dir, with(time.Second, sched.Exclusive))
	s.set(&api.SetRequest{QuantumNs: int64(3 * time.Second), Mode: concurrent})
	s.set(&api.SetRequest{Gpu: "1", QuantumNs: int64(4 * time.Second)})
	s.stop()
	var log strings.Builder
	s = startFound(t, dir, func(o *Options) { logTo(&log)(o); with(2*time.Second, sched.Exclusive)(o) })
	s.expectSettings(0, 2*time.Second, concurrent)
	s.expectSettings(1, 4*time.Second, concurrent) // nobody has said anything else of this one
	s.stop()
	if !strings.Contains(log.String(), "turn-length 2s, as the command line says now; it was set to 3s before") {
		t.Errorf("nothing is said about it:\n%s", log.String())
	}
	s = startFound(t, dir, with(2*time.Second, sched.Auto))
	s.expectSettings(0, 2*time.Second, auto)
}

// Settings that cannot be used are put aside and reported, and can be set anew.
func TestSettingsAreDamaged(t *testing.T) {
	for name, text := range map[string]string{
		"truncated":      `{"version":1,"all":{"quantum_ns":3000000`,
		"quantum":        `{"version":1,"all":{"quantum_ns":5}}`,
		"negative":       `{"version":1,"all":{"quantum_ns":-1}}`,
		"swap share":     `{"version":1,"all":{"swap_share":51}}`,
		"mode":           `{"version":1,"all":{"mode":"sideways"}}`,
		"mode of a GPU":  `{"version":1,"gpus":{"` + gpuA.UUID + `":{"mode":"up"}}}`,
		"no GPU's UUID":  `{"version":1,"gpus":{"x":{}}}`,
		"something else": "\x00\x01",
	} {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "settings.json"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		s := startFound(t, dir, func(o *Options) { o.Quantum = time.Second })
		if p := s.status().Problems; len(p) != 1 || !strings.Contains(p[0], "settings.json.damaged") {
			t.Errorf("%s: problems %q", name, p)
		}
		if kept, err := os.ReadFile(filepath.Join(dir, "settings.json.damaged")); err != nil || string(kept) != text {
			t.Errorf("%s: %q is kept: %v", name, kept, err)
		}
		s.expectSettings(0, time.Second, exclusive)
		s.set(&api.SetRequest{QuantumNs: int64(2 * time.Second)})
		if p := s.status().Problems; len(p) != 0 {
			t.Errorf("%s: set again, but problems %q", name, p)
		}
		s.stop()
	}
}

// What a later version has recorded is neither forgotten nor overwritten: this one does not
// start, and says why.
func TestNewerRecordsAreKept(t *testing.T) {
	for _, name := range []string{"settings.json", "shares.json", "members.json", "migrating.json", "files.json"} {
		o := testOptions(t.TempDir())
		o.SwapMemory = 1 << 30
		path, text := filepath.Join(o.RunDir, name), `{"version":2}`
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if d, err := New(o); !errors.Is(err, state.ErrNewer) || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "version 2") {
			t.Errorf("%s: %v, %v; want an error that names it", name, d, err)
		}
		if kept, err := os.ReadFile(path); err != nil || string(kept) != text {
			t.Errorf("%s: %q is kept: %v", name, kept, err)
		}
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		start(t, o.RunDir, nil).stop() // the directory is free
	}
}

// A setting that cannot be recorded is refused, and nothing changes.
func TestSettingCannotBeRecorded(t *testing.T) {
	dir := t.TempDir()
	s := startFound(t, dir, func(o *Options) { o.Quantum = time.Second })
	if err := os.Mkdir(filepath.Join(dir, "settings.json.tmp"), 0o700); err != nil {
		t.Fatal(err)
	}
	if r, err := dial(t, s).Set(t.Context(), &api.SetRequest{QuantumNs: int64(2 * time.Second)}); err == nil || !strings.Contains(err.Error(), "record the settings") {
		t.Errorf("%v, %v", r, err)
	}
	s.expectSettings(0, time.Second, exclusive)
}

// A swap share that was set holds until the scheduler is started with another
// --swap-share.
func TestChangedSwapShareWins(t *testing.T) {
	dir := t.TempDir()
	with := func(percent int) func(*Options) {
		return func(o *Options) { o.SwapShare = percent }
	}
	inForce := func(s *scheduler) (percent int) {
		t.Helper()
		if err := s.Ask(t.Context(), func() { percent = s.settings.SwapShare(gpuA.UUID) }); err != nil {
			t.Fatal(err)
		}
		return percent
	}
	s := startFound(t, dir, with(10))
	s.set(&api.SetRequest{SwapShare: proto.Uint32(25)})
	s.set(&api.SetRequest{Gpu: "1", SwapShare: proto.Uint32(30)})
	s.stop()
	for _, start := range []struct{ given, want int }{{10, 25}, {20, 20}, {10, 10}} {
		s = startFound(t, dir, with(start.given))
		if got := inForce(s); got != start.want {
			t.Errorf("started with %d %%: %d %% is in force, want %d %%", start.given, got, start.want)
		}
		s.stop()
	}
}

// A setting that another command line has replaced does not come back with the
// command line that it was made under.
func TestReplacedSettingStaysReplaced(t *testing.T) {
	dir := t.TempDir()
	with := func(q time.Duration) func(*Options) { return func(o *Options) { o.Quantum = q } }
	s := startFound(t, dir, with(time.Second))
	s.set(&api.SetRequest{QuantumNs: int64(3 * time.Second)})
	s.stop()
	for _, q := range []time.Duration{2 * time.Second, time.Second} {
		s = startFound(t, dir, with(q))
		s.expectSettings(0, q, exclusive)
		s.stop()
	}
}
