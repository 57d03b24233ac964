# SPDX-License-Identifier: Apache-2.0
"""Loads on the driver API alone, no framework: a kernel that spins. Runs on
the simulated driver too."""
import ctypes
import time

from loads import common

SPIN_NS = 500000

PTX = b"""
.version 6.0
.target sm_50
.address_size 64
.visible .entry nvshare_spin(.param .u64 ns, .param .u64 at)
{
	.reg .pred %p<3>;
	.reg .b64 %rd<6>;
	ld.param.u64 %rd1, [ns];
	ld.param.u64 %rd2, [at];
	mov.u64 %rd3, %globaltimer;
LOOP:
	mov.u64 %rd4, %globaltimer;
	sub.u64 %rd5, %rd4, %rd3;
	setp.lt.u64 %p1, %rd5, %rd1;
	@%p1 bra LOOP;
	ret;
}
"""


class Driver:
    """libcuda by name: driver.cuInit(0) raises if it does not return 0."""

    def __init__(self):
        self.lib = ctypes.CDLL("libcuda.so.1")

    def __getattr__(self, name):
        fn = getattr(self.lib, name)

        def call(*args):
            rc = fn(*args)
            if rc:
                raise RuntimeError("%s: CUDA error %d" % (name, rc))
        setattr(self, name, call)
        return call


class Gpu:
    """A context, a stream and the kernel on one GPU."""

    def __init__(self, cu, gpu):
        self.context, self.stream = ctypes.c_void_p(), ctypes.c_void_p()
        module, self.spin = ctypes.c_void_p(), ctypes.c_void_p()
        cu.cuDevicePrimaryCtxRetain(ctypes.byref(self.context), gpu)
        cu.cuCtxSetCurrent(self.context)
        cu.cuStreamCreate(ctypes.byref(self.stream), 1)
        cu.cuModuleLoadData(ctypes.byref(module), PTX)
        cu.cuModuleGetFunction(ctypes.byref(self.spin), module, b"nvshare_spin")


class Spin:
    def __init__(self, cu, gpu):
        self.cu, self.gpu = cu, gpu
        self.ns, self.at = ctypes.c_uint64(SPIN_NS), ctypes.c_uint64(0)
        self.params = (ctypes.c_void_p * 2)(ctypes.addressof(self.ns), ctypes.addressof(self.at))

    def step(self):
        self.cu.cuLaunchKernel(self.gpu.spin, 1, 1, 1, 32, 1, 1, 0, self.gpu.stream, self.params, None)


class Phases(Spin):
    """Long kernels, then many short ones, for each of which the CPU works longer than the GPU.
    A CPU that is far enough ahead gets through these while the GPU has the long ones."""
    LONG, LONG_NS, SHORT, SHORT_NS, CPU_S = 8, 1500000, 200, 5000, 40e-6

    def __init__(self, cu, gpu):
        super().__init__(cu, gpu)
        self.ns.value = self.LONG_NS
        self.short_ns = ctypes.c_uint64(self.SHORT_NS)
        self.long = self.params
        self.short = (ctypes.c_void_p * 2)(ctypes.addressof(self.short_ns), ctypes.addressof(self.at))

    def step(self):
        self.params = self.long
        for _ in range(self.LONG):
            super().step()
        self.params = self.short
        for _ in range(self.SHORT):
            end = time.perf_counter() + self.CPU_S
            while time.perf_counter() < end:
                pass
            super().step()


