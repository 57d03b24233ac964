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

	"github.com/nvshare/nvshare/cdi"
	"github.com/nvshare/nvshare/plugin"
)

const (
	// readyFile is in the run directory. It has the reasons why the plugin does not
	// give GPUs, one a line; it is empty when the plugin does.
	readyFile = "plugin.ready"
	// readyInterval is the time between two writes, and readyLife how long what was
	// written holds: a plugin that hangs is not ready.
	readyInterval = 5 * time.Second
	readyLife     = 30 * time.Second
)

// publish writes for isReady whether the plugin is ready, until ctx ends.
func publish(ctx context.Context, runDir string, h *plugin.Health, log logrus.FieldLogger) {
	file := filepath.Join(runDir, readyFile)
	changed := make(chan struct{}, 1)
	h.OnChange(func() {
		select {
		case changed <- struct{}{}:
		default: // a token is there already
		}
	})
	go func() {
		defer os.Remove(file)
		tick := time.NewTicker(readyInterval)
		defer tick.Stop()
		for {
			text := ""
			for _, why := range h.NotReady() {
				text += strings.ReplaceAll(why, "\n", "; ") + "\n"
			}
			if err := cdi.ReplaceFile(file, []byte(text), 0o644, nil); err != nil {
				log.Debugf("say whether the plugin is ready: %v", err)
			}
			select {
			case <-ctx.Done():
				return
			case <-changed:
			case <-tick.C:
			}
		}
	}()
}

// isReady returns why the plugin that uses a run directory does not give GPUs.
func isReady(runDir string) error {
	file := filepath.Join(runDir, readyFile)
	info, err := os.Stat(file)
	if err != nil {
		return fmt.Errorf("nvshare-plugin does not run: %w", err)
	}
	if old := time.Since(info.ModTime()); old > readyLife {
		return fmt.Errorf("nvshare-plugin has not written %s for %v: it hangs, was killed, or cannot write there", file, old.Round(time.Second))
	}
	text, err := os.ReadFile(file)
	if err == nil && len(text) > 0 {
		err = errors.New(strings.TrimSpace(string(text)))
	}
	return err
}
