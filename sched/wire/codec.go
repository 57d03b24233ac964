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

// header is the size of what all types have, bytes; then comes the union of the C structure.
const header = 16

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
	if err := f.decodePayload(b[header:]); err != nil {
		return f, err
	}
	return f, f.check()
}

// coder reads or writes the payload of a frame, from its begin on.
type coder struct {
	b     []byte
	at    int
	write bool
}

func (c *coder) bytes(v []byte) {
	if c.write {
		copy(c.b[c.at:], v)
	} else {
		copy(v, c.b[c.at:])
	}
	c.at += len(v)
}

func (c *coder) u16(all ...*uint16) {
	for _, v := range all {
		if c.write {
			le.PutUint16(c.b[c.at:], *v)
		} else {
			*v = le.Uint16(c.b[c.at:])
		}
		c.at += 2
	}
}

func (c *coder) u32(all ...*uint32) {
	for _, v := range all {
		if c.write {
			le.PutUint32(c.b[c.at:], *v)
		} else {
			*v = le.Uint32(c.b[c.at:])
		}
		c.at += 4
	}
}

func (c *coder) u64(all ...*uint64) {
	for _, v := range all {
		if c.write {
			le.PutUint64(c.b[c.at:], *v)
		} else {
			*v = le.Uint64(c.b[c.at:])
		}
		c.at += 8
	}
}

// payload reads or writes what the frame's type has, as the union of the C structure has it; false:
// the type is unknown.
func (f *Frame) payload(c *coder) (known bool) {
	switch f.Type {
	case TypeRegister:
		c.u16(&f.Register.MinVersion, &f.Register.Channels)
		c.u32(&f.Register.ShimVersion, &f.Register.Interposed, &f.Register.Bypassed)
	case TypeAttach:
		c.bytes(f.Attach.UUID[:])
		c.u32(&f.Attach.Ordinal, &f.Attach.reserved)
		c.u64(&f.Attach.TotalMem)
	case TypeRelease:
		c.u64(&f.Released.DrainNs, &f.Released.Calls)
		c.u32(&f.Released.Flags)
	case TypeStats:
		c.u64(&f.Stats.Calls, &f.Stats.Waits, &f.Stats.WaitNs, &f.Stats.MemBytes, &f.Stats.MemPeak, &f.Stats.WaitMaxNs)
	case TypeWelcome:
		c.u64(&f.Welcome.ClientID)
		c.u32(&f.Welcome.PageSize)
		c.u16(&f.Welcome.Slots)
	case TypeGrant:
		c.u64(&f.Grant.QuantumNs)
	case TypeRevoke:
		c.u64(&f.Revoke.GraceNs)
		c.u32(&f.Revoke.Waiters)
	case TypeNotice:
		c.u32(&f.Notice.Waiters, &f.Notice.Present)
	case TypeRefused:
		c.bytes(f.Refused.Text[:])
	case TypeReserve:
		c.u64(&f.Reserve.Total, &f.Reserve.Least, &f.Reserve.Serial)
	case TypeReserved:
		c.u64(&f.Reserved.Total, &f.Reserved.Used, &f.Reserved.Limit, &f.Reserved.Serial)
	case TypeMoved:
		m := &f.Moved
		c.u64(&m.Resident, &m.Fixed, &m.Away, &m.Out, &m.In, &m.Arena)
	case TypeUtil:
		c.u32(&f.Util.Samples, &f.Util.Busy, &f.Util.Calls)
	case TypeControls:
		c.controls(&f.Controls)
	case TypeRoom:
		c.u64(&f.Room.Bytes)
	case TypeSlice:
		c.u64(&f.Slice.Ns)
	case TypeArena:
		c.u64(&f.Arena.Segment, &f.Arena.Size)
		c.u32(&f.Arena.Flags)
	case TypeAttached:
		c.bytes(f.Attached.UUID[:])
	case TypeRequest, TypeSuspend, TypeSuspended:
	default:
		return false
	}
	return true
}

func (c *coder) controls(k *Controls) {
	both := [2]byte{byte(k.Slices), byte(k.Channels)}
	c.bytes(both[:])
	k.Slices, k.Channels = Control(both[0]), Control(both[1])
	c.u16(&k.Groups)
	c.u32(&k.Bare)
	c.bytes(k.Driver[:])
}

func (f *Frame) decodePayload(p []byte) error {
	c := coder{b: p}
	if !f.payload(&c) {
		return errType
	}
	if f.Type == TypeRegister && f.Version > Version {
		return nil // what a newer version put there is not ours to judge
	}
	if f.Attach.reserved != 0 || f.Released.Flags&^ReleasedPreempted != 0 || !isZero(p[c.at:]) {
		return errReserved
	}
	return nil
}

func isZero(b []byte) bool {
	for _, c := range b {
		if c != 0 {
			return false
		}
	}
	return true
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
	case TypeRequest, TypeStats, TypeUtil, TypeControls, TypeNotice, TypeRoom, TypeArena, TypeSlice:
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
	if f.Type == TypeMoved {
		code &^= movedSeen
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
	case TypeControls:
		return f.Controls.check()
	}
	return nil
}

func (c *Controls) check() error {
	end := bytes.IndexByte(c.Driver[:], 0)
	if end < 0 || c.Slices > ControlFailed || c.Channels > ControlFailed {
		return errControls
	}
	for _, b := range c.Driver[:end] {
		if b < ' ' || b > '~' {
			return errControls
		}
	}
	if !isZero(c.Driver[end:]) {
		return errReserved
	}
	return nil
}

func (r *Refused) check() error {
	n := bytes.IndexByte(r.Text[:], 0)
	if n < 0 || !utf8.Valid(r.Text[:n]) {
		return errText
	}
	if !isZero(r.Text[n:]) {
		return errReserved
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
	f.payload(&coder{b: b[header:], write: true})
	return b
}
