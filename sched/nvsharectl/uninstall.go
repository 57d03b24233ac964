// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/nvshare/nvshare/cdi"
	"github.com/nvshare/nvshare/sched/api"
)

func uninstallCommand(in *installer) *cobra.Command {
	stay := false
	cmd := &cobra.Command{
		Use:   "uninstall",
		Short: "Remove nvshare from this host",
		Long: `uninstall stops the services and removes what nvsharectl install and
nvshare-plugin put on the host: programs, units, shim, hook, CDI specs,
sockets. It leaves and names files that were changed, and your drop-ins of the
units. Running containers run on, but cannot be started again with a device of
nvshare. What a deb or rpm has installed, apt or dnf removes.`,
		Args: noWords,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !cmd.Flags().Changed("prefix") && in.root == "" {
				in.prefix = installedPrefix(in.prefix)
			}
			err := in.uninstall(cmd.Context())
			if err == nil && stay {
				<-cmd.Context().Done()
			}
			return asRoot(err)
		},
	}
	in.flags(cmd)
	cmd.Flags().BoolVar(&in.placed, "placed", false, "remove only what nvshare-plugin has placed; the rest is a package's")
	_ = cmd.Flags().MarkHidden("placed")
	cmd.Flags().BoolVar(&stay, "stay", false, "afterwards wait for a signal, because the containers of a DaemonSet must not end")
	return cmd
}

// installedPrefix is where this program was installed, if it was.
func installedPrefix(otherwise string) string {
	exe, err := os.Executable()
	if err != nil {
		return otherwise
	}
	guess := installer{prefix: filepath.Dir(filepath.Dir(exe))}
	if exists(guess.manifestPath()) {
		return guess.prefix
	}
	return otherwise
}

const (
	preloadFile = "/etc/ld.so.preload"
	dropInRoot  = "/etc/systemd/system" // where systemctl edit writes to
)

func (in *installer) uninstall(ctx context.Context) error {
	if err := in.check(); err != nil {
		return err
	}
	m, err := readManifest(in.at(in.manifestPath()))
	if err != nil {
		return err
	}
	if err := in.refusePackage(m); err != nil {
		return err
	}
	if err := in.needRoot(); err != nil {
		return err
	}
	// Every program of the host would print a warning, for ever.
	if text, err := os.ReadFile(in.at(preloadFile)); err == nil && strings.Contains(string(text), cdi.ShimFile) {
		return fmt.Errorf("%s still names %s: remove that line first", in.at(preloadFile), cdi.ShimFile)
	}
	if err := in.stop(ctx, m); err != nil {
		return err
	}
	kept, err := in.removeInstalled(m)
	if err != nil {
		return err
	}
	if err := in.removePlaced(); err != nil {
		return err
	}
	if in.here() && len(m.files) > 0 {
		if err := in.tell(ctx, "ldconfig"); err != nil {
			fmt.Fprintf(in.io.err, "warning: %v\n", err)
		}
		if in.systemd() {
			if err := in.tell(ctx, "systemctl", "daemon-reload"); err != nil {
				return err
			}
		}
	}
	// An administrator's settings would hold again after the next install.
	for _, unit := range append([]string{schedulerSocket}, services...) {
		if dropIns := filepath.Join(dropInRoot, unit+".d"); exists(in.at(dropIns)) {
			in.say("leave %s, which is yours", dropIns)
		}
	}
	if len(kept) > 0 {
		return fmt.Errorf("changed since it was installed, and left: %s", strings.Join(kept, ", "))
	}
	return nil
}

// refusePackage returns an error if a package has installed this program. Without the files
// that the plugin has placed, the package's services would not work.
func (in *installer) refusePackage(m manifest) error {
	if in.placed || !in.here() || len(m.files) > 0 || filepath.Dir(in.self) != "/usr/bin" || in.prefix != builtPrefix && in.prefix != "/usr" {
		return nil
	}
	return errors.New("a package has installed nvshare: remove it with sudo apt remove nvshare, or sudo dnf remove nvshare")
}

// stop ends the services, and makes sure that no scheduler runs any more.
func (in *installer) stop(ctx context.Context, m manifest) error {
	run := cdi.OnHost(in.root, cdi.DefaultRunDir)
	if !in.here() {
		// From a container of that host: its sockets are seen there.
		if !in.dryRun && in.scheduler(ctx, run) {
			return fmt.Errorf("nvshare-scheduler runs and answers in %s: end it first (on Kubernetes, delete the DaemonSet nvshare)", run)
		}
		return nil
	}
	if in.systemd() && m.has(services[0]) {
		if err := in.tell(ctx, "systemctl", append([]string{"disable", "--now"}, m.units()...)...); err != nil {
			return err
		}
	}
	if !in.dryRun && in.scheduler(ctx, cdi.DefaultRunDir) {
		return fmt.Errorf("nvshare-scheduler runs and answers in %s: end it first", cdi.DefaultRunDir)
	}
	return nil
}

// units are what the manifest's release has running.
func (m *manifest) units() (units []string) {
	if m.has(schedulerSocket) {
		units = append(units, schedulerSocket) // it would start the scheduler again
	}
	units = append(units, services...)
	if m.has(wardenService) {
		units = append(units, wardenService)
	}
	return units
}

// has tells whether a file of this name is in the manifest.
func (m *manifest) has(name string) bool {
	return slices.ContainsFunc(m.paths(), func(p string) bool { return filepath.Base(p) == name })
}

