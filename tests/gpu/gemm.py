# SPDX-License-Identifier: Apache-2.0
"""gemm.py: a tenant that keeps the GPU busy with bf16 matrix products.

usage: gemm.py NAME DIR

Multiplies two 8192x8192 bf16 matrices (cuBLASLt, so cuLaunchKernelEx) without
a pause, in windows. Writes DIR/NAME.ready when warm, then serves windows 0, 1,
...: it waits for DIR/go.K, which holds {"start": T, "seconds": S, "names":
[...]} with T on CLOCK_MONOTONIC; if NAME is among names it works from T to
T+S, and writes DIR/NAME.K.json with the products that were completed in that
time. So several tenants are compared over the same window. A window without
names ends it.
"""
import json
import os
import sys
import time

import torch

N = 8192
STEP = 4     # products between completion marks
AHEAD = 8    # marks in flight


def write(path, value):
    with open(path + ".tmp", "w") as f:
        json.dump(value, f)
    os.rename(path + ".tmp", path)


def window(start, seconds, a, b, c):
    """Counts by the GPU's clock: a mark is when the GPU passed it, whatever
    this thread waited for meanwhile."""
    while time.monotonic() < start:
        time.sleep(0.0002)
    began = torch.cuda.Event(enable_timing=True)
    began.record()
    pending, marks = [], []
    while not marks or marks[-1] <= seconds:
        for _ in range(STEP):
            torch.matmul(a, b, out=c)
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        pending.append(event)
        if len(pending) >= AHEAD:
            done = pending.pop(0)
            done.synchronize()
            marks.append(began.elapsed_time(done) / 1000)
    marks = [t for t in marks if t <= seconds]
    torch.cuda.synchronize()
    gaps = [y - x for x, y in zip([0.0] + marks, marks)]
    typical = sorted(gaps)[len(gaps) // 2] if gaps else 0.0
    return {
        "seconds": seconds,
        "products": len(marks) * STEP,
        "longest_gap_s": round(max(gaps, default=seconds), 4),
        "turns": 1 + sum(g > 1.5 * typical for g in gaps),
    }


def main():
    name, folder = sys.argv[1], sys.argv[2]
    torch.manual_seed(sum(name.encode()))
    a = torch.randn(N, N, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(N, N, device="cuda", dtype=torch.bfloat16)
    c = torch.empty(N, N, device="cuda", dtype=torch.bfloat16)
    for _ in range(20):
        torch.matmul(a, b, out=c)
    torch.cuda.synchronize()
    write(os.path.join(folder, name + ".ready"),
          {"torch": torch.__version__, "gpu": torch.cuda.get_device_name(0), "pid": os.getpid()})
    k = 0
    while True:
        go = os.path.join(folder, "go.%d" % k)
        while not os.path.exists(go):
            time.sleep(0.005)
        with open(go) as f:
            w = json.load(f)
        if not w["names"]:
            return
        if name in w["names"]:
            write(os.path.join(folder, "%s.%d.json" % (name, k)),
                  window(w["start"], w["seconds"], a, b, c))
        k += 1


main()
