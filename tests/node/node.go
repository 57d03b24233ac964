// SPDX-License-Identifier: Apache-2.0

package node

import (
	"cmp"
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// A Node is made by New and brought up by the Start methods. Only one goroutine may use
// its methods; any may use Process and Container values.
type Node struct {
	Containerd *Process
	Scheduler  *Process
	Plugin     *Process

	Records string // directory that containers see as /record

	dir, private string
	build, tools string
	containerd   string // directory of containerd and its shim
	crio         string // directory of CRI-O in its place, or empty
	kubernetes   string // directory of Kubernetes' programs
	instance     string // "-NAME" in paths, or empty
	nri          NRI
	cgroup       string // parent of all containers' cgroups
	env          []string
	images       map[string]*rootfs
	cluster      bool // pods have a network that works
	simulated    bool
}

// Options say what kind of node New makes.
type Options struct {
	// Build is the absolute .build directory of the repository.
	Build string
	// Simulated: the node has simulated GPUs instead of the machine's.
	Simulated bool
	// SimConfig is the text of the simulated GPU's config file; empty: its defaults.
	SimConfig string
	// Containerd is a directory with containerd 1.7 or later and its shim, to use
	// instead of the pinned ones.
	Containerd string
	// CRIO is a directory with crio and pinns, to use in containerd's place.
	CRIO string
	// Kubernetes is a directory with another Kubernetes than the pinned one.
	Kubernetes string
	// Instance is the name of one of several nodes in one Isolated. Each has its own
	// containerd; everything else is shared.
	Instance string
	NRI      NRI
}

// NRI is how containerd's NRI is set up.
type NRI int

const (
	NRIOn NRI = iota
	// NRIValidates: NRI is on, and its default validator refuses a container whose pod
	// names a plugin that is not registered.
	NRIValidates
	NRIOff
)

// New makes the directories of a node below dir, which Isolated gave. Nothing runs yet.
func New(dir string, o Options) (*Node, error) {
	n := &Node{
		dir: dir, private: filepath.Join(dir, "private"), build: o.Build, tools: filepath.Join(o.Build, "tools"),
		cgroup: cgroupName(filepath.Base(dir)), simulated: o.Simulated, containerd: o.Containerd, crio: o.CRIO, nri: o.NRI,
		images:     map[string]*rootfs{},
		kubernetes: cmp.Or(o.Kubernetes, filepath.Join(o.Build, "tools-k8s")),
	}
	if n.containerd == "" {
		n.containerd = n.tools
	}
	if o.Instance != "" {
		n.instance = "-" + o.Instance
		n.private = filepath.Join(n.private, o.Instance)
	}
	n.Records = filepath.Join(n.private, "record")
	tmp := filepath.Join(n.private, "tmp")
	for _, d := range []string{n.Records, tmp, n.state(), filepath.Dir(n.NRISocket()), "/run/cdi"} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return nil, err
		}
	}
	// The tools come first, because containerd and podman look for runc in PATH.
	n.env = []string{
		"PATH=" + n.containerd + ":" + n.tools + ":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		"HOME=" + n.private, "TMPDIR=" + tmp, "LANG=C.UTF-8",
	}
	if !o.Simulated {
		return n, nil
	}
	return n, n.installSimGPU(o.SimConfig)
}

// BuildImages makes and imports the pause and the workload image. containerd must run.
func (n *Node) BuildImages(ctx context.Context) error {
	pause := newRootfs()
	if err := pause.copyProgram("usr/bin/sleep", "/usr/bin/sleep"); err != nil {
		return err
	}
	pauseTar := filepath.Join(n.private, "pause.tar")
	if err := pause.writeImage(pauseTar, PauseImage, "/usr/bin/sleep", "infinity"); err != nil {
		return err
	}
	work := newRootfs()
	if err := work.copyProgram("usr/bin/sleep", "/usr/bin/sleep"); err != nil {
		return err
	}
	for name, program := range map[string]string{"cuda-busy": "cuda-busy", "nvidia-smi": "gpu-sizes"} {
		if err := work.copyProgram("usr/bin/"+name, filepath.Join(n.build, "bin", program)); err != nil {
			return fmt.Errorf("%w (make simgpu builds it)", err)
		}
	}
	if err := work.copyCLibrary(); err != nil {
		return err
	}
	// Stands for a library that a user preloads; any library will do.
	user, err := findLibrary("libutil.so.1")
	if err != nil {
		return err
	}
	if err := work.copyFile(strings.TrimPrefix(UserLibrary, "/"), user); err != nil {
		return err
	}
	n.images[WorkloadImage] = work
	workTar := filepath.Join(n.private, "workload.tar")
	if err := work.writeImage(workTar, WorkloadImage); err != nil {
		return err
	}
	for _, tar := range []string{pauseTar, workTar} {
		if err := n.importImage(ctx, tar); err != nil {
			return err
		}
	}
	return nil
}

func (n *Node) importImage(ctx context.Context, tar string) error {
	var err error
	if n.crio != "" {
		_, err = output(ctx, n.env, "podman", "load", "--input", tar)
	} else {
		_, err = n.Ctr(ctx, "images", "import", "--local", tar)
	}
	if err != nil {
		return fmt.Errorf("import image: %w", err)
	}
	return nil
}

// AddImage makes and imports an image that contains only files of the machine, given by
// their paths in the image, and the libraries of those that are programs; with glibc also all
// of glibc's. It has no configuration of the loader. containerd must run.
func (n *Node) AddImage(ctx context.Context, name string, glibc bool, files map[string]string) error {
	r := &rootfs{files: map[string]file{}}
	if glibc {
		if err := r.copyCLibrary(); err != nil {
			return err
		}
	}
	for to, from := range files {
		if err := r.copyProgram(strings.TrimPrefix(to, "/"), from); err != nil {
			return err
		}
	}
	// Programs name the loader without /usr.
	for _, d := range []string{"lib", "lib64"} {
		r.files[d] = file{mode: fs.ModeSymlink | 0o777, link: "usr/" + d}
	}
	n.images[name] = r
	tar := filepath.Join(n.private, "image.tar")
	if err := r.writeImage(tar, name); err != nil {
		return err
	}
	return n.importImage(ctx, tar)
}

func (n *Node) logFile(name string) string {
	return filepath.Join(n.dir, "log", name+n.instance+".log")
}

// Logs returns the last lines of each daemon, to report a failure.
func (n *Node) Logs(lines int) string {
	var b strings.Builder
	for _, name := range []string{"scheduler", "warden", "plugin", "containerd", "kubelet"} {
		text, err := os.ReadFile(n.logFile(name))
		if err != nil {
			continue // the daemon was not started
		}
		var kept []string
		for line := range strings.Lines(string(text)) {
			// containerd logs each step of each container.
			if name != "containerd" || !strings.Contains(line, "level=info") {
				kept = append(kept, line)
			}
		}
		fmt.Fprintf(&b, "--- %s\n%s", name, strings.Join(kept[max(0, len(kept)-lines):], ""))
	}
	return b.String()
}
