// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"encoding/base32"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/nri/pkg/api"

	"github.com/nvshare/nvshare/cdi"
	sched "github.com/nvshare/nvshare/sched/api"
)

// claimSite is a node whose GPUs are given by claims.
type claimSite struct {
	*Plugin
	t      *testing.T
	shares map[string]ClaimPart // by token
	later  map[string]ClaimPart // that another process has prepared: known once they are loaded
	loads  int
	busy   chan struct{} // until it is closed, the disk does not answer; nil: it does
}

func (s *claimSite) Load() {
	s.loads++
	s.containers.GPU("") // waits for the lock, which no reading of files may hold up
	if s.busy != nil {
		<-s.busy
	}
	maps.Copy(s.shares, s.later)
}

// tokenOf is the token of a share.
func tokenOf(name string) string {
	return base32.StdEncoding.WithPadding(base32.NoPadding).EncodeToString([]byte(name))
}

func (s *claimSite) ByToken(token string) (ClaimPart, bool) {
	share, ok := s.shares[token]
	return share, ok
}

func (s *claimSite) ByDevice(name string) (ClaimPart, bool) {
	for _, share := range s.shares {
		if share.Name == name {
			return share, true
		}
	}
	return ClaimPart{}, false
}

// deviceOf is the CDI device of claim n on GPU g.
func deviceOf(n, g int) string {
	return fmt.Sprintf("%08d-0000-4000-8000-000000000000-gpu-%d", n, g)
}

func newClaimSite(t *testing.T) *claimSite {
	s := &claimSite{Plugin: New(quiet(), NewContainers(quiet())), t: t, shares: map[string]ClaimPart{}}
	s.SetInventory(inventory(t))
	s.containers.Claims = s
	return s
}

// prepare makes claim n, with a share of GPU g.
func (s *claimSite) prepare(n, g int, terms sched.Terms) string {
	name := deviceOf(n, g)
	s.shares[tokenOf(name)] = ClaimPart{Name: name, Claim: fmt.Sprintf("ml/claim%d", n), GPU: known[2+g], Terms: terms}
	return name
}

// create makes a container that the kubelet gave these CDI devices.
func (s *claimSite) create(name string, annotations map[string]string, devices ...string) (*api.ContainerAdjustment, error) {
	pod, ctr := podOf(name, "id-"+name, annotations)
	for _, d := range devices {
		ctr.CDIDevices = append(ctr.CDIDevices, &api.CDIDevice{Name: cdi.Kind + "=" + d})
	}
	ctr.Mounts = []*api.Mount{{Source: cdi.DefaultPaths.ShimDir, Destination: cdi.ShimDir}} // of the claim's CDI spec
	ctr.Env = []string{"LD_PRELOAD=/own.so"}
	if len(devices) == 0 {
		ctr.Mounts = nil
	}
	adjust, _, err := s.CreateContainer(context.Background(), pod, ctr)
	return adjust, err
}

// told is what the scheduler is to be told of a container.
func (s *claimSite) told(name string) string {
	all, _ := s.containers.snapshot()
	c, ok := all["id-"+name]
	if !ok {
		return "nothing"
	}
	return fmt.Sprintf("%s on %s", describeTerms(c.Terms), strings.Join(c.GPUs, ","))
}

func (s *claimSite) expect(name, want string) {
	s.t.Helper()
	if got := s.told(name); got != want {
		s.t.Errorf("%s: the scheduler is told %q, want %q", name, got, want)
	}
}

var part40 = sched.Terms{CoreRequest: 40, MemoryLimit: 20 << 30}

// A container that is to look at a GPU is promised nothing, whatever its pod says, and takes nothing
// from those that compute there.
func TestAdminClaim(t *testing.T) {
	s := newClaimSite(t)
	device := s.prepare(1, 0, sched.Terms{Weight: 1})
	admin := s.shares[tokenOf(device)]
	admin.Admin = true
	s.shares[tokenOf(device)] = admin
	asks := says("gpu-core-request=50", "gpu-weight=200", "gpu-memory-limit=8Gi", "gpu-priority=latency")
	if _, err := s.create("monitor", asks, device); err != nil {
		t.Fatal(err)
	}
	s.expect("monitor", "memory limit none, weight 1 on "+known[2])
	refused := s.SetPod(Pod{UID: "uid-monitor", Namespace: "ml", Name: "monitor", Annotations: asks})
	s.expect("monitor", "memory limit none, weight 1 on "+known[2])
	if len(refused) != 1 || !strings.Contains(refused[0].Err.Error(), "core request") {
		t.Errorf("the pod is told %v", refused)
	}
}

