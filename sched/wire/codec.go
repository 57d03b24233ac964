// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bytes"
	"encoding/binary"
	"errors"
	"unicode/utf8"
)

// ErrFrame is what every error of Decode wraps: the peer sent something that
// is not a frame of this protocol, and its connection is to be closed.
var ErrFrame = errors.New("malformed frame")

// frameError says what is wrong. The values are made once, so that refusing a
// frame costs no allocation: the sender chooses how many there are.
type frameError struct{ what string }

func (e *frameError) Error() string { return "malformed frame: " + e.what }
func (e *frameError) Unwrap() error { return ErrFrame }

var (
	errLength     = &frameError{"not exactly 64 bytes"}
	errCopyLength = &frameError{"not as long as its pieces say"}
	errCopyPieces = &frameError{"pieces that are not the whole"}
	errVersion    = &frameError{"unknown version"}
	errType       = &frameError{"unknown type"}
	errChannel    = &frameError{"channel out of range, or set where the type has none"}
	errCode       = &frameError{"unknown code or flag"}
	errEpoch      = &frameError{"epoch not valid, or set where the type has none"}
	errReserved   = &frameError{"reserved bytes are not zero"}
	errChannels   = &frameError{"REGISTER: number of channels out of range"}
	errMinVersion = &frameError{"REGISTER: oldest version is 0 or above the newest"}
	errPage       = &frameError{"WELCOME: page size or slots unknown"}
	errText       = &frameError{"REFUSED: text is not NUL-terminated UTF-8"}
	errUtil       = &frameError{"UTIL: more samples than can be, or more busy ones than samples"}
	errControls   = &frameError{"CONTROLS: unknown result, or version not NUL-terminated printable ASCII"}
	errObserve    = &frameError{"ATTACH: observes and holds or wants at once"}
)

var le = binary.LittleEndian

// payload is where the union of the C structure starts.
const payload = 16

// Decode reads one packet. Its errors wrap ErrFrame.
//
// A REGISTER may carry a version above Version: the client then also speaks
// older ones, down to Register.MinVersion, and the caller picks.
func Decode(b []byte) (Frame, error) {
	var f Frame
	if len(b) != FrameSize {
		return f, errLength
	}
	f.Version = b[0]
	f.Type = Type(b[1])
	f.Channel = le.Uint16(b[2:])
	f.Code = le.Uint32(b[4:])
	f.Epoch = le.Uint64(b[8:])
	if f.Version != Version && (f.Type != TypeRegister || f.Version == 0) {
		return f, errVersion
	}
	if err := f.decodePayload(b[payload:]); err != nil {
		return f, err
	}
	return f, f.check()
}