class Decoder(Spin):
    """What servers.py serves on the simulated GPU: no model, but memory, and steps that take time."""
    parameters, PATTERN = 0, 0x5ab0c0de

    def __init__(self, slots, part, mib=0):
        cu = Driver()
        cu.cuInit(0)
        super().__init__(cu, Gpu(cu, 0))
        self.slots, free, total, self.cache = slots, ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_uint64()
        cu.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        size = int(part * total.value) - (total.value - free.value) if part else (mib or slots) << 20
        cu.cuMemAlloc_v2(ctypes.byref(self.cache), ctypes.c_size_t(size))
        cu.cuMemsetD32_v2(self.cache, ctypes.c_uint(self.PATTERN), ctypes.c_size_t(size // 4))

    def work(self, ns):
        self.ns.value = ns
        self.step()
        self.cu.cuStreamSynchronize(self.gpu.stream)

    def prefill(self, slot, prompt):
        self.work(1000 * len(prompt))
        word = ctypes.c_uint()
        self.cu.cuMemcpyDtoH_v2(ctypes.byref(word), self.cache, ctypes.c_size_t(4))
        return word.value

    def decode(self, b, longest):
        self.work(500000 + 20000 * b)
        return [0] * b


HOSTFN = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Meet(Spin):
    """A kernel, then all ranks wait for each other in their streams, as in a
    collective's kernel."""

    def __init__(self, cu, gpu, ranks):
        super().__init__(cu, gpu)
        self.more = ranks.more
        self.meet = HOSTFN(lambda _: ranks.meet())

    def step(self):
        super().step()
        self.cu.cuLaunchHostFunc(self.gpu.stream, self.meet, None)


class Event:
    def __init__(self, cu):
        self.cu, self.handle = cu, ctypes.c_void_p()
        cu.cuEventCreate(ctypes.byref(self.handle), 0)

    def __del__(self):
        self.cu.cuEventDestroy_v2(self.handle)


class Backend(common.Backend):
    """With a file, a rank and their number it is one of several processes."""

    def __init__(self, *ranks):
        self.gpus = {}
        self.ranks = common.Ranks(*ranks) if ranks else None

    def init(self):
        self.cu = Driver()
        self.cu.cuInit(0)
        n = ctypes.c_int()
        self.cu.cuDeviceGetCount(ctypes.byref(n))
        if not self.ranks:
            self.gpu(0)
        return {"gpus": n.value}

    def gpu(self, i):
        if i not in self.gpus:
            self.gpus[i] = Gpu(self.cu, i)
        self.cu.cuCtxSetCurrent(self.gpus[i].context)
        return self.gpus[i]

    enter = gpu

    def build(self, name, gpu):
        if name == "ranks" and self.ranks:
            return Meet(self.cu, self.gpu(gpu), self.ranks)
        loads = {"spin": Spin, "phases": Phases}
        if name not in loads:
            raise common.Skip("the driver backend has only spin and phases")
        return loads[name](self.cu, self.gpu(gpu))

    def clock(self, gpu):
        cu, stream = self.cu, self.gpu(gpu).stream

        def elapsed(a, b):
            ms = ctypes.c_float()
            cu.cuEventElapsedTime(ctypes.byref(ms), a.handle, b.handle)
            return ms.value

        return common.EventClock(
            lambda: Event(cu), lambda e: cu.cuEventRecord(e.handle, stream),
            lambda e: cu.cuEventSynchronize(e.handle), elapsed)

    def check(self, name, gpu, seed):
        """A pattern that goes to the GPU, across it and back."""
        self.gpu(gpu)
        n = 1 << 20
        pattern = bytes((seed + i * 31) % 251 for i in range(4096)) * (n // 4096)
        a, b = ctypes.c_uint64(), ctypes.c_uint64()
        back = ctypes.create_string_buffer(n)
        for p in (a, b):
            self.cu.cuMemAlloc_v2(ctypes.byref(p), ctypes.c_size_t(n))
        self.cu.cuMemcpyHtoD_v2(a, pattern, ctypes.c_size_t(n))
        self.cu.cuMemcpyDtoD_v2(b, a, ctypes.c_size_t(n))
        self.cu.cuMemcpyDtoH_v2(back, b, ctypes.c_size_t(n))
        for p in (a, b):
            self.cu.cuMemFree_v2(p)
        return [(back.raw, [float(x) for x in back.raw[:256]])]
