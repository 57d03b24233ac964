// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/node"
)

const (
	someone = 1000  // a user with subordinate numbers
	subuid  = 70000 // the first of them
)

// simulated are copies of the simulated GPU and of programs with the shim, that every user may
// run.
type simulated struct {
	t   *testing.T
	dir string
}

func newSimulated(t *testing.T) simulated {
	t.Helper()
	sim := os.Getenv("NVSHARE_TEST_SIMGPU")
	if sim == "" {
		t.Skip("NVSHARE_TEST_SIMGPU is not set: no simulated GPU")
	}
	s := simulated{t, t.TempDir()}
	twoUsers(t, s.dir)
	probe := exec.Command("unshare", "--user", "--map-root-user", "true")
	if probe.SysProcAttr = (&syscall.SysProcAttr{Credential: &syscall.Credential{Uid: someone, Gid: someone}}); probe.Run() != nil {
		t.Skip("users may not make user namespaces here")
	}
	build, run := filepath.Dir(sim), filepath.Join(s.dir, "run")
	copies := exec.Command("cp", sim+"/libcuda.so.1", build+"/lib/libnvshare.so", build+"/bin/cuda-busy", s.dir)
	if err := errors.Join(os.Mkdir(run, 0o755), os.Chmod(run, 0o777|os.ModeSticky), os.WriteFile(filepath.Join(run, "config"), []byte("gpus=1\n"), 0o644), copies.Run()); err != nil {
		t.Fatal(err)
	}
	return s
}

// busy is cuda-busy as someone, which it is when proceed is called.
func (s simulated) busy(runDir string, asSubuid bool, args ...string) (cmd *exec.Cmd, said *bytes.Buffer, proceed func()) {
	s.t.Helper()
	script := `echo made; read go; export LD_PRELOAD="$SHIM"; exec "$@"`
	line := append([]string{filepath.Join(s.dir, "cuda-busy")}, args...)
	if asSubuid {
		line = append([]string{"setpriv", "--reuid", "1", "--regid", "1", "--clear-groups"}, line...)
	}
	line = append([]string{"sh", "-c", script, "sh"}, line...)
	if asSubuid {
		line = append([]string{"unshare", "--user"}, line...)
	}
	cmd, said = exec.Command(line[0], line[1:]...), &bytes.Buffer{}
	cmd.Env = []string{"PATH=/usr/bin:/bin", "SHIM=" + filepath.Join(s.dir, "libnvshare.so"), "NVSHARE_RUN_DIR=" + runDir,
		"NVSHARE_SIMGPU_DIR=" + filepath.Join(s.dir, "run"), "LD_LIBRARY_PATH=" + s.dir}
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Credential: &syscall.Credential{Uid: someone, Gid: someone}}
	cmd.Stderr = said
	in, inErr := cmd.StdinPipe()
	out, outErr := cmd.StdoutPipe()
	if err := errors.Join(inErr, outErr, cmd.Start()); err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if s.t.Failed() {
			s.t.Logf("%v said:\n%s", args, said)
		}
	})
	if _, err := out.Read(make([]byte, 16)); err != nil { // "made"
		s.t.Fatal(err)
	}
	return cmd, said, func() {
		if asSubuid { // as newuidmap does for one who has subordinate numbers
			for _, file := range []string{"uid_map", "gid_map"} {
				text := fmt.Appendf(nil, "0 %d 1\n1 %d 1000\n", someone, subuid)
				if err := os.WriteFile(fmt.Sprintf("/proc/%d/%s", cmd.Process.Pid, file), text, 0); err != nil {
					s.t.Fatal(err)
				}
			}
		}
		if _, err := in.Write([]byte("go\n")); err != nil {
			s.t.Fatal(err)
		}
	}
}

// A user's memory limit holds for all of its processes together, also for one that has made
// itself another number in a user namespace.
func TestLimitHoldsInUserNamespaces(t *testing.T) {
	sim := newSimulated(t)
	dir := t.TempDir()
	openToAll(t, dir)
	s := start(t, dir, func(o *Options) {
		gpu := gpuA
		gpu.MemoryBytes = 16 * gib
		o.Mode = sched.Concurrent
		o.List = func(context.Context) ([]node.Found, error) { return []node.Found{gpu}, nil }
	})
	uid := uint32(someone)
	if _, err := dial(t, s).SetShare(t.Context(), &api.SetShareRequest{Uid: &uid, MemoryBytes: proto.Uint64(512 << 20)}); err != nil {
		t.Fatal(err)
	}
	_, _, begin := sim.busy(dir, false, "--mem-mib", "300")
	begin()
	holds := func(r *api.StatusResponse) bool {
		m := r.Gpus[0].Memory
		return len(m) == 1 && m[0].Uid == someone && m[0].UsedBytes >= 300<<20
	}
	s.await("the user has its memory", holds)

	over, said, begin := sim.busy(dir, true, "--mem-mib", "300", "--seconds", "1")
	begin()
	if err := over.Wait(); err == nil || !strings.Contains(said.String(), "OUT_OF_MEMORY") {
		t.Errorf("300 MiB more as number %d: %v, want no memory\n%s", subuid, err, said)
	}
	_, _, begin = sim.busy(dir, true, "--mem-mib", "100")
	begin()
	r := s.await("the user has both", func(r *api.StatusResponse) bool {
		return len(r.Gpus[0].Memory) > 0 && r.Gpus[0].Memory[0].UsedBytes >= 400<<20
	})
	if g := r.Gpus[0]; len(g.Tenants) != 1 || g.Tenants[0].Uid != someone || g.Tenants[0].Clients != 2 || len(g.Memory) != 1 || g.Clients[1].Uid != someone {
		t.Errorf("a user is more than one tenant: %v", g)
	}
}
