// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
)

// config is what the status says of settings, a line each, without the time.
func (s *scheduler) config() (lines []string) {
	s.t.Helper()
	for _, v := range s.status().Config {
		line := fmt.Sprintf("%s %s %s", v.Name, v.Value, strings.ToLower(strings.TrimPrefix(v.Origin.String(), "ORIGIN_")))
		if v.Uuid != "" {
			line = fmt.Sprintf("GPU %.8s: %s", v.Uuid[len(v.Uuid)-8:], line)
		}
		if a := v.Author; a != nil {
			line += fmt.Sprintf(" by %d", a.Uid)
			if ago := time.Since(time.Unix(a.UnixTime, 0)); ago < -time.Minute || ago > time.Hour {
				s.t.Errorf("%s: set %v ago", line, ago)
			}
		}
		lines = append(lines, line)
	}
	return lines
}

func (s *scheduler) expectConfig(want ...string) {
	s.t.Helper()
	if got, want := strings.Join(s.config(), "\n"), strings.Join(want, "\n"); got != want {
		s.t.Errorf("settings:\n%s\nwant\n%s", got, want)
	}
}

// The status says of each setting where its value comes from, and of what was set by hand who did
// it and when; over restarts too.
func TestConfigSaysWhoAndWhen(t *testing.T) {
	dir := t.TempDir()
	options := func(o *Options) {
		o.Quantum, o.Mode, o.SwapShare, o.Flags = 100*time.Millisecond, sched.Auto, 20, []string{api.SwapShareSetting}
	}
	s := startFound(t, dir, options)
	s.expectConfig("turn-length 100ms default", "anti-thrash auto default", "swap-share 20% flag")
	s.set(&api.SetRequest{QuantumNs: 200e6})
	s.set(&api.SetRequest{Gpu: "1", Mode: exclusive, SwapShare: proto.Uint32(0)})
	me := os.Getuid()
	want := []string{
		fmt.Sprintf("turn-length 200ms hand by %d", me),
		"anti-thrash auto default", fmt.Sprintf("GPU 00000001: anti-thrash on hand by %d", me),
		"swap-share 20% flag", fmt.Sprintf("GPU 00000001: swap-share none hand by %d", me),
	}
	s.expectConfig(want...)
	s.stop()
	s = startFound(t, dir, options)
	s.expectConfig(want...)
}

// Who sets something is who the kernel says connected, and not the scheduler's user.
func TestConfigOfAnotherUser(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root can connect as another user")
	}
	const somebody = 12345
	s := startFound(t, t.TempDir(), nil)
	for _, path := range []string{filepath.Dir(s.dir), s.dir, api.SocketPath(s.dir)} {
		if err := os.Chmod(path, 0o777); err != nil {
			t.Fatal(err)
		}
	}
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and the thread ends with the goroutine
		const leave = ^uintptr(0)
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, leave, somebody, leave); errno != 0 {
			done <- errno
			return
		}
		c, err := api.Dial(t.Context(), s.dir)
		if err == nil {
			_, err = c.Set(t.Context(), &api.SetRequest{Mode: concurrent})
			c.Close()
		}
		done <- err
	}()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if all := strings.Join(s.config(), "\n"); !strings.Contains(all, "anti-thrash off hand by 12345") {
		t.Errorf("settings:\n%s", all)
	}
}

// A value that is in force already is not recorded as set by hand, and a value for all replaces
// that of one GPU without being recorded where it is the default.
func TestSetWhatIsInForce(t *testing.T) {
	dir := t.TempDir()
	s := startFound(t, dir, func(o *Options) { o.Quantum, o.Mode, o.SwapShare = 100*time.Millisecond, sched.Auto, 10 })
	untouched := []string{"turn-length 100ms default", "anti-thrash auto default", "swap-share 10% default"}
	s.set(&api.SetRequest{QuantumNs: 100e6, Mode: auto, SwapShare: proto.Uint32(10)})
	s.set(&api.SetRequest{Gpu: "1", QuantumNs: 100e6})
	s.expectConfig(untouched...)
	if text, err := os.ReadFile(filepath.Join(dir, "settings.json")); err == nil {
		t.Errorf("recorded: %s", text)
	}
	s.set(&api.SetRequest{Gpu: "1", QuantumNs: 50e6})
	r := s.set(&api.SetRequest{QuantumNs: 100e6})
	if c := r.Changes[6]; len(r.Changes) != 9 || c.Index != 1 || c.Old != "50ms" || c.New != "100ms" {
		t.Errorf("%v", r.Changes)
	}
	s.expectConfig(untouched...)
	s.expectSettings(1, 100*time.Millisecond, auto)
}

// What was set by hand can be taken back: for one GPU, where that of all holds again, and for all,
// where the command line holds again.
func TestUnset(t *testing.T) {
	dir := t.TempDir()
	options := func(o *Options) { o.Quantum, o.Mode, o.SwapShare = 100*time.Millisecond, sched.Auto, 10 }
	s := startFound(t, dir, options)
	s.set(&api.SetRequest{QuantumNs: 200e6, Mode: exclusive, SwapShare: proto.Uint32(25)})
	s.set(&api.SetRequest{Gpu: "1", QuantumNs: 300e6, SwapShare: proto.Uint32(30)})
	r := s.set(&api.SetRequest{Gpu: "1", Unset: []string{api.TurnLengthSetting}})
	if c := r.Changes; len(c) != 3 || c[0].Old != "300ms" || c[0].New != "200ms" || c[2].Old != "30%" || c[2].New != "30%" {
		t.Errorf("%v", r.Changes)
	}
	s.expectSettings(1, 200*time.Millisecond, exclusive)
	s.set(&api.SetRequest{Unset: []string{api.SwapShareSetting, api.TurnLengthSetting}})
	s.expectSettings(0, 100*time.Millisecond, exclusive)
	s.expectSettings(1, 100*time.Millisecond, exclusive)
	want := []string{"turn-length 100ms default", fmt.Sprintf("anti-thrash on hand by %d", os.Getuid()), "swap-share 10% default"}
	s.expectConfig(want...)
	s.stop()
	s = startFound(t, dir, options)
	s.expectConfig(want...)
	if _, err := dial(t, s).Set(t.Context(), &api.SetRequest{Unset: []string{"grace"}}); status.Code(err) != codes.InvalidArgument {
		t.Errorf("no such setting: %v", err)
	}
	s.expectConfig(want...)
}