func TestClaimsGiveTerms(t *testing.T) {
	s := newClaimSite(t)
	device := s.prepare(1, 1, part40)
	adjust, err := s.create("a", nil, device)
	if err != nil {
		t.Fatal(err)
	}
	if v, _ := lookupEnv(env(adjust), cdi.PreloadEnv); v != cdi.ShimPath+":/own.so" {
		t.Errorf("LD_PRELOAD is %q", v)
	}
	if got := adjust.GetAnnotations(); got[PlacementAnnotation] != known[3] || got[ClaimAnnotation] != device {
		t.Errorf("recorded: %v", got)
	}
	s.expect("a", "memory limit 20Gi, core request 40% on "+known[3])

	// A runtime that tells no CDI devices: the token says it.
	pod, ctr := podOf("b", "id-b", nil)
	ctr.Env = []string{TokenVariable(tokenOf(s.prepare(2, 0, part40))), TokenVariable("guess")}
	if _, _, err := s.CreateContainer(context.Background(), pod, ctr); err != nil {
		t.Fatal(err)
	}
	s.expect("b", "memory limit 20Gi, core request 40% on "+known[2])

	// The next plugin finds both by the record: the runtime tells the devices of new
	// containers only.
	podA, ctrA := podOf("a", "id-a", nil)
	ctrA = applied(ctrA, adjust)
	next := &claimSite{Plugin: New(quiet(), NewContainers(quiet())), t: t, shares: s.shares}
	next.SetInventory(inventory(t))
	next.containers.Claims = next
	if _, err := next.Synchronize(context.Background(), []*api.PodSandbox{podA}, []*api.Container{ctrA}); err != nil {
		t.Fatal(err)
	}
	next.expect("a", "memory limit 20Gi, core request 40% on "+known[3])
}

// What the claim's CDI spec has mounted already, the plugin does not mount again, and it names
// the shim once.
func TestPluginComposesWithTheSpecOfAClaim(t *testing.T) {
	for _, version := range []string{"2.0.14", "v2.4.2"} { // the first drops what plugins name, and not what the kubelet does
		s := newClaimSite(t)
		if _, err := s.Configure(context.Background(), "", "containerd", version); err != nil {
			t.Fatal(err)
		}
		_, common, err := s.inventory.Load().Edits("0")
		if err != nil {
			t.Fatal(err)
		}
		common = cdi.ForClaim(common)
		pod, ctr := podOf("a", "id-a", nil)
		ctr.CDIDevices = []*api.CDIDevice{{Name: cdi.Kind + "=" + s.prepare(1, 1, part40)}}
		for _, m := range common.Mounts {
			ctr.Mounts = append(ctr.Mounts, &api.Mount{Source: m.HostPath, Destination: m.ContainerPath})
		}
		ctr.Env = append([]string{"LD_PRELOAD=/own.so"}, common.Env...)
		adjust, _, err := s.CreateContainer(context.Background(), pod, ctr)
		if err != nil {
			t.Fatal(err)
		}
		set, _ := envOf(adjust)
		if len(adjust.GetMounts())+len(adjust.GetCDIDevices()) != 0 || len(set) != 1 || set[cdi.PreloadEnv] != cdi.ShimPath+":/own.so" {
			t.Errorf("%s: the adjustment is %v", version, adjust)
		}
	}
}

func env(adjust *api.ContainerAdjustment) (all []string) {
	for _, e := range adjust.GetEnv() {
		all = append(all, e.Key+"="+e.Value)
	}
	return all
}

