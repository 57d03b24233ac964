// SPDX-License-Identifier: Apache-2.0

package rm

import (
	"encoding/binary"
	"fmt"
	"slices"
)

const (
	// clientMisses is how many numbers in a row are asked for after the latest client of a
	// file, and firstMisses before the first one: each that is nobody's writes a line to
	// the kernel's log. So no more than maxDescriptors are looked at, too.
	clientMisses   = 16
	firstMisses    = 2048
	maxDescriptors = 16
	// A tenant can make as many clients and objects as it likes: maxClients is how many a
	// process may have, and maxQuestions how often one look asks, which takes half a second.
	maxClients   = 64
	maxQuestions = 20000
)

// Client is what is known of one client of the RM.
type Client struct {
	Descriptor int      `json:"descriptor"` // of the process
	Handle     uint32   `json:"handle"`
	Groups     []uint32 `json:"groups"`
	Channels   []uint32 `json:"channels"`
	// Subdevices are its GPUs, and GPUs their UUIDs, in the same order.
	Subdevices []uint32 `json:"subdevices"`
	GPUs       []string `json:"gpus"`
	// On are the subdevices of Channels, in the same order, where there are several GPUs.
	On []uint32 `json:"on,omitempty"`
	// others are further objects of it, which need not be asked again what they are.
	others []uint32
}

// Objects are what is known of a process. Its fields are for the file in which they are
// written down; change them by Look only.
type Objects struct {
	Clients []Client `json:"clients"`
	// Top is what Driver.Top was when clients were looked for: no client comes below it.
	Top uint32 `json:"top"`
	// Descriptors are those that were seen then.
	Descriptors []int `json:"descriptors"`

	questions int // that were asked
}

// Look learns the clients of a process and their objects. before is what the look before
// found, or the zero value: where the process has the same descriptors as then, no new clients
// are looked for. With all, each object is asked anew what it is: that takes 30 ms for a PyTorch
// process.
func Look(d Driver, pid, pidfd int, before Objects, all bool) (Objects, error) {
	numbers, err := descriptors(d, pid)
	if err != nil {
		return Objects{}, err
	}
	numbers = numbers[:min(len(numbers), maxDescriptors)]
	now := Objects{Top: before.Top, Descriptors: numbers}
	scan := !before.current(numbers)
	if scan {
		if now.Top, err = d.Top(); err != nil {
			return Objects{}, err
		}
	}
	for _, n := range numbers {
		f, err := copyOf(d, pidfd, n)
		if err != nil {
			return Objects{}, err
		}
		if f == nil {
			continue
		}
		same := now.learn(d.ABI(), f, n, before, scan, all)
		f.Close()
		if !same {
			return Look(d, pid, pidfd, Objects{}, true)
		}
	}
	return now, nil
}

// current says whether a process with these descriptors has no other clients than then. A descriptor is there before
// its client, so nothing is known of a process without one.
func (o *Objects) current(descriptors []int) bool {
	return len(o.Clients) > 0 && slices.Equal(descriptors, o.Descriptors)
}

// learn adds the clients of one descriptor. false: it may be another file's than before, and
// new clients were not to be looked for.
func (o *Objects) learn(abi *ABI, f File, descriptor int, before Objects, scan, all bool) bool {
	handles := oldClients(abi, f, descriptor, before)
	had := slices.ContainsFunc(before.Clients, func(c Client) bool { return c.Descriptor == descriptor })
	if had && len(handles) == 0 {
		if !scan {
			return false
		}
		before = Objects{}
	}
	if scan {
		bottom := abi.FirstClient
		// What was asked for is not asked again, unless the numbers have gone round.
		if slices.Contains(before.Descriptors, descriptor) && before.Top <= o.Top {
			bottom = max(bottom, before.Top)
		}
		handles = append(handles, newClients(abi, f, bottom, o.Top)...)
	}
	for _, h := range handles {
		known := slices.ContainsFunc(o.Clients, func(c Client) bool { return c.Handle == h }) // by another descriptor of that file
		if !known && len(o.Clients) < maxClients {
			var old Client
			if i := slices.IndexFunc(before.Clients, func(c Client) bool { return c.Handle == h }); i >= 0 {
				old = before.Clients[i]
			}
			was := old
			if all {
				old = Client{}
			}
			c := Client{Descriptor: descriptor, Handle: h}
			for _, n := range abi.Objects {
				o.objects(abi, f, &c, n, old, was.last(n))
			}
			if len(c.Subdevices) > 1 {
				c.On = o.subdevices(abi, f, &c, old)
			}
			o.Clients = append(o.Clients, c)
		}
	}
	return true
}

