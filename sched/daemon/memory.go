// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/wire"
)

// limitsVersion changes when an older scheduler would misread the file.
const limitsVersion = 1

// limits are the memory limits of all tenants. The file is written when one is
// changed; the state file, which is written at each grant, stays small.
type limits struct {
	Version int                     `json:"version"`
	Tenants map[string]tenantLimits `json:"tenants"` // by peer.account
}

// tenantLimits are the memory limits of one tenant, bytes; 0: none. The more
// particular one holds.
type tenantLimits struct {
	Pod  uint64            `json:"pod,omitempty"`  // as the pod's annotation says, on each GPU
	All  uint64            `json:"all,omitempty"`  // as SetMemoryLimit says, on each GPU
	GPUs map[string]uint64 `json:"gpus,omitempty"` // as SetMemoryLimit says, by UUID
}

func (l tenantLimits) on(uuid string) uint64 { return cmp.Or(l.GPUs[uuid], l.All, l.Pod) }

func (l tenantLimits) isZero() bool { return l.Pod == 0 && l.All == 0 && len(l.GPUs) == 0 }

// with returns l with what SetMemoryLimit changes. For all GPUs it replaces
// what was said of single ones.
func (l tenantLimits) with(uuid string, bytes uint64) tenantLimits {
	if uuid == "" {
		return tenantLimits{Pod: l.Pod, All: bytes}
	}
	l.GPUs = maps.Clone(l.GPUs)
	if l.GPUs == nil {
		l.GPUs = map[string]uint64{}
	}
	l.GPUs[uuid] = bytes
	if bytes == 0 {
		delete(l.GPUs, uuid)
	}
	return l
}

// loadLimits reads the file. Missing, there are no limits. Damaged, there are
// none and an error, and the file is put aside.
func loadLimits(path string) (limits, error) {
	none := limits{limitsVersion, map[string]tenantLimits{}}
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return none, nil
	}
	if err != nil {
		return none, err
	}
	var l limits
	if err = json.Unmarshal(text, &l); err == nil && l.Version != limitsVersion {
		err = fmt.Errorf("version %d, this scheduler reads %d", l.Version, limitsVersion)
	}
	if err != nil {
		aside := path + ".damaged"
		if renameErr := os.Rename(path, aside); renameErr != nil {
			aside = path
		}
		return none, fmt.Errorf("the limits in %s cannot be read (%w)", aside, err)
	}
	if l.Tenants == nil {
		l.Tenants = none.Tenants
	}
	return l, nil
}

func (l limits) save(path string) error {
	text, err := json.MarshalIndent(l, "", "  ")
	if err != nil {
		return err
	}
	tmp := path + ".tmp"
	if err := overwrite(tmp, append(text, '\n')); err != nil {
		return err
	}
	return os.Rename(tmp, path)
}

func (d *Daemon) limitsPath() string { return filepath.Join(d.opts.RunDir, "limits.json") }

// restoreLimits reads the limits of before. Containers that are limited by
// their pod's annotation are known to us, so that the plugin has us forget
// those that ended meanwhile.
func (d *Daemon) restoreLimits() {
	d.limits, d.limitsErr = loadLimits(d.limitsPath())
	if d.limitsErr != nil {
		d.log.WithError(d.limitsErr).Error("memory limits are lost: set them again; nvshare-plugin brings back those of pods")
	}
	for account, l := range d.limits.Tenants {
		if id, ok := strings.CutPrefix(account, containerAccount); ok && l.Pod != 0 {
			d.names[id] = &api.Container{Id: id, MemoryLimitBytes: l.Pod}
		}
	}
}

// changeLimits records what a tenant's limits are now. If that fails nothing
// has changed, unless force.
func (d *Daemon) changeLimits(account string, to tenantLimits, force bool) error {
	next := limits{limitsVersion, maps.Clone(d.limits.Tenants)}
	if to.isZero() {
		delete(next.Tenants, account)
	} else {
		next.Tenants[account] = to
	}
	err := next.save(d.limitsPath())
	if err != nil {
		err = fmt.Errorf("record memory limits: %w", err)
		d.log.Error(err)
		if !force {
			return err
		}
	}
	d.limits, d.limitsErr = next, err
	for _, g := range d.order {
		d.applyLimit(g, account)
	}
	return err
}

