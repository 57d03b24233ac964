// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/containerd/nri/pkg/api"

	"github.com/nvshare/nvshare/cdi"
	sched "github.com/nvshare/nvshare/sched/api"
)

// silence is a scheduler's control socket that accepts and never answers: what
// a scheduler that hangs looks like.
func silence(t testing.TB) (dial func(context.Context) (Scheduler, error), accepted <-chan struct{}) {
	t.Helper()
	dir, err := os.MkdirTemp("", "nvs")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	l, err := net.Listen("unix", sched.SocketPath(dir))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	ch := make(chan struct{}, 1000)
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			t.Cleanup(func() { conn.Close() })
			ch <- struct{}{}
		}
	}()
	return func(ctx context.Context) (Scheduler, error) {
		conn, err := sched.Dial(ctx, dir)
		return &silent{conn}, err
	}, ch
}

type silent struct{ conn *sched.Conn }

func (s *silent) Describe(ctx context.Context, c Container) error {
	_, err := s.conn.DescribeContainer(ctx, &sched.DescribeContainerRequest{Container: &sched.Container{Id: c.ID}})
	return err
}
func (s *silent) Forget(ctx context.Context, id string) error {
	_, err := s.conn.ForgetContainer(ctx, &sched.ForgetContainerRequest{Id: id})
	return err
}
func (s *silent) Report(context.Context, []string) error { return nil }

func (s *silent) State(ctx context.Context) (State, error) {
	_, err := s.conn.Status(ctx, &sched.StatusRequest{})
	return State{}, errors.Join(err, errors.New("it answered"))
}
func (s *silent) Close() error { return s.conn.Close() }

// crowd gives a runtime n containers that use a GPU, three to a pod.
func (r *fakeRuntime) crowd(n int) {
	for i := range n {
		p := pod(nil)
		p.Id = fmt.Sprintf("crowd%03d", i/3)
		if i%3 == 0 {
			r.pods = append(r.pods, p)
		}
		r.ctrs = append(r.ctrs, &api.Container{
			Id: fmt.Sprintf("crowd-c%03d", i), PodSandboxId: p.Id, Name: fmt.Sprintf("c%d", i%3),
			Mounts: []*api.Mount{{Source: cdi.DefaultPaths.ShimDir, Destination: cdi.ShimDir}}, State: api.ContainerState_CONTAINER_RUNNING,
		})
	}
}

// beside500 starts a plugin on a node of 500 containers whose scheduler hangs.
func beside500(t testing.TB) *fakeRuntime {
	r := newRuntime(t, "v2.4.2")
	r.crowd(500)
	r.start()
	t.Cleanup(r.stop)
	dial, accepted := silence(t)
	containers := NewContainers(quiet())
	containers.callLimit = 2 * patience // who waits for a call waits for longer than the runtime does
	t.Cleanup(tell(t, containers, dial))
	run(t, r, containers)
	await(t, r.synced, "the registration")
	await(t, accepted, "a call to the scheduler")
	return r
}

// tell has names told through dial until the function that it returns is called.
func tell(t testing.TB, containers *Containers, dial func(context.Context) (Scheduler, error)) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		containers.Run(ctx, dial)
		close(done)
	}()
	return func() {
		cancel()
		await(t, done, "the end of Containers.Run")
	}
}

// With 500 containers and a scheduler that hangs every request is answered, and
// none waits for the scheduler: the runtime drops a plugin that does. (How fast they
// are answered, the benchmark says.)
func TestRequestsDoNotWaitForTheScheduler(t *testing.T) {
	r := beside500(t)
	asks := pod(map[string]string{Annotation: "nvshare.com/gpu=0", CoreRequestAnnotation: "1"})
	for i := range 100 {
		c := ctr("main")
		c.Id = fmt.Sprintf("new%03d", i)
		a, err := r.create(asks, c)
		if err != nil || len(a.GetCDIDevices()) != 1 {
			t.Fatalf("request %d: %v, %v", i, a, err) // a slow plugin is dropped: no devices
		}
		if err := r.remove(asks, c); err != nil {
			t.Fatal(err)
		}
	}
}

