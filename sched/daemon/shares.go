// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/daemon/state"
)

// sharesVersion changes when an older scheduler would misread the file.
const sharesVersion = 1

// shares are what tenants may have of GPUs, and are promised.
type shares struct {
	Version int                     `json:"version"`
	Tenants map[string]tenantShares `json:"tenants"` // by peer.Peer.Account
}

// tenantShares are the shares of one tenant. Each field of the terms is taken from
// the most particular of them that says it. A gang is api.GangOfItself, or as gangIn says.
type tenantShares struct {
	Pod  api.Terms            `json:"pod,omitzero"`   // by the pod's annotations, for each GPU
	All  api.Terms            `json:"all,omitzero"`   // by SetShare, for each GPU
	GPUs map[string]api.Terms `json:"gpus,omitempty"` // by SetShare, by UUID
	Has  []string             `json:"has,omitempty"`  // UUIDs of the GPUs that the pod was given; none: not known
	// Of a container that an OCI hook has described, whose annotations are in Pod.
	Engine *engineContainer `json:"engine,omitempty"`
}

// on returns the terms that are in force on a GPU, for "" on GPUs found later.
func (t tenantShares) on(uuid string) api.Terms { return t.GPUs[uuid].Or(t.All).Or(t.Pod) }

func (t tenantShares) isZero() bool {
	return t.Pod == api.Terms{} && t.All == api.Terms{} && len(t.GPUs) == 0 && t.Engine == nil
}

// with returns t with these fields as SetShare says them. A change for all GPUs
// also removes the fields from single ones.
func (t tenantShares) with(uuid string, terms api.Terms, fields api.FieldSet) tenantShares {
	gpus := map[string]api.Terms{}
	maps.Copy(gpus, t.GPUs)
	if uuid == "" {
		t.All.Copy(terms, fields)
		for u, one := range gpus {
			one.Copy(api.Terms{}, fields)
			gpus[u] = one
		}
	} else {
		one := gpus[uuid]
		one.Copy(terms, fields)
		gpus[uuid] = one
	}
	maps.DeleteFunc(gpus, func(_ string, one api.Terms) bool { return one == api.Terms{} })
	t.GPUs = gpus
	return t
}

// podTerms returns the terms of a container's pod.
func podTerms(c *api.Container) api.Terms {
	t := c.Terms()
	t.Gang = gangIn(c.Namespace, t.Gang)
	namespace := c.Namespace
	if c.Engine != "" && c.Engine != runEngine {
		namespace = api.EngineOverlap
	}
	t.Overlap = api.OverlapIn(namespace, c.Uid, t.Overlap)
	return t
}

// gangIn returns the gang of this name in a namespace; "": outside of namespaces. Names have no
// slash.
func gangIn(namespace, gang string) string {
	if namespace == "" || gang == "" || gang == api.GangOfItself {
		return gang
	}
	return namespace + "/" + gang
}

// coreShare returns a tenant's terms as the core has them, which knows nobody's
// names and nothing of memory.
func coreShare(t api.Terms, account string) sched.Share {
	c := sched.Share{Limit: int(t.CoreLimit), Request: int(promisedBy(t)), Weight: int(t.Weight)}
	if t.Priority == api.Priority_PRIORITY_LATENCY {
		c.Priority = sched.Latency
	}
	if t.Overlap != "" {
		c.Overlap = overlapTenant + t.Overlap
		c.Limit = 0 // it bounds the member's part of the processors
	}
	switch t.Gang {
	case "":
	case api.GangOfItself:
		c.Gang = account
	default:
		c.Gang = gangTenant + t.Gang
	}
	return c
}

// promisedBy returns the percentage of a GPU that terms promise. The request can be
// above the limit, because annotations and SetShare said one of them each.
func promisedBy(t api.Terms) uint32 {
	if t.CoreLimit == 0 {
		return t.CoreRequest
	}
	return min(t.CoreRequest, t.CoreLimit)
}

// gangTenant begins the name under which a core has the gang of several tenants.
// The gang of one tenant has the name of its account.
const gangTenant = "gang "

// overlapTenant begins the name under which a core has an overlap group.
const overlapTenant = "overlap "

// shareOf returns a tenant's share for the core of a GPU.
func (d *Daemon) shareOf(g *gpu, account string) sched.Share {
	t := d.shares.Tenants[account].on(g.UUID)
	s := coreShare(t, account)
	if t.Overlap != "" {
		s.Request, s.Weight = d.groupShare(g, t.Overlap)
	}
	return s
}

