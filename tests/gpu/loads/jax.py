# SPDX-License-Identifier: Apache-2.0
"""JAX's loads. JAX shows no GPU events, so marks are seen by the host."""
import os
import queue
import threading
import time

from loads import common

SIZES = {"mlp": (8192, 2048, 6), "small": (64, 256, 4)}   # batch, width, layers
CHECK_STEPS = 5
PATIENCE_S = 60


class Mark:
    def __init__(self, array):
        self.array, self.at, self.error, self.seen = array, None, None, threading.Event()


class Clock:
    """A thread of its own sees marks pass: the one that works may wait."""

    def __init__(self, load):
        self.load, self.queue = load, queue.SimpleQueue()
        threading.Thread(target=self.watch, daemon=True).start()

    def watch(self):
        while True:
            mark = self.queue.get()
            try:
                mark.array.block_until_ready()
                mark.at = time.monotonic()
            except Exception as e:
                mark.error = e
            mark.array = None
            mark.seen.set()

    def calibrate(self):
        pass

    def mark(self):
        mark = Mark(self.load.loss)
        self.queue.put(mark)
        return mark

    def finish(self, mark):
        if not mark.seen.wait(PATIENCE_S):
            raise RuntimeError("a step did not complete in %d s" % PATIENCE_S)
        if mark.error:
            raise mark.error
        return mark.at


class Training:
    """A training step of a bf16 multi-layer perceptron, jitted."""

    def __init__(self, jax, size, gpu, seed):
        jnp = jax.numpy
        batch, width, layers = size

        def loss(weights, x, y):
            for w in weights[:-1]:
                x = jax.nn.gelu(x @ w)
            return jnp.mean(jnp.square((x @ weights[-1] - y).astype(jnp.float32)))

        def train(weights, x, y):
            value, grads = jax.value_and_grad(loss)(weights, x, y)
            return [w - (1e-3 * g).astype(w.dtype) for w, g in zip(weights, grads)], value

        self.train = jax.jit(train)
        keys = jax.random.split(jax.random.PRNGKey(seed), layers + 2)
        put = lambda a: jax.device_put(a, jax.devices()[gpu])
        self.weights = [put(jax.random.normal(k, (width, width), jnp.bfloat16) * width ** -0.5) for k in keys[2:]]
        self.x, self.y = (put(jax.random.normal(k, (batch, width), jnp.bfloat16)) for k in keys[:2])
        self.loss = None

    def step(self):
        self.weights, self.loss = self.train(self.weights, self.x, self.y)


class Backend(common.Backend):
    def load(self):
        global jax, numpy
        import jax
        import numpy
        try:
            # All tenants run what the first one compiled and tuned.
            jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
            jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        except Exception as e:
            print("no compilation cache:", e)
        return {"versions": {"jax": jax.__version__}}

    def init(self):
        devices = jax.devices()
        if devices[0].platform not in ("gpu", "cuda"):
            raise common.Skip("JAX sees no GPU, only %s" % devices[0])
        jax.jit(lambda x: x + 1)(1.0).block_until_ready()   # reads XLA_FLAGS, if nothing has yet
        return {"gpu": devices[0].device_kind, "gpus": len(devices)}

    def build(self, name, gpu):
        self.last = Training(jax, SIZES[name], gpu, 1)
        return self.last

    def clock(self, gpu):
        return Clock(self.last)

    def check(self, name, gpu, seed):
        load = Training(jax, SIZES[name], gpu, seed)
        for _ in range(CHECK_STEPS):
            load.step()
        results = []
        for array in [load.loss] + load.weights:
            host = numpy.asarray(array.astype(jax.numpy.float32)).reshape(-1)
            results.append((host.tobytes(), [float(x) for x in host[::max(1, host.size // 512)][:512]]))
        return results
