// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nvshare/nvshare/tests/mutants"
)

func text(s string) (r Refused) { r.SetText(s); return r }

// samples has one frame of each type with every field set.
func samples() []Frame {
	return []Frame{
		{Version: 1, Type: TypeRegister, Code: RegisterReconnect, Register: Register{MinVersion: 1, Channels: 8, ShimVersion: 0x00010203, Interposed: 120, Bypassed: 2}},
		{Version: 1, Type: TypeAttach, Channel: 31, Code: AttachWant, Epoch: 1<<40 | 5, Attach: Attach{UUID: UUID{0x51, 0x60, 15: 7}, Ordinal: 3, TotalMem: 141 << 30}},
		{Version: 1, Type: TypeRequest, Channel: 4},
		{Version: 1, Type: TypeRelease, Channel: 4, Code: ReleaseIdle, Epoch: 77, Released: Released{DrainNs: 2_500_000, Calls: 9}},
		{Version: 1, Type: TypeStats, Channel: 1, Stats: Stats{Calls: 1, Waits: 2, WaitNs: 3, MemBytes: 4, MemPeak: 5, WaitMaxNs: 6}},
		{Version: 1, Type: TypeReserve, Channel: 9, Code: ReserveForce, Reserve: Reserve{Total: 3 << 30, Least: 2 << 30, Serial: 8}},
		{Version: 1, Type: TypeWelcome, Welcome: Welcome{ClientID: 99, PageSize: PageSize, Slots: MaxChannels}},
		{Version: 1, Type: TypeAttached, Channel: 2, Code: ErrUnknownGPU},
		{Version: 1, Type: TypeAttached, Channel: 2, Attached: Attached{UUID: UUID{0x51, 0x60, 15: 7}}},
		{Version: 1, Type: TypeGrant, Channel: 2, Code: GrantConcurrent, Epoch: 78, Grant: Grant{QuantumNs: 100_000_000}},
		{Version: 1, Type: TypeRevoke, Channel: 2, Epoch: 78, Revoke: Revoke{GraceNs: 10_000_000_000, Waiters: 3}},
		{Version: 1, Type: TypeNotice, Channel: 2, Notice: Notice{Waiters: 1, Present: 2}},
		{Version: 1, Type: TypeRefused, Code: ErrTooMany, Refused: text("container has 256 clients")},
		{Version: 1, Type: TypeReserved, Channel: 9, Code: ErrMemory, Reserved: Reserved{Total: 1 << 30, Used: 7 << 30, Limit: 8 << 30, Serial: 8}},
		{Version: 1, Type: TypeMoved, Channel: 9, Code: MovedStuck | MovedNoArena, Epoch: 79, Moved: Moved{Resident: 7 << 30, Fixed: 1 << 30, Away: 3 << 30, Out: 4, In: 5, Arena: 6}},
		{Version: 1, Type: TypeUtil, Channel: 9, Util: Util{Samples: 50, Busy: 31, Calls: 9000}},
		{Version: 1, Type: TypeControls, Channel: 9, Controls: Controls{Slices: ControlWorks, Channels: ControlFaked, Groups: 3, Bare: 8, Driver: [40]byte{0: '5', 1: '8', 2: '0'}}},
		{Version: 1, Type: TypeRoom, Channel: 9, Room: Room{Bytes: 8 << 30}},
		{Version: 1, Type: TypeSlice, Channel: 9, Slice: Slice{Ns: 50_000}},
		{Version: 1, Type: TypeSuspend, Code: SuspendPrepare},
		{Version: 1, Type: TypeSuspended, Code: SuspendedWake},
		{Version: 1, Type: TypeArena, Channel: 9, Arena: Arena{Segment: 3, Size: 1 << 30, Flags: ArenaHuge}},
	}
}

