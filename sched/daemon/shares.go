// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"cmp"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/peer"
)

// sharesVersion changes when an older scheduler would misread the file.
const sharesVersion = 1

// shares are what tenants may have of GPUs, and are promised.
type shares struct {
	Version int                     `json:"version"`
	Tenants map[string]tenantShares `json:"tenants"` // by peer.Peer.Account
}

// tenantShares are the shares of one tenant. For each field of a share, the
// more particular one that says something holds.
type tenantShares struct {
	Pod  share            `json:"pod,omitzero"`   // as the pod's annotations say, of each GPU
	All  share            `json:"all,omitzero"`   // as SetShare says, of each GPU
	GPUs map[string]share `json:"gpus,omitempty"` // as SetShare says, by UUID
	Has  []string         `json:"has,omitempty"`  // UUIDs of the GPUs that the pod was given; none: not known
}

// share is what a tenant may have of one GPU. What is zero is not said.
type share struct {
	Memory   uint64 `json:"memory,omitempty"`      // limit, bytes
	Limit    uint32 `json:"limit,omitempty"`       // of time, percent
	Request  uint32 `json:"request,omitempty"`     // of time, percent
	Weight   uint32 `json:"weight,omitempty"`      //
	Priority string `json:"priority,omitempty"`    // batch, latency
	Gang     string `json:"gang,omitempty"`        // api.GangOfItself, or <namespace>/<name>
	Keep     string `json:"memory_mode,omitempty"` // swap, resident, managed
}

// on returns the share that is in force on a GPU, for "" on those found later.
func (t tenantShares) on(uuid string) share {
	one := t.GPUs[uuid]
	return share{
		Memory:   cmp.Or(one.Memory, t.All.Memory, t.Pod.Memory),
		Limit:    cmp.Or(one.Limit, t.All.Limit, t.Pod.Limit),
		Request:  cmp.Or(one.Request, t.All.Request, t.Pod.Request),
		Weight:   cmp.Or(one.Weight, t.All.Weight, t.Pod.Weight),
		Priority: cmp.Or(one.Priority, t.All.Priority, t.Pod.Priority),
		Gang:     cmp.Or(one.Gang, t.All.Gang, t.Pod.Gang),
		Keep:     cmp.Or(one.Keep, t.All.Keep, t.Pod.Keep),
	}
}

func (t tenantShares) isZero() bool {
	return t.Pod == share{} && t.All == share{} && len(t.GPUs) == 0
}

// with returns t with what SetShare changes. For all GPUs it replaces what was
// said of single ones.
func (t tenantShares) with(uuid string, req *api.SetShareRequest, namespace string) tenantShares {
	gpus := map[string]share{}
	for u, s := range t.GPUs {
		switch uuid {
		case "":
			s = s.without(req)
		case u:
			s = s.with(req, namespace)
		}
		gpus[u] = s
	}
	if uuid == "" {
		t.All = t.All.with(req, namespace)
	} else if _, ok := t.GPUs[uuid]; !ok {
		gpus[uuid] = share{}.with(req, namespace)
	}
	maps.DeleteFunc(gpus, func(_ string, s share) bool { return s == share{} })
	t.GPUs = gpus
	return t
}

// with returns s with the fields that a request has.
func (s share) with(req *api.SetShareRequest, namespace string) share {
	if req.MemoryBytes != nil {
		s.Memory = *req.MemoryBytes
	}
	if req.CoreLimit != nil {
		s.Limit = *req.CoreLimit
	}
	if req.CoreRequest != nil {
		s.Request = *req.CoreRequest
	}
	if req.Weight != nil {
		s.Weight = *req.Weight
	}
	if req.Priority != nil {
		s.Priority = priorityName(*req.Priority)
	}
	if req.Gang != nil {
		s.Gang = gangIn(namespace, *req.Gang)
	}
	if req.MemoryMode != nil {
		s.Keep = memoryModeName(*req.MemoryMode)
	}
	return s
}

// without returns s without the fields that a request has.
func (s share) without(req *api.SetShareRequest) share {
	zero := proto.Clone(req).(*api.SetShareRequest)
	for _, n := range []*uint32{zero.CoreLimit, zero.CoreRequest, zero.Weight} {
		if n != nil {
			*n = 0
		}
	}
	if zero.MemoryBytes != nil {
		*zero.MemoryBytes = 0
	}
	if zero.Priority != nil {
		*zero.Priority = api.Priority_PRIORITY_UNSPECIFIED
	}
	if zero.Gang != nil {
		*zero.Gang = ""
	}
	if zero.MemoryMode != nil {
		*zero.MemoryMode = api.MemoryMode_MEMORY_MODE_UNSPECIFIED
	}
	return s.with(zero, "")
}

