// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"unsafe"
)

// alignedPage returns a zeroed page, aligned as a mapping is.
func alignedPage() []byte {
	b := make([]byte, 2*PageSize)
	skip := PageSize - int(uintptr(unsafe.Pointer(&b[0]))%PageSize)
	return b[skip : skip+PageSize : skip+PageSize]
}

func TestPage(t *testing.T) {
	mem := alignedPage()
	p, err := NewPage(mem, 7)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := OpenPage(mem); err != nil {
		t.Error(err)
	}
	last := uint16(MaxChannels - 1)
	p.Open(last, 1<<32|9, GrantConcurrent, 100, 200)
	p.Hint(last, 3, 4)
	w, n := p.Hints(last)
	if p.Word(last) != 9 || p.Flags(last) != GrantConcurrent || w != 3 || n != 4 {
		t.Errorf("word %d flags %d hints %d %d", p.Word(last), p.Flags(last), w, n)
	}
	if p.Next(0); p.Flags(0) != GrantNext || p.Word(0) != WordClosed {
		t.Errorf("next: flags %d word %d", p.Flags(0), p.Word(0))
	}
	if p.Word(0) != WordClosed {
		t.Error("another channel's gate opened")
	}
	p.Close(last)
	if p.Word(last) != WordClosed {
		t.Error("gate still open")
	}
	if _, err := NewPage(mem[:64], 1); err == nil {
		t.Error("short mapping accepted")
	}
	if _, err := OpenPage(make([]byte, PageSize)); err == nil {
		t.Error("page without magic accepted")
	}
}

// A reader never sees half of a write.
func TestLimitsAreReadAsOne(t *testing.T) {
	p, err := NewPage(alignedPage(), 7)
	if err != nil {
		t.Fatal(err)
	}
	if l := p.Limits(3); l != (Limits{}) {
		t.Errorf("a fresh page has limits %+v", l)
	}
	const n = 20_000
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i := uint64(1); i <= n; i++ {
			p.SetLimits(3, Limits{Core: uint32(i), Memory: i, Used: ^i})
		}
	}()
	for l := p.Limits(3); l.Memory < n; l = p.Limits(3) {
		if l != (Limits{}) && (uint64(l.Core) != l.Memory || l.Used != ^l.Memory) {
			t.Fatalf("half of a write: %+v", l)
		}
	}
	<-done
	if l := p.Limits(2); l != (Limits{}) || p.Word(3) != WordClosed {
		t.Errorf("a neighbour was written: %+v", l)
	}
}

