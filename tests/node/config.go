// SPDX-License-Identifier: Apache-2.0

package node

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"text/template"
)

// CRISocket is the socket of containerd's CRI, and NRISocket that of its NRI: the
// default paths, because /run is private, unless the node is one of several.
func (n *Node) CRISocket() string {
	if n.crio != "" {
		return crioSocket
	}
	return n.state() + "/containerd.sock"
}
func (n *Node) NRISocket() string { return "/run/nri" + n.instance + "/nri.sock" }

func (n *Node) state() string { return "/run/containerd" + n.instance }

// Reasons for settings:
//
// restrict_oom_score_adj: without CAP_SYS_RESOURCE (many sandboxes) every pod
// fails with "can't get final child's PID from pipe".
// disable_apparmor: a loaded profile would outlive the node.
// plugin_request_timeout: after the default of 2 s, which a busy machine exceeds, containerd
// closes the plugin, and what is created then starts without it.
// no_sync: nobody needs the node's files after a crash of the machine.
const (
	configBegin = `
root = '{{.Private}}/containerd'
state = '{{.State}}'
imports = []
{{.Servers}}
[plugins]
  [plugins.'io.containerd.internal.v1.opt']
    path = '{{.Private}}/opt'
`
	serversAtTop = `
[grpc]
  address = '{{.CRI}}'
[ttrpc]
  address = '{{.CRI}}.ttrpc'
`
	// Version 4 ignores them there without a message.
	serversAsPlugins = `
[plugins.'io.containerd.server.v1.grpc']
  address = '{{.CRI}}'
[plugins.'io.containerd.server.v1.ttrpc']
  address = '{{.CRI}}.ttrpc'
`
	configEnd = `
  [plugins.'io.containerd.nri.v1.nri']
    disable = {{.Off}}
    socket_path = '{{.NRI}}'
    plugin_path = '{{.Private}}/nri/plugins'
    plugin_config_path = '{{.Private}}/nri/conf.d'
    plugin_request_timeout = '20s'
{{- if .Validates}}
    [plugins.'io.containerd.nri.v1.nri'.default_validator]
      enable = true
{{- end}}
`
	// CDI is on by default.
	config2 = configBegin + `
  [plugins.'io.containerd.image-verifier.v1.bindir']
    bin_dir = '{{.Private}}/opt/image-verifier'
  [plugins.'io.containerd.metadata.v1.bolt']
    no_sync = true
  [plugins.'io.containerd.cri.v1.images']
    snapshotter = 'overlayfs'
    [plugins.'io.containerd.cri.v1.images'.pinned_images]
      sandbox = '{{.PauseImage}}'
  [plugins.'io.containerd.cri.v1.runtime']
    restrict_oom_score_adj = true
    disable_apparmor = true
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
      runtime_type = 'io.containerd.runc.v2'
      [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
        BinaryName = '{{.Tools}}/runc'
        SystemdCgroup = false
    [plugins.'io.containerd.cri.v1.runtime'.cni]
      bin_dirs = ['{{.Private}}/cni/bin']
      conf_dir = '{{.Private}}/cni/net.d'
` + configEnd
	// Neither NRI nor CDI is on by default.
	config17 = "version = 2\n" + configBegin + `
  [plugins.'io.containerd.grpc.v1.cri']
    sandbox_image = '{{.PauseImage}}'
    restrict_oom_score_adj = true
    disable_apparmor = true
    enable_cdi = true
    cdi_spec_dirs = ['/etc/cdi', '/var/run/cdi']
    [plugins.'io.containerd.grpc.v1.cri'.containerd]
      snapshotter = 'overlayfs'
      [plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes.runc]
        runtime_type = 'io.containerd.runc.v2'
        [plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes.runc.options]
          BinaryName = '{{.Tools}}/runc'
          SystemdCgroup = false
    [plugins.'io.containerd.grpc.v1.cri'.cni]
      bin_dir = '{{.Private}}/cni/bin'
      conf_dir = '{{.Private}}/cni/net.d'
` + configEnd
)

// writeConfig writes the configuration of this node's containerd in the form of its
// version, and the network of pods that have one.
func (n *Node) writeConfig(ctx context.Context) (path string, err error) {
	out, err := output(ctx, n.env, filepath.Join(n.containerd, "containerd"), "--version")
	if err != nil {
		return "", err
	}
	// For example "containerd github.com/containerd/containerd/v2 2.4.2+unknown".
	f := strings.Fields(out)
	if len(f) < 3 {
		return "", fmt.Errorf("containerd --version prints %q", out)
	}
	text, servers := config17, serversAtTop
	if !strings.HasPrefix(strings.TrimPrefix(f[2], "v"), "1.") {
		text, servers = "version = 4\n"+config2, serversAsPlugins
	}
	t, err := template.New("containerd.toml").Parse(strings.Replace(text, "{{.Servers}}", servers, 1))
	if err != nil {
		return "", err
	}
	var config bytes.Buffer
	if err := t.Execute(&config, map[string]any{
		"Private": n.private, "Tools": n.tools, "PauseImage": PauseImage, "State": n.state(), "CRI": n.CRISocket(),
		"NRI": n.NRISocket(), "Off": n.nri == NRIOff, "Validates": n.nri == NRIValidates,
	}); err != nil {
		return "", err
	}
	if err := n.network(); err != nil {
		return "", err
	}
	path = filepath.Join(n.private, "containerd.toml")
	return path, os.WriteFile(path, config.Bytes(), 0o644)
}

// network makes the network of pods that do not use the node's. It connects them to
// nothing; the runtime only demands an address.
func (n *Node) network() error {
	if n.cluster {
		return nil // NewKubernetes has made one
	}
	const script = `#!/bin/sh
cat >/dev/null
case $CNI_COMMAND in
ADD) echo '{"cniVersion":"1.0.0","interfaces":[{"name":"'"$CNI_IFNAME"'","sandbox":"'"$CNI_NETNS"'"}],"ips":[{"interface":0,"address":"10.88.0.2/32"}]}' ;;
VERSION) echo '{"cniVersion":"1.0.0","supportedVersions":["0.3.1","0.4.0","1.0.0","1.1.0"]}' ;;
esac
`
	for _, d := range []string{"cni/bin", "cni/net.d"} {
		if err := os.MkdirAll(filepath.Join(n.private, d), 0o755); err != nil {
			return err
		}
	}
	for _, name := range []string{"none", "loopback"} {
		if err := os.WriteFile(filepath.Join(n.private, "cni/bin", name), []byte(script), 0o755); err != nil {
			return err
		}
	}
	return os.WriteFile(filepath.Join(n.private, "cni/net.d/10-none.conflist"),
		[]byte(`{"cniVersion":"1.0.0","name":"none","plugins":[{"type":"none"}]}`), 0o644)
}

// CgroupParent is the parent of the cgroups of all containers of the node.
func (n *Node) CgroupParent() string { return "/" + n.cgroup }
