// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"fmt"
	"sync/atomic"
	"unsafe"
)

// Offsets in the grant page, bytes; struct nvs_page and nvs_slot.
const (
	pageMagic    = 0
	pageVersion  = 4
	pageSlots    = 6
	pageClientID = 8
	pageFeatures = 16
	pageSlot     = 64

	slotSize      = 64
	slotWord      = 0
	slotFlags     = 4
	slotWaiters   = 8
	slotPresent   = 12
	slotQuantumNs = 16
	slotGrantedNs = 24
	slotLimitSeq  = 32
	slotCoreLimit = 36
	slotMemLimit  = 40
	slotMemUsed   = 48
	slotRoom      = 56

	pageRoomSeq = pageSlot + MaxChannels*slotSize
)

// What a page's features say that the scheduler understands. A shim that knows features
// sends what older schedulers refuse only to one that says so.
const (
	FeatureUtil     uint32 = 1 << 0 // UTIL
	FeatureControls uint32 = 1 << 1 // CONTROLS, and the calls of UTIL
	FeaturePreempt  uint32 = 1 << 2 // the flags of RELEASE
)

// Page is one client's grant page: the scheduler's writable mapping, or the
// client's read-only one. It does not own the mapping; using a Page after its
// memory was unmapped faults. Channels must be below MaxChannels.
type Page struct {
	mem []byte
}

// NewPage writes the header of a fresh, zeroed mapping. All gates are closed.
func NewPage(mem []byte, clientID uint64) (Page, error) {
	if len(mem) != PageSize || uintptr(unsafe.Pointer(&mem[0]))%slotSize != 0 {
		return Page{}, fmt.Errorf("grant page: need %d aligned bytes, have %d", PageSize, len(mem))
	}
	le.PutUint32(mem[pageMagic:], PageMagic)
	le.PutUint16(mem[pageVersion:], Version)
	le.PutUint16(mem[pageSlots:], MaxChannels)
	le.PutUint64(mem[pageClientID:], clientID)
	return Page{mem}, nil
}

// OpenPage checks the header of a page that a scheduler made.
func OpenPage(mem []byte) (Page, error) {
	if len(mem) != PageSize || le.Uint32(mem[pageMagic:]) != PageMagic || le.Uint16(mem[pageVersion:]) != Version {
		return Page{}, fmt.Errorf("grant page: wrong size, magic or version")
	}
	return Page{mem}, nil
}

// SetFeatures says what the scheduler understands, before the client has the page.
func (p Page) SetFeatures(features uint32) { le.PutUint32(p.mem[pageFeatures:], features) }

// Features returns what the scheduler that made the page understands.
func (p Page) Features() uint32 { return le.Uint32(p.mem[pageFeatures:]) }

func (p Page) at(channel uint16, field int) unsafe.Pointer {
	return unsafe.Pointer(&p.mem[pageSlot+int(channel)*slotSize+field])
}

// WordAddr returns the futex of a channel.
func (p Page) WordAddr(channel uint16) *uint32 {
	return (*uint32)(p.at(channel, slotWord))
}

// Word returns the channel's word: WordClosed, or the low bits of an epoch.
func (p Page) Word(channel uint16) uint32 {
	return atomic.LoadUint32(p.WordAddr(channel))
}

// Open describes a grant and then, last, stores its word. The caller wakes the
// futex. nowNs is CLOCK_MONOTONIC in nanoseconds.
func (p Page) Open(channel uint16, epoch uint64, flags uint32, quantumNs, nowNs uint64) {
	p.setFlags(channel, flags)
	atomic.StoreUint64((*uint64)(p.at(channel, slotQuantumNs)), quantumNs)
	atomic.StoreUint64((*uint64)(p.at(channel, slotGrantedNs)), nowNs)
	atomic.StoreUint32(p.WordAddr(channel), uint32(epoch))
}

// Share says that from now on all may hold the GPU at the same time. The grant that the page
// describes stays; if it is a latency client's, it is one like all others.
func (p Page) Share(channel uint16) {
	p.setFlags(channel, p.Flags(channel)&^GrantLatency|GrantConcurrent)
}

// Close stores WordClosed. The caller wakes the futex.
func (p Page) Close(channel uint16) {
	atomic.StoreUint32(p.WordAddr(channel), WordClosed)
}

// Reopen stores the word of a grant that was closed for a moment. The caller
// wakes the futex.
func (p Page) Reopen(channel uint16, epoch uint64) {
	atomic.StoreUint32(p.WordAddr(channel), uint32(epoch))
}

// Next tells a waiting client that its grant is likely within milliseconds.
// Open takes it back. The caller wakes the futex.
func (p Page) Next(channel uint16) {
	p.setFlags(channel, GrantNext)
}

