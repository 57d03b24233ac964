# SPDX-License-Identifier: Apache-2.0
"""A reinforcement-learning job in one process: a language model generates rollouts, Python
scores them on the CPU, and the model is trained on the best of them, its weights in place.
Nobody changes anything for sharing: the cache of keys and values and the optimizer's state
stay where they are in all phases."""
import ctypes
import gc
import hashlib
import os
import random
import re
import time

from loads import common

PROMPT = 32         # tokens
MICRO = 8           # rollouts of a backward pass
BEST = 128          # rollouts of an iteration that are trained on
PREFILL = 16384     # tokens at a time
SAMPLED = 256       # rows of logits at a time
CONTEXT, SPARE = 600 << 20, 1 << 30   # of CUDA, and what generation takes beside the cache, bytes

torch = None   # imported on order


def policy_class():
    from torch.nn import functional as F
    from loads import decoder

    class Policy(decoder.Decoder):
        def __init__(self, shape, device, seed, part, batch, tokens):
            """batch: rollouts of an iteration; 0: as many as make the process use that part of
            the GPU's memory."""
            self.seed, self.tokens_each = seed, tokens
            self.make_weights(shape, [PROMPT + tokens], device, seed)
            weights = [self.embed, *(w for layer in self.layers for w in layer)]
            for w in weights:
                w.requires_grad_()
            self.weights = weights
            self.optimizer = torch.optim.AdamW(weights, lr=3e-4, **({} if device == "cpu" else {"fused": True}))
            self.train(torch.full((MICRO, PROMPT + tokens), 3, device=device), [1.0] * MICRO)   # the optimizer's state, and the most that training takes
            if not batch:
                _, total = torch.cuda.mem_get_info()
                batch = int(part * total - CONTEXT - SPARE - torch.cuda.max_memory_reserved()) // self.slot_bytes
            if batch < MICRO:
                raise RuntimeError("there is no memory for the cache")
            self.make_cache(batch)

        def forward(self, ids, slot=None):
            """What the last layer has for each token; keys and values go to the slots from slot on."""
            (b, n), groups = ids.shape, self.heads // self.kv
            x = F.embedding(ids.flatten(), self.embed)
            cos, sin = (t[:n].repeat(b, 1, 1) for t in (self.cos, self.sin))
            for i, layer in enumerate(self.layers):
                q, k, v = (t.view(b, n, -1, self.head).transpose(1, 2) for t in self.project(layer[0], x, cos, sin))
                if slot is not None:
                    self.keys[i][slot:slot + b, :, :n], self.values[i][slot:slot + b, :, :n] = k, v
                k, v = (t[:, :, None].expand(b, self.kv, groups, n, self.head).reshape(b, self.heads, n, self.head) for t in (k, v))
                attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                x = self.rest(layer, x, attention.transpose(1, 2).reshape(b * n, -1))
            return x.view(b, n, -1)

        def best(self, x):
            """Tokens by chance, each as likely as the model says."""
            tokens = []
            for rows in x.split(SAMPLED):
                logits = F.linear(self.norm(rows), self.embed).float()
                chance = torch.empty_like(logits).exponential_(generator=self.dice)
                tokens.append(logits.sub_(chance.log_()).argmax(-1))
            return torch.cat(tokens)

        @torch.no_grad()
        def generate(self, n):
            self.dice = torch.Generator(self.device).manual_seed(1000 * self.seed + n)
            prompts = torch.randint(3, self.vocabulary, (self.slots, PROMPT), device=self.device, generator=self.dice)
            each = max(1, PREFILL // PROMPT)
            for at in range(0, self.slots, each):
                self.tokens[at:at + each] = self.best(self.forward(prompts[at:at + each], at)[:, -1])
            self.places.fill_(PROMPT)
            rollouts = [self.tokens.clone()]
            for i in range(1, self.tokens_each):
                self.step(self.slots, min(PROMPT + i + 63 & ~63, PROMPT + self.tokens_each))
                rollouts.append(self.tokens.clone())
            rollouts = torch.stack(rollouts, 1)
            self.ids = torch.cat((prompts, rollouts), 1)
            return rollouts.tolist()

        def learn(self, scores):
            best = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:BEST]
            mean = sum(scores) / len(scores)
            self.train(self.ids[best], [scores[i] - mean for i in best])

        def train(self, ids, advantages):
            torch.use_deterministic_algorithms(True, warn_only=True)   # generation is so without: no two of its writes meet
            self.optimizer.zero_grad()
            advantages = torch.tensor(advantages, device=self.device)
            for some, of in zip(ids.split(MICRO), advantages.split(MICRO)):
                x = self.forward(some[:, :-1])[:, PROMPT - 1:]
                logits = F.linear(self.norm(x), self.embed).float().flatten(0, 1)
                loss = F.cross_entropy(logits, some[:, PROMPT:].flatten(), reduction="none").view(len(some), -1).mean(1)
                ((loss * of).sum() / len(ids)).backward()
            self.optimizer.step()
            torch.use_deterministic_algorithms(False)

        def checksum(self):
            """Of all bits of the weights, each by its place."""
            digest = hashlib.blake2b(digest_size=8)
            by = torch.arange(1, 2 << 24, 2, device=self.device)
            kind = torch.int16 if self.embed.element_size() == 2 else torch.int32
            for w in self.weights:
                for part in w.detach().flatten().view(kind).split(1 << 24):
                    digest.update(b"%d " % (part.long() * by[:len(part)]).sum().item())
            return digest.hexdigest()

    return Policy


