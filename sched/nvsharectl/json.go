// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strconv"
	"time"

	"github.com/nvshare/nvshare/sched/api"
)

// The types below are what -o json prints. Fields are only ever added. Times
// are seconds, sizes bytes; numbers that may exceed 2^53 are strings.

type statusJSON struct {
	Version        string      `json:"version"`
	UptimeSeconds  float64     `json:"uptime_seconds"`
	Healthy        bool        `json:"healthy"`
	Problems       []string    `json:"problems"`
	Clients        uint32      `json:"clients"`
	Connections    uint32      `json:"connections"`
	Refused        uint64      `json:"refused"`
	ProtocolErrors uint64      `json:"protocol_errors"`
	GPUs           []gpuJSON   `json:"gpus"`
	Containers     []container `json:"containers"`
}

type gpuJSON struct {
	Index         uint32       `json:"index"`
	UUID          string       `json:"uuid"`
	Name          string       `json:"name"`
	MemoryBytes   uint64       `json:"memory_bytes"`
	AntiThrash    string       `json:"anti_thrash"` // on, off
	TQSeconds     float64      `json:"tq_seconds"`
	GraceSeconds  float64      `json:"grace_seconds"`
	Epoch         string       `json:"epoch"`
	Grants        uint64       `json:"grants"`
	Revokes       uint64       `json:"revokes"`
	Fences        uint64       `json:"fences"`
	Reclaims      uint64       `json:"reclaims"`
	StaleReleases uint64       `json:"stale_releases"`
	Holders       []string     `json:"holders"` // ids of clients with the GPU
	Waiting       []string     `json:"waiting"`
	Clients       []clientJSON `json:"clients"`
	Memory        []memoryJSON `json:"memory"` // of containers and users with a limit, or with something reserved
}

// memoryJSON is what one container has of a GPU's memory, or a user's
// processes outside containers: then the id is empty.
type memoryJSON struct {
	Container  container `json:"container"`
	UID        uint32    `json:"uid"`
	LimitBytes uint64    `json:"limit_bytes"` // in force; 0: none
	UsedBytes  uint64    `json:"used_bytes"`
}

type clientJSON struct {
	ID              string    `json:"id"`
	PID             uint32    `json:"pid"`
	UID             uint32    `json:"uid"`
	Command         string    `json:"command"`
	Container       container `json:"container"`
	State           string    `json:"state"` // idle, waiting, holding, draining, lost, fenced
	ForSeconds      float64   `json:"for_seconds"`
	Epoch           string    `json:"epoch"`
	Connected       bool      `json:"connected"`
	Device          uint32    `json:"device"`
	Grants          uint64    `json:"grants"`
	HeldSeconds     float64   `json:"held_seconds"`
	WaitMaxSeconds  float64   `json:"wait_max_seconds"`
	Calls           uint64    `json:"calls"`
	GateWaits       uint64    `json:"gate_waits"`
	GateWaitSeconds float64   `json:"gate_wait_seconds"`
	MemoryBytes     uint64    `json:"memory_bytes"`
	MemoryPeakBytes uint64    `json:"memory_peak_bytes"`
	Interposed      uint32    `json:"interposed"`
	Bypassed        uint32    `json:"bypassed"`
	ShimVersion     string    `json:"shim_version"`
	ReservedBytes   uint64    `json:"reserved_bytes"`
}

type container struct {
	ID        string `json:"id"`
	Name      string `json:"name"`
	Namespace string `json:"namespace"`
	Pod       string `json:"pod"`
	PodUID    string `json:"pod_uid"`
	// As the pod's annotation says; 0: it says nothing.
	MemoryLimitBytes uint64 `json:"memory_limit_bytes"`
}

func seconds(ns int64) float64 { return time.Duration(ns).Seconds() }

func newContainer(c *api.Container) container {
	return container{c.GetId(), c.GetName(), c.GetNamespace(), c.GetPod(), c.GetPodUid(), c.GetMemoryLimitBytes()}
}

func newStatusJSON(r *api.StatusResponse) statusJSON {
	s := statusJSON{
		Version: r.Version, UptimeSeconds: seconds(r.UptimeNs),
		Healthy: len(r.Problems) == 0, Problems: append([]string{}, r.Problems...),
		Clients: r.Clients, Connections: r.Connections, Refused: r.Refused, ProtocolErrors: r.ProtocolErrors,
		GPUs: []gpuJSON{}, Containers: []container{},
	}
	for _, g := range r.Gpus {
		s.GPUs = append(s.GPUs, newGPUJSON(g))
	}
	for _, c := range r.Containers {
		s.Containers = append(s.Containers, newContainer(c))
	}
	return s
}

func newGPUJSON(g *api.GPU) gpuJSON {
	out := gpuJSON{
		Index: g.Index, UUID: g.Uuid, Name: g.Name, MemoryBytes: g.MemoryBytes,
		AntiThrash: api.AntiThrash(g.Mode), TQSeconds: seconds(g.QuantumNs), GraceSeconds: seconds(g.GraceNs),
		Epoch:  strconv.FormatUint(g.Epoch, 10),
		Grants: g.Grants, Revokes: g.Revokes, Fences: g.Fences, Reclaims: g.Reclaims, StaleReleases: g.StaleReleases,
		Holders: []string{}, Waiting: []string{}, Clients: []clientJSON{}, Memory: []memoryJSON{},
	}
	for _, c := range g.Clients {
		id := strconv.FormatUint(c.Id, 10)
		if isHolder(c) {
			out.Holders = append(out.Holders, id)
		}
		if c.State == api.ClientState_CLIENT_STATE_WAITING {
			out.Waiting = append(out.Waiting, id)
		}
		out.Clients = append(out.Clients, clientJSON{
			ID: id, PID: c.Pid, UID: c.Uid, Command: c.Command, Container: newContainer(c.Container),
			State: stateName(c), ForSeconds: seconds(c.SinceNs), Epoch: strconv.FormatUint(c.Epoch, 10), Connected: c.Connected,
			Device: c.Device, Grants: c.Grants, HeldSeconds: seconds(c.HeldNs), WaitMaxSeconds: seconds(c.WaitMaxNs),
			Calls: c.Calls, GateWaits: c.Waits, GateWaitSeconds: seconds(c.WaitNs),
			MemoryBytes: c.MemoryBytes, MemoryPeakBytes: c.MemoryPeakBytes,
			Interposed: c.Interposed, Bypassed: c.Bypassed, ShimVersion: c.ShimVersion,
			ReservedBytes: c.ReservedBytes,
		})
	}
	for _, m := range g.Memory {
		out.Memory = append(out.Memory, memoryJSON{newContainer(m.Container), m.Uid, m.LimitBytes, m.UsedBytes})
	}
	return out
}
