// SPDX-License-Identifier: Apache-2.0

package rm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
)

// Simulated is the driver of tests/simgpu: its open file is a socket, on which others
// send a control and a socket for the answer.
type Simulated struct{ abi *ABI }

// OpenSimulated needs no driver.
func OpenSimulated() *Simulated { return &Simulated{&abis[0]} }

const (
	simulatedName = "@nvshare-simgpu nvidiactl "
	// simulatedTop: every process has a client with the same number.
	simulatedTop = 8
	// answerSeconds is how long a process that is stopped is waited for. On a machine that does much else one that
	// is not takes seconds, too.
	answerSeconds = 20
)

func (s *Simulated) ABI() *ABI { return s.abi }

func (s *Simulated) Top() (uint32, error) { return s.abi.FirstClient + simulatedTop, nil }

func (s *Simulated) May(_, link string) bool { return strings.HasPrefix(link, "socket:") }

func (s *Simulated) Is(fd int) bool {
	name, err := unix.Getsockname(fd)
	local, ok := name.(*unix.SockaddrUnix)
	return err == nil && ok && strings.HasPrefix(local.Name, simulatedName)
}

func (s *Simulated) File(fd int) File { return simulatedFile(fd) }

type simulatedFile int

func (f simulatedFile) Close() error { return unix.Close(int(f)) }

func (f simulatedFile) Control(client, object uint32, c Command, params []byte) (uint32, error) {
	if len(params) != c.Size {
		return 0, errors.New("parameters of another size")
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(pair[0])
	var text []byte
	for _, n := range []uint32{client, object, c.Number, uint32(c.Size)} {
		text = binary.LittleEndian.AppendUint32(text, n)
	}
	err = unix.Sendmsg(int(f), append(text, params...), unix.UnixRights(pair[1]), nil, unix.MSG_NOSIGNAL|unix.MSG_DONTWAIT)
	unix.Close(pair[1])
	if err != nil {
		return 0, err
	}
	if err := unix.SetsockoptTimeval(pair[0], unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: answerSeconds}); err != nil {
		return 0, err
	}
	answer := make([]byte, 4+c.Size)
	n, err := unix.Read(pair[0], answer)
	if err != nil {
		return 0, err
	}
	if n != len(answer) {
		return 0, fmt.Errorf("an answer of %d bytes: want %d", n, len(answer))
	}
	copy(params, answer[4:])
	return binary.LittleEndian.Uint32(answer), nil
}