// podShare is what the plugin says of a container.
func podShare(c *api.Container) share {
	s := c.GetShare()
	return share{
		Memory: c.MemoryLimitBytes, Limit: s.GetCoreLimit(), Request: s.GetCoreRequest(), Weight: s.GetWeight(),
		Priority: priorityName(s.GetPriority()), Gang: gangIn(c.Namespace, s.GetGang()),
		Keep: memoryModeName(s.GetMemoryMode()),
	}
}

// gangIn is the gang of this name in a namespace.
func gangIn(namespace, gang string) string {
	if gang == "" || gang == api.GangOfItself {
		return gang
	}
	return namespace + "/" + gang
}

func priorityName(p api.Priority) string {
	if p == api.Priority_PRIORITY_UNSPECIFIED {
		return ""
	}
	return api.FormatPriority(p)
}

func memoryModeName(m api.MemoryMode) string {
	if m == api.MemoryMode_MEMORY_MODE_UNSPECIFIED {
		return ""
	}
	return api.FormatMemoryMode(m)
}

// api returns the share as the control API has it; memory is apart.
func (s share) api() *api.Share {
	p, _ := api.ParsePriority(s.Priority) // not said: unspecified
	keep, _ := api.ParseMemoryMode(s.Keep)
	return &api.Share{CoreLimit: s.Limit, CoreRequest: s.Request, Weight: s.Weight, Priority: p, Gang: s.Gang, MemoryMode: keep}
}

// core returns the share as the core has it, which knows nobody's names.
func (s share) core(account string) sched.Share {
	c := sched.Share{Limit: int(s.Limit), Request: int(s.promised()), Weight: int(s.Weight)}
	if p, _ := api.ParsePriority(s.Priority); p == api.Priority_PRIORITY_LATENCY {
		c.Priority = sched.Latency
	}
	switch s.Gang {
	case "":
	case api.GangOfItself:
		c.Gang = account
	default:
		c.Gang = gangTenant + s.Gang
	}
	return c
}

// promised is what the request can be: annotations and SetShare may have said
// one thing each.
func (s share) promised() uint32 {
	if s.Limit == 0 {
		return s.Request
	}
	return min(s.Request, s.Limit)
}

// gangTenant begins the name under which a core has the gang of several tenants.
// That of one tenant has its account's.
const gangTenant = "gang "

// shareOf returns what a core is to be told of a tenant.
func (d *Daemon) shareOf(g *gpu, account string) sched.Share {
	return d.shares.Tenants[account].on(g.UUID).core(account)
}

func (d *Daemon) sharesPath() string { return filepath.Join(d.opts.RunDir, "shares.json") }

// restoreShares reads the shares of before. Containers whose pods' annotations
// say something are known to us, so that the plugin has us forget those that
// ended meanwhile.
func (d *Daemon) restoreShares() {
	d.shares, d.sharesErr = readRecord[shares](d.sharesPath(), sharesVersion)
	if d.sharesErr != nil {
		d.log.WithError(d.sharesErr).Error("shares and memory limits are lost: set them again; nvshare-plugin brings back those of pods")
	}
	if d.shares.Tenants == nil {
		d.shares.Tenants = map[string]tenantShares{}
	}
	for account, t := range d.shares.Tenants {
		id, ok := strings.CutPrefix(account, peer.ContainerAccount)
		if !ok || t.Pod == (share{}) {
			continue
		}
		c := &api.Container{Id: id, MemoryLimitBytes: t.Pod.Memory, Share: t.Pod.api(), Gpus: t.Has}
		c.Namespace, c.Share.Gang, ok = strings.Cut(t.Pod.Gang, "/")
		if !ok {
			c.Namespace, c.Share.Gang = "", t.Pod.Gang
		}
		d.names[id] = c
	}
}

// changeShares records what a tenant's shares are now, and has them hold. If
// they cannot be recorded nothing has changed, unless force.
func (d *Daemon) changeShares(account string, to tenantShares, force bool) error {
	next := shares{sharesVersion, maps.Clone(d.shares.Tenants)}
	if to.isZero() {
		delete(next.Tenants, account)
	} else {
		next.Tenants[account] = to
	}
	err := writeRecord(d.sharesPath(), next)
	if err != nil {
		err = fmt.Errorf("record shares: %w", err)
		d.log.Error(err)
		if !force {
			return err
		}
	}
	old := d.shares.Tenants[account]
	d.shares, d.sharesErr = next, err
	for _, g := range d.order {
		d.applyLimit(g, account)
		if s := d.shareOf(g, account); s != old.on(g.UUID).core(account) {
			d.step(g, sched.SetShare{Tenant: account, Share: s})
		}
		d.keepMemory(g, account)
		if d.has(account, g.UUID) {
			d.noteShare(g, account, old.on(g.UUID), to.on(g.UUID))
		}
	}
	return err
}

