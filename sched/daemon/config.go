// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"maps"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/daemon/settings"
)

// set answers the control call, which by has made.
func (d *Daemon) set(req *api.SetRequest, by settings.Author) (*api.SetResponse, error) {
	change, err := changeBy(req, by)
	if err != nil {
		return nil, err
	}
	uuid, gpus, err := d.NamedGPUs(req.Gpu)
	if err != nil {
		return nil, err
	}
	was := d.settings.Set
	next := was.With(uuid, req.Unset, change)
	if d.settings.Err != nil || next.All != was.All || !maps.Equal(next.GPUs, was.GPUs) {
		if err := d.settings.Change(next); err != nil {
			return nil, err
		}
	}
	resp := &api.SetResponse{}
	if uuid == "" {
		resp.Changes = changed("", 0, was, next)
	}
	for _, g := range gpus {
		changes := changed(g.UUID, uint32(g.Index), was, next)
		resp.Changes = append(resp.Changes, changes...)
		for _, c := range changes {
			d.NoteSetting(g, "", false, c.Name, c.Old, c.New)
			if c.Old != c.New {
				d.Log.Infof("GPU %d: %s %s, by user %d; it was %s", g.Index, c.Name, c.New, by.UID, c.Old)
			}
		}
		d.putInForce(g, was.Of(g.UUID), next.Of(g.UUID))
	}
	return resp, nil
}

// changeBy reads what a request sets.
func changeBy(req *api.SetRequest, by settings.Author) (change settings.Setting, err error) {
	if req.QuantumNs != 0 {
		change.Quantum, change.QuantumBy = time.Duration(req.QuantumNs), by
	}
	if req.SwapShare != nil {
		change.SwapShare, change.SwapShareBy = settings.Percent(int(*req.SwapShare)), by
	}
	if err := change.Check(); err != nil {
		return change, status.Error(codes.InvalidArgument, err.Error())
	}
	if req.Mode != api.Mode_MODE_UNSPECIFIED {
		mode, ok := settings.SchedModes[req.Mode]
		if !ok {
			return change, status.Errorf(codes.InvalidArgument, "set mode %v: unknown", req.Mode)
		}
		change.Mode, change.ModeBy = mode.String(), by
	}
	for _, name := range req.Unset {
		if !slices.ContainsFunc(settings.SettingParts, func(p settings.Part) bool { return p.Name == name }) {
			return change, status.Errorf(codes.InvalidArgument, "unset %.64q: there is no such setting", name)
		}
	}
	return change, nil
}

// changed is what Set answers of a GPU.
func changed(uuid string, index uint32, was, next settings.Set) (all []*api.Change) {
	for _, p := range settings.SettingParts {
		all = append(all, &api.Change{Uuid: uuid, Index: index, Name: p.Name, Old: p.Text(was.Of(uuid)), New: p.Text(next.Of(uuid))})
	}
	return all
}

// putInForce has a GPU be shared as it was set.
func (d *Daemon) putInForce(g *node.GPU, from, to settings.Setting) {
	g.Quantum = to.Quantum
	g.Mode, _ = settings.ModeNamed(to.Mode)
	if to.SwapShare != from.SwapShare && d.Opts.SwapMemory != 0 {
		d.step(g, sched.SetSwapShare{Percent: to.SwapShare.Percent})
	}
	if to.Quantum != from.Quantum {
		d.step(g, sched.SetQuantum{D: g.Quantum})
	}
	if to.Mode != from.Mode {
		d.step(g, sched.SetMode{M: g.Mode})
	}
}

// config returns the settings of all GPUs, and those that were set by hand for one.
func (d *Daemon) config() (all []*api.ConfigValue) {
	for _, p := range settings.SettingParts {
		if p.Text(d.settings.Set.All) != "" {
			all = append(all, byHand(p, "", d.settings.Set.All))
		} else {
			v := &api.ConfigValue{Name: p.Name, Value: p.Text(d.settings.Set.Given), Origin: api.Origin_ORIGIN_DEFAULT}
			if slices.Contains(d.Opts.Flags, p.Name) {
				v.Origin = api.Origin_ORIGIN_FLAG
			}
			all = append(all, v)
		}
		for _, uuid := range slices.Sorted(maps.Keys(d.settings.Set.GPUs)) {
			if s := d.settings.Set.GPUs[uuid]; p.Text(s) != "" {
				all = append(all, byHand(p, uuid, s))
			}
		}
	}
	return all
}

func byHand(p settings.Part, uuid string, s settings.Setting) *api.ConfigValue {
	v := &api.ConfigValue{Name: p.Name, Uuid: uuid, Value: p.Text(s), Origin: api.Origin_ORIGIN_HAND}
	if by := p.By(s); by != (settings.Author{}) {
		v.Author = &api.Author{Uid: by.UID, UnixTime: by.Unix}
	}
	return v
}
