# SPDX-License-Identifier: Apache-2.0
"""PyTorch's loads. Which allocator it uses is in its environment."""
import gc
import os

from loads import common

torch = None   # imported on order

# Sizes: a step takes one to five milliseconds on an H200, a process less than 12 GB.
GEMM = 8192
ADD = 1 << 28                 # numbers of 4 bytes
CONV = (64, 224, 3)           # images, their side, blocks
ATTENTION = (4, 16, 4096, 64)
MLP = (4096, 2048, 8)         # batch, width, layers
SMALL = (64, 256, 4)
COMPILE = (32768, 4096)


def device(gpu):
    return torch.device("cuda", gpu)


def seeded(gpu, seed):
    torch.manual_seed(seed)
    return torch.Generator(device=device(gpu)).manual_seed(seed)


class Gemm:
    """A bf16 matrix product; cuBLASLt launches it with cuLaunchKernelEx."""

    def __init__(self, gpu, seed):
        g = seeded(gpu, seed)
        self.a, self.b = (self.draw(gpu, g) for _ in range(2))

    def draw(self, gpu, g):
        return torch.randn(GEMM, GEMM, device=device(gpu), dtype=torch.bfloat16, generator=g)

    def step(self):
        self.c = torch.matmul(self.a, self.b)

    def results(self):
        return [self.c]


def sparse(gpu, g, side):
    """Mostly zeros. A product of random bits draws so much power that the GPU
    clocks lower the longer it lasts (8192 squared on an H100: 1.42 ms at a
    quarter of the time, 1.61 ms all the time), so that a tenant with a quarter
    of the time does more than a quarter of the work. With few bits set the
    work done is a measure of the time."""
    shape, d = (side, side), device(gpu)
    signs = torch.randint(0, 2, shape, device=d, generator=g) * 2 - 1
    return (signs * (torch.rand(shape, device=d, generator=g) < 1 / 64)).to(torch.bfloat16)


class CalmGemm(Gemm):
    def draw(self, gpu, g):
        return sparse(gpu, g, GEMM)


class Add:
    """A sum that is bound by memory bandwidth. Its result is allocated."""

    def __init__(self, gpu, seed):
        g = seeded(gpu, seed)
        self.a, self.b = (torch.randn(ADD, device=device(gpu), generator=g) for _ in range(2))
        self.c = None

    def step(self):
        self.c = None
        self.c = torch.add(self.a, self.b, alpha=0.5)

    def results(self):
        return [self.c[:1 << 24], self.c[-(1 << 20):]]


