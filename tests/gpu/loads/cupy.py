# SPDX-License-Identifier: Apache-2.0
"""CuPy's load: a RawKernel, an elementwise kernel and a matrix product."""
from loads import common

SIZE, MATRIX = 1 << 27, 4096   # numbers of 4 bytes; rows and columns
CHECK_STEPS = 5

SOURCE = r"""
extern "C" __global__ void axpy(const float *x, float *y, float a, long long n)
{
	long long step = (long long)gridDim.x * blockDim.x;
	for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += step)
		y[i] = a * x[i] + 0.5f * y[i];
}
"""


class Mixed:
    def __init__(self, seed):
        random = numpy.random.default_rng(seed)
        self.axpy = cupy.RawKernel(SOURCE, "axpy")
        self.wave = cupy.ElementwiseKernel("float32 x, float32 y", "float32 z", "z = x * 0.5f + sinf(y)", "wave")
        self.x = cupy.asarray(random.standard_normal(1 << 20, numpy.float32))
        self.x = cupy.tile(self.x, SIZE >> 20)
        self.y = cupy.ones_like(self.x)
        self.a, self.b = (cupy.asarray(random.standard_normal((MATRIX, MATRIX), numpy.float32)) for _ in range(2))

    def step(self):
        self.axpy((1024,), (256,), (self.x, self.y, numpy.float32(0.25), numpy.int64(self.x.size)))
        self.z = self.wave(self.x, self.y)
        self.c = self.a @ self.b


class Backend(common.Backend):
    def load(self):
        global cupy, numpy
        import cupy
        import numpy
        return {"versions": {"cupy": cupy.__version__}}

    def init(self):
        cupy.zeros(1)
        return {"gpus": cupy.cuda.runtime.getDeviceCount()}

    def enter(self, gpu):
        cupy.cuda.Device(gpu).use()

    def free(self):
        cupy.get_default_memory_pool().free_all_blocks()

    def usable(self):
        try:
            cupy.cuda.runtime.deviceSynchronize()
        except Exception:
            return False
        return True

    def build(self, name, gpu):
        self.enter(gpu)
        return Mixed(1)

    def clock(self, gpu):
        self.enter(gpu)
        return common.EventClock(
            cupy.cuda.Event, lambda e: e.record(), lambda e: e.synchronize(),
            cupy.cuda.get_elapsed_time)

    def check(self, name, gpu, seed):
        self.enter(gpu)
        load = Mixed(seed)
        for _ in range(CHECK_STEPS):
            load.step()
        results = []
        for array in (load.y, load.z, load.c):
            host = array.get().reshape(-1)
            results.append((host.tobytes(), [float(x) for x in host[::max(1, host.size // 512)][:512]]))
        return results
