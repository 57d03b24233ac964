// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/nvshare/nvshare/cdi"
)

// installer installs nvshare on a host and removes it.
type installer struct {
	from   string // the unpacked release
	prefix string
	root   string // of the host, "" is "/": for packages and images
	dryRun bool
	start  bool
	placed bool   // uninstall: only what the plugin has placed; for packages
	self   string // this program
	uid    int    // of this process
	io     streams
	// command runs a program of the host.
	command func(ctx context.Context, name string, args ...string) error
	// systemd reports whether systemd runs here.
	systemd func() bool
	// scheduler reports whether a scheduler answers in the run directory.
	scheduler func(ctx context.Context, runDir string) bool
}

func newInstaller(io streams) *installer {
	self, _ := os.Executable()
	return &installer{self: self, uid: os.Geteuid(), io: io, command: runCommand, systemd: systemdRuns, scheduler: schedulerAnswers}
}

// services are started, in this order, and stopped. The scheduler's service starts its
// socket, which is never restarted: programs wait in its queue during an upgrade.
var services = []string{"nvshare-scheduler.service", "nvshare-plugin.service"}

// wardenService is not started by install: what it does is for who asks for it.
const wardenService = "nvshare-warden.service"

const schedulerSocket = "nvshare-scheduler.socket"

// builtPrefix is the prefix in the release's units.
const builtPrefix = "/usr/local"

// An item is one file to install.
type item struct {
	path string // on the host
	data []byte
	mode fs.FileMode
}

func (in *installer) at(path string) string { return filepath.Join(in.root, path) }
func (in *installer) manifestPath() string {
	return filepath.Join(in.prefix, "lib/nvshare/manifest")
}

// here reports whether the host is this one, so that its services can be started and
// stopped.
func (in *installer) here() bool { return in.root == "" || filepath.Clean(in.root) == "/" }

func (in *installer) say(format string, args ...any) {
	if in.dryRun {
		format = "would " + format
	}
	fmt.Fprintf(in.io.out, format+"\n", args...)
}

func (in *installer) flags(cmd *cobra.Command) {
	fs := cmd.Flags()
	fs.StringVar(&in.prefix, "prefix", builtPrefix, "`directory` for programs and libraries")
	fs.StringVar(&in.root, "root", "", "the host's root `directory`, for packages and images; nothing is started")
	fs.BoolVar(&in.dryRun, "dry-run", false, "say what would be done")
}

// check returns an error if install and uninstall cannot work.
func (in *installer) check() error {
	if !filepath.IsAbs(in.prefix) {
		return usageError{fmt.Errorf("--prefix: %q is not an absolute path", in.prefix)}
	}
	in.prefix = filepath.Clean(in.prefix)
	if in.root != "" {
		abs, err := filepath.Abs(in.root)
		if err != nil {
			return err
		}
		in.root = abs
	}
	return nil
}

// needRoot returns an error if the host will refuse to have its files changed.
func (in *installer) needRoot() error {
	if in.uid == 0 || in.dryRun || !in.here() {
		return nil
	}
	return errors.New("this changes files of the host: use sudo (--dry-run says what would be done, without it)")
}

func installCommand(in *installer) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "install",
		Short: "Install nvshare on this host from an unpacked release",
		Long: `install puts the files of an unpacked release in place: programs, shim, systemd
units. If a file exists that is not nvshare's, or that was changed, nothing is
installed. A second install changes nothing; with a newer release, it upgrades.`,
		Example: `  mkdir nvshare && tar -xzf nvshare-v0.1.0-linux-amd64.tar.gz -C nvshare
  sudo nvshare/nvsharectl install --start`,
		Args: noWords,
		RunE: func(cmd *cobra.Command, _ []string) error { return asRoot(in.install(cmd.Context())) },
	}
	in.flags(cmd)
	cmd.Flags().StringVar(&in.from, "from", "", "the unpacked release's `directory` (default: where this program is)")
	cmd.Flags().BoolVar(&in.start, "start", false, "enable and start the services of systemd; after an upgrade, restart them")
	return cmd
}

