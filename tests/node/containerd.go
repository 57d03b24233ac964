// SPDX-License-Identifier: Apache-2.0

package node

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"text/template"

	"golang.org/x/sys/unix"
)

const containerdSocket = "/run/containerd/containerd.sock"

// containerdConfig: sockets and state that are not named here have their
// default place below /run, which is private. NRI and CDI are on by default.
//
// restrict_oom_score_adj: without CAP_SYS_RESOURCE (many sandboxes) every pod
// fails with "can't get final child's PID from pipe".
// disable_apparmor: loading a profile would outlive the node.
var containerdConfig = template.Must(template.New("containerd.toml").Parse(`version = 4
root = '{{.Private}}/containerd'
state = '/run/containerd'
imports = []

[plugins]
  [plugins.'io.containerd.internal.v1.opt']
    path = '{{.Private}}/opt'
  [plugins.'io.containerd.image-verifier.v1.bindir']
    bin_dir = '{{.Private}}/opt/image-verifier'
  [plugins.'io.containerd.metadata.v1.bolt']
    no_sync = true
  [plugins.'io.containerd.cri.v1.images']
    snapshotter = 'overlayfs'
    [plugins.'io.containerd.cri.v1.images'.pinned_images]
      sandbox = '{{.PauseImage}}'
  [plugins.'io.containerd.cri.v1.runtime']
    restrict_oom_score_adj = true
    disable_apparmor = true
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
      runtime_type = 'io.containerd.runc.v2'
      [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
        BinaryName = '{{.Tools}}/runc'
        SystemdCgroup = false
    [plugins.'io.containerd.cri.v1.runtime'.cni]
      bin_dirs = ['{{.Private}}/cni/bin']
      conf_dir = '{{.Private}}/cni/net.d'
  [plugins.'io.containerd.nri.v1.nri']
    plugin_path = '{{.Private}}/nri/plugins'
    plugin_config_path = '{{.Private}}/nri/conf.d'
`))

// StartContainerd starts containerd, or starts it again, and waits until its
// CRI answers.
func (n *Node) StartContainerd(ctx context.Context) error {
	var config bytes.Buffer
	if err := containerdConfig.Execute(&config, map[string]string{
		"Private": n.private, "Tools": n.tools, "PauseImage": PauseImage,
	}); err != nil {
		return err
	}
	path := filepath.Join(n.private, "containerd.toml")
	if err := os.WriteFile(path, config.Bytes(), 0o644); err != nil {
		return err
	}
	p, err := start("containerd", n.logFile("containerd"), n.env, filepath.Join(n.tools, "containerd"), "--config", path)
	if err != nil {
		return err
	}
	n.Containerd = p
	return p.ready(ctx, "CRI", func() error {
		if err := unix.Access(containerdSocket, unix.W_OK); err != nil {
			return err
		}
		_, err := n.crictl(ctx, "info")
		return err
	})
}

func (n *Node) crictl(ctx context.Context, args ...string) (string, error) {
	return output(ctx, n.env, append([]string{filepath.Join(n.tools, "crictl"), "--timeout", "60s",
		"--runtime-endpoint", "unix://" + containerdSocket, "--image-endpoint", "unix://" + containerdSocket}, args...)...)
}

// Ctr runs containerd's own client in the CRI's namespace, where the images
// are.
func (n *Node) Ctr(ctx context.Context, args ...string) (string, error) {
	return output(ctx, n.env, append([]string{filepath.Join(n.tools, "ctr"), "--address", containerdSocket, "--namespace", "k8s.io"}, args...)...)
}

// The CRI's namespace modes, as kubelet sets them for a pod on the node's
// network.
const (
	namespaceContainer = 1
	namespaceNode      = 2
)

// A ContainerSpec is one container of a pod.
type ContainerSpec struct {
	Name string   // default: "main"
	Args []string // program in the image, and its arguments
	Env  map[string]string
	// Mounts come on top of the image; PATH in Env replaces the image's.
	Mounts []Mount
}

// A Mount shows a directory of the node in a container.
type Mount struct{ Host, Container string }

// A Pod runs on the node's network: no CNI plugin is needed. Its first
// container is the one that Container and PID speak of.
type Pod struct {
	Name       string
	ID         string
	Containers []*Container

	node *Node
}

// RunPod starts a pod through the CRI. The error of a refused container is
// containerd's; the pod is removed then.
func (n *Node) RunPod(ctx context.Context, name string, annotations map[string]string, containers ...ContainerSpec) (*Pod, error) {
	pod := &Pod{Name: name, node: n}
	sandbox := map[string]any{
		"metadata":      map[string]any{"name": name, "uid": "uid-" + name, "namespace": "default"},
		"log_directory": n.podLogs(name),
		"annotations":   annotations,
		"linux": map[string]any{
			"cgroup_parent":    "/" + n.cgroup,
			"security_context": map[string]any{"namespace_options": map[string]any{"network": namespaceNode, "pid": namespaceContainer}},
		},
	}
	if err := os.MkdirAll(n.podLogs(name), 0o755); err != nil {
		return nil, err
	}
	sandboxFile, err := n.writeJSON("pod-"+name, sandbox)
	if err != nil {
		return nil, err
	}
	id, err := n.crictl(ctx, "runp", sandboxFile)
	if err != nil {
		return nil, fmt.Errorf("pod %s: %w", name, err)
	}
	pod.ID = strings.TrimSpace(id)
	for _, spec := range containers {
		c, err := n.runContainer(ctx, pod, sandboxFile, spec)
		if err != nil {
			return nil, fmt.Errorf("pod %s: %w", name, withCleanup(err, pod.Remove(ctx)))
		}
		pod.Containers = append(pod.Containers, c)
	}
	return pod, nil
}

