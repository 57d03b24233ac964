// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"

	"github.com/sirupsen/logrus"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nvshare/nvshare/cdi"
	"github.com/nvshare/nvshare/plugin"
	"github.com/nvshare/nvshare/sched/api"
)

// scheduler is a connection to nvshare-scheduler.
type scheduler struct {
	conn *api.Conn
	log  logrus.FieldLogger
	pods *live

	since uint64 // the latest event that was asked for
	run   int64  // of the scheduler, 0: nothing was asked yet

	migs   map[string]string // UUIDs of MIG devices, by the names that they have without NVML; nil: nothing was asked yet
	sliced map[string]bool   // UUIDs of GPUs whose tenants have shared by slices
	full   map[string]bool   // IDs of containers for which there was no room, as was said
}

var _ plugin.Scheduler = (*scheduler)(nil)

// dialScheduler connects to the scheduler. pods, if not nil, are told of its answers and
// of what it sees.
func dialScheduler(ctx context.Context, runDir string, log logrus.FieldLogger, pods *live) (plugin.Scheduler, error) {
	conn, err := api.Dial(ctx, runDir)
	if err != nil {
		return nil, err
	}
	return &scheduler{conn: conn, log: log, pods: pods, sliced: map[string]bool{}, full: map[string]bool{}}, nil
}

// Describe tells the scheduler the names and terms of a container. A refusal is
// logged, and not an error: the same description would be refused again, unless there was no room.
func (s *scheduler) Describe(ctx context.Context, c plugin.Container) error {
	described := &api.Container{Id: c.ID, Name: c.Name, Namespace: c.Namespace, Pod: c.Pod, PodUid: c.PodUID, Uid: c.UID,
		Gpus: slices.Clone(c.GPUs), Reach: c.Reach}
	for i, name := range described.Gpus {
		described.Gpus[i] = cmp.Or(s.migs[name], name)
	}
	described.SetTerms(c.Terms)
	resp, err := s.conn.DescribeContainer(ctx, &api.DescribeContainerRequest{Container: described, Keep: c.Keep.Keep()})
	full := status.Code(err) == codes.ResourceExhausted
	if full && s.full[c.ID] {
		return plugin.ErrFull // it was said
	}
	s.pods.answered(c, resp, err)
	switch {
	case err == nil:
		clear(s.full) // there may be room
	case full:
		s.full[c.ID] = true
		s.log.Warnf("the scheduler has no room for container %s (%s/%s), which has no limits until there is: %v", c.ID, c.Namespace, c.Pod, err)
		return plugin.ErrFull
	case status.Code(err) == codes.InvalidArgument:
		s.log.Warnf("the scheduler refuses names and shares of container %s (%s/%s): %v", c.ID, c.Namespace, c.Pod, err)
		return nil
	}
	return err
}

func (s *scheduler) Forget(ctx context.Context, id string) error {
	_, err := s.conn.ForgetContainer(ctx, &api.ForgetContainerRequest{Id: id})
	return err
}

// Report tells the scheduler what is wrong.
func (s *scheduler) Report(ctx context.Context, problems []string) error {
	_, err := s.conn.ReportPlugin(ctx, &api.ReportPluginRequest{Problems: problems})
	return err
}

func (s *scheduler) State(ctx context.Context) (plugin.State, error) {
	r, err := s.conn.Status(ctx, &api.StatusRequest{})
	if err != nil {
		return plugin.State{}, err
	}
	s.pods.bypassed(r.Unmanaged)
	state := plugin.State{GPUs: map[string]plugin.GPUState{}, On: map[string][]string{}}
	for _, c := range r.Containers {
		if c.Engine == "" { // else the scheduler itself forgets the container
			state.IDs = append(state.IDs, c.Id)
			if len(c.Reach) > 0 {
				state.On[c.Id] = c.Gpus
			}
		}
	}
	migs := map[string]string{}
	for _, g := range r.Gpus {
		names := []string{g.Uuid} // the plugin may know it by either
		if g.Mig != "" {
			migs[g.Mig] = g.Uuid
			names = append(names, g.Mig)
		}
		is := s.stateOf(g)
		for _, name := range names {
			state.GPUs[name] = is
			for _, p := range api.Promised(g) {
				state.Promises = append(state.Promises, plugin.Promise{
					ID: p.Container.GetId(), Who: api.Tenant(p.Container, p.Uid), UUID: name, Percent: p.CoreRequest, Memory: p.MemoryBytes,
				})
			}
		}
	}
	if s.migs != nil && !maps.Equal(migs, s.migs) {
		return plugin.State{}, errors.New("the MIG devices are others now: containers are described again")
	}
	s.migs = migs
	return state, s.news(ctx)
}

// stateOf returns what the scheduler says of a GPU. A GPU whose tenants have shared by
// slices is one where that works, until the scheduler is told to share in another way.
func (s *scheduler) stateOf(g *api.GPU) plugin.GPUState {
	m := g.GetModel()
	state := plugin.GPUState{Memory: g.MemoryBytes, Swap: g.Swap != nil, Room: g.GetSwap().GetCapacityBytes(), Drained: g.Drained, Fault: g.Fault, Model: cdi.Model{
		Brand: m.GetBrand(), Architecture: m.GetArchitecture(), ComputeCapability: m.GetComputeCapability(),
		DriverVersion: m.GetDriverVersion(), CUDAVersion: m.GetCudaVersion(),
	}}
	if s := g.GetSwap(); !s.GetArenaAuto() {
		state.Host = s.GetArenaLimitBytes()
	}
	switch {
	case g.Mode == api.Mode_MODE_AUTO && (g.Way == plugin.SharedBySlices || s.sliced[g.Uuid]):
		s.sliced[g.Uuid] = true
		state.Sharing = plugin.SharedBySlices
		return state
	case g.Mode == api.Mode_MODE_CONCURRENT:
		state.Sharing = plugin.SharedByOverlap
	default:
		state.Sharing = plugin.SharedByTurns
	}
	delete(s.sliced, g.Uuid)
	return state
}

// eventTypes are the types of the scheduler's events that are also events of pods.
var eventTypes = []api.EventType{api.EventType_EVENT_TYPE_OUT_OF_MEMORY, api.EventType_EVENT_TYPE_OOM_KILL, api.EventType_EVENT_TYPE_OVERLAP}

// news passes on what has happened to containers since the last call.
func (s *scheduler) news(ctx context.Context) error {
	if s.pods == nil {
		return nil
	}
	for {
		r, err := s.conn.Events(ctx, &api.EventsRequest{Since: s.since, Run: s.run, Types: eventTypes})
		if err != nil {
			return err
		}
		first := s.run == 0
		for _, e := range r.Events {
			if !first {
				s.pods.event(e)
			}
		}
		done := len(r.Events) == 0 || r.Next == s.since
		if s.since = r.Next; !first || done {
			s.run = r.Run
		}
		if done {
			return nil
		}
	}
}

func (s *scheduler) Close() error { return s.conn.Close() }
