// SPDX-License-Identifier: Apache-2.0

package state

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"
)

// ErrNewer is for a record that a later version of the scheduler wrote. Without it, limits
// that somebody has set would not hold.
var ErrNewer = errors.New("a newer nvshare-scheduler wrote it: start that one, or move the file away, and what it says is lost")

// ReadRecord reads a record; its "version" must be the one given, and its Check, if T has
// one, must return nil. Where there is no record, it returns a zero T. Where the file cannot
// be used, it returns a zero T and an error. The file stays if the error is ErrNewer;
// otherwise it is put aside, so that the next WriteRecord does not destroy it.
func ReadRecord[T any](path string, version int) (T, error) {
	var none, t T
	text, err := read(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return none, nil
	case err == nil:
		err = DecodeRecord(text, version, &t)
	}
	if err == nil {
		return t, nil
	}
	aside := path + ".damaged"
	if errors.Is(err, ErrNewer) || os.Rename(path, aside) != nil {
		aside = path
	}
	return none, fmt.Errorf("%s cannot be used: %w", aside, err)
}

// Restore is ReadRecord for a scheduler that starts. It says what is lost where the record is damaged. With an
// error the scheduler is not to start.
func Restore[T any](log *logrus.Entry, path string, version int, lost string) (t T, damaged, err error) {
	t, damaged = ReadRecord[T](path, version)
	if errors.Is(damaged, ErrNewer) {
		return t, nil, damaged
	}
	if damaged != nil {
		log.WithError(damaged).Error(lost)
	}
	return t, damaged, nil
}

// DecodeRecord is ReadRecord for the text of a record.
func DecodeRecord(text []byte, version int, to any) error {
	var head struct {
		Version int `json:"version"`
	}
	if err := json.Unmarshal(text, &head); err != nil {
		return err
	}
	switch {
	case head.Version > version:
		return fmt.Errorf("version %d, this nvshare-scheduler reads %d: %w", head.Version, version, ErrNewer)
	case head.Version != version:
		return fmt.Errorf("version %d, this nvshare-scheduler reads %d", head.Version, version)
	}
	err := json.Unmarshal(text, to)
	if c, ok := to.(interface{ Check() error }); ok && err == nil {
		err = c.Check()
	}
	return err
}

// WriteRecord replaces a record.
func WriteRecord(path string, content any) error {
	text, err := json.MarshalIndent(content, "", "  ")
	if err != nil {
		return err
	}
	tmp := path + ".tmp"
	if err := overwrite(tmp, append(text, '\n')); err != nil {
		return err
	}
	return os.Rename(tmp, path)
}

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
