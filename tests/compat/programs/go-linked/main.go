//go:build compat

// SPDX-License-Identifier: Apache-2.0

// A cgo program that is linked against the driver. Prints the same line as probe.c.
package main

/*
#cgo LDFLAGS: -l:libcuda.so.1
#include "../work.h"
int cuInit(unsigned);
int cuDeviceGet(int *, int);
int cuDevicePrimaryCtxRetain(void **, int);
int cuCtxSetCurrent(void *);
int cuModuleLoadData(void **, const void *);
int cuModuleGetFunction(void **, void *, const char *);
int cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
		   void *, void **, void **);
int cuCtxSynchronize(void);
static int all(int launches)
{
	struct driver d = { cuInit, cuDeviceGet, cuDevicePrimaryCtxRetain, cuCtxSetCurrent,
			    cuModuleLoadData, cuModuleGetFunction, cuLaunchKernel, cuCtxSynchronize };

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
		fmt.Fprintln(os.Stderr, "go-linked: error", rc)
		os.Exit(1)
	}
	fmt.Println("worked", os.Getpid(), launches)
	io.Copy(io.Discard, os.Stdin)
}
