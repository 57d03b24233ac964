// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"
)

// HoldsFile reports whether file is a regular one with this mode that already
// holds data.
func HoldsFile(file string, data []byte, mode fs.FileMode) bool {
	info, err := os.Lstat(file)
	if err != nil || info.Mode() != mode {
		return false
	}
	old, err := os.ReadFile(file)
	return err == nil && bytes.Equal(old, data)
}

// staleAfter is the age from which on what ReplaceFile has begun is not ended by anybody.
const staleAfter = time.Minute

// ReplaceFile writes data to a new file next to file, lets check (or nil)
// look at it, and moves it into place. A crash leaves the old file or the new one; what else it
// leaves, a later call removes.
func ReplaceFile(file string, data []byte, mode fs.FileMode, check func(string) error) (err error) {
	dir := filepath.Dir(file)
	// Engines read *.yaml and *.json: this name is neither.
	pattern := "." + filepath.Base(file) + ".*.tmp"
	left, _ := filepath.Glob(filepath.Join(dir, pattern))
	for _, old := range left {
		if info, err := os.Lstat(old); err == nil && time.Since(info.ModTime()) > staleAfter {
			os.Remove(old)
		}
	}
	tmp, err := os.CreateTemp(dir, pattern)
	if err != nil {
		return about(file, err)
	}
	defer func() {
		if err != nil {
			tmp.Close()
			os.Remove(tmp.Name())
			err = about(file, err)
		}
	}()
	if _, err := tmp.Write(data); err != nil {
		return err
	}
	if err := tmp.Chmod(mode); err != nil { // whatever the umask
		return err
	}
	if err := tmp.Sync(); err != nil {
		return fmt.Errorf("flush %s: %w", tmp.Name(), err)
	}
	if err := tmp.Close(); err != nil {
		return err
	}
	if check != nil {
		if err := check(tmp.Name()); err != nil {
			return err
		}
	}
	if err := os.Rename(tmp.Name(), file); err != nil {
		return err
	}
	d, err := os.Open(dir)
	if err != nil {
		return nil // the file is in place; only its durability is unknown
	}
	defer d.Close()
	_ = d.Sync() // not every file system can
	return nil
}

// about has an error name the file that is meant, and not the new one, whose name is
// another each time.
func about(file string, err error) error {
	var path *os.PathError
	if errors.As(err, &path) {
		return &os.PathError{Op: path.Op, Path: file, Err: path.Err}
	}
	return err
}

// MakeDir makes a directory and its parents, readable by everyone whatever the
// umask, and leaves one that exists as it is.
func MakeDir(dir string) error {
	err := os.Mkdir(dir, 0o755)
	if parent := filepath.Dir(dir); errors.Is(err, fs.ErrNotExist) && parent != dir {
		if err := MakeDir(parent); err != nil {
			return err
		}
		err = os.Mkdir(dir, 0o755)
	}
	if errors.Is(err, fs.ErrExist) {
		if info, statErr := os.Stat(dir); statErr == nil && info.IsDir() {
			return nil
		}
	}
	if err != nil {
		return err
	}
	return os.Chmod(dir, 0o755)
}
