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
	parents map[uint32]uint32 // of objects; nil: it says none
	off     map[uint32]uint32 // channels, and the subdevice that was asked for that
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
	case c == abi.Info:
		above, ok := r.parents[binary.LittleEndian.Uint32(params[infoObjectAt:])]
		if !ok || object != client || binary.LittleEndian.Uint32(params[infoIndexAt:]) != infoParent {
			return notSupported, nil
		}
		binary.LittleEndian.PutUint32(params[infoResultAt:], above)
		return 0, nil
	case c == abi.Channels && k == subdevice:
		for i := range binary.LittleEndian.Uint32(params[countAt:]) {
			r.off[binary.LittleEndian.Uint32(params[channelsAt+4*i:])] = object
		}
		return 0, nil
	case object == client:
		return notSupported, nil
	case !ok:
		return abi.NoObject[0], nil
	case c == abi.GetSlice && k == group, c == abi.Token && k == channel:
		return 0, nil
	case c == abi.UUID && k == subdevice:
		binary.LittleEndian.PutUint32(params[uuidLengthAt:], uuidLength)
		params[uuidAt] = byte(object)
		return 0, nil
	}
	return notSupported, nil
}

func TestLearn(t *testing.T) {
	abi := &abis[0]
	o := abi.Objects[0].First
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

	if early := (Objects{Top: top, Descriptors: []int{8}}); early.current([]int{8}) || !now.current([]int{8}) {
		t.Error("clients are looked for once more where some are known, or not where a descriptor had none yet")
	}

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

// OpenGL numbers its objects in its own way.
func TestLearnGraphics(t *testing.T) {
	abi := &abis[0]
	const mine = 0xc1d0001f
	r := &aRM{asked: map[Command]int{}, clients: map[uint32]map[uint32]kind{mine: {
		0xbeef0003: other, 0xbeef0004: subdevice, 0xbeef0032: other, 0xbeef0100: channel, 0xbeef0101: channel, 0xbeef0102: channel,
		0xbeef9097: other, 0xcef80000: group, 0xcef80001: group, 0xcef00000: other, 0xbeec0104: channel, // another queue
	}}}
	now := Objects{Top: mine + 4}
	for _, all := range []bool{true, false} {
		before := now
		now = Objects{Top: mine + 4}
		now.learn(abi, r, 10, before, true, all)
		if len(now.Clients) != 1 {
			t.Fatalf("clients %+v", now.Clients)
		}
		c := now.Clients[0]
		if !slices.Equal(c.Groups, []uint32{0xcef80000, 0xcef80001}) || !slices.Equal(c.Channels, []uint32{0xbeef0100, 0xbeef0101, 0xbeef0102, 0xbeec0104}) || !slices.Equal(c.Subdevices, []uint32{0xbeef0004}) || len(c.GPUs) != 1 {
			t.Errorf("learned %+v", c)
		}
	}
}

// OpenGL has a device of each GPU, also where it draws on one only: on the second here.
func TestLearnGraphicsOfSeveralGPUs(t *testing.T) {
	const mine, first, second, queue, bare = 0xc1d0001f, 0xbeef0004, 0xbeee0004, 0xcef80000, 0xbeef0101
	r := &aRM{asked: map[Command]int{}, clients: map[uint32]map[uint32]kind{mine: {
		0xbeef0003: other, first: subdevice, 0xbeee0003: other, second: subdevice, queue: group, 0xbeef0100: channel, bare: channel,
	}}, parents: map[uint32]uint32{first: 0xbeef0003, second: 0xbeee0003, queue: 0xbeee0003, 0xbeef0100: queue, bare: 0xbeee0003}}
	now := Objects{Top: mine + 4}
	now.learn(&abis[0], r, 10, Objects{}, true, true)
	if len(now.Clients) != 1 || !slices.Equal(now.Clients[0].On, []uint32{second, second}) || len(now.GPUs()) != 1 {
		t.Errorf("learned %+v", now.Clients)
	}
}

// A process that sees several GPUs is switched on those where its channels are.
func TestSeveralGPUs(t *testing.T) {
	abi := &abis[0]
	o := abi.Objects[0].First
	const mine = 0xc1d00001
	objects := map[uint32]kind{o: other, o + 1: subdevice, o + 2: other, o + 3: subdevice, o + 4: other, o + 5: subdevice,
		o + 10: group, o + 11: channel, o + 20: group, o + 21: channel, o + 22: channel, o + 30: channel}
	r := &aRM{asked: map[Command]int{}, off: map[uint32]uint32{}, clients: map[uint32]map[uint32]kind{mine: objects}}
	learn := func() *Client {
		now := Objects{Top: mine + 2}
		now.learn(abi, r, 8, Objects{}, true, true)
		if len(now.GPUs()) == 0 {
			t.Fatal("no GPU")
		}
		return &now.Clients[0]
	}
	off := func(c *Client) error {
		return c.bySubdevice(func(s uint32, part []uint32) error {
			_, err := r.Control(mine, s, abi.Channels, switching(abi, mine, part, false))
			return err
		})
	}
	if c := learn(); c.On != nil || off(c) == nil || len(r.off) != 0 {
		t.Errorf("an RM that does not say where channels are: %+v", c)
	}
	r.parents = map[uint32]uint32{o + 1: o, o + 3: o + 2, o + 5: o + 4, o + 10: o, o + 11: o + 10, o + 20: o + 2, o + 21: o + 20, o + 22: o + 20, o + 30: o + 2}
	c := learn()
	if err := off(c); err != nil || len(r.off) != 4 || r.off[o+11] != o+1 || r.off[o+21] != o+3 || r.off[o+22] != o+3 || r.off[o+30] != o+3 {
		t.Errorf("off on %#x, %v", r.off, err)
	}
	all := Objects{Clients: []Client{*c}}
	if gpus := all.GPUs(); len(gpus) != 2 {
		t.Errorf("its channels are on %v", gpus)
	}
	some := all.Channels(Objects{Clients: []Client{{Handle: mine, Channels: []uint32{o + 11}}}})
	if got := some.Clients[0]; !slices.Equal(got.Channels, []uint32{o + 21, o + 22, o + 30}) || !slices.Equal(got.On, []uint32{o + 3, o + 3, o + 3}) {
		t.Errorf("without one: %+v", got)
	}
}
