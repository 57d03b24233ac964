// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/hex"
	"errors"
	"fmt"
	"path/filepath"
	"runtime"
	"strings"
	"time"
	"unsafe"

	"github.com/ebitengine/purego"

	"github.com/nvshare/nvshare/sched/checkpoint"
)

// libraries is where libcuda.so.1 may be, if the dynamic linker does not find it.
var libraries = []string{
	"libcuda.so.1",
	"/usr/local/nvidia/lib64/libcuda.so.1",
	"/usr/lib/*-linux-gnu/libcuda.so.1",
	"/usr/lib64/libcuda.so.1",
	"/usr/lib/wsl/lib/libcuda.so.1",
	"/run/nvidia/driver/usr/lib/*-linux-gnu/libcuda.so.1",
	"/run/nvidia/driver/usr/lib64/libcuda.so.1",
	"/host/usr/lib/*-linux-gnu/libcuda.so.1",
	"/host/usr/lib64/libcuda.so.1",
}

const success = 0 // CUresult

// Arguments of the calls, as cuda.h of CUDA 12.8 and 13 declares them; each is 64 bytes,
// and what is reserved is zero.
type (
	lockArgs struct {
		timeoutMs uint32
		_         uint32
		_         [7]uint64
	}
	noArgs  struct{ _ [8]uint64 }
	gpuPair struct{ old, new [16]byte }

	restoreArgs struct {
		pairs *gpuPair
		count uint32
		_     [44]byte
		_     uint64
	}
)

type driver struct {
	serves bool // a scheduler

	init        func(flags uint32) int32
	errorString func(code int32, text **byte) int32
	getState    func(pid int32, state *int32) int32
	doLock      func(pid int32, args *lockArgs) int32
	doCheck     func(pid int32, args *noArgs) int32
	doRestore   func(pid int32, args *restoreArgs) int32
	doUnlock    func(pid int32, args *noArgs) int32
}

// openLibrary loads the driver's library; path "": from where it may be.
func openLibrary(path string) (uintptr, error) {
	paths := libraries
	if path != "" {
		paths = []string{path}
	}
	var failed error
	for _, pattern := range paths {
		found := []string{pattern}
		if strings.Contains(pattern, "*") {
			found, _ = filepath.Glob(pattern)
		}
		for _, path := range found {
			lib, err := purego.Dlopen(path, purego.RTLD_NOW|purego.RTLD_GLOBAL)
			if err == nil {
				return lib, nil
			}
			failed = errors.Join(failed, err)
		}
	}
	return 0, fmt.Errorf("load the driver's library: %w", failed)
}

func openDriver(path string) (*driver, error) {
	lib, err := openLibrary(path)
	if err != nil {
		return nil, err
	}
	d := &driver{}
	for name, to := range map[string]any{
		"cuInit": &d.init, "cuGetErrorString": &d.errorString,
		"cuCheckpointProcessGetState": &d.getState, "cuCheckpointProcessLock": &d.doLock,
		"cuCheckpointProcessCheckpoint": &d.doCheck, "cuCheckpointProcessRestore": &d.doRestore,
		"cuCheckpointProcessUnlock": &d.doUnlock,
	} {
		at, err := purego.Dlsym(lib, name)
		if err != nil {
			return nil, fmt.Errorf("this driver has no %s: it is older than 570 (CUDA 12.8)", name)
		}
		purego.RegisterFunc(to, at)
	}
	runtime.LockOSThread()
	return d, nil
}

func (d *driver) start() int { return int(d.init(0)) }

// text is what the driver says of an error.
func (d *driver) text(code int) error {
	var p *byte
	if d.errorString(int32(code), &p) != success || p == nil {
		return fmt.Errorf("CUDA error %d", code)
	}
	return fmt.Errorf("CUDA error %d: %s", code, goString(p))
}

func (d *driver) state(pid int) (checkpoint.State, int) {
	state := int32(checkpoint.Unknown)
	if code := d.getState(int32(pid), &state); code != success {
		return checkpoint.Unknown, int(code)
	}
	return checkpoint.State(state), success
}

func (d *driver) lock(pid int, wait time.Duration) int {
	return int(d.doLock(int32(pid), &lockArgs{timeoutMs: uint32(max(wait.Milliseconds(), 1))}))
}

func (d *driver) checkpoint(pid int) int { return int(d.doCheck(int32(pid), &noArgs{})) }

func (d *driver) restore(pid int, pairs []gpuPair) int {
	args := &restoreArgs{count: uint32(len(pairs))}
	if len(pairs) == 0 {
		return int(d.doRestore(int32(pid), args))
	}
	var pin runtime.Pinner
	defer pin.Unpin()
	pin.Pin(&pairs[0])
	args.pairs = &pairs[0]
	return int(d.doRestore(int32(pid), args))
}

func (d *driver) unlock(pid int) int { return int(d.doUnlock(int32(pid), &noArgs{})) }

// goString copies a string of C.
func goString(p *byte) string {
	n := 0
	for *(*byte)(unsafe.Add(unsafe.Pointer(p), n)) != 0 {
		n++
	}
	return string(unsafe.Slice(p, n))
}

// parseUUID reads a UUID as NVML prints it.
func parseUUID(text string) (uuid [16]byte, err error) {
	text = strings.ReplaceAll(strings.TrimPrefix(text, "GPU-"), "-", "")
	if len(text) != 32 {
		return uuid, fmt.Errorf("%q is no UUID of a GPU", text)
	}
	_, err = hex.Decode(uuid[:], []byte(text))
	return uuid, err
}
