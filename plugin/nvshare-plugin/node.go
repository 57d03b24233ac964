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

// refresh looks for GPUs and driver. With write it puts the placed files right before, and writes or
// removes the specs; else these are another plugin's.
func (n *node) refresh(ctx context.Context, write bool) (*plugin.Inventory, error) {
	// The fingerprint is taken before the look, so no change is missed. If this look repaired something,
	// forget it: one more look then checks the repair.
	seen := n.fingerprint()
	n.seen, n.partial = "", false
	if !write {
		_, inv, err := n.see(ctx)
		if err == nil {
			n.seen = seen
		}
		return inv, err
	}
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

// watch hands over what the node has, at once, at SIGHUP and as soon as something changed, until ctx ends. It
// calls looked after each look. write is as in refresh. If a look fails the inventory stays, unless
// containers would not get what they need: nothing was handed over yet, engines do not find the devices, or a placed file is
// not right. It looks again: nobody else would, and a plugin beside an earlier one that gives no GPUs is not ready, so that
// the earlier one would never be ended.
func (n *node) watch(ctx context.Context, write bool, found func(*plugin.Inventory), looked func()) {
	hangup := make(chan os.Signal, 1)
	signal.Notify(hangup, syscall.SIGHUP)
	defer signal.Stop(hangup)
	changed := cdi.Watch(ctx, n.options, append(n.placed.dirs(), n.cdiDir)...)
	var retry <-chan time.Time
	tick := time.Tick(n.every)
	failure, known := "", false
	for force := true; ; {
		if force || n.fingerprint() != n.seen {
			inv, err := n.refresh(ctx, write)
			if ctx.Err() != nil {
				return
			}
			n.health.Problem(nodePart, err)
			retry = nil
			switch {
			case err == nil:
				failure, known = "", true
				found(inv)
			case err.Error() == failure: // tried again, not said again
			case !known, errors.Is(err, cdi.ErrForeign), errors.As(err, new(errNotPlaced)), !n.hasSpecs():
				n.log.Errorf("pods that ask for GPUs are refused until this is put right: %v", err)
				found(plugin.Unavailable(err))
			default:
				n.log.Errorf("GPUs or driver changed, and containers get the earlier ones: %v", err)
			}
			if err != nil {
				failure, retry = err.Error(), time.After(retryInterval)
			} else if n.partial {
				retry = n.again()
			}
		}
		looked()
		force = false
		select {
		case <-ctx.Done():
			return
		case <-hangup:
			force = true
		case <-changed:
		case <-tick:
		case <-retry:
			force = true
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
