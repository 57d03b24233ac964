// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/nri/pkg/api"
	"github.com/sirupsen/logrus"
	logtest "github.com/sirupsen/logrus/hooks/test"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	specs "tags.cncf.io/container-device-interface/specs-go"

	nvcdi "github.com/nvshare/nvshare/cdi"
	"github.com/nvshare/nvshare/plugin"
)

// crash is what a failpoint throws: what the process was about to do is not done.
type crash failpoint

// until calls f, and tells whether a failpoint ended it.
func until(f func()) (crashed bool) {
	defer func() {
		if r := recover(); r != nil {
			if _, crashed = r.(crash); !crashed {
				panic(r)
			}
		}
	}()
	f()
	return false
}

func prepare(d *Driver, c *resourceapi.ResourceClaim) kubeletplugin.PrepareResult {
	all, _ := d.PrepareResourceClaims(context.Background(), []*resourceapi.ResourceClaim{c})
	return all[c.UID]
}

func unprepare(d *Driver, c *resourceapi.ResourceClaim) error {
	all, _ := d.UnprepareResourceClaims(context.Background(), []kubeletplugin.NamespacedObject{{UID: c.UID}})
	return all[c.UID]
}

// files returns the names of all files below a directory.
func files(t *testing.T, dir string) (names []string) {
	t.Helper()
	check(t, filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		if err == nil && !e.IsDir() {
			names = append(names, filepath.Base(path))
		}
		return err
	}))
	return names
}

func TestPrepare(t *testing.T) {
	dir := t.TempDir()
	d := newDriver(t, dir)
	c := claimOf(uid(1), part(name0, "s1", "40", "20Gi"), part(name1, "s2", "40", "20Gi"))
	got := prepare(d, c)
	check(t, got.Err)
	want := []string{nvcdi.Kind + "=" + uid(1) + "-" + name0 + "-s1", nvcdi.Kind + "=" + uid(1) + "-" + name1 + "-s2"}
	for i, w := range want {
		if dev := got.Devices[i]; dev.CDIDeviceIDs[0] != w || *dev.ShareID != *c.Status.Allocation.Devices.Results[i].ShareID {
			t.Errorf("device %d is %+v, want %s", i, dev, w)
		}
	}
	// Engines take the spec.
	cache, err := cdi.NewCache(cdi.WithSpecDirs(d.CDIDir), cdi.WithAutoRefresh(false))
	check(t, err)
	for _, w := range want {
		if cache.GetDevice(w) == nil {
			t.Errorf("engines do not find %s: %v", w, cache.GetErrors())
		}
	}
	spec := specOf(t, d, uid(1))
	if n := spec.Devices[1].ContainerEdits.DeviceNodes; len(n) != 1 || n[0].Path != "/dev/nvidia1" {
		t.Errorf("the second device has nodes %v", n)
	}
	for _, e := range append(spec.ContainerEdits.Env, spec.Devices[0].ContainerEdits.Env...) {
		if strings.HasPrefix(e, nvcdi.PreloadEnv+"=") {
			t.Errorf("%s replaces the container's own; NRI merges it", e)
		}
	}
	// Without the plugin, CDI alone has programs load the shim and find the scheduler.
	sources := map[string][]string{}
	for _, m := range spec.ContainerEdits.Mounts {
		sources[m.ContainerPath] = append(sources[m.ContainerPath], m.HostPath)
	}
	// The image's own file stays, behind the shim: the hook writes it.
	if got := sources["/etc/ld.so.preload"]; len(got) != 0 || !slices.ContainsFunc(spec.ContainerEdits.Hooks, func(h *specs.Hook) bool { return slices.Contains(h.Args, "--preload") }) {
		t.Errorf("mounted at /etc/ld.so.preload: %q; the hooks are %v", got, spec.ContainerEdits.Hooks)
	}
	if !slices.Contains(spec.ContainerEdits.Env, nvcdi.RunDirEnv+"="+nvcdi.ContainerRunDir) {
		t.Errorf("the environment is %q", spec.ContainerEdits.Env)
	}
	// The plugin knows the token that a container of the claim has.
	containers := plugin.NewContainers(silent())
	containers.Claims = d.Claims()
	p := plugin.New(silent(), containers)
	adjust, _, err := p.CreateContainer(context.Background(), &api.PodSandbox{}, &api.Container{Id: "c", Env: spec.Devices[0].ContainerEdits.Env})
	check(t, err)
	if got := nvcdi.Kind + "=" + adjust.GetAnnotations()[plugin.ClaimAnnotation]; got != want[0] {
		t.Errorf("the container has %s, want %s", got, want[0])
	}
	// The next driver knows the same.
	before := d.store.Records()
	d = newDriver(t, dir)
	if after := d.store.Records(); !reflect.DeepEqual(after, before) {
		t.Errorf("records are %+v, were %+v", after, before)
	}
	if again := prepare(d, c); !reflect.DeepEqual(again, got) {
		t.Errorf("prepared again: %+v, was %+v", again, got)
	}
	s, ok := d.Claims().ByDevice(uid(1) + "-" + name0 + "-s1")
	if token, _ := d.Claims().ByToken(before[0].Shares[0].Token); !ok || token != s || s.GPU != gpu0 || s.Claim != "ml/c-0000" || s.Terms.CoreRequest != 40 {
		t.Errorf("the share is %+v, %v, by token %+v", s, ok, token)
	}
	// The runtime directory is lost in a reboot.
	check(t, os.RemoveAll(d.CDIDir))
	check(t, os.Mkdir(d.CDIDir, 0o755))
	newDriver(t, dir)
	specOf(t, d, uid(1))
	check(t, unprepare(d, c))
	check(t, unprepare(d, c))
	if left := files(t, dir); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	if _, ok := d.Claims().ByDevice(uid(1) + "-" + name0 + "-s1"); ok {
		t.Error("the share is known after its end")
	}
}