func (f *Frame) decodePayload(p []byte) error {
	used := 0
	switch f.Type {
	case TypeRegister:
		r := &f.Register
		r.MinVersion = le.Uint16(p)
		r.Channels = le.Uint16(p[2:])
		r.ShimVersion = le.Uint32(p[4:])
		r.Interposed = le.Uint32(p[8:])
		r.Bypassed = le.Uint32(p[12:])
		used = 16
		if f.Version > Version {
			used = len(p) // what a newer version put there is not ours to judge
		}
	case TypeAttach:
		a := &f.Attach
		copy(a.UUID[:], p)
		a.Ordinal = le.Uint32(p[16:])
		if le.Uint32(p[20:]) != 0 {
			return errReserved
		}
		a.TotalMem = le.Uint64(p[24:])
		used = 32
	case TypeRelease:
		f.Released.DrainNs = le.Uint64(p)
		f.Released.Calls = le.Uint64(p[8:])
		f.Released.Flags = le.Uint32(p[16:])
		if f.Released.Flags&^ReleasedPreempted != 0 {
			return errReserved
		}
		used = 20
	case TypeStats:
		s := &f.Stats
		s.Calls = le.Uint64(p)
		s.Waits = le.Uint64(p[8:])
		s.WaitNs = le.Uint64(p[16:])
		s.MemBytes = le.Uint64(p[24:])
		s.MemPeak = le.Uint64(p[32:])
		s.WaitMaxNs = le.Uint64(p[40:])
		used = 48
	case TypeWelcome:
		f.Welcome.ClientID = le.Uint64(p)
		f.Welcome.PageSize = le.Uint32(p[8:])
		f.Welcome.Slots = le.Uint16(p[12:])
		used = 14
	case TypeGrant:
		f.Grant.QuantumNs = le.Uint64(p)
		used = 8
	case TypeRevoke:
		f.Revoke.GraceNs = le.Uint64(p)
		f.Revoke.Waiters = le.Uint32(p[8:])
		used = 12
	case TypeNotice:
		f.Notice.Waiters = le.Uint32(p)
		f.Notice.Present = le.Uint32(p[4:])
		used = 8
	case TypeRefused:
		copy(f.Refused.Text[:], p)
		used = textSize
	case TypeReserve:
		f.Reserve.Total = le.Uint64(p)
		f.Reserve.Least = le.Uint64(p[8:])
		f.Reserve.Serial = le.Uint64(p[16:])
		used = 24
	case TypeReserved:
		r := &f.Reserved
		r.Total = le.Uint64(p)
		r.Used = le.Uint64(p[8:])
		r.Limit = le.Uint64(p[16:])
		r.Serial = le.Uint64(p[24:])
		used = 32
	case TypeMoved:
		m := &f.Moved
		m.Resident = le.Uint64(p)
		m.Fixed = le.Uint64(p[8:])
		m.Away = le.Uint64(p[16:])
		m.Out = le.Uint64(p[24:])
		m.In = le.Uint64(p[32:])
		m.Arena = le.Uint64(p[40:])
		used = 48
	case TypeUtil:
		f.Util.Samples = le.Uint32(p)
		f.Util.Busy = le.Uint32(p[4:])
		f.Util.Calls = le.Uint32(p[8:])
		used = 12
	case TypeControls:
		return f.Controls.decode(p)
	case TypeRoom:
		f.Room.Bytes = le.Uint64(p)
		used = 8
	case TypeSlice:
		f.Slice.Ns = le.Uint64(p)
		used = 8
	case TypeCopier:
		copy(f.Copier.GPU[:], p)
		f.Copier.Flags = le.Uint32(p[16:])
		used = 20
	case TypeArena:
		f.Arena.Segment = le.Uint64(p)
		f.Arena.Size = le.Uint64(p[8:])
		f.Arena.Flags = le.Uint32(p[16:])
		used = 20
	case TypeAttached:
		copy(f.Attached.UUID[:], p)
		used = len(f.Attached.UUID)
	case TypeRequest, TypeSuspend, TypeSuspended:
	default:
		return errType
	}
	for _, c := range p[used:] {
		if c != 0 {
			return errReserved
		}
	}
	return nil
}

// rule is what a type allows in the header.
type rule struct {
	channel        bool // has one
	codeMin        uint32
	codeMax        uint32
	flags          bool // the code has flags: those of OptionalFlags may be any
	epoch, noEpoch bool // must or may have an epoch; may be without
}

