//go:build engines

// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/tests/node"
	"github.com/nvshare/nvshare/tests/readme"
)

// A slurm is one node of Slurm that is its own controller, with the settings of the recipe.
type slurm struct {
	*node.Engine
	t *testing.T
}

func startSlurm(t *testing.T, ctx context.Context, suite, auth string) *slurm {
	root := unpacked(t, "slurm-"+suite, suite, "slurmctld", "slurmd", "slurm-client", "dash", "coreutils", "sed")
	e := must(shared.NewEngine("slurm-"+suite, root, map[string]string{filepath.Join(buildDir, "bin"): "/usr/local/bin", filepath.Join(buildDir, "lib"): "/usr/local/lib"}))(t)
	s := &slurm{e, t}
	name := strings.TrimPrefix(shared.Cgroup(), "/") // slurmd's cgroup is named after it, and goes with this one
	etc := filepath.Join(e.Root, "etc/slurm")
	put := func(file string, text []byte, mode os.FileMode) {
		check(t, errors.Join(os.MkdirAll(etc, 0o755), os.WriteFile(filepath.Join(etc, file), text, mode)))
	}
	for _, block := range must(readme.Blocks("../../deployments/recipes/slurm.md"))(t) {
		first, text, _ := strings.Cut(block.Text, "\n")
		switch first {
		case "# slurm.conf":
			text = strings.Replace(text, "NodeName=NODE CPUs=64", "NodeName="+name+" NodeAddr=127.0.0.1 NodeHostname="+must(os.Hostname())(t)+" CPUs=2", 1)
			put("slurm.conf", []byte(text+"ClusterName=test\nSlurmctldHost="+must(os.Hostname())(t)+"(127.0.0.1)\n"+auth+"SlurmUser=root\n"+
				"SlurmctldPort=16817\nSlurmdPort=16818\nStateSaveLocation=/var/lib/slurm\nSlurmdSpoolDir=/var/spool/slurmd\nSlurmctldPidFile=/run/slurmctld.pid\nSlurmdPidFile=/run/slurmd.pid\n"+
				"ReturnToService=2\nKillWait=1\nPartitionName=all Nodes=ALL Default=YES State=UP\n"), 0o644)
		case "# gres.conf":
			put("gres.conf", []byte(strings.Replace(text, "/dev/nvidia0", "/dev/full", 1)), 0o644)
		case "# cgroup.conf":
			put("cgroup.conf", []byte(text), 0o644)
		}
	}
	put("slurm.key", []byte(strings.Repeat("a key for one test\n", 60)), 0o600)
	put("nvshare.conf", []byte("mib_of_shard=4096\n"), 0o644)
	put("nvshare.sh", must(os.ReadFile("../../deployments/slurm/nvshare.sh"))(t), 0o755)
	for _, program := range []string{"slurmctld", "slurmd", "slurmstepd"} { // as maintainer scripts would
		check(t, os.Symlink("/usr/sbin/"+program+"-wlm", filepath.Join(e.Root, "usr/sbin", program)))
	}
	for _, dir := range []string{"var/lib/slurm", "var/spool/slurmd", "var/log"} {
		check(t, os.MkdirAll(filepath.Join(e.Root, dir), 0o755))
	}
	for _, daemon := range [][]string{{"slurmctld", "-D"}, {"slurmd", "-D", "-N", name}} {
		p := must(e.Start(daemon[0], daemon...))(t)
		t.Cleanup(func() {
			if t.Failed() {
				t.Logf("%s:\n%s", p.Name, p.Tail(30))
			}
			_ = p.Stop()
		})
	}
	check(t, node.Until(ctx, "the node to be idle", func() error {
		said, err := e.Run(ctx, "sinfo", "--noheader", "--format=%T %E")
		if err == nil && !strings.HasPrefix(said, "idle") {
			err = errors.New(said)
		}
		return err
	}))
	t.Log(must(e.Run(ctx, "sinfo", "--version"))(t))
	return s
}

// submit starts a job of a user with the script, and returns its number and where it writes.
func (s *slurm) submit(ctx context.Context, uid int, shards, script string) (job, out string) {
	s.t.Helper()
	file := filepath.Join(s.Root, "tmp", "job-"+shards)
	check(s.t, os.WriteFile(file, []byte("#!/bin/sh\nexport LD_LIBRARY_PATH="+node.SimGPU+"/lib NVSHARE_SIMGPU_DIR="+node.SimGPU+"/run\n"+script), 0o755))
	p := must(s.StartAs(uid, "sbatch-"+shards, "sbatch", "--parsable", "--gres="+shards, "--requeue", "--chdir=/tmp", "--open-mode=append", "--output=/tmp/out-"+shards, "/tmp/job-"+shards))(s.t)
	if status, err := p.Wait(ctx); err != nil || status != 0 {
		s.t.Fatalf("sbatch: %d, %v\n%s", status, err, p.Tail(10))
	}
	return strings.TrimSpace(p.Tail(1)), filepath.Join(s.Root, "tmp", "out-"+shards)
}

