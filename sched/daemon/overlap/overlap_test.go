// SPDX-License-Identifier: Apache-2.0

package overlap

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/peer"
)

// patience bounds every wait; nothing takes that long when it works.
const patience = 5 * time.Minute

const starterEnv = "NVSHARE_TEST_OVERLAP_STARTER"

func TestMain(m *testing.M) {
	if os.Getenv(starterEnv) != "" {
		os.Stderr.WriteString(Start(os.Args[1:]).Error())
		os.Exit(1)
	}
	os.Exit(m.Run())
}

type site struct {
	*Manager
	t       *testing.T
	changes chan Change
	closed  bool
}

// newSite is a Manager whose daemons are those of the simulated GPU.
func newSite(t *testing.T, dir string, change func(*Options)) *site {
	t.Helper()
	sim := os.Getenv("NVSHARE_TEST_SIMGPU")
	if sim == "" {
		t.Skip("NVSHARE_TEST_SIMGPU is not set: no simulated MPS")
	}
	peers, err := peer.NewFinder()
	if err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	s := &site{t: t, changes: make(chan Change, 1000)}
	o := Options{
		Dir:     dir,
		Control: func() (string, error) { return filepath.Join(sim, "bin", "nvidia-cuda-mps-control"), nil },
		Starter: []string{self}, Env: []string{starterEnv + "=1"},
		Changed: func(c Change) { s.changes <- c },
		Log:     logrus.New(),
	}
	if change != nil {
		change(&o)
	}
	s.Manager = New(o, peers)
	s.times = times{linger: 10 * time.Millisecond, look: 10 * time.Millisecond}
	t.Cleanup(s.end)
	return s
}

// end leaves nothing.
func (s *site) end() {
	if s.closed {
		return
	}
	s.Want(nil)
	for end := time.Now().Add(patience); len(s.States()) > 0; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			s.t.Errorf("groups do not end: %+v", s.States())
			break
		}
	}
	s.Close()
	s.closed = true
}

func (s *site) await(kind Kind) Change {
	s.t.Helper()
	for {
		select {
		case c := <-s.changes:
			if c.Kind == kind {
				return c
			}
		case <-time.After(patience):
			s.t.Fatalf("no change %q; %+v", kind, s.States())
		}
	}
}

func (s *site) running(g Group) State {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := s.Await(ctx, g.Dir); err != nil {
		s.t.Fatal(err)
	}
	return s.States()[0]
}

func group(dir string) Group {
	name := api.OverlapIn("", uint32(os.Geteuid()), "g")
	return Group{Name: name, GPU: "GPU-1", UID: uint32(os.Geteuid()), Dir: api.OverlapDir(filepath.Dir(dir), name, "GPU-1")}
}

// member connects as the driver of a member does, so that there is a server.
func member(t *testing.T, g Group) {
	t.Helper()
	c, err := net.Dial("unix", filepath.Join(g.Dir, api.OverlapPipe, "control"))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write([]byte("member\n")); err != nil {
		t.Fatal(err)
	}
	_, _ = c.Read(make([]byte, 64))
}

// alive says whether a process runs; one that nobody has reaped does not.
func alive(pid int) bool {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	return err == nil && !strings.Contains(string(stat), ") Z ")
}

// awaitDeath waits for the death of a process that was killed.
func awaitDeath(t *testing.T, pid int) {
	t.Helper()
	for end := time.Now().Add(patience); alive(pid); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("process %d lives", pid)
		}
	}
}

// tempDir has a short name: it is in the names of sockets.
func tempDir(t *testing.T) string {
	dir, err := os.MkdirTemp("", "ov")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return filepath.Join(dir, "overlap")
}

