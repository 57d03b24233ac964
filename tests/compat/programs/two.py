# SPDX-License-Identifier: Apache-2.0
"""Two libraries of one Python process reach the driver in different ways, as PyTorch
and CuPy do. One opens it by name and looks functions up; the other opens it globally by
its path, and asks cuGetProcAddress for functions with per-thread default streams. Both
work at once, in threads. Prints the same line as probe.c."""
import ctypes
import os
import sys
import threading

LAUNCHES = 20
PTX = b".version 6.0\n.target sm_50\n.address_size 64\n.visible .entry nvshare_spin() { ret; }\n"


def check(what, code):
    if code:
        print("two.py: %s: %d" % (what, code), file=sys.stderr, flush=True)
        os._exit(1)


class ByName:
    def __init__(self):
        self.lib = ctypes.CDLL("libcuda.so.1")

    def find(self, base, symbol):
        return getattr(self.lib, symbol)


class ByResolver:
    def __init__(self, path):
        self.lib = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        self.resolve = self.lib.cuGetProcAddress_v2

    def find(self, base, symbol):
        address, status = ctypes.c_void_p(), ctypes.c_int(-1)
        check(base, self.resolve(base.encode(), ctypes.byref(address), 12000, ctypes.c_uint64(2), ctypes.byref(status)))
        return ctypes.CFUNCTYPE(ctypes.c_int)(address.value)


def driver_path():
    with open("/proc/self/maps") as maps:
        return next(line.split()[-1] for line in maps if "libcuda.so" in line)


def work(module):
    def call(base, *args, symbol=None):
        check(base, module.find(base, symbol or base)(*args))

    device, context, code, kernel = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    call("cuModuleLoadData", ctypes.byref(code), PTX)
    call("cuModuleGetFunction", ctypes.byref(kernel), code, b"nvshare_spin")
    ns, record = ctypes.c_uint64(200000), ctypes.c_uint64(0)
    params = (ctypes.c_void_p * 2)(ctypes.addressof(ns), ctypes.addressof(record))
    for _ in range(LAUNCHES):
        call("cuLaunchKernel", kernel, 1, 1, 1, 1, 1, 1, 0, None, params, None)
    call("cuCtxSynchronize")


def main():
    one = ByName()
    two = ByResolver(driver_path())
    threads = [threading.Thread(target=work, args=(m,)) for m in (one, two)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    print("worked", os.getpid(), 2 * LAUNCHES, flush=True)
    sys.stdin.read()


main()
