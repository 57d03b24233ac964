// SPDX-License-Identifier: Apache-2.0

package node

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"text/template"
	"time"

	"golang.org/x/sys/unix"
)

// Addresses of the cluster. The API server has the first address of the services'
// range, so that pods reach it without kube-proxy.
const (
	kubeServices = "10.96.0.0/16"
	kubeAPI      = "10.96.0.1"
	kubeNodeIP   = "10.99.0.1"
	kubePods     = "10.98.0.0/16"

	// KubeNode is the name of the cluster's node.
	KubeNode = "node1"

	// getTimeout bounds one answer of the API server: whoever awaits something asks again.
	getTimeout = 30 * time.Second
)

// Kubernetes is a cluster of one node, on a Node whose containerd runs.
type Kubernetes struct {
	etcd, api, manager, scheduler, kubelet *Process

	// Args are further arguments, by program. They must be set before the start.
	Args map[string][]string
	Env  []string // further environment of all programs

	node   *Node
	dir    string // certificates, configurations, state
	bin    string
	client *http.Client // of the cluster's administrator
}

// NewKubernetes prepares a cluster. The process must be in the environment of
// IsolatedCluster. No address, file or setting outside of it is changed.
func (n *Node) NewKubernetes(ctx context.Context) (*Kubernetes, error) {
	n.cluster = true
	k := &Kubernetes{node: n, dir: filepath.Join(n.private, "kube"), bin: n.kubernetes}
	for _, d := range []string{"pki", "etcd"} {
		if err := os.MkdirAll(filepath.Join(k.dir, d), 0o755); err != nil {
			return nil, err
		}
	}
	for _, step := range []func() error{
		func() error { return setAddresses(ctx, n.env) },
		k.writeCNI,
		k.hideSysctls,
		func() error { return makeCgroups(n.cgroup) },
		func() error { return writePKI(filepath.Join(k.dir, "pki")) },
		k.makeClient,
		k.writeConfigs,
	} {
		if err := step(); err != nil {
			return nil, fmt.Errorf("prepare Kubernetes: %w", err)
		}
	}
	return k, nil
}

func setAddresses(ctx context.Context, env []string) error {
	for _, args := range []string{
		"link set lo up", "addr add " + kubeAPI + "/32 dev lo", "addr add " + kubeNodeIP + "/32 dev lo",
	} {
		if _, err := output(ctx, env, append([]string{"ip"}, strings.Fields(args)...)...); err != nil {
			return err
		}
	}
	return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0)
}

// writeCNI gives pods a bridge, which ends with the network namespace.
func (k *Kubernetes) writeCNI() error {
	bin, conf := filepath.Join(k.node.private, "cni", "bin"), filepath.Join(k.node.private, "cni", "net.d")
	if err := os.MkdirAll(conf, 0o755); err != nil {
		return err
	}
	if err := os.Symlink(filepath.Join(k.bin, "cni"), bin); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(conf, "10-pods.conflist"), fmt.Appendf(nil, `{"cniVersion": "1.0.0", "name": "pods", "plugins": [
{"type": "bridge", "bridge": "pods0", "isGateway": true, "ipam": {"type": "host-local", "dataDir": %q,
 "ranges": [[{"subnet": %q}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}`, filepath.Join(k.dir, "addresses"), kubePods), 0o644)
}

// hideSysctls mounts files over the settings that the kubelet changes for the whole
// machine.
func (k *Kubernetes) hideSysctls() error {
	for _, name := range []string{
		"vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops",
		"kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes",
	} {
		at := filepath.Join("/proc/sys", name)
		value, err := os.ReadFile(at)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		file := filepath.Join(k.dir, strings.ReplaceAll(name, "/", "."))
		if err := errors.Join(err, os.WriteFile(file, value, 0o644)); err != nil {
			return err
		}
		if err := unix.Mount(file, at, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("hide %s: %w", at, err)
		}
	}
	return nil
}