class Stand:
    """Stands for the model on the simulated GPU: kernels that spin, a cache that is written as a
    whole and decides what is generated, and weights that training changes."""
    WEIGHTS = 1 << 16

    def __init__(self, seed, part, batch, tokens):
        from loads import driver
        cu = driver.Driver()
        cu.cuInit(0)
        self.cu, self.spin = cu, driver.Spin(cu, driver.Gpu(cu, 0))
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        cu.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        self.slots, self.tokens_each = batch or int(part * total.value) >> 20, tokens
        self.cache, self.weights, self.host = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.create_string_buffer(self.WEIGHTS)
        cu.cuMemAlloc_v2(ctypes.byref(self.cache), ctypes.c_size_t(self.slots << 20))
        cu.cuMemAlloc_v2(ctypes.byref(self.weights), ctypes.c_size_t(self.WEIGHTS))
        cu.cuMemsetD32_v2(self.weights, ctypes.c_uint(seed + 1), ctypes.c_size_t(self.WEIGHTS // 4))

    def work(self):
        for _ in range(20):
            self.spin.step()
        self.cu.cuStreamSynchronize(self.spin.gpu.stream)

    def read(self, at, size):
        self.cu.cuMemcpyDtoH_v2(self.host, ctypes.c_uint64(at), ctypes.c_size_t(size))
        return self.host.raw[:size]

    def generate(self, n):
        seed = int.from_bytes(hashlib.blake2b(self.read(self.weights.value, self.WEIGHTS), digest_size=4).digest(), "little")
        self.cu.cuMemsetD32_v2(self.cache, ctypes.c_uint(seed), ctypes.c_size_t(self.slots << 18))
        self.work()
        dice = random.Random(b"".join(self.read(self.cache.value + (i << 20), 4) for i in range(self.slots)))
        return [[dice.randrange(1000) for _ in range(self.tokens_each)] for _ in range(self.slots)]

    def learn(self, scores):
        new = self.read(self.weights.value, self.WEIGHTS - 64) + hashlib.blake2b(repr(scores).encode()).digest()
        self.work()
        self.cu.cuMemcpyHtoD_v2(self.weights, new[64:] + new[:64], ctypes.c_size_t(self.WEIGHTS))

    def checksum(self):
        return hashlib.blake2b(self.read(self.weights.value, self.WEIGHTS), digest_size=8).hexdigest()


def score(tokens):
    """How little a text repeats itself, and how many of its words look like words."""
    text = " ".join("%x" % t for t in tokens)
    words = text.split()
    pairs = set(zip(words, words[1:]))
    return len(set(words)) / len(words) + len(pairs) / len(words) + len(re.findall(r"\b[a-f]", text)) / len(words)


class Backend(common.Backend):
    def __init__(self, shape, device="cuda"):
        self.shape, self.device, self.policy = shape, device, None

    def load(self):
        if self.shape == "spin":
            return {"versions": {}}
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")   # else its results may differ
        global torch
        import torch
        self.Policy = policy_class()
        return {"versions": {"torch": torch.__version__, "cuda": torch.version.cuda}}

    def init(self):
        if self.shape != "spin" and self.device == "cuda":
            torch.utils.deterministic.fill_uninitialized_memory = False
            for attention in ("cudnn", "flash", "mem_efficient"):   # their gradients may differ from run to run
                getattr(torch.backends.cuda, "enable_%s_sdp" % attention)(False)
            torch.zeros(1, device="cuda")
        return {}

    def make(self, seed, part, batch, tokens):
        """Makes a job; batch 0: as many rollouts as part of the GPU's memory holds."""
        began, self.policy = time.monotonic(), None
        gc.collect()
        if self.shape == "spin":
            self.policy = Stand(seed, part, batch, tokens)
        else:
            if self.device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            self.policy = self.Policy(self.shape, self.device, seed, part, batch, tokens)
        self.n = 0
        return {"batch": self.policy.slots, "seconds": time.monotonic() - began}

    def iterate(self, times, start, latest, reward_s):
        """Works so many times from start on, but begins nothing after latest, seconds of
        CLOCK_MONOTONIC. A reward takes reward_s at least: for what scoring in Python leaves of
        that the job waits, as for a judge elsewhere."""
        time.sleep(max(0.0, start - time.monotonic()))
        steps = [self.step(reward_s)]
        while len(steps) < times and time.monotonic() < latest:
            steps.append(self.step(reward_s))
        return {"steps": steps, "ended": time.monotonic()}

    def step(self, reward_s):
        at = [time.monotonic()]
        rollouts = self.policy.generate(self.n)
        at.append(time.monotonic())
        scores = [score(tokens) for tokens in rollouts]
        scored = time.monotonic() - at[-1]
        time.sleep(max(0.0, reward_s - scored))
        at.append(time.monotonic())
        self.policy.learn(scores)
        checksum = self.policy.checksum()   # waits for the GPU
        at.append(time.monotonic())
        self.n += 1
        return {"generate_s": at[1] - at[0], "reward_s": at[2] - at[1], "scored_s": scored, "train_s": at[3] - at[2],
                "score": sum(scores) / len(scores), "weights": checksum}