// A daemon may have made its socket and not listen yet: it is asked again.
func TestAskedTooEarly(t *testing.T) {
	dir := tempDir(t)
	early := filepath.Join(filepath.Dir(dir), "control")
	s := newSite(t, dir, func(o *Options) {
		real, _ := o.Control()
		script := "#!/bin/sh\nif [ \"$1\" != -f ] && ! [ -e \"$CUDA_MPS_LOG_DIRECTORY/asked\" ]; then\n\t: >\"$CUDA_MPS_LOG_DIRECTORY/asked\"\n\techo Cannot find MPS control daemon process\n\texit 1\nfi\nexec " + real + " \"$@\"\n"
		if err := os.WriteFile(early, []byte(script), 0o755); err != nil {
			t.Fatal(err)
		}
		o.Control = func() (string, error) { return early, nil }
	})
	g := group(dir)
	s.Want([]Group{g})
	s.running(g)
	if c := <-s.changes; c.Kind != Runs {
		t.Errorf("it was started again: %+v", c)
	}
}

// A group's daemon runs while the group is wanted, is started again when it was killed, and
// leaves nothing.
func TestGroupLives(t *testing.T) {
	dir := tempDir(t)
	s := newSite(t, dir, nil)
	g := group(dir)
	s.Want([]Group{g})
	s.Want([]Group{g}) // again changes nothing
	first := s.running(g)
	member(t, g)
	server := s.await(ServerStarts)
	if !alive(first.Daemon) || !alive(server.PID) {
		t.Fatalf("daemon %d, server %d", first.Daemon, server.PID)
	}
	_ = unix.Kill(server.PID, unix.SIGKILL)
	if c := s.await(ServerEnded); c.PID != server.PID || c.Err == nil {
		t.Errorf("%+v", c)
	}
	member(t, g)
	server = s.await(ServerStarts)
	_ = unix.Kill(first.Daemon, unix.SIGKILL)
	if c := s.await(DaemonEnded); c.PID != first.Daemon {
		t.Errorf("%+v", c)
	}
	again := s.await(Runs)
	if again.PID == first.Daemon {
		t.Errorf("daemon %d again", again.PID)
	}
	awaitDeath(t, server.PID) // or there would be two
	member(t, g)
	server = s.await(ServerStarts)
	s.end()
	s.await(Ended)
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("left: directory %v", err)
	}
	awaitDeath(t, again.PID)
	awaitDeath(t, server.PID)
}

// Daemons outlive their Manager. The next one takes over those that it wants, and ends the
// others.
func TestNextManagerTakesOver(t *testing.T) {
	dir := tempDir(t)
	g := group(dir)
	s := newSite(t, dir, nil)
	s.Want([]Group{g})
	daemon := s.running(g).Daemon
	s.Close()
	s.closed = true

	s = newSite(t, dir, nil)
	s.Want([]Group{g})
	if c := s.await(TakenOver); c.PID != daemon {
		t.Errorf("%+v, want daemon %d", c, daemon)
	}
	s.running(g)
	s.Close()
	s.closed = true

	// It is found by its directory, and its member is described a moment later.
	s = newSite(t, dir, nil)
	s.Want(nil)
	s.Want([]Group{g})
	if c := s.await(Runs); c.PID != daemon {
		t.Errorf("%+v, want daemon %d", c, daemon)
	}
	if got := s.running(g).Group; got != g {
		t.Errorf("%+v, want %+v", got, g)
	}
	s.Close()
	s.closed = true

	s = newSite(t, dir, nil)
	s.Want(nil)
	s.await(Ended)
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("left: %v", err)
	}
	awaitDeath(t, daemon)
}