// setPodLimit is what the plugin's description of a container changes.
func (d *Daemon) setPodLimit(id string, bytes uint64) {
	account := containerAccount + id
	if l := d.limits.Tenants[account]; l.Pod != bytes {
		l.Pod = bytes
		// In force also if a restart would not know of it: the plugin would
		// say it again.
		_ = d.changeLimits(account, l, true)
	}
}

// forgetLimits drops the limits of a container that has ended.
func (d *Daemon) forgetLimits(id string) {
	account := containerAccount + id
	if _, ok := d.limits.Tenants[account]; ok {
		_ = d.changeLimits(account, tenantLimits{}, true)
	}
}

// applyLimit brings a GPU's ledger and the tenant's pages into line with the
// limits.
func (d *Daemon) applyLimit(g *gpu, account string) {
	limit := d.limits.Tenants[account].on(g.UUID)
	if g.ledger.SetLimit(account, limit) != limit {
		d.showLimits(g, account)
	}
}

// limits is what a tenant's pages say of the GPU.
func (g *gpu) limits(account string) wire.Limits {
	r := g.ledger.Reserved(account, 0)
	return wire.Limits{Memory: r.Limit, Used: r.Used}
}

// showLimits brings the pages of a tenant's processes into line with the
// ledger of a GPU that they use.
func (d *Daemon) showLimits(g *gpu, account string) {
	a := d.counts[account]
	if a == nil {
		return
	}
	l := g.limits(account)
	for cl := range a.clients {
		if att := cl.attached[g]; att != nil && cl.conn != nil && cl.conn.channels[att.channel] == att {
			cl.page.SetLimits(att.channel, l)
		}
	}
}

// reserve answers RESERVE.
func (d *Daemon) reserve(c *conn, att *attachment, f *wire.Frame) {
	g, cl := att.gpu, att.client
	before := g.ledger.Reserved(cl.account, 0).Used
	r, ok := g.ledger.Reserve(cl.account, cl.id, f.Reserve.Total, f.Reserve.Least, f.Code&wire.ReserveForce != 0)
	if r.Used != before {
		d.showLimits(g, cl.account)
	}
	d.checkLedger(g)
	answer := wire.Frame{Type: wire.TypeReserved, Channel: att.channel,
		Reserved: wire.Reserved{Total: r.Total, Used: r.Used, Limit: r.Limit, Serial: f.Reserve.Serial}}
	if !ok {
		answer.Code = wire.ErrMemory
	}
	d.send(c, &answer, nil)
}

// dropReservations gives back what a client has: it is dead, or another
// program now.
func (d *Daemon) dropReservations(cl *client) {
	for _, g := range d.order {
		if g.ledger.Drop(cl.account, cl.id) {
			d.showLimits(g, cl.account)
			d.checkLedger(g)
		}
	}
}

func (d *Daemon) checkLedger(g *gpu) {
	if t := now(); t >= d.nextLedgerCheck || d.checkAlways {
		d.nextLedgerCheck = t.Add(checkPause)
		if err := g.ledger.Check(); err != nil && d.invariantErr == nil {
			d.invariantErr = err
			d.log.WithError(err).Errorf("bug in nvshare-scheduler: ledger of GPU %d", g.Index)
		}
	}
}

