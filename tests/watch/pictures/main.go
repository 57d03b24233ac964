// SPDX-License-Identifier: Apache-2.0

// Command pictures makes the pictures of README: nvsharectl's status and top on a real
// terminal, as SVG, and the page in a browser, as PNG. Tenants run on a simulated GPU. It
// needs root, tmux and chromium; make pictures calls it.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/tests/watch"
)

// The terminal.
const (
	columns = 100
	rows    = 20
)

// watched is how long tenants run before a picture is taken: as long as a strip is.
const watched = 65 * time.Second

func main() {
	build := flag.String("build-dir", ".build", "directory that make build and simgpu filled")
	out := flag.String("o", "tests/watch/pictures", "directory for the pictures")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
	defer stop()
	if err := run(ctx, *build, *out); err != nil {
		fmt.Fprintln(os.Stderr, "pictures:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, build, out string) error {
	build, err := filepath.Abs(build)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "nvs")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if err := watch.Compile(ctx, ".", build); err != nil {
		return err
	}
	b, err := watch.NewBed(ctx, build, dir, "gpus=2\nmemory_mib=8192\n", "--anti-thrash", "on", "--tq", "200ms", "--swap-memory", "2Gi", "--web-addr", "127.0.0.1:0")
	if err != nil {
		return err
	}
	defer b.Close()
	page, err := b.Said(ctx, "page: ")
	if err != nil {
		return err
	}
	for _, t := range []struct {
		flags   []string
		program []string
	}{
		{[]string{"--name", "ml/train-a/main", "--gpu", "0", "--memory-limit", "2Gi"}, []string{"--mem-mib", "1536", "--depth", "40"}},
		{[]string{"--name", "ml/train-b/main", "--gpu", "0", "--core-limit", "25", "--memory-limit", "1Gi"}, []string{"--mem-mib", "640", "--depth", "40"}},
		{[]string{"--name", "web/chat/server", "--gpu", "0", "--core-request", "30"}, []string{"--mem-mib", "1024", "--depth", "20", "--idle-ms", "15"}},
		{[]string{"--name", "lab/notebook/jupyter", "--gpu", "1"}, []string{"--mem-mib", "512", "--depth", "10", "--idle-ms", "60"}},
	} {
		if err := b.Named(t.flags, "cuda-busy", append(t.program, "--report-ms", "0")...); err != nil {
			return err
		}
	}
	top := newTerminal(b, "top")
	defer top.close()
	if err := top.start(ctx, "nvsharectl top -d 1"); err != nil {
		return err
	}
	select {
	case <-time.After(watched):
	case <-ctx.Done():
		return ctx.Err()
	}
	status := newTerminal(b, "status")
	defer status.close()
	// The command's line stays on the screen, as in a shell.
	if err := status.start(ctx, `printf '$ nvsharectl\n'; nvsharectl; exec sleep 600`); err != nil {
		return err
	}
	for name, t := range map[string]*terminal{"top": top, "status": status} {
		var text string
		if err := b.Await(ctx, func() (err error) {
			if text, err = t.capture(ctx); err == nil && !strings.Contains(text, "train-b") {
				err = errors.New("the tenants are not on the terminal: " + text)
			}
			return err
		}); err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(out, name+".svg"), []byte(svg(text)), 0o644); err != nil {
			return err
		}
	}
	return browse(ctx, b, page, filepath.Join(out, "web.png"))
}

// terminal is a window of tmux.
type terminal struct {
	b    *watch.Bed
	name string
}

func newTerminal(b *watch.Bed, name string) *terminal { return &terminal{b, name} }

func (t *terminal) tmux(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "tmux", append([]string{"-S", filepath.Join(t.b.Dir, t.name+".tmux"), "-f", "/dev/null"}, args...)...)
	cmd.Env = append(t.b.Env, "LC_ALL=C.UTF-8", "TERM=xterm-256color")
	text, err := cmd.CombinedOutput()
	if err != nil {
		err = fmt.Errorf("tmux %s: %w %s", args[0], err, text)
	}
	return string(text), err
}

func (t *terminal) start(ctx context.Context, command string) error {
	_, err := t.tmux(ctx, "new-session", "-d", "-x", fmt.Sprint(columns), "-y", fmt.Sprint(rows), command, ";", "set", "status", "off")
	return err
}

// capture returns what is on the screen, with its colours.
func (t *terminal) capture(ctx context.Context) (string, error) {
	return t.tmux(ctx, "capture-pane", "-p", "-e")
}

func (t *terminal) close() { _, _ = t.tmux(context.Background(), "kill-server") }

// browse takes a picture of a page.
func browse(ctx context.Context, b *watch.Bed, page, to string) error {
	ctx, cancel := context.WithTimeout(ctx, watch.Patience)
	defer cancel()
	to, err := filepath.Abs(to)
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
		"--user-data-dir="+filepath.Join(b.Dir, "browser"), "--window-size=1000,840", "--virtual-time-budget=4000", "--screenshot="+to, page)
	cmd.Env = append(os.Environ(), "HOME="+b.Dir)
	if text, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("chromium: %w %s", err, text)
	}
	return nil
}
