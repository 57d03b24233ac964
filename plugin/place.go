// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/nvshare/nvshare/cdi"
)

// Place copies the file from to the path to, executable by everyone, and reports
// whether that changed anything. The file is replaced as a whole: processes that have
// mapped the old file keep it.
func Place(from, to string) (changed bool, err error) {
	data, err := os.ReadFile(from)
	if err != nil {
		return false, fmt.Errorf("read %s to place it on the host: %w", filepath.Base(to), err)
	}
	const mode = 0o755
	if cdi.HoldsFile(to, data, mode) {
		return false, nil
	}
	err = cdi.MakeDir(filepath.Dir(to))
	if err == nil {
		err = cdi.ReplaceFile(to, data, mode, nil)
	}
	if err != nil {
		return false, fmt.Errorf("place %s on the host: %w (choose a directory that is writable and not mounted noexec)", filepath.Base(to), err)
	}
	return true, nil
}
