// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// StartContainerd starts or restarts containerd, and waits until its CRI answers.
func (n *Node) StartContainerd(ctx context.Context) error {
	if n.crio != "" {
		return n.startCRIO(ctx)
	}
	path, err := n.writeConfig(ctx)
	if err != nil {
		return err
	}
	p, err := start("containerd", n.logFile("containerd"), n.env, filepath.Join(n.containerd, "containerd"), "--config", path)
	if err != nil {
		return err
	}
	n.Containerd = p
	return n.awaitCRI(ctx)
}

func (n *Node) awaitCRI(ctx context.Context) error {
	return n.Containerd.ready(ctx, "CRI", func() error {
		if err := unix.Access(n.CRISocket(), unix.W_OK); err != nil {
			return err
		}
		_, err := n.crictl(ctx, "info")
		return err
	})
}

func (n *Node) crictl(ctx context.Context, args ...string) (string, error) {
	for {
		out, err := output(ctx, n.env, append([]string{filepath.Join(n.tools, "crictl"), "--timeout", "60s",
			"--runtime-endpoint", "unix://" + n.CRISocket(), "--image-endpoint", "unix://" + n.CRISocket()}, args...)...)
		// It gave up a connection that a busy machine had not answered yet, and has asked for nothing.
		if err == nil || ctx.Err() != nil || !strings.Contains(err.Error(), "validate service connection") ||
			!strings.Contains(err.Error(), "use of closed network connection") {
			return out, err
		}
	}
}

// Ctr runs containerd's own client in the CRI's namespace, which has the images.
func (n *Node) Ctr(ctx context.Context, args ...string) (string, error) {
	return output(ctx, n.env, append([]string{filepath.Join(n.tools, "ctr"), "--address", n.CRISocket(), "--namespace", "k8s.io"}, args...)...)
}

// The CRI's namespace modes, as kubelet sets them for a pod on the node's
// network.
const (
	namespacePod       = 0
	namespaceContainer = 1
	namespaceNode      = 2
)

// ownUsersFrom is the first user ID, on the node, of pods with a user namespace.
const ownUsersFrom = 1 << 20

// A ContainerSpec is one container of a pod.
type ContainerSpec struct {
	Name string   // default: "main"
	Args []string // program in the image, and its arguments
	Env  map[string]string
	// Mounts come on top of the image; PATH in Env replaces the image's.
	Mounts []Mount
	Image  string // default: WorkloadImage
	// Devices are CDI devices that the CRI names, as the kubelet does for device plugins.
	Devices []string
	// Annotations are the container's own; podman only.
	Annotations map[string]string
	// Attempt counts how often a container of this name was started before.
	Attempt int
	// Restricted: the rules of Kubernetes' Pod Security Standard of that name (a user
	// other than root, no capabilities, no new privileges, the runtime's own seccomp
	// profile), and a read-only root file system.
	Restricted bool
}

// A Mount shows a directory of the node in a container.
type Mount struct{ Host, Container string }

// A PodSpec is a pod without its containers.
type PodSpec struct {
	Name        string
	Annotations map[string]string
	// OwnUsers is hostUsers: false of Kubernetes: the pod has a user namespace with
	// other IDs on the node, and a network namespace.
	OwnUsers bool
	// SharedPIDs is shareProcessNamespace: true of Kubernetes. Programs are then not
	// process 1 of their PID namespace, and so SIGTERM ends them without a handler.
	SharedPIDs bool
	// HostPID is hostPID: true of Kubernetes. The simulated GPU knows processes by the
	// numbers that they see themselves, and so checkpoints no others.
	HostPID bool
}

// A Pod uses the node's network, so that no CNI plugin is needed, unless OwnUsers is
// set. Its methods that do not name a container are about the first one.
type Pod struct {
	Name       string
	ID         string
	Containers []*Container

	node    *Node
	sandbox string         // file with its configuration
	spaces  map[string]any // its namespaces, which each container has to name
}

// RunPod starts a pod through the CRI. If a container is refused, RunPod removes the
// pod and returns containerd's error.
func (n *Node) RunPod(ctx context.Context, name string, annotations map[string]string, containers ...ContainerSpec) (*Pod, error) {
	return n.Run(ctx, PodSpec{Name: name, Annotations: annotations}, containers...)
}

// Run is RunPod with all of a pod's settings.
func (n *Node) Run(ctx context.Context, spec PodSpec, containers ...ContainerSpec) (*Pod, error) {
	name := spec.Name
	pod := &Pod{Name: name, node: n, spaces: map[string]any{"network": namespaceNode, "pid": namespaceContainer}}
	if spec.SharedPIDs {
		pod.spaces["pid"] = namespacePod
	}
	// For a PID namespace of the pod CRI-O needs a container of its own, whose OOM score takes CAP_SYS_RESOURCE.
	if spec.HostPID || spec.SharedPIDs && n.crio != "" {
		pod.spaces["pid"] = namespaceNode
	}
	if spec.OwnUsers {
		ids := []map[string]any{{"host_id": ownUsersFrom, "container_id": 0, "length": 1 << 16}}
		pod.spaces["network"] = namespacePod
		pod.spaces["userns_options"] = map[string]any{"mode": namespacePod, "uids": ids, "gids": ids}
	}
	sandbox := map[string]any{
		"metadata":      map[string]any{"name": name, "uid": "uid-" + name, "namespace": "default"},
		"log_directory": n.podLogs(name),
		"annotations":   spec.Annotations,
		"linux": map[string]any{
			"cgroup_parent":    "/" + n.cgroup,
			"security_context": map[string]any{"namespace_options": pod.spaces},
		},
	}
	if err := os.MkdirAll(n.podLogs(name), 0o755); err != nil {
		return nil, err
	}
	var err error
	if pod.sandbox, err = n.writeJSON("pod-"+name, sandbox); err != nil {
		return nil, err
	}
	id, err := n.crictl(ctx, "runp", pod.sandbox)
	if err != nil {
		return nil, fmt.Errorf("pod %s: %w", name, err)
	}
	pod.ID = strings.TrimSpace(id)
	for _, c := range containers {
		if _, err := pod.Start(ctx, c); err != nil {
			return nil, withCleanup(err, pod.Remove(ctx))
		}
	}
	return pod, nil
}

