// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bufio"
	"crypto/sha256"
	"encoding/hex"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const golden1 = "../../tests/golden/v1"

// Frames of version 1 are in the hands of shims that run in containers: their
// bytes never change. A frame that is new gets a line of its own in SHA256SUMS.
func TestGoldenBytesAreFrozen(t *testing.T) {
	sums, err := os.Open(filepath.Join(golden1, "SHA256SUMS"))
	if err != nil {
		t.Fatal(err)
	}
	defer sums.Close()
	frozen := map[string]bool{}
	for lines := bufio.NewScanner(sums); lines.Scan(); {
		want, name, ok := strings.Cut(lines.Text(), "  ")
		if !ok {
			t.Fatalf("SHA256SUMS: %q", lines.Text())
		}
		frozen[name] = true
		text, err := os.ReadFile(filepath.Join(golden1, name))
		if err != nil {
			t.Error(err)
			continue
		}
		if sum := sha256.Sum256(text); hex.EncodeToString(sum[:]) != want {
			t.Errorf("%s has changed: shims that run would be misunderstood; give the new layout a new version", name)
		}
	}
	files, err := filepath.Glob(filepath.Join(golden1, "*.hex"))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if !frozen[filepath.Base(f)] {
			t.Errorf("%s is not frozen: add it to SHA256SUMS once it is released", f)
		}
	}
}

// The bytes have to go on meaning what they meant.
func TestGoldenMeaningIsFrozen(t *testing.T) {
	for name, want := range map[string]Frame{
		"register": {Version: 1, Type: 1, Code: 1, Register: Register{MinVersion: 1, Channels: 8, ShimVersion: 0x10203, Interposed: 0x11121314, Bypassed: 0x21222324}},
		"attach": {Version: 1, Type: 2, Channel: 3, Code: 1, Epoch: 0x102030405060708, Attach: Attach{
			UUID: UUID{0x51, 0x60, 0x00, 0x01, 0x02, 0x03, 0x40, 0x04, 0x80, 0x05, 0x06, 0x07, 0x08, 0x09, 0x0a, 0x0b}, Ordinal: 5, TotalMem: 0x2233445566778899}},
		"request":  {Version: 1, Type: 3, Channel: 31},
		"release":  {Version: 1, Type: 4, Channel: 2, Code: 2, Epoch: 0x1112131415161718, Released: Released{DrainNs: 0x3132333435363738, Calls: 0x4142434445464748}},
		"stats":    {Version: 1, Type: 5, Channel: 1, Stats: Stats{Calls: 0x5152535455565758, Waits: 0x6162636465666768, WaitNs: 0x7172737475767778, MemBytes: 0x8182838485868788, MemPeak: 0x9192939495969798, WaitMaxNs: 0xa1a2a3a4a5a6a7a8}},
		"reserve":  {Version: 1, Type: 6, Channel: 9, Code: 1, Reserve: Reserve{Total: 0x212223242526272, Least: 0x111213141516171, Serial: 0x313233343536373}},
		"welcome":  {Version: 1, Type: 65, Welcome: Welcome{ClientID: 0xb1b2b3b4b5b6b7b8, PageSize: 4096, Slots: 32}},
		"attached": {Version: 1, Type: 66, Channel: 7, Code: 2},
		"grant":    {Version: 1, Type: 67, Channel: 6, Code: 1, Epoch: 0xc1c2c3c4c5c6c7c8, Grant: Grant{QuantumNs: 0xd1d2d3d4d5d6d7d8}},
		"revoke":   {Version: 1, Type: 68, Channel: 4, Epoch: 0xe1e2e3e4e5e6e7e8, Revoke: Revoke{GraceNs: 0xf1f2f3f4f5f6f7f8, Waiters: 0xa0b0c0d}},
		"notice":   {Version: 1, Type: 69, Channel: 5, Notice: Notice{Waiters: 0x1a1b1c1d, Present: 0x2a2b2c2d}},
		"refused":  {Version: 1, Type: 70, Code: 1, Refused: text("protocol version 9 is not spoken here")},
		"reserved": {Version: 1, Type: 71, Channel: 10, Code: 7, Reserved: Reserved{Total: 0x414243444546474, Used: 0x515253545556575, Limit: 0x616263646566676, Serial: 0x717273747576777}},
	} {
		f, err := Decode(readHex(t, filepath.Join(golden1, name+".hex")))
		if err != nil || f != want {
			t.Errorf("%s: %+v, %v, want %+v", name, f, err, want)
		}
	}
}

// A newer peer may set flags that we need not know; of the others we refuse what
// we do not know, for the frame means something else with it.
func TestUnknownFlags(t *testing.T) {
	for _, f := range samples() {
		hasFlags := f.Type == TypeRegister || f.Type == TypeAttach || f.Type == TypeReserve || f.Type == TypeGrant || f.Type == TypeRevoke || f.Type == TypeMoved
		for bit := range 32 {
			g := f
			g.Code ^= 1 << bit
			b := g.Encode()
			got, err := Decode(b[:])
			switch {
			case hasFlags && 1<<bit&OptionalFlags != 0:
				if err != nil || got != g {
					t.Errorf("%v with flag %#x: %v", f.Type, 1<<bit, err)
				}
			case bit > 3 && err == nil && (f.Type != TypeMoved || 1<<bit&movedSeen == 0):
				t.Errorf("%v with code %#x is accepted", f.Type, g.Code)
			}
		}
	}
	observe := Frame{Version: 1, Type: TypeAttach, Code: AttachObserve | AttachWant | 1<<31}
	b := observe.Encode()
	if _, err := Decode(b[:]); err != errObserve {
		t.Errorf("observes and wants, with an unknown flag: %v", err)
	}
}