// isClient asks whether a number is a client of this file.
func isClient(abi *ABI, f File, handle uint32) bool {
	status, err := f.Control(handle, handle, abi.GetSlice, make([]byte, abi.GetSlice.Size))
	return err == nil && status != abi.BadClient
}

func oldClients(abi *ABI, f File, descriptor int, before Objects) (handles []uint32) {
	for _, c := range before.Clients {
		if c.Descriptor == descriptor && isClient(abi, f, c.Handle) {
			handles = append(handles, c.Handle)
		}
	}
	return handles
}

// newClients asks from the latest client of all downwards.
func newClients(abi *ABI, f File, bottom, top uint32) (handles []uint32) {
	limit := firstMisses
	for h, misses := top-1, 0; h >= bottom && misses < limit; h-- {
		if !isClient(abi, f, h) {
			misses++
			continue
		}
		handles = append(handles, h)
		misses, limit = 0, clientMisses
	}
	return handles
}

// last is the greatest number of an object in a span.
func (c *Client) last(n Numbers) (last uint32) {
	for _, some := range [][]uint32{c.Groups, c.Channels, c.Subdevices, c.others} {
		for _, object := range some {
			if object-n.First < n.Most {
				last = max(last, object)
			}
		}
	}
	return last
}

// objects asks for the numbers of a span up to last, and until too many are nothing, and adds the client's objects.
func (o *Objects) objects(abi *ABI, f File, c *Client, n Numbers, old Client, last uint32) {
	var object uint32
	ask := func(k Command, params []byte) uint32 {
		o.questions++
		status, err := f.Control(c.Handle, object, k, params)
		if err != nil {
			return abi.BadClient
		}
		return status
	}
	isNone := func(status uint32) bool { return slices.Contains(abi.NoObject, status) || status == abi.BadClient }
	if object = n.If; object != 0 && isNone(ask(abi.GetSlice, make([]byte, abi.GetSlice.Size))) {
		return
	}
	for i, misses := uint32(0), 0; (misses < n.Misses || n.First+i <= last) && i < n.Most && o.questions < maxQuestions; i++ {
		object = n.First + i
		status := ask(abi.GetSlice, make([]byte, abi.GetSlice.Size))
		switch {
		case status == 0:
			c.Groups = append(c.Groups, object)
		case isNone(status):
			misses++
			continue
		case slices.Contains(old.others, object):
			c.others = append(c.others, object)
		case slices.Contains(old.Channels, object):
			c.Channels = append(c.Channels, object)
		case slices.Contains(old.Subdevices, object):
			c.Subdevices = append(c.Subdevices, object)
			c.GPUs = append(c.GPUs, old.GPUs[slices.Index(old.Subdevices, object)])
		default:
			params := make([]byte, abi.UUID.Size)
			binary.LittleEndian.PutUint32(params[uuidFlagsAt:], uuidBinary)
			if ask(abi.UUID, params) == 0 && binary.LittleEndian.Uint32(params[uuidLengthAt:]) == uuidLength {
				c.Subdevices = append(c.Subdevices, object)
				c.GPUs = append(c.GPUs, formatUUID(params[uuidAt:uuidAt+uuidLength]))
			} else if ask(abi.Token, make([]byte, abi.Token.Size)) == 0 {
				c.Channels = append(c.Channels, object)
			} else {
				c.others = append(c.others, object)
			}
		}
		misses = 0
	}
}

// maxDepth is how far a channel is below its device: in a group, or in none.
const maxDepth = 3

