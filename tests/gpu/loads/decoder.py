# SPDX-License-Identifier: Apache-2.0
"""A language model behind a server: a Llama-shaped decoder with random weights, a static
cache of keys and values with a slot for each request, and a CUDA graph of a step for each
batch size. On a CPU, to try it, there are no graphs. A filler stands for such a model."""
import torch
from torch.nn import functional as F

# hidden, intermediate, layers, heads, heads of keys, size of a head, vocabulary
SHAPES = {
    "llama-1b": (2048, 8192, 16, 32, 8, 64, 128256),     # 1.2e9 parameters
    "qwen-1.7b": (2048, 6144, 28, 16, 8, 128, 151936),   # 1.7e9
    "qwen-4b": (2560, 9728, 36, 32, 8, 128, 151936),     # 4.0e9
    "tiny": (64, 128, 2, 4, 2, 16, 97),
}
SPARE = 350 << 20   # what prefill, graphs and cuBLAS take beside weights and cache, bytes
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32, 48, 64)   # batches that have a graph


class Decoder:
    def __init__(self, shape, slots, spans, part=0.0, device="cuda", mib=0, eager=False):
        """spans: numbers of tokens of a request up to which attention looks. With a part
        the cache is as large as makes the process use that part of the GPU's memory, with
        mib as makes PyTorch use that much. eager: there are no graphs."""
        self.eager = eager or device == "cpu"
        self.make_weights(shape, spans, device)
        if part:
            free, total = torch.cuda.mem_get_info()
            slots = int((part * total - (total - free)) / self.slot_bytes)
        if mib:
            slots = ((mib << 20) - self.parameters * self.embed.element_size() - SPARE) // self.slot_bytes
        if slots < 1:
            raise RuntimeError("there is no memory for the cache")
        self.make_cache(slots)
        self.runs = {}
        if not self.eager:   # one stream for all graphs: each stream has a workspace of cuBLAS
            self.stream, self.pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        self.prepare()

    def make_weights(self, shape, spans, device, seed=1):
        self.device, self.spans = device, sorted(spans)
        self.hidden, inner, layers, self.heads, self.kv, self.head, self.vocabulary = SHAPES[shape]
        self.kind, length = torch.float32 if device == "cpu" else torch.bfloat16, self.spans[-1]
        torch.manual_seed(seed)
        self.embed = self.weight(self.vocabulary, self.hidden)
        self.layers = [(self.weight((self.heads + 2 * self.kv) * self.head, self.hidden), self.weight(self.hidden, self.heads * self.head),
                        self.weight(2 * inner, self.hidden), self.weight(self.hidden, inner)) for _ in range(layers)]
        self.ones = torch.ones(self.hidden, device=device, dtype=self.kind)
        angles = torch.outer(torch.arange(length), 500000.0 ** (-torch.arange(0, self.head, 2) / self.head))
        self.cos, self.sin = (f(angles)[:, None].to(device, self.kind) for f in (torch.cos, torch.sin))
        self.range = torch.arange(length, device=device)
        self.parameters = self.embed.numel() + sum(w.numel() for layer in self.layers for w in layer)
        self.slot_bytes = 2 * layers * self.kv * length * self.head * self.embed.element_size()

    def make_cache(self, slots):
        self.slots = slots
        self.keys, self.values = ([torch.zeros(slots, self.kv, self.spans[-1], self.head, device=self.device, dtype=self.kind) for _ in self.layers]
                                  for _ in range(2))
        self.tokens, self.places = (torch.zeros(slots, device=self.device, dtype=torch.int64) for _ in range(2))

    def weight(self, *size):
        return torch.empty(size, device=self.device, dtype=self.kind).normal_(0, 0.02)

    @torch.inference_mode()
    def prepare(self):
        """Runs what requests will need once, and captures the steps."""
        for span in self.spans:
            for n in (span - 1, span // 2, span // 4):
                self.prefill(0, [1] * n)
        sizes = [b for b in SIZES if b < self.slots] + [min(self.slots, SIZES[-1])]
        for span, b in ((span, b) for span in self.spans for b in sizes[::-1]):
            self.runs[b, span] = self.captured(b, span)
        self.places.zero_()

    def captured(self, b, span):
        if self.eager:
            return lambda: self.step(b, span)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.step(b, span)   # what is loaded at the first use can't be loaded in a capture
        torch.cuda.current_stream().wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            self.step(b, span)
        return graph.replay

    def norm(self, x):
        return F.rms_norm(x, (self.hidden,), self.ones, 1e-5)

    def project(self, weight, x, cos, sin):
        """Queries, keys and values; the first two turned by their places."""
        both, v = F.linear(self.norm(x), weight).view(len(x), -1, self.head).split((self.heads + self.kv, self.kv), 1)
        a, b = both.chunk(2, -1)
        q, k = torch.cat((a * cos - b * sin, b * cos + a * sin), -1).split((self.heads, self.kv), 1)
        return q, k, v

    def rest(self, layer, x, attention):
        x = x + F.linear(attention, layer[1])
        gate, up = F.linear(self.norm(x), layer[2]).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, layer[3])

    def best(self, x):
        return F.linear(self.norm(x), self.embed).argmax(-1)

    @torch.inference_mode()
    def prefill(self, slot, prompt):
        """Fills a slot, and returns the first token."""
        n = len(prompt)
        x = self.embed[torch.tensor(prompt, device=self.device)]
        for i, layer in enumerate(self.layers):
            q, k, v = (t.transpose(0, 1) for t in self.project(layer[0], x, self.cos[:n], self.sin[:n]))
            self.keys[i][slot, :, :n], self.values[i][slot, :, :n] = k, v
            attention = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
            x = self.rest(layer, x, attention.transpose(0, 1).reshape(n, -1))
        self.tokens[slot:slot + 1] = self.best(x[-1:])
        self.places[slot] = n
        return self.tokens[slot].item()

    def step(self, b, span):
        """The next token of the first b slots. A slot without a request computes what nobody reads."""
        places = self.places[:b]
        x, cos, sin = self.embed[self.tokens[:b]], self.cos[places], self.sin[places]
        mask = torch.zeros(b, span, device=self.device, dtype=self.kind).masked_fill_(self.range[:span] > places[:, None], -torch.inf)[:, None, None]
        at = places.view(b, 1, 1, 1).expand(b, self.kv, 1, self.head)
        for layer, keys, values in zip(self.layers, self.keys, self.values):
            q, k, v = self.project(layer[0], x, cos, sin)
            keys[:b].scatter_(2, at, k[:, :, None])
            values[:b].scatter_(2, at, v[:, :, None])
            # The queries that share a head of keys are the rows of one product.
            q = (q * self.head ** -0.5).reshape(b, self.kv, -1, self.head)
            weights = torch.softmax(torch.matmul(q, keys[:b, :, :span].transpose(2, 3)) + mask, -1)
            x = self.rest(layer, x, torch.matmul(weights, values[:b, :, :span]).reshape(b, -1))
        self.tokens[:b] = self.best(x)
        places.add_(1).clamp_(max=self.spans[-1] - 1)

    @torch.inference_mode()
    def decode(self, b, longest):
        """A step of the first b slots, whose requests have that many tokens at most."""
        self.runs[min(size for size, _ in self.runs if size >= b), min(s for s in self.spans if s >= longest)]()
        return self.tokens[:b].tolist()


class Filler:
    """No model: memory, all of which an answer reads."""
    slots, parameters, block = 1, 0, 64 << 20

    def __init__(self, mib, device="cuda"):
        self.blocks = [torch.arange(i, i + self.block // 4, dtype=torch.int32, device=device)
                       for i in range((mib << 20) // self.block)]
        self.a = torch.ones(1024, 1024, device=device, dtype=torch.bfloat16)
        self.prefill(0, [])   # cuBLAS is loaded, as in any server

    def prefill(self, slot, prompt):
        return int((self.a @ self.a)[0, 0]) + int(sum(b.sum() for b in self.blocks))

    def decode(self, b, longest):
        return [0] * b
