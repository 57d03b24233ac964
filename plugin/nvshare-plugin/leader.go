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
)

// One plugin leads on a node: two would write the same files, and two tiers would promise
// the same GPUs. The leader lock is a lock on a file, which the kernel takes from a process that
// ends. The file says who has it. Only root opens it: whoever may open a file or a
// directory, and be it to read, may lock it.
type leaderLock struct {
	file *os.File // nil: it cannot be had
	who  holder
	log  logrus.FieldLogger
}

// holder is who leads.
type holder struct {
	installation string // as a person would look for it
	tier         string
}

const (
	// lockInterval is the time between looks whether the lock is free.
	lockInterval = 50 * time.Millisecond
	// namespaceFile is there in a pod.
	namespaceFile = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"
)

// whoIs says who this process is. Pods of one namespace are of one installation: they are
// replaced by each other.
func whoIs(dra bool, namespaceFile string) holder {
	w := holder{installation: "this host's service", tier: "annotations"}
	if dra {
		w.tier = "resource claims"
	}
	if name, err := os.ReadFile(namespaceFile); err == nil {
		w.installation = "namespace " + strings.TrimSpace(string(name))
	}
	return w
}

// openLeaderLock looks for the lock of a node, in a directory that only root writes. A lock that
// cannot be had for another reason than its holder keeps nobody from working.
func openLeaderLock(dir string, who holder, log logrus.FieldLogger) *leaderLock {
	s := &leaderLock{who: who, log: log}
	err := cdi.MakeDir(dir)
	if err == nil {
		s.file, err = os.OpenFile(filepath.Join(dir, cdi.LockFile), os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	}
	if err != nil {
		log.Warnf("see whether another nvshare-plugin runs on this node: %v", err)
	}
	return s
}

// Close gives the lock back.
func (s *leaderLock) Close() { s.file.Close() }

// take takes the lock, and tells whether it was free. The error says that another
// installation has it.
func (s *leaderLock) take() (bool, error) {
	if s.file == nil {
		return true, nil
	}
	switch err := unix.Flock(int(s.file.Fd()), unix.LOCK_EX|unix.LOCK_NB); {
	case errors.Is(err, unix.EINTR):
		return false, nil
	case errors.Is(err, unix.EWOULDBLOCK):
		return false, s.refused()
	case err != nil:
		s.log.Warnf("see whether another nvshare-plugin runs on this node: lock %s: %v", s.file.Name(), err)
	}
	err := s.file.Truncate(0)
	if err == nil {
		_, err = s.file.WriteAt([]byte(s.who.installation+"\n"+s.who.tier+"\n"), 0)
	}
	if err != nil {
		s.log.Warnf("say that this nvshare-plugin runs on this node: %v", err)
	}
	return true, nil
}

// refused returns why the lock will not be had by waiting.
func (s *leaderLock) refused() error {
	text, err := os.ReadFile(s.file.Name())
	installation, tier, said := strings.Cut(strings.TrimSpace(string(text)), "\n")
	if err != nil || !said {
		return nil // the holder is about to say who it is
	}
	if installation == s.who.installation {
		return nil // its end is near: the pod is being replaced
	}
	return fmt.Errorf("another nvshare-plugin runs on this node, that of %s, and gives GPUs by %s; this one is that of %s, and would give them by %s: remove one of the two from the node (a nodeSelector keeps a DaemonSet off it)",
		installation, tier, s.who.installation, s.who.tier)
}

// wait waits until the lock is this process's.
func (s *leaderLock) wait(ctx context.Context) error {
	tick := time.Tick(lockInterval)
	for {
		if taken, err := s.take(); taken || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick:
		}
	}
}
