# SPDX-License-Identifier: Apache-2.0
"""migrate.py: a program whose results tell whether anything was lost on the way.

usage: migrate.py torch|driver MIB STEPS

Works in steps, until STEPS are done and its standard input has ended. Each step prints one
line of JSON: its number, when it ended (CLOCK_MONOTONIC), how long it took, and its result:
of a training, the loss as its bits; without PyTorch, a digest of memory that each step
changes. Two runs print the same results, step by step.

torch trains a perceptron under AMP whose parameters, gradients and Adam state take MIB,
with batches from two forked workers.
"""
import ctypes
import hashlib
import json
import os
import select
import struct
import sys
import time


def torch_steps(mib):
    import torch
    from torch import nn
    torch.manual_seed(1)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    width = 2048
    # Parameters, gradients and two moments of Adam, in float32.
    layers = max(2, (mib << 20) // (width * width * 4 * 4))
    device = torch.device("cuda", 0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width, device=device), nn.ReLU()) for _ in range(layers)])
    for block in model:
        nn.init.kaiming_normal_(block[0].weight)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
    scaler = torch.amp.GradScaler("cuda") if hasattr(torch.amp, "GradScaler") else torch.cuda.amp.GradScaler()

    class Data(torch.utils.data.IterableDataset):
        def __iter__(self):
            info = torch.utils.data.get_worker_info()
            g = torch.Generator().manual_seed(100 + info.id)
            while True:
                x = torch.randn(256, width, generator=g)
                yield x, x.roll(1, 1)

    loader = iter(torch.utils.data.DataLoader(Data(), batch_size=None, num_workers=2, multiprocessing_context="fork", pin_memory=True))

    def step():
        x, y = (t.to(device, non_blocking=True) for t in next(loader))
        optimizer.zero_grad(set_to_none=False)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return struct.pack("<f", loss.item()).hex()
    return step


def driver_steps(mib):
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    from loads.driver import Driver
    cu = Driver()
    context, block, n = ctypes.c_void_p(), 1 << 20, 0
    cu.cuInit(0)
    cu.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
    cu.cuCtxSetCurrent(context)
    pieces = []
    for i in range(mib):
        p = ctypes.c_uint64()
        cu.cuMemAlloc_v2(ctypes.byref(p), ctypes.c_size_t(block))
        cu.cuMemsetD32_v2(p, ctypes.c_uint(i), ctypes.c_size_t(block // 4))
        pieces.append(p)
    host = ctypes.create_string_buffer(block)

    def step():
        nonlocal n
        digest = hashlib.blake2b(digest_size=8)
        for p in pieces[n % 4::4]:
            cu.cuMemcpyDtoH_v2(host, p, ctypes.c_size_t(block))
            digest.update(host.raw)
            cu.cuMemsetD32_v2(p, ctypes.c_uint(struct.unpack_from("<I", host.raw)[0] * 5 + n), ctypes.c_size_t(block // 4))
        n += 1
        return digest.hexdigest()
    return step


def main():
    kind, mib, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    step = {"torch": torch_steps, "driver": driver_steps}[kind](mib)
    n, more = 0, True
    while n < steps or more:
        began = time.monotonic()
        result = step()
        ended = time.monotonic()
        print(json.dumps({"step": n, "at": ended, "took": ended - began, "result": result}), flush=True)
        n += 1
        if more and select.select([sys.stdin], [], [], 0)[0] and not sys.stdin.read(1):
            more = False
    os._exit(0)  # the workers of the loader wait for ever


main()