// BenchmarkCreateContainer is one request of the runtime beside 500 containers
// and a scheduler that hangs, through NRI's own sockets and protocol.
func BenchmarkCreateContainer(b *testing.B) {
	r := beside500(b)
	asks := pod(map[string]string{Annotation: "nvshare.com/gpu=0", MemoryLimitAnnotation: "8Gi", CoreRequestAnnotation: "1"})
	var took []time.Duration
	for b.Loop() {
		c := ctr("main")
		c.Id = fmt.Sprintf("new%06d", len(took))
		start := time.Now()
		a, err := r.create(asks, c)
		took = append(took, time.Since(start))
		if err != nil || len(a.GetCDIDevices()) != 1 {
			b.Fatalf("got %v, %v", a, err)
		}
		b.StopTimer()
		if err := r.remove(asks, c); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
	slices.Sort(took)
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
	b.ReportMetric(ms(took[len(took)/2]), "p50-ms")
	b.ReportMetric(ms(took[len(took)*99/100]), "p99-ms")
	b.ReportMetric(ms(took[len(took)-1]), "max-ms")
}

// stop and remove, as a runtime does with each container.
func (r *fakeRuntime) remove(pod *api.PodSandbox, ctr *api.Container) error {
	ctx := context.Background()
	_, err := r.nri.StopContainer(ctx, &api.StopContainerRequest{Pod: pod, Container: ctr})
	return errors.Join(err, r.nri.RemoveContainer(ctx, &api.RemoveContainerRequest{Pod: pod, Container: ctr}))
}

// resources are what a leak would show in, each a count.
func resources(t *testing.T) (goroutines, files int) {
	t.Helper()
	runtime.GC() // ends what only finalizers close
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return runtime.NumGoroutine(), len(entries)
}

// 500 pods come and go, each with an init container, a container that is
// restarted, an ephemeral one, a sidecar that asks for nothing and one that is
// refused. Nothing is left of them.
func TestChurnLeavesNothing(t *testing.T) {
	r := newRuntime(t, "v2.4.2")
	r.start()
	defer r.stop()
	containers, s := NewContainers(quiet()), newScheduler()
	defer tell(t, containers, s.dial)()
	run(t, r, containers)
	await(t, r.synced, "the registration")

	const pods, atOnce = 500, 4
	live := func(i int) error {
		p := pod(map[string]string{
			Annotation: "nvshare.com/gpu=0", CoreRequestAnnotation: "25",
			"gpu.nvshare.com/container.main": "nvshare.com/gpu=0", "gpu-memory-limit.nvshare.com/container.main": "4Gi",
			"gpu.nvshare.com/container.refused": "nvshare.com/gpu=99",
		})
		p.Id, p.Name, p.Uid = fmt.Sprintf("sandbox%04d", i), fmt.Sprintf("pod%04d", i), fmt.Sprintf("uid%04d", i)
		start := func(name string, attempt int) (*api.Container, error) {
			c := ctr(name)
			c.Id, c.PodSandboxId = fmt.Sprintf("%s-%s-%d", p.Id, name, attempt), p.Id
			a, err := r.create(p, c)
			if err == nil && len(a.GetCDIDevices()) != 1 {
				err = fmt.Errorf("%s was given %v", c.Id, a)
			}
			return c, err
		}
		// An init container ends before the next begins: 25 % are promised once.
		initial, err := start("init", 0)
		if err != nil {
			return err
		}
		if err := r.remove(p, initial); err != nil {
			return err
		}
		first, err := start("main", 0)
		if err != nil {
			return err
		}
		// The runtime may report the end of the first after the second's begin.
		second, err := start("main", 1)
		if err != nil {
			return err
		}
		if err := r.remove(p, first); err != nil {
			return err
		}
		if got := containers.limitOf(second.Id); got != 4<<30 {
			return fmt.Errorf("%s has the limit %d after its predecessor's end", second.Id, got)
		}
		if _, err := start("refused", 0); err == nil {
			return errors.New("a GPU that does not exist was given")
		}
		return r.remove(p, second)
	}
	round := func(n int) {
		t.Helper()
		var wg sync.WaitGroup
		for w := range atOnce {
			wg.Go(func() {
				for i := w; i < n; i += atOnce {
					if err := live(i); err != nil {
						t.Errorf("pod %d: %v", i, err)
						return
					}
				}
			})
		}
		wg.Wait()
	}
	round(atOnce) // opens what stays open
	s.await(t)
	goroutines, files := resources(t)
	round(pods)
	if t.Failed() {
		return
	}
	s.await(t)
	containers.mu.Lock()
	if left := len(containers.want) + len(containers.ended) + len(containers.live.byUID); left != 0 {
		t.Errorf("left are %v, %v, %v", containers.want, containers.ended, containers.live.byUID)
	}
	containers.mu.Unlock()
	// What ends, ends in its own time.
	limit := time.Now().Add(patience)
	for {
		g, f := resources(t)
		if g <= goroutines && f <= files {
			break
		}
		if time.Now().After(limit) {
			t.Fatalf("%d goroutines and %d descriptors, before it were %d and %d", g, f, goroutines, files)
		}
		time.Sleep(10 * time.Millisecond)
	}
	left, err := filepath.Glob(filepath.Dir(r.socket) + "/*/*")
	if err != nil || len(left) != 0 {
		t.Errorf("files left: %v, %v", left, err)
	}
}

func (cs *Containers) limitOf(id string) uint64 {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	return cs.want[id].Terms.MemoryLimit
}
