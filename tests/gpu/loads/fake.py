# SPDX-License-Identifier: Apache-2.0
"""Loads without a GPU, to test the coordinator: a step takes a millisecond of
a clock that only counts. `bad` fails, `absent` is skipped, `hang` hangs."""
import os
import time

from loads import common

STEP_S = 0.001


class Clock:
    def __init__(self, load):
        self.load = load

    def calibrate(self):
        self.load.ready = time.monotonic()

    def mark(self):
        return self.load.ready

    def finish(self, mark):
        wait = mark - time.monotonic()
        if wait > 0:
            time.sleep(wait)
        return mark


class Load:
    note = "counts only"

    def __init__(self):
        self.ready = time.monotonic()

    def step(self):
        self.ready = max(self.ready, time.monotonic()) + STEP_S


class Backend(common.Backend):
    def load(self):
        return {"versions": {"fake": "1"}}

    def init(self):
        return {"gpu": "none"}

    def build(self, name, gpu):
        if name == "bad":
            raise ValueError("as ordered")
        if name == "absent":
            raise common.Skip("not here")
        if name == "hang":
            time.sleep(3600)
        if name == "die":
            os._exit(3)
        self.last = Load()
        return self.last

    def clock(self, gpu):
        return Clock(self.last)

    def check(self, name, gpu, seed):
        return [(b"%d" % seed, [1.0, 2.0])]