// items reads the release.
func (in *installer) items() (all []item, err error) {
	if in.from == "" {
		exe, err := os.Executable()
		if err != nil {
			return nil, err
		}
		in.from = filepath.Dir(exe)
	}
	type file struct {
		name, to string // to: a directory
		mode     fs.FileMode
	}
	var files []file
	for name, dir := range map[string]string{
		"nvshare-scheduler": "sbin", "nvshare-checkpoint": "sbin", "nvshare-warden": "sbin", "nvshare-plugin": "sbin", "nvsharectl": "bin",
		cdi.ShimFile: "lib", cdi.HookFile: "lib/nvshare",
	} {
		files = append(files, file{name, filepath.Join(in.prefix, dir), 0o755})
	}
	// Where an administrator's files go, and a package's.
	config := "/etc"
	if in.prefix == "/usr" {
		config = "/usr/lib"
	}
	units, err := filepath.Glob(filepath.Join(in.from, "deployments/systemd/nvshare-*"))
	if err != nil || len(units) == 0 {
		return nil, fmt.Errorf("no units in %s/deployments/systemd (--from names an unpacked release; make stage makes one)", in.from)
	}
	for _, unit := range units {
		files = append(files, file{"deployments/systemd/" + filepath.Base(unit), config + "/systemd/system", 0o644})
	}
	for _, kind := range []string{"sysusers.d", "tmpfiles.d"} {
		files = append(files, file{"deployments/" + kind + "/nvshare.conf", filepath.Join(config, kind), 0o644})
	}
	// Man pages and completions; a release that was packed without them has none.
	if err := fs.WalkDir(os.DirFS(in.from), "share", func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			files = append(files, file{path, filepath.Join(in.prefix, filepath.Dir(path)), 0o644})
		}
		return err
	}); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for _, f := range files {
		data, err := os.ReadFile(filepath.Join(in.from, f.name))
		if err != nil {
			return nil, fmt.Errorf("%w (--from names an unpacked release; make stage makes one)", err)
		}
		if strings.HasPrefix(f.name, "deployments/systemd/") {
			data = bytes.ReplaceAll(data, []byte(builtPrefix+"/sbin/"), []byte(filepath.Join(in.prefix, "sbin")+"/"))
		}
		all = append(all, item{filepath.Join(f.to, filepath.Base(f.name)), data, f.mode})
	}
	slices.SortFunc(all, func(a, b item) int { return strings.Compare(a.path, b.path) })
	return all, nil
}

func (in *installer) install(ctx context.Context) error {
	if err := in.check(); err != nil {
		return err
	}
	if in.start && !in.here() {
		return usageError{errors.New("--start is for this host: it cannot go with --root")}
	}
	if err := in.needRoot(); err != nil {
		return err
	}
	items, err := in.items()
	if err != nil {
		return err
	}
	old, err := readManifest(in.at(in.manifestPath()))
	if err != nil {
		return err
	}
	write, err := in.compare(items, old)
	if err != nil {
		return err
	}
	gone := in.leftOver(items, old)
	for _, i := range write {
		in.say("install %s", i.path)
	}
	for _, path := range gone {
		in.say("remove %s, which this release does not have", path)
	}
	changed := len(write)+len(gone) > 0
	if !changed {
		fmt.Fprintf(in.io.out, "all %d files are in place\n", len(items))
	}
	if !in.dryRun {
		if err := in.apply(items, write, gone, old); err != nil {
			return err
		}
	}
	return in.settle(ctx, changed)
}

// compare returns the files that have to be written. It returns an error if one would
// overwrite a file that nvshare did not install.
func (in *installer) compare(items []item, old manifest) (write []item, err error) {
	var refused []string
	for _, i := range items {
		seen := in.at(i.path)
		if cdi.HoldsFile(seen, i.data, i.mode) {
			continue
		}
		// The content is right: only the mode may have to change.
		known := manifest{files: map[string][]string{i.path: append(slices.Clone(old.files[i.path]), sum(i.data))}}
		whose, err := known.whose(i.path, seen)
		if err != nil {
			return nil, err
		}
		if whose == foreign {
			refused = append(refused, seen)
			continue
		}
		write = append(write, i)
	}
	if len(refused) > 0 {
		return nil, fmt.Errorf("not from nvsharectl install, or changed since: %s; nothing was installed (move what is listed away, then try again)", strings.Join(refused, ", "))
	}
	return write, nil
}

// leftOver returns the files of an older release that this one does not have.
func (in *installer) leftOver(items []item, old manifest) (gone []string) {
	for _, path := range old.paths() {
		if slices.ContainsFunc(items, func(i item) bool { return i.path == path }) {
			continue
		}
		if whose, err := old.whose(path, in.at(path)); err == nil && whose == ours {
			gone = append(gone, path)
		}
	}
	return gone
}

