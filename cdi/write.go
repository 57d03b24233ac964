// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"go.yaml.in/yaml/v3"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	specs "tags.cncf.io/container-device-interface/specs-go"
)

// ErrForeign means that a file in the CDI directory that is not ours is in the
// way.
var ErrForeign = errors.New("not written by nvshare")

// maxSpecSize bounds what is read of a spec file to see whose it is, in bytes.
const maxSpecSize = 4 << 20

// FileName is the name of a kind's file in a CDI directory.
func FileName(kind string) string { return strings.ReplaceAll(kind, "/", "-") + ".yaml" }

// Marshal encodes a spec as it is written.
func Marshal(spec *specs.Spec) ([]byte, error) {
	var b bytes.Buffer
	b.WriteString("---\n")
	enc := yaml.NewEncoder(&b)
	enc.SetIndent(2)
	if err := enc.Encode(spec); err != nil {
		return nil, fmt.Errorf("encode the spec of %s: %w", spec.Kind, err)
	}
	return b.Bytes(), enc.Close()
}

// Write puts specs into the CDI directory dir, which it makes if needed, and
// reports whether anything changed. Each file is validated as a container
// engine would, then replaced as a whole, mode 0644.
//
// It returns ErrForeign, wrapped, and writes nothing if a file that is not ours
// has one of our names, or another file declares one of our kinds: engines then
// ignore the devices of both.
func Write(dir string, all ...*specs.Spec) (changed bool, err error) {
	if err := MakeDir(dir); err != nil {
		return false, fmt.Errorf("make the CDI directory: %w", err)
	}
	for _, spec := range all {
		if err := checkOwner(dir, spec.Kind); err != nil {
			return false, err
		}
	}
	for _, spec := range all {
		data, err := Marshal(spec)
		if err != nil {
			return changed, err
		}
		file := filepath.Join(dir, FileName(spec.Kind))
		if HoldsFile(file, data, 0o644) {
			continue
		}
		if err := ReplaceFile(file, data, 0o644, validate); err != nil {
			return changed, fmt.Errorf("write CDI spec: %w", err)
		}
		changed = true
	}
	return changed, nil
}

// Remove deletes the files of kinds from dir and reports whether there were
// any. A missing file is no error; one that is not ours is left alone and
// reported as ErrForeign.
func Remove(dir string, kinds ...string) (removed bool, err error) {
	for _, kind := range kinds {
		file := filepath.Join(dir, FileName(kind))
		got, err := kindOf(file)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return removed, fmt.Errorf("remove CDI spec: %w", err)
		}
		if got != kind {
			return removed, fmt.Errorf("remove CDI spec: %s is of kind %s: %w", file, got, ErrForeign)
		}
		if err := os.Remove(file); err != nil {
			return removed, fmt.Errorf("remove CDI spec: %w", err)
		}
		removed = true
	}
	return removed, nil
}

// checkOwner makes sure that FileName(kind) is ours or free, and that no other
// file of dir declares kind.
func checkOwner(dir, kind string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("read the CDI directory: %w", err)
	}
	for _, e := range entries {
		name := e.Name()
		ours := name == FileName(kind)
		if ext := filepath.Ext(name); !ours && ext != ".yaml" && ext != ".json" {
			continue
		}
		file := filepath.Join(dir, name)
		got, err := kindOf(file)
		switch {
		case ours && err != nil:
			return fmt.Errorf("%w (move it away: nvshare needs this name)", err)
		case ours && got != kind:
			return fmt.Errorf("%s is of kind %q: %w (move it away: nvshare needs this name)", file, got, ErrForeign)
		case !ours && err == nil && got == kind:
			return fmt.Errorf("%s declares %s too: %w (remove it: engines ignore devices that are declared twice)", file, kind, ErrForeign)
		}
	}
	return nil
}

// kindOf returns the kind that a spec file declares. It returns ErrForeign for
// anything that is not a regular file with a CDI spec in it.
func kindOf(file string) (string, error) {
	info, err := os.Lstat(file)
	if err != nil {
		return "", err
	}
	if !info.Mode().IsRegular() || info.Size() > maxSpecSize {
		return "", fmt.Errorf("%s is no CDI spec: %w", file, ErrForeign)
	}
	data, err := os.ReadFile(file)
	if err != nil {
		return "", err
	}
	var head struct {
		Kind string `yaml:"kind"`
	}
	if err := yaml.Unmarshal(data, &head); err != nil || head.Kind == "" {
		return "", fmt.Errorf("%s is no CDI spec: %w", file, ErrForeign)
	}
	return head.Kind, nil
}

func validate(file string) error {
	_, err := cdi.ReadSpec(file, 0)
	return err
}
