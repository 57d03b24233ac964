// SPDX-License-Identifier: Apache-2.0

package ldcache

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"path"
	"slices"
)

const (
	// MaxSize is the largest cache that Parse reads, in bytes. The caches of
	// large desktop systems are below 1 MiB.
	MaxSize = 4 << 20

	// maxStrings bounds the text of a parsed cache, in bytes: entries may
	// share and overlap strings, so a small file could unfold to gigabytes.
	maxStrings = 16 << 20
	maxString  = 4096 // PATH_MAX

	magicOld = "ld.so-1.7.0"
	magicNew = "glibc-ld.so.cache1.1"

	oldHeaderSize = 16 // magic, padding, number of entries
	oldEntrySize  = 12
	headerSize    = 48
	entrySize     = 24

	endianLittle = 2

	extensionMagic   = 0xeaa42174
	sectionGenerator = 0
	sectionHwcaps    = 1

	generator = "nvshare"
)

// ErrFormat means that the data is no cache in a format known here.
var ErrFormat = errors.New("not a glibc-ld.so.cache1.1 file")

// Flags of an entry: ELF, glibc, and the architecture.
const (
	FlagsAMD64 int32 = 0x0303
	FlagsARM64 int32 = 0x0a03
)

// FlagsFor returns the flags of 64-bit libraries on an architecture named as
// in GOARCH. It returns an error for one that nvshare does not support.
func FlagsFor(goarch string) (int32, error) {
	switch goarch {
	case "amd64":
		return FlagsAMD64, nil
	case "arm64":
		return FlagsARM64, nil
	}
	return 0, fmt.Errorf("no dynamic linker flags known for architecture %s", goarch)
}

// Entry says where the library of a name (its soname) is.
type Entry struct {
	Name  string
	Path  string
	Flags int32
	Hwcap uint64 // as in the file: opaque here
}

// Cache is the content of a cache file.
type Cache struct {
	Entries []Entry
	hwcaps  []string // glibc-hwcaps subdirectories; Entry.Hwcap may index them
}

// Parse reads a cache. It returns ErrFormat, possibly wrapped, for anything
// that is not a well-formed little-endian cache of at most MaxSize bytes.
func Parse(data []byte) (*Cache, error) {
	if len(data) > MaxSize {
		return nil, fmt.Errorf("%w: %d bytes, more than %d", ErrFormat, len(data), MaxSize)
	}
	// Up to glibc 2.31 ldconfig wrote the old format with the new one behind it.
	if bytes.HasPrefix(data, []byte(magicOld)) && len(data) >= oldHeaderSize {
		n := uint64(binary.LittleEndian.Uint32(data[12:]))
		skip := (oldHeaderSize + n*oldEntrySize + 7) &^ 7
		if skip > uint64(len(data)) {
			return nil, fmt.Errorf("%w: %d old entries in %d bytes", ErrFormat, n, len(data))
		}
		data = data[skip:]
	}
	if len(data) < headerSize || !bytes.HasPrefix(data, []byte(magicNew)) {
		return nil, ErrFormat
	}
	// Zero is what glibc before 2.33 wrote.
	if endian := data[28] & 3; endian != 0 && endian != endianLittle {
		return nil, fmt.Errorf("%w: not little-endian", ErrFormat)
	}
	n := uint64(binary.LittleEndian.Uint32(data[20:]))
	if headerSize+n*entrySize > uint64(len(data)) {
		return nil, fmt.Errorf("%w: %d entries in %d bytes", ErrFormat, n, len(data))
	}

	r := reader{data: data}
	c := &Cache{Entries: make([]Entry, 0, n)}
	for i := range n {
		e := data[headerSize+i*entrySize:]
		c.Entries = append(c.Entries, Entry{
			Flags: int32(binary.LittleEndian.Uint32(e)),
			Name:  r.text(binary.LittleEndian.Uint32(e[4:])),
			Path:  r.text(binary.LittleEndian.Uint32(e[8:])),
			Hwcap: binary.LittleEndian.Uint64(e[16:]),
		})
	}
	c.hwcaps = r.hwcaps(binary.LittleEndian.Uint32(data[32:]))
	if r.err != nil {
		return nil, r.err
	}
	return c, nil
}

// reader follows offsets into a cache file; its error sticks.
type reader struct {
	data []byte
	sum  int // bytes of text returned
	err  error
}

func (r *reader) text(offset uint32) string {
	if r.err != nil {
		return ""
	}
	if uint64(offset) >= uint64(len(r.data)) {
		r.err = fmt.Errorf("%w: string at %d of %d bytes", ErrFormat, offset, len(r.data))
		return ""
	}
	window := r.data[offset:min(uint64(offset)+maxString, uint64(len(r.data)))]
	end := bytes.IndexByte(window, 0)
	if end < 0 {
		r.err = fmt.Errorf("%w: endless string at %d", ErrFormat, offset)
		return ""
	}
	if r.sum += end; r.sum > maxStrings {
		r.err = fmt.Errorf("%w: more than %d bytes of text", ErrFormat, maxStrings)
		return ""
	}
	return string(window[:end])
}