func (t Type) rule() rule {
	switch t {
	case TypeRegister:
		return rule{flags: true, codeMax: RegisterReconnect, noEpoch: true}
	case TypeAttach:
		return rule{channel: true, flags: true, codeMax: AttachWant | AttachObserve, epoch: true, noEpoch: true}
	case TypeRequest, TypeStats, TypeUtil, TypeControls, TypeNotice, TypeRoom, TypeArena, TypeSlice, TypeCopier:
		return rule{channel: true, noEpoch: true}
	case TypeSuspend:
		return rule{codeMin: SuspendPrepare, codeMax: SuspendOver, noEpoch: true}
	case TypeSuspended:
		return rule{codeMin: SuspendedReady, codeMax: SuspendedWake, noEpoch: true}
	case TypeReserve:
		return rule{channel: true, flags: true, codeMax: ReserveForce, noEpoch: true}
	case TypeReserved:
		return rule{channel: true, codeMax: ErrArena, noEpoch: true}
	case TypeMoved:
		return rule{channel: true, flags: true, codeMax: MovedReady | MovedStuck, epoch: true, noEpoch: true}
	case TypeRelease:
		return rule{channel: true, codeMin: ReleaseRevoked, codeMax: ReleaseExit, epoch: true}
	case TypeAttached:
		return rule{channel: true, codeMax: ErrInternal, epoch: true, noEpoch: true}
	case TypeGrant:
		return rule{channel: true, flags: true, codeMax: GrantConcurrent, epoch: true}
	case TypeRevoke:
		return rule{channel: true, flags: true, epoch: true}
	case TypeRefused:
		return rule{codeMin: ErrVersion, codeMax: ErrInternal, noEpoch: true}
	}
	return rule{noEpoch: true} // WELCOME
}

func (f *Frame) check() error {
	r := f.Type.rule()
	if f.Channel != 0 && (!r.channel || f.Channel >= MaxChannels) {
		return errChannel
	}
	newer := f.Type == TypeRegister && f.Version > Version
	code := f.Code
	if r.flags {
		code &^= OptionalFlags
	}
	if (code < r.codeMin || code > r.codeMax) && !newer {
		return errCode
	}
	if f.Epoch == 0 && !r.noEpoch || f.Epoch != 0 && !(r.epoch && ValidEpoch(f.Epoch)) {
		return errEpoch
	}
	switch f.Type {
	case TypeRegister:
		if f.Register.MinVersion == 0 || f.Register.MinVersion > uint16(f.Version) {
			return errMinVersion
		}
		if f.Register.Channels == 0 || f.Register.Channels > MaxChannels {
			return errChannels
		}
	case TypeWelcome:
		if f.Welcome.PageSize != PageSize || f.Welcome.Slots != MaxChannels {
			return errPage
		}
	case TypeAttach:
		if code&AttachObserve != 0 && (code != AttachObserve || f.Epoch != 0) {
			return errObserve
		}
	case TypeReserved:
		if f.Code != OK && f.Code != ErrMemory && f.Code != ErrArena {
			return errCode
		}
	case TypeMoved:
		if code&MovedReady != 0 && f.Epoch == 0 {
			return errEpoch
		}
	case TypeUtil:
		if f.Util.Samples > UtilMax || f.Util.Busy > f.Util.Samples {
			return errUtil
		}
	case TypeRefused:
		return f.Refused.check()
	}
	return nil
}

func (c *Controls) decode(p []byte) error {
	c.Slices, c.Channels = Control(p[0]), Control(p[1])
	c.Groups = le.Uint16(p[2:])
	c.Bare = le.Uint32(p[4:])
	copy(c.Driver[:], p[8:])
	end := bytes.IndexByte(c.Driver[:], 0)
	if end < 0 || c.Slices > ControlFailed || c.Channels > ControlFailed {
		return errControls
	}
	for i, b := range c.Driver {
		switch {
		case i < end && (b < ' ' || b > '~'):
			return errControls
		case i > end && b != 0:
			return errReserved
		}
	}
	return nil
}

func (r *Refused) check() error {
	n := 0
	for n < textSize && r.Text[n] != 0 {
		n++
	}
	if n == textSize || !utf8.Valid(r.Text[:n]) {
		return errText
	}
	for _, c := range r.Text[n:] {
		if c != 0 {
			return errReserved
		}
	}
	return nil
}