func TestClaimsRefuse(t *testing.T) {
	s := newClaimSite(t)
	small, large := s.prepare(1, 0, part40), s.prepare(2, 1, sched.Terms{CoreRequest: 60})
	again := s.prepare(3, 0, part40)
	for _, c := range []struct {
		says        string
		annotations map[string]string
		devices     []string
	}{
		{"claim that is not prepared", nil, []string{deviceOf(9, 0)}},
		{"different parts of two GPUs", nil, []string{small, large}},
		{"two parts of GPU " + known[2], nil, []string{small, again}},
		{"this node gives GPUs by resource claims", says("gpu=2"), nil},
		{"remove the annotation", says("gpu=nvshare.com/gpu=1"), []string{small}},
	} {
		if a, err := s.create("c", c.annotations, c.devices...); err == nil || !strings.Contains(err.Error(), c.says) || !strings.Contains(err.Error(), "pod ml/c") {
			t.Errorf("%v, %v: given %v, %v; want it refused with %q", c.annotations, c.devices, a, err, c.says)
		}
		s.expect("c", "nothing")
	}
	if a, err := s.create("plain", nil); a != nil || err != nil {
		t.Errorf("a container that does not ask: %v, %v", a, err)
	}
	// The record of an earlier container counts for nothing at a new one.
	pod, ctr := podOf("d", "id-d", nil)
	ctr.Annotations = map[string]string{ClaimAnnotation: small}
	if a, _, err := s.CreateContainer(context.Background(), pod, ctr); a != nil || err != nil {
		t.Errorf("an annotation that somebody else wrote: %v, %v", a, err)
	}
}

// A claim may say the overlap group of its containers, and an annotation no other.
func TestOverlapGroupOfAClaim(t *testing.T) {
	s := newClaimSite(t)
	terms := part40
	terms.Overlap = "small"
	device := s.prepare(1, 0, terms)
	create := func(name string, annotations map[string]string) (*api.ContainerAdjustment, error) {
		pod, ctr := podOf(name, "id-"+name, annotations)
		ctr.CDIDevices, ctr.User = []*api.CDIDevice{{Name: cdi.Kind + "=" + device}}, &api.User{Uid: 7}
		adjust, _, err := s.CreateContainer(context.Background(), pod, ctr)
		return adjust, err
	}
	for name, annotations := range map[string]map[string]string{"a": nil, "b": says("gpu-overlap=other")} {
		adjust, err := create(name, annotations)
		if err != nil {
			t.Fatal(err)
		}
		if adjust.GetAnnotations()[OverlapAnnotation] != "small" {
			t.Errorf("%s: annotations %v", name, adjust.GetAnnotations())
		}
	}
	if _, err := create("c", says("gpu-gang=ring")); err == nil || !strings.Contains(err.Error(), "in a gang and in an overlap group") {
		t.Errorf("a gang beside the claim's group: %v", err)
	}
}

// However many variables of a pod look like tokens, the prepared claims are read once, and only
// where one of them has the form of a token.
func TestUnknownTokensAreLookedForOnce(t *testing.T) {
	s := newClaimSite(t)
	create := func(env ...string) {
		t.Helper()
		pod, ctr := podOf("a", "id-a", nil)
		ctr.Env = env
		if _, _, err := s.CreateContainer(context.Background(), pod, ctr); err != nil {
			t.Fatal(err)
		}
	}
	expect := func(what string, loads int) {
		t.Helper()
		if s.loads != loads {
			t.Errorf("%s: the claims are read %d times, want %d", what, s.loads, loads)
		}
		s.loads = 0
	}
	token := tokenOf(deviceOf(1, 0))
	create("NVSHARE_CLAIM_="+token, "NVSHARE_CLAIM_x=y", "NVSHARE_CLAIM_"+token[:8], "NVSHARE_CLAIM_"+token[:8]+"="+token[:25], "NVSHARE_CLAIM_abcdefgh="+strings.ToLower(token))
	expect("variables of another form", 0)
	var many []string
	for i := range 20_000 {
		many = append(many, TokenVariable(tokenOf(fmt.Sprintf("%08d-some-share-or-other", i))))
	}
	create(many...)
	expect("20,000 tokens of nobody", 1)
	s.expect("a", "nothing")

	// One that another process has prepared is found by that.
	name := s.prepare(1, 0, part40)
	s.later = maps.Clone(s.shares)
	clear(s.shares)
	create(append(many, TokenVariable(tokenOf(name)))...)
	expect("a token of another process among them", 1)
	s.expect("a", "memory limit 20Gi, core request 40% on "+known[2])
	create(TokenVariable(tokenOf(name)))
	expect("a token that is known", 0)
}

// A disk that does not answer has nobody wait who names no claim, and a container that may have one
// refused: it would start without its terms.
func TestClaimsOnABusyDisk(t *testing.T) {
	s := newClaimSite(t)
	s.busy = make(chan struct{})
	defer close(s.busy)
	pod, ctr := podOf("a", "id-a", nil)
	ctr.Env = []string{TokenVariable(tokenOf(deviceOf(1, 0)))}
	if _, _, err := s.CreateContainer(context.Background(), pod, ctr); err == nil || !strings.Contains(err.Error(), "try again") {
		t.Errorf("a container with a token: %v", err)
	}
	if _, err := s.create("b", nil); err != nil {
		t.Errorf("one that names no claim: %v", err)
	}
}

