// SPDX-License-Identifier: Apache-2.0

// Command demo shows the main job of nvshare on this machine: two pods and, if podman is
// installed, a third container share one GPU. Its verdict comes from the GPU's own
// record, not from nvshare.
//
// Exit status 0: everything held. The demo needs root, uses a containerd of its own, and
// leaves nothing behind, however it ends.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/tests/node"
)

func main() {
	build := flag.String("build-dir", ".build", "directory that make build, simgpu and tools filled")
	flag.Parse()
	dir, err := filepath.Abs(*build)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(node.Isolated(dir, "demo-", func(work string) int {
		ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
		defer stop()
		d := &demo{
			build: dir, work: work,
			simulated: os.Getenv("SIM") == "1" || !haveDriver(),
			screen:    newScreen(os.Stdout),
		}
		held, err := d.run(ctx)
		switch {
		case ctx.Err() != nil:
			d.screen.say("interrupted: cleaning up")
			return 1
		case err != nil:
			d.screen.say("")
			fmt.Fprintln(os.Stderr, "demo:", err)
			if d.node != nil {
				fmt.Fprintln(os.Stderr, d.node.Logs(8))
			}
			return 1
		case !held:
			return 1
		}
		return 0
	}))
}

// haveDriver reports whether NVIDIA's kernel driver is loaded.
func haveDriver() bool {
	for _, path := range []string{"/proc/driver/nvidia/version", "/dev/nvidiactl"} {
		if _, err := os.Stat(path); err == nil {
			return true
		}
	}
	return false
}
