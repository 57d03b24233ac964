// SPDX-License-Identifier: Apache-2.0

// A program that opens the driver without cgo. Prints the same line as probe.c.
package main

import (
	"fmt"
	"io"
	"os"
	"runtime"
	"unsafe"

	"github.com/ebitengine/purego"
)

const launches = 20

func main() {
	runtime.LockOSThread()
	lib, err := purego.Dlopen("libcuda.so.1", purego.RTLD_NOW|purego.RTLD_GLOBAL)
	if err != nil {
		fmt.Fprintln(os.Stderr, "go-purego:", err)
		os.Exit(1)
	}
	var cu struct {
		init     func(uint32) int32
		device   func(*int32, int32) int32
		retain   func(*uintptr, int32) int32
		current  func(uintptr) int32
		load     func(*uintptr, string) int32
		function func(*uintptr, uintptr, string) int32
		launch   func(k uintptr, gx, gy, gz, bx, by, bz, shared uint32, stream uintptr, params, extra unsafe.Pointer) int32
		sync     func() int32
	}
	for name, f := range map[string]any{
		"cuInit": &cu.init, "cuDeviceGet": &cu.device, "cuDevicePrimaryCtxRetain": &cu.retain,
		"cuCtxSetCurrent": &cu.current, "cuModuleLoadData": &cu.load, "cuModuleGetFunction": &cu.function,
		"cuLaunchKernel": &cu.launch, "cuCtxSynchronize": &cu.sync,
	} {
		purego.RegisterLibFunc(f, lib, name)
	}
	var device int32
	var ctx, module, kernel uintptr
	check(cu.init(0))
	check(cu.device(&device, 0))
	check(cu.retain(&ctx, device))
	check(cu.current(ctx))
	check(cu.load(&module, ".version 6.0\n.visible .entry nvshare_spin() { ret; }\n"))
	check(cu.function(&kernel, module, "nvshare_spin"))
	ns, record := new(uint64), new(uint64)
	*ns = 200_000
	params := []unsafe.Pointer{unsafe.Pointer(ns), unsafe.Pointer(record)}
	var pins runtime.Pinner
	pins.Pin(ns)
	pins.Pin(record)
	for range launches {
		check(cu.launch(kernel, 1, 1, 1, 1, 1, 1, 0, 0, unsafe.Pointer(&params[0]), nil))
	}
	check(cu.sync())
	pins.Unpin()
	fmt.Println("worked", os.Getpid(), launches)
	io.Copy(io.Discard, os.Stdin)
}

func check(code int32) {
	if code != 0 {
		fmt.Fprintln(os.Stderr, "go-purego: error", code)
		os.Exit(1)
	}
}
