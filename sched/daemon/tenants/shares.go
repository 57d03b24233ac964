// SPDX-License-Identifier: Apache-2.0

package tenants

import (
	"cmp"
	"fmt"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/daemon/state"
)

// Book has what containers and users may have of GPUs, and are promised, and who containers are
// whose engines do not tell when they end.
type Book struct {
	*node.Node
	Shares    Shares                // that were set, or asked for by pods
	Record    *state.Keeper         // of them; its Err: shares were lost, or would be at a restart
	Described chan struct{}         // closed when a container is described, and made anew
	Firsts    map[string]*peer.Peer // first processes of containers that OCI hooks described, by container id

	// MemoryChanged is told that a tenant's limits or terms of memory have changed on a GPU, and
	// OverlapChanged of overlap groups whose members have.
	MemoryChanged  func(g *node.GPU, account string)
	OverlapChanged func(groups ...string)
}

// New returns a book in which nobody has anything.
func New(n *node.Node) *Book {
	b := &Book{Node: n, Described: make(chan struct{}), Firsts: map[string]*peer.Peer{}}
	b.Record = state.NewKeeper(&n.Timers, n.Log, b.sharesPath(), "shares", func() any { return b.Shares })
	return b
}

// SharesVersion changes when an older scheduler would misread the file.
const SharesVersion = 1

// Shares are what tenants may have of GPUs, and are promised.
type Shares struct {
	Version int                     `json:"version"`
	Tenants map[string]TenantShares `json:"tenants"` // by peer.Peer.Account
}

// TenantShares are the shares of one tenant. Each field of the terms is taken from
// the most particular of them that says it. A gang is api.GangOfItself, or as GangIn says.
type TenantShares struct {
	Pod    api.Terms            `json:"pod,omitzero"`     // by the pod's annotations, for each GPU
	All    api.Terms            `json:"all,omitzero"`     // by SetShare, for each GPU
	GPUs   map[string]api.Terms `json:"gpus,omitempty"`   // by SetShare, by UUID
	Has    []string             `json:"has,omitempty"`    // UUIDs of the GPUs that the pod was given; none: not known
	Reach  []string             `json:"reach,omitempty"`  // those that its processes can open; none: it cannot move
	Engine *EngineContainer     `json:"engine,omitempty"` // an OCI hook has described it; its annotations are in Pod
}

// On returns the terms that are in force on a GPU, for "" on GPUs found later.
func (t TenantShares) On(uuid string) api.Terms { return t.GPUs[uuid].Or(t.All).Or(t.Pod) }

// IsZero says that a tenant has nothing that would be recorded.
func (t TenantShares) IsZero() bool {
	return t.Pod == api.Terms{} && t.All == api.Terms{} && len(t.GPUs) == 0 && t.Engine == nil
}

