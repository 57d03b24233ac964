//go:build engines

// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nvshare/nvshare/tests/node"
)

func TestCtr(t *testing.T) {
	e := must(shared.NewEngine("ctr", "", nil))(t)
	wrapper(t, e, "ctr", `sub=$1; shift
case $sub in
run) exec `+shared.Tools()+`/ctr --namespace k8s.io run --net-host --cgroup `+shared.Cgroup()+`/ctr "$@" ;;
*) exec `+shared.Tools()+`/ctr --namespace k8s.io "$sub" "$@" ;;
esac
`)
	runExample(t, e, "ctr", append([]string{"sh", examples + "/ctr.sh", node.WorkloadImage}, busy("ctr")...)...)
	t.Run("annotations", func(t *testing.T) { testAnnotations(t, e, limitedByCtr(t)) })
}

func TestDocker(t *testing.T) {
	testDocker(t, "docker-sid", release(t, "sid"))
}

// Docker 25 to 28.1 has the feature off by default.
func TestDockerBeforeItWasDefault(t *testing.T) {
	testDocker(t, "docker-trixie", release(t, "trixie"), "--config-file", "/docker/daemon.json")
}

func testDocker(t *testing.T, name, root string, options ...string) {
	ctx := within(t)
	e := must(shared.NewEngine(name, root, map[string]string{examples: inside, filepath.Join(examples, "../docker"): "/docker"}))(t)
	wrapper(t, e, "nothing", "")
	// This containerd sees the same file system as Docker, and does not use NRI's socket.
	socket, ctd := "unix:///run/"+name+".sock", "/run/"+name+"-containerd"
	config := filepath.Join(e.Private, "containerd.toml")
	check(t, os.WriteFile(config, []byte("version = 3\nroot = '/var/lib/containerd'\nstate = '"+ctd+"'\nimports = []\n"+
		"disabled_plugins = ['io.containerd.grpc.v1.cri', 'io.containerd.cri.v1.images', 'io.containerd.cri.v1.runtime', 'io.containerd.nri.v1.nri', 'io.containerd.internal.v1.opt']\n"+
		"[grpc]\naddress = '"+ctd+".sock'\n[ttrpc]\naddress = '"+ctd+".sock.ttrpc'\n"), 0o644))
	c := must(e.Start(name+"-containerd", filepath.Join(shared.Tools(), "containerd"), "--config", config))(t)
	t.Cleanup(func() { check(t, c.Stop()) })
	check(t, node.Until(ctx, "Docker's containerd", func() error {
		_, err := os.Stat(ctd + ".sock")
		return err
	}))
	e.Setenv("DOCKER_HOST", socket)
	d := must(e.Start(name+"-d", append([]string{"dockerd", "-H", socket, "--pidfile", "/run/" + name + ".pid", "--containerd", ctd + ".sock",
		"--data-root", "/var/lib/docker", "--exec-root", "/run/" + name, "--storage-driver", "vfs",
		"--exec-opt", "native.cgroupdriver=cgroupfs", "--cgroup-parent", shared.Cgroup(),
		"--bridge", "none", "--iptables=false", "--ip6tables=false"}, options...)...))(t)
	t.Cleanup(func() { check(t, d.Stop()) })
	check(t, node.Until(ctx, "dockerd", func() error {
		select {
		case <-d.Ended():
			t.Fatalf("dockerd has ended:\n%s", d.Tail(30))
		default:
		}
		if strings.Contains(d.Tail(50), "level=fatal") {
			t.Fatal(d.Tail(30))
		}
		version, err := e.Run(ctx, "docker", "version", "--format", "{{.Server.Version}}")
		if err == nil {
			t.Log("Docker ", version)
		}
		return err
	}))
	tar := filepath.Join(e.Private, "workload.tar")
	check(t, shared.WriteWorkload(tar))
	must(e.Run(ctx, "docker", "import", tar, image))(t)
	got := runExample(t, e, name, append([]string{"sh", inside + "/docker.sh", image}, busy(name)...)...)
	if got.Container.GetId() == "" {
		t.Errorf("the scheduler takes it for a process without container: %v", got)
	}
	t.Run("exec", func(t *testing.T) { testDockerExec(t, e, name) })
	t.Run("annotations", func(t *testing.T) { testAnnotations(t, e, limitedByCLI("docker", name)) })
}

// testDockerExec: a program that docker exec starts has nothing of the CDI device's environment,
// and is managed all the same, by /etc/ld.so.preload.
func testDockerExec(t *testing.T, e *node.Engine, name string) {
	ctx := within(t)
	known := clients(t, ctx)
	first := []string{"docker", "run", "--rm", "--device", "nvshare.com/gpu=0", "--name", name + "-exec", image}
	p := must(e.Start(name+"-exec", append(first, busy("first")...)...))(t)
	c := awaitTurns(t, ctx, p, known)
	known[c.Pid] = true
	// Of the simulated GPU, which finds its device by the environment.
	gpu := "NVSHARE_SIMGPU_GPU_0=" + must(shared.Status(ctx))(t).Gpus[0].Uuid
	q := must(e.Start(name+"-second", append([]string{"docker", "exec", "--env", gpu, name + "-exec"}, busy("second")...)...))(t)
	second := awaitTurns(t, ctx, q, known)
	if c.Container.GetId() == "" || second.Container.GetId() != c.Container.GetId() {
		t.Errorf("the scheduler knows the programs as %v and %v", c.Container, second.Container)
	}
	if environ := must(os.ReadFile(fmt.Sprintf("/proc/%d/environ", second.Pid)))(t); strings.Contains(string(environ), "LD_PRELOAD=") {
		t.Error("docker exec sets LD_PRELOAD: the test proves nothing")
	}
	end(t, ctx, q, second)
	end(t, ctx, p, c)
}
