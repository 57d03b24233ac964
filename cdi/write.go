// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	specs "tags.cncf.io/container-device-interface/specs-go"
)

// ErrForeign means that something in the CDI directory that is not ours is in the
// way.
var ErrForeign = errors.New("not written by nvshare")

// errDamaged means that a regular file holds no spec, or cannot be read.
var errDamaged = errors.New("it is damaged")

// maxSpecSize bounds what is read of a spec file to see whose it is, in bytes.
const maxSpecSize = 4 << 20

// FileName is the name of a kind's file in a CDI directory.
func FileName(kind string) string { return strings.ReplaceAll(kind, "/", "-") + ".yaml" }

// mark begins each file that we write, so that we know it again under another
// name. CDI 0.5.0 has no annotations that could say it.
const mark = "# Written by nvshare, which replaces and removes it: changes are lost.\n"

// Marshal encodes a spec as it is written.
func Marshal(spec *specs.Spec) ([]byte, error) {
	var b bytes.Buffer
	b.WriteString(mark + "---\n")
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
// Engines ignore a device that two files of one directory declare. So Write removes
// another file that Marshal made of one of our kinds: it is an older one. A regular
// file with one of our names and no spec in it is replaced. If somebody else's file
// declares a device of ours, or has one of our names, Write writes nothing and
// returns ErrForeign, wrapped.
func Write(dir string, all ...*specs.Spec) (changed bool, err error) {
	if err := MakeDir(dir); err != nil {
		return false, fmt.Errorf("make the CDI directory: %w", err)
	}
	var old []string
	for _, spec := range all {
		files, err := inTheWay(dir, spec)
		if err != nil {
			return false, err
		}
		old = append(old, files...)
	}
	for _, file := range old {
		if err := os.Remove(file); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return changed, fmt.Errorf("remove an older CDI spec: %w", err)
		}
		changed = true
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

// Ours lists the files in dir that Write or Marshal made, whatever their names, and
// those of claims.
// A missing directory has none.
func Ours(dir string) (files []string, err error) {
	if _, err := os.ReadDir(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("read the CDI directory: %w", err)
	}
	for _, file := range specFiles(dir) {
		head, err := headOf(file)
		if err == nil && (head.Kind == Kind || head.Kind == KindNRI) && (head.ours || filepath.Base(file) == FileName(head.Kind) || isClaim(file)) {
			files = append(files, file)
		}
	}
	return files, nil
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
		if err != nil && !errors.Is(err, errDamaged) {
			return removed, fmt.Errorf("remove CDI spec: %w", err)
		}
		if err == nil && got != kind {
			return removed, fmt.Errorf("remove CDI spec: %s is of kind %s: %w", file, got, ErrForeign)
		}
		if err := os.Remove(file); err != nil {
			return removed, fmt.Errorf("remove CDI spec: %w", err)
		}
		removed = true
	}
	return removed, nil
}

// inTheWay returns the older files of ours that declare spec's kind under other
// names. It returns ErrForeign if FileName(spec.Kind) is not ours, or somebody
// else's file declares one of spec's devices.
func inTheWay(dir string, spec *specs.Spec) (old []string, err error) {
	if _, err := os.ReadDir(dir); err != nil {
		return nil, fmt.Errorf("read the CDI directory: %w", err)
	}
	own := filepath.Join(dir, FileName(spec.Kind))
	got, err := kindOf(own)
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, errDamaged): // Write makes it anew
	case err != nil:
		return nil, fmt.Errorf("%w (move it away: nvshare needs this name)", err)
	case got != spec.Kind:
		return nil, fmt.Errorf("%s is of kind %q: %w (move it away: nvshare needs this name)", own, got, ErrForeign)
	}
	for _, file := range specFiles(dir) {
		head, err := headOf(file)
		if file == own || err != nil || head.Kind != spec.Kind {
			continue
		}
		if head.ours {
			old = append(old, file)
			continue
		}
		for _, d := range head.Devices {
			if slices.ContainsFunc(spec.Devices, func(own specs.Device) bool { return own.Name == d.Name }) {
				return nil, fmt.Errorf("%s declares %s=%s too: %w (remove it: engines ignore devices that are declared twice)", file, spec.Kind, d.Name, ErrForeign)
			}
		}
	}
	return old, nil
}

// head is what a spec file says of itself.
type head struct {
	Kind    string `yaml:"kind"`
	Devices []struct {
		Name string `yaml:"name"`
	} `yaml:"devices"`
	ours bool // Marshal made it
}

// headOf returns errDamaged for a regular file that has no CDI spec in it or cannot be
// read, and
// ErrForeign for anything that is no regular file.
func headOf(file string) (h head, err error) {
	info, err := os.Lstat(file)
	if err != nil {
		return h, err
	}
	if !info.Mode().IsRegular() {
		return h, fmt.Errorf("%s is no regular file: %w", file, ErrForeign)
	}
	if info.Size() > maxSpecSize {
		return h, fmt.Errorf("%s is no CDI spec: %w", file, errDamaged)
	}
	data, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return h, err
	}
	if err != nil { // nobody has a use for it
		return h, fmt.Errorf("%w: %w", err, errDamaged)
	}
	if err := yaml.Unmarshal(data, &h); err != nil || h.Kind == "" {
		return h, fmt.Errorf("%s is no CDI spec: %w", file, errDamaged)
	}
	h.ours = bytes.HasPrefix(data, []byte(mark))
	return h, nil
}

func kindOf(file string) (string, error) {
	h, err := headOf(file)
	return h.Kind, err
}

func validate(file string) error {
	_, err := cdi.ReadSpec(file, 0)
	return err
}
