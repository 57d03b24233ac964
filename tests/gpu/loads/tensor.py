# SPDX-License-Identifier: Apache-2.0
"""One rank of a language model that is split over several GPUs, one each: its weights and its cache of keys and
values by heads, with an all-reduce after attention and after the multilayer perceptron, as tensor-parallel servers
do it. usage: worker.py tensor nccl|graphs|driver FILE RANK WORLD MIB SEED

  nccl    PyTorch, whose all-reduces are NCCL's
  graphs  the same, and a CUDA graph of each step
  driver  no model, but as much memory, and ranks that wait for each other in their streams: for the simulated GPU

A rank has MIB: half of it weights, the rest the cache. Requests have a number, from which all of them follows; the
next token is the most probable one, so that the same requests have the same tokens."""
import ctypes
import datetime
import hashlib
import time

from loads import common, driver

BATCH, PROMPT, TOKENS = 8, 16, 48   # requests at a time, tokens of a prompt and of an answer
LENGTH = 2048                       # of a slot of the cache
HIDDEN, INNER, HEADS, KV, HEAD, VOCABULARY = 4096, 12288, 32, 8, 128, 32000
MIB = 1 << 20


class Model:
    def __init__(self, torch, dist, ranks, mib, seed, graphs):
        self.torch, self.dist, self.world, self.seed = torch, dist, ranks.world, seed
        self.device, self.kind = torch.device("cuda", ranks.rank), torch.bfloat16
        torch.manual_seed(1000 * seed + ranks.rank)
        self.heads, self.kv, inner = HEADS // self.world, KV // self.world, INNER // self.world
        shapes = ((self.heads + 2 * self.kv) * HEAD, HIDDEN), (HIDDEN, self.heads * HEAD), (2 * inner, HIDDEN), (HIDDEN, inner)
        layer = 2 * sum(a * b for a, b in shapes)
        self.layers = [[self.weight(*shape) for shape in shapes] for _ in range(max(2, mib * MIB // 2 // layer))]
        self.embed = self.weight(VOCABULARY, HIDDEN)
        dist.broadcast(self.embed, 0)   # the same on all, so that all have the same next token
        self.ones = torch.ones(HIDDEN, device=self.device, dtype=self.kind)
        angles = torch.outer(torch.arange(LENGTH), 500000.0 ** (-torch.arange(0, HEAD, 2) / HEAD))
        self.cos, self.sin = (f(angles)[:, None].to(self.device, self.kind) for f in (torch.cos, torch.sin))
        self.range = torch.arange(PROMPT + TOKENS, device=self.device)
        left = mib * MIB - torch.cuda.memory_reserved(self.device)
        self.slots = left // (2 * 2 * len(self.layers) * self.kv * LENGTH * HEAD)
        if self.slots < BATCH:
            raise RuntimeError("there is no memory for the cache: %d slots" % self.slots)
        self.keys, self.values = ([self.weight(self.slots, self.kv, LENGTH, HEAD) for _ in self.layers] for _ in range(2))
        self.tokens, self.rows = (torch.zeros(BATCH, device=self.device, dtype=torch.int64) for _ in range(2))
        self.place = torch.zeros(1, device=self.device, dtype=torch.int64)
        self.run = self.captured() if graphs else self.step

    def weight(self, *size):
        """What keeps numbers of their size from layer to layer, so that a token depends on all layers."""
        return self.torch.empty(size, device=self.device, dtype=self.kind).normal_(0, size[-1] ** -0.5)

    def captured(self):
        torch = self.torch
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.inference_mode():
            self.step()   # what is loaded at the first use can't be loaded in a capture
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"), torch.inference_mode():
            self.step()
        return graph.replay

    def norm(self, x):
        return self.torch.nn.functional.rms_norm(x, (HIDDEN,), self.ones, 1e-5)

    def step(self):
        """The next token of each request; the one after its place."""
        torch, linear = self.torch, self.torch.nn.functional.linear
        x, cos, sin = self.embed[self.tokens], self.cos[self.place], self.sin[self.place]
        mask = torch.zeros(len(self.range), device=self.device, dtype=self.kind).masked_fill_(self.range > self.place, -torch.inf)
        for (qkv, out, up, down), keys, values in zip(self.layers, self.keys, self.values):
            both, v = linear(self.norm(x), qkv).view(BATCH, -1, HEAD).split((self.heads + self.kv, self.kv), 1)
            a, b = both.chunk(2, -1)
            q, k = torch.cat((a * cos - b * sin, b * cos + a * sin), -1).split((self.heads, self.kv), 1)
            keys[self.rows, :, self.place], values[self.rows, :, self.place] = k, v
            q = (q * HEAD ** -0.5).reshape(BATCH, self.kv, -1, HEAD)
            seen = slice(0, len(self.range))
            weights = torch.softmax(torch.matmul(q, keys[self.rows, :, seen].transpose(2, 3)) + mask, -1)
            x = x + self.summed(linear(torch.matmul(weights, values[self.rows, :, seen]).reshape(BATCH, -1), out))
            gate, more = linear(self.norm(x), up).chunk(2, -1)
            x = x + self.summed(linear(torch.nn.functional.silu(gate) * more, down))
        self.tokens.copy_(linear(self.norm(x), self.embed).argmax(-1))
        self.place.add_(1)

    def summed(self, x):
        self.dist.all_reduce(x)
        return x

    def answer(self, number):
        """The tokens of a batch of requests."""
        torch = self.torch
        dice = torch.Generator().manual_seed(1000003 * self.seed + number)
        prompt = torch.randint(VOCABULARY, (PROMPT, BATCH), generator=dice).to(self.device)
        self.rows.copy_((number * BATCH + torch.arange(BATCH)) % self.slots)
        self.place.zero_()
        said = []
        with torch.inference_mode():
            for i in range(PROMPT + TOKENS):
                if i < PROMPT:
                    self.tokens.copy_(prompt[i])
                self.run()
                said.append(self.tokens.tolist() if i >= PROMPT - 1 else None)
        return said[PROMPT - 1:-1]

    def digests(self):
        """Of all weights: what they were when they were made, they are at the end."""
        return [int(w.view(self.torch.int16).sum(dtype=self.torch.int64).item()) for layer in self.layers for w in layer]


class StandIn:
    """Memory of which the GPU says what is wrong in it, and work that ranks do together."""
    PIECE = 8 * MIB
    PTX = b"".join(b".visible .entry nvshare_%s(.param .u64 a, .param .u64 b%s) { ret; }\n" % entry for entry in (
        (b"spin", b""), (b"fill", b", .param .u64 c"), (b"check", b", .param .u64 c, .param .u64 d")))

    def __init__(self, ranks, mib, seed):
        self.ranks, self.seed, self.cu = ranks, 1000 * seed + 100 * ranks.rank, driver.Driver()
        self.cu.cuInit(0)
        context, self.stream, module = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self.cu.cuDevicePrimaryCtxRetain(ctypes.byref(context), ranks.rank)
        self.cu.cuCtxSetCurrent(context)
        self.cu.cuStreamCreate(ctypes.byref(self.stream), 1)
        self.cu.cuModuleLoadData(ctypes.byref(module), b".version 6.0\n.target sm_50\n.address_size 64\n" + self.PTX)
        self.kernels = {}
        for name in ("spin", "fill", "check"):
            self.kernels[name] = ctypes.c_void_p()
            self.cu.cuModuleGetFunction(ctypes.byref(self.kernels[name]), module, b"nvshare_" + name.encode())
        self.meet = driver.HOSTFN(lambda _: ranks.meet())
        self.result = self.alloc(8)
        self.pieces = [self.alloc(self.PIECE) for _ in range(mib * MIB // self.PIECE)]
        for i, p in enumerate(self.pieces):
            self.launch("fill", p, self.PIECE, self.seed + i)
        self.finish()

    def alloc(self, n):
        p = ctypes.c_uint64()
        self.cu.cuMemAlloc_v2(ctypes.byref(p), ctypes.c_size_t(n))
        return p.value

    def launch(self, name, *numbers):
        words = (ctypes.c_uint64 * len(numbers))(*numbers)
        params = (ctypes.c_void_p * len(numbers))(*(ctypes.addressof(words) + 8 * i for i in range(len(numbers))))
        self.cu.cuLaunchKernel(self.kernels[name], 1, 1, 1, 32, 1, 1, 0, self.stream, params, None)

    def finish(self):
        self.cu.cuStreamSynchronize(self.stream)

    def wrong(self, i):
        bad = ctypes.c_uint64(1)
        self.launch("check", self.pieces[i], self.PIECE, self.seed + i, self.result)
        self.cu.cuMemcpyDtoHAsync_v2(ctypes.byref(bad), ctypes.c_uint64(self.result), ctypes.c_size_t(8), self.stream)
        self.finish()
        return bad.value

    def answer(self, number):
        said = []
        for i in range(TOKENS):
            self.launch("spin", 500000, 0)
            self.cu.cuLaunchHostFunc(self.stream, self.meet, None)
            self.finish()
            said.append([number * TOKENS + i + self.wrong((number * TOKENS + i) % len(self.pieces))] * BATCH)
        return said

    def digests(self):
        return [self.wrong(i) for i in range(len(self.pieces))]


class Backend(common.Backend):
    def __init__(self, kind, path, rank, world, mib, seed):
        self.kind, self.path, self.mib, self.seed = kind, path, int(mib), int(seed)
        self.ranks = common.Ranks(path, rank, world)

    def load(self):
        if self.kind == "driver":
            return {}
        import torch
        import torch.distributed as dist
        self.torch, self.dist = torch, dist
        return {"version": torch.__version__}

    def init(self):
        """Makes the model, all ranks together."""
        if self.kind == "driver":
            self.model = StandIn(self.ranks, self.mib, self.seed)
        else:
            self.torch.cuda.set_device(self.ranks.rank)
            self.dist.init_process_group("nccl", init_method="file://" + self.path + ".group", rank=self.ranks.rank,
                                         world_size=self.ranks.world, timeout=datetime.timedelta(seconds=300))
            self.model = Model(self.torch, self.dist, self.ranks, self.mib, self.seed, self.kind == "graphs")
        self.made = self.model.digests()
        began = time.monotonic()
        self.model.answer(0)
        return {"answer_s": time.monotonic() - began, "layers": len(getattr(self.model, "layers", []))}

    def answers(self, first, n):
        """Answers requests: a hash of the tokens of each, and how long all took."""
        began, hashes = time.monotonic(), []
        for number in range(first, first + n):
            hashes.append(hashlib.blake2b(repr(self.model.answer(number)).encode(), digest_size=8).hexdigest())
        return {"seconds": time.monotonic() - began, "tokens": n * BATCH * TOKENS, "hashes": hashes}

    def check(self):
        """How many weights are not as they were made."""
        return {"wrong": sum(a != b for a, b in zip(self.made, self.model.digests()))}
