//go:build release

// SPDX-License-Identifier: Apache-2.0

package release

import (
	"bytes"
	"debug/elf"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/util/version"

	"github.com/nvshare/nvshare/tests/readme"
)

const top = "../.."

// epoch is the time in the files of both builds.
const epoch = "1700000000"

// image is that of the chart in both builds.
const image = "registry.example/nvshare"

var (
	build  = os.Getenv("NVSHARE_TEST_BUILD") // holds the simulated GPU; make test-release sets it
	first  string                            // the first build's files
	arches = buildable()
)

// rpmArch has rpm's names of architectures.
var rpmArch = map[string]string{"amd64": "x86_64", "arm64": "aarch64"}

// buildable returns the architectures for which this machine can make a release: its own,
// and arm64 where the cross compiler is here.
func buildable() []string {
	own := []string{runtime.GOARCH}
	if _, err := exec.LookPath("aarch64-linux-gnu-gcc"); err == nil && runtime.GOARCH != "arm64" {
		return append(own, "arm64")
	}
	return own
}

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
	// The shim is what make built; TestSameBytesTwice builds it anew.
	if out, err := exec.Command("sh", "-c", `cd "$1" && cp -a --parents lib obj/hook* "$2"`, "sh", build, dir).CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "copy the shim: %v\n%s", err, out)
	} else if out, err := makeRelease(top, "umask 022", arches, "BUILD="+dir); err != nil {
		fmt.Fprintf(os.Stderr, "make release: %v\n%s", err, out)
	} else {
		status = m.Run()
	}
	os.RemoveAll(dir)
	os.Exit(status)
}