func TestRoundTrip(t *testing.T) {
	for _, f := range samples() {
		b := f.Encode()
		got, err := Decode(b[:])
		if err != nil {
			t.Errorf("%v: %v", f.Type, err)
		}
		if got != f {
			t.Errorf("%v: decoded %+v, want %+v", f.Type, got, f)
		}
	}
}

// What MOVED says of its flags and of the reason do not mix.
func TestFixedBy(t *testing.T) {
	f, err := Decode(readHex(t, filepath.Join("../../tests/golden/v1", "moved_fixed.hex")))
	if err != nil || f.FixedBy() != FixedRDMA || f.Code&(MovedReady|MovedStuck) != 0 {
		t.Errorf("%+v, %v, fixed by %d", f, err, f.FixedBy())
	}
	for _, code := range []uint32{0, 1<<24 - 1, 1 << 31} {
		if f := (Frame{Code: code}); f.FixedBy() != FixedNot {
			t.Errorf("code %#x: fixed by %d", code, f.FixedBy())
		}
	}
}

// TestGolden decodes and re-encodes the frames that the C side prints from the
// structures of hook/wire.h.
func TestGolden(t *testing.T) {
	files, err := filepath.Glob("../../tests/golden/v1/*.hex")
	if err != nil || len(files) == 0 {
		t.Fatalf("no golden frames in tests/golden/v1 (%v): they are committed, restore them", err)
	}
	seen := map[Type]bool{}
	for _, name := range files {
		if filepath.Base(name) == "page.hex" {
			continue // TestGoldenPage
		}
		packet := readHex(t, name)
		f, err := Decode(packet)
		if err != nil {
			t.Errorf("%s: %v", filepath.Base(name), err)
			continue
		}
		if again := f.Encode(); !bytes.Equal(again[:], packet) {
			t.Errorf("%s: re-encoded\n%x, want\n%x", filepath.Base(name), again, packet)
		}
		seen[f.Type] = true
	}
	for _, f := range samples() {
		if !seen[f.Type] {
			t.Errorf("no golden frame of type %v", f.Type)
		}
	}
}

// TestGoldenPage builds the page that the C side printed.
func TestGoldenPage(t *testing.T) {
	want := readHex(t, "../../tests/golden/v1/page.hex")
	mem := alignedPage()
	p, err := NewPage(mem, 0x0102030405060708)
	if err != nil {
		t.Fatal(err)
	}
	p.Hint(1, 0x21222324, 0x31323334)
	p.Open(1, 0x11121314, GrantConcurrent, 0x4142434445464748, 0x5152535455565758)
	le.PutUint32(mem[pageSlot+slotSize+slotLimitSeq:], 0x61626364-2) // a write is two steps
	p.SetLimits(1, Limits{Core: 0x71727374, Memory: 0x8182838485868788, Used: 0x9192939495969798})
	if !bytes.Equal(mem, want) {
		t.Errorf("page is\n%x, want\n%x", mem[:3*slotSize], want[:3*slotSize])
	}
}

// readHex returns the bytes of a golden file: hexadecimal digits, with
// comments after #.
func readHex(t testing.TB, name string) []byte {
	t.Helper()
	raw, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	var digits strings.Builder
	lines := bufio.NewScanner(bytes.NewReader(raw))
	for lines.Scan() {
		line, _, _ := strings.Cut(lines.Text(), "#")
		digits.WriteString(strings.Join(strings.Fields(line), ""))
	}
	b, err := hex.DecodeString(digits.String())
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return b
}

