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
)

// set answers the control call, which by has made.
func (d *Daemon) set(req *api.SetRequest, by author) (*api.SetResponse, error) {
	change, err := changeBy(req, by)
	if err != nil {
		return nil, err
	}
	uuid, gpus := "", d.order
	if req.Gpu != "" {
		g := d.findGPU(req.Gpu)
		if g == nil {
			return nil, noSuchGPU(req.Gpu)
		}
		uuid, gpus = g.UUID, []*gpu{g}
	}
	was := d.settings.set
	next := was.with(uuid, req.Unset, change)
	if d.settings.err != nil || next.All != was.All || !maps.Equal(next.GPUs, was.GPUs) {
		if err := d.settings.changeSettings(next); err != nil {
			return nil, err
		}
	}
	resp := &api.SetResponse{}
	if uuid == "" {
		resp.Changes = append(resp.Changes, changed(was.of(""), next.of("")))
	}
	for _, g := range gpus {
		c := changed(was.of(g.UUID), next.of(g.UUID))
		c.Uuid, c.Index = g.UUID, uint32(g.Index)
		resp.Changes = append(resp.Changes, c)
		d.putInForce(g, was.of(g.UUID), next.of(g.UUID), by)
	}
	return resp, nil
}

// changeBy reads what a request sets.
func changeBy(req *api.SetRequest, by author) (change setting, err error) {
	if req.QuantumNs != 0 {
		change.Quantum, change.QuantumBy = time.Duration(req.QuantumNs), by
	}
	if req.SwapShare != nil {
		change.SwapShare, change.SwapShareBy = percent(int(*req.SwapShare)), by
	}
	if err := change.check(); err != nil {
		return change, status.Error(codes.InvalidArgument, err.Error())
	}
	if req.Mode != api.Mode_MODE_UNSPECIFIED {
		mode, ok := schedModes[req.Mode]
		if !ok {
			return change, status.Errorf(codes.InvalidArgument, "set mode %v: unknown", req.Mode)
		}
		change.Mode, change.ModeBy = mode.String(), by
	}
	for _, name := range req.Unset {
		if !slices.ContainsFunc(settingParts, func(p part) bool { return p.name == name }) {
			return change, status.Errorf(codes.InvalidArgument, "unset %.64q: there is no such setting", name)
		}
	}
	return change, nil
}

// changed is what Set answers of two settings.
func changed(from, to setting) *api.Change {
	old, _ := modeNamed(from.Mode)
	mode, _ := modeNamed(to.Mode)
	return &api.Change{
		OldQuantumNs: int64(from.Quantum), NewQuantumNs: int64(to.Quantum), OldMode: apiMode(old), NewMode: apiMode(mode),
		OldSwapShare: uint32(from.SwapShare.percent), NewSwapShare: uint32(to.SwapShare.percent),
	}
}

// putInForce has a GPU be shared as it was set.
func (d *Daemon) putInForce(g *gpu, from, to setting, by author) {
	for _, p := range settingParts {
		old, now := p.text(from), p.text(to)
		d.noteSetting(g, "", false, p.name, old, now)
		if old != now {
			d.log.Infof("GPU %d: %s %s, by user %d; it was %s", g.Index, p.name, now, by.UID, old)
		}
	}
	g.quantum = to.Quantum
	g.mode, _ = modeNamed(to.Mode)
	if to.SwapShare != from.SwapShare && d.opts.SwapMemory != 0 {
		d.step(g, sched.SetSwapShare{Percent: to.SwapShare.percent})
	}
	if to.Quantum != from.Quantum {
		d.step(g, sched.SetQuantum{D: g.quantum})
	}
	if to.Mode != from.Mode {
		d.step(g, sched.SetMode{M: g.modeNow()})
	}
}

// config returns the settings of all GPUs, and those that were set by hand for one.
func (d *Daemon) config() (all []*api.ConfigValue) {
	for _, p := range settingParts {
		if p.text(d.settings.set.All) != "" {
			all = append(all, byHand(p, "", d.settings.set.All))
		} else {
			v := &api.ConfigValue{Name: p.name, Value: p.text(d.settings.set.Given), Origin: api.Origin_ORIGIN_DEFAULT}
			if slices.Contains(d.opts.Flags, p.name) {
				v.Origin = api.Origin_ORIGIN_FLAG
			}
			all = append(all, v)
		}
		for _, uuid := range slices.Sorted(maps.Keys(d.settings.set.GPUs)) {
			if s := d.settings.set.GPUs[uuid]; p.text(s) != "" {
				all = append(all, byHand(p, uuid, s))
			}
		}
	}
	return all
}

func byHand(p part, uuid string, s setting) *api.ConfigValue {
	v := &api.ConfigValue{Name: p.name, Uuid: uuid, Value: p.text(s), Origin: api.Origin_ORIGIN_HAND}
	if by := p.by(s); by != (author{}) {
		v.Author = &api.Author{Uid: by.UID, UnixTime: by.Unix}
	}
	return v
}
