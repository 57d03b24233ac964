// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/cdi"
)

// placed are the files that this program puts on the host and keeps right: the shim,
// the OCI hook, and the directory that containers share with the scheduler.
type placed struct {
	log       logrus.FieldLogger
	shim      string // to place
	hook      string // to place
	libDir    string // these as seen from here
	hookPath  string
	tenantDir string
}

// newPlaced finds the files to place. They need not be there: place says so.
func newPlaced(f flags, log logrus.FieldLogger) (*placed, error) {
	p := &placed{
		log: log, shim: f.lib, hook: f.hook,
		libDir:    cdi.OnHost(f.hostRoot, f.libDir),
		hookPath:  cdi.OnHost(f.hostRoot, filepath.Join(f.binDir, cdi.HookFile)),
		tenantDir: cdi.OnHost(f.hostRoot, cdi.Paths{RunDir: f.runDir}.TenantDir()),
	}
	for _, file := range []struct {
		flag, name string
		path       *string
	}{{"--lib", cdi.ShimFile, &p.shim}, {"--hook", cdi.HookFile, &p.hook}} {
		if *file.path != "" {
			continue
		}
		var err error
		if *file.path, err = find(file.name); err != nil {
			return nil, fmt.Errorf("%w (name it with %s)", err, file.flag)
		}
	}
	return p, nil
}

// errNotPlaced means that containers would lack what they need.
type errNotPlaced struct{ error }

func (e errNotPlaced) Unwrap() error { return e.error }

// place puts right what is missing or not as it was placed, and reports whether that
// changed anything. Its error is an errNotPlaced. The directory of the scheduler is made
// so that containers can start before the scheduler.
func (p *placed) place() (changed bool, err error) {
	shim, shimErr := cdi.PlaceShim(p.shim, p.libDir)
	if shim {
		p.log.Infof("placed %s in %s", cdi.ShimFile, p.libDir)
	}
	hook, hookErr := cdi.Place(p.hook, p.hookPath)
	if hook {
		p.log.Infof("placed %s", p.hookPath)
	}
	dir, dirErr := p.makeTenantDir()
	if dirErr != nil {
		dirErr = fmt.Errorf("make the directory that containers share with the scheduler: %w", dirErr)
	}
	if err = errors.Join(shimErr, hookErr, dirErr); err != nil {
		err = errNotPlaced{err}
	}
	return shim || hook || dir, err
}

// makeTenantDir makes the directory for containers, unless the run directory is that of
// another user: the scheduler of that user makes its own, and refuses somebody else's.
func (p *placed) makeTenantDir() (made bool, err error) {
	if info, err := os.Stat(p.tenantDir); err == nil && info.IsDir() {
		return false, nil
	}
	runDir := filepath.Dir(p.tenantDir)
	var st unix.Stat_t
	if err := unix.Stat(runDir, &st); err == nil && int(st.Uid) != os.Geteuid() {
		return false, fmt.Errorf("%s is not there; %s belongs to user %d, whose nvshare-scheduler makes it", p.tenantDir, runDir, st.Uid)
	}
	return true, cdi.MakeDir(p.tenantDir)
}

// dirs are the directories to watch.
func (p *placed) dirs() []string {
	return []string{filepath.Join(p.libDir, cdi.ShimLink), p.libDir, filepath.Dir(p.hookPath), p.tenantDir}
}

// fingerprint changes when a placed file is touched, or a file that is to be placed.
// Nobody but the kernel sets the time of a file's latest change (ctime).
func (p *placed) fingerprint() string {
	var b strings.Builder
	for _, path := range []string{p.shim, filepath.Join(p.libDir, cdi.ShimLink, cdi.ShimFile), filepath.Join(p.libDir, cdi.EmptyDir), p.hook, p.hookPath, p.tenantDir} {
		var st unix.Stat_t
		if err := unix.Stat(path, &st); err != nil {
			fmt.Fprintln(&b, path, err)
			continue
		}
		fmt.Fprintln(&b, path, st.Dev, st.Ino, st.Mode)
		if st.Mode&unix.S_IFMT != unix.S_IFDIR { // others make files in a directory
			fmt.Fprintln(&b, st.Size, st.Ctim)
		}
	}
	target, err := os.Readlink(filepath.Join(p.libDir, cdi.ShimLink))
	fmt.Fprintln(&b, target, err)
	return b.String()
}

// find looks for a file where builds and packages put it.
func find(name string) (string, error) {
	exe, err := os.Executable()
	if err != nil {
		return "", err
	}
	dir := filepath.Dir(exe)
	for _, p := range []string{
		filepath.Join(dir, name),
		filepath.Join(dir, "..", "lib", name),
		filepath.Join(dir, "..", "lib", "nvshare", name),
		filepath.Join("/usr/lib/nvshare", name),
	} {
		if _, err := os.Stat(p); !errors.Is(err, os.ErrNotExist) {
			return p, err
		}
	}
	return "", fmt.Errorf("no %s beside %s or in /usr/lib/nvshare", name, exe)
}
