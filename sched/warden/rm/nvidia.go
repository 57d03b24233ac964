// SPDX-License-Identifier: Apache-2.0

package rm

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
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

// May knows no device node outside /dev, but that of a chroot.
func (n *Nvidia) May(path, link string) bool {
	return (strings.HasPrefix(link, "/dev/") || filepath.Base(link) == filepath.Base(n.node)) && isDevice(unix.AT_FDCWD, path, unix.AT_NO_AUTOMOUNT, nvidiaMajor, controlMinor)
}

func (n *Nvidia) Is(fd int) bool {
	return isDevice(fd, "", unix.AT_EMPTY_PATH, nvidiaMajor, controlMinor)
}

// isDevice asks no server of a file system.
func isDevice(dir int, path string, flags int, major, minor uint32) bool {
	var st unix.Statx_t
	err := unix.Statx(dir, path, flags|unix.AT_STATX_DONT_SYNC, unix.STATX_TYPE, &st)
	return err == nil && st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev_major == major && st.Rdev_minor == minor
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
