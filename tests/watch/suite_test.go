// SPDX-License-Identifier: Apache-2.0

package watch

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
)

// compiled compiles the programs once for all tests.
var compiled = sync.OnceValue(func() error {
	return Compile(context.Background(), "../..", filepath.Dir(os.Getenv("NVSHARE_TEST_SIMGPU")))
})

// newBed needs what make shim simgpu builds.
func newBed(t *testing.T, args ...string) *Bed {
	t.Helper()
	simgpu := os.Getenv("NVSHARE_TEST_SIMGPU")
	if simgpu == "" {
		t.Skip("LEFT OUT: NVSHARE_TEST_SIMGPU names no simulated GPU: make test-unit does")
	}
	dir, err := os.MkdirTemp("", "nvs") // sockets have short paths
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := compiled(); err != nil {
		t.Fatal(err)
	}
	b, err := NewBed(t.Context(), filepath.Dir(simgpu), dir, "gpus=1\nmemory_mib=4096\n", args...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	return b
}

func (b *Bed) must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// tenant is what -o json says of one.
type tenant struct {
	UID    uint32  `json:"uid"`
	State  string  `json:"state"`
	Got    float64 `json:"got"`
	Grants uint64  `json:"grants"`
	Share  struct {
		CoreLimit uint32 `json:"core_limit"`
	} `json:"share"`
}

// tenants returns those of GPU 0.
func (b *Bed) tenants(t *testing.T) ([]tenant, error) {
	text, err := b.Ctl(t.Context(), "status", "-o", "json")
	var r struct {
		GPUs []struct {
			Tenants []tenant `json:"tenants"`
		} `json:"gpus"`
	}
	if err == nil {
		err = json.Unmarshal([]byte(text), &r)
	}
	if err != nil {
		return nil, err
	}
	if len(r.GPUs) == 0 {
		return nil, fmt.Errorf("no GPU: %s", text)
	}
	return r.GPUs[0].Tenants, nil
}

// awaitTenants waits until so many tenants have had the GPU.
func (b *Bed) awaitTenants(t *testing.T, n int) {
	t.Helper()
	b.must(t, b.Await(t.Context(), func() error {
		all, err := b.tenants(t)
		had := 0
		for _, one := range all {
			if one.Grants > 0 {
				had++
			}
		}
		if err == nil && had < n {
			err = fmt.Errorf("%d tenants had the GPU: %+v", had, all)
		}
		return err
	}))
}
