// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"cmp"
	"debug/elf"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"

	"github.com/nvshare/nvshare/cdi/ldcache"
)

// Driver is the user-space part of the NVIDIA driver as found on the host, and
// the device nodes that all GPUs share.
type Driver struct {
	Version     string
	Libraries   []Library
	NvidiaSMI   string   // path of nvidia-smi, or empty
	Sockets     []string // of NVIDIA's daemons, on the host
	DeviceNodes []string // without those of a single GPU; where containers see them
	// DevRoot is what precedes the path of each device node on the host, those
	// of single GPUs included: empty, unless a driver container has them.
	DevRoot string
}

// Library is one file and the names under which programs look for it.
type Library struct {
	File  string   // the regular file on the host, symbolic links followed
	Paths []string // where it must appear in a container
	// Soname is the one of Paths whose last element the dynamic linker asks for.
	Soname string
}

// driverPlace is a directory of the host in which the driver may be installed
// as if it was the root, or part of one.
type driverPlace struct {
	root      string // empty: the host's root itself
	container string // what stands for root in a container
	libraries []string
	smi       []string
}

// driverPlaces: the first one with the right version counts.
var driverPlaces = []driverPlace{
	{libraries: librarySearch, smi: smiSearch},
	// The driver container of NVIDIA's GPU Operator.
	{root: "/run/nvidia/driver", libraries: librarySearch, smi: smiSearch},
	// GKE's installer, on Container-Optimized OS and Ubuntu.
	{root: "/home/kubernetes/bin/nvidia", container: "/usr/local/nvidia", libraries: []string{"/lib64"}, smi: []string{"/bin/nvidia-smi"}},
}

// librarySearch lists where distributions and installers put the driver.
var librarySearch = []string{
	"/usr/lib64",
	"/usr/lib/x86_64-linux-gnu",
	"/usr/lib/aarch64-linux-gnu",
	"/usr/lib",
	"/usr/local/nvidia/lib64",
	"/run/opengl-driver/lib",
}

// Containers get every library whose name ends in the driver's version, except those for graphics, which the
// shim does not cover. ownVersioned is for computing, and has its own version.
var (
	drawing      = regexp.MustCompile(`^lib(GL|EGL|nvidia-(gl|egl|fbc|gtk|tls|vksc|vulkan|wayland))`)
	ownVersioned = "libnvidia-nvvm70"
)

var smiSearch = []string{"/usr/bin/nvidia-smi", "/usr/local/nvidia/bin/nvidia-smi", "/opt/bin/nvidia-smi"}

// socketSearch lists the sockets for containers as NVIDIA's generator gives them, except the MPS socket: nvshare
// starts its own servers. (A channel of IMEX it gives to those that name one: nvidia.com/imex-channel.)
var socketSearch = []string{"/run/nvidia-persistenced/socket", "/run/nvidia-fabricmanager/socket"}

const controlNode = "/dev/nvidiactl"

var sharedNodes = []string{
	controlNode,
	"/dev/nvidia-uvm",
	"/dev/nvidia-uvm-tools",
	"/dev/nvidia-modeset",
}

var (
	moduleVersion = regexp.MustCompile(`(?m)^NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s`)
	cudaFile      = regexp.MustCompile(`^libcuda\.so\.(\d+\.\d+(?:\.\d+)?)$`)
)

// places returns where the driver may be. What the administrator names comes first.
func (o Options) places() []driverPlace {
	if o.DriverRoot == "" {
		return driverPlaces
	}
	return append([]driverPlace{{root: o.DriverRoot, libraries: librarySearch, smi: smiSearch}}, driverPlaces...)
}

// FindDriver finds the driver of a host, in one of driverPlaces. The libraries are those of the loaded kernel module's
// version; if that can't be read, of the libcuda.so that the dynamic linker
// would take.
//
// The error says what is missing. A missing device node is none: the list just
// lacks it.
func FindDriver(o Options) (*Driver, error) {
	h := host(o.HostRoot)
	module := h.moduleVersion()
	var searched []string
	for _, place := range o.places() {
		if place.root != "" && !h.exists(place.root) {
			continue
		}
		in := host(h.at(place.root))
		dirs := in.libraryDirs(place.libraries)
		for _, dir := range dirs {
			searched = append(searched, place.root+dir)
		}
		version := cmp.Or(module, in.linkedVersion(dirs))
		libraries := in.driverLibraries(dirs, version)
		if len(libraries) == 0 {
			continue
		}
		d := &Driver{Version: version}
		for _, l := range libraries {
			d.Libraries = append(d.Libraries, place.moved(l))
		}
		for _, p := range place.smi {
			if real, err := in.real(p); err == nil {
				d.NvidiaSMI = place.root + real
				break
			}
		}
		for _, p := range socketSearch {
			for _, root := range slices.Compact([]string{place.root, ""}) {
				if h.exists(root + p) {
					d.Sockets = append(d.Sockets, root+p)
					break
				}
			}
		}
		if !h.exists(controlNode) && in.exists(controlNode) {
			d.DevRoot = place.root
		}
		for _, node := range sharedNodes {
			if h.exists(d.DevRoot + node) {
				d.DeviceNodes = append(d.DeviceNodes, node)
			}
		}
		return d, nil
	}
	if len(searched) == 0 {
		searched = librarySearch // none of them exists
	}
	if module == "" {
		return nil, fmt.Errorf("no libcuda.so.<version> in %s: install the user-space part of the NVIDIA driver",
			strings.Join(searched, ", "))
	}
	return nil, fmt.Errorf("the NVIDIA kernel module has version %s, but there is no libcuda.so.%s in %s: install the user-space part of the same version",
		module, module, strings.Join(searched, ", "))
}

