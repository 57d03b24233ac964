# SPDX-License-Identifier: Apache-2.0
"""memory.py: what a process is told about the GPU's memory, and given of it.

usage: memory.py driver|torch|jax [hold MIB | exhaust | pool]

Imports the framework and waits for a line on standard input. Then it asks
everybody, allocates 1 GiB, asks again, and with `exhaust` allocates until it
is refused. With `hold` it allocates that much and waits for the end of
standard input. With `pool` it lets the device's pool keep 3 GiB that it has
freed, asks again, and allocates 4 GiB beside. Prints one JSON line.
"""
import ctypes
import json
import os
import subprocess
import sys

MIB = 1 << 20
BLOCK = 256 * MIB
MOST = 1 << 36   # without a limit, stop here
RELEASE_THRESHOLD, RESERVED_CURRENT = 4, 5   # CU_MEMPOOL_ATTR_...


class NvmlMemory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class NvmlMemory2(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint)] + [
        (n, ctypes.c_ulonglong) for n in ("total", "reserved", "free", "used")]


def attempt(f):
    """f's answer, or what went wrong."""
    try:
        return f()
    except Exception as e:
        return "%s: %s" % (type(e).__name__, str(e)[:300])


class Nvml:
    def __init__(self):
        self.lib = ctypes.CDLL("libnvidia-ml.so.1")
        self.ok("nvmlInit_v2")
        self.device = ctypes.c_void_p()
        self.ok("nvmlDeviceGetHandleByIndex_v2", 0, ctypes.byref(self.device))

    def ok(self, name, *args):
        rc = getattr(self.lib, name)(*args)
        if rc:
            raise RuntimeError("%s: NVML error %d" % (name, rc))

    def memory(self):
        m = NvmlMemory()
        self.ok("nvmlDeviceGetMemoryInfo", self.device, ctypes.byref(m))
        return {"total": m.total, "free": m.free, "used": m.used}

    def memory2(self):
        m = NvmlMemory2(version=ctypes.sizeof(NvmlMemory2) | 2 << 24)
        self.ok("nvmlDeviceGetMemoryInfo_v2", self.device, ctypes.byref(m))
        return {"total": m.total, "free": m.free, "used": m.used, "reserved": m.reserved}


def smi():
    out = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.total,memory.used,memory.free", "--format=csv,noheader,nounits", "-i", "0"],
        capture_output=True, text=True, timeout=30)
    if out.returncode:
        raise RuntimeError("exit status %d: %s" % (out.returncode, (out.stdout + out.stderr).strip()))
    total, used, free = (int(x) * MIB for x in out.stdout.split(","))
    return {"total": total, "used": used, "free": free}


def smi_processes():
    out = subprocess.run(
        ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits", "-i", "0"],
        capture_output=True, text=True, timeout=30)
    return (out.stdout + out.stderr).strip().splitlines()[:20]


def pynvml_memory():
    import pynvml
    pynvml.nvmlInit()
    m = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0))
    return {"total": m.total, "free": m.free, "used": m.used}