// What runs as the members' user has no right of a group that has the user's number. And
// What runs as the members' user has no rights of a group that has the number of the user. And
// systemd may have given all files to the scheduler's user. New members reach a daemon that
// was taken over, and nothing of somebody else's is given away.
func TestTakenOverWithOtherOwners(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root has daemons of other users")
	}
	const user = 54321
	dir := tempDir(t)
	if err := os.Chmod(filepath.Dir(dir), 0o755); err != nil {
		t.Fatal(err)
	}
	name := api.OverlapIn("", user, "g")
	g := Group{Name: name, GPU: "GPU-1", UID: user, Dir: api.OverlapDir(filepath.Dir(dir), name, "GPU-1")}
	s := newSite(t, dir, nil)
	s.Want([]Group{g})
	daemon := s.running(g).Daemon
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", daemon))
	for _, want := range []string{"Uid:\t54321\t54321\t54321\t54321\n", "Gid:\t65534\t65534\t65534\t65534\n", "Groups:\t \n"} {
		if err != nil || !strings.Contains(string(text), want) {
			t.Errorf("the daemon's status lacks %q: %v\n%s", want, err, text)
		}
	}
	s.Close()
	s.closed = true
	owner := func(path string) uint32 {
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			t.Fatal(err)
		}
		return st.Uid
	}
	pipe := filepath.Join(g.Dir, api.OverlapPipe)
	outside := filepath.Join(dir, "outside")
	if err := errors.Join(os.WriteFile(outside, nil, 0o600), os.Link(outside, filepath.Join(pipe, "link")), os.Symlink(outside, filepath.Join(pipe, "symlink"))); err != nil {
		t.Fatal(err)
	}
	if err := filepath.WalkDir(g.Dir, func(path string, _ os.DirEntry, err error) error {
		return errors.Join(err, os.Lchown(path, 0, 0))
	}); err != nil {
		t.Fatal(err)
	}
	s = newSite(t, dir, nil)
	s.Want([]Group{g})
	s.await(TakenOver)
	for path, want := range map[string]uint32{
		pipe: user, filepath.Join(pipe, controlSocket): user, filepath.Join(g.Dir, api.OverlapShared): user, filepath.Join(g.Dir, api.OverlapLog): user,
		g.Dir: 0, filepath.Join(g.Dir, recordName): 0, outside: 0,
	} {
		if got := owner(path); got != want {
			t.Errorf("%s belongs to user %d, want %d", path, got, want)
		}
	}
	if err := os.Remove(outside); err != nil {
		t.Fatal(err)
	}
}

// A daemon that cannot start is an error for whoever waits, and is tried again.
func TestNoDaemon(t *testing.T) {
	dir := tempDir(t)
	missing := true
	s := newSite(t, dir, func(o *Options) {
		control := o.Control
		o.Control = func() (string, error) {
			if missing {
				missing = false
				return "/bin/false", nil
			}
			return control()
		}
	})
	g := group(dir)
	s.Want([]Group{g})
	if c := s.await(Failed); c.Err == nil || !strings.Contains(c.Err.Error(), "ended at its start") {
		t.Errorf("%+v", c)
	}
	s.await(Runs)
	if st := s.running(g); st.Err != nil {
		t.Errorf("%+v", st)
	}
}

// What members write in their directories is not followed.
func TestPipeDirectoryIsHostile(t *testing.T) {
	dir := tempDir(t)
	g := group(dir)
	precious := filepath.Join(filepath.Dir(dir), "precious")
	if err := os.WriteFile(precious, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	pipe := filepath.Join(g.Dir, api.OverlapPipe)
	if err := os.MkdirAll(pipe, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"control", "control_lock", "x"} {
		if err := os.Symlink(filepath.Dir(precious), filepath.Join(pipe, name)); err != nil {
			t.Fatal(err)
		}
	}
	s := newSite(t, dir, nil)
	s.Want([]Group{g})
	s.running(g)
	s.end()
	if _, err := os.Stat(precious); err != nil {
		t.Error(err)
	}
}

// What somebody answers in the daemon's place is no text that the status could not have.
func TestAnswersAreReadable(t *testing.T) {
	control := filepath.Join(t.TempDir(), "control")
	if err := os.WriteFile(control, []byte("#!/bin/sh\nhead -c 100000 /dev/zero\nprintf 'no\\377'\nexit 1\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	k := newKeeper(&Manager{}, Group{UID: uint32(os.Geteuid())})
	if said, err := k.ask(t.Context(), control, "x"); err == nil || !strings.HasSuffix(said, "no?") || len(said) > 512 {
		t.Errorf("%d bytes, %q, %v", len(said), said[max(len(said)-8, 0):], err)
	}
}
