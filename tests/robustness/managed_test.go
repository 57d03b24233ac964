// SPDX-License-Identifier: Apache-2.0

package robustness

import (
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/nvshare/nvshare/sched/checkpoint"
)

// Managed memory may be more than the GPU has, as natively, where swapping is on too: the driver moves it.
func TestManagedMemoryIsTheDrivers(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	s.configure(fmt.Sprintf("memory_mib=%d\n", gpuMiB))
	s.put(checkpoint.Name)
	s.buildTenant("memory-hog")
	s.startScheduler("--swap-memory", "1Gi")
	s.until("the scheduler swaps", func() error {
		if s.swap() == nil {
			return errors.New("not yet")
		}
		return nil
	})
	for _, env := range [][]string{s.env(), s.env("LD_PRELOAD=" + filepath.Join(s.build, "lib", "libnvshare.so"))} {
		cmd := exec.Command(filepath.Join(s.dir, "memory-hog"), "--managed", "1000", "500")
		cmd.Env = env
		out, err := cmd.Output()
		s.check(err)
		var has struct {
			MiB   int
			Error string
		}
		s.check(json.Unmarshal(out, &has))
		if has.MiB != 1000 || has.Error != "" {
			t.Errorf("%s", out)
		}
	}
}
