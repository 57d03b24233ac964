// SPDX-License-Identifier: Apache-2.0

package tenants

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/wire"
)

// Containers of engines without NRI are described by nvshare's OCI hook, which names
// the container's first process. The scheduler watches this process and forgets the
// container at its death, because nobody else tells when such a container has stopped.
// Where no first process is named, as of a batch system's job, who described the container
// tells of its end.

// EngineContainer is a container that an OCI hook has described, as the record of
// shares has it.
type EngineContainer struct {
	Engine string        `json:"engine"`
	Name   string        `json:"name,omitempty"`
	First  *peer.Process `json:"first"` // the container's first process; nil: ForgetContainer tells of the end
}

// Whose names a described container in errors. A program of nvsharectl run is in none.
func Whose(c *api.Container) string {
	if c.GetEngine() == node.RunEngine {
		return fmt.Sprintf("program %q", c.Name)
	}
	return fmt.Sprintf("container %.12s", c.GetId())
}

// FirstProcess returns the first process of a described container. It refuses a
// container whose processes would count to another tenant: a limit would hold for
// nobody, or for others.
func (b *Book) FirstProcess(c *api.Container, pid uint32) (*peer.Peer, error) {
	p, err := b.Peers.FindPID(int32(pid))
	if err != nil {
		return nil, status.Errorf(codes.FailedPrecondition, "%s: its first process: %v", Whose(c), err)
	}
	if p.Account != peer.ContainerAccount+c.Id {
		p.Close()
		who := p.Account
		if id, ok := strings.CutPrefix(who, peer.ContainerAccount); ok {
			who = api.Tenant(&api.Container{Id: id}, 0)
		}
		return nil, status.Errorf(codes.FailedPrecondition, "the processes of %s count to %s, because the cgroup does not have the container's id or belongs to a user", Whose(c), who)
	}
	return p, nil
}

// DescribeFromHook answers a control call of the OCI hook. Without an error the daemon
// owns the Peer afterwards.
func (b *Book) DescribeFromHook(c *api.Container, p *peer.Peer) (*api.DescribeContainerResponse, error) {
	if err := b.Drained(c); err != nil {
		return nil, err
	}
	to := b.Shares.Tenants[p.Account]
	to.Pod, to.Has, to.Reach = PodTerms(c), c.Gpus, c.Reach
	holders := b.countPromises
	if c.Engine == node.RunEngine { // root has asked, or one of the control group
		holders = b.describePromises
	}
	for _, g := range b.Order {
		if request := PromisedBy(to.On(g.UUID)); len(c.Gpus) == 0 || slices.Contains(c.Gpus, g.UUID) {
			if err := b.promisable(fmt.Sprintf("GPU %d", g.Index), g.UUID, p.Account, request, api.Tenant(c, 0), holders); err != nil {
				return nil, err
			}
		}
	}
	to.Engine = &EngineContainer{c.Engine, c.Name, &p.Process}
	if err := b.ChangeShares(p.Account, to, false); err != nil {
		return nil, status.Error(codes.Unavailable, err.Error())
	}
	b.watchFirst(c.Id, p)
	return b.Describe(c, nil), nil
}

// watchFirst forgets a container when its first process is dead.
func (b *Book) watchFirst(id string, p *peer.Peer) {
	if old := b.Firsts[id]; old != nil {
		old.Close()
	}
	b.Firsts[id] = p
	b.Go(func() {
		if p.AwaitDeath() != nil {
			return // the daemon has ended, or the container was described again
		}
		b.Do(func() {
			if b.Firsts[id] == p {
				b.Forget(id)
			}
		})
	})
}

// RestoreFirst watches a container of an earlier scheduler, or forgets it if it has
// stopped meanwhile.
func (b *Book) RestoreFirst(id string, e EngineContainer) {
	if e.First == nil {
		return
	}
	b.OnceKnown(nil, fmt.Sprintf("container %.12s (%s) runs", id, e.Name), func() error {
		if b.Names[id] == nil || b.Firsts[id] != nil { // it was forgotten, or described again
			return nil
		}
		p, err := b.Find(*e.First)
		if err == nil {
			b.watchFirst(id, p)
			return nil
		}
		if !peer.Ended(err) { // it may run, with what it was promised
			return err
		}
		b.Log.Infof("container %.12s (%s) has stopped", id, e.Name)
		b.Forget(id)
		return nil
	})
}

// Forget drops the names and all settings of a container.
func (b *Book) Forget(id string) {
	account := peer.ContainerAccount + id
	if _, ok := b.Shares.Tenants[account]; ok {
		_ = b.ChangeShares(account, TenantShares{}, true) // says whose they were
	}
	delete(b.Names, id)
	if p := b.Firsts[id]; p != nil {
		p.Close()
		delete(b.Firsts, id)
	}
}