// Stand tells a client without a grant whether it may go ahead when it asks.
// Open takes it back.
func (p Page) Stand(channel uint16, on bool) {
	flags := uint32(0)
	if on {
		flags = GrantStanding
	}
	p.setFlags(channel, flags)
}

// slotMode are the flags that say how memory is kept, and slotOwn all that do not go
// with a grant.
const (
	slotMode = SlotResident | SlotManaged
	slotOwn  = slotMode | SlotPatient | SlotStill
)

// setFlags stores those of the grant, and leaves the others. There is one writer.
func (p Page) setFlags(channel uint16, flags uint32) {
	word := (*uint32)(p.at(channel, slotFlags))
	atomic.StoreUint32(word, flags&^slotOwn|atomic.LoadUint32(word)&slotOwn)
}

// SetMemoryMode stores SlotResident, SlotManaged, or neither.
func (p Page) SetMemoryMode(channel uint16, mode uint32) {
	word := (*uint32)(p.at(channel, slotFlags))
	atomic.StoreUint32(word, atomic.LoadUint32(word)&^slotMode|mode&slotMode)
}

// SetRoom stores how many bytes the client may have resident, 0: nothing is
// swapped here; then which room that is. The caller wakes the futex.
func (p Page) SetRoom(channel uint16, bytes uint64, seq uint32) {
	atomic.StoreUint64((*uint64)(p.at(channel, slotRoom)), bytes)
	atomic.StoreUint32((*uint32)(unsafe.Pointer(&p.mem[pageRoomSeq+4*int(channel)])), seq)
}

// RoomSeq returns what SetRoom stored last.
func (p Page) RoomSeq(channel uint16) uint32 {
	return atomic.LoadUint32((*uint32)(unsafe.Pointer(&p.mem[pageRoomSeq+4*int(channel)])))
}

// Room returns what SetRoom stored last.
func (p Page) Room(channel uint16) uint64 {
	return atomic.LoadUint64((*uint64)(p.at(channel, slotRoom)))
}

// Hint stores how many other clients wait for and are attached to the GPU.
func (p Page) Hint(channel uint16, waiters, present uint32) {
	atomic.StoreUint32((*uint32)(p.at(channel, slotWaiters)), waiters)
	atomic.StoreUint32((*uint32)(p.at(channel, slotPresent)), present)
}

// SetPatient says whether the client is to keep the GPU over short pauses although
// somebody waits.
func (p Page) SetPatient(channel uint16, on bool) { p.setOwn(channel, SlotPatient, on) }

// SetStill says whether no memory has to leave the GPU for others.
func (p Page) SetStill(channel uint16, on bool) { p.setOwn(channel, SlotStill, on) }

// setOwn stores one of slotOwn.
func (p Page) setOwn(channel uint16, flag uint32, on bool) {
	word := (*uint32)(p.at(channel, slotFlags))
	flags := atomic.LoadUint32(word) &^ flag
	if on {
		flags |= flag
	}
	atomic.StoreUint32(word, flags)
}

// Hints returns what Hint stored.
func (p Page) Hints(channel uint16) (waiters, present uint32) {
	return atomic.LoadUint32((*uint32)(p.at(channel, slotWaiters))),
		atomic.LoadUint32((*uint32)(p.at(channel, slotPresent)))
}

// Flags returns the enum nvs_grant_flags of the current or latest grant.
func (p Page) Flags(channel uint16) uint32 {
	return atomic.LoadUint32((*uint32)(p.at(channel, slotFlags)))
}

// Limits is what holds for the client's container on a GPU.
type Limits struct {
	Core   uint32 // percent, 0: none
	Memory uint64 // bytes, 0: none
	Used   uint64 // bytes its processes have reserved
}

// SetLimits stores the limits as one, under the slot's sequence lock. There is
// one writer.
func (p Page) SetLimits(channel uint16, l Limits) {
	seq := (*uint32)(p.at(channel, slotLimitSeq))
	atomic.AddUint32(seq, 1)
	atomic.StoreUint32((*uint32)(p.at(channel, slotCoreLimit)), l.Core)
	atomic.StoreUint64((*uint64)(p.at(channel, slotMemLimit)), l.Memory)
	atomic.StoreUint64((*uint64)(p.at(channel, slotMemUsed)), l.Used)
	atomic.AddUint32(seq, 1)
}

// Limits returns what SetLimits stored last.
func (p Page) Limits(channel uint16) Limits {
	seq := (*uint32)(p.at(channel, slotLimitSeq))
	for {
		before := atomic.LoadUint32(seq)
		l := Limits{
			Core:   atomic.LoadUint32((*uint32)(p.at(channel, slotCoreLimit))),
			Memory: atomic.LoadUint64((*uint64)(p.at(channel, slotMemLimit))),
			Used:   atomic.LoadUint64((*uint64)(p.at(channel, slotMemUsed))),
		}
		if before&1 == 0 && atomic.LoadUint32(seq) == before {
			return l
		}
	}
}
