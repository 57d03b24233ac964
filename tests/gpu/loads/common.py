# SPDX-License-Identifier: Apache-2.0
"""What the backends have in common."""
import ctypes
import json
import mmap
import os
import sys
import time
import traceback


class Skip(Exception):
    """What cannot be run here, and why."""


def replies_to_caller():
    """Where replies go. What a framework prints goes to standard error from now on."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return replies


def serve(replies, do, usable=lambda: False):
    """Does the orders of standard input until one says quit. do(order) returns the reply; usable says whether the
    process can go on after an error."""
    for line in sys.stdin:
        order = json.loads(line)
        if order["op"] == "quit":
            return
        try:
            reply = do(order)
        except BaseException as e:   # whatever a framework raises, the next order may work
            traceback.print_exc()
            kind = "skip" if isinstance(e, (Skip, ImportError)) else "error"
            reply = {kind: "%s: %s" % (type(e).__name__, e), "usable": usable()}
        replies.write(json.dumps(dict(reply, id=order["id"])) + "\n")
        replies.flush()


class Backend:
    """A framework's loads. The worker's orders say what each method is for."""

    def load(self):
        return {}

    def init(self):
        return {}

    def enter(self, gpu):
        """Makes gpu the calling thread's."""

    def free(self):
        """Returns the memory of dropped loads."""

    def usable(self):
        """False after an error that the process cannot recover from."""
        return True


class Ranks:
    """What the processes of one job share: a file of counters. Rank 0 decides
    when a window ends, so that all do the same number of steps; a collective
    that one of them does not join would never end."""

    POLL_S = 0.0001

    def __init__(self, path, rank, world):
        self.rank, self.world, self.rounds = int(rank), int(world), 0
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(fd, 4096)
        self.shared = mmap.mmap(fd, 4096)
        os.close(fd)
        self.go, self.stop = self.counter(0), self.counter(1)
        self.arrived = [self.counter(2 + i) for i in range(self.world)]

    def counter(self, i):
        return ctypes.c_uint64.from_buffer(self.shared, 64 * i)

    def more(self, wanted):
        """Whether another round begins: as rank 0 wants."""
        self.rounds += 1
        if self.rank == 0:
            (self.go if wanted else self.stop).value = self.rounds
            return wanted
        while self.go.value < self.rounds and self.stop.value != self.rounds:
            time.sleep(self.POLL_S)
        return self.stop.value != self.rounds

    def meet(self):
        """Waits until all have come as often as this one."""
        self.arrived[self.rank].value += 1
        while min(a.value for a in self.arrived) < self.arrived[self.rank].value:
            time.sleep(self.POLL_S)


class EventClock:
    """The GPU's clock through timed events, told in host time.

    new() makes an event; record, synchronize and elapsed_ms work on events.
    An event's time does not depend on what this thread waited for meanwhile.
    """

    def __init__(self, new, record, synchronize, elapsed_ms):
        self.new, self.record, self.synchronize, self.elapsed_ms = new, record, synchronize, elapsed_ms
        self.calibrate()

    def calibrate(self):
        """Takes the host's time of an event on an idle GPU, the best of five."""
        best = None
        for _ in range(5):
            event = self.new()
            before = time.monotonic()
            self.record(event)
            self.synchronize(event)
            after = time.monotonic()
            if best is None or after - before < best:
                best = after - before
                self.base, self.base_at = event, (before + after) / 2

    def mark(self):
        event = self.new()
        self.record(event)
        return event

    def finish(self, event):
        """Waits for a mark; when the GPU passed it."""
        self.synchronize(event)
        return self.base_at + self.elapsed_ms(self.base, event) / 1000
