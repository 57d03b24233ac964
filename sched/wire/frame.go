// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"
)

// Limits and versions of the protocol, as in hook/wire.h.
const (
	Version     = 1
	FrameSize   = 64
	PageSize    = 4096
	PageMagic   = 0x5053564e // "NVSP"
	MaxChannels = 32
	UUIDSize    = 16
	textSize    = 48

	SpinTime = 8 * time.Millisecond // how long a thread may spin for a grant
)

// SocketName is that of the shims' socket in the run directory.
const SocketName = "scheduler.sock"

// Words of a channel in the grant page. No grant has an epoch whose low 32
// bits are one of them.
const (
	WordClosed uint32 = 0
	WordNone   uint32 = 0xffffffff
)

// Type says what a frame is. Types below 64 go from client to scheduler.
type Type uint8

// The frame types.
const (
	TypeRegister  Type = 1
	TypeAttach    Type = 2
	TypeRequest   Type = 3
	TypeRelease   Type = 4
	TypeStats     Type = 5
	TypeReserve   Type = 6
	TypeMoved     Type = 8
	TypeUtil      Type = 9
	TypeControls  Type = 10
	TypeSuspended Type = 11

	TypeWelcome  Type = 65
	TypeAttached Type = 66
	TypeGrant    Type = 67
	TypeRevoke   Type = 68
	TypeNotice   Type = 69
	TypeRefused  Type = 70
	TypeReserved Type = 71
	TypeRoom     Type = 72
	TypeArena    Type = 73
	TypeSlice    Type = 74
	TypeSuspend  Type = 75
)

var typeNames = map[Type]string{
	TypeRegister: "REGISTER", TypeAttach: "ATTACH", TypeRequest: "REQUEST", TypeRelease: "RELEASE", TypeStats: "STATS",
	TypeReserve: "RESERVE", TypeMoved: "MOVED", TypeUtil: "UTIL", TypeControls: "CONTROLS", TypeSuspended: "SUSPENDED",
	TypeWelcome: "WELCOME", TypeAttached: "ATTACHED", TypeGrant: "GRANT", TypeRevoke: "REVOKE", TypeNotice: "NOTICE",
	TypeRefused: "REFUSED", TypeReserved: "RESERVED", TypeRoom: "ROOM", TypeArena: "ARENA", TypeSlice: "SLICE",
	TypeSuspend: "SUSPEND",
}

// String returns the name used in hook/wire.h, without prefix.
func (t Type) String() string {
	if name := typeNames[t]; name != "" {
		return name
	}
	return "unknown type"
}

// FromClient reports whether the type goes from client to scheduler.
func (t Type) FromClient() bool {
	return t >= TypeRegister && t <= TypeReserve || t >= TypeMoved && t <= TypeSuspended
}

// OptionalFlags are those flags of a Frame.Code that a peer ignores if it does
// not know them: a newer one may set them without asking. Unknown flags of the
// lower half are refused, because the frame means something else with them.
const OptionalFlags uint32 = 0xffff0000