func (d *Daemon) sharesPath() string { return filepath.Join(d.opts.RunDir, "shares.json") }

// restoreShares reads the record of an earlier scheduler. It makes the containers
// that were described, and have shares, known, so that the plugin can tell us to
// forget those that have ended.
func (d *Daemon) restoreShares() error {
	d.shares, d.sharesErr = state.ReadRecord[shares](d.sharesPath(), sharesVersion)
	if errors.Is(d.sharesErr, state.ErrNewer) {
		return d.sharesErr
	}
	if d.sharesErr != nil {
		d.log.WithError(d.sharesErr).Error("shares and memory limits are lost: set them again; nvshare-plugin brings back those of pods")
	}
	d.shares.Version = sharesVersion
	if d.shares.Tenants == nil {
		d.shares.Tenants = map[string]tenantShares{}
	}
	for account, t := range d.shares.Tenants {
		id, ok := strings.CutPrefix(account, peer.ContainerAccount)
		if !ok || t.Pod == (api.Terms{}) && t.Engine == nil && len(t.Has) == 0 {
			continue
		}
		c := &api.Container{Id: id, Gpus: t.Has}
		if t.Engine != nil {
			c.Engine, c.Name = t.Engine.Engine, t.Engine.Name
		}
		if namespace, gang, ok := strings.Cut(t.Pod.Gang, "/"); ok {
			c.Namespace, t.Pod.Gang = namespace, gang
		}
		if namespace, uid, name, ok := api.SplitOverlap(t.Pod.Overlap); ok {
			c.Uid, t.Pod.Overlap = uid, name
			if c.Engine == "" {
				c.Namespace = namespace
			}
		}
		c.SetTerms(t.Pod)
		d.names[id] = c
		if t.Engine != nil {
			d.restoreFirst(id, *t.Engine)
		}
	}
	return nil
}

// changeShares puts a tenant's shares in force, and records them. If the record fails nothing
// changes, unless force is set: then it is tried again. What the plugin says is written a little
// later, for many containers at once: it says so again after a restart.
func (d *Daemon) changeShares(account string, to tenantShares, force bool) error {
	old := d.shares.Tenants[account]
	d.keepShares(account, to)
	switch {
	case !force:
		if err := d.writeShares(); err != nil {
			d.keepShares(account, old)
			d.log.Error(err)
			return err
		}
	case to.Engine != nil: // nobody describes it again
		d.recordShares()
	case !d.reshare.Planned():
		d.reshare.Set(now().Add(recordPause))
	}
	caused := force || to.Engine != old.Engine // by a container that comes or goes
	defer d.reviewOverlap(old.Pod.Overlap, to.Pod.Overlap)
	for _, g := range d.order {
		if s := d.shareOf(g, account); s != coreShare(old.on(g.UUID), account) {
			d.step(g, sched.SetShare{Tenant: account, Share: s})
		}
		if o, n := old.on(g.UUID), to.on(g.UUID); o.MemoryLimit != n.MemoryLimit || o.MemoryMode != n.MemoryMode || o.SuspendAfter != n.SuspendAfter {
			d.setTenantMemory(g, account)
		}
		if d.has(account, g.UUID) {
			d.noteShare(g, account, caused, old.on(g.UUID), to.on(g.UUID))
		}
	}
	return nil
}

func (d *Daemon) keepShares(account string, to tenantShares) {
	if to.isZero() {
		delete(d.shares.Tenants, account)
	} else {
		d.shares.Tenants[account] = to
	}
}

// writeShares records what is in force.
func (d *Daemon) writeShares() error {
	if err := state.WriteRecord(d.sharesPath(), d.shares); err != nil {
		return fmt.Errorf("record shares: %w", err)
	}
	d.reshare.Stop()
	d.sharesErr = nil
	return nil
}

// recordShares is writeShares until it succeeds.
func (d *Daemon) recordShares() {
	had := d.sharesErr
	if d.sharesErr = d.writeShares(); d.sharesErr != nil {
		d.reshare.Set(now().Add(recordRetry))
	}
	switch {
	case had == nil && d.sharesErr != nil:
		d.log.Error(d.sharesErr)
	case had != nil && d.sharesErr == nil:
		d.log.Info("shares are recorded again")
	}
}

