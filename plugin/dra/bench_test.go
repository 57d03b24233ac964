// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
)

// BenchmarkPrepareByKubelet has the driver prepare claims over the kubelet's socket, one after the
// other, and unprepare older ones, so that 40 of 80 slots of eight GPUs are in use. The API
// server is a fake one. Records are below DRA_BENCH_DIR, so that flushes reach a disk; CDI
// specs are in memory, as /run/cdi is.
func BenchmarkPrepareByKubelet(b *testing.B) {
	const inUse = 40
	dir, err := os.MkdirTemp(os.Getenv("DRA_BENCH_DIR"), "dra")
	check(b, err)
	b.Cleanup(func() { os.RemoveAll(dir) })
	memory, err := os.MkdirTemp("/dev/shm", "cdi")
	check(b, err)
	b.Cleanup(func() { os.RemoveAll(memory) })
	check(b, os.Symlink(memory, filepath.Join(dir, "cdi")))
	s := serve(b, dir)
	defer s.stop()
	s.SetInventory(inventory(b, someGPUs(8)))
	ctx := context.Background()
	request := func(i int) *drapb.Claim {
		c := claimOf(uid(i), part(fmt.Sprintf("gpu-51600000-0000-4000-8000-%012x", i%8), fmt.Sprintf("s%d", i), "10", "4Gi"))
		c.Name = fmt.Sprintf("c-%d", i)
		_, err := s.client.ResourceV1().ResourceClaims(c.Namespace).Create(ctx, c, metav1.CreateOptions{})
		check(b, err)
		return &drapb.Claim{Namespace: c.Namespace, Name: c.Name, Uid: string(c.UID)}
	}
	var claims []*drapb.Claim
	var took, back []time.Duration
	for b.Loop() {
		claim := request(len(claims))
		claims = append(claims, claim)
		begin := time.Now()
		r, err := s.kubelet.NodePrepareResources(ctx, &drapb.NodePrepareResourcesRequest{Claims: []*drapb.Claim{claim}})
		check(b, err)
		took = append(took, time.Since(begin))
		if e := r.Claims[claim.Uid].GetError(); e != "" {
			b.Fatal(e)
		}
		if old := len(claims) - 1 - inUse; old >= 0 {
			begin = time.Now()
			_, err := s.kubelet.NodeUnprepareResources(ctx, &drapb.NodeUnprepareResourcesRequest{Claims: []*drapb.Claim{claims[old]}})
			check(b, err)
			back = append(back, time.Since(begin))
		}
	}
	for name, all := range map[string][]time.Duration{"prepare": took, "unprepare": back} {
		if len(all) == 0 {
			continue
		}
		slices.Sort(all)
		for _, q := range []int{50, 99} {
			b.ReportMetric(float64(all[min(len(all)-1, len(all)*q/100)])/1e6, fmt.Sprintf("%s-p%d-ms", name, q))
		}
	}
	b.ReportMetric(60/b.Elapsed().Seconds()*float64(len(claims)), "claims/min")
}
