# SPDX-License-Identifier: Apache-2.0
"""suspend.py: a tenant that is suspended, or who looks at the GPU from outside.

usage: suspend.py torch|driver MIB
       suspend.py watch

Orders and replies are JSON, one a line, as in worker.py; each order has an "id" and an
"op", and its reply the same id:

  load   imports the framework, does not touch the GPU
  init   makes the context, and fills so much memory with a pattern
  work   reads all of that memory on the GPU, as a step of a decoder does, and waits:
         "seconds"
  check  counts the words that are wrong
  watch  (of watch) what NVML says: memory used on GPU 0, all that it has, and the processes on it
"""
import ctypes
import os
import sys
import time

from loads import common

MIB = 1 << 20
CHUNK = 64 * MIB
PATTERN = 0x5ab0c0de


class Torch:
    def load(self, _):
        global torch
        import torch
        return {}

    def init(self, mib):
        torch.zeros(1, device="cuda")
        self.blocks = [torch.arange(i, i + CHUNK // 4, dtype=torch.int32, device="cuda")
                       for i in range(mib * MIB // CHUNK)]
        a = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
        (a @ a).sum().item()    # cuBLAS is loaded, as in any server
        self.a = a
        return {"bytes": len(self.blocks) * CHUNK}

    def work(self, _):
        total = self.a @ self.a
        sums = [b.sum() for b in self.blocks]
        return {"sum": int(sums[-1].item()) if sums else 0, "norm": float(total.float().norm().item())}

    def check(self, _):
        wrong = 0
        for i, b in enumerate(self.blocks):
            wrong += int((b != torch.arange(i, i + CHUNK // 4, dtype=torch.int32, device="cuda")).sum().item())
        return {"wrong": wrong}


class Driver:
    def load(self, _):
        self.lib = ctypes.CDLL("libcuda.so.1")
        return {}

    def ok(self, name, *args):
        rc = getattr(self.lib, name)(*args)
        if rc:
            raise RuntimeError("%s: CUDA error %d" % (name, rc))

    def init(self, mib):
        context = ctypes.c_void_p()
        self.ok("cuInit", 0)
        self.ok("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.ok("cuCtxSetCurrent", context)
        self.blocks = []
        for i in range(max(1, mib * MIB // CHUNK)):
            p = ctypes.c_uint64()
            self.ok("cuMemAlloc_v2", ctypes.byref(p), ctypes.c_size_t(min(CHUNK, mib * MIB)))
            self.ok("cuMemsetD32_v2", p, ctypes.c_uint(PATTERN + i), ctypes.c_size_t(min(CHUNK, mib * MIB) // 4))
            self.blocks.append(p)
        self.ok("cuCtxSynchronize")
        self.size = min(CHUNK, mib * MIB)
        return {"bytes": len(self.blocks) * self.size}

    def work(self, _):
        first = ctypes.c_uint()
        for p in self.blocks:
            self.ok("cuMemcpyDtoH_v2", ctypes.byref(first), p, ctypes.c_size_t(4))
        return {}

    def check(self, _):
        wrong, host = 0, ctypes.create_string_buffer(self.size)
        for i, p in enumerate(self.blocks):
            self.ok("cuMemcpyDtoH_v2", host, p, ctypes.c_size_t(self.size))
            want = (PATTERN + i).to_bytes(4, "little") * (self.size // 4)
            if host.raw != want:
                wrong += sum(host.raw[at:at + 4] != want[:4] for at in range(0, self.size, 4))
        return {"wrong": wrong}


class NvmlMemory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class NvmlProcess(ctypes.Structure):
    _fields_ = [("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong),
                ("instance", ctypes.c_uint), ("compute", ctypes.c_uint)]


class Watch:
    def load(self, _):
        self.lib = ctypes.CDLL("libnvidia-ml.so.1")
        self.device = ctypes.c_void_p()
        self.ok("nvmlInit_v2")
        self.ok("nvmlDeviceGetHandleByIndex_v2", 0, ctypes.byref(self.device))
        return {}

    def ok(self, name, *args):
        rc = getattr(self.lib, name)(*args)
        if rc:
            raise RuntimeError("%s: NVML error %d" % (name, rc))

    def watch(self, _):
        m, n, infos = NvmlMemory(), ctypes.c_uint(1024), (NvmlProcess * 1024)()
        self.ok("nvmlDeviceGetMemoryInfo", self.device, ctypes.byref(m))
        self.ok("nvmlDeviceGetComputeRunningProcesses_v3", self.device, ctypes.byref(n), infos)
        return {"used": m.used, "total": m.total, "pids": [infos[i].pid for i in range(n.value)]}


def main():
    kind = sys.argv[1]
    mib = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    does = {"torch": Torch, "driver": Driver, "watch": Watch}[kind]()

    def do(order):
        began = time.monotonic()
        reply = getattr(does, order["op"])(mib)
        return dict(reply, seconds=time.monotonic() - began, pid=os.getpid())

    common.serve(common.replies_to_caller(), do)


main()
