// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"tags.cncf.io/container-device-interface/pkg/cdi"
	specs "tags.cncf.io/container-device-interface/specs-go"
)

// Generated is what Generate found and made.
type Generated struct {
	GPUs []GPU
	// Partial: NVML failed, as a whole or for a GPU. It may not the next time, and Fingerprint does not see that.
	Partial bool
	// Specs holds one spec of each kind, Kind first; it is empty without GPUs.
	Specs []*specs.Spec
	// Source says in words what the specs are built on.
	Source string
	// HostFiles are those that containers with the specs cannot start without, and those of
	// an NVIDIA spec that was passed over because it needs one that is missing. Give them to
	// Fingerprint, which looks whether they are there.
	HostFiles []string
}

// Spec returns the spec of a kind, nil if there is none.
func (g *Generated) Spec(kind string) *specs.Spec {
	for _, s := range g.Specs {
		if s.Kind == kind {
			return s
		}
	}
	return nil
}

// Generate looks at this node and builds both specs. It writes nothing. A node
// without GPU is no error.
func Generate(ctx context.Context, o Options, p Paths) (*Generated, error) {
	gpus, partial, err := o.discover(ctx)
	if err != nil {
		return nil, err
	}
	g := &Generated{GPUs: gpus, Partial: partial, Source: "no GPU found"}
	if len(gpus) == 0 {
		return g, nil
	}
	base, err := g.base(o, p)
	if err != nil {
		return nil, err
	}
	g.HostFiles = append(g.HostFiles, base.hostFiles()...)
	slices.Sort(g.HostFiles)
	g.HostFiles = slices.Compact(g.HostFiles)
	for _, kind := range []string{Kind, KindNRI} {
		spec, err := Build(kind, gpus, base, p)
		if err != nil {
			return nil, err
		}
		g.Specs = append(g.Specs, spec)
	}
	return g, nil
}

func (g *Generated) base(o Options, p Paths) (Base, error) {
	if o.SimDir != "" {
		dir, err := filepath.Abs(o.SimDir)
		if err != nil {
			return Base{}, fmt.Errorf("simulated GPU %s: %w", o.SimDir, err)
		}
		g.Source = "simulated GPU in " + dir
		return SimulatedBase(dir, g.GPUs, p.Hook), nil
	}
	base, file, needed, warnings := nvidiaBase(host(o.HostRoot), o.specDirs(), g.GPUs)
	g.HostFiles = needed
	for _, w := range warnings {
		o.log().Warn(w)
	}
	if file != "" {
		g.Source = "NVIDIA's CDI spec " + file
		return base, nil
	}
	driver, err := FindDriver(o)
	if err != nil {
		return Base{}, err
	}
	if !slices.Contains(driver.DeviceNodes, "/dev/nvidia-uvm") {
		o.log().Warn("/dev/nvidia-uvm is missing, so CUDA can't start in containers: run nvidia-modprobe -c 0 -u")
	}
	for _, gpu := range g.GPUs {
		for _, in := range gpu.Instances {
			if len(in.DeviceNodes) == 0 {
				o.log().Warnf("MIG device %s has no device: its capabilities are not in %s", in.Name(gpu), procCapabilities)
			}
		}
	}
	g.Source = "NVIDIA driver " + driver.Version + " as found"
	return DriverBase(driver, g.GPUs, p.Hook), nil
}

func (o Options) specDirs() []string {
	if o.SpecDirs != nil {
		return o.SpecDirs
	}
	var dirs []string
	for _, d := range cdi.DefaultSpecDirs {
		dirs = append(dirs, OnHost(o.HostRoot, d))
	}
	return dirs
}

// Fingerprint returns a text that changes when what Generate looks at may have
// changed: GPUs, driver, NVIDIA's specs, ours, and which of the files the host has, the
// HostFiles of an earlier look. It is cheap and wakes no GPU.
func Fingerprint(o Options, files ...string) string {
	f := fingerprint{host: host(o.HostRoot)}
	if o.SimDir != "" {
		f.stat(filepath.Join(o.SimDir, "run", "config"))
		list(filepath.Join(o.SimDir, "lib", "*"), f.stat)
	} else {
		f.driver(o)
	}
	for _, dir := range o.specDirs() {
		for _, file := range specFiles(dir) { // and not what becomes one, as of a claim
			if concerns(file) {
				f.stat(file)
			}
		}
	}
	for _, file := range files {
		if f.exists(file) {
			f.name(file)
		}
	}
	return f.String()
}

// fingerprint is what Fingerprint has seen. Paths are as this program sees them.
type fingerprint struct {
	host
	strings.Builder
}

func (f *fingerprint) name(path string) { fmt.Fprintln(f, path) }

func (f *fingerprint) stat(path string) {
	if info, err := os.Stat(path); err == nil {
		fmt.Fprintf(f, "%s %d %d %v\n", path, info.Size(), info.ModTime().UnixNano(), info.Mode())
	}
}

func (f *fingerprint) content(path string) {
	if text, err := os.ReadFile(path); err == nil {
		f.Write(text)
	}
}

func list(pattern string, each func(string)) {
	matches, _ := filepath.Glob(pattern) // sorted; fails for malformed patterns only
	for _, m := range matches {
		each(m)
	}
}

// driver looks at the driver and its GPUs.
func (f *fingerprint) driver(o Options) {
	f.content(f.at("/proc/driver/nvidia/version"))
	list(f.at(procGPUs+"/*"), f.name)
	list(f.at(procGPUs+"/*/information"), func(file string) {
		if text, err := os.ReadFile(file); err == nil {
			gpu, _, _ := parseInformation(string(text))
			f.name(gpu.UUID) // which becomes known with the first use of the GPU
		}
	})
	for _, files := range []string{"/gpu*/mig/gi*/access", "/gpu*/mig/gi*/ci*/access"} {
		list(f.at(procCapabilities+files), func(file string) {
			f.name(file)
			f.content(file)
		})
	}
	for _, place := range o.places() {
		list(f.at(place.root+"/dev/nvidia*"), f.name)
		list(f.at(place.root+capsDir+"/*"), f.name)
		for _, socket := range socketSearch {
			list(f.at(place.root+socket), f.name)
		}
		for _, dir := range place.libraries {
			list(f.at(filepath.Join(place.root, dir, "libcuda.so*")), f.stat)
		}
	}
}

// concerns tells whether Generate or Write may do something else because of a spec. Drivers for
// resource claims write a spec for each pod, which is of a kind of their own, or ours.
func concerns(file string) bool {
	if isClaim(file) {
		return false
	}
	kind, err := kindOf(file)
	return err != nil || slices.Contains([]string{Kind, KindNRI, nvidiaKind}, kind)
}