func TestDecodeRefuses(t *testing.T) {
	set := func(typ Type, off int, v byte) []byte {
		for _, f := range samples() {
			if f.Type == typ {
				b := f.Encode()
				b[off] = v
				return b[:]
			}
		}
		return nil
	}
	for name, tc := range map[string]struct {
		b    []byte
		want error
	}{
		"empty":                  {nil, errLength},
		"short":                  {set(TypeRequest, 0, 1)[:63], errLength},
		"long":                   {append(set(TypeRequest, 0, 1), 0), errLength},
		"version 0":              {set(TypeRequest, 0, 0), errVersion},
		"version 2":              {set(TypeRequest, 0, 2), errVersion},
		"register version 0":     {set(TypeRegister, 0, 0), errVersion},
		"type 0":                 {set(TypeRequest, 1, 0), errType},
		"type 7":                 {set(TypeRequest, 1, 7), errType},
		"type 76":                {set(TypeWelcome, 1, 76), errType}, // was COPIER
		"type 64":                {set(TypeRequest, 1, 64), errType},
		"type 255":               {set(TypeRequest, 1, 255), errType},
		"channel 32":             {set(TypeRequest, 2, 32), errChannel},
		"channel of register":    {set(TypeRegister, 2, 1), errChannel},
		"unknown flag":           {set(TypeRegister, 4, 2), errCode},
		"request with code":      {set(TypeRequest, 4, 1), errCode},
		"release without reason": {set(TypeRelease, 4, 0), errCode},
		"release reason 4":       {set(TypeRelease, 4, 4), errCode},
		"request with epoch":     {set(TypeRequest, 8, 1), errEpoch},
		"release epoch 0":        {set(TypeRelease, 8, 0), errEpoch},
		"attach epoch low 0":     {set(TypeAttach, 8, 0), errEpoch},
		"register reserved":      {set(TypeRegister, 63, 1), errReserved},
		"attach reserved0":       {set(TypeAttach, 36, 1), errReserved},
		"request payload":        {set(TypeRequest, 16, 1), errReserved},
		"attach flag 4":          {set(TypeAttach, 4, 4), errCode},
		"observe and want":       {set(TypeAttach, 4, 3), errObserve},
		"observe and hold":       {set(TypeAttach, 4, 2), errObserve},
		"reserve flag 2":         {set(TypeReserve, 4, 2), errCode},
		"reserve with epoch":     {set(TypeReserve, 8, 1), errEpoch},
		"reserve reserved":       {set(TypeReserve, 40, 1), errReserved},
		"moved flag":             {set(TypeMoved, 4, 4), errCode},
		"util reserved":          {set(TypeUtil, 28, 1), errReserved},
		"controls result":        {set(TypeControls, 16, 6), errControls},
		"controls version":       {set(TypeControls, 24, '\n'), errControls},
		"controls not ended":     {bytes.Join([][]byte{set(TypeControls, 0, 1)[:24], bytes.Repeat([]byte{'x'}, 40)}, nil), errControls},
		"controls after the end": {set(TypeControls, 63, 1), errReserved},
		"util busier than looks": {set(TypeUtil, 20, 51), errUtil},
		"util too many samples":  {set(TypeUtil, 18, 0x10), errUtil},
		"room reserved":          {set(TypeRoom, 24, 1), errReserved},
		"slice reserved":         {set(TypeSlice, 24, 1), errReserved},
		"arena reserved":         {set(TypeArena, 36, 1), errReserved},
		"reserve channel":        {set(TypeReserve, 2, 32), errChannel},
		"reserved error":         {set(TypeReserved, 4, 6), errCode},
		"reserved reserved":      {set(TypeReserved, 48, 1), errReserved},
		"no channels":            {set(TypeRegister, 18, 0), errChannels},
		"33 channels":            {set(TypeRegister, 18, 33), errChannels},
		"oldest version 0":       {set(TypeRegister, 16, 0), errMinVersion},
		"oldest above newest":    {set(TypeRegister, 16, 2), errMinVersion},
		"page size":              {set(TypeWelcome, 24, 1), errPage},
		"text not ended":         {bytes.Join([][]byte{set(TypeRefused, 0, 1)[:16], bytes.Repeat([]byte{'x'}, 48)}, nil), errText},
		"text not UTF-8":         {set(TypeRefused, 16, 0xff), errText},
		"text after NUL":         {set(TypeRefused, 63, 1), errReserved},
	} {
		if _, err := Decode(tc.b); err != tc.want || !errors.Is(err, ErrFrame) {
			t.Errorf("%s: error %v, want %v", name, err, tc.want)
		}
	}
}

