// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
)

// What people set and what is to outlive the scheduler is in small files of its
// own, written when it is changed. The state file, which is written at each
// grant, stays small.

// readRecord reads such a file; its "version" must be the one given. Missing, it
// is a zero T. If it cannot be used it is a zero T and an error, and the file is
// put aside, so that the next writeRecord does not destroy it.
func readRecord[T any](path string, version int) (T, error) {
	var none, t T
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return none, nil
	}
	if err != nil {
		return none, err
	}
	if err = decodeRecord(text, version, &t); err == nil {
		return t, nil
	}
	aside := path + ".damaged"
	if os.Rename(path, aside) != nil {
		aside = path
	}
	return none, fmt.Errorf("%s cannot be used: %w", aside, err)
}

func decodeRecord(text []byte, version int, to any) error {
	var head struct {
		Version int `json:"version"`
	}
	if err := json.Unmarshal(text, &head); err != nil {
		return err
	}
	switch {
	case head.Version > version:
		return fmt.Errorf("a newer nvshare-scheduler wrote it: version %d, this one reads %d", head.Version, version)
	case head.Version != version:
		return fmt.Errorf("version %d, this nvshare-scheduler reads %d", head.Version, version)
	}
	return json.Unmarshal(text, to)
}

// writeRecord replaces the file at one stroke.
func writeRecord(path string, content any) error {
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
