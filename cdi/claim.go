// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"fmt"
	"path/filepath"
	"strings"
)

// A resource claim of Kubernetes has a CDI spec of its own, of Kind, beside those of
// the GPUs. Write leaves these files alone, and Fingerprint does not look at them.

// SpecVersion is the version of all specs.
const SpecVersion = specVersion

const (
	claimPrefix = "nvshare.com-claim-"
	claimSuffix = ".json"
)

// ClaimFile is the file with the CDI spec of a resource claim.
func ClaimFile(dir, uid string) string { return filepath.Join(dir, claimPrefix+uid+claimSuffix) }

// ClaimFiles returns the files of all claims in a CDI directory, by the claims' UIDs.
func ClaimFiles(dir string) (map[string]string, error) {
	matches, err := filepath.Glob(ClaimFile(dir, "*"))
	if err != nil {
		return nil, fmt.Errorf("list the CDI specs of claims: %w", err)
	}
	files := map[string]string{}
	for _, file := range matches {
		if uid, ok := claimOf(file); ok {
			files[uid] = file
		}
	}
	return files, nil
}

func claimOf(file string) (uid string, ok bool) {
	name, ok := strings.CutPrefix(filepath.Base(file), claimPrefix)
	if !ok {
		return "", false
	}
	return strings.CutSuffix(name, claimSuffix)
}

func isClaim(file string) bool {
	_, ok := claimOf(file)
	return ok
}
