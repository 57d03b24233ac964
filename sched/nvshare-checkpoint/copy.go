// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"sync"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/checkpoint"
	"github.com/nvshare/nvshare/sched/wire"
)

// A copier has memory of other processes copied to a GPU. Each process has a socket, over which
// it asks for memory on that GPU, into which it copies; or it sends descriptors of its memory
// and gets descriptors of the copies. See struct nvs_copy in hook/wire.h. The processes are
// tenants, so what they send is not believed: the driver says what a descriptor is, and a bound
// holds for all that a process asks for.

func copyCommand(f *flags, status *int) *cobra.Command {
	var from, to string
	var sockets int
	var bytes uint64
	cmd := &cobra.Command{
		Use:   "copy --to UUID",
		Short: "Copy memory of other processes to a GPU (for nvshare-scheduler)",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			if sockets < 1 || to == "" {
				return errors.New("copy: want --to, and --sockets above 0: the scheduler gives both")
			}
			*status = exitFailed
			r := checkpoint.Result{}
			c, err := newCopier(f.library, from, to)
			if err != nil {
				r.Step, r.Error = "copy", fmt.Sprintf("copy to %s: %v", to, err)
			}
			if err := json.NewEncoder(os.Stdout).Encode(r); err != nil || c == nil {
				return err
			}
			*status = 0
			name("copy", 0)
			var all sync.WaitGroup
			for i := range sockets {
				all.Go(func() { c.serve(3+i, bytes) })
			}
			ended := make(chan struct{})
			go func() { all.Wait(); close(ended) }()
			go func() { // the scheduler ends, or wants no more
				_, _ = io.Copy(io.Discard, os.Stdin)
				os.Exit(0)
			}()
			<-ended
			return nil
		},
	}
	cmd.Flags().StringVar(&from, "from", "", "`UUID` of the GPU on which most of the memory is; it is made ready before the first request")
	cmd.Flags().StringVar(&to, "to", "", "`UUID` of the GPU that gets the copies")
	cmd.Flags().IntVar(&sockets, "sockets", 0, "number of processes; their sockets are descriptors 3 and up")
	cmd.Flags().Uint64Var(&bytes, "bytes", 0, "what each process may have copied in all")
	return cmd
}

// Structures and constants as cuda.h declares them.
const (
	invalidValue = 1 // CUresult
	noMemory     = 2
	noPeer       = 217 // CUDA_ERROR_PEER_ACCESS_UNSUPPORTED

	onDevice    = 1 // CU_MEM_LOCATION_TYPE_DEVICE
	pinned      = 1 // CU_MEM_ALLOCATION_TYPE_PINNED
	byFile      = 1 // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
	readWrite   = 3 // CU_MEM_ACCESS_FLAGS_PROT_READWRITE
	nonBlocking = 1 // CU_STREAM_NON_BLOCKING
	noTiming    = 3 // CU_EVENT_DISABLE_TIMING, CU_EVENT_BLOCKING_SYNC

	granule = 2 << 20
)

type (
	location   struct{ kind, id int32 }
	allocation struct {
		kind, handles int32
		at            location
		_             uint64
		_             [8]byte
	}
	access struct {
		at    location
		flags int32
	}
)

type copyCalls struct {
	init        func(uint32) int32
	errorString func(int32, **byte) int32
	count       func(*int32) int32
	get         func(*int32, int32) int32
	uuid        func(*[16]byte, int32) int32
	retain      func(*uintptr, int32) int32
	setCurrent  func(uintptr) int32
	canReach    func(*int32, int32, int32) int32
	importFile  func(*uint64, uintptr, int32) int32
	exportFile  func(*int32, uint64, int32, uint64) int32
	describe    func(*allocation, uint64) int32
	reserve     func(*uint64, uintptr, uintptr, uint64, uint64) int32
	free        func(uint64, uintptr) int32
	create      func(*uint64, uintptr, *allocation, uint64) int32
	mapAt       func(uint64, uintptr, uintptr, uint64, uint64) int32
	setAccess   func(uint64, uintptr, *access, uintptr) int32
	unmap       func(uint64, uintptr) int32
	release     func(uint64) int32
	newStream   func(*uintptr, uint32) int32
	newEvent    func(*uintptr, uint32) int32
	endEvent    func(uintptr) int32
	record      func(uintptr, uintptr) int32
	await       func(uintptr) int32
	copyAsync   func(uint64, uint64, uintptr, uintptr) int32
}