// subdevices finds out on which GPU each channel is: that whose device is above it. nil: the RM does not say.
func (o *Objects) subdevices(abi *ABI, f File, c *Client, old Client) (on []uint32) {
	parent := func(object uint32) uint32 {
		o.questions++
		params := make([]byte, abi.Info.Size)
		binary.LittleEndian.PutUint32(params[infoObjectAt:], object)
		binary.LittleEndian.PutUint32(params[infoIndexAt:], infoParent)
		if status, err := f.Control(c.Handle, c.Handle, abi.Info, params); err != nil || status != 0 {
			return 0
		}
		return binary.LittleEndian.Uint32(params[infoResultAt:])
	}
	of := map[uint32]uint32{} // by device
	for _, s := range c.Subdevices {
		of[parent(s)] = s
	}
	delete(of, 0)
	for _, channel := range c.Channels {
		if i := slices.Index(old.Channels, channel); i >= 0 && i < len(old.On) {
			on = append(on, old.On[i])
			continue
		}
		above, found := channel, uint32(0)
		for depth := 0; depth < maxDepth && above != 0 && found == 0; depth++ {
			above = parent(above)
			found = of[above]
		}
		if found == 0 {
			return nil
		}
		on = append(on, found)
	}
	return on
}

// bySubdevice calls do with the channels of each GPU, in parts that one control takes.
func (c *Client) bySubdevice(do func(subdevice uint32, part []uint32) error) error {
	for i, s := range c.Subdevices {
		channels := c.Channels
		switch {
		case len(c.Subdevices) == 1:
		case len(c.On) != len(c.Channels):
			return fmt.Errorf("a client has %d GPUs, and it is not known which channels are on which", len(c.Subdevices))
		default:
			channels = nil
			for j, ch := range c.Channels {
				if c.On[j] == c.Subdevices[i] {
					channels = append(channels, ch)
				}
			}
		}
		for part := range slices.Chunk(channels, maxChannels) {
			if err := do(s, part); err != nil {
				return err
			}
		}
	}
	return nil
}

