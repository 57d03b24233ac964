// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"github.com/sirupsen/logrus"

	"github.com/nvshare/nvshare/cdi"
	"github.com/nvshare/nvshare/plugin"
	"github.com/nvshare/nvshare/plugin/dra"
)

// headStart bounds how long the plugin waits for the first look at the GPUs before it
// registers. A cold driver takes seconds; a broken one may hang.
const headStart = 5 * time.Second

// service is all that serves a node. Its parts end together.
//
// While a plugin is replaced by the next one (a DaemonSet with maxSurge), the node has two
// services. Both are registered with the runtime, and a container that one of them has
// adjusted is left alone by the other, so no container is created without a plugin. Files,
// specs and what the scheduler and the API server are told belong to the one that leads.
type service struct {
	flags
	log        logrus.FieldLogger
	runDir     string // as seen from here
	node       *node
	containers *plugin.Containers
	plugin     *plugin.Plugin
	pods       *live       // nil: there is no API server
	driver     *dra.Driver // nil: GPUs are not given by claims

	leads           chan struct{} // is closed when the service leads
	register, serve func()        // with the runtime; the kubelet
	count           func()        // what kube-scheduler counts
	endPeek         func()        // ends the looks of serveBeside

	ctx    context.Context // ends when a part has ended
	cancel context.CancelFunc
	parts  sync.WaitGroup
	silent <-chan struct{} // is closed once the service's state is written no more
	mu     sync.Mutex
	failed error // of the parts
}

func newService(ctx context.Context, f flags, n *node, runDir string) (*service, error) {
	s := &service{flags: f, log: n.log, runDir: runDir, node: n, containers: plugin.NewContainers(n.log), leads: make(chan struct{}), endPeek: func() {}}
	s.containers.PromiseMemory = uint64(f.promiseMemory)
	s.containers.MayExclude = func(namespace string) bool {
		return slices.Contains(f.exclusion, "*") || slices.Contains(f.exclusion, namespace)
	}
	s.containers.MostCore = func(namespace string) uint32 {
		if most, bounded := f.mostCore.Of(namespace); bounded {
			return most
		}
		return 100
	}
	n.health = &s.containers.Health
	var err error
	if s.driver, err = f.driver(s.containers, n.cdiDir, s.log); err != nil {
		return nil, err
	}
	s.plugin = plugin.New(s.log, s.containers)
	s.plugin.ShimDir = n.paths.ShimDir
	if namespace, err := os.ReadFile(namespaceFile); err == nil {
		if name, err := os.Hostname(); err == nil {
			s.plugin.OwnPod = strings.TrimSpace(string(namespace)) + "/" + name
		}
	}
	s.ctx, s.cancel = context.WithCancel(ctx)
	s.silent = publish(s.ctx, runDir, s.leads, n.health, s.alive, s.log)
	if s.pods, err = f.kube.watch(s.ctx, s.plugin, s.log); err != nil {
		return nil, errors.Join(err, s.end())
	}
	if f.kube.startupTaint {
		go func() {
			select {
			case <-s.containers.Registered():
				s.pods.w.RemoveTaint(s.ctx)
			case <-s.ctx.Done():
			}
		}()
	}
	s.plugin.Audit, s.plugin.Report = plugin.Audit(f.audit), s.pods.unmanaged
	if s.driver != nil {
		s.containers.Claims = s.driver.Claims()
	}
	runtime := plugin.Connection{Socket: cdi.OnHost(f.hostRoot, f.nriSocket), Name: "nvshare", Index: f.index}
	s.register = s.part(func() error { return plugin.Run(s.ctx, runtime, s.plugin) })
	s.serve, s.count = func() {}, func() {}
	if f.kube.advertise || s.driver != nil && s.pods != nil {
		s.count = s.part(func() error {
			s.pods.w.Advertise(s.ctx, s.plugin, func(why error) { s.containers.Health.Problem("advertise", why) })
			return nil
		})
	}
	if s.driver != nil {
		s.serve = s.part(func() error { return s.driver.Run(s.ctx) })
	}
	return s, nil
}

// alive returns once the locks are free that requests of the runtime and the kubelet need. Whoever has
// them waits for no other program: so it always returns, unless the service is stuck.
func (s *service) alive() {
	s.containers.GPU("")
	if s.driver != nil {
		s.driver.Alive()
	}
}

// part returns a function that starts a part of the service, once.
func (s *service) part(run func() error) (start func()) {
	return sync.OnceFunc(func() {
		s.parts.Go(func() {
			defer s.cancel()
			if err := run(); err != nil {
				s.mu.Lock()
				s.failed = errors.Join(s.failed, err)
				s.mu.Unlock()
			}
		})
	})
}

// end ends the parts, and returns the errors of those that failed. The driver's sockets, and the file
// of the service's state, are removed then.
func (s *service) end() error {
	s.cancel()
	s.parts.Wait()
	select {
	case <-s.silent:
	case <-time.After(headStart): // it is stuck
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.failed
}

func (s *service) found(inv *plugin.Inventory) {
	s.plugin.SetInventory(inv)
	if s.driver != nil {
		s.driver.SetInventory(inv)
	}
}

// refuse has pods refused that ask before the first look at the GPUs.
func (s *service) refuse() {
	const notLooked = "the first look at the GPUs is not finished"
	s.plugin.SetInventory(plugin.Unavailable(errors.New(notLooked)))
	s.node.health.Waits(nodePart, notLooked)
}

// serveBeside serves beside an earlier plugin, whose files and specs stay.
func (s *service) serveBeside() {
	ctx, cancel := context.WithCancel(s.ctx)
	looked, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		s.node.watch(ctx, false, s.found, sync.OnceFunc(func() { close(looked) }))
	}()
	s.endPeek = func() {
		cancel()
		<-ended
	}
	select {
	case <-looked:
	case <-ended:
	}
	s.register()
	s.serve()
}

// lead serves alone, until a part ends.
func (s *service) lead() error {
	close(s.leads)
	if s.driver != nil {
		go s.dra.serveMetrics(s.ctx, retryInterval, s.driver, s.log)
		s.driver.Lead()
	}
	s.serve()
	s.count()
	go s.containers.Run(s.ctx, func(ctx context.Context) (plugin.Scheduler, error) {
		return dialScheduler(ctx, s.runDir, s.log, s.pods)
	})
	looked, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		s.endPeek()
		s.node.watch(s.ctx, true, s.found, sync.OnceFunc(func() { close(looked) }))
	}()
	// Without a plugin, pods that ask start without a GPU, silently. So the plugin
	// registers in any case.
	select {
	case <-looked:
	case <-time.After(headStart):
	case <-s.ctx.Done():
	}
	if _, err := daemon.SdNotify(false, daemon.SdNotifyReady); err != nil {
		s.log.Warnf("tell systemd that the plugin is ready: %v", err)
	}
	s.register()
	<-s.ctx.Done()
	err := s.end()
	// The files may be removed after the plugin's end: write none from here on.
	select {
	case <-ended:
	case <-time.After(headStart):
	}
	return err
}
