// SPDX-License-Identifier: Apache-2.0

package state

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
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