// With returns t with these fields as SetShare says them. A change for all GPUs
// also removes the fields from single ones.
func (t TenantShares) With(uuid string, terms api.Terms, fields api.FieldSet) TenantShares {
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

// PodTerms returns the terms of a container's pod.
func PodTerms(c *api.Container) api.Terms {
	t := c.Terms()
	t.Gang = GangIn(c.Namespace, t.Gang)
	namespace := c.Namespace
	if c.Engine != "" && c.Engine != node.RunEngine {
		namespace = api.EngineOverlap
	}
	t.Overlap = api.OverlapIn(namespace, c.Uid, t.Overlap)
	return t
}

// GangIn returns the gang of this name in a namespace; "": outside of namespaces. Names have no
// slash.
func GangIn(namespace, gang string) string {
	if namespace == "" || gang == "" || gang == api.GangOfItself {
		return gang
	}
	return namespace + "/" + gang
}

// CoreShare returns a tenant's terms as the core has them, which knows nobody's
// names and nothing of memory.
func CoreShare(t api.Terms, account string) sched.Share {
	c := sched.Share{Limit: int(t.CoreLimit), Request: int(PromisedBy(t)), Weight: int(t.Weight)}
	if t.Priority == api.Priority_PRIORITY_LATENCY {
		c.Priority = sched.Latency
	}
	if t.Overlap != "" {
		c.Overlap = OverlapTenant + t.Overlap
		c.Limit = 0 // it bounds the member's part of the processors
	}
	switch t.Gang {
	case "":
	case api.GangOfItself:
		c.Gang = account
	default:
		c.Gang = GangTenant + t.Gang
	}
	return c
}

// PromisedBy returns the percentage of a GPU that terms promise. The request can be
// above the limit, because annotations and SetShare said one of them each.
func PromisedBy(t api.Terms) uint32 {
	if t.CoreLimit == 0 {
		return t.CoreRequest
	}
	return min(t.CoreRequest, t.CoreLimit)
}

// GangTenant begins the name under which a core has the gang of several tenants.
// The gang of one tenant has the name of its account.
const GangTenant = "gang "

// OverlapTenant begins the name under which a core has an overlap group.
const OverlapTenant = "overlap "

// ShareOf returns a tenant's share for the core of a GPU.
func (b *Book) ShareOf(g *node.GPU, account string) sched.Share {
	t := b.Shares.Tenants[account].On(g.UUID)
	s := CoreShare(t, account)
	if t.Overlap != "" {
		s.Request, s.Weight = b.groupShare(g, t.Overlap)
	}
	return s
}

func (b *Book) sharesPath() string { return filepath.Join(b.Opts.RunDir, "shares.json") }

// RestoreShares reads the record of an earlier scheduler. It makes the containers
// that were described, and have shares, known, so that the plugin can tell us to
// forget those that have ended.
func (b *Book) RestoreShares() error {
	var err error
	if b.Shares, b.Record.Err, err = state.Restore[Shares](b.Log, b.sharesPath(), SharesVersion, "shares and memory limits are lost: set them again; nvshare-plugin brings back those of pods"); err != nil {
		return err
	}
	b.Shares.Version = SharesVersion
	if b.Shares.Tenants == nil {
		b.Shares.Tenants = map[string]TenantShares{}
	}
	for account, t := range b.Shares.Tenants {
		id, ok := strings.CutPrefix(account, peer.ContainerAccount)
		if !ok || t.Pod == (api.Terms{}) && t.Engine == nil && len(t.Has) == 0 {
			continue
		}
		c := &api.Container{Id: id, Gpus: t.Has, Reach: t.Reach}
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
		b.Names[id] = c
		if t.Engine != nil {
			b.RestoreFirst(id, *t.Engine)
		}
	}
	return nil
}

// ChangeShares puts a tenant's shares in force, and records them. If the record fails nothing
// changes, unless force is set: then it is tried again. What the plugin says is written a little
// later, for many containers at once: it says so again after a restart.
func (b *Book) ChangeShares(account string, to TenantShares, force bool) error {
	old := b.Shares.Tenants[account]
	b.keepShares(account, to)
	switch {
	case !force:
		if err := b.Record.Write(); err != nil {
			b.keepShares(account, old)
			b.Log.Error(err)
			return err
		}
	case to.Engine != nil: // nobody describes it again
		b.Record.Keep()
	default:
		b.Record.KeepLater(node.RecordPause)
	}
	caused := force || to.Engine != old.Engine // by a container that comes or goes
	defer b.OverlapChanged(old.Pod.Overlap, to.Pod.Overlap)
	for _, g := range b.Order {
		s, was := b.ShareOf(g, account), CoreShare(old.On(g.UUID), account)
		if s != was {
			b.Step(g, sched.SetShare{Tenant: account, Share: s})
		}
		if o, n := old.On(g.UUID), to.On(g.UUID); s.Limit != was.Limit || o.MemoryLimit != n.MemoryLimit || o.MemoryMode != n.MemoryMode || o.SuspendAfter != n.SuspendAfter {
			b.MemoryChanged(g, account)
		}
		if b.has(account, g.UUID) {
			b.noteShare(g, account, caused, old.On(g.UUID), to.On(g.UUID))
		}
	}
	return nil
}

func (b *Book) keepShares(account string, to TenantShares) {
	if to.IsZero() {
		delete(b.Shares.Tenants, account)
	} else {
		b.Shares.Tenants[account] = to
	}
}

// noteShare notes in the log and the events which terms have changed on a GPU.
func (b *Book) noteShare(g *node.GPU, account string, caused bool, old, new api.Terms) {
	c, uid := b.TenantOf(account)
	who := api.Tenant(c, uid)
	for _, f := range api.Fields {
		was, is := f.Format(old), f.Format(new)
		if was != is {
			b.Log.Infof("GPU %d: %s of %s: %s, was %s", g.Index, f.Name, who, is, was)
			b.NoteSetting(g, account, caused, f.Name, was, is)
		}
	}
}

// ShareChange describes a change of a tenant's shares on a GPU; nil: on GPUs found
// later.
func ShareChange(g *node.GPU, account string, old, to TenantShares) *api.ShareChange {
	c := &api.ShareChange{}
	if g != nil {
		c.Uuid, c.Index, c.UsedMemoryBytes = g.UUID, uint32(g.Index), g.Core.ReservedBy(account, 0).Used
	}
	was, is := old.On(c.Uuid), to.On(c.Uuid)
	c.Old, c.OldMemoryBytes = was.Share(), was.MemoryLimit
	c.New, c.NewMemoryBytes = is.Share(), is.MemoryLimit
	return c
}

// promises are the requests of tenants on one GPU, the greatest first.
type promises []promise

type promise struct {
	account string
	percent uint32
}

// Sum adds up what is promised, percent.
func (p promises) Sum() (n uint32) {
	for _, one := range p {
		n += one.percent
	}
	return n
}

// Promised returns what is promised of a GPU, except to one tenant. A tenant
// whose GPUs are not known counts on all.
func (b *Book) Promised(uuid, except string) (p promises) {
	for account, t := range b.Shares.Tenants {
		n := PromisedBy(t.On(uuid))
		if n == 0 || account == except || t.GPUs[uuid].CoreRequest == 0 && !b.has(account, uuid) {
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
func (b *Book) has(account, uuid string) bool {
	if to := b.Leaving[account]; to != nil && to.UUID == uuid {
		return true
	}
	id, _ := strings.CutPrefix(account, peer.ContainerAccount)
	c := b.Names[id]
	return id == account || len(c.GetGpus()) == 0 || slices.Contains(c.Gpus, uuid)
}

// describePromises names those who hold promises, for people.
func (b *Book) describePromises(p promises) string {
	var parts []string
	for _, one := range p[:min(len(p), node.MaxNamed)] {
		c, uid := b.TenantOf(one.account)
		parts = append(parts, fmt.Sprintf("%d %% to %s", one.percent, api.Tenant(c, uid)))
	}
	if more := len(p) - len(parts); more > 0 {
		parts = append(parts, fmt.Sprintf("the rest to %d more", more))
	}
	return strings.Join(parts, ", ")
}

// countPromises is describePromises for somebody who may not be root: a container engine shows its
// user what the OCI hook says.
func (b *Book) countPromises(p promises) string {
	if len(p) == 1 {
		return "to 1 tenant (sudo nvsharectl status names it)"
	}
	return fmt.Sprintf("to %d tenants (sudo nvsharectl status names them)", len(p))
}

// PromiseStatus describes what is promised of a GPU, and what is wrong with it:
// containers were created while no plugin could refuse them, or SetShare came
// between.
func (b *Book) PromiseStatus(g *node.GPU) (all []*api.Promise, problems []string) {
	promised := b.Promised(g.UUID, "")
	for _, one := range promised {
		p := &api.Promise{CoreRequest: one.percent}
		p.Container, p.Uid = b.TenantOf(one.account)
		all = append(all, p)
	}
	if sum := promised.Sum(); sum > 100 {
		problems = append(problems, fmt.Sprintf("GPU %d: %d %% of its time are promised: %s; they get less", g.Index, sum, b.describePromises(promised)))
	}
	return all, problems
}

// Keepable returns why a tenant cannot have new terms on a GPU: they contradict
// each other, or more than 100 % of the GPU would be promised.
func (b *Book) Keepable(gpu, uuid, account string, old, to TenantShares, who string) error {
	was, is := old.On(uuid), to.On(uuid)
	if err := is.Consistent(); err != nil && is != was {
		return status.Errorf(codes.InvalidArgument, "%s: %s: %v", gpu, who, err)
	}
	if is.CoreRequest <= was.CoreRequest || to.GPUs[uuid].CoreRequest == 0 && !b.has(account, uuid) {
		return nil
	}
	return b.promisable(gpu, uuid, account, is.CoreRequest, who, b.describePromises)
}

// promisable returns why a tenant cannot be promised a percentage of a GPU; zero
// always can. holders says who has the rest.
func (b *Book) promisable(gpu, uuid, account string, request uint32, who string, holders func(promises) string) error {
	p := b.Promised(uuid, account)
	if request == 0 || p.Sum()+request <= 100 {
		return nil
	}
	return status.Errorf(codes.FailedPrecondition, "%s: %d %% cannot be promised to %s: %d %% are already, %s; at most %d %% are left",
		gpu, request, who, p.Sum(), holders(p), 100-min(p.Sum(), 100))
}

var wholeID = regexp.MustCompile(`^[0-9a-f]{64}$`)

// FindTenant returns the account that a request names.
func (b *Book) FindTenant(want string, uid *uint32) (account string, err error) {
	switch {
	case (want == "") == (uid == nil):
		return "", status.Error(codes.InvalidArgument, "name either a container or a user")
	case uid != nil:
		return peer.AccountOfUser(*uid), nil
	}
	all := b.containers()
	found, _ := api.Meant(want, all)
	switch {
	case len(found) == 1:
		return peer.ContainerAccount + found[0], nil
	case len(found) == 0 && wholeID.MatchString(want):
		return peer.ContainerAccount + want, nil // one that is yet to use a GPU
	case len(found) == 0:
		return "", status.Errorf(codes.NotFound, "container %.128q: none that uses a GPU has this id or name (nvsharectl status lists them)", want)
	}
	return "", status.Errorf(codes.InvalidArgument, "container %.128q: that may be %.12s (%s), %.12s (%s) or another of %d; give more of the name or of the id",
		want, found[0], api.Tenant(all[found[0]], 0), found[1], api.Tenant(all[found[1]], 0), len(found))
}

// containers returns all containers that we know of, by id.
func (b *Book) containers() map[string]*api.Container {
	all := maps.Clone(b.Names)
	add := func(id string) {
		if id != "" && all[id] == nil {
			all[id] = &api.Container{Id: id}
		}
	}
	for _, cl := range b.Clients {
		add(cl.Container)
	}
	for account := range b.Shares.Tenants {
		id, _ := strings.CutPrefix(account, peer.ContainerAccount)
		if id != account {
			add(id)
		}
	}
	return all
}

// AllSettings lists what somebody has said of tenants' terms, by tenant.
func (b *Book) AllSettings() (all []*api.Setting) {
	for _, account := range slices.Sorted(maps.Keys(b.Shares.Tenants)) {
		t := b.Shares.Tenants[account]
		c, uid := b.TenantOf(account)
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

// OverlapGPU returns the GPU of a member, which has only one; nil: it is not known.
func (b *Book) OverlapGPU(gpus []string) *node.GPU {
	switch {
	case len(gpus) == 1:
		return b.FindGPU(gpus[0])
	case len(gpus) == 0 && len(b.Order) == 1:
		return b.Order[0]
	}
	return nil
}

// MembersOf returns the accounts of a group's members on a GPU.
func (b *Book) MembersOf(g *node.GPU, group string) (accounts []string) {
	for _, account := range slices.Sorted(maps.Keys(b.Shares.Tenants)) {
		if t := b.Shares.Tenants[account]; t.Pod.Overlap == group && b.OverlapGPU(t.Has) == g {
			accounts = append(accounts, account)
		}
	}
	return accounts
}

// groupShare returns the request and the weight of an overlap group: the sum of its members'
// requests, and the greatest of their weights.
func (b *Book) groupShare(g *node.GPU, group string) (request, weight int) {
	for _, account := range b.MembersOf(g, group) {
		t := b.Shares.Tenants[account].On(g.UUID)
		request += int(PromisedBy(t))
		weight = max(weight, int(t.Weight))
	}
	return min(request, 100), weight
}