// Wherever the driver is killed, the next one gives the kubelet the same answer, and
// nothing is left after the claim's end.
func TestKilledAtEveryFailpoint(t *testing.T) {
	c := claimOf(uid(1), part(name0, "s1", "40", "20Gi"))
	for _, at := range []failpoint{beforeRecord, beforeSpec, afterSpec, beforeRemoval, betweenFiles, afterRemoval} {
		t.Run(string(at), func(t *testing.T) {
			dir := t.TempDir()
			d := newDriver(t, dir)
			d.store.at = func(p failpoint) {
				if p == at {
					panic(crash(p))
				}
			}
			if !until(func() { check(t, prepare(d, c).Err); check(t, unprepare(d, c)) }) {
				t.Fatal("the failpoint was not reached")
			}
			d = newDriver(t, dir)
			claims, err := nvcdi.ClaimFiles(d.CDIDir)
			check(t, err)
			if len(claims) > len(d.store.Records()) {
				t.Errorf("CDI specs without a record: %v", claims)
			}
			got := prepare(d, c)
			check(t, got.Err)
			specOf(t, d, uid(1))
			if d = newDriver(t, dir); !reflect.DeepEqual(prepare(d, c), got) {
				t.Error("the next driver answers something else")
			}
			check(t, unprepare(d, c))
			if left := files(t, dir); len(left) > 0 {
				t.Errorf("left behind: %v", left)
			}
		})
	}
}

// A lock takes no more than to open the directory, and a token no more than to read the CDI spec: users
// of the node may not.
func TestClaimsAreRootsOnly(t *testing.T) {
	d := newDriver(t, t.TempDir())
	check(t, prepare(d, claimOf(uid(1), part(name0, "s1", "40", ""))).Err)
	for path, mode := range map[string]os.FileMode{d.store.dir: 0o700, nvcdi.ClaimFile(d.CDIDir, uid(1)): 0o600} {
		if info, err := os.Stat(path); err != nil || info.Mode().Perm() != mode {
			t.Errorf("%s: %v, %v", path, info.Mode(), err)
		}
	}
}

func TestPrepareRefuses(t *testing.T) {
	dir := t.TempDir()
	d := newDriver(t, dir)
	check(t, prepare(d, claimOf(uid(1), part(name0, "", "60", ""))).Err)
	if err := prepare(d, claimOf(uid(2), part(name0, "", "60", ""))).Err; err == nil || !strings.Contains(err.Error(), "claim ml/c-0000") || !strings.Contains(err.Error(), "120 %") {
		t.Errorf("a claim beyond the GPU: %v", err)
	}
	if n := len(files(t, dir)); n != 2 {
		t.Errorf("%d files for one claim", n)
	}
	// A claim stays although its GPU is lost, but the GPU is given to nobody else.
	d.SetInventory(inventory(t, twoGPUs()[1:]))
	specOf(t, d, uid(1))
	if err := prepare(d, claimOf(uid(3), part(name0, "", "1", ""))).Err; err == nil || !strings.Contains(err.Error(), "no such device") {
		t.Errorf("a claim of a GPU that is lost: %v", err)
	}
	d.SetInventory(plugin.Unavailable(os.ErrPermission)) // changes nothing
	check(t, prepare(d, claimOf(uid(4), part(name1, "", "1", ""))).Err)
}