// TestLayout compares the offsets used here with those of the C structures.
func TestLayout(t *testing.T) {
	cc, err := exec.LookPath("cc")
	if err != nil {
		t.Skip("no C compiler")
	}
	fields := []struct {
		c    string
		here int
	}{
		{"offsetof(struct nvs_page, magic)", pageMagic},
		{"offsetof(struct nvs_page, version)", pageVersion},
		{"offsetof(struct nvs_page, slots)", pageSlots},
		{"offsetof(struct nvs_page, client_id)", pageClientID},
		{"offsetof(struct nvs_page, slot)", pageSlot},
		{"sizeof(struct nvs_slot)", slotSize},
		{"offsetof(struct nvs_slot, word)", slotWord},
		{"offsetof(struct nvs_slot, flags)", slotFlags},
		{"offsetof(struct nvs_slot, waiters)", slotWaiters},
		{"offsetof(struct nvs_slot, present)", slotPresent},
		{"offsetof(struct nvs_slot, quantum_ns)", slotQuantumNs},
		{"offsetof(struct nvs_slot, granted_ns)", slotGrantedNs},
		{"offsetof(struct nvs_slot, limit_seq)", slotLimitSeq},
		{"offsetof(struct nvs_slot, core_limit)", slotCoreLimit},
		{"offsetof(struct nvs_slot, mem_limit)", slotMemLimit},
		{"offsetof(struct nvs_slot, mem_used)", slotMemUsed},
		{"offsetof(struct nvs_page, room_seq)", pageRoomSeq},
		{"NVS_ROOM_SEQ_MAX", RoomSeqMax},
		{"NVS_MOVED_SEEN * NVS_ROOM_SEQ_MAX", int(movedSeen)},
		{"NVS_SLOT_STILL", int(SlotStill)},
		{"NVS_RESERVE", int(TypeReserve)},
		{"NVS_RESERVED", int(TypeReserved)},
		{"NVS_ATTACH_OBSERVE", int(AttachObserve)},
		{"NVS_ATTACH_CUT", int(AttachCut)},
		{"NVS_RESERVE_FORCE", int(ReserveForce)},
		{"NVS_ERR_MEMORY", int(ErrMemory)},
		{"offsetof(struct nvs_page, features)", pageFeatures},
		{"NVS_UTIL", int(TypeUtil)},
		{"NVS_SLICE", int(TypeSlice)},
		{"NVS_SUSPEND", int(TypeSuspend)},
		{"NVS_SUSPEND_PREPARE", int(SuspendPrepare)},
		{"NVS_SUSPEND_OVER", int(SuspendOver)},
		{"NVS_SUSPENDED", int(TypeSuspended)},
		{"NVS_SUSPENDED_READY", int(SuspendedReady)},
		{"NVS_SUSPENDED_BUSY", int(SuspendedBusy)},
		{"NVS_SUSPENDED_WAKE", int(SuspendedWake)},
		{"NVS_REGISTER_SUSPEND", int(RegisterSuspend)},
		{"NVS_REGISTER_AWAY", int(RegisterAway)},
		{"NVS_REGISTER_SLICES", int(RegisterSlices)},
		{"NVS_UTIL_MAX", UtilMax},
		{"NVS_FEATURE_UTIL", int(FeatureUtil)},
		{"NVS_CONTROLS", int(TypeControls)},
		{"NVS_FEATURE_CONTROLS", int(FeatureControls)},
		{"NVS_FEATURE_PREEMPT", int(FeaturePreempt)},
		{"NVS_CONTROL_WORKS", int(ControlWorks)},
		{"NVS_CONTROL_FAILED", int(ControlFailed)},
		{"NVS_WIRE_VERSION", Version},
		{"NVS_FRAME_SIZE", FrameSize},
		{"NVS_PAGE_SIZE", PageSize},
		{"NVS_PAGE_MAGIC", PageMagic},
		{"NVS_MAX_CHANNELS", MaxChannels},
		{"NVS_UUID_SIZE", UUIDSize},
		{"NVS_WORD_CLOSED", int(WordClosed)},
		{"NVS_WORD_NONE", int(WordNone)},
	}
	program := "#include \"wire.h\"\n#include <stdio.h>\nint main(void) {\n"
	for _, f := range fields {
		program += fmt.Sprintf("printf(\"%%lld\\n\", (long long)%s);\n", f.c)
	}
	dir := t.TempDir()
	source, binary := filepath.Join(dir, "layout.c"), filepath.Join(dir, "layout")
	if err := os.WriteFile(source, []byte(program+"}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(cc, "-I../../hook", "-o", binary, source).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	out, err := exec.Command(binary).Output()
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Fields(string(out))
	if len(lines) != len(fields) {
		t.Fatalf("%d lines, want %d", len(lines), len(fields))
	}
	for i, f := range fields {
		if lines[i] != fmt.Sprint(f.here) {
			t.Errorf("%s is %s in C, %d here", f.c, lines[i], f.here)
		}
	}
}

// How memory is kept, and room, are of the slot and not of the grant.
func TestPageRoomAndMode(t *testing.T) {
	p, err := NewPage(alignedPage(), 1)
	if err != nil {
		t.Fatal(err)
	}
	p.SetMemoryMode(3, SlotResident)
	p.SetRoom(3, 7<<30, 5)
	p.Open(3, 5, GrantConcurrent, 0, 0)
	if got := p.Flags(3); got != GrantConcurrent|SlotResident {
		t.Errorf("flags %#x after the grant", got)
	}
	p.Next(3)
	p.SetMemoryMode(3, SlotManaged)
	if got := p.Flags(3); got != GrantNext|SlotManaged {
		t.Errorf("flags %#x after the mode has changed", got)
	}
	p.SetMemoryMode(3, 0)
	p.SetPatient(3, true)
	p.Stand(3, true)
	if got := p.Flags(3); got != GrantStanding|SlotPatient {
		t.Errorf("flags %#x without a mode, patient", got)
	}
	p.SetPatient(3, false)
	p.SetStill(3, true)
	p.Stand(3, true)
	if got := p.Flags(3); got != GrantStanding|SlotStill {
		t.Errorf("flags %#x, still", got)
	}
	p.SetStill(3, false)
	if got := p.Flags(3); got != GrantStanding {
		t.Errorf("flags %#x without a mode", got)
	}
	if p.RoomSeq(3) != 5 || p.RoomSeq(2) != 0 || p.RoomSeq(4) != 0 {
		t.Errorf("room %d, beside it %d and %d", p.RoomSeq(3), p.RoomSeq(2), p.RoomSeq(4))
	}
	if p.Room(3) != 7<<30 || p.Room(2) != 0 || p.Room(4) != 0 || p.Limits(3) != (Limits{}) {
		t.Errorf("room %d, beside it %d and %d, limits %+v", p.Room(3), p.Room(2), p.Room(4), p.Limits(3))
	}
}
