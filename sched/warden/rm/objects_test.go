// SPDX-License-Identifier: Apache-2.0

package rm

import (
	"encoding/binary"
	"slices"
	"testing"
)

// aRM is an open file of the driver with clients, by number, and their objects.
type aRM struct {
	clients map[uint32]map[uint32]kind
	asked   map[Command]int
	stray   int // questions about numbers that are no client
}

type kind int

const (
	other kind = iota
	group
	channel
	subdevice
)

func (r *aRM) Close() error { return nil }

func (r *aRM) Control(client, object uint32, c Command, params []byte) (uint32, error) {
	const notSupported = 0x56
	abi := &abis[0]
	r.asked[c]++
	objects, ok := r.clients[client]
	if !ok {
		r.stray++
		return abi.BadClient, nil
	}
	k, ok := objects[object]
	switch {
	case object == client:
		return notSupported, nil
	case !ok:
		return abi.NoObject[0], nil
	case c == abi.GetSlice && k == group, c == abi.Token && k == channel:
		return 0, nil
	case c == abi.UUID && k == subdevice:
		binary.LittleEndian.PutUint32(params[uuidLengthAt:], uuidLength)
		return 0, nil
	}
	return notSupported, nil
}

func TestLearn(t *testing.T) {
	abi := &abis[0]
	o := abi.FirstObject
	const mine, top = 0xc1d00421, 0xc1d0042a
	r := &aRM{asked: map[Command]int{}, clients: map[uint32]map[uint32]kind{mine: {o + 1: other, o + 21: subdevice, o + 39: group, o + 46: channel, o + 300: other, o + 301: channel}}}
	now := Objects{Top: top}
	now.learn(abi, r, 8, Objects{}, true, true)
	if len(now.Clients) != 1 || r.stray > 16+9 {
		t.Fatalf("%d clients, %d numbers asked in vain", len(now.Clients), r.stray)
	}
	c := now.Clients[0]
	if c.Handle != mine || !slices.Equal(c.Groups, []uint32{o + 39}) || !slices.Equal(c.Channels, []uint32{o + 46, o + 301}) || !slices.Equal(c.Subdevices, []uint32{o + 21}) || len(c.GPUs) != 1 {
		t.Errorf("learned %+v", c)
	}
	now.Descriptors = []int{8}

	// Once more, when a channel has come and one has gone.
	r.clients[mine][o+310] = channel
	delete(r.clients[mine], o+46)
	clear(r.asked)
	r.stray = 0
	next := Objects{Top: top}
	next.learn(abi, r, 8, now, false, false)
	if got := next.Clients[0].Channels; !slices.Equal(got, []uint32{o + 301, o + 310}) {
		t.Errorf("channels %#x", got)
	}
	if r.asked[abi.Token] != 1 || r.asked[abi.UUID] != 1 || r.stray != 0 || len(next.Clients[0].GPUs) != 1 {
		t.Errorf("asked %v, %d in vain", r.asked, r.stray)
	}
	if come := next.Channels(now); len(come.Clients) != 1 || !slices.Equal(come.Clients[0].Channels, []uint32{o + 310}) {
		t.Errorf("come: %+v", come)
	}

	// A later client is found with no question about earlier numbers.
	r.clients[top+3] = map[uint32]kind{o: channel}
	later := Objects{Top: top + 5}
	later.learn(abi, r, 8, now, true, false)
	if len(later.Clients) != 2 || r.stray > 4 {
		t.Errorf("%d clients, %d asked in vain", len(later.Clients), r.stray)
	}

	// The descriptor is another file's by now.
	r.clients = map[uint32]map[uint32]kind{0xc1d00010: {o: channel}}
	another := Objects{Top: top}
	if another.learn(abi, r, 8, now, false, false) {
		t.Error("another file is taken for the one before")
	}
	another.learn(abi, r, 8, now, true, false)
	if len(another.Clients) != 1 || another.Clients[0].Handle != 0xc1d00010 {
		t.Errorf("clients %+v", another.Clients)
	}
}
