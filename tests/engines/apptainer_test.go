//go:build engines

// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/nvshare/nvshare/tests/node"
	"github.com/nvshare/nvshare/tests/readme"
)

// The recipe's commands give containers of Apptainer the driver by --nv, with it the shim, and turns: as
// root and as a user, with a limit of their own or that of their user.
func TestApptainer(t *testing.T) {
	root := unpacked(t, "apptainer", "sid", "apptainer", "dash", "coreutils", "libc-bin")
	e := must(shared.NewEngine("apptainer", root, map[string]string{filepath.Join(buildDir, "bin"): "/usr/local/bin", filepath.Join(buildDir, "lib"): "/usr/local/lib"}))(t)
	ctx := within(t)
	t.Log(must(e.Run(ctx, "apptainer", "--version"))(t))
	const uid = 1000
	const dir = "/srv/image"
	check(t, errors.Join(os.MkdirAll(filepath.Join(e.Root, "var/lib/apptainer/mnt/session"), 0o755), os.MkdirAll(filepath.Dir(filepath.Join(e.Root, dir)), 0o755), shared.WriteWorkloadDir(filepath.Join(e.Root, dir)),
		os.WriteFile(filepath.Join(e.Root, "etc/resolv.conf"), nil, 0o644), os.WriteFile(filepath.Join(e.Root, "etc/localtime"), nil, 0o644),
		os.WriteFile(filepath.Join(e.Root, "etc/ld.so.conf"), []byte("/usr/local/lib\n"+node.SimGPU+"/lib\n"), 0o644)))
	must(e.Run(ctx, "ldconfig"))(t)
	// As apptainer build puts it into images.
	check(t, errors.Join(os.MkdirAll(filepath.Join(e.Root, dir, ".singularity.d/env"), 0o755), os.WriteFile(filepath.Join(e.Root, dir, ".singularity.d/env/99-base.sh"),
		[]byte("export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}/.singularity.d/libs\n"), 0o755)))
	// This machine may not have all capabilities, which root's containers would ask for.
	conf := filepath.Join(e.Root, "etc/apptainer/apptainer.conf")
	check(t, os.WriteFile(conf, []byte(strings.Replace(string(must(os.ReadFile(conf))(t)), "root default capabilities = full", "root default capabilities = no", 1)), 0o644))
	// The simulated GPU's device nodes, so to say.
	e.Setenv("APPTAINER_BIND", node.SimGPU)
	e.Setenv("NVSHARE_SIMGPU_DIR", node.SimGPU+"/run")
	e.Setenv("USER", "user")
	must(shared.Ctl(ctx, "set", "--user", fmt.Sprint(uid), "--memory-limit", "2Gi"))(t)
	t.Cleanup(func() {
		must(shared.Ctl(within(t), "set", "--user", fmt.Sprint(uid), "--memory-limit", "none"))(t)
	})
	ran := 0
	for i, line := range must(readme.Commands("../../deployments/recipes/apptainer.md"))(t) {
		if strings.HasPrefix(line, "echo ") {
			must(e.Run(ctx, "sh", "-c", strings.Replace(line, "sudo ", "", 1)))(t)
			continue
		}
		ran++
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			argv := strings.Fields(strings.ReplaceAll(strings.TrimPrefix(line, "sudo "), "$USER", "user"))
			as, limit, whose := 0, uint64(0), uint32(0)
			switch {
			case slices.Contains(argv, "mine"):
				limit, whose = 4<<30, uid
			case slices.Contains(argv, "job"):
				limit = 8 << 30
			default:
				as, limit, whose = uid, 2<<30, uid
			}
			argv[slices.Index(argv, "IMAGE")] = dir
			command := func(program ...string) []string { return append(argv[:len(argv)-1:len(argv)-1], program...) }
			sizes := must(e.StartAs(as, fmt.Sprintf("apptainer-sizes-%d", i), command("/usr/bin/nvidia-smi")...))(t)
			if status, err := sizes.Wait(ctx); err != nil || status != 0 || !strings.Contains(sizes.Tail(5), fmt.Sprintf("/ %dMiB", limit>>20)) {
				t.Errorf("%q: %d, %v\n%s", sizes.Name, status, err, sizes.Tail(10))
			}
			known := clients(t, ctx)
			p := must(e.StartAs(as, fmt.Sprintf("apptainer-%d", i), command(busy("apptainer")...)...))(t)
			c := awaitTurns(t, ctx, p, known)
			if name := c.Container.GetName(); c.Bypassed != 0 || c.Interposed == 0 || c.Uid != whose || as == 0 && !slices.Contains(argv, name) || as != 0 && name != "" {
				t.Errorf("the scheduler knows %v", c)
			}
			end(t, ctx, p, c)
		})
	}
	if ran != 3 {
		t.Errorf("%d commands ran: the pattern is wrong", ran)
	}
}