// Containers of one claim have together what the claim was charged.
func TestContainersOfOneClaim(t *testing.T) {
	s := newClaimSite(t)
	device := s.prepare(1, 0, part40)
	for _, name := range []string{"a", "b"} {
		if _, err := s.create(name, nil, device); err != nil {
			t.Fatal(err)
		}
	}
	s.expect("a", "memory limit 10Gi, core request 20% on "+known[2])
	s.expect("b", "memory limit 10Gi, core request 20% on "+known[2])
	s.containers.End("id-b")
	s.expect("a", "memory limit 20Gi, core request 40% on "+known[2])
}

// Annotations lower what a claim says, and say what it leaves open.
func TestAnnotationsStayWithinClaims(t *testing.T) {
	s := newClaimSite(t)
	terms := part40
	terms.CoreLimit, terms.Priority = 80, sched.Priority_PRIORITY_BATCH
	if _, err := s.create("a", says("gpu-core-limit=70", "gpu-weight=7"), s.prepare(1, 0, terms)); err != nil {
		t.Fatal(err)
	}
	on := " on " + known[2]
	s.expect("a", "memory limit 20Gi, core limit 70%, core request 40%, weight 7, priority batch"+on)
	for _, c := range []struct {
		annotations map[string]string
		want        string
		refused     string // what the refusals name
	}{
		{says("gpu-core-limit=30", "gpu-memory-limit=1Gi"), "memory limit 1Gi, core limit 30%, core request 30%, priority batch", ""},
		{says("gpu-weight=5"), "memory limit 20Gi, core limit 80%, core request 40%, weight 5, priority batch", ""},
		{says("gpu-core-limit=90", "gpu-memory-limit=21Gi", "gpu-core-request=41"), "memory limit 20Gi, core limit 80%, core request 40%, priority batch", "memory limit core limit core request"},
		{says("gpu-priority=latency"), "memory limit 20Gi, core limit 80%, core request 40%, priority batch", "priority"},
		{says("gpu-gang=ring"), "memory limit 20Gi, core limit 80%, core request 40%, priority batch, gang ring", ""},
		{nil, "memory limit 20Gi, core limit 80%, core request 40%, priority batch", ""},
	} {
		refused := s.SetPod(Pod{UID: "uid-a", Namespace: "ml", Name: "a", Annotations: c.annotations})
		s.expect("a", c.want+on)
		var text string
		for _, r := range refused {
			text += r.Err.Error()
		}
		for name := range strings.SplitSeq(c.refused, " ") {
			if !strings.Contains(text, name) || c.refused == "" && text != "" {
				t.Errorf("%v: refused %q, want %q", c.annotations, text, c.refused)
			}
		}
	}
}

// A container whose claim was prepared, and which no plugin saw, runs without the shim.
func TestAuditFindsClaimsWithoutTheShim(t *testing.T) {
	s := newClaimSite(t)
	found := make(chan Unmanaged, 2)
	s.Audit, s.Report = AuditReport, func(u Unmanaged) { found <- u }
	seen, err := s.create("seen", nil, s.prepare(1, 0, part40))
	if err != nil {
		t.Fatal(err)
	}
	pod, ctr := podOf("seen", "id-seen", nil)
	missedPod, missed := podOf("missed", "id-missed", nil)
	missed.Mounts = []*api.Mount{{Source: cdi.DefaultPaths.ShimDir, Destination: cdi.ShimDir}}
	missed.State = api.ContainerState_CONTAINER_RUNNING
	missed.Env = []string{TokenVariable(tokenOf(s.prepare(2, 1, part40)))}
	if _, err := s.Synchronize(context.Background(), []*api.PodSandbox{pod, missedPod}, []*api.Container{applied(ctr, seen), missed}); err != nil {
		t.Fatal(err)
	}
	if u := await(t, found, "a report"); u.Pod != "missed" || u.Asked != "a resource claim" {
		t.Errorf("reported: %+v", u)
	}
	s.expect("missed", "memory limit 20Gi, core request 40% on "+known[3])
}