// noteShare notes in the log and the events which terms have changed on a GPU.
func (d *Daemon) noteShare(g *gpu, account string, caused bool, old, new api.Terms) {
	c, uid := d.tenantOf(account)
	who := api.Tenant(c, uid)
	for _, f := range api.Fields {
		was, is := f.Format(old), f.Format(new)
		if was != is {
			d.log.Infof("GPU %d: %s of %s: %s, was %s", g.Index, f.Name, who, is, was)
			d.noteSetting(g, account, caused, f.Name, was, is)
		}
	}
}

// shareChange describes a change of a tenant's shares on a GPU; nil: on GPUs found
// later.
func shareChange(g *gpu, account string, old, to tenantShares) *api.ShareChange {
	c := &api.ShareChange{}
	if g != nil {
		c.Uuid, c.Index, c.UsedMemoryBytes = g.UUID, uint32(g.Index), g.core.ReservedBy(account, 0).Used
	}
	was, is := old.on(c.Uuid), to.on(c.Uuid)
	c.Old, c.OldMemoryBytes = was.Share(), was.MemoryLimit
	c.New, c.NewMemoryBytes = is.Share(), is.MemoryLimit
	return c
}

// forgetShares drops the shares of a container that has ended.
func (d *Daemon) forgetShares(id string) {
	account := peer.ContainerAccount + id
	if _, ok := d.shares.Tenants[account]; ok {
		_ = d.changeShares(account, tenantShares{}, true)
	}
}

// promises are the requests of tenants on one GPU, the greatest first.
type promises []promise

type promise struct {
	account string
	percent uint32
}

func (p promises) sum() (n uint32) {
	for _, one := range p {
		n += one.percent
	}
	return n
}

// promised returns what is promised of a GPU, except to one tenant. A tenant
// whose GPUs are not known counts on all.
func (d *Daemon) promised(uuid, except string) (p promises) {
	for account, t := range d.shares.Tenants {
		n := promisedBy(t.on(uuid))
		if n == 0 || account == except || t.GPUs[uuid].CoreRequest == 0 && !d.has(account, uuid) {
			continue
		}
		p = append(p, promise{account, n})
	}
	slices.SortFunc(p, func(a, b promise) int {
		return cmp.Or(cmp.Compare(b.percent, a.percent), cmp.Compare(a.account, b.account))
	})
	return p
}

// has says whether a tenant may use a GPU, as far as we were told, or is on its way there.
func (d *Daemon) has(account, uuid string) bool {
	if m := d.migrations[account]; m != nil && m.to.UUID == uuid {
		return true
	}
	id, _ := strings.CutPrefix(account, peer.ContainerAccount)
	c := d.names[id]
	return id == account || len(c.GetGpus()) == 0 || slices.Contains(c.Gpus, uuid)
}

// describePromises names those who hold promises, for people.
func (d *Daemon) describePromises(p promises) string {
	var parts []string
	for _, one := range p[:min(len(p), maxNamed)] {
		c, uid := d.tenantOf(one.account)
		parts = append(parts, fmt.Sprintf("%d %% to %s", one.percent, api.Tenant(c, uid)))
	}
	if more := len(p) - len(parts); more > 0 {
		parts = append(parts, fmt.Sprintf("the rest to %d more", more))
	}
	return strings.Join(parts, ", ")
}

// countPromises is describePromises for somebody who may not be root: a container engine shows its
// user what the OCI hook says.
func (d *Daemon) countPromises(p promises) string {
	if len(p) == 1 {
		return "to 1 tenant (sudo nvsharectl status names it)"
	}
	return fmt.Sprintf("to %d tenants (sudo nvsharectl status names them)", len(p))
}

// promiseStatus describes what is promised of a GPU, and what is wrong with it:
// containers were created while no plugin could refuse them, or SetShare came
// between.
func (d *Daemon) promiseStatus(g *gpu) (all []*api.Promise, problems []string) {
	promised := d.promised(g.UUID, "")
	for _, one := range promised {
		p := &api.Promise{CoreRequest: one.percent}
		p.Container, p.Uid = d.tenantOf(one.account)
		all = append(all, p)
	}
	if sum := promised.sum(); sum > 100 {
		problems = append(problems, fmt.Sprintf("GPU %d: %d %% of its time are promised: %s; they get less", g.Index, sum, d.describePromises(promised)))
	}
	return all, problems
}

