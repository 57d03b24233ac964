// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/nvshare/nvshare/cdi"
	"github.com/nvshare/nvshare/plugin"
)

const (
	// watchInterval is the time between looks for changes that nobody announces: MIG devices, a GPU that
	// has gone, a driver that was loaded again. A look reads directories and wakes no GPU.
	watchInterval = 10 * time.Second
	// discoverLimit bounds a discovery: NVML can hang on a broken GPU.
	discoverLimit = 60 * time.Second
	// retryInterval is the time between attempts after one that failed: nobody
	// announces that a disk has room again.
	retryInterval = 5 * time.Second
	// partialInterval is the time until the next look after one for which NVML left something out. It is long
	// because a GPU that is lost stays so.
	partialInterval = time.Minute
)

// nodePart is the part of the health that is about GPUs, specs and files.
const nodePart = "node"

// node is this host: what it has, and where its specs go.
type node struct {
	log     logrus.FieldLogger
	options cdi.Options
	paths   cdi.Paths
	placed  *placed
	health  *plugin.Health
	cdiDir  string
	every   time.Duration // between looks for changes

	generate func(context.Context, cdi.Options, cdi.Paths) (*cdi.Generated, error)
	again    func() <-chan time.Time // when to look again after a partial look

	partial   bool     // NVML left something out of the last look
	seen      string   // fingerprint from before the last refresh; "" if that failed or changed a file
	hostFiles []string // what the last look found that the specs need of the host
	noCover   string   // why pods have a bind mount of the shim, as it was logged last
}

// refresh puts the placed files right, looks for GPUs and driver, and writes or
// removes the specs.
func (n *node) refresh(ctx context.Context) (*plugin.Inventory, error) {
	// The fingerprint is taken before the look, so no change is missed. If this look repaired something,
	// forget it: one more look then checks the repair.
	seen := n.fingerprint()
	n.seen, n.partial = "", false
	placed, err := n.placed.place()
	if err != nil {
		return nil, err
	}
	found, inv, err := n.see(ctx)
	if err != nil {
		return nil, err
	}
	if len(found.Specs) == 0 {
		removed, err := cdi.Remove(n.cdiDir, cdi.Kind, cdi.KindNRI)
		if err != nil {
			return nil, err
		}
		if !placed && !removed {
			n.seen = seen
		}
		n.log.Infof("%s (is the NVIDIA driver loaded? nvidia-smi -L lists its GPUs); CDI specs in %s removed: %t", found.Source, n.cdiDir, removed)
		return inv, nil
	}
	changed, err := cdi.Write(n.cdiDir, found.Specs...)
	if err != nil {
		return nil, err
	}
	if !placed && !changed {
		n.seen = seen
	}
	n.log.Infof("%d GPUs (%s): %s; CDI specs in %s written: %t", len(found.GPUs), found.Source, strings.Join(cdi.Names(found.GPUs), " "), n.cdiDir, changed)
	return inv, nil
}

