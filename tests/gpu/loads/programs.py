# SPDX-License-Identifier: Apache-2.0
"""Programs that people share GPUs for, with random weights and data made here:
nothing is downloaded. A step is a request or a training step."""
import os
import random
import tempfile
import threading
import time
import weakref

from loads import common
from loads import torch as torch_loads

torch = None   # imported on order

DECODE = dict(hidden_size=2048, intermediate_size=5632, num_hidden_layers=22,
              num_attention_heads=32, num_key_value_heads=4, vocab_size=32000)   # 1.1e9 parameters
DECODE_BATCH, PROMPT, NEW_TOKENS = 8, 256, 16
CELL, PERIOD_S = 6, 10.0   # requests of a notebook's cell; from one cell to the next
IMAGES, SIDE, LOADERS = 64, 224, 4
GPT = dict(n_layer=8, n_embd=768, n_head=12, vocab_size=32000, n_positions=512)
GPT_BATCH, GPT_LENGTH = 16, 512
BERT = dict(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
VOCABULARY = 20000
THINK_S = 0.005       # mean pause of a client between two requests
SENTENCES = (1, 16)   # of a request


class Decode:
    """A language model that answers requests: prefill of the prompts, then token by
    token. The CPU launches each token's kernels, so the GPU is idle for much of the time."""
    unit, per_step = "tokens", DECODE_BATCH * NEW_TOKENS

    def __init__(self, gpu):
        from transformers import LlamaConfig, LlamaForCausalLM
        config = LlamaConfig(max_position_embeddings=2048, **DECODE)
        torch.manual_seed(1)
        with torch.device("cuda", gpu):
            default = torch.get_default_dtype()
            torch.set_default_dtype(torch.bfloat16)
            try:
                self.model = LlamaForCausalLM(config).eval()
            finally:
                torch.set_default_dtype(default)
            self.prompt = torch.randint(3, DECODE["vocab_size"], (DECODE_BATCH, PROMPT))
        self.model.generation_config.pad_token_id = 0
        self.model.generation_config.eos_token_id = None

    def step(self):
        with torch.inference_mode():
            self.model.generate(self.prompt, attention_mask=torch.ones_like(self.prompt), do_sample=False,
                                min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS)


class Notebook(Decode):
    """Somebody who runs a cell of the same model every ten seconds, and reads the result in
    between. The cells begin at multiples of the period, so that windows of whole periods hold
    the same work, unless a cell takes longer than a period."""

    def __init__(self, gpu):
        super().__init__(gpu)
        self.n, self.began = 0, 0.0
        self.latencies, self.lock = [], threading.Lock()

    def step(self):
        if self.n % CELL == 0:
            time.sleep(-time.monotonic() % PERIOD_S)
            self.began = time.monotonic()
        super().step()
        self.n += 1
        if self.n % CELL == 0:
            torch.cuda.synchronize()
            with self.lock:
                self.latencies.append((self.began, time.monotonic() - self.began))

    def more(self, wanted):
        return wanted or self.n % CELL != 0   # no window ends within a cell


class Pictures:
    """A data set whose items cost the CPU what decoding and cropping a picture costs."""

    def __init__(self, transform):
        self.transform = transform

    def __len__(self):
        return 1 << 20

    def __getitem__(self, i):
        picture = torch.randint(0, 256, (3, 256, 256), dtype=torch.uint8, generator=torch.Generator().manual_seed(i))
        return self.transform(picture), i % 1000


class Train:
    """torchvision's ResNet-50 under AMP, fed by a DataLoader with worker processes."""
    unit, per_step = "images", IMAGES

    def __init__(self, gpu):
        import torchvision
        from torchvision.transforms import v2
        self.device = torch.device("cuda", gpu)
        transform = v2.Compose([v2.RandomResizedCrop(SIDE, antialias=True), v2.RandomHorizontalFlip(),
                                v2.ToDtype(torch.float32, scale=True)])
        self.loader = torch.utils.data.DataLoader(Pictures(transform), batch_size=IMAGES, num_workers=LOADERS,
                                                  pin_memory=True, persistent_workers=True, prefetch_factor=4)
        self.batches = iter(self.loader)
        self.model = torchvision.models.resnet50().to(self.device, memory_format=torch.channels_last)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.n = 0

    def step(self):
        images, labels = next(self.batches)
        images = images.to(self.device, non_blocking=True, memory_format=torch.channels_last)
        labels = labels.to(self.device, non_blocking=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(self.model(images), labels)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        self.n += 1
        if self.n % 10 == 0:
            self.loss = loss.item()   # as training loops print it


class Compiled:
    """A GPT-2-shaped model trained through torch.compile."""
    unit, per_step = "sequences", GPT_BATCH

    def __init__(self, gpu):
        from transformers import GPT2Config, GPT2LMHeadModel
        device = torch.device("cuda", gpu)
        torch.manual_seed(1)
        self.model = GPT2LMHeadModel(GPT2Config(use_cache=False, **GPT)).to(device).train()
        self.loss = torch.compile(lambda ids: self.model(ids, labels=ids).loss)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.ids = torch.randint(0, GPT["vocab_size"], (GPT_BATCH, GPT_LENGTH), device=device)

    def step(self):
        with torch.autocast("cuda", torch.bfloat16):
            loss = self.loss(self.ids)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()


class Embed:
    """A server of sentence embeddings with one client, which thinks between requests."""
    unit, per_step = "requests", 1

    def __init__(self, gpu):
        self.dice = random.Random(1)
        self.words = ["".join(self.dice.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(VOCABULARY)]
        self.model = self.sentence_transformer(gpu)
        self.latencies = []
        self.lock = threading.Lock()

    def sentence_transformer(self, gpu):
        from sentence_transformers import SentenceTransformer, models
        from transformers import BertConfig, BertModel, BertTokenizerFast
        with tempfile.TemporaryDirectory() as where:
            vocabulary = os.path.join(where, "vocab.txt")
            with open(vocabulary, "w") as f:
                f.write("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"] + self.words))
            BertTokenizerFast(vocab_file=vocabulary, vocab=vocabulary).save_pretrained(where)
            BertModel(BertConfig(vocab_size=VOCABULARY + 5, **BERT)).save_pretrained(where)
            transformer = models.Transformer(where, max_seq_length=128)
        return SentenceTransformer(modules=[transformer, models.Pooling(BERT["hidden_size"])],
                                   device="cuda:%d" % gpu)

    def step(self):
        time.sleep(self.dice.expovariate(1 / THINK_S))
        sentences = [" ".join(self.dice.choices(self.words, k=self.dice.randint(8, 64)))
                     for _ in range(self.dice.randint(*SENTENCES))]
        began = time.monotonic()
        self.model.encode(sentences, batch_size=SENTENCES[1], show_progress_bar=False)
        with self.lock:
            self.latencies.append((began, time.monotonic() - began))


class Gemm(torch_loads.Gemm):
    """What saturates the GPU."""
    unit, per_step = "products", 1

    def __init__(self, gpu):
        super().__init__(gpu, 1)


LOADS = {"decode": Decode, "notebook": Notebook, "train": Train, "compiled": Compiled, "embed": Embed, "gemm": Gemm}


class Backend(torch_loads.Backend):
    def __init__(self):
        super().__init__("rates")
        self.made = weakref.WeakValueDictionary()   # the worker drops them

    def load(self):
        global torch
        said = super().load()
        torch = torch_loads.torch
        import transformers
        said["versions"]["transformers"] = transformers.__version__
        transformers.logging.set_verbosity_error()
        return said

    def init(self):
        said = super().init()
        torch.backends.cudnn.deterministic = False
        return said

    def build(self, name, gpu):
        self.enter(gpu)
        load = LOADS[name](gpu)
        self.made[name] = load
        return load

    def latencies(self, name, start, end):
        """Seconds of each request that began between start and end."""
        load = self.made[name]
        with load.lock:
            return {"latencies": [took for began, took in load.latencies if start <= began < end]}

    def check(self, name, gpu, seed):
        raise common.Skip("programs are measured, not compared")