// A newer shim announces its newest version and must be answered, not dropped.
func TestRegisterOfNewerVersion(t *testing.T) {
	f := samples()[0]
	f.Version = 3
	b := f.Encode()
	b[63] = 0xaa // a field of version 3
	got, err := Decode(b[:])
	if err != nil || got.Register != f.Register || got.Version != 3 {
		t.Errorf("decoded %+v, %v", got, err)
	}
}

func TestRefusedText(t *testing.T) {
	for in, want := range map[string]string{
		"":                                   "",
		"short":                              "short",
		strings.Repeat("a", 100):             strings.Repeat("a", 47),
		strings.Repeat("a", 46) + "é":        strings.Repeat("a", 46),
		strings.Repeat("a", 45) + "é" + "bc": strings.Repeat("a", 45) + "é",
		"cut\x00here":                        "cut",
		"not UTF-8\xff\xfe":                  "not UTF-8?",
		strings.Repeat("a", 47) + "\xff":     strings.Repeat("a", 47),
	} {
		r := text(in)
		if r.String() != want {
			t.Errorf("%q: stored %q, want %q", in, r.String(), want)
		}
		f := Frame{Version: 1, Type: TypeRefused, Code: ErrInternal, Refused: r}
		b := f.Encode()
		if _, err := Decode(b[:]); err != nil {
			t.Errorf("%q: %v", in, err)
		}
	}
}

func TestNoAllocations(t *testing.T) {
	good := samples()
	var packets [][FrameSize]byte
	for i := range good {
		packets = append(packets, good[i].Encode())
	}
	bad := packets[0]
	bad[63] = 1
	n := testing.AllocsPerRun(100, func() {
		for i := range packets {
			f, err := Decode(packets[i][:])
			if err != nil {
				t.Fatal(err)
			}
			packets[i] = f.Encode()
		}
		if _, err := Decode(bad[:]); err == nil {
			t.Fatal("bad frame accepted")
		}
	})
	if n != 0 {
		t.Errorf("%v allocations, want 0", n)
	}
}

func FuzzDecode(f *testing.F) {
	for _, s := range decodeSeeds(f) {
		f.Add(s[0].([]byte))
	}
	f.Fuzz(decodes)
}

func TestDecodeMutants(t *testing.T) {
	mutants.Run(t, decodeSeeds(t), func(t *testing.T, in []any) { decodes(t, in[0].([]byte)) })
}

func decodeSeeds(t testing.TB) (seeds [][]any) {
	add := func(b []byte) { seeds = append(seeds, []any{b}) }
	for _, s := range samples() {
		b := s.Encode()
		add(b[:])
	}
	files, _ := filepath.Glob("../../tests/golden/v1/*.hex")
	for _, name := range files {
		add(readHex(t, name))
	}
	add([]byte{})
	huge := Frame{Version: 1, Type: TypeReserve, Reserve: Reserve{Total: 1<<64 - 1, Least: 1<<64 - 1, Serial: 1<<64 - 1}}
	b := huge.Encode()
	add(b[:])
	observe := Frame{Version: 1, Type: TypeAttach, Code: AttachObserve, Attach: Attach{UUID: UUID{1}}}
	c := observe.Encode()
	add(c[:])
	return seeds
}

func decodes(t *testing.T, b []byte) {
	fr, err := Decode(b)
	if err != nil {
		if !errors.Is(err, ErrFrame) {
			t.Fatalf("error %v does not wrap ErrFrame", err)
		}
		return
	}
	if fr.Type == TypeRegister && fr.Version > Version {
		return // only the fields we know are kept
	}
	if again := fr.Encode(); !bytes.Equal(again[:], b) {
		t.Fatalf("accepted %x but re-encodes it as %x", b, again)
	}
}