// peek hands over what the node has, or why that is not known, and writes nothing: the files
// are another plugin's. It calls looked after the first look. Until ctx ends it looks again
// after that time if something has changed or the look before failed: nobody else would, and
// a plugin that gives no GPUs is not ready, so that the earlier plugin would never be ended.
// What it has handed over stays while a look fails.
func (n *node) peek(ctx context.Context, every time.Duration, found func(*plugin.Inventory), looked func()) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	seen, failure, known := "", "", false
	for {
		if now := n.fingerprint(); now != seen {
			_, inv, err := n.see(ctx)
			if ctx.Err() != nil {
				return
			}
			n.health.Problem(nodePart, err)
			switch {
			case err == nil:
				if failure, known = "", true; !n.partial {
					seen = now
				}
				found(inv)
			case err.Error() != failure: // tried again, not said again
				seen, failure = "", err.Error()
				if known {
					n.log.Errorf("GPUs or driver changed, and pods get the earlier ones: %v", err)
					break
				}
				n.log.Errorf("pods that ask for GPUs are refused until this is put right: %v", err)
				found(plugin.Unavailable(err))
			}
		}
		looked()
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// see returns what the node has, and writes nothing. It remembers which files of the host to look for.
func (n *node) see(ctx context.Context) (*cdi.Generated, *plugin.Inventory, error) {
	dir, why := cdi.EmptyDirFor(n.options.HostRoot, filepath.Dir(n.paths.ShimDir))
	if n.paths.EmptyDir = dir; why != "" && why != n.noCover { // pods see the shim through an overlay where that is sure to work
		n.log.Warnf("a container with CAP_SYS_ADMIN could change the shim of all containers, which is bound into pods and not below an overlay: %s", why)
	}
	n.noCover = why
	ctx, cancel := context.WithTimeout(ctx, discoverLimit)
	defer cancel()
	g, err := n.generate(ctx, n.options, n.paths)
	if err != nil {
		return nil, nil, err
	}
	n.hostFiles, n.partial = g.HostFiles, g.Partial
	return g, plugin.NewInventory(g.Spec(cdi.KindNRI), g.GPUs), nil
}

// look is the first refresh. If it fails, no GPU can be given until a refresh of watch
// succeeds.
func (n *node) look(ctx context.Context) *plugin.Inventory {
	inv, err := n.refresh(ctx)
	n.health.Problem(nodePart, err)
	if err != nil {
		if ctx.Err() == nil {
			n.log.Errorf("pods that ask for GPUs are refused until this is put right: %v", err)
		}
		return plugin.Unavailable(err)
	}
	return inv
}

// watch refreshes at SIGHUP and as soon as something changed, until ctx ends, and
// hands over the inventory. If the refresh fails the inventory stays, unless containers
// would not get what they need: engines do not find the devices, or a placed file is
// not right.
func (n *node) watch(ctx context.Context, found func(*plugin.Inventory)) {
	hangup := make(chan os.Signal, 1)
	signal.Notify(hangup, syscall.SIGHUP)
	defer signal.Stop(hangup)
	changed := cdi.Watch(ctx, n.options, append(n.placed.dirs(), n.cdiDir)...)
	var retry <-chan time.Time
	tick := time.NewTicker(n.every)
	defer tick.Stop()
	failure := ""
	for {
		if n.partial && retry == nil {
			retry = n.again()
		}
		force := false
		select {
		case <-ctx.Done():
			return
		case <-hangup:
			force = true
		case <-changed:
		case <-tick.C:
		case <-retry:
			force, retry = true, nil
		}
		if !force && n.fingerprint() == n.seen {
			continue
		}
		inv, err := n.refresh(ctx)
		n.health.Problem(nodePart, err)
		retry = nil
		if err != nil {
			retry = time.After(retryInterval)
		}
		switch {
		case err == nil:
			failure = ""
			found(inv)
		case ctx.Err() == nil && err.Error() != failure: // tried again, not said again
			failure = err.Error()
			if errors.Is(err, cdi.ErrForeign) || errors.As(err, new(errNotPlaced)) || !n.hasSpecs() {
				n.log.Errorf("pods that ask for GPUs are refused until this is put right: %v", err)
				found(plugin.Unavailable(err))
				break
			}
			n.log.Errorf("GPUs or driver changed, but the CDI specs are still the old ones: %v", err)
		}
	}
}

// hasSpecs tells whether specs are there, of now or earlier ones.
func (n *node) hasSpecs() bool {
	for _, kind := range []string{cdi.Kind, cdi.KindNRI} {
		if _, err := os.Stat(filepath.Join(n.cdiDir, cdi.FileName(kind))); err != nil {
			return false
		}
	}
	return true
}

// fingerprint covers what refresh reads and what it writes.
func (n *node) fingerprint() string {
	var b strings.Builder
	b.WriteString(cdi.Fingerprint(n.options, n.hostFiles...))
	b.WriteString(n.placed.fingerprint())
	for _, kind := range []string{cdi.Kind, cdi.KindNRI} {
		if info, err := os.Lstat(filepath.Join(n.cdiDir, cdi.FileName(kind))); err == nil {
			fmt.Fprintln(&b, kind, info.Size(), info.ModTime(), info.Mode())
		}
	}
	return b.String()
}