// allSettings lists what somebody has said of tenants' terms, by tenant.
func (d *Daemon) allSettings() (all []*api.Setting) {
	for _, account := range slices.Sorted(maps.Keys(d.shares.Tenants)) {
		t := d.shares.Tenants[account]
		c, uid := d.tenantOf(account)
		add := func(terms api.Terms, annotated bool, uuid string) {
			if terms != (api.Terms{}) {
				all = append(all, &api.Setting{Container: c, Uid: uid, Annotated: annotated, Uuid: uuid, Share: terms.Share(), MemoryBytes: terms.MemoryLimit})
			}
		}
		add(t.Pod, true, "")
		add(t.All, false, "")
		for _, uuid := range slices.Sorted(maps.Keys(t.GPUs)) {
			add(t.GPUs[uuid], false, uuid)
		}
	}
	return all
}

// setShare answers the control call.
func (d *Daemon) setShare(req *api.SetShareRequest) (*api.SetShareResponse, error) {
	account, err := d.findTenant(req.Container, req.Uid)
	if err != nil {
		return nil, err
	}
	// The fields are checked one by one here, and with the terms in force beside
	// them for each GPU below.
	terms, fields := req.Terms()
	if err := terms.Validate(); err != nil {
		return nil, status.Errorf(codes.InvalidArgument, "set a share: %v", err)
	}
	if fields&api.FixedFields != 0 {
		return nil, status.Error(codes.InvalidArgument, "set a share: an overlap group, and whether it is migratable, is fixed when a container starts: say it in the annotation, or with nvsharectl run")
	}
	uuid := ""
	gpus := d.order
	if req.Gpu != "" {
		g := d.findGPU(req.Gpu)
		if g == nil {
			return nil, noSuchGPU(req.Gpu)
		}
		uuid, gpus = g.UUID, []*gpu{g}
	}
	resp := &api.SetShareResponse{}
	resp.Container, resp.Uid = d.tenantOf(account)
	old, known := d.shares.Tenants[account]
	terms.Gang = gangIn(resp.Container.Namespace, terms.Gang)
	to := old.with(uuid, terms, fields)
	to.Has = resp.Container.Gpus // it was described, if there are any: see restoreShares
	if !known && !to.isZero() && len(d.shares.Tenants) >= maxShares {
		return nil, status.Errorf(codes.ResourceExhausted, "set a share: %d tenants have one already; remove some", len(d.shares.Tenants))
	}
	who := api.Tenant(resp.Container, resp.Uid)
	if uuid == "" { // of GPUs that are found later, and the only check before the first
		if err := d.keepable("new GPUs", "", account, old, to, who); err != nil {
			return nil, err
		}
	}
	for _, g := range gpus {
		if err := d.keepable(fmt.Sprintf("GPU %d", g.Index), g.UUID, account, old, to, who); err != nil {
			return nil, err
		}
		if err := d.residentFits(g, account, old, to, who); err != nil {
			return nil, err
		}
	}
	if err := d.changeShares(account, to, false); err != nil {
		return nil, status.Error(codes.Unavailable, err.Error())
	}
	if uuid == "" {
		resp.Changes = append(resp.Changes, shareChange(nil, account, old, to))
	}
	for _, g := range gpus {
		resp.Changes = append(resp.Changes, shareChange(g, account, old, to))
	}
	return resp, nil
}

// keepable returns why a tenant cannot have new terms on a GPU: they contradict
// each other, or more than 100 % of the GPU would be promised.
func (d *Daemon) keepable(gpu, uuid, account string, old, to tenantShares, who string) error {
	was, is := old.on(uuid), to.on(uuid)
	if err := is.Consistent(); err != nil && is != was {
		return status.Errorf(codes.InvalidArgument, "%s: %s: %v", gpu, who, err)
	}
	if is.CoreRequest <= was.CoreRequest || to.GPUs[uuid].CoreRequest == 0 && !d.has(account, uuid) {
		return nil
	}
	return d.promisable(gpu, uuid, account, is.CoreRequest, who, d.describePromises)
}

// promisable returns why a tenant cannot be promised a percentage of a GPU; zero
// always can. holders says who has the rest.
func (d *Daemon) promisable(gpu, uuid, account string, request uint32, who string, holders func(promises) string) error {
	p := d.promised(uuid, account)
	if request == 0 || p.sum()+request <= 100 {
		return nil
	}
	return status.Errorf(codes.FailedPrecondition, "%s: %d %% cannot be promised to %s: %d %% are already, %s; at most %d %% are left",
		gpu, request, who, p.sum(), holders(p), 100-min(p.sum(), 100))
}
