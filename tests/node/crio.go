// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

const (
	crioSocket = "/run/crio/crio.sock"
	// crioImages has CRI-O's images, where podman has its own: podman load adds to them.
	crioImages = "/var/lib/containers"
)

// crioConfig has CRI-O in the node's namespaces, with runc: crun refuses hybrid cgroup hierarchies.
// What it does not say is CRI-O's default: NRI and CDI are on.
const crioConfig = `
[crio]
  root = "` + crioImages + `/storage"
  runroot = "/run/containers/storage"
  storage_driver = "overlay"
  log_dir = "%[1]s/crio/pods"
  version_file = "/run/crio/version"
  version_file_persist = ""
  clean_shutdown_file = ""
  internal_wipe = false
[crio.api]
  listen = "` + crioSocket + `"
[crio.runtime]
  cgroup_manager = "cgroupfs"
  conmon_cgroup = "pod"
  pinns_path = "%[2]s/pinns"
  default_runtime = "runc"
  apparmor_profile = "unconfined"
  hooks_dir = []
[crio.runtime.runtimes.runc]
  runtime_path = "%[3]s/runc"
[crio.image]
  pause_image = "` + PauseImage + `"
  pause_command = "/usr/bin/sleep infinity"
[crio.network]
  network_dir = "%[1]s/cni/net.d"
  plugin_dirs = ["%[1]s/cni/bin"]
[crio.nri]
  nri_listen = "%[4]s"
  nri_plugin_dir = "%[1]s/nri/plugins"
  nri_plugin_config_dir = "%[1]s/nri/conf.d"
  nri_plugin_request_timeout = "20s"
[crio.nri.default_validator]
  nri_enable_default_validator = %[5]t
`

// startCRIO starts or restarts CRI-O in containerd's place, and waits until its CRI answers.
func (n *Node) startCRIO(ctx context.Context) error {
	if n.Containerd == nil { // the images of the machine stay as they are
		own := filepath.Join(n.private, "images")
		if err := errors.Join(os.MkdirAll(own, 0o700), os.MkdirAll(crioImages, 0o755)); err != nil {
			return err
		}
		if err := unix.Mount(own, crioImages, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("a private %s: %w", crioImages, err)
		}
	}
	if err := n.network(); err != nil {
		return err
	}
	config := filepath.Join(n.private, "crio.conf")
	text := fmt.Sprintf(crioConfig, n.private, n.crio, n.tools, n.NRISocket(), n.nri == NRIValidates)
	if err := os.WriteFile(config, []byte(text), 0o644); err != nil {
		return err
	}
	p, err := start("crio", n.logFile("containerd"), n.env, filepath.Join(n.crio, "crio"), "--config", config, "--config-dir", "")
	if err != nil {
		return err
	}
	n.Containerd = p
	return n.awaitCRI(ctx)
}