// Describe answers the control call. It keeps c, with the terms of the last
// description where keep says so: the daemon owns the latest good value.
func (b *Book) Describe(c *api.Container, keep *api.Keep) *api.DescribeContainerResponse {
	old := b.Names[c.Id]
	b.staysWhereItIs(c)
	if old != nil {
		terms := c.Terms()
		terms.Copy(old.Terms(), keep.Fields()|api.FixedFields)
		c.SetTerms(terms)
	}
	b.Names[c.Id] = c
	close(b.Described)
	b.Described = make(chan struct{})
	// The answer is encoded while the loop goes on.
	resp := &api.DescribeContainerResponse{New: proto.Clone(c).(*api.Container)}
	if old != nil {
		resp.Old = proto.Clone(old).(*api.Container)
	}
	account := peer.ContainerAccount + c.Id
	was := b.Shares.Tenants[account]
	b.SetPodTerms(c)
	is := b.Shares.Tenants[account]
	for _, g := range b.Order {
		if b.has(account, g.UUID) {
			resp.Changes = append(resp.Changes, ShareChange(g, account, was, is))
		}
	}
	return resp
}

// staysWhereItIs corrects the description of a container that has moved: who describes it
// may know only on which GPU it began.
func (b *Book) staysWhereItIs(c *api.Container) {
	if is := b.GpuOf(c.Id); is != "" && len(c.Gpus) == 1 && slices.Contains(c.Reach, is) {
		c.Gpus = []string{is}
	}
}

// GpuOf returns the one GPU of a container, by its UUID; "": it has none, or several.
func (b *Book) GpuOf(id string) string {
	has := b.Names[id].GetGpus()
	if has == nil {
		has = b.Shares.Tenants[peer.ContainerAccount+id].Has // told to an earlier scheduler
	}
	if len(has) != 1 {
		return ""
	}
	return has[0]
}

// PlaceOf returns the GPU on which a container is; the zero UUID: that is not known, or it is
// not one. A container that may move has the one in its environment on which it began.
func (b *Book) PlaceOf(account string) wire.UUID {
	id, container := strings.CutPrefix(account, peer.ContainerAccount)
	if !container {
		return wire.UUID{}
	}
	uuid, err := wire.ParseUUID(b.GpuOf(id))
	if err != nil || b.Gpus[uuid] == nil {
		return wire.UUID{}
	}
	return uuid
}

// HasMoved notes that a container's processes are on another GPU.
func (b *Book) HasMoved(id string, from, to *node.GPU) {
	c := b.Names[id]
	if len(c.GetReach()) == 0 || !slices.Equal(c.Gpus, []string{from.UUID}) {
		return
	}
	c = proto.Clone(c).(*api.Container) // others may read the old one
	c.Gpus = []string{to.UUID}
	b.Names[id] = c
	b.SetPodTerms(c)
}

// SetPodTerms puts the terms of a described container in force.
func (b *Book) SetPodTerms(c *api.Container) {
	account := peer.ContainerAccount + c.Id
	old := b.Shares.Tenants[account]
	to := old
	switch {
	case c.Engine == "":
		to.Engine = nil // the plugin describes the container now
	case to.Engine == nil:
		to.Engine = &EngineContainer{Engine: c.Engine, Name: c.Name}
	}
	if to.Pod, to.Has, to.Reach = PodTerms(c), c.Gpus, c.Reach; to.IsZero() {
		to.Has, to.Reach = nil, nil // b.Names has the GPUs as long as they matter
	}
	if to.Pod != old.Pod || to.Engine != old.Engine || !slices.Equal(to.Has, old.Has) || !slices.Equal(to.Reach, old.Reach) {
		// In force also if the record fails: after a restart the plugin describes
		// the container again.
		_ = b.ChangeShares(account, to, true)
	}
}

// Rules bound what pods may ask for, by namespace. They do not hold for containers outside
// Kubernetes, for which only root can ask, nor for what root sets with nvsharectl. The zero
// Rules allow everything.
type Rules struct {
	// Latency and Gang are the namespaces whose pods may have the priority latency, and
	// gangs; nil: all. Overlap is the same for overlap groups.
	Latency, Gang, Overlap []string
	Weight                 api.Bounds // the greatest weights
}

func allows(namespaces []string, namespace string) bool {
	return namespaces == nil || slices.Contains(namespaces, api.AllNamespaces) || slices.Contains(namespaces, namespace)
}

// Bound returns the terms that a container of a namespace may have, "" outside Kubernetes,
// and an error that says what was refused; nil: nothing.
func (r Rules) Bound(namespace string, t api.Terms) (api.Terms, error) {
	if namespace == "" {
		return t, nil
	}
	var refused []error
	refuse := func(what, flag, value string) {
		refused = append(refused, fmt.Errorf("%s is not allowed in namespace %q: see %s of nvshare-scheduler (Helm: scheduler.%s)", what, namespace, flag, value))
	}
	if t.Priority == api.Priority_PRIORITY_LATENCY && !allows(r.Latency, namespace) {
		refuse("priority latency", "--latency-namespaces", "latencyNamespaces")
		t.Priority = api.Priority_PRIORITY_UNSPECIFIED
	}
	if t.Gang != "" && !allows(r.Gang, namespace) {
		refuse("a gang", "--gang-namespaces", "gangNamespaces")
		t.Gang = ""
	}
	if t.Overlap != "" && !allows(r.Overlap, namespace) {
		refuse("an overlap group", "--overlap-namespaces", "overlapNamespaces")
		t.Overlap = ""
	}
	if most, bounded := r.Weight.Of(namespace); bounded && t.Weight > most {
		refuse(fmt.Sprintf("weight %d, above %d,", t.Weight, most), "--max-weight", "maxWeight")
		t.Weight = most
	}
	return t, errors.Join(refused...)
}