// apply writes files. It writes the manifest first, with old and new hashes: whenever
// apply is interrupted, the next install or uninstall knows which files are nvshare's.
func (in *installer) apply(items, write []item, gone []string, old manifest) error {
	final := manifest{files: map[string][]string{}, dirs: old.dirs}
	for _, i := range items {
		old.add(i.path, sum(i.data))
		final.add(i.path, sum(i.data))
	}
	for _, i := range append(slices.Clone(items), item{path: in.manifestPath()}) {
		for _, dir := range in.missingDirs(filepath.Dir(i.path)) {
			final.addDir(dir)
		}
	}
	old.dirs = final.dirs
	file := in.at(in.manifestPath())
	if err := cdi.MakeDir(filepath.Dir(file)); err != nil {
		return err
	}
	if err := old.write(file); err != nil {
		return err
	}
	for _, i := range write {
		seen := in.at(i.path)
		if err := cdi.MakeDir(filepath.Dir(seen)); err != nil {
			return err
		}
		if err := cdi.ReplaceFile(seen, i.data, i.mode, nil); err != nil {
			return fmt.Errorf("install %s: %w", i.path, err)
		}
	}
	for _, path := range gone {
		if err := os.Remove(in.at(path)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return final.write(file)
}

// missingDirs returns dir and its parents that do not exist, parents first.
func (in *installer) missingDirs(dir string) (missing []string) {
	for ; dir != "/"; dir = filepath.Dir(dir) {
		if _, err := os.Stat(in.at(dir)); err == nil {
			break
		}
		missing = append([]string{dir}, missing...)
	}
	return missing
}

// settle brings the services of the host into line, and prints what is left to do.
func (in *installer) settle(ctx context.Context, changed bool) error {
	if !in.here() {
		return nil
	}
	lib := filepath.Join(in.prefix, "lib")
	if changed {
		// Without it programs need the shim's whole path in LD_PRELOAD.
		if err := in.tell(ctx, "ldconfig", lib); err != nil {
			fmt.Fprintf(in.io.err, "warning: %v; write LD_PRELOAD=%s\n", err, filepath.Join(lib, cdi.ShimFile))
		}
	}
	if !in.systemd() {
		todo := fmt.Sprintf("start %[1]s/nvshare-scheduler and %[1]s/nvshare-plugin as root, as your daemons are started", filepath.Join(in.prefix, "sbin"))
		switch {
		case in.start:
			return errors.New("--start cannot start the services, because systemd does not run here: " + todo)
		case changed:
			fmt.Fprintln(in.io.out, "systemd does not run here: "+todo)
		}
		return nil
	}
	if changed {
		for _, args := range [][]string{{"systemd-sysusers", "nvshare.conf"}, {"systemd-tmpfiles", "--create", "nvshare.conf"}, {"systemctl", "daemon-reload"}} {
			if err := in.tell(ctx, args[0], args[1:]...); err != nil {
				return err
			}
		}
	}
	switch {
	case in.start && changed:
		if err := in.tell(ctx, "systemctl", append([]string{"enable"}, services...)...); err != nil {
			return err
		}
		return in.tell(ctx, "systemctl", append([]string{"restart"}, services...)...)
	case in.start:
		return in.tell(ctx, "systemctl", append([]string{"enable", "--now"}, services...)...)
	case changed:
		fmt.Fprintf(in.io.out, "to start it: systemctl enable --now %s\nafter an upgrade: systemctl restart %s\n", strings.Join(services, " "), strings.Join(services, " "))
	}
	return nil
}

// tell runs a program of the host, or prints that it would.
func (in *installer) tell(ctx context.Context, name string, args ...string) error {
	in.say("run %s", strings.Join(append([]string{name}, args...), " "))
	if in.dryRun {
		return nil
	}
	return in.command(ctx, name, args...)
}

func runCommand(ctx context.Context, name string, args ...string) error {
	out, err := exec.CommandContext(ctx, name, args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, strings.TrimSpace(string(out)))
	}
	return nil
}

// systemdRuns does what sd_booted(3) does.
func systemdRuns() bool {
	info, err := os.Lstat("/run/systemd/system")
	return err == nil && info.IsDir()
}
