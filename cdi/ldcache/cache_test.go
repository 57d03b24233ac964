// SPDX-License-Identifier: Apache-2.0

package ldcache

import (
	"encoding/binary"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
)

func sample() *Cache {
	return &Cache{
		Entries: []Entry{
			{Name: "libc.so.6", Path: "/lib/libc.so.6", Flags: FlagsAMD64},
			{Name: "libm.so.6", Path: "/lib/glibc-hwcaps/x86-64-v3/libm.so.6", Flags: FlagsAMD64, Hwcap: 1 << 62},
			{Name: "libm.so.6", Path: "/lib/libm.so.6", Flags: FlagsAMD64},
			{Name: "libcuda.so.1", Path: "/stub/libcuda.so.1", Flags: FlagsAMD64},
			{Name: "libcuda.so.1", Path: "/stub32/libcuda.so.1", Flags: 3},
		},
		hwcaps: []string{"x86-64-v3"},
	}
}

func TestAddReplacesTheSameNameAndFlags(t *testing.T) {
	c := sample()
	c.Add(FlagsAMD64, "/gpu/libcuda.so.1", "/gpu/libnvidia-ml.so.1")
	got, err := Parse(c.Bytes())
	if err != nil {
		t.Fatal(err)
	}
	paths := map[string]bool{}
	for _, e := range got.Entries {
		paths[e.Path] = true
	}
	for p, want := range map[string]bool{
		"/gpu/libcuda.so.1": true, "/gpu/libnvidia-ml.so.1": true, "/lib/libc.so.6": true,
		"/stub32/libcuda.so.1": true, "/stub/libcuda.so.1": false,
	} {
		if paths[p] != want {
			t.Errorf("%s in the cache: %v, want %v", p, paths[p], want)
		}
	}
	if !reflect.DeepEqual(got.hwcaps, []string{"x86-64-v3"}) {
		t.Errorf("hwcaps %q were not kept", got.hwcaps)
	}
	if !slices.IsSortedFunc(got.Entries, func(a, b Entry) int { return compare(b.Name, a.Name) }) {
		t.Errorf("entries are not in the order that the dynamic linker searches: %v", got.Entries)
	}
}

func TestCompareOrdersAsTheDynamicLinker(t *testing.T) {
	ascending := []string{"liba.so", "liba.so.2", "liba.so.10", "liba2.so", "libb.so.1"}
	for i, a := range ascending {
		for j, b := range ascending {
			if got := compare(a, b); (got < 0) != (i < j) || (got == 0) != (i == j) {
				t.Errorf("compare(%q, %q) = %d", a, b, got)
			}
		}
	}
}

// The system's own ldconfig must read from our bytes what it reads from its own.
func TestLdconfigReadsWhatWeWrite(t *testing.T) {
	data, err := os.ReadFile("/etc/ld.so.cache")
	ldconfig := "/sbin/ldconfig"
	if real := "/sbin/ldconfig.real"; fileExists(real) {
		ldconfig = real
	}
	if err != nil || !fileExists(ldconfig) {
		t.Skipf("this system has no ld.so.cache or ldconfig: %v", err)
	}
	c, err := Parse(data)
	if err != nil {
		t.Fatal(err)
	}
	list := func(file string) []string {
		out, err := exec.Command(ldconfig, "-p", "-C", file).CombinedOutput()
		if err != nil {
			t.Fatalf("ldconfig -p -C %s: %v\n%s", file, err, out)
		}
		var libs []string
		for _, line := range strings.Split(string(out), "\n") {
			if strings.HasPrefix(line, "\t") {
				libs = append(libs, line)
			}
		}
		return libs
	}
	file := filepath.Join(t.TempDir(), "cache")
	write := func() {
		if err := os.WriteFile(file, c.Bytes(), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write()
	want := list("/etc/ld.so.cache")
	if got := list(file); !slices.Equal(got, want) || len(want) == 0 {
		t.Fatalf("ldconfig lists %d libraries of our copy, %d of its own", len(got), len(want))
	}
	c.Add(FlagsAMD64, "/opt/x/libnvshare-test.so.1")
	write()
	got := list(file)
	if len(got) != len(want)+1 || !slices.ContainsFunc(got, func(l string) bool {
		return strings.Contains(l, "libnvshare-test.so.1 (libc6,x86-64) => /opt/x/libnvshare-test.so.1")
	}) {
		t.Errorf("ldconfig does not list the added library in %q", got)
	}
}

func fileExists(p string) bool { _, err := os.Stat(p); return err == nil }

func TestParseOldFormatInFront(t *testing.T) {
	old := append([]byte(magicOld), 0)
	old = binary.LittleEndian.AppendUint32(old, 3)
	old = append(old, make([]byte, 3*oldEntrySize)...)
	old = append(old, make([]byte, (8-len(old)%8)%8)...)
	c, err := Parse(append(old, sample().Bytes()...))
	if err != nil || len(c.Entries) != len(sample().Entries) {
		t.Fatalf("got %v, %v", c, err)
	}
}

func TestParseRejects(t *testing.T) {
	good := sample().Bytes()
	edit := func(f func(b []byte)) []byte {
		b := slices.Clone(good)
		f(b)
		return b
	}
	put := binary.LittleEndian.PutUint32
	// Many entries that all show one long string: small here, huge unfolded.
	bomb := edit(func(b []byte) { put(b[20:], 20000) })[:headerSize]
	long := uint32(headerSize + 20000*entrySize)
	for range 20000 {
		e := make([]byte, entrySize)
		put(e[4:], long)
		put(e[8:], long)
		bomb = append(bomb, e...)
	}
	bomb = append(bomb, slices.Repeat([]byte("a"), maxString-1)...)
	bomb = append(bomb, 0)

	for name, data := range map[string][]byte{
		"empty":           nil,
		"text":            []byte("hello"),
		"short header":    good[:40],
		"cut entries":     good[:60],
		"cut strings":     good[:headerSize+5*entrySize+3],
		"entry count":     edit(func(b []byte) { put(b[20:], 0xffffffff) }),
		"name offset":     edit(func(b []byte) { put(b[headerSize+4:], 0xfffffff0) }),
		"endless string":  append(edit(func(b []byte) { put(b[headerSize+4:], uint32(len(good))) }), 'x'),
		"big endian":      edit(func(b []byte) { b[28] = 3 }),
		"extension":       edit(func(b []byte) { put(b[32:], uint32(len(b)-4)) }),
		"old entry count": append(append([]byte(magicOld), 0), 0xff, 0xff, 0xff, 0xff, 0, 0),
		"bomb":            bomb,
		"too large":       make([]byte, MaxSize+1),
	} {
		if c, err := Parse(data); !errors.Is(err, ErrFormat) {
			t.Errorf("%s: got %v, %v", name, c, err)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add(sample().Bytes())
	f.Add([]byte(magicOld))
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := Parse(data)
		if err != nil {
			return
		}
		c.Add(FlagsAMD64, "/gpu/libcuda.so.1")
		encoded := c.Bytes()
		if len(encoded) > MaxSize {
			return // overlapping strings, now apart
		}
		again, err := Parse(encoded)
		if err != nil || len(again.Entries) != len(c.Entries) {
			t.Fatalf("what was parsed does not survive a round trip: %v", err)
		}
	})
}
