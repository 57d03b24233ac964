// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"strings"

	"github.com/sirupsen/logrus"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nvshare/nvshare/plugin"
	"github.com/nvshare/nvshare/sched/api"
)

// scheduler is a connection to nvshare-scheduler.
type scheduler struct {
	conn *api.Conn
	log  logrus.FieldLogger
	told func(plugin.Container, *api.DescribeContainerResponse, error)
}

var _ plugin.Describer = (*scheduler)(nil)

// dialScheduler connects to the scheduler. told, if not nil, is called with what
// came of each description.
func dialScheduler(ctx context.Context, runDir string, log logrus.FieldLogger, told func(plugin.Container, *api.DescribeContainerResponse, error)) (plugin.Describer, error) {
	conn, err := api.Dial(ctx, runDir)
	if err != nil {
		return nil, err
	}
	return &scheduler{conn, log, told}, nil
}

// Describe gives a container its names and shares. What the scheduler refuses is
// logged and left out: saying it again would change nothing.
func (s *scheduler) Describe(ctx context.Context, c plugin.Container) error {
	k := c.Keep
	resp, err := s.conn.DescribeContainer(ctx, &api.DescribeContainerRequest{Container: &api.Container{
		Id: c.ID, Name: c.Name, Namespace: c.Namespace, Pod: c.Pod, PodUid: c.PodUID, MemoryLimitBytes: c.MemoryLimit,
		Share: &api.Share{
			CoreLimit: c.Share.CoreLimit, CoreRequest: c.Share.CoreRequest, Weight: c.Share.Weight,
			Priority: c.Share.Priority, Gang: c.Share.Gang, MemoryMode: c.Share.MemoryMode,
		},
		Gpus: strings.FieldsFunc(c.GPUs, func(r rune) bool { return r == ',' }),
	}, Keep: &api.Keep{
		MemoryLimit: k.MemoryLimit, CoreLimit: k.CoreLimit, CoreRequest: k.CoreRequest,
		Weight: k.Weight, Priority: k.Priority, Gang: k.Gang, MemoryMode: k.MemoryMode,
	}})
	if s.told != nil {
		s.told(c, resp, err)
	}
	switch status.Code(err) {
	case codes.InvalidArgument, codes.ResourceExhausted:
		s.log.Warnf("the scheduler refuses names and shares of container %s (%s/%s): %v", c.ID, c.Namespace, c.Pod, err)
		return nil
	}
	return err
}

func (s *scheduler) Forget(ctx context.Context, id string) error {
	_, err := s.conn.ForgetContainer(ctx, &api.ForgetContainerRequest{Id: id})
	return err
}

func (s *scheduler) Known(ctx context.Context) (plugin.Known, error) {
	r, err := s.conn.Status(ctx, &api.StatusRequest{})
	if err != nil {
		return plugin.Known{}, err
	}
	k := plugin.Known{Memory: map[string]uint64{}}
	for _, c := range r.Containers {
		k.IDs = append(k.IDs, c.Id)
	}
	for _, g := range r.Gpus {
		k.Memory[g.Uuid] = g.MemoryBytes
		for _, p := range api.Promised(g) {
			k.Promises = append(k.Promises, plugin.Promise{
				ID: p.Container.GetId(), Who: api.Tenant(p.Container, p.Uid), UUID: g.Uuid, Percent: p.CoreRequest, Memory: p.MemoryBytes,
			})
		}
	}
	return k, nil
}

func (s *scheduler) Close() error { return s.conn.Close() }