class Allocs:
    """Tensors of all sizes come and go, and now and then all that is cached goes
    back to the driver: as much allocation as work."""

    SIZES = [1 << (10 + k % 17) for k in range(48)]   # bytes, 1 KiB to 64 MiB
    EMPTY = 8                                         # steps until the cache is emptied

    def __init__(self, gpu, seed):
        self.gpu, self.n = gpu, 0
        self.sum = torch.zeros(1, device=device(gpu), dtype=torch.float32)
        seeded(gpu, seed)

    def step(self):
        kept = []
        for size in self.SIZES:
            kept.append(torch.full((size // 4,), 1.0, device=device(self.gpu)))
            if len(kept) > 16:
                self.sum.add_(kept.pop(len(kept) // 2)[0])
        del kept
        self.n += 1
        if self.n % self.EMPTY == 0:
            torch.cuda.empty_cache()

    def results(self):
        return [self.sum]


def bottleneck(width, inner):
    nn = torch.nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(),
                nn.Conv2d(inner, inner, 3, padding=1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(),
                nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width))

        def forward(self, x):
            return torch.relu(x + self.body(x))

    return Block()


class Training:
    """forward, backward and optimiser in a step."""

    def step(self):
        self.optimizer.zero_grad(set_to_none=True)
        self.loss = self.lossfn(self.model(self.x), self.y)
        self.loss.backward()
        self.optimizer.step()

    def results(self):
        return [self.loss.detach()] + [p.detach() for p in self.model.parameters()]


class Conv(Training):
    """A few ResNet blocks, with cuDNN."""

    def __init__(self, gpu, seed):
        images, side, blocks = CONV
        g = seeded(gpu, seed)
        nn = torch.nn

        class Pool(nn.Module):
            def forward(self, x):
                return x.mean((2, 3))

        self.model = nn.Sequential(
            nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
            nn.Conv2d(64, 256, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(256), nn.ReLU(),
            *[bottleneck(256, 64) for _ in range(blocks)], Pool(), nn.Linear(256, 1000),
        ).to(device(gpu), memory_format=torch.channels_last)
        self.x = torch.randn(images, 3, side, side, device=device(gpu), generator=g)
        self.x = self.x.contiguous(memory_format=torch.channels_last)
        self.y = torch.randint(0, 1000, (images,), device=device(gpu), generator=g)
        self.lossfn = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)


class Mlp(Training):
    def __init__(self, gpu, seed, size, dtype, optimizer):
        batch, width, layers = size
        g = seeded(gpu, seed)
        nn = torch.nn
        parts = []
        for _ in range(layers):
            parts += [nn.Linear(width, width), nn.GELU()]
        self.model = nn.Sequential(*parts[:-1]).to(device(gpu), dtype)
        self.x, self.y = (torch.randn(batch, width, device=device(gpu), dtype=dtype, generator=g) for _ in range(2))
        self.lossfn = nn.MSELoss()
        self.optimizer = optimizer(self.model.parameters())


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


class SmallStep(Mlp):
    """A training step that is bound by the CPU: mostly launches."""

    def __init__(self, gpu, seed):
        super().__init__(gpu, seed, SMALL, torch.float32, lambda p: torch.optim.Adam(p, lr=1e-3))


class Graph:
    """Replays a captured training step."""

    size, dtype = None, None

    def __init__(self, gpu, seed):
        self.work = Mlp(gpu, seed, self.size or MLP, self.dtype or torch.bfloat16, sgd)
        side = torch.cuda.Stream(device(gpu))
        side.wait_stream(torch.cuda.current_stream(device(gpu)))
        with torch.cuda.stream(side):
            for _ in range(3):
                self.work.step()
        torch.cuda.current_stream(device(gpu)).wait_stream(side)
        # Nothing from before is freed in the capture.
        self.work.optimizer.zero_grad(set_to_none=True)
        self.work.loss = None
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.work.step()

    def step(self):
        self.graph.replay()

    def results(self):
        return self.work.results()


class CalmGraph:
    """Replays matrix products of mostly zeros, sums and activations."""

    def __init__(self, gpu, seed):
        g, side, layers = seeded(gpu, seed), GEMM // 2, 10
        self.a, self.b = (sparse(gpu, g, side) for _ in range(2))
        self.c, self.d = torch.empty_like(self.a), torch.empty_like(self.a)

        def layer():
            torch.matmul(self.a, self.b, out=self.c)
            torch.add(self.c, self.b, out=self.d)
            self.d.relu_()

        stream = torch.cuda.Stream(device(gpu))
        stream.wait_stream(torch.cuda.current_stream(device(gpu)))
        with torch.cuda.stream(stream):
            layer()
        torch.cuda.current_stream(device(gpu)).wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for _ in range(layers):
                layer()

    def step(self):
        self.graph.replay()

    def results(self):
        return [self.d]


class Mix:
    """A matrix product, a sum and a graph in a step."""

    def __init__(self, gpu, seed):
        self.parts = [kind(gpu, seed) for kind in (CalmGemm, Add, CalmGraph)]

    def step(self):
        for p in self.parts:
            p.step()

    def results(self):
        return [r for p in self.parts for r in p.results()]


class SmallGraph(Graph):
    """A graph of many small kernels."""

    def __init__(self, gpu, seed):
        self.size, self.dtype = SMALL, torch.float32
        super().__init__(gpu, seed)


class Compiled:
    """A function through torch.compile, then a hand-written Triton kernel."""

    compiled = None   # compiled once in a process
    note = ""

    def __init__(self, gpu, seed):
        g = seeded(gpu, seed)
        d, rows, columns = device(gpu), *COMPILE
        self.x, self.residual = (torch.randn(rows, columns, device=d, dtype=torch.bfloat16, generator=g)
                                 for _ in range(2))
        self.weight, self.bias = (torch.randn(columns, device=d, dtype=torch.bfloat16, generator=g) for _ in range(2))
        self.out = torch.empty_like(self.x)
        try:
            from loads import kernels
            self.triton = kernels.run_scale_add
            self.triton(self.x, self.residual, self.out, 0.25)
        except Exception as e:   # no compiler for its launcher, for instance
            raise common.Skip("Triton: %s: %s" % (type(e).__name__, str(e)[:300]))
        if Compiled.compiled is None:
            Compiled.compiled = torch.compile(kernels.fused)
        self.fused = Compiled.compiled
        try:
            self.fused(self.x, self.weight, self.bias, self.residual)
        except Exception as e:
            self.fused = kernels.fused
            self.note = "torch.compile failed, Triton's kernel only: %s: %s" % (type(e).__name__, str(e)[:300])

    def step(self):
        y = self.fused(self.x, self.weight, self.bias, self.residual)
        self.triton(y, self.x, self.out, 0.25)

    def results(self):
        return [self.out]


class Attention:
    """Scaled dot-product attention, forward and backward."""

    def __init__(self, gpu, seed):
        g = seeded(gpu, seed)
        self.q, self.k, self.v = (
            torch.randn(*ATTENTION, device=device(gpu), dtype=torch.bfloat16, generator=g).requires_grad_()
            for _ in range(3))
        self.grad = torch.randn(*ATTENTION, device=device(gpu), dtype=torch.bfloat16, generator=g)

    def step(self):
        self.q.grad = self.k.grad = self.v.grad = None
        self.out = torch.nn.functional.scaled_dot_product_attention(self.q, self.k, self.v, is_causal=True)
        self.out.backward(self.grad)

    def results(self):
        return [self.out.detach(), self.q.grad, self.k.grad, self.v.grad]


LOADS = {"gemm": Gemm, "allocs": Allocs, "calm-gemm": CalmGemm, "calm-graph": CalmGraph, "mix": Mix, "add": Add, "conv": Conv, "attention": Attention, "graph": Graph,
         "compile": Compiled, "small-step": SmallStep, "small-graph": SmallGraph}

CHECK_STEPS = 5


def plain(t):
    """A tensor's bytes, and some of its numbers."""
    flat = t.contiguous().reshape(-1)
    return (flat.view(torch.uint8).cpu().numpy().tobytes(),
            flat[::max(1, flat.numel() // 512)][:512].float().cpu().tolist())


class Backend(common.Backend):
    """With "rates" it is not for results: their settings import half of PyTorch."""

    def __init__(self, purpose="results"):
        self.purpose = purpose

    def load(self):
        global torch
        import torch
        versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
        if self.purpose != "results":
            return {"versions": versions}
        try:
            import triton
            versions["triton"] = triton.__version__
        except ImportError as e:
            versions["triton"] = str(e)
        return {"versions": versions}

    def init(self):
        torch.cuda.init()
        if self.purpose == "results":
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.utils.deterministic.fill_uninitialized_memory = False
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
        torch.zeros(1, device=device(0))
        return {"gpu": torch.cuda.get_device_name(0), "gpus": torch.cuda.device_count(),
                "cudnn": torch.backends.cudnn.version()}

    def allocator(self):
        """Which allocator is at work, as far as it can be told."""
        said = {"backend": torch.cuda.get_allocator_backend(), "conf": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")}
        said["reserved_bytes"] = torch.cuda.memory_reserved()
        if said["backend"] == "native":
            segments = torch.cuda.memory_snapshot()
            said["segments"] = len(segments)
            said["expandable"] = sum(bool(s.get("is_expandable")) for s in segments)
        return said

    def enter(self, gpu):
        torch.cuda.set_device(gpu)

    def free(self):
        gc.collect()
        torch.cuda.empty_cache()

    def usable(self):
        try:
            torch.cuda.synchronize()
        except Exception:
            return False
        return True

    def build(self, name, gpu):
        self.enter(gpu)
        return LOADS[name](gpu, 1)

    def clock(self, gpu):
        self.enter(gpu)
        return common.EventClock(
            lambda: torch.cuda.Event(enable_timing=True), lambda e: e.record(),
            lambda e: e.synchronize(), lambda a, b: a.elapsed_time(b))

    def check(self, name, gpu, seed):
        self.enter(gpu)
        load = LOADS[name](gpu, seed)
        for _ in range(CHECK_STEPS):
            load.step()
        results = [plain(t) for t in load.results()]
        del load
        self.free()
        return results
