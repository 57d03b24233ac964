# SPDX-License-Identifier: Apache-2.0
"""zygote.py: imports once what a hundred model servers need, and forks them.

usage: zygote.py torch|driver

Orders and replies are JSON, one a line, as in worker.py; each order has an "id" and an "op",
and its reply the same id:

  load  imports what servers run, and never touches the GPU: CUDA does not survive a fork
  fork  starts a server of loads/server.py with the flags "words", as "user", with the variables
        "env"; its standard input and output are a connection to the socket "address": "pid"

Its servers share the pages of what it imported, and end when it ends.
"""
import asyncio
import concurrent.futures.thread   # of asyncio, which imports it late: users may not be allowed to read it
import ctypes
import gc
import os
import signal
import socket
import sys
import traceback

from loads import common, server

PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4


def load(kind):
    from loads import driver   # nor the tree
    if kind == "torch":
        from loads import decoder
    gc.freeze()   # a collection in a server would write to every page
    return {}


def become(order, connection):
    """The child: a server of a user of its own."""
    parent = os.getppid()
    os.setpgid(0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(connection.fileno(), 0)
    os.dup2(connection.fileno(), 1)
    sys.stdin, sys.stdout = open(0), open(1, "w")   # those of the parent may hold orders
    os.environ.update(order["env"])
    os.chdir(order["env"]["HOME"])
    os.setgroups([])
    os.setresgid(*[order["user"]] * 3)
    os.setresuid(*[order["user"]] * 3)
    # Another user's process can't list its own files in /proc, and forgets when to end.
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() == parent:
        asyncio.run(server.serve(order["words"]))


def fork(order, replies):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(order["address"])
        pid = os.fork()
        if pid == 0:
            try:
                replies.close()
                become(order, connection)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
    return {"pid": pid}


def main():
    replies = common.replies_to_caller()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)   # nobody waits for servers
    common.serve(replies, lambda order: load(sys.argv[1]) if order["op"] == "load" else fork(order, replies))


main()
