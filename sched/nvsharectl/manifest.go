// SPDX-License-Identifier: Apache-2.0

package main

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/nvshare/nvshare/cdi"
)

// manifest lists the files that install has put on a host, so that uninstall and the
// next install know them. On disk it has a line for each file as sha256sum prints it,
// and "# directory PATH" for each directory that was made.
type manifest struct {
	files map[string][]string // by absolute path: hashes of nvshare's versions, two while installing
	dirs  []string            // parents first
}

const directoryLine = "# directory "

func sum(data []byte) string {
	h := sha256.Sum256(data)
	return hex.EncodeToString(h[:])
}

// readManifest returns an empty manifest if there is no file.
func readManifest(file string) (m manifest, err error) {
	m.files = map[string][]string{}
	data, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return m, nil
	}
	if err != nil {
		return m, err
	}
	for line := range strings.Lines(string(data)) {
		line = strings.TrimSuffix(line, "\n")
		if dir, ok := strings.CutPrefix(line, directoryLine); ok && filepath.IsAbs(dir) {
			m.dirs = append(m.dirs, dir)
			continue
		}
		hash, path, ok := strings.Cut(line, "  ")
		if !ok || len(hash) != 2*sha256.Size || !filepath.IsAbs(path) || filepath.Clean(path) != path {
			return m, fmt.Errorf("%s: line %.80q is not what nvsharectl install writes", file, line)
		}
		m.add(path, hash)
	}
	return m, nil
}

func (m *manifest) add(path, hash string) {
	if !slices.Contains(m.files[path], hash) {
		m.files[path] = append(m.files[path], hash)
	}
}

func (m *manifest) addDir(dir string) {
	if !slices.Contains(m.dirs, dir) {
		m.dirs = append(m.dirs, dir)
		slices.Sort(m.dirs)
	}
}

func (m *manifest) write(file string) error {
	var b strings.Builder
	for _, d := range m.dirs {
		fmt.Fprintln(&b, directoryLine+d)
	}
	for _, path := range m.paths() {
		for _, hash := range m.files[path] {
			fmt.Fprintf(&b, "%s  %s\n", hash, path)
		}
	}
	if cdi.HoldsFile(file, []byte(b.String()), 0o644) {
		return nil
	}
	return cdi.ReplaceFile(file, []byte(b.String()), 0o644, nil)
}

func (m *manifest) paths() (paths []string) {
	for p := range m.files {
		paths = append(paths, p)
	}
	slices.Sort(paths)
	return paths
}

// owned tells who owns the file at path. This program sees the file at seen.
type owned int

const (
	absent  owned = iota
	ours          // as it was installed
	foreign       // not installed by nvshare, changed since, or no file at all
)

func (m *manifest) whose(path, seen string) (owned, error) {
	info, err := os.Lstat(seen)
	if errors.Is(err, fs.ErrNotExist) {
		return absent, nil
	}
	if err != nil {
		return foreign, err
	}
	if !info.Mode().IsRegular() {
		return foreign, nil
	}
	data, err := os.ReadFile(seen)
	if err != nil {
		return foreign, err
	}
	if slices.Contains(m.files[path], sum(data)) {
		return ours, nil
	}
	return foreign, nil
}
