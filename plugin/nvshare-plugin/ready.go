// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/cdi"
	"github.com/nvshare/nvshare/plugin"
)

const (
	// readyFile and nextFile are in the run directory: that of the plugin that has the
	// leader lock, and that of the one which serves beside it until it ends. The first line
	// says where the writer runs, see mountNamespace. Then come the reasons why the plugin does not
	// give GPUs, one a line; none when the plugin does.
	readyFile, nextFile = "plugin.ready", "plugin.next"
	// readyInterval is the time between two writes, and readyLife how long what was
	// written holds: a plugin that hangs is not ready.
	readyInterval = 5 * time.Second
	readyLife     = 30 * time.Second
)

// mountNamespace tells containers apart: each has one of its own.
func mountNamespace() string {
	name, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		return "unknown"
	}
	return name
}

// publish writes for isReady and isLive whether the plugin is ready, until ctx ends. leads is closed
// when the plugin leads. alive is called before each write but the first; it returns
// unless the plugin is stuck. publish is called before other goroutines use h. ended is closed once
// nothing is written any more.
func publish(ctx context.Context, runDir string, leads <-chan struct{}, h *plugin.Health, alive func(), log logrus.FieldLogger) (ended <-chan struct{}) {
	changed, end := make(chan struct{}, 1), make(chan struct{})
	h.OnChange(func() { plugin.Signal(changed) })
	go func() {
		defer close(end)
		file := filepath.Join(runDir, nextFile)
		defer func() { os.Remove(file) }()
		tick := time.Tick(readyInterval)
		for {
			select {
			case <-leads:
				leads = nil
				os.Remove(file)
				file = filepath.Join(runDir, readyFile)
			default:
			}
			text := mountNamespace() + "\n"
			for _, why := range h.NotReady() {
				text += strings.ReplaceAll(why, "\n", "; ") + "\n"
			}
			if err := cdi.ReplaceFile(file, []byte(text), 0o644, nil); err != nil {
				log.Debugf("say whether the plugin is ready: %v", err)
			}
			select {
			case <-ctx.Done():
				return
			case <-leads:
			case <-changed:
			case <-tick:
			}
			alive()
		}
	}()
	return end
}

// isReady returns why the plugin that uses a run directory does not give GPUs. In a pod it
// is the plugin of that pod, which may be about to replace another one; elsewhere it is the
// one that leads.
func isReady(runDir, namespaceFile string) error {
	if _, err := os.Stat(namespaceFile); err != nil {
		return said(filepath.Join(runDir, readyFile), "")
	}
	for _, name := range []string{readyFile, nextFile} {
		if err := said(filepath.Join(runDir, name), mountNamespace()); !errors.Is(err, errNotThere) {
			return err
		}
	}
	return errNotThere
}

// isLive returns why the plugin has to be started again: it has not said anything for long,
// although it could write (canWrite). A plugin that says that it gives no GPUs is alive, whatever
// the reason: it mends that itself, or nobody can by starting it again.
func isLive(runDir, namespaceFile string, canWrite func(dir string) error) error {
	if err := isReady(runDir, namespaceFile); !errors.Is(err, errSilent) || canWrite(runDir) != nil {
		return nil
	}
	return fmt.Errorf("%w: it has not written its state for %v, and could", errSilent, readyLife)
}

// canWrite says why what publish writes cannot be written.
func canWrite(dir string) error {
	f, err := os.OpenFile(dir, os.O_WRONLY|unix.O_TMPFILE, 0o600) // without a name, so that nothing stays
	if err != nil {
		return err
	}
	_, err = f.Write(make([]byte, os.Getpagesize()))
	return errors.Join(err, f.Close())
}

var errSilent = errors.New("nvshare-plugin hangs")

var errNotThere = errors.New("nvshare-plugin does not run here, or has not looked at the GPUs yet")

// said returns what a plugin has said in a file; errNotThere: no plugin has, or one that
// runs in another mount namespace. namespace "": whichever.
func said(file, namespace string) error {
	info, err := os.Stat(file)
	if err != nil {
		return fmt.Errorf("%w: %w", errNotThere, err)
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("%w: %w", errNotThere, err)
	}
	where, why, _ := strings.Cut(string(text), "\n")
	if namespace != "" && where != namespace {
		return errNotThere
	}
	if old := time.Since(info.ModTime()); old > readyLife {
		return fmt.Errorf("%w, was killed, or cannot write %s: it has not for %v", errSilent, file, old.Round(time.Second))
	}
	if why = strings.TrimSpace(why); why != "" {
		return errors.New(why)
	}
	return nil
}