// Values of Frame.Code, by type.
const (
	RegisterReconnect uint32 = 1 << 0  // REGISTER: was registered before
	RegisterSwap      uint32 = 1 << 16 // REGISTER: it can move memory
	RegisterSlices    uint32 = 1 << 17 // REGISTER: it understands SLICE
	RegisterSuspend   uint32 = 1 << 18 // REGISTER: it understands SUSPEND, and sees each driver call
	RegisterAway      uint32 = 1 << 19 // REGISTER: it keeps out of the driver until SUSPEND (over)
	AttachWant        uint32 = 1 << 0  // ATTACH: a thread already waits
	AttachObserve     uint32 = 1 << 1  // ATTACH, alone: only asks for the limits, is no client
	AttachPlace       uint32 = 1 << 16 // ATTACH, with observe: asks on which GPU its container is
	AttachCut         uint32 = 1 << 17 // ATTACH: work is left of an earlier grant, and off the GPU
	ReserveForce      uint32 = 1 << 0  // RESERVE: the memory exists already

	MovedReady    uint32 = 1 << 0  // MOVED: nothing is away, the gate opens
	MovedStuck    uint32 = 1 << 1  // MOVED: it cannot go on by itself, for one of these reasons
	MovedNoMemory uint32 = 1 << 16 // MOVED: the driver refuses memory that room promises
	MovedNoArena  uint32 = 1 << 17 // MOVED: no host memory for what has to go out
	MovedError    uint32 = 1 << 18 // MOVED: the driver fails otherwise

	ArenaHuge uint32 = 1 << 0 // Arena.Flags: of huge pages

	SlotResident uint32 = 1 << 8  // page only: memory is never moved
	SlotManaged  uint32 = 1 << 9  // page only: managed memory
	SlotPatient  uint32 = 1 << 10 // page only: it keeps the GPU over short pauses
	SlotStill    uint32 = 1 << 11 // page only: no memory has to leave the GPU for others

	SuspendPrepare uint32 = 1 // SUSPEND: driver calls wait from now on; answer
	SuspendOver    uint32 = 2 // SUSPEND: they go on

	SuspendedReady uint32 = 1 // SUSPENDED: no thread is in the driver, or comes there
	SuspendedBusy  uint32 = 2 // SUSPENDED: one is; the SUSPEND did nothing
	SuspendedWake  uint32 = 3 // SUSPENDED: a call waits

	ReleaseRevoked uint32 = 1 // RELEASE: answer to REVOKE
	ReleaseIdle    uint32 = 2 // RELEASE: early, somebody else waits
	ReleaseExit    uint32 = 3 // RELEASE: the process leaves in good order

	ReleasedPreempted uint32 = 1 << 0 // Released.Flags: work is left, which wants the next grant

	GrantConcurrent uint32 = 1 << 0 // GRANT: others may hold the GPU too
	GrantNext       uint32 = 1 << 1 // page only: this client is next, the holder drains
	GrantStanding   uint32 = 1 << 3 // page only: go ahead, the grant will come
	GrantLatency    uint32 = 1 << 2 // page only: give it back as soon as there is nothing to do
	GrantShared     uint32 = 1 << 4 // page only: others may hold the GPU in the same turn, so report work

	RevokeStep uint32 = 1 << 16 // REVOKE: let one call pass first, for the others of a gang

	OK            uint32 = 0 // ATTACHED, RESERVED
	ErrVersion    uint32 = 1 // REFUSED
	ErrUnknownGPU uint32 = 2 // ATTACHED: no such GPU UUID on this node
	ErrChannel    uint32 = 3 // ATTACHED: out of range or attached twice
	ErrTooMany    uint32 = 4 // REFUSED: a limit is reached
	ErrProtocol   uint32 = 5 // REFUSED: malformed or out of order
	ErrInternal   uint32 = 6
	ErrMemory     uint32 = 7 // RESERVED: over the container's limit, nothing changed
	ErrArena      uint32 = 8 // RESERVED: neither the GPU nor the arena has room, nothing changed
)

// UUID is a GPU's identity as cuDeviceGetUuid returns it.
type UUID [UUIDSize]byte

// ParseUUID reads "GPU-" or, for a MIG device, "MIG-", and 32 hexadecimal
// digits, dashes anywhere.
func ParseUUID(s string) (u UUID, err error) {
	digits, ok := strings.CutPrefix(s, "GPU-")
	if !ok {
		digits, ok = strings.CutPrefix(s, "MIG-")
	}
	b, hexErr := hex.DecodeString(strings.ReplaceAll(digits, "-", ""))
	if !ok || hexErr != nil || len(b) != len(u) {
		return u, fmt.Errorf("GPU UUID %q: want GPU- or MIG- and 32 hexadecimal digits", s)
	}
	return UUID(b), nil
}