// Start starts one more container in a running pod. The kubelet does so for each
// container after the first, for ephemeral ones, and for one that has ended.
func (p *Pod) Start(ctx context.Context, spec ContainerSpec) (*Container, error) {
	c, err := p.node.runContainer(ctx, p, spec)
	if err != nil {
		return nil, fmt.Errorf("pod %s: %w", p.Name, err)
	}
	p.Containers = append(p.Containers, c)
	return c, nil
}

func withCleanup(err, cleanup error) error {
	if cleanup != nil {
		return fmt.Errorf("%w (and then: %w)", err, cleanup)
	}
	return err
}

func (n *Node) runContainer(ctx context.Context, pod *Pod, spec ContainerSpec) (*Container, error) {
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
	if spec.Image == "" {
		spec.Image = WorkloadImage
	}
	var devices []map[string]string
	for _, d := range spec.Devices {
		devices = append(devices, map[string]string{"name": d})
	}
	security := map[string]any{"namespace_options": pod.spaces}
	if spec.Restricted {
		security["run_as_user"] = map[string]any{"value": nobody}
		security["run_as_group"] = map[string]any{"value": nobody}
		security["readonly_rootfs"] = true
		security["no_new_privs"] = true
		security["capabilities"] = map[string]any{"drop_capabilities": []string{"ALL"}}
		security["seccomp"] = map[string]any{"profile_type": 0} // RuntimeDefault
	}
	config := map[string]any{
		"metadata": map[string]any{"name": spec.Name, "attempt": spec.Attempt},
		"labels":   map[string]string{"io.kubernetes.container.name": spec.Name}, // by which CRI-O tells NRI the name
		"image":    map[string]any{"image": spec.Image},
		"command":  spec.Args,
		"envs":     envs,

		"CDI_devices": devices,

		"mounts":   mounts,
		"log_path": spec.Name + ".log",
		"linux":    map[string]any{"security_context": security},
	}
	file, err := n.writeJSON("container-"+pod.Name+"-"+spec.Name, config)
	if err != nil {
		return nil, err
	}
	id, err := n.crictl(ctx, "create", pod.ID, file, pod.sandbox)
	if err != nil {
		return nil, err
	}
	id = strings.TrimSpace(id)
	if _, err := n.crictl(ctx, "start", id); err != nil {
		return nil, fmt.Errorf("container %s: %w", id, err)
	}
	info, err := n.inspect(ctx, id)
	if err != nil {
		return nil, err
	}
	if err := begun(ctx, info.Info.PID); err != nil {
		return nil, fmt.Errorf("container %s: %w", id, err)
	}
	return &Container{
		Name: spec.Name, ID: id, PID: info.Info.PID,
		log: filepath.Join(n.podLogs(pod.Name), spec.Name+".log"), criLog: true,
	}, nil
}

// begun waits until a container's process runs its program. For a moment after the
// container counts as started, the process is still runc's, with runc's environment.
func begun(ctx context.Context, pid int) error {
	return Until(ctx, "the program to begin", func() error {
		comm, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
		if err == nil && strings.HasPrefix(string(comm), "runc:") {
			return fmt.Errorf("process %d is %s", pid, strings.TrimSpace(string(comm)))
		}
		return nil // the program runs, or has ended
	})
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

// Ended waits until a container has ended, and returns its exit status.
func (p *Pod) Ended(ctx context.Context, c *Container) (status int, err error) {
	err = Until(ctx, "the end of "+p.Name+"/"+c.Name, func() error {
		info, err := p.node.inspect(ctx, c.ID)
		if err == nil && info.Status.State != "CONTAINER_EXITED" {
			err = fmt.Errorf("it is in %s", info.Status.State)
		}
		status = info.Status.ExitCode
		return err
	})
	return status, err
}

// Stop ends the containers' processes as the kubelet does: SIGTERM, then SIGKILL for
// those that have not ended. It returns when all have ended.
func (p *Pod) Stop(ctx context.Context) error {
	for _, c := range p.Containers {
		if _, err := p.node.crictl(ctx, "stop", "--timeout", "10", c.ID); err != nil {
			return err
		}
	}
	return nil
}

// Exec runs a program in the first container, and returns its standard output.
func (p *Pod) Exec(ctx context.Context, argv ...string) (string, error) {
	return p.node.crictl(ctx, append([]string{"exec", "--sync", p.Containers[0].ID}, argv...)...)
}

// Remove kills and removes the pod with its containers.
func (p *Pod) Remove(ctx context.Context) error {
	if p.node.crio != "" { // which else waits as long for their ends as crictl would
		for _, c := range p.Containers {
			if _, err := p.node.crictl(ctx, "stop", "--timeout", "0", c.ID); err != nil {
				return err
			}
		}
	}
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
	criLog bool // lines begin with the CRI's "time stream F "
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

// Environ returns the environment with which the first process started.
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

// Root is the path at which the node sees the container's file system.
func (c *Container) Root() string { return "/proc/" + strconv.Itoa(c.PID) + "/root" }