type copier struct {
	copyCalls
	to int32 // device

	mu       sync.Mutex
	contexts map[int32]uintptr // of devices
}

func newCopier(library, from, to string) (*copier, error) {
	lib, err := openLibrary(library)
	if err != nil {
		return nil, err
	}
	c := &copier{contexts: map[int32]uintptr{}}
	if err := bind(lib, []function{
		{"cuInit", &c.init}, {"cuGetErrorString", &c.errorString},
		{"cuDeviceGetCount", &c.count}, {"cuDeviceGet", &c.get}, {"cuDeviceGetUuid_v2", &c.uuid},
		{"cuDevicePrimaryCtxRetain", &c.retain}, {"cuCtxSetCurrent", &c.setCurrent}, {"cuDeviceCanAccessPeer", &c.canReach},
		{"cuMemImportFromShareableHandle", &c.importFile}, {"cuMemExportToShareableHandle", &c.exportFile},
		{"cuMemGetAllocationPropertiesFromHandle", &c.describe},
		{"cuMemAddressReserve", &c.reserve}, {"cuMemAddressFree", &c.free}, {"cuMemCreate", &c.create},
		{"cuMemMap", &c.mapAt}, {"cuMemSetAccess", &c.setAccess}, {"cuMemUnmap", &c.unmap}, {"cuMemRelease", &c.release},
		{"cuStreamCreate", &c.newStream}, {"cuEventCreate", &c.newEvent}, {"cuEventDestroy_v2", &c.endEvent},
		{"cuEventRecord", &c.record}, {"cuEventSynchronize", &c.await}, {"cuMemcpyDtoDAsync_v2", &c.copyAsync},
	}); err != nil {
		return nil, err
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if code := c.init(0); code != success {
		return nil, errorText(c.errorString, code)
	}
	if c.to, err = c.device(to); err != nil {
		return nil, err
	}
	if from != "" {
		source, err := c.device(from)
		if err == nil {
			_, err = c.reach(source)
		}
		if err != nil {
			return nil, err
		}
	}
	return c, nil
}

// device returns the device with a UUID.
func (c *copier) device(uuid string) (int32, error) {
	want, err := parseUUID(uuid)
	if err != nil {
		return 0, err
	}
	var n int32
	if code := c.count(&n); code != success {
		return 0, errorText(c.errorString, code)
	}
	for i := range n {
		var device int32
		var is [16]byte
		if c.get(&device, i) == success && c.uuid(&is, device) == success && is == want {
			return device, nil
		}
	}
	return 0, fmt.Errorf("the driver has no GPU %s", uuid)
}

// reach returns a context of the GPU on which memory is that is to be copied.
func (c *copier) reach(source int32) (uintptr, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	can := int32(0)
	if code := c.canReach(&can, source, c.to); code != success || can == 0 {
		return 0, fmt.Errorf("the GPUs cannot reach each other's memory")
	}
	for _, device := range []int32{c.to, source} {
		if c.contexts[device] != 0 {
			continue
		}
		var context uintptr
		if code := c.retain(&context, device); code != success {
			return 0, errorText(c.errorString, code)
		}
		c.contexts[device] = context
	}
	return c.contexts[source], nil
}

// A piece is an allocation of the driver.
type piece struct {
	handle uint64
	bytes  uintptr
}

// mapped is memory with an address, its pieces one behind the other.
type mapped struct {
	at     uint64
	bytes  uintptr
	pieces []piece
}

// mapOf takes the pieces, also where it fails.
func (c *copier) mapOf(pieces []piece, devices ...int32) (m mapped, code int32) {
	m.pieces = pieces
	for _, p := range pieces {
		m.bytes += p.bytes
	}
	var done uintptr
	if code = c.reserve(&m.at, m.bytes, granule, 0, 0); code == success {
		for _, p := range pieces {
			if code = c.mapAt(m.at+uint64(done), p.bytes, 0, p.handle, 0); code != success {
				break
			}
			done += p.bytes
		}
		if code == success {
			open := make([]access, len(devices))
			for i, d := range devices {
				open[i] = access{location{onDevice, d}, readWrite}
			}
			code = c.setAccess(m.at, m.bytes, &open[0], uintptr(len(open)))
		}
		if code == success {
			return m, code
		}
		c.unmapAll(m, done)
		c.free(m.at, m.bytes)
	}
	c.releaseAll(pieces)
	return mapped{}, code
}

// unmapAll unmaps the first bytes of what mapOf has mapped. Only the unmapping of one mapping is
// documented, so each is unmapped where the driver does not unmap all.
func (c *copier) unmapAll(m mapped, bytes uintptr) {
	if bytes == 0 || c.unmap(m.at, bytes) == success {
		return
	}
	at := uintptr(0)
	for _, p := range m.pieces {
		if at < bytes {
			c.unmap(m.at+uint64(at), p.bytes)
		}
		at += p.bytes
	}
}

func (c *copier) releaseAll(pieces []piece) {
	for _, p := range pieces {
		c.release(p.handle)
	}
}

func (c *copier) drop(m mapped) {
	if m.at != 0 {
		c.unmapAll(m, m.bytes)
		c.free(m.at, m.bytes)
	}
	c.releaseAll(m.pieces)
}

// A job is a request whose copy has begun, or that has failed.
type job struct {
	source, copy mapped
	event        uintptr // 0: nothing is copied
	code         int32
	bytes        uint64 // of what the process may have copied
}

// depth is how many copies of a process are under way at a time: the next one is mapped meanwhile.
const depth = 4

// serve answers the requests of one process until it closes its socket.
func (c *copier) serve(socket int, left uint64) {
	runtime.LockOSThread() // contexts are current to threads
	defer unix.Close(socket)
	streams := map[uintptr]uintptr{} // of contexts
	var begun []job
	defer func() {
		for _, j := range begun {
			if j.event != 0 {
				c.await(j.event)
			}
			c.drop(j.source)
			c.drop(j.copy)
		}
	}()
	for {
		flags := unix.MSG_CMSG_CLOEXEC
		if len(begun) > 0 {
			flags |= unix.MSG_DONTWAIT
		}
		full := len(begun) == depth
		var q wire.Copy
		var files []int
		var err error
		if !full {
			q, files, err = receiveCopy(socket, flags)
		}
		switch {
		case full, errors.Is(err, unix.EAGAIN):
			first := begun[0]
			begun = begun[1:]
			ok, alive := c.finish(socket, first)
			if !alive {
				return
			}
			if !ok { // the process asks again, until there is room
				left += first.bytes
			}
			continue
		case err != nil:
			return // it is gone, or breaks the protocol
		}
		j := job{code: noMemory}
		if q.Bytes <= left {
			left -= q.Bytes
			if len(q.Pieces) == 0 {
				j = c.makeRoom(q.Bytes)
			} else {
				j = c.begin(files, q.Pieces, streams)
			}
			j.bytes = q.Bytes
		}
		closeAll(files)
		begun = append(begun, j)
	}
}

// receiveCopy reads a request and the descriptors that it carries, one for each piece.
func receiveCopy(socket, flags int) (q wire.Copy, files []int, err error) {
	var b [wire.CopySize + 1]byte // one byte more tells a longer packet
	oob := make([]byte, unix.CmsgSpace(4*wire.CopiedAtOnce))
	n, oobn, _, _, err := unix.Recvmsg(socket, b[:], oob, flags)
	if err != nil {
		return q, nil, err
	}
	messages, err := unix.ParseSocketControlMessage(oob[:oobn])
	for _, m := range messages {
		rights, _ := unix.ParseUnixRights(&m)
		files = append(files, rights...)
	}
	if err == nil && n == 0 {
		err = io.EOF
	}
	if err == nil {
		q, err = wire.DecodeCopy(b[:n])
	}
	if err == nil && (q.Bytes == 0 || q.Bytes%granule != 0 || len(files) != len(q.Pieces)) {
		err = fmt.Errorf("%w: a request for %d bytes in %d pieces with %d descriptors", wire.ErrFrame, q.Bytes, len(q.Pieces), len(files))
	}
	if err != nil {
		closeAll(files)
		files = nil
	}
	return q, files, err
}

func closeAll(files []int) {
	for _, f := range files {
		unix.Close(f)
	}
}

// take imports the memory behind descriptors. All of it is on one device.
func (c *copier) take(files []int, granules []uint32) (pieces []piece, device, code int32) {
	for i, f := range files {
		p := piece{bytes: uintptr(granules[i]) * granule}
		var is allocation
		if code = c.importFile(&p.handle, uintptr(f), byFile); code == success {
			pieces = append(pieces, p)
			code = c.describe(&is, p.handle)
		}
		if code == success && (is.at.kind != onDevice || i > 0 && is.at.id != device) {
			code = invalidValue
		}
		if code != success {
			c.releaseAll(pieces)
			return nil, 0, code
		}
		device = is.at.id
	}
	return pieces, device, success
}

// makeRoom creates memory into which the process copies.
func (c *copier) makeRoom(bytes uint64) (j job) {
	one := piece{bytes: uintptr(bytes)}
	if j.code = c.createOn(&one); j.code == success {
		j.copy = mapped{bytes: one.bytes, pieces: []piece{one}}
	}
	return j
}

// createOn creates a piece on the copier's GPU.
func (c *copier) createOn(p *piece) (code int32) {
	like := allocation{kind: pinned, handles: byFile, at: location{onDevice, c.to}}
	return c.create(&p.handle, p.bytes, &like, 0)
}

// begin starts to copy the memory behind descriptors.
func (c *copier) begin(files []int, granules []uint32, streams map[uintptr]uintptr) (j job) {
	pieces, device, code := c.take(files, granules)
	if code != success {
		return job{code: code}
	}
	context, err := c.reach(device)
	if err != nil {
		c.releaseAll(pieces)
		return job{code: noPeer}
	}
	if streams[context] == 0 {
		var stream uintptr
		if j.code = c.setCurrent(context); j.code == success {
			j.code = c.newStream(&stream, nonBlocking)
		}
		if j.code != success {
			c.releaseAll(pieces)
			return j
		}
		streams[context] = stream
	}
	c.setCurrent(context)
	if j.source, j.code = c.mapOf(pieces, device); j.code != success {
		return j
	}
	one := piece{bytes: j.source.bytes}
	if j.code = c.createOn(&one); j.code == success {
		j.copy, j.code = c.mapOf([]piece{one}, c.to, device)
	}
	if j.code == success {
		j.code = c.newEvent(&j.event, noTiming)
	}
	if j.code == success {
		j.code = c.copyAsync(j.copy.at, j.source.at, one.bytes, streams[context])
	}
	if j.code == success {
		j.code = c.record(j.event, streams[context])
	}
	return j
}

// finish waits for a copy and answers: whether the process has it, and is not gone.
func (c *copier) finish(socket int, j job) (ok, alive bool) {
	if j.event != 0 {
		if j.code == success {
			j.code = c.await(j.event)
		}
		c.endEvent(j.event)
	}
	c.drop(j.source) // before the answer: then nobody but the process has it
	file := int32(-1)
	if j.code == success {
		j.code = c.exportFile(&file, j.copy.pieces[0].handle, byFile, 0)
	}
	c.drop(j.copy)
	a := wire.Copy{Bytes: uint64(j.copy.bytes), Result: j.code}
	var oob []byte
	if j.code == success {
		defer unix.Close(int(file))
		oob = unix.UnixRights(int(file))
	}
	return j.code == success, unix.Sendmsg(socket, a.Encode(), oob, nil, unix.MSG_NOSIGNAL) == nil
}