// A container that got its GPU through another plugin of the node, and no claim, is left alone.
func TestAuditSparesWhoHasNoClaim(t *testing.T) {
	s := newClaimSite(t)
	s.Audit, s.Report = AuditReport, func(u Unmanaged) { t.Errorf("reported: %+v", u) }
	pod, ctr := podOf("toolkit", "id-toolkit", nil)
	ctr.State, ctr.Mounts = api.ContainerState_CONTAINER_RUNNING, []*api.Mount{{Source: cdi.DefaultPaths.ShimDir, Destination: cdi.ShimDir}}
	if !s.judge(pod, ctr) {
		t.Error("it has no GPU")
	}
}

// A core request of the pod lowers what its claims give, and asks for no GPU: a container without
// a claim is no tenant.
func TestCoreRequestBesideClaims(t *testing.T) {
	s := newClaimSite(t)
	found := make(chan Unmanaged, 2)
	s.Audit, s.Report = AuditReport, func(u Unmanaged) { found <- u }
	annotations := says("gpu-core-request=30")
	if _, err := s.create("main", annotations, s.prepare(1, 0, part40)); err != nil {
		t.Fatal(err)
	}
	s.expect("main", "memory limit 20Gi, core request 30% on "+known[2])
	if a, err := s.create("sidecar", annotations); a != nil || err != nil {
		t.Errorf("a container without a claim: %v, %v", a, err)
	}
	s.expect("sidecar", "nothing")
	if _, err := s.create("asks", says("gpu-core-request=30", "gpu=1")); err == nil || !strings.Contains(err.Error(), "this node gives GPUs by resource claims") {
		t.Errorf("a container that asks for a GPU, too: %v", err)
	}
	// The audit does not take the sidecar for one that asked.
	pod, sidecar := podOf("sidecar", "id-sidecar", annotations)
	asksPod, asks := podOf("asks", "id-asks", says("gpu=1"))
	sidecar.State, asks.State = api.ContainerState_CONTAINER_RUNNING, api.ContainerState_CONTAINER_RUNNING
	if _, err := s.Synchronize(context.Background(), []*api.PodSandbox{pod, asksPod}, []*api.Container{sidecar, asks}); err != nil {
		t.Fatal(err)
	}
	if u := await(t, found, "a report"); u.Pod != "asks" {
		t.Errorf("reported: %+v", u)
	}
}

// A container whose claim's record is lost keeps what it has: at a new start of the plugin what the
// scheduler was told last, whatever the pod's annotations say then.
func TestLostClaimKeepsTerms(t *testing.T) {
	s := newClaimSite(t)
	adjust, err := s.create("a", nil, s.prepare(1, 0, part40))
	if err != nil {
		t.Fatal(err)
	}
	clear(s.shares)
	pods := map[string]Pod{"unchanged": {UID: "uid-a", Namespace: "ml", Name: "a"},
		"annotated": {UID: "uid-a", Namespace: "ml", Name: "a", Annotations: says("gpu-core-limit=90", "gpu-memory-limit=70Gi")}}
	for _, pod := range pods {
		s.SetPod(pod)
		s.expect("a", "memory limit 20Gi, core request 40% on "+known[2])
	}

	for name, next := range map[string]*claimSite{
		"claims": newClaimSite(t), "annotations": {Plugin: New(quiet(), NewContainers(quiet()))}, // the node's tier was changed
	} {
		t.Run(name, func(t *testing.T) { testLostAtStart(t, next, adjust, pods) })
	}
}

func testLostAtStart(t *testing.T, next *claimSite, adjust *api.ContainerAdjustment, pods map[string]Pod) {
	next.t = t
	next.SetInventory(inventory(t))
	pod, ctr := podOf("a", "id-a", nil)
	next.ExpectPods()
	if _, err := next.Synchronize(context.Background(), []*api.PodSandbox{pod}, []*api.Container{applied(ctr, adjust)}); err != nil {
		t.Fatal(err)
	}
	keeps := func(when string) {
		t.Helper()
		all, _ := next.containers.snapshot()
		if c := all["id-a"]; c.Keep != sched.AllFields || !slices.Equal(c.GPUs, known[2:3]) {
			t.Errorf("%s the scheduler is told %+v", when, c)
		}
	}
	keeps("at the start,")
	for when, pod := range pods {
		next.SetPods([]Pod{pod})
		keeps(when)
	}
	next.SetPods(nil)
	keeps("without the pod,")
	all, _ := next.containers.snapshot()
	next.KeptByScheduler(all["id-a"], part40)
	next.expect("a", "memory limit 20Gi, core request 40% on "+known[2])
	next.SetPod(pods["annotated"])
	next.expect("a", "memory limit 20Gi, core request 40% on "+known[2])
}
