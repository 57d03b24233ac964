# SPDX-License-Identifier: Apache-2.0
"""A server of a language model: HTTP that streams tokens, and continuous batching. servers.py starts it."""
import argparse
import asyncio
import collections
import contextlib
import json
import os
import sys
import threading
import traceback


class Sequence:
    """A request that a server works on."""

    def __init__(self, prompt, output, writer):
        self.prompt, self.left, self.writer, self.length = prompt, output, writer, len(prompt)
        self.done, self.gone = asyncio.Event(), False

    def send(self, token, last):
        """Writes a token, as a chunk of HTTP."""
        if self.gone:
            return
        text = b"%d\n" % token
        self.writer.write(b"%x\r\n%s\r\n" % (len(text), text) + b"0\r\n\r\n" * last)
        if last:
            self.done.set()


class Engine(threading.Thread):
    """Continuous batching: in turn a prompt, if one waits and there is a slot, and a step of all."""

    def __init__(self, make, loop):
        super().__init__(daemon=True)
        self.make, self.loop, self.ready = make, loop, loop.create_future()
        self.changed, self.waiting, self.active, self.ending = threading.Condition(), collections.deque(), {}, False

    def put(self, sequence):
        with self.changed:
            self.waiting.append(sequence)
            self.changed.notify_all()

    def end(self):
        with self.changed:
            self.ending = True
            self.changed.notify_all()
        self.join()

    def await_idle(self):
        with self.changed:
            self.changed.wait_for(lambda: self.ending or not self.waiting and not self.active)

    def run(self):
        try:
            self.model = self.make()
            self.loop.call_soon_threadsafe(self.ready.set_result, None)
            while self.turn():
                pass
        except BaseException:   # what waits for this thread would wait for ever
            traceback.print_exc()
            os._exit(1)

    def turn(self):
        with self.changed:
            self.changed.wait_for(lambda: self.ending or self.waiting or self.active)
            self.active = {slot: s for slot, s in self.active.items() if s.left and not s.gone}
            while self.waiting and self.waiting[0].gone:
                self.waiting.popleft()
            slot = next((i for i in range(self.model.slots) if i not in self.active), None)
            new = self.waiting.popleft() if self.waiting and slot is not None else None
            if new:
                self.active[slot] = new
            elif not self.active:
                self.changed.notify_all()
        if self.ending:
            return False
        if new:
            self.send([(new, self.model.prefill(slot, new.prompt))])
        rest = {slot: s for slot, s in self.active.items() if s.left}
        if rest:
            tokens = self.model.decode(1 + max(rest), 1 + max(s.length for s in rest.values()))
            self.send([(s, tokens[slot]) for slot, s in rest.items()])
        return True

    def send(self, got):
        for s, _ in got:
            s.left -= 1
            s.length += 1
        news = [(s, token, s.left == 0) for s, token in got]
        self.loop.call_soon_threadsafe(lambda: [s.send(token, last) for s, token, last in news])


async def answer(engine, reader, writer):
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        if head[0].startswith("GET /idle"):
            await asyncio.get_running_loop().run_in_executor(None, engine.await_idle)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        else:
            length = next(int(line.split(":")[1]) for line in head if line.lower().startswith("content-length:"))
            asked = json.loads(await reader.readexactly(length))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n")
            s = Sequence(asked["prompt"], asked["max_tokens"], writer)
            engine.put(s)
            left, ended = asyncio.ensure_future(reader.read(1)), asyncio.ensure_future(s.done.wait())
            await asyncio.wait((left, ended), return_when=asyncio.FIRST_COMPLETED)
            s.gone = not s.done.is_set()
            left.cancel()
            ended.cancel()
            await asyncio.gather(left, ended, return_exceptions=True)
        await writer.drain()
    writer.close()


def options(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--device")
    parser.add_argument("--slots", type=int)
    parser.add_argument("--spans", type=int, nargs="+")
    parser.add_argument("--part", type=float, default=0.0)
    parser.add_argument("--mib", type=int, default=0)
    parser.add_argument("--eager", action="store_true")
    return parser.parse_args(argv)


async def serve(argv):
    args, loop = options(argv), asyncio.get_running_loop()

    def make():
        if args.model == "spin":
            from loads import driver
            return driver.Decoder(args.slots, args.part, args.mib)
        from loads import decoder
        if args.model == "filler":
            return decoder.Filler(args.mib, args.device)
        return decoder.Decoder(args.model, args.slots, args.spans, args.part, args.device, args.mib, args.eager)
    sys.setswitchinterval(0.0005)   # the engine's thread does not wait for the other's turn to end
    engine = Engine(make, loop)
    engine.start()
    await engine.ready
    server = await asyncio.start_server(lambda r, w: answer(engine, r, w), "127.0.0.1", 0)
    print(json.dumps({"port": server.sockets[0].getsockname()[1], "slots": engine.model.slots, "parameters": engine.model.parameters}), flush=True)
    await loop.run_in_executor(None, sys.stdin.read)   # until whoever started it closes that
    engine.end()
