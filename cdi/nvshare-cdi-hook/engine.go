// SPDX-License-Identifier: Apache-2.0

package main

import (
	"path/filepath"
	"slices"
	"strings"
)

// engine says which engine runs a container, and the name that people gave it; "": it
// has none, or none that is found. kubernetes: the plugin describes the container. Only what
// CRI runtimes write on every container says so: people may write other io.kubernetes.… annotations.
func engine(s *state, c *config) (name, container string, kubernetes bool) {
	manager := s.Annotations["io.container.manager"]
	if _, containerd := s.Annotations["io.kubernetes.cri.sandbox-id"]; containerd || manager == "cri-o" {
		return "", "", true
	}
	if manager == "libpod" {
		return "podman", podmanName(s), false
	}
	if name, ok := s.Annotations["nerdctl/name"]; ok {
		return "nerdctl", name, false
	}
	if name := dockerName(c); name != "" {
		return "docker", name, false
	}
	return "containerd", s.ID, false
}

// podmanName finds a name in podman's list of containers. The list is in the directory
// that has the container's directory: <list's>/<id>/userdata is the bundle.
func podmanName(s *state) string {
	var all []struct {
		ID    string   `json:"id"`
		Names []string `json:"names"`
	}
	for _, list := range []string{"containers.json", "volatile-containers.json"} {
		if readJSON(filepath.Join(s.Bundle, "../..", list), &all) != nil {
			continue
		}
		for _, c := range all {
			if c.ID == s.ID && len(c.Names) > 0 {
				return c.Names[0]
			}
		}
	}
	return ""
}

// dockerName finds a name in the file that Docker keeps of each container, beside the
// container's host name.
func dockerName(c *config) string {
	for _, m := range c.Mounts {
		if m.Destination != "/etc/hostname" {
			continue
		}
		var kept struct {
			Name string `json:"Name"`
		}
		if readJSON(filepath.Join(filepath.Dir(m.Source), "config.v2.json"), &kept) == nil {
			return strings.TrimPrefix(kept.Name, "/")
		}
	}
	return ""
}

// env returns the value of a variable that the container's programs see.
func (c *config) env(key string) (value string, set bool) {
	for _, e := range slices.Backward(c.Process.Env) { // the last one holds
		if value, set = strings.CutPrefix(e, key+"="); set {
			return value, true
		}
	}
	return "", false
}

// has tells whether a container has the device node, or the variable of the
// environment, that marks a GPU.
func (c *config) has(mark string) bool {
	for _, d := range c.Linux.Devices {
		if d.Path == mark {
			return true
		}
	}
	return slices.Contains(c.Process.Env, mark)
}