// noteShare says in the log and the events what has changed on a GPU.
func (d *Daemon) noteShare(g *gpu, account string, old, new share) {
	c, uid := d.tenantOf(account)
	who := api.Tenant(c, uid)
	note := func(what, old, new string) {
		if old != new {
			d.log.Infof("GPU %d: %s of %s: %s, was %s", g.Index, what, who, new, old)
			d.noteSetting(g, account, what, old, new)
		}
	}
	o, n := old.api(), new.api()
	note("memory limit", api.FormatMemory(old.Memory), api.FormatMemory(new.Memory))
	note("core limit", api.FormatPercent(o.CoreLimit), api.FormatPercent(n.CoreLimit))
	note("core request", api.FormatPercent(o.CoreRequest), api.FormatPercent(n.CoreRequest))
	note("weight", api.FormatWeight(o.Weight), api.FormatWeight(n.Weight))
	note("priority", api.FormatPriority(o.Priority), api.FormatPriority(n.Priority))
	note("gang", api.FormatGang(o.Gang), api.FormatGang(n.Gang))
	note("memory mode", api.FormatMemoryMode(o.MemoryMode), api.FormatMemoryMode(n.MemoryMode))
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
		n := t.on(uuid).promised()
		if n == 0 || account == except || t.GPUs[uuid].Request == 0 && !d.has(account, uuid) {
			continue
		}
		p = append(p, promise{account, n})
	}
	slices.SortFunc(p, func(a, b promise) int {
		return cmp.Or(cmp.Compare(b.percent, a.percent), cmp.Compare(a.account, b.account))
	})
	return p
}

// has says whether a tenant may use a GPU, as far as we were told.
func (d *Daemon) has(account, uuid string) bool {
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

// setShare answers the control call.
func (d *Daemon) setShare(req *api.SetShareRequest) (*api.SetShareResponse, error) {
	account, err := d.findTenant(req.Container, req.Uid)
	if err != nil {
		return nil, err
	}
	if err := validShare(req); err != nil {
		return nil, status.Errorf(codes.InvalidArgument, "set a share: %v", err)
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
	to := old.with(uuid, req, resp.Container.Namespace)
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
	describe := func(uuid string) *api.ShareChange {
		o, n := old.on(uuid), to.on(uuid)
		return &api.ShareChange{Uuid: uuid, Old: o.api(), New: n.api(), OldMemoryBytes: o.Memory, NewMemoryBytes: n.Memory}
	}
	if uuid == "" {
		resp.Changes = append(resp.Changes, describe(""))
	}
	for _, g := range gpus {
		c := describe(g.UUID)
		c.Index, c.UsedMemoryBytes = uint32(g.Index), g.ledger.Reserved(account, 0).Used
		resp.Changes = append(resp.Changes, c)
	}
	return resp, nil
}

// validShare says what is wrong with a request by itself.
func validShare(req *api.SetShareRequest) error {
	if n := req.GetMemoryBytes(); n != 0 && (n < api.MinMemory || n > api.MaxMemory) {
		return fmt.Errorf("memory limit of %d bytes: it must be from 1Mi to 1Pi", n)
	}
	for _, s := range []*api.Share{ // apart: what is in force beside them matters
		{CoreLimit: req.GetCoreLimit(), Weight: req.GetWeight(), Priority: req.GetPriority(), Gang: req.GetGang(), MemoryMode: req.GetMemoryMode()},
		{CoreRequest: req.GetCoreRequest()},
	} {
		if err := s.Validate(); err != nil {
			return err
		}
	}
	return nil
}

// keepable says why a change of a tenant's shares of a GPU cannot be: they
// contradict each other, or the GPU would be promised to more than 100 %.
func (d *Daemon) keepable(gpu, uuid, account string, old, to tenantShares, who string) error {
	was, is := old.on(uuid), to.on(uuid)
	if is.Limit != 0 && is.Request > is.Limit && is != was {
		return status.Errorf(codes.InvalidArgument, "%s: the core request of %s, %d %%, would be above its core limit, %d %%",
			gpu, who, is.Request, is.Limit)
	}
	if is.Request <= was.Request || to.GPUs[uuid].Request == 0 && !d.has(account, uuid) {
		return nil
	}
	if p := d.promised(uuid, account); p.sum()+is.Request > 100 {
		return status.Errorf(codes.FailedPrecondition, "%s: %d %% cannot be promised to %s: %d %% are already, %s; at most %d %% are left",
			gpu, is.Request, who, p.sum(), d.describePromises(p), 100-min(p.sum(), 100))
	}
	return nil
}