class Driver:
    """The driver API; also what the others are asked through besides."""

    def __init__(self):
        self.lib = ctypes.CDLL("libcuda.so.1")

    def prepare(self):
        context = ctypes.c_void_p()
        self.ok("cuInit", 0)
        self.ok("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.ok("cuCtxSetCurrent", context)

    def ok(self, name, *args):
        rc = getattr(self.lib, name)(*args)
        if rc:
            raise MemoryError("%s: CUDA error %d" % (name, rc))

    def told(self):
        free, total, device = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_size_t()
        self.ok("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        self.ok("cuDeviceTotalMem_v2", ctypes.byref(device), 0)
        return {"cuMemGetInfo": {"total": total.value, "free": free.value}, "cuDeviceTotalMem": {"total": device.value}}

    def allocate(self, size):
        p = ctypes.c_uint64()
        self.ok("cuMemAlloc_v2", ctypes.byref(p), ctypes.c_size_t(size))
        return p

    def free(self, blocks):
        for p in blocks:
            self.ok("cuMemFree_v2", p)

    def pool(self):
        pool = ctypes.c_void_p()
        self.ok("cuDeviceGetMemPool", ctypes.byref(pool), 0)
        return pool

    def keep(self, size):
        """The device's pool keeps so much that is in use no more."""
        p, pool = ctypes.c_uint64(), self.pool()
        self.ok("cuMemPoolSetAttribute", pool, RELEASE_THRESHOLD, ctypes.byref(ctypes.c_uint64(2**64 - 1)))
        self.ok("cuMemAllocAsync", ctypes.byref(p), ctypes.c_size_t(size), None)
        self.ok("cuMemFreeAsync", p, None)
        self.ok("cuCtxSynchronize")

    def kept(self):
        size = ctypes.c_uint64()
        self.ok("cuMemPoolGetAttribute", self.pool(), RESERVED_CURRENT, ctypes.byref(size))
        return size.value


class Torch:
    def __init__(self):
        global torch
        import torch

    def prepare(self):
        torch.zeros(1, device="cuda")

    def told(self):
        free, total = torch.cuda.mem_get_info()
        return {"torch.cuda.mem_get_info": {"total": total, "free": free},
                "torch.cuda.get_device_properties": {"total": torch.cuda.get_device_properties(0).total_memory}}

    def allocate(self, size):
        return torch.empty(size, dtype=torch.uint8, device="cuda").fill_(1)

    def free(self, blocks):
        blocks.clear()
        torch.cuda.empty_cache()


class Jax:
    def __init__(self):
        global jax
        import jax

    def prepare(self):
        jax.numpy.zeros(1).block_until_ready()

    def told(self):
        s = jax.devices()[0].memory_stats()
        return {"jax memory_stats": {"total": s.get("bytes_limit"), "pool": s.get("pool_bytes")}}

    def allocate(self, size):
        return jax.numpy.ones(size, dtype="uint8").block_until_ready()

    def free(self, blocks):
        blocks.clear()


def ask(framework, driver, nvml):
    told = {}
    for source in {framework, driver}:
        said = attempt(source.told)
        told.update(said if isinstance(said, dict) else {type(source).__name__: said})
    told["nvmlDeviceGetMemoryInfo"] = attempt(nvml.memory) if nvml else None
    told["nvmlDeviceGetMemoryInfo_v2"] = attempt(nvml.memory2) if nvml else None
    return told


def main():
    kind, what = sys.argv[1], sys.argv[2:]
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    driver = Driver()
    framework = driver if kind == "driver" else {"torch": Torch, "jax": Jax}[kind]()
    sys.stdin.readline()
    report = {"pid": os.getpid(), "kind": kind, "conf": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")}
    framework.prepare()
    nvml = attempt(Nvml)
    if isinstance(nvml, str):
        report["nvml"], nvml = nvml, None
    blocks = []
    if what[:1] == ["hold"]:
        blocks.append(framework.allocate(int(what[1]) * MIB))
        report["held"] = int(what[1]) * MIB
    else:
        report["before"] = ask(framework, driver, nvml)
        blocks.append(attempt(lambda: framework.allocate(4 * BLOCK)))
        if isinstance(blocks[0], str):
            report["first"] = blocks.pop()
        report["with_1g"] = ask(framework, driver, nvml)
        report["with_1g"]["nvidia-smi"] = attempt(smi)
        report["with_1g"]["pynvml"] = attempt(pynvml_memory)
        report["nvidia-smi processes"] = attempt(smi_processes)
        if what == ["pool"]:
            attempt(lambda: framework.keep(12 * BLOCK))
            report["kept"] = attempt(framework.kept)
            report["pooled"] = ask(framework, driver, nvml)
            more = attempt(lambda: framework.allocate(16 * BLOCK))
            report["beside"] = more if isinstance(more, str) else "allocated 4 GiB"
            report["left"] = attempt(framework.kept)
        if what == ["exhaust"]:
            try:
                while len(blocks) * BLOCK < MOST:
                    blocks.append(framework.allocate(BLOCK))
                report["refused"] = None
            except Exception as e:
                report["refused"] = {"type": type(e).__name__, "text": str(e)[:400]}
            report["allocated"] = (len(blocks) + 3) * BLOCK if blocks else 0
            report["full"] = ask(framework, driver, nvml)
            if blocks:
                framework.free(blocks)
            blocks = []
            report["freed"] = ask(framework, driver, nvml)
            again = attempt(lambda: framework.allocate(4 * BLOCK))
            report["again"] = again if isinstance(again, str) else "allocated 1 GiB"
    out.write(json.dumps(report) + "\n")
    out.flush()
    sys.stdin.read()


main()
