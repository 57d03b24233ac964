// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
)

const maxInput = 16 << 20 // bytes of state and of config.json

// state is what a runtime tells its hooks of a container (OCI runtime specification).
type state struct {
	ID          string            `json:"id"`
	PID         uint32            `json:"pid"`
	Bundle      string            `json:"bundle"`
	Annotations map[string]string `json:"annotations"`
}

// config is the part of a container's config.json that the hook needs.
type config struct {
	Root struct {
		Path string `json:"path"`
	} `json:"root"`
	Process struct {
		Env  []string `json:"env"`
		User struct {
			UID uint32 `json:"uid"`
		} `json:"user"`
	} `json:"process"`
	Mounts []struct {
		Destination string `json:"destination"`
		Source      string `json:"source"`
	} `json:"mounts"`
	Linux struct {
		Devices []struct {
			Path string `json:"path"`
		} `json:"devices"`
		Namespaces []struct {
			Type string `json:"type"`
		} `json:"namespaces"`
	} `json:"linux"`
}

func (s *state) read(stdin io.Reader) error {
	if err := json.NewDecoder(io.LimitReader(stdin, maxInput)).Decode(s); err != nil {
		return fmt.Errorf("read the container's state from standard input: %w", err)
	}
	if !filepath.IsAbs(s.Bundle) {
		return fmt.Errorf("the container's state names no bundle directory (%q)", s.Bundle)
	}
	return nil
}

func (s *state) config(c *config) error {
	if err := readJSON(filepath.Join(s.Bundle, "config.json"), c); err != nil {
		return fmt.Errorf("read the container's configuration: %w", err)
	}
	return nil
}

// rootfs returns the root file system of the container.
func (c *config) rootfs(bundle string) (string, error) {
	root := c.Root.Path
	if root == "" {
		return "", fmt.Errorf("%s/config.json names no root file system", bundle)
	}
	if !filepath.IsAbs(root) {
		root = filepath.Join(bundle, root)
	}
	if root = filepath.Clean(root); root == "/" {
		return "", fmt.Errorf("%s/config.json names the host's own root file system: leaving it alone", bundle)
	}
	return root, nil
}

func readJSON(file string, to any) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := json.NewDecoder(io.LimitReader(f, maxInput)).Decode(to); err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	return nil
}