func formatUUID(b []byte) string {
	return fmt.Sprintf("GPU-%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

// Channels returns what is needed to put them on, without those that other has.
func (o *Objects) Channels(other Objects) (some Objects) {
	for _, c := range o.Clients {
		has := func(uint32) bool { return false }
		if i := slices.IndexFunc(other.Clients, func(x Client) bool { return x.Handle == c.Handle }); i >= 0 {
			has = func(ch uint32) bool { return slices.Contains(other.Clients[i].Channels, ch) }
		}
		left := Client{Descriptor: c.Descriptor, Handle: c.Handle, Subdevices: c.Subdevices}
		for i, ch := range c.Channels {
			if has(ch) {
				continue
			}
			if left.Channels = append(left.Channels, ch); i < len(c.On) {
				left.On = append(left.On, c.On[i])
			}
		}
		if len(left.Channels) > 0 {
			some.Clients = append(some.Clients, left)
		}
	}
	return some
}

// GPUs are the UUIDs of those that a process can use; where it is known on which its channels are, of these.
func (o *Objects) GPUs() (all []string) {
	for _, c := range o.Clients {
		for i, s := range c.Subdevices {
			if len(c.On) == 0 || slices.Contains(c.On, s) {
				all = append(all, c.GPUs[i])
			}
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// Count returns how many groups and channels there are.
func (o *Objects) Count() (groups, channels int) {
	for _, c := range o.Clients {
		groups += len(c.Groups)
		channels += len(c.Channels)
	}
	return groups, channels
}

// each calls do for each client, with a copy of its file.
func (o *Objects) each(d Driver, pidfd int, wanted func(*Client) bool, do func(File, *Client) error) error {
	for i := range o.Clients {
		c := &o.Clients[i]
		if !wanted(c) {
			continue
		}
		f, err := copyOf(d, pidfd, c.Descriptor)
		if err != nil {
			return err
		}
		if f == nil {
			return fmt.Errorf("descriptor %d is the driver's no longer", c.Descriptor)
		}
		err = do(f, c)
		f.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

// StatusError is what the RM answered.
type StatusError struct {
	What   string
	Status uint32
}

func (e *StatusError) Error() string {
	return fmt.Sprintf("%s: the driver answers status %#x", e.What, e.Status)
}

// Slice sets the time slice of all groups, and reads it back.
func (o *Objects) Slice(d Driver, pidfd int, us uint64) error {
	abi := d.ABI()
	has := func(c *Client) bool { return len(c.Groups) > 0 }
	return o.each(d, pidfd, has, func(f File, c *Client) error {
		for _, g := range c.Groups {
			params := binary.LittleEndian.AppendUint64(nil, us)
			if status, err := f.Control(c.Handle, g, abi.SetSlice, params); err != nil || status != 0 {
				return failed("set a time slice", status, err)
			}
			clear(params)
			status, err := f.Control(c.Handle, g, abi.GetSlice, params)
			if err != nil || status != 0 {
				return failed("read a time slice", status, err)
			}
			if got := binary.LittleEndian.Uint64(params); got != us {
				return fmt.Errorf("a time slice was set to %d us, and is %d", us, got)
			}
		}
		return nil
	})
}

// SliceOf returns the time slice of the first group; 0: there is none.
func (o *Objects) SliceOf(d Driver, pidfd int) (us uint64, err error) {
	abi := d.ABI()
	has := func(c *Client) bool { return len(c.Groups) > 0 && us == 0 }
	err = o.each(d, pidfd, has, func(f File, c *Client) error {
		params := make([]byte, abi.GetSlice.Size)
		status, err := f.Control(c.Handle, c.Groups[0], abi.GetSlice, params)
		if err != nil || status != 0 {
			return failed("read a time slice", status, err)
		}
		us = binary.LittleEndian.Uint64(params)
		return nil
	})
	return us, err
}

// Switch takes all channels off the GPU, or puts them on once. An error may mean that some
// were switched.
func (o *Objects) Switch(d Driver, pidfd int, on bool) error {
	abi := d.ABI()
	has := func(c *Client) bool { return len(c.Channels) > 0 }
	return o.each(d, pidfd, has, func(f File, c *Client) error {
		return c.bySubdevice(func(subdevice uint32, part []uint32) error {
			if status, err := f.Control(c.Handle, subdevice, abi.Channels, switching(abi, c.Handle, part, on)); err != nil || status != 0 {
				return failed("switch channels", status, err)
			}
			return nil
		})
	})
}

func switching(abi *ABI, client uint32, channels []uint32, on bool) []byte {
	p := make([]byte, abi.Channels.Size)
	if !on {
		p[disableAt] = 1
	}
	binary.LittleEndian.PutUint32(p[countAt:], uint32(len(channels)))
	for i, ch := range channels {
		binary.LittleEndian.PutUint32(p[clientsAt+4*i:], client)
		binary.LittleEndian.PutUint32(p[channelsAt+4*i:], ch)
	}
	return p
}

func failed(what string, status uint32, err error) error {
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return &StatusError{what, status}
}

// PutOn puts all channels on so often that they are on, however often they were taken off
// (times at most). It goes on after a failure, channel by channel: one may have been freed. So may a client; but first
// it is looked for in other descriptors than before.
func (o *Objects) PutOn(d Driver, pid, pidfd, times int) (err error) {
	var numbers []int
	tries := 0 // a process can have clients that have ended, and descriptors, without end
	for _, c := range o.Clients {
		if len(c.Channels) == 0 || len(c.Subdevices) == 0 {
			continue
		}
		known, e := c.putOn(d, pidfd, c.Descriptor, times)
		if !known && e == nil && numbers == nil {
			numbers, e = descriptors(d, pid)
		}
		for i := 0; !known && e == nil && i < len(numbers) && tries < maxQuestions; i++ {
			tries++
			known, e = c.putOn(d, pidfd, numbers[i], times)
		}
		if e != nil {
			err = e
		}
	}
	return err
}

// putOn is PutOn of a client. known: it is one of this descriptor.
func (c *Client) putOn(d Driver, pidfd, descriptor, times int) (known bool, err error) {
	f, err := copyOf(d, pidfd, descriptor)
	if f == nil || err != nil {
		return false, err
	}
	defer f.Close()
	abi := d.ABI()
	known = true
	for i := 0; i < times && known; i++ {
		// An error says that it is not known on which GPUs they are. Then they were never off.
		_ = c.bySubdevice(func(subdevice uint32, part []uint32) error {
			status, e := f.Control(c.Handle, subdevice, abi.Channels, switching(abi, c.Handle, part, true))
			if known = e != nil || status != abi.BadClient; !known || e == nil && status == 0 {
				return nil
			}
			for _, one := range part {
				status, e := f.Control(c.Handle, subdevice, abi.Channels, switching(abi, c.Handle, []uint32{one}, true))
				if e != nil || status != 0 && !slices.Contains(abi.NoObject, status) && status != abi.BadClient {
					err = failed("put channels on", status, e)
				}
			}
			return nil
		})
	}
	return known, err
}