func (u UUID) String() string {
	return fmt.Sprintf("GPU-%x-%x-%x-%x-%x", u[:4], u[4:6], u[6:8], u[8:10], u[10:])
}

// Frame is one packet. Of the payloads only the one that Type names is read or
// written; REQUEST and ATTACHED have none.
type Frame struct {
	Version uint8
	Type    Type
	Channel uint16
	Code    uint32
	Epoch   uint64

	Register Register
	Attach   Attach
	Released Released
	Stats    Stats
	Attached Attached
	Welcome  Welcome
	Grant    Grant
	Revoke   Revoke
	Notice   Notice
	Refused  Refused
	Reserve  Reserve
	Reserved Reserved
	Moved    Moved
	Util     Util
	Controls Controls
	Room     Room
	Arena    Arena
	Slice    Slice
}

// Register is the payload of REGISTER.
type Register struct {
	MinVersion  uint16 // oldest version the client speaks; Frame.Version: newest
	Channels    uint16 // GPUs the process sees, 1..MaxChannels
	ShimVersion uint32 // major << 16 | minor << 8 | patch
	Interposed  uint32 // entry points that lead to the shim
	Bypassed    uint32 // entry points that do not
}

// Attach is the payload of ATTACH.
type Attach struct {
	UUID     UUID
	Ordinal  uint32 // the application's device ordinal
	reserved uint32 // 0
	TotalMem uint64 // bytes
}

// Released is the payload of RELEASE.
type Released struct {
	DrainNs uint64 // nanoseconds from closed gate to idle GPU, or to channels that are off
	Calls   uint64 // gated calls under this grant
	Flags   uint32 // ReleasedPreempted
}

// Attached is the payload of ATTACHED.
type Attached struct {
	UUID UUID // where AttachPlace asked: of the container's GPU; zero: not known, or it does not move
}

// Stats is the payload of STATS, sums since the channel was attached.
type Stats struct {
	Calls     uint64 // gated calls
	Waits     uint64 // times a thread waited at the gate
	WaitNs    uint64 // nanoseconds, sum over threads
	MemBytes  uint64 // device memory allocated now
	MemPeak   uint64 // bytes
	WaitMaxNs uint64 // longest single wait, nanoseconds
}

// Welcome is the payload of WELCOME.
type Welcome struct {
	ClientID uint64
	PageSize uint32
	Slots    uint16
}

// Grant is the payload of GRANT.
type Grant struct {
	QuantumNs uint64 // nanoseconds, 0: unbounded
}

// Revoke is the payload of REVOKE.
type Revoke struct {
	GraceNs uint64 // nanoseconds until the grant is fenced
	Waiters uint32
}

// Notice is the payload of NOTICE.
type Notice struct {
	Waiters uint32 // other clients that wait for this GPU
	Present uint32 // other clients attached to this GPU
}

// Reserve is the payload of RESERVE: what the process wants to have reserved
// on the GPU in all.
type Reserve struct {
	Total  uint64 // bytes
	Least  uint64 // bytes, at most Total: with less it can do nothing
	Serial uint64 // comes back in RESERVED
}

// Reserved is the payload of RESERVED.
type Reserved struct {
	Total  uint64 // bytes the process has reserved now
	Used   uint64 // bytes all processes of its container have
	Limit  uint64 // bytes, 0: none
	Serial uint64
}

// Moved is the payload of MOVED: what the client has of the GPU. Sizes are bytes.
type Moved struct {
	Resident uint64 // on the GPU
	Fixed    uint64 // of these, what cannot be moved
	Away     uint64 // in the arena, or never touched
	Out, In  uint64 // copied since the process attached first
	Arena    uint64 // of segments that are mapped and ready
}

// Fixed says why nothing of a process's memory can be moved. A newer shim may say what is not
// listed here.
type Fixed uint8

