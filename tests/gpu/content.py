# SPDX-License-Identifier: Apache-2.0
"""content.py: a program whose memory is of a kind that moves cheaply, or is not.

usage: content.py pool|model|training|kernel MIB

  pool      takes MIB at once, as a framework's pool does, or what it can get of it, and
            uses little of it
  model     MIB of weights that are read at each step, and a buffer that is written
  training  MIB of weights that are written at each step
  kernel    no such program: runs the shim's nvshare_look (hook/swap/look_abi.h) over MIB, says how
            fast it reads, and compares its sums with those that Python adds up

Memory is the driver's own, by cuMemAlloc. Orders and replies are JSON, one a line, as in
worker.py: load, init, work ("until", seconds since 1970), check, quit.
"""
import ctypes
import json
import os
import sys
import time
import traceback

MIB = 1 << 20
BLOCK = 64 * MIB
PIECE = 2 * MIB


class Program:
    def __init__(self, mib):
        self.mib, self.steps = mib, 0
        self.block = min(BLOCK, mib * MIB // 8)

    def load(self, _):
        self.lib = ctypes.CDLL("libcuda.so.1")
        self.memcmp = ctypes.CDLL(None).memcmp
        self.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        return {}

    def ok(self, name, *args):
        rc = getattr(self.lib, name)(*args)
        if rc:
            raise RuntimeError("%s: CUDA error %d" % (name, rc))

    def alloc(self, n):
        p = ctypes.c_uint64()
        self.ok("cuMemAlloc_v2", ctypes.byref(p), ctypes.c_size_t(n))
        return p.value

    def fill(self, p, word, n):
        self.ok("cuMemsetD32Async", ctypes.c_uint64(p), ctypes.c_uint(word), ctypes.c_size_t(n // 4), None)

    def copy(self, to, at, n):
        self.ok("cuMemcpyDtoDAsync_v2", ctypes.c_uint64(to), ctypes.c_uint64(at), ctypes.c_size_t(n), None)

    def init(self, _):
        context = ctypes.c_void_p()
        self.ok("cuInit", 0)
        self.ok("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.ok("cuCtxSetCurrent", context)
        self.host = ctypes.create_string_buffer(self.block)
        self.make()
        self.step()
        self.ok("cuCtxSynchronize")
        return {"mib": self.mib}

    def work(self, order):
        before = self.steps
        while time.time() < order["until"]:
            self.step()
            self.ok("cuCtxSynchronize")
        return {"steps": self.steps - before}

    def fetch(self, p):
        self.ok("cuMemcpyDtoH_v2", self.host, ctypes.c_uint64(p), ctypes.c_size_t(self.block))
        return ctypes.addressof(self.host)

    def is_filled(self, p, word):
        """Whether all words of a block are this one."""
        at = self.fetch(p)
        return (int.from_bytes(self.host[:4], "little") == word and
                self.memcmp(at, at + 4, self.block - 4) == 0)

    def check(self, _):
        return {"wrong": self.wrong()}


class Pool(Program):
    def make(self):
        while True:
            try:
                self.at = self.alloc(self.mib * MIB)
                break
            except RuntimeError:
                self.mib = self.mib * 9 // 10    # as XLA's allocator does
                if self.mib < 64:
                    raise
        self.half = min(768 * MIB, self.mib * MIB // 8 // self.block * self.block)

    def step(self):
        self.steps += 1
        self.fill(self.at, self.steps, self.half)
        for _ in range(9):
            self.copy(self.at + self.half, self.at, self.half)

    def wrong(self):
        wrong = sum(not self.is_filled(self.at + i, self.steps) for i in range(0, 2 * self.half, self.block))
        rest = list(range(2 * self.half, self.mib * MIB - self.block, self.block))
        return wrong + sum(not self.is_filled(self.at + i, 0) for i in rest[::len(rest) // 64 + 1])


class Model(Program):
    def make(self):
        self.base = os.urandom(self.block)
        self.scratch = self.alloc(self.block)
        self.weights = [self.alloc(self.block) for _ in range(self.mib * MIB // self.block)]
        self.ok("cuMemcpyHtoD_v2", ctypes.c_uint64(self.weights[0]), self.base, ctypes.c_size_t(self.block))
        for p in self.weights[1:]:
            self.copy(p, self.weights[0], self.block)
        for i, p in enumerate(self.weights):
            for at in range(0, self.block, PIECE):
                self.ok("cuMemcpyHtoD_v2", ctypes.c_uint64(p + at), self.stamp(i, at), ctypes.c_size_t(16))

    def stamp(self, i, at):
        return i.to_bytes(8, "little") + at.to_bytes(8, "little")

    def step(self):
        self.steps += 1
        for p in self.weights:
            self.copy(self.scratch, p, self.block)
        self.fill(self.scratch, self.steps, self.block)

    def wrong(self):
        base = ctypes.create_string_buffer(self.base, self.block)
        wrong = not self.is_filled(self.scratch, self.steps)
        for i, p in enumerate(self.weights):
            at = self.fetch(p)
            for piece in range(0, self.block, PIECE):
                n = min(PIECE, self.block - piece) - 16
                wrong += (self.host[piece:piece + 16] != self.stamp(i, piece) or
                          self.memcmp(at + piece + 16, ctypes.addressof(base) + piece + 16, n) != 0)
        return wrong


class Training(Program):
    def make(self):
        self.weights = [self.alloc(self.block) for _ in range(self.mib * MIB // self.block)]

    def step(self):
        self.steps += 1
        for i, p in enumerate(self.weights):
            self.fill(p, self.steps << 12 | i, self.block)

    def wrong(self):
        return sum(not self.is_filled(p, self.steps << 12 | i) for i, p in enumerate(self.weights))


class Kernel(Program):
    PARTS, SUMS, MIX = 8, 4, 264 * 4

    def make(self):
        with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "libnvshare.so"), "rb") as f:
            shim = f.read()
        at = shim.rindex(b".version", 0, shim.index(b".entry nvshare_look"))
        module, self.kernel, host = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self.ok("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(shim[at:shim.index(b"\0", at)]))
        self.ok("cuModuleGetFunction", ctypes.byref(self.kernel), module, b"nvshare_look")
        self.n = self.mib * MIB // PIECE
        self.at = self.alloc(self.n * PIECE)
        self.keys = os.urandom(self.MIX + 2048 * 32)
        self.keys_at = self.alloc(len(self.keys))
        self.ok("cuMemcpyHtoD_v2", ctypes.c_uint64(self.keys_at), self.keys, ctypes.c_size_t(len(self.keys)))
        self.ok("cuMemHostAlloc", ctypes.byref(host), ctypes.c_size_t(self.n * (8 + self.PARTS * 48)), ctypes.c_uint(2))
        self.pieces = (ctypes.c_uint64 * self.n).from_address(host.value)
        self.parts = (ctypes.c_uint64 * (6 * self.PARTS * self.n)).from_address(host.value + 8 * self.n)
        for i in range(self.n):
            self.pieces[i] = self.at + i * PIECE
        self.fill(self.at, 0x5ab0c0de, self.n * PIECE)
        self.random = os.urandom(PIECE)
        self.ok("cuMemcpyHtoD_v2", ctypes.c_uint64(self.at), self.random, ctypes.c_size_t(PIECE))
        self.fill(self.at + PIECE, 0, PIECE)

    def run(self, n):
        values = [ctypes.c_uint64(v) for v in (ctypes.addressof(self.pieces), ctypes.addressof(self.parts), self.keys_at)]
        params = (ctypes.c_void_p * 3)(*[ctypes.addressof(v) for v in values])
        self.ok("cuLaunchKernel", self.kernel, self.PARTS * n, 1, 1, 256, 1, 1, 0, None, params, None)

    def step(self):
        self.run(self.n)

    def seconds(self, n):
        """The shortest time of a launch and its end."""
        times = []
        for _ in range(10):
            began = time.perf_counter()
            self.run(n)
            self.ok("cuCtxSynchronize")
            times.append(time.perf_counter() - began)
        return min(times)

    def attribute(self, what):
        v = ctypes.c_int()
        return v.value if self.lib.cuDeviceGetAttribute(ctypes.byref(v), what, 0) == 0 else 0

    def work(self, _):
        rate = self.n * PIECE / self.seconds(self.n)
        peak = 2e3 * self.attribute(36) * self.attribute(37) / 8    # clock in kHz, width in bits
        return {"steps": 1, "gb_per_second": rate / 1e9, "of_peak": rate / peak if peak else 0,
                "run_us": 1e6 * self.seconds(min(64, self.n))}

    def reference(self, piece):
        words = memoryview(piece).cast("I")
        key = memoryview(self.keys[:self.MIX]).cast("I")
        mix = memoryview(self.keys[self.MIX:]).cast("I")
        low, sums = (1 << 32) - 1, [0] * self.SUMS
        for t in range(2048):
            first = (t >> 8) * 65536 + (t & 255) * 4
            m = [words[first + i // 4 * 1024 + i % 4] for i in range(256)]
            for s in range(self.SUMS):
                v = sum((m[i] + key[i + 2 * s] & low) * (m[i + 1] + key[i + 1 + 2 * s] & low)
                        for i in range(0, 256, 2)) & (1 << 64) - 1
                a, b = mix[8 * t + 2 * s], mix[8 * t + 2 * s + 1]
                sums[s] += ((v & low) + a & low) * ((v >> 32) + b & low)
        return [x & (1 << 64) - 1 for x in sums]

    def sums(self, i):
        p = [self.parts[6 * (self.PARTS * i + k):6 * (self.PARTS * i + k) + 5] for k in range(self.PARTS)]
        return [sum(q[s] for q in p) & (1 << 64) - 1 for s in range(self.SUMS)], any(q[4] for q in p)

    def wrong(self):
        self.run(self.n)
        self.ok("cuCtxSynchronize")
        same = (0x5ab0c0de).to_bytes(4, "little") * (PIECE // 4)
        wrong = self.sums(0) != (self.reference(self.random), True)
        wrong += self.sums(self.n - 1) != (self.reference(same), True)
        return wrong + self.sums(1)[1] + sum(self.sums(i) != self.sums(2) for i in range(3, self.n, self.n // 64 + 1))


def main():
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    does = {"pool": Pool, "model": Model, "training": Training, "kernel": Kernel}[sys.argv[1]](int(sys.argv[2]))
    for line in sys.stdin:
        order, reply = json.loads(line), {}
        if order["op"] == "quit":
            return
        try:
            began = time.monotonic()
            reply = getattr(does, order["op"])(order)
            reply["seconds"] = time.monotonic() - began
        except BaseException as e:
            traceback.print_exc()
            reply = {"error": "%s: %s" % (type(e).__name__, e), "usable": False}
        replies.write(json.dumps(dict(reply, id=order["id"])) + "\n")
        replies.flush()


main()
