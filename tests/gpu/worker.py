# SPDX-License-Identifier: Apache-2.0
"""worker.py: one tenant of the matrix, driven over its standard input.

usage: worker.py BACKEND [FRAMEWORK...]

BACKEND names a module in loads/. Orders and replies are JSON, one a line;
each order has an "id" and an "op", and its reply the same id:

  load    imports the framework, does not touch the GPU
  init    makes the CUDA context
  build   makes a load and warms it up; a load is NAME or NAME@GPU
  check   computes the load's result from fixed seeds: a digest, some samples
  window  works with all of "loads", a thread each, from "lead" on, and counts
          the steps that the GPU completed between "start" and "end"; with
          "every", also how many it had completed after each so many seconds
  drop    frees a load
  call    calls a function of the backend
  quit

Times are seconds of CLOCK_MONOTONIC. A worker without orders leaves the GPU
alone. Whatever libraries print goes to standard error.
"""
import bisect
import collections
import faulthandler
import hashlib
import importlib
import math
import os
import signal
import sys
import threading
import time
import traceback

from loads import common

GROUP_S = 0.002     # GPU time between two marks
AHEAD_S = 0.040     # work queued ahead of the GPU
WARM_S = 0.15
OVERTIME_S = 30.0   # past the end of a window


def ordinal(load):
    """(NAME, GPU) of NAME@GPU."""
    name, _, gpu = load.partition("@")
    return name, int(gpu or 0)


class Built:
    """A load, and how many steps go between two marks: as order says (so that
    all tenants do the same), or measured."""

    def __init__(self, backend, name, gpu, order):
        self.load = backend.build(name, gpu)
        self.clock = backend.clock(gpu)
        first = self.timed(1)   # compiles what is compiled on first use
        self.steps, self.groups = order.get("steps"), order.get("marks")
        step_s = self.warm()
        if not self.steps:
            self.steps = max(1, min(256, round(GROUP_S / step_s)))
            self.groups = max(2, min(64, round(AHEAD_S / (self.steps * step_s))))
        self.report = {"step_ms": 1000 * step_s, "steps": self.steps, "marks": self.groups,
                       "first_step_s": first, "note": getattr(self.load, "note", "")}

    def warm(self):
        """Works for a while; the time of a step."""
        if self.steps:
            n = self.steps * self.groups
            return self.timed(n) / n
        for _ in range(2):
            n, took = 1, self.timed(1)
            while took < WARM_S and n < 4096:
                n *= 2
                took = self.timed(n)
        return took / n

    def timed(self, n):
        began = time.monotonic()
        for _ in range(n):
            self.load.step()
        self.clock.finish(self.clock.mark())
        return time.monotonic() - began

    def window(self, lead, start, end, every=0):
        """Works from lead to end; when the GPU had completed each mark."""
        more = getattr(self.load, "more", bool)   # loads that several processes do together stop together
        self.clock.calibrate()
        while time.monotonic() < lead:
            time.sleep(0.0002)
        pending, times, ran = collections.deque(), [], [(time.monotonic(), time.thread_time())]
        while more(not times or times[-1] < end):
            for _ in range(self.steps):
                self.load.step()
            pending.append(self.clock.mark())
            if len(pending) >= self.groups:
                times.append(self.clock.finish(pending.popleft()))
            ran.append((time.monotonic(), time.thread_time()))
            if time.monotonic() > end + OVERTIME_S:
                raise RuntimeError("the window did not end: %d marks passed, %d pending" % (len(times), len(pending)))
        late = time.monotonic()
        while pending:
            times.append(self.clock.finish(pending.popleft()))
        result = count(times, self.steps, start, end, late, every)
        result["ran"] = (value_at(ran, end) - value_at(ran, start)) / (end - start)
        return result


def value_at(points, x):
    """The value at x between points (x, value), in their order; that of the nearest one beyond them."""
    i = bisect.bisect_left(points, (x,))
    if i == 0 or i == len(points):
        return points[min(i, len(points) - 1)][1]
    (a, before), (b, after) = points[i - 1:i + 1]
    return before + (after - before) * (x - a) / (b - a)


