//go:build compat

// SPDX-License-Identifier: Apache-2.0

// A cgo program that opens the driver, as bindings like go-nvml do. Prints the same line
// as probe.c.
package main

/*
#cgo LDFLAGS: -ldl
#include <dlfcn.h>
#include "../work.h"
static int all(int launches)
{
	struct driver d;
	void *lib = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_GLOBAL);

	if (!lib)
		return -1;
	*(void **)&d.init = dlsym(lib, "cuInit");
	*(void **)&d.device = dlsym(lib, "cuDeviceGet");
	*(void **)&d.retain = dlsym(lib, "cuDevicePrimaryCtxRetain");
	*(void **)&d.current = dlsym(lib, "cuCtxSetCurrent");
	*(void **)&d.load = dlsym(lib, "cuModuleLoadData");
	*(void **)&d.function = dlsym(lib, "cuModuleGetFunction");
	*(void **)&d.launch = dlsym(lib, "cuLaunchKernel");
	*(void **)&d.synchronize = dlsym(lib, "cuCtxSynchronize");
	return work(&d, launches);
}
*/
import "C"

import (
	"fmt"
	"io"
	"os"
)

const launches = 20

func main() {
	if rc := C.all(launches); rc != 0 {
		fmt.Fprintln(os.Stderr, "go-dlopen: error", rc)
		os.Exit(1)
	}
	fmt.Println("worked", os.Getpid(), launches)
	io.Copy(io.Discard, os.Stdin)
}
