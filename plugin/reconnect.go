// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/nri/pkg/api"
	nrilog "github.com/containerd/nri/pkg/log"
	"github.com/containerd/nri/pkg/stub"
	"github.com/sirupsen/logrus"
)

// Connection says how to register with a runtime.
type Connection struct {
	Socket string // NRI's
	Name   string // the plugin's
	Index  string // two digits: plugins are called in ascending order
}

const (
	// dialMax bounds the wait for a runtime that is not there. Looking for its socket
	// is cheap, and pods that are created before the registration get no GPUs.
	dialMax = time.Second
	// registerMax bounds the wait after a registration that failed or did not last.
	// Each registration makes the runtime stop and list all containers.
	registerMax = 15 * time.Second
	// configureLimit is twice what runtimes allow for a registration.
	configureLimit = 10 * time.Second
	// syncLimit is five times what runtimes allow for the list of all containers. They may
	// send it later, see errSynchronizedLate.
	syncLimit = 10 * time.Second
	// settled is how long a registration must last to count as a good one.
	settled = 10 * time.Second
)

// Run keeps the plugin registered with the runtime until ctx ends. It returns
// an error only for a name or index that no runtime accepts.
func Run(ctx context.Context, c Connection, p *Plugin) error {
	if err := errors.Join(api.CheckPluginIndex(c.Index), api.CheckPluginName(c.Name)); err != nil {
		return err
	}
	dialWait := backoff{min: 50 * time.Millisecond, max: dialMax}
	registerWait := backoff{min: 200 * time.Millisecond, max: registerMax}
	waiting := false
	health := &p.containers.Health
	for ctx.Err() == nil {
		var dialer net.Dialer
		conn, err := dialer.DialContext(ctx, "unix", c.Socket)
		if err != nil {
			if !waiting && ctx.Err() == nil {
				p.log.Infof("waiting for the container runtime: %v", err)
				health.Waits(runtimePart, fmt.Sprintf("not registered with the container runtime: %v", err))
			}
			waiting = true
			dialWait.sleep(ctx)
			continue
		}
		waiting = false
		dialWait.reset()

		start := time.Now()
		err = register(ctx, conn, c, p)
		if ctx.Err() != nil {
			break
		}
		p.log.Warnf("lost the container runtime: %v; pods created now are not adjusted until it is back", err)
		if errors.Is(err, errNotSynchronized) || errors.Is(err, errNotConfigured) {
			health.Problem(runtimePart, err)
		} else {
			health.Waits(runtimePart, fmt.Sprintf("not registered with the container runtime: %v", err))
		}
		if time.Since(start) > settled {
			registerWait.reset()
		}
		registerWait.sleep(ctx)
	}
	return nil
}

// runtimePart is the part of Health that is about the runtime.
const runtimePart = "runtime"

var (
	errNotConfigured = fmt.Errorf("the container runtime did not configure the plugin within %v", configureLimit)

	// errNotSynchronized: NRI sends the list of all pods and containers in messages of
	// at least eight of them, and no message above 4 MiB. Then it closes the connection.
	errNotSynchronized = errors.New("the container runtime configured the plugin and then did not send the list of its containers, so new pods start without a GPU; " + tooLarge)

	// errSynchronizedLate: the runtime sends the list while it creates, starts and stops
	// nothing. While it waits for the end of a stop, it begins nothing else.
	errSynchronizedLate = errors.New("the container runtime configured the plugin and has not sent the list of its containers yet; either it is stopping a container with a long grace period: " +
		"new containers wait until that has ended, and get GPUs; or it cannot send the list, and new pods start without a GPU: " + tooLarge)
)

const tooLarge = "NRI cannot send the list when eight pods and containers are larger than 4 MiB together, mostly by long environments, arguments or annotations: " +
	"find them with crictl inspect, and make them smaller"

// register serves one connection until it ends, and closes it.
func register(ctx context.Context, conn net.Conn, c Connection, p *Plugin) error {
	defer conn.Close() // the stub leaves it open if the registration fails
	s := &session{Plugin: p, configured: make(chan struct{}), synchronized: make(chan struct{})}
	watched := &watchedConn{Conn: conn, asked: make(chan struct{}), gone: make(chan struct{})}
	// A stub that failed keeps its dead connection, so each connection has a new stub.
	plugin, err := stub.New(s, stub.WithPluginName(c.Name), stub.WithPluginIdx(c.Index),
		stub.WithConnection(watched), stub.WithLogger(stubLogger{p.log}))
	if err != nil {
		return fmt.Errorf("set up NRI plugin %s-%s: %w", c.Index, c.Name, err)
	}
	done := make(chan error, 1)
	go func() { done <- plugin.Run(ctx) }()

	limit := time.NewTimer(configureLimit)
	defer limit.Stop()
	gone := watched.gone
	for waiting := true; waiting; {
		select {
		case err := <-done:
			return err
		case <-ctx.Done():
			s.giveUp(plugin, watched.asked, done)
			return ctx.Err()
		case <-limit.C:
			s.giveUp(plugin, watched.asked, done)
			return errNotConfigured
		case <-gone:
			gone = nil
			select {
			case <-s.configured: // before that
			default:
				s.giveUp(plugin, watched.asked, done)
				return errGoneEarly
			}
		case <-s.configured:
			waiting = false
		}
	}
	limit.Reset(p.syncLimit)
	select {
	case <-s.synchronized:
	case err = <-done:
		return s.unlessSynchronized(ctx, err)
	case <-limit.C: // the connection may last
		s.late()
	}
	return s.unlessSynchronized(ctx, <-done)
}