// hwcaps returns the glibc-hwcaps names of the extension at offset, if any.
func (r *reader) hwcaps(offset uint32) []string {
	at := func(off, size uint64) []byte {
		if r.err == nil && off+size > uint64(len(r.data)) {
			r.err = fmt.Errorf("%w: extension at %d of %d bytes", ErrFormat, off, len(r.data))
		}
		if r.err != nil {
			return nil
		}
		return r.data[off : off+size]
	}
	if offset == 0 {
		return nil
	}
	head := at(uint64(offset), 8)
	if head == nil || binary.LittleEndian.Uint32(head) != extensionMagic {
		return nil // the dynamic linker ignores it too
	}
	count := uint64(binary.LittleEndian.Uint32(head[4:]))
	table := at(uint64(offset)+8, count*16)
	for ; len(table) > 0; table = table[16:] {
		if binary.LittleEndian.Uint32(table) != sectionHwcaps {
			continue
		}
		size := uint64(binary.LittleEndian.Uint32(table[12:])) &^ 3
		var names []string
		for list := at(uint64(binary.LittleEndian.Uint32(table[8:])), size); len(list) > 0; list = list[4:] {
			names = append(names, r.text(binary.LittleEndian.Uint32(list)))
		}
		return names
	}
	return nil
}

// Add makes the libraries at paths known under the last element of each path,
// in place of whatever the cache held under that name and these flags.
func (c *Cache) Add(flags int32, paths ...string) {
	for _, p := range paths {
		name := path.Base(p)
		c.Entries = slices.DeleteFunc(c.Entries, func(e Entry) bool { return e.Name == name && e.Flags == flags })
		c.Entries = append(c.Entries, Entry{Name: name, Path: p, Flags: flags})
	}
}

// Bytes encodes the cache.
func (c *Cache) Bytes() []byte {
	entries := slices.Clone(c.Entries)
	// The dynamic linker does a binary search by name, in descending order.
	// Among equal names the order of the original file is kept.
	slices.SortStableFunc(entries, func(a, b Entry) int { return compare(b.Name, a.Name) })

	var text []byte
	known := map[string]uint32{}
	base := uint32(headerSize + len(entries)*entrySize)
	intern := func(s string) uint32 {
		off, ok := known[s]
		if !ok {
			off = base + uint32(len(text))
			known[s] = off
			text = append(append(text, s...), 0)
		}
		return off
	}

	var body []byte
	for _, e := range entries {
		body = binary.LittleEndian.AppendUint32(body, uint32(e.Flags))
		body = binary.LittleEndian.AppendUint32(body, intern(e.Name))
		body = binary.LittleEndian.AppendUint32(body, intern(e.Path))
		body = binary.LittleEndian.AppendUint32(body, 0)
		body = binary.LittleEndian.AppendUint64(body, e.Hwcap)
	}
	var hwcaps []byte
	for _, name := range c.hwcaps {
		hwcaps = binary.LittleEndian.AppendUint32(hwcaps, intern(name))
	}

	head := append([]byte{}, magicNew...)
	head = binary.LittleEndian.AppendUint32(head, uint32(len(entries)))
	head = binary.LittleEndian.AppendUint32(head, uint32(len(text)))
	head = append(head, endianLittle, 0, 0, 0)
	extension := (base + uint32(len(text)) + 3) &^ 3
	head = binary.LittleEndian.AppendUint32(head, extension)
	head = append(head, make([]byte, headerSize-len(head))...)

	out := slices.Concat(head, body, text)
	out = append(out, make([]byte, int(extension)-len(out))...)
	return append(out, c.extension(extension, hwcaps)...)
}

// extension encodes the sections that follow the strings; offset is where they
// begin in the file.
func (c *Cache) extension(offset uint32, hwcaps []byte) []byte {
	sections := uint32(1)
	if len(hwcaps) > 0 {
		sections = 2
	}
	data := offset + 8 + sections*16
	var out []byte
	put := func(words ...uint32) {
		for _, w := range words {
			out = binary.LittleEndian.AppendUint32(out, w)
		}
	}
	put(extensionMagic, sections)
	if len(hwcaps) > 0 {
		put(sectionHwcaps, 0, data, uint32(len(hwcaps)))
		data += uint32(len(hwcaps))
	}
	put(sectionGenerator, 0, data, uint32(len(generator)))
	return append(append(out, hwcaps...), generator...)
}

// compare orders names as the dynamic linker does: runs of digits by value.
func compare(a, b string) int {
	digit := func(s string, i int) bool { return i < len(s) && '0' <= s[i] && s[i] <= '9' }
	number := func(s string, i int) (int32, int) {
		var v int32 // wraps like the original's int
		for ; digit(s, i); i++ {
			v = v*10 + int32(s[i]-'0')
		}
		return v, i
	}
	i, j := 0, 0
	for i < len(a) {
		switch {
		case digit(a, i) && digit(b, j):
			var x, y int32
			x, i = number(a, i)
			y, j = number(b, j)
			if x != y {
				return int(x - y)
			}
		case digit(a, i):
			return 1
		case digit(b, j):
			return -1
		case j >= len(b):
			return 1
		case a[i] != b[j]:
			return int(a[i]) - int(b[j])
		default:
			i++
			j++
		}
	}
	if j < len(b) {
		return -1
	}
	return 0
}
