// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/sirupsen/logrus"
)

// GPU is one GPU of this node.
type GPU struct {
	Index       int    // position in NVML's order, which is that of the PCI bus
	UUID        string // "GPU-…": the identity of the GPU everywhere
	Name        string // model
	MemoryBytes uint64 // 0 where the lister cannot know it
	PCIBusID    string // "0000:17:00.0", "" if simulated without one
	Model       Model
	Minor       int      // N of /dev/nvidiaN
	DeviceNodes []string // device nodes of this GPU alone; none if simulated
	Unopened    bool     // see AddUnopened
	// Instances are its MIG devices. A GPU in MIG mode can be used through them
	// only.
	Instances []Instance
}

// Lister lists the GPUs of this node in index order. A GPU that cannot be opened keeps its
// index, and is left out with a warning: the others do work. If there is no other, the error
// says what failed.
type Lister interface {
	List(ctx context.Context) ([]GPU, error)
}

// ErrNoNVML means that NVML cannot be asked: it is not installed, the driver is
// not loaded, or this program was built without cgo.
var ErrNoNVML = errors.New("NVML is not available")

// Options says where to look. The zero value means this host's real GPUs.
type Options struct {
	// HostRoot is where the host's root file system is seen from here, for a
	// program that runs in a container. Empty means "/".
	HostRoot string
	// DriverRoot is a directory of the host below which the user-space driver is installed as if
	// it was the root, if it is none of those that are looked into anyway.
	DriverRoot string
	// SimDir is the directory of a simulated GPU (lib/ and run/), or empty.
	SimDir string
	// SpecDirs are searched for NVIDIA's own CDI spec, later ones win. Nil
	// means /etc/cdi and /var/run/cdi.
	SpecDirs []string
	// Log receives warnings. Nil means silence.
	Log logrus.FieldLogger
}

func (o Options) log() logrus.FieldLogger {
	if o.Log != nil {
		return o.Log
	}
	silent := logrus.New()
	silent.SetOutput(io.Discard)
	return silent
}

// Discover lists the GPUs of this node in index order. A node without GPU or
// driver is no error: the list is empty. On WSL2 it is ErrWSL, and GPUs without a memory of their
// own are an error.
func Discover(ctx context.Context, o Options) ([]GPU, error) {
	gpus, _, err := o.discover(ctx)
	return gpus, err
}

// discover is Discover; partial is as in Generated.
func (o Options) discover(ctx context.Context) (gpus []GPU, partial bool, err error) {
	switch h := host(o.HostRoot); {
	case o.SimDir != "":
		gpus, err = Simulated{Dir: o.SimDir}.List(ctx)
		return gpus, false, err
	case h.isWSL():
		return nil, false, ErrWSL
	case h.exists(tegraFile):
		return nil, false, fmt.Errorf("this is a Jetson (%s): %w", tegraFile, errIntegrated)
	}
	gpus, partial, err = o.list(ctx, NVML{Log: o.Log}.look)
	for _, g := range gpus {
		if integrated.MatchString(g.Name) {
			return nil, false, fmt.Errorf("GPU %d is an %s: %w", g.Index, g.Name, errIntegrated)
		}
	}
	return gpus, partial, err
}

func (o Options) list(ctx context.Context, nvml func(context.Context) ([]GPU, bool, error)) (gpus []GPU, partial bool, err error) {
	// NVML of a host whose root is elsewhere would be loaded against this
	// container's libraries: ask the kernel module instead.
	if host(o.HostRoot).isSelf() {
		gpus, partial, err = nvml(ctx)
		if err == nil || ctx.Err() != nil {
			return gpus, partial, err
		}
		if partial = !errors.Is(err, ErrNoNVML); partial {
			o.log().Warnf("asking the kernel module for GPUs, because NVML failed: %v", err)
		}
	}
	gpus, err = ProcFS{Root: o.HostRoot, Log: o.Log}.List(ctx)
	return gpus, partial, err
}

// AddUnopened adds to what Discover found the GPUs that the kernel module knows and NVML did not
// open, such as one that has fallen off the bus, and marks them so. A container with one of them
// may not start; but what is recorded of them is still to be told. Their memory is not known. It
// returns when ctx ends even if the module does not answer.
func AddUnopened(ctx context.Context, o Options, gpus []GPU) []GPU {
	if o.SimDir != "" {
		return gpus
	}
	answer := make(chan []GPU, 1)
	go func() {
		known, err := ProcFS{Root: o.HostRoot}.List(ctx)
		if err != nil {
			o.log().Warnf("look for GPUs that NVML cannot open: %v", err)
		}
		answer <- known
	}()
	var known []GPU
	select {
	case known = <-answer:
	case <-ctx.Done():
	}
	for _, k := range known {
		same := func(g GPU) bool { return g.UUID == k.UUID || g.Index == k.Index }
		if !slices.ContainsFunc(gpus, same) {
			k.Unopened = true
			gpus = append(gpus, k)
		}
	}
	slices.SortFunc(gpus, func(a, b GPU) int { return cmp.Compare(a.Index, b.Index) })
	return gpus
}

// AnyDevice is for a container that may move: it holds all GPUs of the first one's model, and its programs
// see only the first.
const AnyDevice = "any"

// AllDevices is the name of the device that holds every GPU.
const AllDevices = "all"

// OverlapDevice is the name of a device of KindNRI that holds no GPU: it makes its
// container wait for the overlap group, and gives it the group's directories.
const OverlapDevice = "overlap"

// usable is what a lister returns that found these GPUs, and could not open some more.
func usable(gpus []GPU, failed []error, log logrus.FieldLogger) ([]GPU, error) {
	if len(gpus) == 0 {
		return nil, errors.Join(failed...)
	}
	for _, err := range failed {
		Options{Log: log}.log().Warnf("leave out a GPU that cannot be opened: %v", err)
	}
	return gpus, nil
}

// Names returns the CDI device names of the GPUs: every index, every UUID, the
// MIG devices' as Instance.Name and Instance.ID, and "all". Without GPUs there is
// none. AnyDevice is none of them: it chooses among these.
func Names(gpus []GPU) []string {
	if len(gpus) == 0 {
		return nil
	}
	var names, uuids []string
	for _, g := range gpus {
		names = append(names, fmt.Sprint(g.Index))
		uuids = append(uuids, g.UUID)
	}
	names = append(names, uuids...)
	for _, g := range gpus {
		for _, i := range g.Instances {
			names = append(names, i.Name(g), i.ID(g))
		}
	}
	return append(names, AllDevices)
}