// moved returns a library found below the place's root as host and container
// see it.
func (p driverPlace) moved(l Library) Library {
	m := Library{File: p.root + l.File, Soname: p.container + l.Soname}
	for _, path := range l.Paths {
		m.Paths = append(m.Paths, p.container+path)
	}
	return m
}

// driverLibraries returns none unless libcuda of this version is there.
func (h host) driverLibraries(dirs []string, version string) (found []Library) {
	if version == "" {
		return nil
	}
	find := func(stem string) bool {
		for _, dir := range dirs {
			if lib, ok := h.library(dir, stem, version); ok {
				found = append(found, lib)
				return true
			}
		}
		return false
	}
	if !find("libcuda") {
		return nil
	}
	// Debian's alternatives lead to a directory of the version, and not every library has
	// one.
	if own := path.Dir(found[0].File); !slices.Contains(dirs, own) {
		dirs = append(slices.Clone(dirs), own)
	}
	for _, stem := range h.stems(dirs, version) {
		find(stem)
	}
	return found
}

// stems returns what precedes ".so." in the names of the driver's libraries, without libcuda.
func (h host) stems(dirs []string, version string) []string {
	all := []string{ownVersioned}
	for _, dir := range dirs {
		entries, err := os.ReadDir(h.at(dir))
		if err != nil {
			continue
		}
		for _, e := range entries {
			stem, ok := strings.CutSuffix(e.Name(), ".so."+version)
			if ok && strings.HasPrefix(stem, "lib") && stem != "libcuda" && !drawing.MatchString(stem) {
				all = append(all, stem)
			}
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// libraryDirs returns the directories to search that exist, each once.
func (h host) libraryDirs(search []string) []string {
	if file, err := h.readable("/etc/ld.so.cache"); err == nil {
		if data, err := os.ReadFile(file); err == nil {
			if cache, err := ldcache.Parse(data); err == nil {
				for _, e := range cache.Entries {
					if e.Name == "libcuda.so.1" {
						search = append(slices.Clone(search), path.Dir(e.Path))
					}
				}
			}
		}
	}
	var dirs []string
	for _, dir := range search {
		// /usr/lib64 is /usr/lib on some systems: the first name stands.
		if real, err := h.real(dir); err == nil && !slices.Contains(dirs, real) {
			dirs = append(dirs, real)
		}
	}
	return dirs
}

// moduleVersion returns the version of the loaded kernel module, or "".
func (h host) moduleVersion() string {
	if text, err := os.ReadFile(h.at("/proc/driver/nvidia/version")); err == nil {
		if m := moduleVersion.FindSubmatch(text); m != nil {
			return string(m[1])
		}
	}
	return ""
}

// linkedVersion returns the version that libcuda.so.1 leads to, or "".
func (h host) linkedVersion(dirs []string) string {
	for _, dir := range dirs {
		real, err := h.real(path.Join(dir, "libcuda.so.1"))
		if err != nil {
			continue
		}
		if m := cudaFile.FindStringSubmatch(path.Base(real)); m != nil {
			return m[1]
		}
	}
	return ""
}

// library finds the file of a stem in dir and all names that lead to it there.
func (h host) library(dir, stem, version string) (Library, bool) {
	matches, err := filepath.Glob(h.at(path.Join(dir, stem+".so*")))
	if err != nil {
		return Library{}, false
	}
	slices.Sort(matches)
	names := map[string][]string{} // file → paths of this directory
	for _, m := range matches {
		p := path.Join(dir, filepath.Base(m))
		real, err := h.real(p)
		if err != nil {
			continue // a dangling link
		}
		names[real] = append(names[real], p)
	}
	for real, paths := range names {
		if stem != ownVersioned && !strings.HasSuffix(real, ".so."+version) {
			continue
		}
		soname, err := h.soname(real)
		if err != nil {
			continue // of another architecture, or no library at all
		}
		lib := Library{File: real, Paths: paths, Soname: path.Join(dir, soname)}
		// The installer makes both names; a bare copy of the files lacks one.
		for _, p := range []string{lib.Soname, path.Join(dir, path.Base(real))} {
			if !slices.Contains(lib.Paths, p) {
				lib.Paths = append(lib.Paths, p)
			}
		}
		slices.Sort(lib.Paths)
		return lib, true
	}
	return Library{}, false
}

var machines = map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}

// soname returns the soname of a library, or its file name if it has none.
func (h host) soname(file string) (string, error) {
	f, err := elf.Open(h.at(file))
	if err != nil {
		return "", err
	}
	defer f.Close()
	if f.Machine != machines[runtime.GOARCH] || f.Class != elf.ELFCLASS64 {
		return "", errors.New("of another architecture")
	}
	names, err := f.DynString(elf.DT_SONAME)
	if err != nil || len(names) == 0 || strings.Contains(names[0], "/") {
		return path.Base(file), nil
	}
	return names[0], nil
}
