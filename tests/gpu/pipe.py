# SPDX-License-Identifier: Apache-2.0
"""pipe.py: worker.py in a container, driven from outside through two FIFOs.

usage: pipe.py serve IN OUT BACKEND [FRAMEWORK...]   in the container: worker.py
       pipe.py relay IN OUT                          outside, in its place

relay passes its standard input on to IN and prints what comes from OUT, until
one of them ends. Both open IN first, then OUT, as the FIFOs wait for both ends.
"""
import os
import sys
import threading


def passed(source, to):
    while data := os.read(source, 1 << 16):
        while data:
            data = data[os.write(to, data):]


def relay(orders, replies):
    there = os.open(orders, os.O_WRONLY)
    back = os.open(replies, os.O_RDONLY)

    def forth():
        try:
            passed(0, there)
        except BrokenPipeError:   # it has ended
            pass
        os.close(there)

    threading.Thread(target=forth, daemon=True).start()
    passed(back, 1)


def serve(orders, replies, args):
    os.dup2(os.open(orders, os.O_RDONLY), 0)
    os.dup2(os.open(replies, os.O_WRONLY), 1)
    sys.argv = ["worker.py"] + args
    import worker
    worker.main()


if sys.argv[1] == "serve":
    serve(sys.argv[2], sys.argv[3], sys.argv[4:])
else:
    relay(sys.argv[2], sys.argv[3])
