//go:build k8s

// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

const (
	deployments = "../../deployments/kubernetes/"
	chart       = "../../deployments/helm/nvshare"
	objectsDir  = chart + "/objects/" // of both
)

func helm(args ...string) (string, error) {
	cmd := exec.Command(filepath.Join(buildDir, "tools-k8s", "helm"), args...)
	cmd.Env = append(os.Environ(), "GOGC=off") // as of kubectl
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func kustomize(t *testing.T, ctx context.Context, dir string) string {
	t.Helper()
	return kubectl(t, ctx, "kustomize", dir)
}

// objects reads a stream of YAML documents into a map by kind and name.
func objects(t *testing.T, text string) map[string]map[string]any {
	t.Helper()
	found := map[string]map[string]any{}
	for d := yaml.NewDecoder(strings.NewReader(text)); ; {
		var o map[string]any
		if err := d.Decode(&o); err != nil {
			if len(found) == 0 {
				t.Fatalf("no objects (%v) in:\n%s", err, text)
			}
			return found
		}
		if o != nil {
			found[fmt.Sprint(o["kind"], " ", o["metadata"].(map[string]any)["name"])] = o
		}
	}
}

func pretty(o any) string {
	data, err := json.MarshalIndent(o, "", " ")
	if err != nil {
		return err.Error()
	}
	return string(data)
}

// The commands of the page write a folder whose objects have the registry's image, with the
// version, to install and to uninstall.
func TestCommandsOfPage(t *testing.T) {
	page, err := os.ReadFile(deployments + "README.md")
	check(t, err)
	_, text, found := strings.Cut(string(page), "```sh\nmkdir -p mine/")
	script, _, ended := strings.Cut("mkdir -p mine/"+text, "kubectl apply -k mine\n```")
	if !found || !ended {
		t.Fatal("the page has no commands that make the folder mine")
	}
	top := t.TempDir()
	check(t, os.CopyFS(filepath.Join(top, "deployments/kubernetes"), os.DirFS(deployments)))
	run := exec.Command("sh", "-euc", script)
	run.Dir = top
	if out, err := run.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for dir, least := range map[string]int{"mine": 3, "mine/uninstall": 2} {
		made := kustomize(t, within(t), filepath.Join(top, dir))
		ours := strings.Count(made, "image: registry.example/nvshare:"+version()+"\n")
		if all := strings.Count(made, "image: "); ours != all || ours < least {
			t.Errorf("%s: %d of %d images are the registry's:\n%s", dir, ours, all, made)
		}
		if dir != "mine" && !strings.Contains(string(page), "kubectl apply -k "+dir+"\n") {
			t.Errorf("the page does not apply %s", dir)
		}
	}
}

// withOverlays is what the base makes with these overlays, separated by spaces.
func withOverlays(t *testing.T, ctx context.Context, overlays string) string {
	t.Helper()
	dir := t.TempDir()
	from, err := filepath.EvalSymlinks(dir)
	check(t, err)
	to, err := filepath.Abs(deployments)
	check(t, err)
	tree, err := filepath.Rel(from, to)
	check(t, err)
	file := "resources: [" + tree + "/base]\ncomponents:\n"
	for _, o := range strings.Fields(overlays) {
		file += "- " + tree + "/overlays/" + o + "\n"
	}
	check(t, os.WriteFile(filepath.Join(dir, "kustomization.yaml"), []byte(file), 0o644))
	return kustomize(t, ctx, dir)
}

// kustomize and Helm make the same objects. Each overlay is in one of these, the larger ones with many others.
func TestChartMakesWhatKustomizeMakes(t *testing.T) {
	ctx := within(t)
	suspendDir := []string{"checkpoint.enabled=true", "checkpoint.suspendDir=/var/lib/nvshare/suspended"}
	for overlays, values := range map[string][]string{
		"":                 nil,
		"advertise":        {"advertise.enabled=true"},
		"metrics-service":  {"metrics.enabled=true", "metrics.podMonitor=false", "metrics.serviceMonitor=true"},
		"surge checkpoint": {"surge.enabled=true", "checkpoint.enabled=true"},
		"metrics nvml web-token required-v1beta1 host-paths bound": {"metrics.enabled=true", "nvml.enabled=true", "web.enabled=true", "web.tokenSecret=nvshare-web", "required.enabled=true",
			"required.apiVersion=admissionregistration.k8s.io/v1beta1", "hostPathPolicy.enabled=true", "bound.enabled=true"},
		"nvml web dra startup-taint required surge overlap-groups suspend-dir host-paths bound": append([]string{"nvml.enabled=true", "web.enabled=true", "dra.enabled=true", "startupTaint.enabled=true", "required.enabled=true", "surge.enabled=true",
			"overlapGroups.enabled=true", "hostPathPolicy.enabled=true", "bound.enabled=true"}, suspendDir...),
	} {
		args := []string{"template", "nvshare", chart, "--namespace", "nvshare-system", "--skip-tests"}
		for _, v := range values {
			args = append(args, "--set", v)
		}
		text, err := helm(args...)
		if err != nil {
			t.Errorf("helm %v: %v\n%s", args, err, text)
			continue
		}
		byHelm, byKustomize := objects(t, text), objects(t, withOverlays(t, ctx, overlays))
		delete(byKustomize, "Namespace nvshare-system") // Helm makes the namespace itself
		// Patches count the containers, and kustomize puts first those that a patch names.
		if order := containerNames(byKustomize["DaemonSet nvshare"]); !slices.Equal(order, []string{"plugin", "scheduler"}) {
			t.Errorf("%q: the containers are %v: each patch has to name both, in the order of base", overlays, order)
		}
		for name, want := range byKustomize {
			got := byHelm[name]
			unorder(want)
			unorder(got)
			if !reflect.DeepEqual(got, want) {
				t.Errorf("%q: %s by Helm is\n%s\nby kustomize\n%s", overlays, name, pretty(got), pretty(want))
			}
		}
		if len(byHelm) != len(byKustomize) {
			t.Errorf("%q: %d objects by Helm, %d by kustomize", overlays, len(byHelm), len(byKustomize))
		}
	}
}

// A plugin that hangs is restarted. One on a node that is so busy that its probe takes long is not: pods
// that ask for a GPU would start without one meanwhile.
func TestPluginIsRestarted(t *testing.T) {
	made := objects(t, kustomize(t, within(t), deployments+"base"))["DaemonSet nvshare"]
	pod := made["spec"].(map[string]any)["template"].(map[string]any)["spec"].(map[string]any)
	for _, c := range pod["containers"].([]any) {
		c := c.(map[string]any)
		if c["name"] != "plugin" {
			continue
		}
		probe, _ := c["livenessProbe"].(map[string]any)
		if command := fmt.Sprint(probe["exec"]); !strings.Contains(command, "/usr/bin/nvshare-plugin --host-root=/host --live") {
			t.Errorf("the probe runs %s", command)
		}
		if timeout, _ := probe["timeoutSeconds"].(int); timeout < 20 {
			t.Errorf("the probe may take %d s", timeout)
		}
	}
}

func containerNames(daemonSet map[string]any) (names []string) {
	pod := daemonSet["spec"].(map[string]any)["template"].(map[string]any)["spec"].(map[string]any)
	for _, c := range pod["containers"].([]any) {
		names = append(names, fmt.Sprint(c.(map[string]any)["name"]))
	}
	return names
}

// unorder turns a DaemonSet's containers, volumes, ports and environments into maps, because
// patches put the parts that they change first.
func unorder(o map[string]any) {
	if o["kind"] != "DaemonSet" {
		return
	}
	by := func(key string, list any) map[string]any {
		m := map[string]any{}
		for _, e := range list.([]any) {
			m[e.(map[string]any)[key].(string)] = e
		}
		return m
	}
	pod := o["spec"].(map[string]any)["template"].(map[string]any)["spec"].(map[string]any)
	containers := by("name", pod["containers"])
	for _, c := range containers {
		c := c.(map[string]any)
		c["env"], c["volumeMounts"] = by("name", c["env"]), by("mountPath", c["volumeMounts"])
		if ports, some := c["ports"]; some {
			c["ports"] = by("name", ports)
		}
	}
	pod["containers"], pod["volumes"] = containers, by("name", pod["volumes"])
}

func TestChartRefusesWrongValues(t *testing.T) {
	if out, err := helm("lint", "--strict", chart); err != nil {
		t.Errorf("helm lint: %v\n%s", err, out)
	}
	for _, value := range []string{
		"scheduler.fenceAction=shout", "plugin.audit=shout", "metrics.enabeld=true", "plugin.args={nri}", "image.pullPolicy=Sometimes", "image.digest=latest", "required.apiVersion=v1", "upgradeNodes=0", "upgradeNodes=five",
		"checkpoint.suspendDir=/srv/a", "checkpoint.enabled=true,checkpoint.suspendDir=/srv/a,scheduler.swapMemory=0", "checkpoint.enabled=true,checkpoint.suspendDir=srv/a",
		"scheduler.swapMemory=some", "scheduler.swapMemory=-1",
		"warden.enabled=true",
		"paths.lib=var/lib/nvshare", "paths.run=/var/run/nvshare", "paths.cdi=/", "paths.lib=/srv/../etc", "podLabels.a=1", "networkPolicy.apiServerPorts=[]",
	} {
		out, err := helm("template", "nvshare", chart, "--set", value)
		name, _, _ := strings.Cut(strings.Split(value, "=")[0], ".")
		if err == nil || !strings.Contains(out, name) {
			t.Errorf("%s: %v\n%s", value, err, out)
		}
	}
	out, err := helm("template", "nvshare", chart, "--set", "scheduler.fenceAction=kill,scheduler.args={--tq=200ms}")
	if err != nil || !strings.Contains(out, `["--control-group=65529","--fence-action=kill","--tq=200ms"]`) || strings.Count(out, `add: ["KILL"]`) != 2 ||
		!strings.Contains(out, "--owner=0:65529") || strings.Contains(out, "runAsUser: 65529") {
		t.Errorf("fenceAction=kill: %v\n%s", err, out)
	}
	for values, want := range map[string]string{
		"upgradeNodes=5%": "rollingUpdate: {maxUnavailable: 5%}", "upgradeNodes=20,surge.enabled=true": "rollingUpdate: {maxSurge: 20, maxUnavailable: 0}",
	} {
		if out, err := helm("template", "nvshare", chart, "--set", values); err != nil || !strings.Contains(out, want) {
			t.Errorf("%s: %v\n%s", values, err, out)
		}
	}
	digest := "sha256:" + strings.Repeat("0a", 32)
	out, err = helm("template", "nvshare", chart, "--set", "image.repository=registry.example/nvshare,image.tag=v1,image.digest="+digest)
	if err != nil || strings.Count(out, "image: registry.example/nvshare@"+digest+"\n") != 4 {
		t.Errorf("an image by its digest: %v\n%s", err, out)
	}
	out, err = helm("template", "nvshare", chart, "--set", "scheduler.latencyNamespaces=prod,scheduler.gangNamespaces=*,scheduler.overlapNamespaces=prod,scheduler.maxWeight=,scheduler.defaultMemoryLimit=8Gi")
	if err != nil || !strings.Contains(out, `"--default-memory-limit=8Gi","--gang-namespaces=*","--latency-namespaces=prod","--max-weight=","--overlap-namespaces=prod"]`) {
		t.Errorf("bounds of what pods ask for: %v\n%s", err, out)
	}
	out, err = helm("template", "nvshare", chart, "--set", "plugin.exclusionNamespaces=*,plugin.maxCoreRequest=50,plugin.audit=report")
	if err != nil || !strings.Contains(out, `args: ["--host-root=/host","--audit=report","--exclusion-namespaces=*","--max-core-request=50"]`) {
		t.Errorf("who may exclude others: %v\n%s", err, out)
	}
	out, err = helm("template", "nvshare", chart, "--set", "metrics.enabled=true,metrics.prometheusRule=true,metrics.dashboard=true")
	check(t, err)
	made := objects(t, out)
	out, err = helm("template", "nvshare", chart, "--set", "metrics.enabled=true,metrics.serviceMonitor=true,metrics.prometheusRule=true,metrics.labels.release=stack,metrics.interval=30s,dra.enabled=true")
	check(t, err)
	for name, scrapes := range map[string]int{"PodMonitor nvshare": 2, "ServiceMonitor nvshare": 2, "PrometheusRule nvshare": 0} {
		o := objects(t, out)[name]
		if labels := pretty(o["metadata"]); !strings.Contains(labels, `"release": "stack"`) || strings.Count(pretty(o["spec"]), `"interval": "30s"`) != scrapes {
			t.Errorf("%s for a stack that selects by label: %s", name, pretty(o))
		}
	}
	if _, there := made["PrometheusRule nvshare"]["spec"].(map[string]any)["groups"]; !there {
		t.Errorf("the alert rules are %v", made["PrometheusRule nvshare"])
	}
	if data, _ := made["ConfigMap nvshare-dashboard"]["data"].(map[string]any); !json.Valid([]byte(fmt.Sprint(data["nvshare.json"]))) {
		t.Errorf("the dashboard is %v", data)
	}
	out, err = helm("template", "nvshare", chart, "--set", "metrics.enabled=true,dra.enabled=true")
	check(t, err)
	// The alerts name the node of either.
	if monitor := pretty(objects(t, out)["PodMonitor nvshare"]); strings.Count(monitor, `"port": "metrics`) != 2 || strings.Count(monitor, `"targetLabel": "node"`) != 2 {
		t.Errorf("scheduler's and plugin's metrics: %s", monitor)
	}
	out, err = helm("template", "nvshare", chart, "--set", "metrics.enabled=true,metrics.podMonitor=false,metrics.serviceMonitor=true,dra.enabled=true")
	check(t, err)
	made = objects(t, out)
	if monitor := pretty(made["ServiceMonitor nvshare"]); strings.Count(monitor, `"port": "metrics`) != 2 || strings.Count(monitor, `"targetLabel": "node"`) != 2 {
		t.Errorf("scheduler's and plugin's metrics, by a service: %s", monitor)
	}
	if service := pretty(made["Service nvshare"]); strings.Count(service, `"targetPort": "metrics`) != 2 {
		t.Errorf("the service for scheduler's and plugin's metrics: %s", service)
	}
	out, err = helm("template", "nvshare", chart, "--set", "scheduler.fenceAction=kill,overlapGroups.enabled=true,checkpoint.enabled=true")
	if err != nil || !strings.Contains(out, `add: ["CHOWN","DAC_OVERRIDE","KILL","SETGID","SETUID","SYS_ADMIN","SYS_PTRACE"]`) {
		t.Errorf("rights of several values: %v\n%s", err, out)
	}
	out, err = helm("template", "nvshare", chart, "--set", "checkpoint.enabled=true,checkpoint.suspendDir=/srv/a b,scheduler.swapMemory=1Gi")
	if err != nil || !strings.Contains(out, `"--swap-memory=1Gi","--suspend-dir=/var/lib/nvshare/suspended"]`) || !strings.Contains(out, `hostPath: {path: "/srv/a b", type: DirectoryOrCreate}`) {
		t.Errorf("files of suspended tenants: %v\n%s", err, out)
	}
	out, err = helm("template", "nvshare", chart, "--set", "warden.enabled=true,nvml.enabled=true")
	if err != nil || !strings.Contains(out, "[/usr/bin/nvshare-warden, --scheduler-user=65529]") || !strings.Contains(out, `add: ["CHOWN","DAC_READ_SEARCH","KILL","SYS_PTRACE"]`) ||
		strings.Count(out, "mountPath: /var/run/nvshare-warden}") != 2 {
		t.Errorf("the warden: %v\n%s", err, out)
	}
	out, err = helm("template", "nvshare", chart, "--set", "plugin.audit=report")
	if err != nil || !strings.Contains(out, `["--host-root=/host","--audit=report"]`) || strings.Contains(out, `"KILL"`) {
		t.Errorf("audit=report: %v\n%s", err, out)
	}
}

// A path of the values is the flag's, the mount's and the volume's, and the probes ask there.
func TestChartPaths(t *testing.T) {
	out, err := helm("template", "nvshare", chart, "--skip-tests", "--set", "dra.enabled=true,paths.kubelet=/var/lib/k0s/kubelet,paths.cdi=/etc/cdi,paths.lib=/home/kubernetes/bin/nvshare,paths.run=/run/shared,paths.nriSocket=/run/k0s/nri.sock,paths.driverRoot=/usr/local/glibc")
	check(t, err)
	made := pretty(objects(t, out)["DaemonSet nvshare"])
	flags := `"--cdi-dir=/etc/cdi","--driver-root=/usr/local/glibc","--lib-dir=/home/kubernetes/bin/nvshare/lib","--nri-socket=/run/k0s/nri.sock","--run-dir=/run/shared","--dra","--kubelet-dir=/var/lib/k0s/kubelet"`
	if n := strings.Count(strings.NewReplacer("\n", "", " ", "").Replace(made), flags); n != 3 { // the plugin's own and of two probes
		t.Errorf("%d commands have the flags in\n%s", n, made)
	}
	for mount, volume := range map[string]string{
		"/host/etc/cdi": "/etc/cdi", "/host/home/kubernetes/bin/nvshare": "/home/kubernetes/bin/nvshare", "/host/run/shared": "/run/shared", "/host/usr/local/glibc": "/usr/local/glibc",
		"/var/lib/k0s/kubelet/plugins/nvshare.com": "/var/lib/k0s/kubelet/plugins/nvshare.com", "/var/lib/k0s/kubelet/plugins_registry": "/var/lib/k0s/kubelet/plugins_registry",
	} {
		if !strings.Contains(made, fmt.Sprintf(`"mountPath": %q`, mount)) || !strings.Contains(made, fmt.Sprintf(`"path": %q`, volume)) {
			t.Errorf("%s is not %s of the node in\n%s", mount, volume, made)
		}
	}
	out, err = helm("template", "nvshare", chart, "--set", "hostPathPolicy.enabled=true,paths.lib=/home/k.io/nvshare,paths.run=/run/shared")
	if err != nil || !strings.Contains(out, "'^(/+[.])*/+home(/+[.])*/+k[.]io(/+[.])*/+nvshare(/|$)'") || !strings.Contains(out, "'^(/+[.])*/+(var(/+[.])*/+)?run(/+[.])*/+shared(/|$)'") {
		t.Errorf("hostPaths to directories elsewhere: %v\n%s", err, out)
	}
	for _, other := range []string{"/var/lib/kubelet", "/var/lib/nvshare", "/run/cdi", `"/run/nvshare`} {
		if strings.Contains(made, other) {
			t.Errorf("%s is left in\n%s", other, made)
		}
	}
}

// Two releases of a namespace share no object. Only one makes what the cluster has once.
func TestChartTwoReleases(t *testing.T) {
	all := "bound.enabled=true,hostPathPolicy.enabled=true,required.enabled=true,dra.enabled=true,networkPolicy.enabled=true,metrics.enabled=true,metrics.serviceMonitor=true,metrics.prometheusRule=true,metrics.dashboard=true"
	made := map[string]map[string]map[string]any{}
	for release, more := range map[string]string{"nvshare": "", "h200": ",dra.deviceClass=false"} {
		out, err := helm("template", release, chart, "--namespace", "nvshare-system", "--set", all+more)
		check(t, err)
		made[release] = objects(t, out)
	}
	for name := range made["h200"] {
		if _, both := made["nvshare"][name]; both {
			t.Errorf("both releases have %s", name)
		}
	}
	set := pretty(made["h200"]["DaemonSet h200-nvshare"])
	if !strings.Contains(set, `"serviceAccountName": "h200-nvshare"`) || strings.Count(set, `"app.kubernetes.io/instance": "h200"`) != 3 {
		t.Errorf("the second release's pods:\n%s", set)
	}
	for _, policy := range []string{"bound", "slices"} {
		if text := pretty(made["h200"]["ValidatingAdmissionPolicy h200-nvshare-"+policy]); !strings.Contains(text, "system:serviceaccount:nvshare-system:h200-nvshare") {
			t.Errorf("the policy %s is on another account:\n%s", policy, text)
		}
	}
}

// A policy is about the account of its release, in whatever namespace and of whatever name that is.
func TestChartNamesItsAccount(t *testing.T) {
	for _, namespace := range []string{"nvshare-system", "nvshare-system-test", "of-nvshare-system", "gpus"} {
		for _, release := range []string{"nvshare", "nvshare-system"} {
			out, err := helm("template", release, chart, "--namespace", namespace, "--set", "bound.enabled=true,startupTaint.enabled=true,dra.enabled=true,hostPathPolicy.enabled=true")
			check(t, err)
			account := "system:serviceaccount:" + namespace + ":" + release
			named := regexp.MustCompile(`system:serviceaccount:[^'"]*`).FindAllString(out, -1)
			if want := slices.Repeat([]string{account}, 4); !slices.Equal(named, want) {
				t.Errorf("in namespace %s the policies of %s are about %q", namespace, release, named)
			}
			if !strings.Contains(out, fmt.Sprintf("request.namespace != %q", namespace)) {
				t.Errorf("the policy on host paths does not spare namespace %s", namespace)
			}
		}
	}
}

// The chart says what the cluster is too old for, with the value's name and the version.
func TestChartRefusesOldClusters(t *testing.T) {
	for _, c := range []struct{ values, last, first, says string }{
		{"dra.enabled=true", "1.35.9", "1.36.0", "1.36"},
		{"startupTaint.enabled=true", "1.31.9", "1.32.0", "1.32"},
		{"advertise.enabled=true", "1.31.9", "1.32.0", "1.32"},
		{"required.enabled=true", "1.35.9", "1.36.0-gke.1", "v1beta1"},
		{"required.enabled=true,required.apiVersion=admissionregistration.k8s.io/v1beta1", "1.33.1", "1.34.0", "1.34"},
		{"bound.enabled=true", "1.31.0", "1.32.0", "1.32"},
		{"hostPathPolicy.enabled=true", "1.29.0", "1.30.0", "1.30"},
		{"overlapGroups.enabled=true", "1.29.0", "1.30.0", "1.30"},
		{"surge.enabled=true", "1.25.0", "1.26.0", "1.26"},
	} {
		name, _, _ := strings.Cut(c.values, "=")
		if out, err := helm("template", "nvshare", chart, "--set", c.values, "--kube-version", c.last); err == nil || !strings.Contains(out, c.says) || c.first != "1.26.0" && !strings.Contains(out, name) {
			t.Errorf("%s on %s: %v\n%s", c.values, c.last, err, out)
		}
		if out, err := helm("template", "nvshare", chart, "--set", c.values, "--kube-version", c.first); err != nil {
			t.Errorf("%s on %s: %v\n%s", c.values, c.first, err, out)
		}
	}
}

// The plugin would end at once with both.
func TestChartRefusesTwoWaysToAsk(t *testing.T) {
	if out, err := helm("template", "nvshare", chart, "--set", "dra.enabled=true,advertise.enabled=true"); err == nil || !strings.Contains(out, "leave one out") {
		t.Errorf("%v\n%s", err, out)
	}
}

func TestChartPods(t *testing.T) {
	set := func(values ...string) string {
		t.Helper()
		args := []string{"template", "nvshare", chart}
		for _, v := range values {
			args = append(args, "--set-json", v)
		}
		out, err := helm(args...)
		if err != nil {
			t.Fatalf("%v: %v\n%s", values, err, out)
		}
		return out
	}
	out := set(`podLabels={"team":"gpu","app.kubernetes.io/name":"other"}`, `podAnnotations={"note":"a"}`, `updateStrategy={"type":"OnDelete"}`, `serviceAccount={"annotations":{"role":"r"}}`,
		`plugin={"extraEnv":[{"name":"A","value":"1"}],"extraVolumeMounts":[{"name":"more","mountPath":"/more"}]}`, `extraVolumes=[{"name":"more","emptyDir":{}}]`,
		`scheduler={"extraEnv":[{"name":"B","value":"2"}],"extraVolumeMounts":[{"name":"more","mountPath":"/more"}]}`)
	made := objects(t, out)
	pods := pretty(made["DaemonSet nvshare"])
	for _, want := range []string{`"team": "gpu"`, `"note": "a"`, `"type": "OnDelete"`, `"name": "A"`, `"name": "B"`, `"emptyDir": {}`} {
		if !strings.Contains(pods, want) {
			t.Errorf("the DaemonSet lacks %s:\n%s", want, pods)
		}
	}
	if strings.Contains(pods, "other") || strings.Contains(pods, "rollingUpdate") || strings.Count(pods, `"mountPath": "/more"`) != 2 || !strings.Contains(pretty(made["ServiceAccount nvshare"]), `"role": "r"`) {
		t.Errorf("labels, strategy, mounts and account:\n%s", out)
	}
	if pods := pretty(objects(t, set("gpuNodesOnly=false"))); strings.Contains(pods, "nodeAffinity") {
		t.Errorf("all Linux nodes:\n%s", pods)
	}
	set(`affinity=null`, `podLabels=null`, `podAnnotations=null`, `tolerations=null`, `nodeSelector=null`, `updateStrategy=null`, `extraVolumes=null`)
	out = set(`affinity={"podAffinity":{"x":1}}`)
	if pods := pretty(objects(t, out)["DaemonSet nvshare"]); !strings.Contains(pods, "podAffinity") || !strings.Contains(pods, "nvidia.com/gpu.present") {
		t.Errorf("an affinity beside the default one:\n%s", pods)
	}
	out = set(`affinity={"nodeAffinity":{"x":1}}`)
	if pods := pretty(objects(t, out)["DaemonSet nvshare"]); strings.Contains(pods, "nvidia.com/gpu.present") {
		t.Errorf("a nodeAffinity in the place of the default one:\n%s", pods)
	}
	out = set(`networkPolicy={"enabled":true,"from":[{"podSelector":{}}]}`, `metrics={"enabled":true}`, `dra={"enabled":true}`)
	if policy := pretty(objects(t, out)["NetworkPolicy nvshare"]); strings.Count(policy, `"port": `) != 4 || !strings.Contains(policy, "from") {
		t.Errorf("the network policy:\n%s", policy)
	}
	if policy := pretty(objects(t, set(`networkPolicy={"enabled":true}`))["NetworkPolicy nvshare"]); strings.Contains(policy, "ingress") || !strings.Contains(policy, "Ingress") {
		t.Errorf("without metrics nobody reaches a port:\n%s", policy)
	}
}

// helm test asks for a GPU as the release gives it.
func TestChartTest(t *testing.T) {
	for values, want := range map[string]string{"dra.enabled=false": `"nvshare.com/gpu-memory-limit": "1Gi"`, "dra.enabled=true": `"nvshare.com/gpu": 1`} {
		out, err := helm("template", "nvshare", chart, "--set", values)
		check(t, err)
		pod := pretty(objects(t, out)["Pod nvshare-test"])
		if !strings.Contains(pod, want) || !strings.Contains(pod, "nvidia.com/gpu.present") || strings.Contains(pod, "--total") == strings.Contains(values, "true") {
			t.Errorf("%s: %s", values, pod)
		}
	}
}

// The changelog's newest version is the one that other files name.
func TestManifestsNameThisRelease(t *testing.T) {
	for file, want := range map[string]string{
		deployments + "base/kustomization.yaml":               "newTag: " + version(),
		deployments + "overlays/uninstall/kustomization.yaml": "newTag: " + version(),
		chart + "/Chart.yaml":                                 "appVersion: " + version(),
	} {
		text, err := os.ReadFile(file)
		check(t, err)
		if !strings.Contains(string(text), want+"\n") {
			t.Errorf("%s lacks %q", file, want)
		}
	}
}

// The API server knows each field of each object, and admits the objects.
func TestAPIServerTakesManifests(t *testing.T) {
	ctx := within(t)
	var objectsOf []string
	for _, overlays := range []string{
		"", "advertise", "metrics-service", "metrics web-token checkpoint",
		"nvml web dra required surge overlap-groups suspend-dir host-paths bound",
	} {
		objectsOf = append(objectsOf, withOverlays(t, ctx, overlays))
	}
	objectsOf = append(objectsOf, kustomize(t, ctx, deployments+"overlays/uninstall"))
	files, err := filepath.Glob("manifests/*.yaml")
	check(t, err)
	claims, err := filepath.Glob("manifests/dra/*.yaml")
	check(t, err)
	files = append(files, claims...)
	var pods []string
	for _, f := range files {
		text, err := os.ReadFile(f)
		check(t, err)
		pods = append(pods, string(text))
	}
	objectsOf = append(objectsOf, strings.Join(pods, "\n---\n"))
	text, err := helm("template", "nvshare", chart, "--namespace", "nvshare-system", "--set", "networkPolicy.enabled=true")
	check(t, err)
	objectsOf = append(objectsOf, text)

	// A dry run of namespaced objects needs the namespace.
	_, err = cluster.Apply(ctx, namespaceOnly(t, objectsOf[0]), "apply", "--validate=strict")
	check(t, err)
	await(t, ctx, "the default service account", func() error {
		_, err := get(ctx, "/api/v1/namespaces/default/serviceaccounts/default", "")
		return err
	})
	for _, text := range objectsOf {
		kept := []string{}
		for name, o := range objects(t, text) {
			if !strings.HasPrefix(name, "PodMonitor ") && !strings.HasPrefix(name, "ServiceMonitor ") { // kinds of the Prometheus operator, which this cluster lacks
				kept = append(kept, pretty(o))
			}
		}
		out, err := cluster.Apply(ctx, strings.Join(kept, "\n---\n"), "apply", "--dry-run=server", "--validate=strict")
		if err != nil || strings.Contains(out, "Warning") {
			t.Errorf("%v\n%s", err, out)
		}
	}
	// The check fails on an unknown field.
	if _, err := cluster.Apply(ctx, strings.Replace(objectsOf[0], "hostPID: true", "hostPid: true", 1), "apply", "--dry-run=server", "--validate=strict"); err == nil || !strings.Contains(err.Error(), "hostPid") {
		t.Errorf("a misspelt field: %v", err)
	}
}

func namespaceOnly(t *testing.T, text string) string {
	t.Helper()
	return pretty(objects(t, text)["Namespace nvshare-system"])
}

// A pod that mounts nvshare's own directories of the node is refused; others are not.
func TestHostPathsAreRefused(t *testing.T) {
	ctx := within(t)
	policy, err := os.ReadFile(objectsDir + "host-paths/policy.yaml")
	check(t, err)
	_, err = cluster.Apply(ctx, string(policy), "apply")
	check(t, err)
	defer func() {
		_, err := cluster.Apply(ctx, string(policy), "delete", "--wait=false")
		check(t, err)
	}()
	await(t, ctx, "the default service account", func() error {
		_, err := get(ctx, "/api/v1/namespaces/default/serviceaccounts/default", "")
		return err
	})
	try := func(path string) error {
		_, err := cluster.Apply(ctx, fmt.Sprintf(`{apiVersion: v1, kind: Pod, metadata: {name: host-path}, spec: {
			containers: [{name: main, image: none, volumeMounts: [{name: host, mountPath: /x}]}], volumes: [{name: other, emptyDir: {}}, {name: host, hostPath: {path: %q}}]}}`, path),
			"create", "--dry-run=server")
		return err
	}
	await(t, ctx, "the policy to hold", func() error { // the API server takes a moment
		if err := try("/run/nvshare"); err == nil || !strings.Contains(err.Error(), "root on the node") {
			return fmt.Errorf("a pod is refused with %v", err)
		}
		return nil
	})
	for path, refused := range map[string]bool{
		"/var/run/nvshare": true, "/var/lib/nvshare": true, "/var/lib/nvshare/lib": true, "/run/nvshare/": true, "/run/nvshare/tenant": true,
		"//var//lib/./nvshare": true, "/./run/nvshare": true,
		"/run/nvshare-other": false, "/var/lib/kubelet": false, "/var/log/nvshare": false,
	} {
		if err := try(path); (err != nil) != refused {
			t.Errorf("a pod with %s is refused: %v (%v)", path, refused, err)
		}
	}
}

// The sample quota bounds what annotations of a pod say, in each of their forms, where the namespace has a bound.
func TestAnnotationQuota(t *testing.T) {
	ctx := within(t)
	kubectl(t, ctx, "apply", "-f", deployments+"quota/policy.yaml")
	t.Cleanup(func() {
		kubectl(t, within(t), "delete", "-f", deployments+"quota/policy.yaml")
		kubectl(t, within(t), "delete", "namespace", "bounded", "free", "--wait=false")
	})
	for _, name := range []string{"bounded", "free"} {
		kubectl(t, ctx, "create", "namespace", name)
	}
	kubectl(t, ctx, "annotate", "namespace", "bounded", "nvshare.com/max-gpus=1", "nvshare.com/max-gpu-core-request=50", "nvshare.com/max-gpu-memory-limit=8Gi")
	create := func(namespace, annotations string) error {
		_, err := cluster.Apply(ctx, "{apiVersion: v1, kind: Pod, metadata: {name: asks, namespace: "+namespace+", annotations: {"+annotations+"}}, spec: {automountServiceAccountToken: false, containers: [{name: main, image: none}]}}",
			"create", "--dry-run=server")
		return err
	}
	const limit = `nvshare.com/gpu-memory-limit: 8Gi, `
	// A policy holds only some time after it was created, and so does the namespace's account.
	await(t, ctx, "the policy", func() error {
		if err := create("bounded", limit+`nvshare.com/gpu: "2"`); err == nil || !strings.Contains(err.Error(), "may have 1 GPUs") {
			return fmt.Errorf("two GPUs: %v", err)
		}
		return nil
	})
	for annotations, says := range map[string]string{
		limit + `nvshare.com/gpu: "1", nvshare.com/gpu-core-request: 50%`: "",
		limit + `nvshare.com/gpu: nvshare.com/gpu=0`:                      "",
		`other: "1"`: "",
		limit + `gpu.nvshare.com/container.main: "nvshare.com/gpu=0,nvshare.com/gpu=1"`: "may have 1 GPUs",
		limit + `nvshare.com/gpu: nvshare.com/gpu=all`:                                  "may have 1 GPUs",
		limit + `nvshare.com/gpu: "1", gpu-core-request.nvshare.com/pod: "51"`:          "may request 50 %",
		`nvshare.com/gpu: "1"`: "needs a memory limit",
		`nvshare.com/gpu: "1", nvshare.com/gpu-memory-limit: 9Gi`:                         "at most 8Gi",
		`nvshare.com/gpu: "1", nvshare.com/gpu-memory-limit: "8193"`:                      "at most 8Gi",
		`nvshare.com/gpu: "1", gpu-memory-limit.nvshare.com/container.main: "8192"`:       "needs a memory limit",
		`nvshare.com/gpu: "1", gpu-memory-limit.nvshare.com/container.nobody: 1Gi`:        "needs a memory limit",
		`nvshare.com/gpu: "1", gpu-memory-limit.nvshare.com/pod: "8192"`:                  "",
		`nvshare.com/gpu: "1", nvshare.com/gpu-memory-limit: "8192.5"`:                    "at most 8Gi",
		limit + `nvshare.com/gpu: " 8"`:                                                   "may have 1 GPUs",
		limit + `nvshare.com/gpu: " nvshare.com/gpu=0"`:                                   "may have 1 GPUs",
		limit + `nvshare.com/gpu: any`:                                                    "",
		limit + `nvshare.com/gpu: none`:                                                   "",
		limit + `gpu.nvshare.com: "2"`:                                                    "may have 1 GPUs",
		limit + `nvshare.com/gpu: "1", gpu-memory-limit.nvshare.com/container.main: 16Gi`: "at most 8Gi",
	} {
		if err := create("bounded", annotations); (err == nil) != (says == "") || err != nil && !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, want %q", annotations, err, says)
		}
	}
	// Who removes what the pod says frees its containers as well.
	kubectl(t, ctx, "annotate", "namespace", "bounded", "nvshare.com/max-gpus=0", "--overwrite")
	await(t, ctx, "no GPU to be allowed", func() error {
		if err := create("bounded", limit+`nvshare.com/gpu-core-request: "10"`); err == nil || !strings.Contains(err.Error(), "may have 0 GPUs") {
			return fmt.Errorf("a core request, which asks for a GPU: %v", err)
		}
		return nil
	})
	kubectl(t, ctx, "annotate", "namespace", "bounded", "nvshare.com/max-gpus=1", "--overwrite")
	await(t, ctx, "a pod", func() error {
		_, err := cluster.Apply(ctx, `{apiVersion: v1, kind: Pod, metadata: {name: runs, namespace: bounded, annotations: {`+limit+`nvshare.com/gpu: "1"}}, spec: {automountServiceAccountToken: false, containers: [{name: main, image: none}]}}`, "create")
		return err
	})
	if out, err := cluster.Kubectl(ctx, "annotate", "pod", "-n", "bounded", "runs", "nvshare.com/gpu-", "nvshare.com/gpu-memory-limit-"); err == nil || !strings.Contains(err.Error()+out, "needs a memory limit") {
		t.Errorf("a pod that says nothing of memory any more: %v\n%s", err, out)
	}
	if err := create("free", `nvshare.com/gpu: "8", nvshare.com/gpu-core-request: "100"`); err != nil {
		t.Errorf("a namespace without bounds: %v", err)
	}
}

// A cluster without the Prometheus operator takes the release, without the operator's objects, and is told so.
func TestChartWithoutPrometheusOperator(t *testing.T) {
	const values = "metrics.enabled=true,metrics.serviceMonitor=true,metrics.prometheusRule=true"
	out, err := helm("install", "nvshare", chart, "--dry-run=server", "--kubeconfig", cluster.Kubeconfig("admin"), "-n", "default", "--set", values)
	for _, kind := range []string{"PodMonitor", "ServiceMonitor", "PrometheusRule"} {
		if err != nil || strings.Contains(out, "kind: "+kind) {
			t.Errorf("%s in a cluster without it: %v\n%s", kind, err, tail(out, 30))
		}
		if made, err := helm("template", "nvshare", chart, "--set", values); err != nil || !strings.Contains(made, "kind: "+kind) {
			t.Errorf("helm template makes no %s: %v", kind, err)
		}
	}
	if !strings.Contains(out, "kind: Service\n") || !strings.Contains(out, "has no monitoring.coreos.com/v1") {
		t.Errorf("the release is\n%s", tail(out, 60))
	}
}
