// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	specs "tags.cncf.io/container-device-interface/specs-go"
)

// A resource claim of Kubernetes has a CDI spec of its own, of Kind, beside those of
// the GPUs. Write leaves these files alone, and Fingerprint does not look at them.

// ClaimDir is the directory of the driver for resource claims, below which it records
// prepared claims.
const ClaimDir = "/var/lib/kubelet/plugins/nvshare.com"

const (
	claimPrefix = "nvshare.com-claim-"
	claimSuffix = ".json"
)

// ForClaim returns the edits that are common to all devices of KindNRI as a claim's spec has
// them. A container that is created while the plugin is away gets no other edits: the hook has
// its programs load the shim, and they find the scheduler whatever the image says.
func ForClaim(common specs.ContainerEdits) specs.ContainerEdits {
	common.Env = append(slices.Clone(common.Env), RunDirEnv+"="+ContainerRunDir)
	return common
}

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
