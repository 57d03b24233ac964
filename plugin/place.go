// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// Place puts a copy of the file from at to, executable by everyone, and reports
// whether that changed anything. The file is replaced as a whole: processes
// that have the old one mapped keep it.
func Place(from, to string) (changed bool, err error) {
	data, err := os.ReadFile(from)
	if err != nil {
		return false, fmt.Errorf("read %s to place it on the host: %w", filepath.Base(to), err)
	}
	const mode = 0o755
	if info, err := os.Lstat(to); err == nil && info.Mode() == mode {
		if old, err := os.ReadFile(to); err == nil && bytes.Equal(old, data) {
			return false, nil
		}
	}
	if err := place(data, to, mode); err != nil {
		return false, fmt.Errorf("place %s on the host: %w (choose a directory that is writable and not mounted noexec)", filepath.Base(to), err)
	}
	return true, nil
}

func place(data []byte, to string, mode fs.FileMode) (err error) {
	dir := filepath.Dir(to)
	if err := MakeDir(dir); err != nil {
		return err
	}
	tmp, err := os.CreateTemp(dir, "."+filepath.Base(to)+".*.tmp")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			tmp.Close()
			os.Remove(tmp.Name())
		}
	}()
	if _, err := tmp.Write(data); err != nil {
		return err
	}
	if err := tmp.Chmod(mode); err != nil {
		return err
	}
	if err := tmp.Sync(); err != nil {
		return err
	}
	if err := tmp.Close(); err != nil {
		return err
	}
	return os.Rename(tmp.Name(), to)
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
