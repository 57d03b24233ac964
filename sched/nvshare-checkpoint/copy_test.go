// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/wire"
)

// fakeDriver is a driver whose calls succeed, except the creation of memory.
func fakeDriver(t *testing.T, create func() int32) *copier {
	t.Helper()
	file, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { file.Close() })
	return &copier{contexts: map[int32]uintptr{}, to: 1, copyCalls: copyCalls{
		retain:     func(c *uintptr, _ int32) int32 { *c = 1; return success },
		setCurrent: func(uintptr) int32 { return success },
		canReach:   func(can *int32, _, _ int32) int32 { *can = 1; return success },
		importFile: func(*uint64, uintptr, int32) int32 { return success },
		exportFile: func(fd *int32, _ uint64, _ int32, _ uint64) int32 {
			n, err := unix.Dup(int(file.Fd()))
			*fd = int32(n)
			if err != nil {
				return noMemory
			}
			return success
		},
		describe:  func(is *allocation, _ uint64) int32 { is.at = location{onDevice, 0}; return success },
		reserve:   func(at *uint64, _, _ uintptr, _, _ uint64) int32 { *at = granule; return success },
		free:      func(uint64, uintptr) int32 { return success },
		create:    func(*uint64, uintptr, *allocation, uint64) int32 { return create() },
		mapAt:     func(uint64, uintptr, uintptr, uint64, uint64) int32 { return success },
		setAccess: func(uint64, uintptr, *access, uintptr) int32 { return success },
		unmap:     func(uint64, uintptr) int32 { return success },
		release:   func(uint64) int32 { return success },
		newStream: func(*uintptr, uint32) int32 { return success },
		newEvent:  func(e *uintptr, _ uint32) int32 { *e = 1; return success },
		endEvent:  func(uintptr) int32 { return success },
		record:    func(uintptr, uintptr) int32 { return success },
		await:     func(uintptr) int32 { return success },
		copyAsync: func(uint64, uint64, uintptr, uintptr) int32 { return success },
	}}
}

// ask makes a request for one piece, and returns the result.
func ask(t *testing.T, socket int, granules uint32) int32 {
	t.Helper()
	return exchange(t, socket, wire.Copy{Bytes: uint64(granules) * granule, Pieces: []uint32{granules}}, unix.UnixRights(0))
}

// exchange makes a request. An answer has a descriptor exactly if the result is success.
func exchange(t *testing.T, socket int, q wire.Copy, rights []byte) int32 {
	t.Helper()
	if err := unix.Sendmsg(socket, q.Encode(), rights, nil, 0); err != nil {
		t.Fatal(err)
	}
	var b [wire.CopySize]byte
	oob := make([]byte, unix.CmsgSpace(4))
	n, oobn, _, _, err := unix.Recvmsg(socket, b[:], oob, unix.MSG_CMSG_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	a, err := wire.DecodeCopy(b[:n])
	if err != nil {
		t.Fatal(err)
	}
	messages, _ := unix.ParseSocketControlMessage(oob[:oobn])
	var files []int
	for _, m := range messages {
		fds, _ := unix.ParseUnixRights(&m)
		files = append(files, fds...)
	}
	closeAll(files)
	if (a.Result == success) != (len(files) == 1) {
		t.Fatalf("result %d with %d descriptors", a.Result, len(files))
	}
	return a.Result
}

// A process that asks until there is room gets its copy then. What it may have copied is bounded.
func TestFailedCopiesAreFree(t *testing.T) {
	var result atomic.Int32
	result.Store(noMemory)
	c := fakeDriver(t, result.Load)
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { c.serve(pair[1], 3*granule); close(ended) }()
	for range 10 {
		if code := ask(t, pair[0], 2); code != noMemory {
			t.Fatalf("without room: %d", code)
		}
	}
	result.Store(success)
	if code := ask(t, pair[0], 2); code != success {
		t.Errorf("with room: %d", code)
	}
	if code := ask(t, pair[0], 2); code != noMemory {
		t.Errorf("beyond the bound: %d", code)
	}
	unix.Close(pair[0])
	<-ended
}

// A process may ask for memory without sending any. The bound holds for both, and the copier
// keeps nothing of what it has created.
func TestNewMemory(t *testing.T) {
	var kept atomic.Int32
	c := fakeDriver(t, func() int32 { kept.Add(1); return success })
	c.release = func(uint64) int32 { kept.Add(-1); return success }
	c.importFile = func(*uint64, uintptr, int32) int32 { kept.Add(1); return success }
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { c.serve(pair[1], 4*granule); close(ended) }()
	for _, v := range []struct {
		granules uint64
		code     int32
	}{{2, success}, {3, noMemory}, {1, success}} {
		if code := exchange(t, pair[0], wire.Copy{Bytes: v.granules * granule}, nil); code != v.code {
			t.Errorf("%d granules: %d, want %d", v.granules, code, v.code)
		}
	}
	if code := ask(t, pair[0], 1); code != success {
		t.Errorf("a copy within the bound: %d", code)
	}
	if code := exchange(t, pair[0], wire.Copy{Bytes: granule}, nil); code != noMemory {
		t.Errorf("beyond the bound: %d", code)
	}
	if n := kept.Load(); n != 0 {
		t.Errorf("the copier keeps %d handles", n)
	}
	// What is no request ends the connection.
	if err := unix.Sendmsg(pair[0], wire.Copy{Bytes: granule + 1}.Encode(), nil, nil, 0); err != nil {
		t.Fatal(err)
	}
	<-ended
	unix.Close(pair[0])
}
