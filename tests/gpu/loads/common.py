# SPDX-License-Identifier: Apache-2.0
"""What the backends have in common."""
import time


class Skip(Exception):
    """What cannot be run here, and why."""


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