def count(times, steps, start, end, late, every=0):
    """What was completed between start and end, by the marks' times.

    Work is taken to go evenly from mark to mark. After a pause (it was
    somebody else's turn) only the last part of the gap counts as work.
    """
    gaps = [b - a for a, b in zip(times, times[1:])]
    if not gaps:
        raise RuntimeError("only %d marks" % len(times))
    ordered = sorted(gaps)
    typical = ordered[len(gaps) // 2]

    def done(t):
        i = bisect.bisect_right(times, t)   # times[i] is the first mark after t
        if i == len(times):
            return i
        gap = gaps[i - 1] if i > 0 else typical
        if gap > 1.5 * typical:
            gap = typical
        return i + max(0.0, min(1.0, 1 - (times[i] - t) / gap)) if gap > 0 else i

    # Beside another tenant the window's first mark may be long before start.
    inside = [t for t in times if start <= t <= end]
    edges = [start] + inside + [end]
    pauses = [b - a for a, b in zip(edges, edges[1:])]
    result = {
        "steps": steps * (done(end) - done(start)),
        "seconds": end - start,
        "marks": len(inside),
        "longest_gap_s": max(pauses),
        "turns": 1 + sum(g > max(2 * typical, 0.002) for g in pauses),
        # While it has the GPU: many of a tenant's gaps may hold a pause, if its turns are short.
        "step_ms": 1000 * ordered[len(gaps) // 4] / steps,
        "first_mark": times[0], "last_mark": times[-1], "late_s": late - end,
    }
    if times[0] > start:
        result["note"] = "its first mark came %.1f ms after the start" % (1000 * (times[0] - start))
    result["rate"] = result["steps"] / result["seconds"]
    if every:
        n = int((end - start) / every + 1e-6)
        result["done"] = [round(steps * (done(start + i * every) - done(start)), 2) for i in range(n + 1)]
    return result


def digest(arrays):
    """A hash of all bytes, and up to 4096 numbers, of (bytes, numbers) pairs."""
    h, samples = hashlib.blake2b(digest_size=16), []
    for data, numbers in arrays:
        h.update(data)
        samples += [x if math.isfinite(x) else 1e30 for x in numbers]   # JSON has no NaN
    return {"digest": h.hexdigest(), "samples": samples[:4096]}


class Worker:
    def __init__(self, backend):
        self.backend = backend
        self.built = {}

    def load(self, _):
        return self.backend.load()

    def init(self, _):
        return dict(self.backend.init(), pid=os.getpid())

    def build(self, order):
        name, gpu = ordinal(order["load"])
        self.built[order["load"]] = built = Built(self.backend, name, gpu, order)
        return built.report

    def check(self, order):
        name, gpu = ordinal(order["load"])
        return digest(self.backend.check(name, gpu, order["seed"]))

    def window(self, order):
        results, errors = {}, []

        def work(load):
            try:
                self.backend.enter(ordinal(load)[1])
                results[load] = self.built[load].window(
                    order["lead"], order["start"], order["end"], order.get("every", 0))
            except BaseException:
                errors.append(traceback.format_exc())

        if len(order["loads"]) == 1:
            work(order["loads"][0])
        else:
            threads = [threading.Thread(target=work, args=(load,)) for load in order["loads"]]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
        if errors:
            raise RuntimeError("\n".join(errors))
        return {"loads": results}

    def drop(self, order):
        self.built.pop(order["load"], None)
        self.backend.free()
        return {}

    def call(self, order):
        return getattr(self.backend, order["function"])(*order.get("args", []))


def main():
    replies = common.replies_to_caller()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    sys.setswitchinterval(0.0005)
    backend = importlib.import_module("loads." + sys.argv[1]).Backend(*sys.argv[2:])
    worker = Worker(backend)
    common.serve(replies, lambda order: getattr(worker, order["op"])(order), backend.usable)


if __name__ == "__main__":
    main()