// The values of a Fixed.
const (
	FixedNot         Fixed = iota // some can be moved, or the reason is another one
	FixedSeveralGPUs              // the process uses several GPUs
	FixedOptiX                    // from here on: what the process has mapped uses its memory past the shim
	FixedEncoder
	FixedDecoder
	FixedOpticalFlow
	FixedStorage
	FixedRDMA
	fixedLast Fixed = 15
)

// RoomSeqMax is the greatest number of a room, movedSeen are the bits of the code of MOVED that have one.
const (
	RoomSeqMax           = 1<<12 - 1
	movedSeenFrom        = 4
	movedSeen     uint32 = RoomSeqMax << movedSeenFrom
)

// Seen returns which room the client knew when it sent MOVED; 0: it does not say.
func (f *Frame) Seen() uint32 { return f.Code & movedSeen >> movedSeenFrom }

// movedFixedBy is where the code of MOVED has a Fixed.
const movedFixedBy uint32 = 1 << 24

// FixedBy returns what MOVED says of the memory that it calls fixed.
func (f *Frame) FixedBy() Fixed { return Fixed(f.Code/movedFixedBy) & fixedLast }

// Util is the payload of UTIL: how often the GPU had work of this client, of so many
// times that the client looked while its gate was open and others were attached.
type Util struct {
	Samples uint32 // at most UtilMax
	Busy    uint32 // at most Samples
	Calls   uint32 // gated calls since the frame before
}

// UtilMax is the most samples of one UTIL.
const UtilMax = 1_000_000

// Control says how trying a control of the GPU's own scheduler went.
type Control uint8

// The values of a Control.
const (
	ControlUntried Control = iota
	ControlWorks
	ControlUnseen  // no channel group of the GPU was seen
	ControlRefused // the driver answers with an error
	ControlFaked   // the driver answers success and changes nothing
	ControlFailed  // the control cannot be sent
)

// Controls is the payload of CONTROLS: what the GPU's own scheduler lets the client do,
// as the client says.
type Controls struct {
	Slices   Control
	Channels Control
	Groups   uint16   // compute channel groups that were seen
	Bare     uint32   // channels in no group that was seen, on any GPU
	Driver   [40]byte // version, NUL-terminated printable ASCII
}

// DriverVersion returns the version up to its NUL; "": unknown.
func (c *Controls) DriverVersion() string {
	version, _, _ := bytes.Cut(c.Driver[:], []byte{0})
	return string(version)
}

// Room is the payload of ROOM.
type Room struct {
	Bytes uint64 // as the page's slot had it
}

// Arena is the payload of ARENA, which carries a descriptor.
type Arena struct {
	Segment uint64 // unique among those of this client
	Size    uint64 // bytes, a multiple of 2 MiB
	Flags   uint32
}

// Slice is the payload of SLICE.
type Slice struct {
	Ns uint64 // the GPU's own time slice of the client; 0: as the driver sets it
}

// Refused is the payload of REFUSED: NUL-terminated UTF-8 for a debug log.
type Refused struct {
	Text [textSize]byte
}

// SetText stores s up to its first NUL, cut to what fits at a character boundary. What is not UTF-8 is stored as "?".
func (r *Refused) SetText(s string) {
	s, _, _ = strings.Cut(s, "\x00")
	s = strings.ToValidUTF8(s, "?")
	end := min(len(s), textSize-1)
	for end < len(s) && !utf8.RuneStart(s[end]) {
		end--
	}
	*r = Refused{}
	copy(r.Text[:], s[:end])
}

// String returns the text up to its NUL.
func (r *Refused) String() string {
	text, _, _ := bytes.Cut(r.Text[:], []byte{0})
	return string(text)
}

// ValidEpoch reports whether a grant may carry the epoch: its low 32 bits are
// neither WordClosed nor WordNone.
func ValidEpoch(epoch uint64) bool {
	w := uint32(epoch)
	return w != WordClosed && w != WordNone
}