func withCleanup(err, cleanup error) error {
	if cleanup != nil {
		return fmt.Errorf("%w (and then: %w)", err, cleanup)
	}
	return err
}

func (n *Node) runContainer(ctx context.Context, pod *Pod, sandboxFile string, spec ContainerSpec) (*Container, error) {
	if spec.Name == "" {
		spec.Name = "main"
	}
	var envs []map[string]string
	for k, v := range spec.Env {
		envs = append(envs, map[string]string{"key": k, "value": v})
	}
	mounts := []map[string]any{{"container_path": "/record", "host_path": n.Records}}
	for _, m := range spec.Mounts {
		mounts = append(mounts, map[string]any{"container_path": m.Container, "host_path": m.Host})
	}
	config := map[string]any{
		"metadata": map[string]any{"name": spec.Name},
		"image":    map[string]any{"image": WorkloadImage},
		"command":  spec.Args,
		"envs":     envs,
		"mounts":   mounts,
		"log_path": spec.Name + ".log",
		"linux":    map[string]any{},
	}
	file, err := n.writeJSON("container-"+pod.Name+"-"+spec.Name, config)
	if err != nil {
		return nil, err
	}
	id, err := n.crictl(ctx, "create", pod.ID, file, sandboxFile)
	if err != nil {
		return nil, err
	}
	id = strings.TrimSpace(id)
	if _, err := n.crictl(ctx, "start", id); err != nil {
		return nil, err
	}
	info, err := n.inspect(ctx, id)
	if err != nil {
		return nil, err
	}
	return &Container{
		Name: spec.Name, ID: id, PID: info.Info.PID,
		log: filepath.Join(n.podLogs(pod.Name), spec.Name+".log"), criLog: true,
	}, nil
}

// PID is the first container's process in the node's pid namespace.
func (p *Pod) PID() int { return p.Containers[0].PID }

// Log returns what the first container has printed.
func (p *Pod) Log() string { return p.Containers[0].Log() }

// Running reports whether the first container runs.
func (p *Pod) Running(ctx context.Context) (bool, error) {
	info, err := p.node.inspect(ctx, p.Containers[0].ID)
	return info.Status.State == "CONTAINER_RUNNING", err
}

// Stop ends the containers' processes as kubelet does: SIGTERM, and SIGKILL
// for what has not ended after a while. It returns when they have ended.
func (p *Pod) Stop(ctx context.Context) error {
	for _, c := range p.Containers {
		if _, err := p.node.crictl(ctx, "stop", "--timeout", "10", c.ID); err != nil {
			return err
		}
	}
	return nil
}

// Remove kills and removes the pod with its containers.
func (p *Pod) Remove(ctx context.Context) error {
	_, err := p.node.crictl(ctx, "rmp", "--force", p.ID)
	return err
}

type inspection struct {
	Status struct {
		State    string
		ExitCode int
	}
	Info struct{ PID int }
}

func (n *Node) inspect(ctx context.Context, id string) (inspection, error) {
	var i inspection
	out, err := n.crictl(ctx, "inspect", "--output", "json", id)
	if err != nil {
		return i, err
	}
	if err := json.Unmarshal([]byte(out), &i); err != nil {
		return i, fmt.Errorf("crictl inspect %s: %w", id, err)
	}
	return i, nil
}

func (n *Node) podLogs(name string) string { return filepath.Join(n.dir, "log", "pods", name) }

func (n *Node) writeJSON(name string, v any) (string, error) {
	data, err := json.Marshal(v)
	if err != nil {
		return "", err
	}
	path := filepath.Join(n.private, name+".json")
	return path, os.WriteFile(path, data, 0o644)
}

// A Container is a running container of either engine.
type Container struct {
	Name string
	ID   string
	PID  int // of its first process, in the node's pid namespace

	log    string
	criLog bool // lines have the CRI's "time stream F " before them
}

// Log returns what the container has printed so far.
func (c *Container) Log() string {
	data, err := os.ReadFile(c.log)
	if err != nil {
		return ""
	}
	if !c.criLog {
		return string(data)
	}
	var b strings.Builder
	for line := range strings.Lines(string(data)) {
		if f := strings.SplitN(line, " ", 4); len(f) == 4 {
			b.WriteString(f[3])
		}
	}
	return b.String()
}

// Environ returns the environment the first process started with.
func (c *Container) Environ() (map[string]string, error) {
	data, err := os.ReadFile("/proc/" + strconv.Itoa(c.PID) + "/environ")
	if err != nil {
		return nil, err
	}
	env := map[string]string{}
	for _, kv := range strings.Split(strings.TrimRight(string(data), "\x00"), "\x00") {
		k, v, _ := strings.Cut(kv, "=")
		env[k] = v
	}
	return env, nil
}

// Root is where the container's file system can be read from the node.
func (c *Container) Root() string { return "/proc/" + strconv.Itoa(c.PID) + "/root" }
