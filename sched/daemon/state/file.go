// SPDX-License-Identifier: Apache-2.0

package state

import (
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// ErrNotRegular is for a link, a pipe, a device or a directory where a file of
// the scheduler should be. The scheduler never makes one, so somebody else can
// write to the run directory.
var ErrNotRegular = errors.New("not a regular file; remove it")

// openRegular opens a file that must be a regular one. It neither follows a
// link nor waits for the other end of a pipe: others may be able to write to the
// run directory.
func openRegular(path string, flags int) (*os.File, os.FileInfo, error) {
	f, err := os.OpenFile(path, flags|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o600)
	// ELOOP: a link. ENXIO: a pipe that nobody reads, or a socket. EISDIR: a directory.
	if errors.Is(err, unix.ELOOP) || errors.Is(err, unix.ENXIO) || errors.Is(err, unix.EISDIR) {
		return nil, nil, fmt.Errorf("%s is %w", path, ErrNotRegular)
	}
	if err != nil {
		return nil, nil, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is %w", path, ErrNotRegular)
	}
	if err != nil {
		f.Close()
		return nil, nil, err
	}
	return f, info, nil
}

func read(path string) ([]byte, error) {
	f, _, err := openRegular(path, os.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(f)
}

// overwrite makes a file's content text, without truncating the file first.
func overwrite(path string, text []byte) error {
	f, info, err := openRegular(path, os.O_WRONLY|os.O_CREATE)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := f.WriteAt(text, 0); err != nil || info.Size() <= int64(len(text)) {
		return err
	}
	return f.Truncate(int64(len(text)))
}

// exchange makes two files change places, atomically. It fails where a file
// system cannot do so.
func exchange(a, b string) error {
	return unix.Renameat2(unix.AT_FDCWD, a, unix.AT_FDCWD, b, unix.RENAME_EXCHANGE)
}
