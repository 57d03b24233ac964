// SPDX-License-Identifier: Apache-2.0

package rm

import (
	"fmt"
	"strconv"
	"strings"
)

// ABI is the part of the interface of the driver's resource manager (RM) that this package
// uses. Its numbers and layouts are those of NVIDIA's published kernel sources;
// hook/rm/rm_abi.h names the file of each, and a test compares the two.
type ABI struct {
	// First and Last are the branches of the driver that have it.
	First, Last int

	// Requests of ioctl.
	Alloc, Control uintptr

	// Commands of Control, and the sizes of their parameters.
	SetSlice, GetSlice Command // to a channel group; microseconds, 64 bits
	Channels           Command // to a subdevice; see channels
	UUID               Command // to a subdevice; see uuid
	Token              Command // to a channel: the number that rings its doorbell
	Info               Command // to a client: the parent of an object of it; see info

	// Statuses.
	BadClient uint32
	NoObject  []uint32

	// FirstClient is where the RM begins to number clients.
	FirstClient uint32
	// Objects are how libraries number the objects of a client.
	Objects   []Numbers
	RootClass uint32
}

// Numbers are a span of object numbers, asked for from First up: Most of them, or until misses in a row are
// nothing. With If they are asked for only where that number is an object.
type Numbers struct {
	First, Most uint32
	Misses      int
	If          uint32
}

// graphicsDevice is the number of the first device of a program that draws; that of each further one is less by nextDevice.
const (
	graphicsDevice = 0xbeef0003
	nextDevice     = 0x10000
)

// Command is the number of a control, and the size of its parameters in bytes.
type Command struct {
	Number uint32
	Size   int
}

// abis has a row for each span of branches with the same interface.
var abis = []ABI{{
	First: 515, Last: 595,
	Alloc: 0xc020462b, Control: 0xc020462a,
	SetSlice: Command{0xa06c0103, 8}, GetSlice: Command{0xa06c0104, 8},
	Channels: Command{0x2080110b, 536}, UUID: Command{0x2080014a, 268},
	Token: Command{0xc36f0108, 4}, Info: Command{0xd02, 16},
	BadClient: 0x23, NoObject: []uint32{0x57, 0x33},
	FirstClient: 0xc1d00000,
	Objects: []Numbers{
		{First: 0x5c000000, Most: 8192, Misses: 256}, // libcuda, and what lets the RM choose
		// OpenGL and Vulkan, as they were seen on H200s (580.159.04): beef0003 is the device of the first GPU that
		// libraries know, beef0004 its subdevice; the second GPU has beee0003 and beee0004. Each queue of Vulkan has
		// its own channels, with the same numbers on any GPU, and most have a group.
		{First: 0xbeef0004, Most: 1, Misses: 1, If: graphicsDevice},
		{First: 0xbeee0004, Most: 1, Misses: 1, If: graphicsDevice - 1*nextDevice},
		{First: 0xbeed0004, Most: 1, Misses: 1, If: graphicsDevice - 2*nextDevice},
		{First: 0xbeec0004, Most: 1, Misses: 1, If: graphicsDevice - 3*nextDevice},
		{First: 0xbeeb0004, Most: 1, Misses: 1, If: graphicsDevice - 4*nextDevice},
		{First: 0xbeea0004, Most: 1, Misses: 1, If: graphicsDevice - 5*nextDevice},
		{First: 0xbee90004, Most: 1, Misses: 1, If: graphicsDevice - 6*nextDevice},
		{First: 0xbee80004, Most: 1, Misses: 1, If: graphicsDevice - 7*nextDevice},
		{First: 0xcef80000, Most: 256, Misses: 16, If: graphicsDevice},
		{First: 0xbeef0100, Most: 256, Misses: 16, If: graphicsDevice},
		{First: 0xbeee0100, Most: 256, Misses: 16, If: graphicsDevice},
		{First: 0xbeed0100, Most: 256, Misses: 16, If: graphicsDevice},
		{First: 0xbeec0100, Most: 256, Misses: 16, If: graphicsDevice},
		{First: 0xbeeb0100, Most: 256, Misses: 16, If: graphicsDevice},
		{First: 0xbeea0100, Most: 256, Misses: 16, If: graphicsDevice},
	},
	RootClass: 0x41,
}}

// Layout of Channels: lists of clients and channels, of maxChannels each.
const (
	maxChannels = 64
	disableAt   = 0 // one byte
	countAt     = 4
	clientsAt   = 24
	channelsAt  = clientsAt + 4*maxChannels
)

// Layout of UUID.
const (
	uuidFlagsAt  = 4
	uuidBinary   = 2
	uuidLengthAt = 8
	uuidAt       = 12
	uuidLength   = 16
)

// Layout of Info. It was read in the published sources (ctrl0000client.h), and not tried on hardware: where it is not
// answered so, a process that sees several GPUs is not held.
const (
	infoObjectAt = 0
	infoIndexAt  = 4
	infoParent   = 1
	infoResultAt = 8
)

// For returns the interface of a version of the driver, like 580.159.04.
func For(version string) (*ABI, error) {
	branch, _, _ := strings.Cut(version, ".")
	n, err := strconv.Atoi(branch)
	if err != nil {
		return nil, fmt.Errorf("driver %q: no version", version)
	}
	for i := range abis {
		if n >= abis[i].First && n <= abis[i].Last {
			return &abis[i], nil
		}
	}
	return nil, fmt.Errorf("driver %s: its interface is not known; known are branches %d to %d", version, abis[0].First, abis[len(abis)-1].Last)
}