// makeCgroups makes the node's cgroup in each hierarchy, because the kubelet demands
// that its cgroupRoot exists. Isolated removes them.
func makeCgroups(name string) error {
	roots, err := cgroupRoots()
	if err != nil {
		return err
	}
	// The top directory is itself a hierarchy only where all is cgroup v2.
	var top unix.Statfs_t
	if err := unix.Statfs(cgroupRoot, &top); err != nil {
		return err
	}
	if top.Type == unix.CGROUP2_SUPER_MAGIC {
		roots = roots[:1]
	} else {
		roots = roots[1:]
	}
	for _, root := range roots {
		if err := os.Mkdir(filepath.Join(root, name), 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	return nil
}

// kubeletConfig works without CAP_SYS_RESOURCE (oomScoreAdj, maxOpenFiles), and on a
// host with cgroup v1.
var kubeletConfig = template.Must(template.New("kubelet").Parse(`apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
failCgroupV1: false
cgroupDriver: cgroupfs
cgroupRoot: /{{.Cgroup}}
containerRuntimeEndpoint: unix://{{.Containerd}}
authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: {{.PKI}}/ca.crt}}
authorization: {mode: Webhook}
address: {{.IP}}
healthzPort: 0
tlsCertFile: {{.PKI}}/kubelet-serving.crt
tlsPrivateKeyFile: {{.PKI}}/kubelet-serving.key
failSwapOn: false
oomScoreAdj: 0
maxOpenFiles: 10000
resolvConf: ""
clusterDNS: [{{.IP}}] # nobody answers there
podLogsDir: {{.Dir}}/podlogs
volumePluginDir: {{.Dir}}/volumeplugins
localStorageCapacityIsolation: false
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
evictionHard: {memory.available: 50Mi, nodefs.available: 1%, imagefs.available: 1%}
makeIPTablesUtilChains: false
nodeStatusUpdateFrequency: 5s
maxPods: 150
kubeAPIQPS: 200
kubeAPIBurst: 400
registryPullQPS: 0
crashLoopBackOff: {maxContainerRestartPeriod: 1s} # tests kill the driver often
`))

func (k *Kubernetes) writeConfigs() error {
	var config bytes.Buffer
	if err := kubeletConfig.Execute(&config, map[string]string{
		"Cgroup": k.node.cgroup, "Containerd": k.node.CRISocket(), "PKI": k.pki(""), "IP": kubeNodeIP, "Dir": k.dir,
	}); err != nil {
		return err
	}
	errs := []error{os.WriteFile(filepath.Join(k.dir, "kubelet.yaml"), config.Bytes(), 0o644)}
	for _, user := range []string{"admin", "manager", "scheduler", "kubelet"} {
		errs = append(errs, os.WriteFile(k.Kubeconfig(user), fmt.Appendf(nil, `apiVersion: v1
kind: Config
clusters: [{name: test, cluster: {server: "https://%s:443", certificate-authority: %[2]s.crt}}]
users: [{name: %[3]s, user: {client-certificate: %[4]s.crt, client-key: %[4]s.key}}]
contexts: [{name: test, context: {cluster: test, user: %[3]s}}]
current-context: test
`, kubeAPI, k.pki("ca"), user, k.pki(user)), 0o600))
	}
	return errors.Join(errs...)
}

func (k *Kubernetes) pki(name string) string { return filepath.Join(k.dir, "pki", name) }

func (k *Kubernetes) start(name string, args ...string) (*Process, error) {
	return start(name, k.node.logFile(name), slices.Concat(k.node.env, k.Env), slices.Concat([]string{filepath.Join(k.bin, name)}, args, k.Args[name])...)
}

// Kubeconfig is the file for a user: admin, manager, scheduler or kubelet.
func (k *Kubernetes) Kubeconfig(user string) string { return filepath.Join(k.dir, user+".conf") }

// ControlPlane returns the processes that StartControlPlane started.
func (k *Kubernetes) ControlPlane() []*Process {
	return []*Process{k.etcd, k.api, k.manager, k.scheduler}
}

// StartControlPlane starts etcd, the API server, the controller manager and the
// scheduler, and waits until the API server is ready.
func (k *Kubernetes) StartControlPlane(ctx context.Context) (err error) {
	const client, peer = "http://127.0.0.1:2379", "http://127.0.0.1:2380"
	if k.etcd, err = k.start("etcd", "--name=test", "--data-dir="+filepath.Join(k.dir, "etcd"), "--unsafe-no-fsync",
		"--listen-client-urls="+client, "--advertise-client-urls="+client,
		"--listen-peer-urls="+peer, "--initial-advertise-peer-urls="+peer, "--initial-cluster=test="+peer, "--log-level=warn"); err != nil {
		return err
	}
	if k.api, err = k.start("kube-apiserver", "--etcd-servers="+client, "--secure-port=443", "--bind-address=0.0.0.0",
		"--advertise-address="+kubeNodeIP, "--service-cluster-ip-range="+kubeServices,
		"--tls-cert-file="+k.pki("apiserver.crt"), "--tls-private-key-file="+k.pki("apiserver.key"), "--client-ca-file="+k.pki("ca.crt"),
		"--kubelet-certificate-authority="+k.pki("ca.crt"), "--kubelet-client-certificate="+k.pki("apiserver-kubelet.crt"),
		"--kubelet-client-key="+k.pki("apiserver-kubelet.key"), "--kubelet-preferred-address-types=InternalIP",
		"--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file="+k.pki("sa.pub"),
		"--service-account-signing-key-file="+k.pki("sa.key"),
		"--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction", "--allow-privileged=true", "--profiling=false"); err != nil {
		return err
	}
	if err := k.api.ready(ctx, "/readyz", func() error {
		_, err := k.Get(ctx, "/readyz")
		return err
	}); err != nil {
		return err
	}
	component := func(name, user string, args ...string) (*Process, error) {
		conf := k.Kubeconfig(user)
		return k.start(name, append([]string{"--kubeconfig=" + conf, "--authentication-kubeconfig=" + conf,
			"--authorization-kubeconfig=" + conf, "--secure-port=0", "--leader-elect=false"}, args...)...)
	}
	k.manager, err = component("kube-controller-manager", "manager", "--service-account-private-key-file="+k.pki("sa.key"),
		"--root-ca-file="+k.pki("ca.crt"), "--use-service-account-credentials=true")
	if err != nil {
		return err
	}
	k.scheduler, err = component("kube-scheduler", "scheduler")
	return err
}

// StartKubelet starts or restarts the kubelet, and waits until the node is ready.
func (k *Kubernetes) StartKubelet(ctx context.Context) (err error) {
	if k.kubelet, err = k.start("kubelet", "--config="+filepath.Join(k.dir, "kubelet.yaml"), "--kubeconfig="+k.Kubeconfig("kubelet"),
		"--hostname-override="+KubeNode, "--node-labels=nvidia.com/gpu.present=true", "--node-ip="+kubeNodeIP, "--cert-dir="+k.pki("")); err != nil {
		return err
	}
	return k.kubelet.ready(ctx, "the node to be ready", func() error {
		text, err := k.Get(ctx, "/api/v1/nodes/"+KubeNode)
		if err != nil {
			return err
		}
		var n struct {
			Spec   struct{ Taints []any }
			Status struct {
				Conditions []struct{ Type, Status string }
			}
		}
		if err := json.Unmarshal(text, &n); err != nil {
			return err
		}
		for _, c := range n.Status.Conditions {
			if c.Type == "Ready" && c.Status == "True" && len(n.Spec.Taints) == 0 {
				return nil
			}
		}
		return fmt.Errorf("it has %v", n)
	})
}

// StopKubelet ends the kubelet; pods run on.
func (k *Kubernetes) StopKubelet() error { return k.kubelet.Stop() }

func (k *Kubernetes) makeClient() error {
	ca, err := os.ReadFile(k.pki("ca.crt"))
	if err != nil {
		return err
	}
	cert, err := tls.LoadX509KeyPair(k.pki("admin.crt"), k.pki("admin.key"))
	if err != nil {
		return err
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca)
	k.client = &http.Client{
		Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{cert}}},
		Timeout:   getTimeout,
	}
	return nil
}

