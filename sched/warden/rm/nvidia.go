// SPDX-License-Identifier: Apache-2.0

package rm

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The device node of the driver: it has had this number since it has been there.
const (
	nvidiaMajor  = 195
	controlMinor = 255
)

// Nvidia is the real driver.
type Nvidia struct {
	abi  *ABI
	node string
}

// OpenNvidia looks which driver is loaded. root is where the host's files are.
func OpenNvidia(root string) (*Nvidia, error) {
	text, err := os.ReadFile("/sys/module/nvidia/version")
	if err != nil {
		return nil, fmt.Errorf("no NVIDIA driver: %w", err)
	}
	abi, err := For(strings.TrimSpace(string(text)))
	if err != nil {
		return nil, err
	}
	return &Nvidia{abi, root + "/dev/nvidiactl"}, nil
}

func (n *Nvidia) ABI() *ABI { return n.abi }

// alloc is nvos.h, NVOS21.
type alloc struct {
	client, parent, object, class uint32
	params                        uint64
	size, status                  uint32
}

// firstClients is how many are looked at where no client of our own can be made.
const firstClients = 2048

// Top makes a client, whose number the RM chooses, and ends it. Where the device node is
// not there for us, only the first clients since the driver was loaded are found.
func (n *Nvidia) Top() (uint32, error) {
	f, err := os.OpenFile(n.node, os.O_RDWR, 0)
	if err != nil {
		return n.abi.FirstClient + firstClients, nil
	}
	defer f.Close() // which ends the client
	a := alloc{class: n.abi.RootClass}
	if err := request(int(f.Fd()), n.abi.Alloc, unsafe.Pointer(&a)); err != nil {
		return 0, fmt.Errorf("make a client of the driver: %w", err)
	}
	if a.status != 0 || a.object == 0 {
		return 0, fmt.Errorf("make a client of the driver: status %#x", a.status)
	}
	return a.object, nil
}

func (n *Nvidia) May(st *unix.Stat_t) bool {
	return st.Mode&unix.S_IFMT == unix.S_IFCHR && unix.Major(st.Rdev) == nvidiaMajor && unix.Minor(st.Rdev) == controlMinor
}

func (n *Nvidia) Is(fd int) bool {
	var st unix.Stat_t
	return unix.Fstat(fd, &st) == nil && n.May(&st)
}

func (n *Nvidia) File(fd int) File { return &nvidiaFile{fd, n.abi.Control} }

type nvidiaFile struct {
	fd      int
	control uintptr
}

func (f *nvidiaFile) Close() error { return unix.Close(f.fd) }

// control is nvos.h, NVOS54.
type control struct {
	client, object, command, flags uint32
	params                         unsafe.Pointer
	size, status                   uint32
}

func (f *nvidiaFile) Control(client, object uint32, c Command, params []byte) (uint32, error) {
	if len(params) != c.Size {
		return 0, errors.New("parameters of another size")
	}
	r := control{client: client, object: object, command: c.Number, params: unsafe.Pointer(unsafe.SliceData(params)), size: uint32(c.Size)}
	err := request(f.fd, f.control, unsafe.Pointer(&r))
	runtime.KeepAlive(params)
	return r.status, err
}

func request(fd int, number uintptr, arg unsafe.Pointer) error {
	for {
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), number, uintptr(arg))
		switch errno {
		case 0:
			return nil
		case unix.EINTR:
		default:
			return errno
		}
	}
}
