// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// mpsName is the driver's MPS control daemon. It starts nvidia-cuda-mps-server, which lies
// beside it.
const mpsName = "nvidia-cuda-mps-control"

// mpsSearch lists where distributions and installers put the driver's programs.
var mpsSearch = []string{"/usr/bin", "/usr/local/nvidia/bin", "/opt/bin", "/run/nvidia/driver/usr/bin", "/home/kubernetes/bin/nvidia/bin"}

// FindMPSControl returns the path of the driver's MPS control daemon, as this program sees
// it: among the programs that PATH names, or where the driver is installed, below HostRoot.
func FindMPSControl(o Options) (string, error) {
	search := append(filepath.SplitList(os.Getenv("PATH")), mpsSearch...)
	if o.SimDir != "" {
		dir, err := filepath.Abs(o.SimDir)
		if err != nil {
			return "", err
		}
		search = []string{filepath.Join(dir, "bin")}
	}
	for _, dir := range search {
		path := filepath.Join(dir, mpsName)
		if o.SimDir == "" {
			path = OnHost(o.HostRoot, path)
		}
		if st, err := os.Stat(path); filepath.IsAbs(dir) && err == nil && st.Mode().IsRegular() && st.Mode()&0o111 != 0 {
			return path, nil
		}
	}
	return "", fmt.Errorf("no %s in %s: install the driver's MPS programs, or run the scheduler where they are", mpsName, strings.Join(search, ", "))
}