// makeRelease runs make release in dir, after a line of shell.
func makeRelease(dir, before string, arches []string, args ...string) ([]byte, error) {
	cmd := exec.Command("sh", append([]string{"-c", before + ` && exec make --no-print-directory release "$@"`, "sh", "IMAGE=" + image, "ARCHES=" + strings.Join(arches, " ")}, args...)...)
	cmd.Dir = dir
	// The outer make's flags would name its own build directory.
	cmd.Env = append(os.Environ(), "SOURCE_DATE_EPOCH="+epoch, "GZIP_LEVEL=1", "MAKEFLAGS=", "MAKELEVEL=")
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

// Another clone, of another user's umask, language and time zone, makes the same bytes. Those for
// another architecture come by the same commands.
func TestSameBytesTwice(t *testing.T) {
	t.Parallel()
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
	if out, err := makeRelease(clone, "umask 077 && export TZ=Asia/Tokyo LC_ALL=C.UTF-8", arches[:1]); err != nil {
		t.Fatalf("make release: %v\n%s", err, out)
	}
	second := filepath.Join(clone, ".build/dist")
	all, names := files(t, first), files(t, second)
	if len(all) != 5*len(arches)+2 || len(names) != 5+2 {
		t.Fatalf("the builds made %v and %v", all, names)
	}
	for _, name := range names {
		if name == "SHA256SUMS" { // of other files, too
			continue
		}
		a, errA := os.ReadFile(filepath.Join(first, name))
		b, errB := os.ReadFile(filepath.Join(second, name))
		if errA != nil || errB != nil || !bytes.Equal(a, b) {
			t.Errorf("%s differs: %v %v", name, errA, errB)
		}
	}
}

func TestChecksums(t *testing.T) {
	t.Parallel()
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

// README's commands name this release's files.
func TestNamesOfREADME(t *testing.T) {
	t.Parallel()
	if !slices.Contains(arches, "amd64") {
		t.Skip("SKIPPED: README names the files for amd64")
	}
	var named []string
	commands, err := readme.Commands(readme.Pages("../..")...)
	for _, line := range commands {
		named = append(named, regexp.MustCompile(`\bnvshare[-_][0-9a-z._-]*\.(deb|rpm|tar\.gz)\b`).FindAllString(line, -1)...)
	}
	if err != nil || len(named) != 3 {
		t.Errorf("README names %v, %v: want a deb, an rpm and a tarball", named, err)
	}
	for _, name := range named {
		if !slices.Contains(files(t, first), name) {
			t.Errorf("README names %s, of %v", name, files(t, first))
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
nvshare-scheduler --version
nvshare-plugin --version
test -z "$(LD_PRELOAD=libnvshare.so /bin/true 2>&1)"
nvshare-plugin --no-nri --simgpu /simgpu
nvsharectl cdi validate --simgpu /simgpu
for page in man1/nvsharectl.1 man8/nvshare-scheduler.8 man8/nvshare-warden.8 man8/nvshare-plugin.8; do
	test -s /usr/share/man/$page -o -s /usr/local/share/man/$page
done
`
	gone = `
left=$(find /usr /etc /run /var/lib -xdev -name '*nvshare*' -newer /simgpu/run/config 2>/dev/null || true)
test -z "$(echo $left)" || { echo "left behind: $left"; exit 1; }
`
)

func TestTarball(t *testing.T) {
	t.Parallel()
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
	t.Parallel()
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
if nvsharectl uninstall 2>/tmp/said; then exit 1; fi
grep 'apt remove nvshare' /tmp/said
test -d /var/lib/nvshare
dpkg -r nvshare >/tmp/said
if grep 'nothing that' /tmp/said; then exit 1; fi
dpkg -P nvshare
rm -r /tmp/dpkg
`+gone, filepath.Base(one(t, "nvshare_*_"+runtime.GOARCH+".deb")))
}

func TestRPM(t *testing.T) {
	t.Parallel()
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
`+gone, filepath.Base(one(t, "nvshare-*."+rpmArch[runtime.GOARCH]+".rpm")))
}

// The programs of each architecture are for its processors, run with glibc 2.34, and the
// shim with 2.17. The static ones ask for no library.
func TestPrograms(t *testing.T) {
	t.Parallel()
	machines := map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}
	most := map[string]string{"nvshare-scheduler": "2.34", "nvshare-plugin": "2.34", "nvsharectl": "2.34", "libnvshare.so": "2.17"}
	for _, arch := range arches {
		for _, kind := range []string{"", "-static"} {
			dir := unpack(t, arch, kind)
			for _, name := range []string{"nvshare-scheduler", "nvshare-plugin", "nvsharectl", "nvshare-checkpoint", "nvshare-warden", "nvshare-cdi-hook", "libnvshare.so"} {
				f, err := elf.Open(filepath.Join(dir, name))
				if err != nil {
					t.Errorf("%s%s: %v", arch, kind, err)
					continue
				}
				want := most[name]
				if kind != "" && name != "libnvshare.so" {
					want = ""
				}
				got, err := newestGlibc(f)
				f.Close()
				if err != nil || f.Machine != machines[arch] || got != want {
					t.Errorf("%s%s: %s is for %v and needs glibc %q, %v; it should be for %v and need %q", arch, kind, name, f.Machine, got, err, machines[arch], want)
				}
			}
		}
	}
}

// The programs for arm64 start, as far as emulation shows that.
func TestRunsOnArm64(t *testing.T) {
	t.Parallel()
	qemu, err := exec.LookPath("qemu-aarch64")
	if err != nil || !slices.Contains(arches, "arm64") || runtime.GOARCH == "arm64" {
		t.Skip("SKIPPED: no qemu-aarch64 or no cross compiler here, or this is arm64")
	}
	for kind, programs := range map[string][][]string{
		// What installs is the same Go for each processor, and takes 9 s under emulation: TestTarball has it.
		"":        {{"nvshare-scheduler", "--version"}, {"nvshare-plugin", "--version"}, {"nvsharectl", "--help"}},
		"-static": {{"nvsharectl", "--help"}},
	} {
		dir := unpack(t, "arm64", kind)
		for _, program := range programs {
			cmd := exec.Command(qemu, append([]string{filepath.Join(dir, program[0])}, program[1:]...)...)
			cmd.Env = append(os.Environ(), "QEMU_LD_PREFIX=/usr/aarch64-linux-gnu") // the cross compiler's C library
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("arm64%s: %v: %v\n%s", kind, program, err, out)
			}
		}
	}
}

// A package says for which processor it is, and has the files that install copies, for
// each architecture the same.
func TestPackages(t *testing.T) {
	t.Parallel()
	for _, arch := range arches {
		for _, p := range []struct{ tool, pattern, arch, files, want string }{
			{"dpkg-deb", "nvshare_*_" + arch + ".deb", `dpkg-deb --field "$1" Architecture`, `dpkg-deb --fsys-tarfile "$1" | tar -tf - | sed 's,^\.,,'`, arch},
			{"rpm", "nvshare-*." + rpmArch[arch] + ".rpm", `rpm --query --package --queryformat '%{ARCH}' "$1"`, `rpm --query --list --package "$1"`, rpmArch[arch]},
		} {
			if _, err := exec.LookPath(p.tool); err != nil {
				t.Logf("SKIPPED: no %s here", p.tool)
				continue
			}
			file := one(t, p.pattern)
			if out, err := exec.Command("sh", "-c", p.arch, "sh", file).CombinedOutput(); err != nil || strings.TrimSpace(string(out)) != p.want {
				t.Errorf("%s is for %q, %v; it should be for %s", file, out, err, p.want)
			}
			out, err := exec.Command("sh", "-c", p.files, "sh", file).CombinedOutput()
			if err != nil {
				t.Errorf("%s: %v\n%s", file, err, out)
			}
			list := strings.Fields(string(out))
			for _, want := range []string{"/usr/bin/nvsharectl", "/usr/sbin/nvshare-scheduler", "/usr/share/man/man1/nvsharectl.1", "/usr/share/man/man8/nvshare-scheduler.8", "/usr/share/man/man8/nvshare-plugin.8"} {
				if !slices.Contains(list, want) {
					t.Errorf("%s lacks %s: %s", file, want, list)
				}
			}
		}
	}
}

// The list of parts is valid, and names nvshare, the C library and Go's modules with
// their versions. Each module's licence is in the release.
func TestSBOM(t *testing.T) {
	t.Parallel()
	spaces := map[string]string{} // two documents may not have the same
	for _, arch := range arches {
		text, err := os.ReadFile(one(t, "nvshare-v*-linux-"+arch+".spdx.json"))
		if err != nil {
			t.Fatal(err)
		}
		var sbom struct {
			SPDXVersion       string `json:"spdxVersion"`
			DocumentNamespace string
			Packages          []struct{ Name, VersionInfo string }
		}
		if err := json.Unmarshal(text, &sbom); err != nil || sbom.SPDXVersion != "SPDX-2.3" {
			t.Fatalf("%s: SPDX version %q, %v", arch, sbom.SPDXVersion, err)
		}
		if other, ok := spaces[sbom.DocumentNamespace]; ok {
			t.Errorf("%s and %s have the name space %s", other, arch, sbom.DocumentNamespace)
		}
		spaces[sbom.DocumentNamespace] = arch
		licences, err := os.ReadFile(filepath.Join(unpack(t, arch, ""), "THIRD_PARTY_LICENSES"))
		if err != nil {
			t.Fatal(err)
		}
		versions := map[string]string{}
		for _, p := range sbom.Packages {
			if strings.Contains(p.Name, "/") && !strings.Contains(string(licences), "\n================ "+p.Name+" "+p.VersionInfo+": ") {
				t.Errorf("%s: no licence of %s %s", arch, p.Name, p.VersionInfo)
			}
			versions[p.Name] = p.VersionInfo
			if p.VersionInfo == "" || strings.Contains(p.VersionInfo, " ") {
				t.Errorf("%s: %s has version %q", arch, p.Name, p.VersionInfo)
			}
		}
		for _, want := range []string{"nvshare", "glibc", "github.com/spf13/cobra"} {
			if _, ok := versions[want]; !ok {
				t.Errorf("%s: %s is missing in %v", arch, want, versions)
			}
		}
	}
}

// The chart is one that Helm takes: a folder of the chart's name, with this version's number.
func TestChart(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := one(t, "nvshare-[0-9]*.tgz")
	if out, err := exec.Command("tar", "-xzf", file, "-C", dir).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if os.Getenv("NVSHARE_TEST_DIST") == "" {
		checkHas(t, filepath.Join(dir, "nvshare/values.yaml"), "repository: "+image)
	}
	number := strings.TrimSuffix(strings.TrimPrefix(filepath.Base(file), "nvshare-"), ".tgz")
	checkHas(t, filepath.Join(dir, "nvshare/Chart.yaml"), "version: "+number)
	checkHas(t, filepath.Join(dir, "nvshare/templates/daemonset.yaml"), "kind: DaemonSet")
}

// checkHas looks for the end of a line.
func checkHas(t *testing.T, file, want string) {
	t.Helper()
	if text, err := os.ReadFile(file); err != nil || !strings.Contains(string(text), want+"\n") {
		t.Errorf("%s lacks %q: %v", file, want, err)
	}
}

// newestGlibc returns the newest version of glibc that a file's symbols name; "": none does.
func newestGlibc(f *elf.File) (string, error) {
	symbols, err := f.ImportedSymbols()
	if errors.Is(err, elf.ErrNoSymbols) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	var newest *version.Version
	for _, s := range symbols {
		number, ok := strings.CutPrefix(s.Version, "GLIBC_")
		if !ok {
			continue
		}
		v, err := version.ParseGeneric(number)
		if err != nil {
			return "", fmt.Errorf("%s asks for %s: %w", s.Name, s.Version, err)
		}
		if newest == nil || newest.LessThan(v) {
			newest = v
		}
	}
	if newest == nil {
		return "", nil
	}
	return newest.String(), nil
}

func unpack(t *testing.T, arch, kind string) string {
	t.Helper()
	dir := t.TempDir()
	if out, err := exec.Command("tar", "-xzf", one(t, "nvshare-v*-linux-"+arch+kind+".tar.gz"), "-C", dir).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return dir
}