// removeInstalled removes the files of a manifest, and returns those that were
// changed and left. Then the manifest stays, with these.
func (in *installer) removeInstalled(m manifest) (kept []string, err error) {
	if len(m.files) == 0 && !in.placed {
		fmt.Fprintf(in.io.out, "nothing that nvsharectl install has put below %s\n", in.at(in.prefix))
	}
	for _, path := range m.paths() {
		whose, err := m.whose(path, in.at(path))
		if err != nil {
			return nil, err
		}
		switch whose {
		case absent:
		case foreign:
			kept = append(kept, in.at(path))
			continue
		case ours:
			if err := in.remove(path, in.at(path)); err != nil {
				return nil, err
			}
		}
		delete(m.files, path)
	}
	if in.dryRun {
		return kept, nil
	}
	file := in.at(in.manifestPath())
	if len(kept) > 0 {
		return kept, m.write(file)
	}
	if err := os.Remove(file); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for _, dir := range slices.Backward(m.dirs) {
		_ = os.Remove(in.at(dir)) // somebody else has put something there
	}
	return nil, nil
}

// removePlaced removes what the plugin has put on the host, wherever nvshare
// was installed from.
func (in *installer) removePlaced() error {
	var files []string
	for _, dir := range systemSpecDirs {
		specs, err := cdi.Ours(cdi.OnHost(in.root, dir))
		if err != nil {
			return err
		}
		files = append(files, specs...)
	}
	shims, err := cdi.Shims(in.at(cdi.DefaultLibDir))
	if err != nil {
		return err
	}
	files = append(files, shims...)
	// The run directory holds sockets and the scheduler's state, the others the records of
	// claims and those of the warden; no scheduler runs.
	for _, path := range []string{in.at(cdi.DefaultPaths.Hook), cdi.OnHost(in.root, cdi.DefaultRunDir), cdi.OnHost(in.root, cdi.ClaimDir), cdi.OnHost(in.root, api.DefaultWardenDir)} {
		if exists(path) {
			files = append(files, path)
		}
	}
	for _, file := range files {
		if err := in.remove(file, file); err != nil {
			return err
		}
	}
	if in.dryRun {
		return nil
	}
	top := filepath.Dir(cdi.DefaultLibDir)
	for _, path := range []string{filepath.Join(top, cdi.LockFile), cdi.DefaultLibDir, cdi.DefaultBinDir, top} {
		_ = os.Remove(in.at(path)) // stays if somebody else has put something there
	}
	return nil
}

// remove removes a file or a directory, which this program sees at seen.
func (in *installer) remove(path, seen string) error {
	in.say("remove %s", path)
	if in.dryRun {
		return nil
	}
	return os.RemoveAll(seen)
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil || !errors.Is(err, fs.ErrNotExist)
}

// schedulerAnswers reports whether a scheduler serves runDir.
func schedulerAnswers(ctx context.Context, runDir string) bool {
	_, err := askAll(ctx, runDir)
	return err == nil
}

// manifest lists the files that install has put on a host, so that uninstall and the
// next install know them. On disk it has a line for each file as sha256sum prints it,
// and "# directory PATH" for each directory that was made.
type manifest struct {
	files map[string][]string // by absolute path: hashes of nvshare's versions, two while installing
	dirs  []string            // parents first
}

const directoryLine = "# directory "

func sum(data []byte) string {
	h := sha256.Sum256(data)
	return hex.EncodeToString(h[:])
}

// readManifest returns an empty manifest if there is no file.
func readManifest(file string) (m manifest, err error) {
	m.files = map[string][]string{}
	data, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return m, nil
	}
	if err != nil {
		return m, err
	}
	for line := range strings.Lines(string(data)) {
		line = strings.TrimSuffix(line, "\n")
		if dir, ok := strings.CutPrefix(line, directoryLine); ok && filepath.IsAbs(dir) {
			m.dirs = append(m.dirs, dir)
			continue
		}
		hash, path, ok := strings.Cut(line, "  ")
		if !ok || len(hash) != 2*sha256.Size || !filepath.IsAbs(path) || filepath.Clean(path) != path {
			return m, fmt.Errorf("%s: line %.80q is not what nvsharectl install writes", file, line)
		}
		m.add(path, hash)
	}
	return m, nil
}

func (m *manifest) add(path, hash string) {
	if !slices.Contains(m.files[path], hash) {
		m.files[path] = append(m.files[path], hash)
	}
}

func (m *manifest) addDir(dir string) {
	if !slices.Contains(m.dirs, dir) {
		m.dirs = append(m.dirs, dir)
		slices.Sort(m.dirs)
	}
}

func (m *manifest) write(file string) error {
	var b strings.Builder
	for _, d := range m.dirs {
		fmt.Fprintln(&b, directoryLine+d)
	}
	for _, path := range m.paths() {
		for _, hash := range m.files[path] {
			fmt.Fprintf(&b, "%s  %s\n", hash, path)
		}
	}
	if cdi.HoldsFile(file, []byte(b.String()), 0o644) {
		return nil
	}
	return cdi.ReplaceFile(file, []byte(b.String()), 0o644, nil)
}

func (m *manifest) paths() []string { return slices.Sorted(maps.Keys(m.files)) }

// owned tells who owns the file at path. This program sees the file at seen.
type owned int

const (
	absent  owned = iota
	ours          // as it was installed
	foreign       // not installed by nvshare, changed since, or no file at all
)

func (m *manifest) whose(path, seen string) (owned, error) {
	info, err := os.Lstat(seen)
	if errors.Is(err, fs.ErrNotExist) {
		return absent, nil
	}
	if err != nil {
		return foreign, err
	}
	if !info.Mode().IsRegular() {
		return foreign, nil
	}
	data, err := os.ReadFile(seen)
	if err != nil {
		return foreign, err
	}
	if slices.Contains(m.files[path], sum(data)) {
		return ours, nil
	}
	return foreign, nil
}
