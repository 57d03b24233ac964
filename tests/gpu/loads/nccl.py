# SPDX-License-Identifier: Apache-2.0
"""One rank of a PyTorch job on several GPUs, one each: what data-parallel
training does, over and over. usage: worker.py nccl FILE RANK WORLD"""
import datetime

from loads import common
from loads import torch as single

PRODUCTS = 4            # in a step
GRADIENT = 32 << 20     # numbers of 2 bytes, summed over all ranks


class Training:
    """Matrix products, then the sum of a gradient over all ranks."""

    def __init__(self, torch, dist, gpu, ranks):
        self.dist, self.more, self.work = dist, ranks.more, single.Gemm(gpu, 1)
        self.gradient = torch.ones(GRADIENT, device=single.device(gpu), dtype=torch.bfloat16)
        self.weights = torch.zeros_like(self.gradient)

    def step(self):
        for _ in range(PRODUCTS):
            self.work.step()
        self.dist.all_reduce(self.gradient, op=self.dist.ReduceOp.AVG)
        self.weights.add_(self.gradient, alpha=0.001)


class Backend(single.Backend):
    def __init__(self, path, rank, world):
        super().__init__("rates")
        self.path, self.ranks = path, common.Ranks(path, rank, world)

    def init(self):
        import torch
        import torch.distributed as dist
        self.dist = dist
        torch.cuda.set_device(self.ranks.rank)
        dist.init_process_group("nccl", init_method="file://" + self.path + ".group", rank=self.ranks.rank,
                                world_size=self.ranks.world, timeout=datetime.timedelta(seconds=90))
        one = torch.ones(1, device=single.device(self.ranks.rank))
        dist.all_reduce(one)
        return {"gpu": torch.cuda.get_device_name(self.ranks.rank), "ranks": one.item(), "nccl": torch.cuda.nccl.version()}

    def build(self, name, gpu):
        self.enter(gpu)
        if name != "ranks":
            raise common.Skip("the nccl backend has only ranks")
        return Training(single.torch, self.dist, gpu, self.ranks)