// Encode returns the packet of f. It does not validate: the caller is the
// scheduler or a test, and a test may want a wrong frame.
func (f *Frame) Encode() (b [FrameSize]byte) {
	b[0] = f.Version
	b[1] = byte(f.Type)
	le.PutUint16(b[2:], f.Channel)
	le.PutUint32(b[4:], f.Code)
	le.PutUint64(b[8:], f.Epoch)
	p := b[payload:]
	switch f.Type {
	case TypeRegister:
		le.PutUint16(p, f.Register.MinVersion)
		le.PutUint16(p[2:], f.Register.Channels)
		le.PutUint32(p[4:], f.Register.ShimVersion)
		le.PutUint32(p[8:], f.Register.Interposed)
		le.PutUint32(p[12:], f.Register.Bypassed)
	case TypeAttach:
		copy(p, f.Attach.UUID[:])
		le.PutUint32(p[16:], f.Attach.Ordinal)
		le.PutUint64(p[24:], f.Attach.TotalMem)
	case TypeRelease:
		le.PutUint64(p, f.Released.DrainNs)
		le.PutUint64(p[8:], f.Released.Calls)
		le.PutUint32(p[16:], f.Released.Flags)
	case TypeStats:
		le.PutUint64(p, f.Stats.Calls)
		le.PutUint64(p[8:], f.Stats.Waits)
		le.PutUint64(p[16:], f.Stats.WaitNs)
		le.PutUint64(p[24:], f.Stats.MemBytes)
		le.PutUint64(p[32:], f.Stats.MemPeak)
		le.PutUint64(p[40:], f.Stats.WaitMaxNs)
	case TypeWelcome:
		le.PutUint64(p, f.Welcome.ClientID)
		le.PutUint32(p[8:], f.Welcome.PageSize)
		le.PutUint16(p[12:], f.Welcome.Slots)
	case TypeGrant:
		le.PutUint64(p, f.Grant.QuantumNs)
	case TypeRevoke:
		le.PutUint64(p, f.Revoke.GraceNs)
		le.PutUint32(p[8:], f.Revoke.Waiters)
	case TypeNotice:
		le.PutUint32(p, f.Notice.Waiters)
		le.PutUint32(p[4:], f.Notice.Present)
	case TypeReserve:
		le.PutUint64(p, f.Reserve.Total)
		le.PutUint64(p[8:], f.Reserve.Least)
		le.PutUint64(p[16:], f.Reserve.Serial)
	case TypeReserved:
		le.PutUint64(p, f.Reserved.Total)
		le.PutUint64(p[8:], f.Reserved.Used)
		le.PutUint64(p[16:], f.Reserved.Limit)
		le.PutUint64(p[24:], f.Reserved.Serial)
	case TypeMoved:
		le.PutUint64(p, f.Moved.Resident)
		le.PutUint64(p[8:], f.Moved.Fixed)
		le.PutUint64(p[16:], f.Moved.Away)
		le.PutUint64(p[24:], f.Moved.Out)
		le.PutUint64(p[32:], f.Moved.In)
		le.PutUint64(p[40:], f.Moved.Arena)
	case TypeUtil:
		le.PutUint32(p, f.Util.Samples)
		le.PutUint32(p[4:], f.Util.Busy)
		le.PutUint32(p[8:], f.Util.Calls)
	case TypeControls:
		c := &f.Controls
		p[0], p[1] = byte(c.Slices), byte(c.Channels)
		le.PutUint16(p[2:], c.Groups)
		le.PutUint32(p[4:], c.Bare)
		copy(p[8:], c.Driver[:])
	case TypeRoom:
		le.PutUint64(p, f.Room.Bytes)
	case TypeAttached:
		copy(p, f.Attached.UUID[:])
	case TypeSlice:
		le.PutUint64(p, f.Slice.Ns)
	case TypeCopier:
		copy(p, f.Copier.GPU[:])
		le.PutUint32(p[16:], f.Copier.Flags)
	case TypeArena:
		le.PutUint64(p, f.Arena.Segment)
		le.PutUint64(p[8:], f.Arena.Size)
		le.PutUint32(p[16:], f.Arena.Flags)
	case TypeRefused:
		copy(p, f.Refused.Text[:])
	}
	return b
}
