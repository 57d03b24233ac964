// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/sirupsen/logrus"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/history"
	"github.com/nvshare/nvshare/sched/daemon/overlap"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/daemon/tenants"
)

// An overlap group is one tenant of its GPU. Its members are the containers whose terms name
// it; which they are is known from when they are described until they are forgotten. The
// MPS daemon of a group runs while it has a member.

func (d *Daemon) openOverlap() {
	if d.own.MPSControl == nil {
		return
	}
	d.overlap = overlap.New(overlap.Options{
		Dir:     filepath.Join(d.Opts.RunDir, api.OverlapBelow),
		Control: d.own.MPSControl,
		Starter: d.own.OverlapStarter,
		Changed: func(c overlap.Change) { d.Do(func() { d.noteOverlap(c) }) },
		Log:     d.Log,
	}, d.Peers)
}

// noteOverlap notes in the log and the events what happened to a group.
func (d *Daemon) noteOverlap(c overlap.Change) {
	if c.Group.GPU == "" {
		return // a group that an earlier scheduler has left
	}
	text := fmt.Sprintf("overlap group %s: %s", api.OverlapFor(c.Group.Name), c.Kind)
	if c.PID != 0 {
		text += fmt.Sprintf(" (pid %d)", c.PID)
	}
	level := logrus.InfoLevel
	if c.Err != nil {
		level = logrus.WarnLevel
		text += ": " + c.Err.Error()
	}
	d.Log.Log(level, text)
	g := d.FindGPU(c.Group.GPU)
	var members []*api.Container
	if c.Err != nil { // members have lost something
		for _, account := range d.tenants.MembersOf(g, c.Group.Name) {
			member, _ := d.TenantOf(account)
			members = append(members, member)
		}
	}
	if len(members) == 0 {
		members = append(members, nil)
	}
	for _, member := range members {
		d.History.AddCaused(d.EventOf(time.Now(), g, 0, &history.Event{Kind: api.EventType_EVENT_TYPE_OVERLAP, Names: member, Text: text}))
	}
}

// cannotOverlap says why a container cannot be in the overlap group that it names.
func (d *Daemon) cannotOverlap(c *api.Container) error {
	switch {
	case c.GetShare().GetOverlap() == "":
		return nil
	case d.overlap == nil:
		return fmt.Errorf("overlap groups are not possible with this scheduler")
	case d.tenants.OverlapGPU(c.Gpus) == nil:
		return fmt.Errorf("a member of an overlap group has exactly one GPU that is known here: name it")
	}
	return nil
}

// reviewOverlap has the groups run that have members, and members of the groups that are
// named share what all of them have.
func (d *Daemon) reviewOverlap(changed ...string) {
	if d.overlap == nil || d.discovered == 0 { // the GPUs are not known yet
		return
	}
	wanted := map[string]overlap.Group{}
	for _, t := range d.tenants.Shares.Tenants {
		namespace, uid, _, ok := api.SplitOverlap(t.Pod.Overlap)
		if g := d.tenants.OverlapGPU(t.Has); ok && g != nil {
			dir := api.OverlapDir(d.Opts.RunDir, t.Pod.Overlap, g.UUID)
			wanted[dir] = overlap.Group{Name: t.Pod.Overlap, GPU: g.UUID, UID: uid, Own: namespace != "", Dir: dir}
		}
	}
	d.overlap.Want(slices.Collect(maps.Values(wanted)))
	for _, group := range changed {
		if group == "" {
			continue
		}
		for _, g := range d.Order {
			for _, account := range d.tenants.MembersOf(g, group) {
				d.step(g, sched.SetShare{Tenant: account, Share: d.tenants.ShareOf(g, account)})
			}
		}
	}
}

// overlapDirOf returns the directory of the group that a container is in; "": it is in none.
func (d *Daemon) overlapDirOf(id string) string {
	t := d.tenants.Shares.Tenants[peer.ContainerAccount+id]
	if g := d.tenants.OverlapGPU(t.Has); g != nil && t.Pod.Overlap != "" {
		return api.OverlapDir(d.Opts.RunDir, t.Pod.Overlap, g.UUID)
	}
	return ""
}

// joinOverlap waits until the group of a program that has not started yet can be used.
func (s controlService) joinOverlap(ctx context.Context, id string) error {
	dir, who := "", ""
	if err := s.d.Ask(ctx, func() { dir, who = s.d.overlapDirOf(id), tenants.Whose(s.d.Names[id]) }); err != nil || dir == "" {
		return err
	}
	if err := s.awaitOverlap(ctx, who, dir); err != nil {
		s.d.Do(func() { s.d.tenants.Forget(id) })
		return err
	}
	return nil
}

func (s controlService) awaitOverlap(ctx context.Context, who, dir string) error {
	ctx, cancel := context.WithTimeout(ctx, overlap.Patience+time.Second)
	defer cancel()
	if err := s.d.overlap.Await(ctx, dir); err != nil {
		return status.Errorf(codes.FailedPrecondition, "%s: %v", who, err)
	}
	return nil
}

// describePatience bounds the wait of JoinOverlap for the plugin, which describes a container
// without waiting, while the runtime goes on.
const describePatience = 5 * time.Second

// JoinOverlap answers the OCI hook of a container that is about to start.
func (s controlService) JoinOverlap(ctx context.Context, req *api.JoinOverlapRequest) (*api.JoinOverlapResponse, error) {
	patience := time.After(describePatience)
	for {
		var c *api.Container
		var dir string
		var why error
		var described <-chan struct{}
		if err := s.d.Ask(ctx, func() {
			if c, described = s.d.Names[req.Id], s.d.tenants.Described; c == nil {
				return
			}
			if dir = s.d.overlapDirOf(req.Id); dir == "" {
				why = s.d.refusedOverlap(c, req.Overlap)
			}
		}); err != nil {
			return nil, err
		}
		if dir != "" {
			if err := s.awaitOverlap(ctx, tenants.Whose(c), dir); err != nil {
				return nil, err
			}
			return &api.JoinOverlapResponse{Dir: filepath.Join(api.OverlapBelow, filepath.Base(dir))}, nil
		}
		if c != nil {
			return nil, status.Errorf(codes.FailedPrecondition, "container %.12s: %v", req.Id, why)
		}
		select {
		case <-described:
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-patience:
			return nil, status.Errorf(codes.FailedPrecondition, "container %.12s: nobody has described it within %v: is nvshare-plugin running?", req.Id, describePatience)
		}
	}
}

// refusedOverlap says why a described container is not in the group that it was made for.
func (d *Daemon) refusedOverlap(c *api.Container, group string) error {
	asked := proto.Clone(c).(*api.Container)
	terms := asked.Terms()
	terms.Overlap = group
	asked.SetTerms(terms)
	if _, refused := d.own.Rules.Bound(c.Namespace, terms); refused != nil {
		return refused
	}
	if refused := d.cannotOverlap(asked); refused != nil {
		return refused
	}
	return fmt.Errorf("it was described without the overlap group %q: start it again", group)
}

// overlapProblems are the groups that do not run.
func (d *Daemon) overlapProblems() (problems []string) {
	if d.overlap == nil {
		return nil
	}
	for _, s := range d.overlap.States() {
		if s.Err != nil {
			problems = append(problems, fmt.Sprintf("overlap group %s on GPU %s: %v; its members run without it", api.OverlapFor(s.Group.Name), s.Group.GPU, s.Err))
		}
	}
	slices.SortFunc(problems, strings.Compare)
	return problems
}