var errGoneEarly = errors.New("the container runtime ended before it configured the plugin")

// watchedConn says when the stub's first request goes out, which is its registration, and when
// nothing more can be read.
type watchedConn struct {
	net.Conn
	first, last sync.Once // close asked, gone
	asked, gone chan struct{}
}

func (c *watchedConn) Write(b []byte) (int, error) {
	c.first.Do(func() { close(c.asked) })
	return c.Conn.Write(b)
}

func (c *watchedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if err != nil {
		c.last.Do(func() { close(c.gone) })
	}
	return n, err
}

// giveUp ends a stub whose runtime has not configured it. The stub waits for that for ever, whatever
// becomes of the connection and of its context: so a configuration comes from here, and fails. done is
// told when the stub ends by itself.
func (s *session) giveUp(plugin stub.Stub, asked <-chan struct{}, done <-chan error) {
	s.givenUp.Store(true)
	go func() {
		select {
		case <-asked: // the stub is set up
		case <-done:
			return
		}
		if p, ok := plugin.(api.PluginService); ok {
			_, _ = p.Configure(context.Background(), &api.ConfigureRequest{NRIVersion: "none"})
		}
	}()
}

// session is the plugin for the time of one connection.
type session struct {
	*Plugin
	givenUp      atomic.Bool
	once         sync.Once // closes configured
	syncOnce     sync.Once // closes synchronized
	configured   chan struct{}
	synchronized chan struct{}
	says         sync.Mutex // held while Health is told which of the two there is: a list, or none
}

// late says that the runtime has not sent its list yet, unless it has just done so.
func (s *session) late() {
	s.says.Lock()
	defer s.says.Unlock()
	select {
	case <-s.synchronized:
	default:
		s.log.Error(errSynchronizedLate)
		s.containers.Health.Problem(runtimePart, errSynchronizedLate)
	}
}

// unlessSynchronized says what the end of a connection means that the runtime never
// used.
func (s *session) unlessSynchronized(ctx context.Context, err error) error {
	select {
	case <-s.synchronized:
		return err
	default:
	}
	if ctx.Err() != nil {
		return err
	}
	return fmt.Errorf("%w (%v)", errNotSynchronized, err)
}

// Synchronize notes that the runtime asks the plugin about new pods from now on.
func (s *session) Synchronize(ctx context.Context, pods []*api.PodSandbox, ctrs []*api.Container) ([]*api.ContainerUpdate, error) {
	updates, err := s.Plugin.Synchronize(ctx, pods, ctrs)
	s.says.Lock()
	defer s.says.Unlock()
	s.syncOnce.Do(func() { close(s.synchronized) })
	var problem error
	if own := s.OwnPod; own != "" && !slices.ContainsFunc(pods, func(p *api.PodSandbox) bool { return p.GetNamespace()+"/"+p.GetName() == own }) {
		problem = fmt.Errorf("the container runtime does not know pod %s, in which the plugin runs: the kubelet uses another runtime, and new pods start without a GPU; nvshare needs containerd or CRI-O, and cri-dockerd has no NRI", own)
		s.log.Error(problem)
	}
	s.containers.Health.Problem(runtimePart, problem)
	return updates, err
}

// Configure notes that the runtime answers.
func (s *session) Configure(ctx context.Context, config, runtime, version string) (api.EventMask, error) {
	if s.givenUp.Load() {
		return 0, errGoneEarly
	}
	s.once.Do(func() { close(s.configured) })
	return s.Plugin.Configure(ctx, config, runtime, version)
}

// backoff waits between attempts: from min, doubled up to max. Jitter keeps the
// plugins of a node out of step.
type backoff struct {
	min, max, next time.Duration
}

func (b *backoff) reset() { b.next = 0 }

func (b *backoff) sleep(ctx context.Context) {
	b.next = min(max(b.min, 2*b.next), b.max)
	t := time.After(b.next/2 + rand.N(b.next/2+1))
	select {
	case <-ctx.Done():
	case <-t:
	}
}

// stubLogger logs the stub's lines at one level less, because the stub reports each
// step.
type stubLogger struct{ log logrus.FieldLogger }

var _ nrilog.Logger = stubLogger{}

func (l stubLogger) Debugf(_ context.Context, format string, args ...any) {
	l.log.Debugf(format, args...)
}
func (l stubLogger) Infof(_ context.Context, format string, args ...any) {
	l.log.Debugf(format, args...)
}
func (l stubLogger) Warnf(_ context.Context, format string, args ...any) {
	l.log.Warnf(format, args...)
}
func (l stubLogger) Errorf(_ context.Context, format string, args ...any) {
	l.log.Warnf(format, args...)
}
