//go:build release

// SPDX-License-Identifier: Apache-2.0

package release

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
)

const top = "../.."

// epoch is the time in the files of both builds.
const epoch = "1700000000"

var (
	build = os.Getenv("NVSHARE_TEST_BUILD") // holds the simulated GPU; make test-release sets it
	first string                            // the first build's files
)

func TestMain(m *testing.M) {
	if first = os.Getenv("NVSHARE_TEST_DIST"); first != "" { // files that make release made before
		os.Exit(m.Run())
	}
	dir, err := os.MkdirTemp("", "nvshare-release-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	first = filepath.Join(dir, "dist")
	status := 1
	if out, err := makeRelease(top, "umask 022", "BUILD="+dir); err != nil {
		fmt.Fprintf(os.Stderr, "make release: %v\n%s", err, out)
	} else {
		status = m.Run()
	}
	os.RemoveAll(dir)
	os.Exit(status)
}

// makeRelease runs make release in dir, after a line of shell.
func makeRelease(dir, before string, args ...string) ([]byte, error) {
	cmd := exec.Command("sh", append([]string{"-c", before + ` && exec make --no-print-directory release "$@"`, "sh", "ARCHES=" + runtime.GOARCH}, args...)...)
	cmd.Dir = dir
	// The outer make's flags would name its own build directory.
	cmd.Env = append(os.Environ(), "SOURCE_DATE_EPOCH="+epoch, "MAKEFLAGS=", "MAKELEVEL=")
	return cmd.CombinedOutput()
}

func files(t *testing.T, dir string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// one returns the file of the first build whose name matches.
func one(t *testing.T, pattern string) string {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(first, pattern))
	if err != nil || len(found) != 1 {
		t.Fatalf("%s: %v %v, of %v", pattern, found, err, files(t, first))
	}
	return found[0]
}

// Another clone, of another user's umask, language and time zone, makes the same bytes.
func TestSameBytesTwice(t *testing.T) {
	if os.Getenv("NVSHARE_TEST_DIST") != "" {
		t.Skip("SKIPPED: NVSHARE_TEST_DIST names files that were made at another time")
	}
	clone := filepath.Join(t.TempDir(), "elsewhere", "nvshare")
	if err := os.MkdirAll(clone, 0o755); err != nil {
		t.Fatal(err)
	}
	copied, err := exec.Command("sh", "-c", `tar -C "$1" --exclude=./.build --exclude=./.git -cf - . | tar -C "$2" -xf -`, "sh", top, clone).CombinedOutput()
	if err != nil {
		t.Fatalf("copy the tree: %v\n%s", err, copied)
	}
	if out, err := makeRelease(clone, "umask 077 && export TZ=Asia/Tokyo LC_ALL=C.UTF-8"); err != nil {
		t.Fatalf("make release: %v\n%s", err, out)
	}
	second := filepath.Join(clone, ".build/dist")
	names := files(t, first)
	if want := files(t, second); strings.Join(names, " ") != strings.Join(want, " ") || len(names) < 6 {
		t.Fatalf("the builds made %v and %v", names, want)
	}
	for _, name := range names {
		a, errA := os.ReadFile(filepath.Join(first, name))
		b, errB := os.ReadFile(filepath.Join(second, name))
		if errA != nil || errB != nil || !bytes.Equal(a, b) {
			t.Errorf("%s differs: %v %v", name, errA, errB)
		}
	}
}

func TestChecksums(t *testing.T) {
	check := exec.Command("sha256sum", "--check", "--strict", "SHA256SUMS")
	check.Dir = first
	if out, err := check.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	sums, err := os.ReadFile(filepath.Join(first, "SHA256SUMS"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range files(t, first) {
		if name != "SHA256SUMS" && !strings.Contains(string(sums), "  "+name+"\n") {
			t.Errorf("SHA256SUMS lacks %s", name)
		}
	}
}

// inCopy runs a script as root in a copy-on-write copy of this machine's root file
// system, with /dist, /simgpu and an empty /run. Nothing of it reaches the machine.
func inCopy(t *testing.T, script string, args ...string) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("SKIPPED: only root can install packages")
	}
	const enter = `
set -eu
dist=$1 build=$2 copy=$3 script=$4
shift 4
mount -t tmpfs copy "$copy"
mkdir "$copy/upper" "$copy/work" "$copy/root"
mount -t overlay copy -o "lowerdir=/,upperdir=$copy/upper,workdir=$copy/work" "$copy/root"
cd "$copy/root"
mkdir -p dist simgpu/lib simgpu/run
mount --bind "$dist" dist
mount --bind "$build/simgpu" simgpu/lib
echo gpus=1 >simgpu/run/config
mount -t tmpfs run run
mount --rbind /dev dev
mount -t tmpfs tmp tmp
mount -t proc proc proc
exec chroot . sh -euc "$script" sh "$@"`
	argv := append([]string{"--mount", "--pid", "--fork", "--propagation", "private", "sh", "-c", enter, "sh", first, build, t.TempDir(), script}, args...)
	cmd := exec.Command("unshare", argv...)
	cmd.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "LC_ALL=C"}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// works uses what is installed; gone finds what is left. The user nvshare may stay, as
// packages' users do.
const (
	works = `
nvsharectl version || test $? = 3 # no scheduler runs here
test -z "$(LD_PRELOAD=libnvshare.so /bin/true 2>&1)"
nvshare-plugin --no-nri --simgpu /simgpu
nvsharectl cdi validate --simgpu /simgpu
test -s /usr/share/man/man1/nvsharectl.1 -o -s /usr/local/share/man/man1/nvsharectl.1
`
	gone = `
left=$(find /usr /etc /run /var/lib -xdev -name '*nvshare*' -newer /simgpu/run/config 2>/dev/null || true)
test -z "$(echo $left)" || { echo "left behind: $left"; exit 1; }
`
)

func TestTarball(t *testing.T) {
	for _, kind := range []string{"-static", ""} {
		name := filepath.Base(one(t, "nvshare-v*-linux-"+runtime.GOARCH+kind+".tar.gz"))
		t.Run(name, func(t *testing.T) {
			inCopy(t, `
mkdir /tmp/nvshare
tar -xzf "/dist/$1" -C /tmp/nvshare
/tmp/nvshare/nvsharectl install
`+works+`
nvsharectl uninstall
rm -r /tmp/nvshare
`+gone, name)
		})
	}
}

func TestDeb(t *testing.T) {
	if _, err := exec.LookPath("dpkg"); err != nil {
		t.Skip("SKIPPED: no dpkg here")
	}
	// A database of its own, because the copy's may know users that the copy lacks.
	inCopy(t, `
mkdir -p /tmp/dpkg/updates /tmp/dpkg/info
touch /tmp/dpkg/status /tmp/dpkg/available
dpkg() { command dpkg --admindir=/tmp/dpkg --force-depends "$@"; }
dpkg -i "/dist/$1"
`+works+`
dpkg -i "/dist/$1"
test -x /usr/sbin/nvshare-scheduler
test -d /var/lib/nvshare
dpkg -r nvshare
dpkg -P nvshare
rm -r /tmp/dpkg
`+gone, filepath.Base(one(t, "nvshare_*.deb")))
}

func TestRPM(t *testing.T) {
	if _, err := exec.LookPath("rpm"); err != nil {
		t.Skip("SKIPPED: no rpm here")
	}
	inCopy(t, `
rpm() { command rpm --dbpath /tmp/rpm --nodeps "$@"; }
command rpm --checksig --nosignature "/dist/$1"
rpm -i "/dist/$1"
`+works+`
rpm -U --replacepkgs "/dist/$1"
test -x /usr/sbin/nvshare-scheduler
rpm -e nvshare
rm -r /tmp/rpm
`+gone, filepath.Base(one(t, "nvshare-*.rpm")))
}

// The programs run with glibc 2.34, and the shim with 2.17.
func TestSymbolVersions(t *testing.T) {
	dir := t.TempDir()
	if out, err := exec.Command("tar", "-xzf", one(t, "nvshare-v*-linux-"+runtime.GOARCH+".tar.gz"), "-C", dir).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for name, most := range map[string]string{
		"nvshare-scheduler": "2.34", "nvshare-plugin": "2.34", "nvsharectl": "2.34", "libnvshare.so": "2.17",
		"nvshare-checkpoint": "", // no version is asked for
	} {
		out, err := exec.Command("sh", "-c", `objdump -T "$1" | grep -o 'GLIBC_[0-9.]*' | sed s/GLIBC_// | { cat; echo "$2"; } | sort -V | tail -n 1`, "sh", filepath.Join(dir, name), most).Output()
		if got := strings.TrimSpace(string(out)); err != nil || got != most {
			t.Errorf("%s needs glibc %s, %v; it may need %s", name, got, err, most)
		}
	}
}