// setMemoryLimit answers the control call.
func (d *Daemon) setMemoryLimit(req *api.SetMemoryLimitRequest) (*api.SetMemoryLimitResponse, error) {
	account, err := d.findTenant(req)
	if err != nil {
		return nil, err
	}
	if n := req.Bytes; n != 0 && (n < api.MinMemory || n > api.MaxMemory) {
		return nil, status.Errorf(codes.InvalidArgument, "set a memory limit of %d bytes: it must be from 1Mi to 1Pi", n)
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
	old, known := d.limits.Tenants[account]
	if !known && req.Bytes != 0 && len(d.limits.Tenants) >= maxLimits {
		return nil, status.Errorf(codes.ResourceExhausted, "set a memory limit: %d tenants have one already; remove some", len(d.limits.Tenants))
	}
	resp := &api.SetMemoryLimitResponse{}
	resp.Container, resp.Uid = d.tenantOf(account)
	to := old.with(uuid, req.Bytes)
	if uuid == "" {
		resp.Changes = append(resp.Changes, &api.MemoryLimitChange{OldBytes: old.on(""), NewBytes: to.on("")})
	}
	if err := d.changeLimits(account, to, false); err != nil {
		return nil, status.Error(codes.Unavailable, err.Error())
	}
	for _, g := range gpus {
		c := &api.MemoryLimitChange{
			Uuid: g.UUID, Index: uint32(g.Index),
			OldBytes: old.on(g.UUID), NewBytes: to.on(g.UUID), UsedBytes: g.ledger.Reserved(account, 0).Used,
		}
		resp.Changes = append(resp.Changes, c)
		d.log.Infof("GPU %d: memory limit of %s: %s, was %s", g.Index, account, api.FormatMemory(c.NewBytes), api.FormatMemory(c.OldBytes))
	}
	return resp, nil
}

var wholeID = regexp.MustCompile(`^[0-9a-f]{64}$`)

// findTenant returns the account that a request names.
func (d *Daemon) findTenant(req *api.SetMemoryLimitRequest) (account string, err error) {
	want := req.Container
	switch {
	case (want == "") == (req.Uid == nil):
		return "", status.Error(codes.InvalidArgument, "set a memory limit: name either a container or a user")
	case req.Uid != nil:
		return userAccount + strconv.FormatUint(uint64(*req.Uid), 10), nil
	}
	var found []string
	for id, c := range d.containers() {
		switch {
		case id == want:
			return containerAccount + id, nil
		case strings.HasPrefix(id, want), c.Pod != "" && api.Who(&api.Client{Container: c}) == want:
			found = append(found, id)
		}
	}
	switch {
	case len(found) == 1:
		return containerAccount + found[0], nil
	case len(found) == 0 && wholeID.MatchString(want):
		return containerAccount + want, nil // one that is yet to use a GPU
	case len(found) == 0:
		return "", status.Errorf(codes.NotFound, "container %.128q: none that uses a GPU has this id or name (nvsharectl status lists them)", want)
	}
	slices.Sort(found)
	return "", status.Errorf(codes.InvalidArgument, "container %.128q: that may be %.12s, %.12s or another of %d; give more of the id", want, found[0], found[1], len(found))
}

// containers returns all containers that we know of, by id.
func (d *Daemon) containers() map[string]*api.Container {
	all := maps.Clone(d.names)
	add := func(id string) {
		if id != "" && all[id] == nil {
			all[id] = &api.Container{Id: id}
		}
	}
	for _, cl := range d.clients {
		add(cl.container)
	}
	for account := range d.limits.Tenants {
		id, _ := strings.CutPrefix(account, containerAccount)
		if id != account {
			add(id)
		}
	}
	return all
}

// tenantOf is what the API says for an account.
func (d *Daemon) tenantOf(account string) (c *api.Container, uid uint32) {
	if id, ok := strings.CutPrefix(account, containerAccount); ok {
		if names := d.names[id]; names != nil {
			return proto.Clone(names).(*api.Container), 0
		}
		return &api.Container{Id: id}, 0
	}
	n, _ := strconv.ParseUint(strings.TrimPrefix(account, userAccount), 10, 32)
	return &api.Container{}, uint32(n)
}

// memoryStatus describes a GPU's ledger, and what is wrong in it.
func (d *Daemon) memoryStatus(g *gpu) (accounts []*api.MemoryAccount, problems []string) {
	for _, account := range g.ledger.Accounts() {
		r := g.ledger.Reserved(account, 0)
		a := &api.MemoryAccount{LimitBytes: r.Limit, UsedBytes: r.Used}
		a.Container, a.Uid = d.tenantOf(account)
		accounts = append(accounts, a)
		if r.Limit != 0 && r.Used > r.Limit {
			problems = append(problems, fmt.Sprintf("GPU %d: %s uses %d MiB of memory, over its limit of %d MiB; it gets no more until it has freed enough",
				g.Index, api.Tenant(a.Container, a.Uid), r.Used>>20, r.Limit>>20))
		}
	}
	return accounts, problems
}
