// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	specs "tags.cncf.io/container-device-interface/specs-go"
)

// Finding is one thing that Validate has to say.
type Finding struct {
	File string // "" if it is about no single file
	// Bad: containers that ask for a device of nvshare fail, or get another
	// one's. Otherwise it is good to know.
	Bad  bool
	Text string
}

// Validate looks at all that engines read in dirs, later ones winning, as far as
// devices of nvshare depend on it. Without anything bad, an engine that reads
// these directories finds the devices, and the host has what they bring.
// HostRoot and SimDir count, SpecDirs do not.
func Validate(o Options, dirs ...string) (all []Finding) {
	v := validation{host: host(o.HostRoot), simulated: o.SimDir != ""}
	for i, dir := range dirs {
		v.directory(dir, i)
	}
	found := false
	for name := range v.devices {
		found = found || strings.HasPrefix(name, Kind+"=")
	}
	if !found {
		v.say("", true, fmt.Sprintf("no device of %s in %s: start nvshare-plugin, or run nvsharectl cdi generate with --output", Kind, strings.Join(dirs, ", ")))
	}
	return v.findings
}

type validation struct {
	host      host
	simulated bool
	findings  []Finding
	devices   map[string]string // our devices, by qualified name: the file that has it
}

func (v *validation) say(file string, bad bool, text string) {
	v.findings = append(v.findings, Finding{file, bad, text})
}

func (v *validation) directory(dir string, priority int) {
	info, err := os.Stat(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	if err != nil {
		v.say(dir, true, err.Error())
		return
	}
	if info.Mode().Perm()&0o005 != 0o005 {
		v.say(dir, false, "rootless engines cannot look into it: chmod 755")
	}
	here := map[string]string{}
	for _, file := range specFiles(dir) {
		spec, err := cdi.ReadSpec(file, priority)
		if err != nil {
			// Its devices are lost; whether they are ours is to be seen in the text.
			head, headErr := headOf(file)
			ours := headErr == nil && (head.Kind == Kind || head.Kind == KindNRI) || strings.HasPrefix(filepath.Base(file), "nvshare.com-")
			v.say(file, ours, fmt.Sprintf("container engines ignore it: %v", err))
			continue
		}
		for _, d := range spec.Devices {
			name := spec.Kind + "=" + d.Name
			if other, twice := here[name]; twice {
				v.say(file, spec.Kind == Kind || spec.Kind == KindNRI, fmt.Sprintf("declares %s, and so does %s: container engines ignore both; remove one", name, other))
				continue
			}
			here[name] = file
		}
		if spec.Kind != Kind && spec.Kind != KindNRI {
			continue
		}
		v.spec(file, spec)
		if v.devices == nil {
			v.devices = map[string]string{}
		}
		hides := ""
		for _, d := range spec.Devices {
			name := spec.Kind + "=" + d.Name
			if old := v.devices[name]; old != "" && old != file {
				hides = old
			}
			v.devices[name] = file
		}
		if hides != "" {
			v.say(file, false, "goes before "+hides+", which declares the same devices")
		}
	}
}

// spec checks one of ours.
func (v *validation) spec(file string, spec *cdi.Spec) {
	bad := func(format string, args ...any) { v.say(file, true, fmt.Sprintf(format, args...)) }
	if info, err := os.Stat(file); err != nil {
		bad("%v", err)
	} else if info.Mode().Perm()&0o004 == 0 {
		v.say(file, false, "rootless engines cannot read it: chmod 644")
	}
	if spec.Version != SpecVersion {
		v.say(file, false, fmt.Sprintf("declares CDI %s; podman 4.3 reads %s at most", spec.Version, SpecVersion))
	}
	all := []specs.ContainerEdits{spec.ContainerEdits}
	for _, d := range spec.Devices {
		all = append(all, d.ContainerEdits)
	}
	said := map[string]bool{}
	once := func(format string, args ...any) {
		if text := fmt.Sprintf(format, args...); !said[text] {
			said[text] = true
			bad("%s", text)
		}
	}
	for _, e := range all {
		for _, m := range e.Mounts {
			if !v.host.exists(m.HostPath) {
				once("mounts %s, which is not there%s", m.HostPath, hint(m))
			}
		}
		for _, h := range e.Hooks {
			if err := v.runnable(h.Path); err != nil {
				once("hook %v", err)
			}
		}
		for _, n := range e.DeviceNodes {
			path := n.HostPath
			if path == "" {
				path = n.Path
			}
			if !v.host.exists(path) {
				once("has device node %s, which is not there", path)
			}
		}
	}
	if version := v.host.moduleVersion(); version != "" && !v.simulated {
		for _, m := range spec.ContainerEdits.Mounts {
			if of := cudaFile.FindStringSubmatch(filepath.Base(m.HostPath)); of != nil && of[1] != version {
				once("is for driver %s, but the kernel has %s loaded: write it again", of[1], version)
			}
		}
	}
}

// hint says who makes what a spec of ours mounts.
func hint(m *specs.Mount) string {
	switch m.ContainerPath {
	case ShimDir:
		return " (nvshare-plugin puts the shim there)"
	case ContainerRunDir:
		return " (nvshare-scheduler makes it)"
	}
	return ""
}

// runnable makes sure that a file of the host can be executed by engines of any
// user.
func (v *validation) runnable(path string) error {
	seen, err := v.host.readable(path)
	if err != nil {
		return fmt.Errorf("%s is not there (nvshare-plugin puts it there)", path)
	}
	info, err := os.Stat(seen)
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() || info.Mode().Perm()&0o005 != 0o005 {
		return fmt.Errorf("%s cannot be run by everyone: chmod 755", path)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(seen, &st); err == nil && st.Flags&unix.ST_NOEXEC != 0 {
		return fmt.Errorf("%s is on a file system that is mounted noexec: choose another --bin-dir", path)
	}
	return nil
}
