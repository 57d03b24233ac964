// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/containerd/nri/pkg/api"

	nvcdi "github.com/nvshare/nvshare/cdi"
)

// Adjust returns how to change a container so that it gets what req asks for,
// nil if there is nothing to change. shim: it has the shim already.
//
// Devices that the container was given by other means (a device plugin, a
// resource claim) are not given again, but the container gets the shim with them.
// The edits of nvshare.com/gpu have replaced the container's own LD_PRELOAD before
// NRI sees it, and nothing here can bring that back.
func Adjust(req Request, ctr *api.Container, shim bool) (*api.ContainerAdjustment, error) {
	has := given(ctr)
	devices := missing(req.Devices, has)
	if len(devices) == 0 && len(has) == 0 && len(req.Shares) == 0 && !shim {
		return nil, nil
	}
	if err := checkLoss(ctr.GetEnv()); err != nil {
		return nil, err
	}
	adjust := &api.ContainerAdjustment{}
	changed := len(devices) > 0 || len(req.Shares) > 0 // the placement is to be recorded
	for _, d := range devices {
		adjust.AddCDIDevice(&api.CDIDevice{Name: nvcdi.KindNRI + "=" + d})
	}
	setEnv := func(key, value string) {
		replaceEnv(adjust, ctr, key, value)
		changed = true
	}
	old, _ := lookupEnv(ctr.GetEnv(), nvcdi.PreloadEnv)
	if merged := mergePreload(old); len(devices) > 0 || merged != old {
		setEnv(nvcdi.PreloadEnv, merged)
	}
	if req.Sees != "" { // of what it can open; another index or GPU would be meant otherwise
		setEnv(nvcdi.VisibleDevicesEnv, req.Sees)
		mark, value, _ := strings.Cut(nvcdi.AnyMark, "=") // its programs follow it to where it moves
		setEnv(mark, value)
	}
	// The shim finds the sockets without the variable. An image or a pod that has it
	// would send the shim to a directory without a scheduler.
	if old, set := lookupEnv(ctr.GetEnv(), nvcdi.RunDirEnv); set && old != nvcdi.ContainerRunDir {
		setEnv(nvcdi.RunDirEnv, nvcdi.ContainerRunDir)
	}
	if !changed {
		return nil, nil
	}
	return adjust, nil
}

// replaceEnv sets a variable of a container, which may have it from its pod, its image or another plugin.
func replaceEnv(adjust *api.ContainerAdjustment, ctr *api.Container, key, value string) {
	if _, set := lookupEnv(ctr.GetEnv(), key); set {
		adjust.RemoveEnv(key)
	}
	adjust.AddEnv(key, value)
}

// given returns the names of nvshare's devices that the runtime was told to inject by
// other means. Of runtimes only containerd 2.3 and later says so; elsewhere a device is
// injected twice, which changes nothing.
func given(ctr *api.Container) []string {
	var names []string
	for _, d := range ctr.GetCDIDevices() {
		for _, kind := range []string{nvcdi.Kind, nvcdi.KindNRI} {
			if name, ok := strings.CutPrefix(d.GetName(), kind+"="); ok {
				names = append(names, name)
			}
		}
	}
	return names
}

func missing(want, have []string) []string {
	if slices.Contains(have, nvcdi.AllDevices) {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(want), func(d string) bool { return slices.Contains(have, d) })
}

// lookupEnv returns the value that a process would see.
func lookupEnv(env []string, key string) (value string, set bool) {
	for _, e := range env {
		if k, v, _ := strings.Cut(e, "="); k == key {
			value, set = v, true // runtimes let the last one win
		}
	}
	return value, set
}

// checkLoss finds a policy that the shim does not know: it would run without turns where
// the user may want it to wait for a scheduler.
func checkLoss(env []string) error {
	const key = "NVSHARE_SCHEDULER_LOSS"
	switch value, _ := lookupEnv(env, key); value {
	case "", "open", "closed":
		return nil
	default:
		return fmt.Errorf("environment %s=%q: give open (a program runs without turns while there is no scheduler) or closed (it waits)", key, shown(value))
	}
}

// isSeparator tells whether the dynamic linker splits LD_PRELOAD at r.
func isSeparator(r rune) bool { return r == ' ' || r == ':' }

// mergePreload puts the shim in front of a container's own LD_PRELOAD, whose order
// stays. The shim is not repeated.
func mergePreload(own string) string {
	var rest strings.Builder
	for own != "" {
		end := strings.IndexFunc(own, isSeparator)
		if end < 0 {
			end = len(own)
		}
		name := own[:end]
		next := strings.TrimLeftFunc(own[end:], isSeparator)
		separators := own[end : len(own)-len(next)]
		if name != nvcdi.ShimPath {
			rest.WriteString(name + separators)
		}
		own = next
	}
	tail := strings.TrimFunc(rest.String(), isSeparator)
	if tail == "" {
		return nvcdi.ShimPath
	}
	return nvcdi.ShimPath + ":" + tail
}

var versionNumbers = regexp.MustCompile(`^v?(\d+)\.(\d+)(?:\.(\d+))?`)

// injectsCDI reports whether a runtime is known to inject CDI devices that a plugin
// names. containerd before 1.7.30 and 2.0.x, which ended in November 2025, drop them silently. A
// runtime that is not known here is assumed to do so too.
func injectsCDI(runtime, version string) bool {
	m := versionNumbers.FindStringSubmatch(version)
	if m == nil {
		return false
	}
	var v [3]int
	for i := range v {
		v[i], _ = strconv.Atoi(m[i+1]) // no patch number counts as 0
	}
	atLeast := func(want ...int) bool { return slices.Compare(v[:], want) >= 0 }
	switch runtime {
	case "containerd":
		return atLeast(2, 1, 0) || atLeast(1, 7, 30) && !atLeast(2, 0, 0)
	case "cri-o":
		return atLeast(1, 34, 0)
	}
	return false
}
