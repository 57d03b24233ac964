# SPDX-License-Identifier: Apache-2.0
"""Two processes share PyTorch tensors by CUDA IPC. Prints one JSON line.

usage: ipc.py

The parent makes a small and a large tensor and hands them to a child, which adds
one to each and sends one of its own back; both sides look at what they see.
"""
import json
import sys
import time

import torch
import torch.multiprocessing as mp

SIZES_MIB = (4, 256)


def filled(mib, seed):
    return torch.arange(mib << 18, device="cuda", dtype=torch.int32).mul_(3).add_(seed)


def child(there, back):
    wrong = 0
    for i, mib in enumerate(SIZES_MIB):
        t = there.get()
        wrong += int((t != filled(mib, i)).sum())
        t.add_(1)
        torch.cuda.synchronize()
        own = filled(mib, 100 + i)
        torch.cuda.synchronize()
        back.put((wrong, own))
        there.get()   # the parent has looked at it
        del t, own


def main():
    mp.set_start_method("spawn")
    there, back = mp.Queue(), mp.Queue()
    process = mp.Process(target=child, args=(there, back), daemon=True)
    process.start()
    began, wrong = time.monotonic(), 0
    for i, mib in enumerate(SIZES_MIB):
        t = filled(mib, i)
        torch.cuda.synchronize()
        there.put(t)
        childs, own = back.get(timeout=60)
        wrong += childs + int((t != filled(mib, i).add_(1)).sum()) + int((own != filled(mib, 100 + i)).sum())
        del own
        there.put("seen")
    process.join(20)
    print(json.dumps({"mib": SIZES_MIB, "wrong": wrong, "child": process.exitcode, "seconds": time.monotonic() - began}))
    return 0 if wrong == 0 and process.exitcode == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