// What does not come from this program is not believed, and does not stop it.
func TestDamagedRecords(t *testing.T) {
	dir := t.TempDir()
	d := newDriver(t, dir)
	check(t, prepare(d, claimOf(uid(1), part(name0, "", "60", ""))).Err)
	for name, text := range map[string]string{uid(2): "{", uid(3): `{"version": 0}`, uid(4): `{"version": 1, "uid": "x"}`} {
		check(t, os.WriteFile(d.store.file(types.UID(name)), []byte(text), 0o600))
	}
	check(t, os.WriteFile(nvcdi.ClaimFile(d.CDIDir, uid(5)), []byte("{}"), 0o644))
	if d = newDriver(t, dir); len(d.store.Records()) != 1 || len(files(t, dir)) != 2 {
		t.Errorf("records %+v, files %v", d.store.Records(), files(t, dir))
	}
}

// A record that cannot be read, as on a disk with errors, is not damaged: the kubelet does not
// prepare its claim again, whose containers need the spec when they are started again.
func TestUnreadableRecordStays(t *testing.T) {
	dir := t.TempDir()
	d := newDriver(t, dir)
	check(t, prepare(d, claimOf(uid(1), part(name0, "", "60", ""))).Err)
	record := d.store.file(types.UID(uid(1)))
	text, err := os.ReadFile(record)
	check(t, err)
	check(t, errors.Join(os.Remove(record), os.Mkdir(record, 0o755)))
	d = newDriver(t, dir)
	if _, err := os.Stat(record); err != nil || len(d.store.Records()) != 0 {
		t.Errorf("records %v; %v", d.store.Records(), err)
	}
	specOf(t, d, uid(1))
	check(t, errors.Join(os.Remove(record), os.WriteFile(record, text, 0o600)))
	if d.store.Load(); len(d.store.Records()) != 1 {
		t.Errorf("once it can be read: %v", d.store.Records())
	}
}

// After a rollback, what the newer version has recorded stays for when it is back: containers of the
// claim run. Nothing is written over it, and the kubelet is told why its claim is not prepared again.
func TestRecordOfANewerVersionStays(t *testing.T) {
	dir := t.TempDir()
	d := newDriver(t, dir)
	c := claimOf(uid(1), part(name0, "", "60", ""))
	check(t, prepare(d, c).Err)
	const newer = `{"version": 2, "uid": "00000001-0000-4000-8000-000000000000", "shares": {"a": "map"}}`
	record := d.store.file(types.UID(uid(1)))
	check(t, os.WriteFile(record, []byte(newer), 0o600))
	log := logrus.New()
	log.SetOutput(t.Output())
	lines := logtest.NewLocal(log)
	d, err := New(Config{NodeName: node, Directory: d.Directory, CDIDir: d.CDIDir, Options: whole, Log: log})
	check(t, err)
	d.Lead()
	d.SetInventory(inventory(t, twoGPUs()))
	d.Claims().Load()
	specOf(t, d, uid(1))
	if err := prepare(d, c).Err; err == nil || !strings.Contains(err.Error(), "version 2") || !strings.Contains(err.Error(), "newer nvshare") {
		t.Errorf("prepared again: %v", err)
	}
	if text, err := os.ReadFile(record); string(text) != newer {
		t.Errorf("the record is %q, %v", text, err)
	}
	warnings := 0
	for _, e := range lines.AllEntries() {
		if e.Level <= logrus.WarnLevel && strings.Contains(e.Message, "version 2") && !strings.Contains(e.Message, "claim ml/") {
			warnings++
		}
	}
	if warnings != 1 {
		t.Errorf("%d lines warn of it", warnings)
	}
	check(t, unprepare(d, c))
	if left := files(t, dir); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	check(t, prepare(d, c).Err)
}

// A claim takes one record and one spec, each flushed to the disk: milliseconds.
func BenchmarkPrepare(b *testing.B) {
	d := newDriver(b, b.TempDir())
	for i := 0; b.Loop(); i++ {
		c := claimOf(uid(i), part(name0, "s1", "1", "64Mi"))
		check(b, prepare(d, c).Err)
		check(b, unprepare(d, c))
	}
}