// Get reads a path of the API server as the cluster's administrator. Unlike a kubectl it has nothing to
// start, which takes a tenth of a second of the processor: this is for what is asked again and again.
func (k *Kubernetes) Get(ctx context.Context, path string) ([]byte, error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+kubeAPI+path, nil)
	if err != nil {
		return nil, err
	}
	answer, err := k.client.Do(r)
	if err != nil {
		return nil, err
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err == nil && answer.StatusCode != http.StatusOK {
		err = fmt.Errorf("GET %s: %s: %s", path, answer.Status, text)
	}
	return text, err
}

// Kubectl runs kubectl as the cluster's administrator.
func (k *Kubernetes) Kubectl(ctx context.Context, args ...string) (string, error) {
	return output(ctx, k.kubectlEnv(), append([]string{filepath.Join(k.bin, "kubectl"), "--kubeconfig=" + k.Kubeconfig("admin")}, args...)...)
}

// A kubectl lives for a moment: collecting garbage takes a third of its processor time.
func (k *Kubernetes) kubectlEnv() []string { return append(slices.Clone(k.node.env), "GOGC=off") }

// Apply runs kubectl with text as its standard input.
func (k *Kubernetes) Apply(ctx context.Context, text string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, filepath.Join(k.bin, "kubectl"), append([]string{"--kubeconfig=" + k.Kubeconfig("admin")}, append(args, "-f", "-")...)...)
	cmd.Env = k.kubectlEnv()
	cmd.Stdin = strings.NewReader(text)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("kubectl %s: %w: %s", strings.Join(args, " "), err, bytes.TrimSpace(out))
	}
	return string(out), nil
}
