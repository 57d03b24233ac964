// SPDX-License-Identifier: Apache-2.0

// Command gpu measures nvshare on a real GPU: what the shim adds to a launch,
// how long the GPU stands still at a hand-over, and how fast two containers
// are that share the GPU, next to one that has it alone and next to the
// driver's own time slicing, all in the same run.
//
// It is started by run.sh from the bundle that bundle.sh makes, as root, and
// uses the node of the end-to-end tests: its own containerd, NRI, CDI from
// our own discovery. The containers see the host's /usr and /opt, so its
// PyTorch, and no other part of the host.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/tests/node"
)

func main() {
	bundle := flag.String("bundle", ".", "unpacked bundle")
	results := flag.String("results", "results", "directory for the results")
	seconds := flag.Float64("seconds", 8, "length of each window")
	flag.Parse()
	dir, err := filepath.Abs(*bundle)
	if err != nil {
		fatal(err)
	}
	out, err := filepath.Abs(*results)
	if err != nil {
		fatal(err)
	}
	os.Exit(node.Isolated(dir, "gpu-", func(work string) int {
		ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
		defer stop()
		b := &bench{bundle: dir, results: out, seconds: *seconds, python: pythonPath()}
		if err := b.run(ctx, work); err != nil {
			fmt.Fprintln(os.Stderr, "gpu:", err)
			if b.node != nil {
				fmt.Fprintln(os.Stderr, b.node.Logs(20))
			}
			return 1
		}
		return 0
	}))
}

func fatal(err error) {
	fmt.Fprintln(os.Stderr, "gpu:", err)
	os.Exit(1)
}

// pythonPath is the interpreter that has PyTorch: $PYTHON, or python3.
func pythonPath() string {
	if p := os.Getenv("PYTHON"); p != "" {
		return p
	}
	p, err := exec.LookPath("python3")
	if err != nil {
		return "/usr/bin/python3"
	}
	return p
}

type bench struct {
	bundle, results string
	seconds         float64
	python          string
	node            *node.Node
}

func (b *bench) run(ctx context.Context, work string) error {
	n, err := node.New(work, node.Options{Build: b.bundle})
	if err != nil {
		return err
	}
	b.node = n
	for _, step := range []func(context.Context) error{
		n.StartContainerd, n.BuildImages,
		func(ctx context.Context) error { return n.StartScheduler(ctx) },
		n.StartPlugin,
	} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	if err := b.save("cdi.yaml", b.cdiSpec()); err != nil {
		return err
	}
	if err := b.launchCost(ctx); err != nil {
		return fmt.Errorf("launch cost: %w", err)
	}
	if err := b.handovers(ctx); err != nil {
		return fmt.Errorf("hand-over: %w", err)
	}
	if err := b.gemm(ctx, work); err != nil {
		return fmt.Errorf("gemm: %w", err)
	}
	return nil
}

// cdiSpec is what the plugin wrote for this host.
func (b *bench) cdiSpec() string {
	files, _ := filepath.Glob("/var/run/cdi/nvshare.com-gpu.*")
	var text strings.Builder
	for _, f := range files {
		data, err := os.ReadFile(f)
		if err == nil {
			text.Write(data)
		}
	}
	return text.String()
}

func (b *bench) save(name, text string) error {
	return os.WriteFile(filepath.Join(b.results, name), []byte(text), 0o644)
}

func (b *bench) saveJSON(name string, v any) error {
	data, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	return b.save(name, string(data)+"\n")
}