// working waits for a client of a job that has had a turn and is not in known.
func (s *slurm) working(ctx context.Context, job string, known map[uint32]bool) (got *api.Client) {
	s.t.Helper()
	check(s.t, node.Until(ctx, "a turn of job "+job, func() error {
		queue, _ := s.Run(ctx, "scontrol", "show", "job", "-o", job)
		for _, gpu := range must(shared.Status(ctx))(s.t).Gpus {
			for _, c := range gpu.Clients {
				if c.Grants > 0 && !known[c.Pid] && c.Container.GetId() == "job_"+job {
					got = c
					return nil
				}
			}
		}
		return errors.New(queue)
	}))
	return got
}

func awaitText(t *testing.T, ctx context.Context, file, pattern string) {
	t.Helper()
	check(t, node.Until(ctx, pattern, func() error {
		text, err := os.ReadFile(file)
		if err == nil && !regexp.MustCompile(pattern).Match(text) {
			err = fmt.Errorf("%s", text)
		}
		return err
	}))
}

// Jobs that ask for shards are tenants of their own, with their part as limit and promise, from before
// their first program until they have ended. Signals reach programs that wait for the GPU, a requeued
// job has its part again, and nothing is left of a cancelled one.
func TestSlurm(t *testing.T) {
	t.Run("24.11", func(t *testing.T) { testSlurm(t, "trixie", "AuthType=auth/slurm\nCredType=auth/slurm\n") })
	t.Run("22.05", func(t *testing.T) { testSlurm(t, "bookworm", "AuthType=auth/none\nCredType=cred/none\n") })
}

func testSlurm(t *testing.T, suite, auth string) {
	ctx := within(t)
	s := startSlurm(t, ctx, suite, auth)
	const uid = 1000
	work := strings.Join(busy("slurm"), " ")
	work = strings.Replace(work, "/usr/bin/", "/usr/local/bin/", 1)
	one, oneOut := s.submit(ctx, uid, "shard", "gpu-sizes\ntrap 'echo told' USR1\ntrap : TERM\nwhile :; do\n"+work+" & p=$!\nwhile kill -0 $p 2>/dev/null; do wait $p; done\necho ended\ndone\n")
	two, twoOut := s.submit(ctx, uid, "shard:2", "gpu-sizes\nexec "+work+"\n")
	known := map[uint32]bool{}
	for job, shards := range map[string]uint64{one: 1, two: 2} {
		c := s.working(ctx, job, known)
		known[c.Pid] = true
		if got := c.Container; got.Name != "user-"+job || got.Engine != "slurm" || got.MemoryLimitBytes != shards<<32 || got.GetShare().GetCoreRequest() != uint32(25*shards) {
			t.Errorf("job %s: the scheduler knows %v", job, got)
		}
		if c.Bypassed != 0 || c.Interposed == 0 {
			t.Errorf("job %s: %v", job, c)
		}
	}
	if said := must(shared.Ctl(ctx, "set", "user-"+one, "--weight", "50"))(t); !strings.Contains(said, "user-"+one+": weight") {
		t.Errorf("set by name: %s", said)
	}
	awaitText(t, ctx, oneOut, "/ 4096MiB")
	awaitText(t, ctx, twoOut, "/ 8192MiB")
	must(s.Run(ctx, "scancel", "--signal=USR1", "--batch", one))(t)
	awaitText(t, ctx, oneOut, "told")
	for _, job := range []string{one, two} { // one of the programs waits for its turn
		must(s.Run(ctx, "scancel", "--signal=TERM", "--full", job))(t)
	}
	awaitText(t, ctx, oneOut, "ended")
	known[s.working(ctx, one, known).Pid] = true
	ended := func(job string) {
		t.Helper()
		check(t, node.Until(ctx, "the end of job "+job, func() error {
			for _, c := range must(shared.Status(ctx))(t).Containers {
				if c.Id == "job_"+job {
					return errors.New(c.String())
				}
			}
			return nil
		}))
	}
	ended(two)
	must(s.Run(ctx, "scontrol", "requeue", one))(t)
	ended(one)
	check(t, node.Until(ctx, "job "+one+" to be pending", func() error {
		said, err := s.Run(ctx, "squeue", "--noheader", "--format=%T", "--jobs="+one)
		if err == nil && strings.TrimSpace(said) != "PENDING" {
			err = errors.New(said)
		}
		return err
	}))
	// Slurm waits for two minutes. 22.05 needs them: it runs no prolog for a job that comes back sooner.
	if suite != "bookworm" {
		must(s.Run(ctx, "scontrol", "update", "JobId="+one, "StartTime=now"))(t)
	}
	again := s.working(ctx, one, known)
	if got := again.Container; got.MemoryLimitBytes != 1<<32 || got.GetShare().GetCoreRequest() != 25 {
		t.Errorf("requeued: the scheduler knows %v", got)
	}
	must(s.Run(ctx, "scancel", one))(t)
	ended(one)
	check(t, node.Until(ctx, "the GPU to be free", func() error {
		if left := clients(t, ctx); left[again.Pid] {
			return fmt.Errorf("%v", left)
		}
		return nil
	}))
}
