#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Usage: servers.py [RESULTS-DIR] [--cases CASES] [--ways WAYS] [--servers N] [OPTION...]

Language models behind servers that share a GPU, each way in turn, against one server that has the GPU. Each
server is a process with a model of random weights, continuous batching, CUDA graphs and HTTP that streams tokens.
A case is a number of requests in flight on the GPU, of which each server has its part: when one ends, the next
begins. An "s" after it: short prompts. A "p": requests come at the instants of a Poisson process, the same
in each way, as often as makes one server that has the GPU have about so many in flight, at nine tenths of its rate.
The ways: alone (one server), driver (its own time slicing), mps (plain MPS), auto (nvshare), group (an overlap
group), latency (the first server has that priority), limit (the first has a core limit), memory (of caches sized by
free memory, promised --promised times the GPU's and swapped), and each peer.
A peer is a library to preload, or NAME=WORDS: what stands before the command of a server, variables or a program. {dir}
in it is a folder of that server's own. Where it sets a variable of MPS an MPS daemon runs; otherwise its servers start
when all others are ready, one after the other, because a library may look for its process among the GPU's new ones. For example
  --peer "mps-half=CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50"
  --peer "library=CACHE={dir}/cache LD_PRELOAD=/path/to/library.so"
Cases and ways alternate, so that what drifts hits all. It writes servers.jsonl, a line for each window, servers.md
and logs. Run it as root from the unpacked bundle; it needs PyTorch, or --model spin on the simulated GPU."""
import argparse
import asyncio
import calendar
import collections
import contextlib
import json
import os
import pathlib
import random
import re
import select
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
WAYS = ("alone", "driver", "mps", "auto", "group", "latency", "limit", "memory")
SOME = ("latency", "limit", "memory")   # which have the cases of --some only
SETTLE_S = {"auto": 14, "group": 3, "latency": 5, "limit": 20, "memory": 15}   # until a scheduler knows its tenants
PROMPTS = 64            # different ones
START_S, START_ABOUT_S = 180, 35   # within which servers are ready, and mostly are
MEMORY_LONGER = 5       # a turn takes seconds where memory moves: windows are so much longer
POISSON_RATE = 0.9
TICK_S = 0.02           # of what a replay counts
PART = 0.9              # of what it sees a server of the way memory uses
# Tokens of a prompt and of an answer. What a prompt of the short mix has varies by half.
LONG, SHORT = (2048, 256), (128, 64)


# --- the client -------------------------------------------------------------------------------

class Request(asyncio.Protocol):
    """A request, and when its tokens came. It is due before it is sent where the client is late."""

    def __init__(self, due, body):
        self.due, self.body, self.stamps, self.text, self.at = due, body, [], bytearray(), -1
        self.transport, self.ended, self.finished, self.failed = None, asyncio.Event(), None, False

    def connection_made(self, transport):
        self.transport = transport
        transport.write(b"POST /v1/completions HTTP/1.1\r\nHost: server\r\nContent-Length: %d\r\n\r\n" % len(self.body) + self.body)

    def data_received(self, data):
        now = time.monotonic()
        self.text += data
        if self.at < 0 and (end := self.text.find(b"\r\n\r\n")) >= 0:
            self.at = end + 4
        while self.at >= 0 and (line := self.text.find(b"\r\n", self.at)) >= 0:
            size = int(self.text[self.at:line], 16)
            if len(self.text) < line + size + 4:
                break
            self.at = line + size + 4
            if size == 0:
                return self.end()
            self.stamps.append(now)

    def connection_lost(self, exc):
        self.failed = self.finished is None
        self.end()

    def end(self):
        if self.finished is None:
            self.finished = time.monotonic()
            self.ended.set()
            if self.transport:
                self.transport.abort()


def quantiles(values):
    """Median and 99th percentile, in ms."""
    values = sorted(values)
    return [round(1000 * values[min(int(q * len(values)), len(values) - 1)], 3) for q in (0.5, 0.99)] if values else [None, None]


def measured(requests, begin, end):
    """What a window says of a server, or of several."""
    itl, ttft, tokens, in_flight = [], [], 0, 0.0
    for r in requests:
        tokens += sum(begin <= t < end for t in r.stamps)
        itl += [b - a for a, b in zip(r.stamps, r.stamps[1:]) if begin <= b < end]
        in_flight += max(0.0, min(r.finished, end) - max(r.due, begin)) / (end - begin)
        if begin <= r.due < end and r.stamps and r.stamps[0] < end:
            ttft.append(r.stamps[0] - r.due)
    # A request that still waits counts with what it has waited, once that is long.
    middle = statistics.median(ttft) if ttft else 0.0
    ttft += [end - r.due for r in requests if begin <= r.due and not (r.stamps and r.stamps[0] < end) and end - r.due > middle]
    return {"tokens_per_s": round(tokens / (end - begin), 2), "in_flight": round(in_flight, 2), "itl_ms": quantiles(itl), "ttft_ms": quantiles(ttft),
            "first_tokens": len(ttft), "failed": sum(r.failed for r in requests)}


class Case:
    """A kind of load. Everything of it that is random comes from its name and the seed."""

    def __init__(self, name, args):
        self.name, self.seed = name, args.seed
        self.load, self.short, self.poisson = int(name.rstrip("ps")), "s" in name, "p" in name
        self.input, self.output = (max(1, int(n * args.scale)) for n in (SHORT if self.short else LONG))
        dice = random.Random(f"{args.seed} {self.short}")
        sizes = [dice.randint(self.input // 2, self.input * 3 // 2) if self.short else self.input for _ in range(PROMPTS)]
        self.prompts = [[dice.randrange(90) for _ in range(max(1, n))] for n in sizes]

    def body(self, k, output):
        return json.dumps({"prompt": self.prompts[k % PROMPTS], "max_tokens": output}).encode()


class Load:
    """A window's requests to servers."""

    def __init__(self, case, ports, rate):
        self.case, self.ports, self.rate, self.requests = case, ports, rate, [[] for _ in ports]
        self.dice, self.tasks, self.begin, self.end = random.Random(f"{case.seed} {case.name}"), set(), 0.0, 0.0

    def tokens(self):
        """How many came of each server in each tick of the window."""
        counts = [[0] * (int((self.end - self.begin) / TICK_S) + 1) for _ in self.ports]
        for count, of in zip(counts, self.requests):
            for t in (t for r in of for t in r.stamps if self.begin <= t < self.end):
                count[int((t - self.begin) / TICK_S)] += 1
        return counts

    async def request(self, i, due, output):
        r = Request(due, self.case.body(sum(map(len, self.requests)), output))
        self.requests[i].append(r)
        await asyncio.get_running_loop().create_connection(lambda: r, "127.0.0.1", self.ports[i])
        await r.ended.wait()
        return not r.failed

    async def in_turn(self, i, output):
        """One request after the other."""
        while await self.request(i, time.monotonic(), output):
            output = self.case.output

    def spawn(self, work):
        self.tasks.add(asyncio.ensure_future(work))

    async def arrivals(self, begin):
        due = begin
        while True:
            due += self.dice.expovariate(self.rate)
            await asyncio.sleep(max(0, due - time.monotonic()))
            i = self.dice.randrange(1 << 16) % len(self.ports)
            self.spawn(self.request(i, due, self.case.output))

    async def run(self, lead, seconds):
        """The first requests have answers of any length, as in the middle of a long run."""
        began = time.monotonic()
        begin, end = self.begin, self.end = began + lead, began + lead + seconds
        for k in range(self.case.load):
            i, output = k % len(self.ports), self.dice.randint(1, self.case.output)
            self.spawn(self.request(i, began, output) if self.case.poisson else self.in_turn(i, output))
        if self.case.poisson:
            self.spawn(self.arrivals(began))
        await asyncio.sleep(end - time.monotonic())
        everything = [r for of in self.requests for r in of]
        for task in self.tasks:
            task.cancel()
        for r in everything:
            r.end()
        await asyncio.wait(self.tasks)
        wrong = [t.exception() for t in self.tasks if not t.cancelled() and t.exception()]
        if wrong:
            raise wrong[0]
        for port in self.ports:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /idle HTTP/1.1\r\nHost: server\r\n\r\n")
            await asyncio.wait_for(reader.read(), 120)
            writer.close()
        return dict(measured(everything, begin, end), servers=[measured(of, begin, end) for of in self.requests])


# --- the ways ---------------------------------------------------------------------------------

def mps_control():
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/nvidia/bin", os.environ.get("NVSHARE_SIMGPU", "/") + "/bin"])
    return shutil.which("nvidia-cuda-mps-control", path=path)


def await_(what, process, condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"{what} does not answer: see servers.log")
        time.sleep(0.05)


def own(case, n):
    """The case that is the load of one of n servers."""
    return str(int(case.rstrip("ps")) // n) + case.lstrip("0123456789")


def set_of(way):
    """The ways that the same servers serve."""
    return "native" if way in ("alone", "driver") else way


class Servers:
    """The servers of a way, and the scheduler or the daemon that it needs."""

    def __init__(self, way, args, log):
        self.way, self.args, self.log, self.helper, self.processes, self.ports, self.slots = way, args, log, None, [], [], []
        self.peer = args.peers.get(way, "")
        self.mps, self.tenant = way == "mps" or "CUDA_MPS_" in self.peer, []
        self.later = bool(self.peer) and not self.mps   # its servers start one by one, after those of others
        self.dir = tempfile.mkdtemp(prefix="servers-")
        os.chmod(self.dir, 0o755)
        self.env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1", PYTHONWARNINGS="ignore")
        if args.gpu:
            self.env["CUDA_VISIBLE_DEVICES"] = args.gpu

    def start(self):
        if self.mps:
            self.daemon()
        elif not self.peer and self.way != "native":
            self.tenant = self.scheduler()
        for i in range(0 if self.later else self.args.servers):
            self.launch(i)

    def launch(self, i):
        words = [*self.before(i), sys.executable, os.path.abspath(__file__), "serve", "--model", self.args.model, "--device", self.args.device,
                 "--slots", str(self.args.slots[i == 0]), "--spans", *map(str, self.args.spans)]
        if self.way == "memory":
            words += ["--part", str(PART)]
        self.processes.append(subprocess.Popen(words, env=self.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log,
                                               start_new_session=True, preexec_fn=lambda: os.sched_setaffinity(0, self.args.parts[i])))

    def before(self, i):
        """What stands before the command of a server."""
        if self.peer:
            own = f"{self.dir}/server-{i}"
            os.mkdir(own)
            return ["env", *(word.replace("{dir}", own) for word in shlex.split(self.peer))]
        return [*self.tenant, *self.terms(i), "--"] if self.tenant else []

    def daemon(self):
        control = mps_control()
        if not control:
            raise RuntimeError("there is no nvidia-cuda-mps-control")
        self.env.update(CUDA_MPS_PIPE_DIRECTORY=self.dir + "/pipe", CUDA_MPS_LOG_DIRECTORY=self.dir + "/log")
        os.makedirs(self.dir + "/pipe")
        os.makedirs(self.dir + "/log")
        self.helper = subprocess.Popen([control, "-f"], env=self.env, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, start_new_session=True)
        await_("the MPS daemon", self.helper, lambda: os.path.exists(self.dir + "/pipe/control"))

    def scheduler(self):
        bundle, flags, memory = self.args.bundle, [], self.args.memory
        if self.way == "memory":
            flags = ["--gpu-memory", f"{memory}Mi", "--swap-memory", f"{int(memory * self.args.promised) + 1024 * self.args.servers}Mi", "--swap-ready", "100%"]
        program = next(f for f in (f"{bundle}/nvml/nvshare-scheduler", f"{bundle}/bin/nvshare-scheduler") if os.path.exists(f))
        self.helper = subprocess.Popen([program, "--run-dir", self.dir + "/run", "--anti-thrash", "auto", *flags], env=self.env,
                                       stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, start_new_session=True)
        await_("the scheduler", self.helper, lambda: self.status().get("gpus"))
        gpu = self.args.gpu or self.status()["gpus"][0]["uuid"]
        return [f"{bundle}/bin/nvsharectl", "--run-dir", self.dir + "/run", "run", "--shim", f"{bundle}/lib/libnvshare.so", "--gpu", gpu]

    def terms(self, i):
        return ["--name", f"server-{i}", *{
            "group": ["--overlap", "servers"],
            "latency": ["--priority", "latency"] * (i == 0),
            "limit": ["--core-limit", str(self.args.limit)] * (i == 0),
            "memory": ["--memory-limit", f"{int(self.args.memory * self.args.promised / self.args.servers / PART)}Mi"],
        }.get(self.way, [])]

    def ready(self, until):
        for i in range(self.args.servers):
            if self.later:
                self.launch(i)
            p = self.processes[i]
            line = p.stdout.readline() if select.select([p.stdout], [], [], max(0, until - time.monotonic()))[0] else b""
            while line and not line.startswith(b"{"):   # what a library prints
                line = p.stdout.readline()
            if not line:
                raise RuntimeError(f"server {i} is not ready: see servers.log")
            said = json.loads(line)
            self.ports.append(said["port"])
            self.slots.append(said["slots"])
            self.args.parameters = said["parameters"]

    def status(self):
        ask = [f"{self.args.bundle}/bin/nvsharectl", "--run-dir", self.dir + "/run", "status", "-o", "json"]
        return json.loads(subprocess.run(ask, check=False, text=True, capture_output=True).stdout or "{}")

    def sharing(self):
        """How the scheduler has them share."""
        if not self.tenant:
            return {}
        gpu = next((g for g in self.status().get("gpus", []) if self.args.gpu in ("", g["uuid"])), {})
        return {k: gpu[k] for k in ("way", "way_code") if k in gpu}

    def turns(self, begin, end):
        """What the scheduler recorded in a time of the monotonic clock, in ms from its begin: [server, from, to] of
        grants; of memory that moved that and its MiB, negative if it left; and each server's time slice, 0: the driver's."""
        if not self.tenant:
            return {}
        ask = [f"{self.args.bundle}/bin/nvsharectl", "--run-dir", self.dir + "/run", "events", "-o", "json"]
        zero, length, granted, turns, moves = time.time() - time.monotonic() + begin, end - begin, {}, [], []
        for line in subprocess.run(ask, check=False, text=True, capture_output=True).stdout.splitlines():
            e = json.loads(line)
            name, kind = e.get("container", {}).get("name", ""), e["type"]
            if not name.startswith("server-"):
                continue
            server, (day, _, part) = int(name.removeprefix("server-")), e["time"].rstrip("Z").partition(".")
            at = calendar.timegm(time.strptime(day, "%Y-%m-%dT%H:%M:%S")) + float(f"0.{part}") - zero
            if kind == "grant":
                granted.setdefault(server, at)
            elif kind in ("release", "reclaim", "end") and server in granted:
                turns.append([server, granted.pop(server), at])
            elif kind in ("swap-out", "swap-in"):
                moves.append([server, at - e["took_seconds"], at, (1 if kind == "swap-in" else -1) * e["bytes"] >> 20])
        turns += [[server, at, length] for server, at in granted.items()]
        slices = {c["container"].get("name", ""): c["slice_seconds"] for g in self.status().get("gpus", []) for c in g["clients"]}
        turns, moves = ([[server, round(1000 * max(a, 0), 1), round(1000 * min(b, length), 1), *mib] for server, a, b, *mib in of if a < length and b > 0]
                        for of in (turns, moves))
        return {"turns": turns, "moves": moves, "slices_ms": [round(1000 * slices.get(f"server-{i}", 0), 3) for i in range(self.args.servers)]}

    def alive(self):
        if any(p.poll() is not None for p in (*self.processes, self.helper) if p):
            raise RuntimeError("a server, the scheduler or the daemon ended: see servers.log")

    def tell(self):
        """The servers end."""
        for p in self.processes:
            p.stdin.close()

    def stop(self):
        self.tell()
        for p in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                p.wait(20)
            self.kill(p)
        if self.helper:
            for _ in range(100):   # a group outlives its members by seconds, and its daemon the scheduler
                if self.way != "group" or not self.daemons():
                    break
                time.sleep(0.1)
            if self.mps:
                quit_it = ["timeout", "10", mps_control()]
                subprocess.run(quit_it, check=False, env=self.env, input=b"quit -t 1\n", stdout=self.log, stderr=self.log)
            self.helper.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.helper.wait(10)
            self.kill(self.helper)
        shutil.rmtree(self.dir, ignore_errors=True)

    def daemons(self):
        """The programs of MPS that the scheduler of this way has started."""
        found = []
        for process in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if (process / "comm").read_text().startswith("nvidia-cuda-mps") and f"{self.dir}/run".encode() in (process / "environ").read_bytes():
                    found.append(int(process.name))
        return found

    @staticmethod
    def kill(p):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(p.pid, signal.SIGKILL)
        p.wait()


# --- the run ----------------------------------------------------------------------------------

class Run:
    def __init__(self, args, log):
        self.args, self.log, self.rows, self.sets, self.failed = args, log, [], {}, {}
        self.cases, self.end = {}, 0.0
        self.file = open(f"{args.results}/servers.jsonl", "w", buffering=1)

    def case(self, name):
        if name not in self.cases:
            self.cases[name] = Case(name, self.args)
        return self.cases[name]

    def row(self, **row):
        self.rows.append(dict(row, gpu=self.args.gpu, parameters=self.args.parameters))
        self.file.write(json.dumps(self.rows[-1]) + "\n")

    def fail(self, way, why):
        print(f"{way}: {why}", flush=True)
        self.row(way=way, error=str(why))
        self.failed[way] = why
        if set_of(way) in self.sets:
            self.sets.pop(set_of(way)).stop()

    def start(self, names):
        """All at the same time."""
        for name in names:
            self.sets[name] = Servers(name, self.args, self.log)
            try:
                self.sets[name].start()
            except (RuntimeError, OSError) as e:
                self.fail("driver" if name == "native" else name, e)
        until = time.monotonic() + START_S
        for name in sorted(names, key=lambda name: name in self.sets and self.sets[name].later):
            if name in self.sets:
                try:
                    self.sets[name].ready(until)
                except (RuntimeError, OSError) as e:
                    self.fail("driver" if name == "native" else name, e)

    def window(self, way, name, number, lead=None, seconds=None):
        servers, case = self.sets[set_of(way)], self.case(name)
        rate = self.rate(case) if case.poisson else None
        longer = MEMORY_LONGER if way == "memory" else 1
        load = Load(case, servers.ports[:1] if way == "alone" else servers.ports, rate)
        got = asyncio.run(load.run(lead or self.args.lead * longer, seconds or self.args.seconds * longer))
        servers.alive()
        if lead:
            return
        row = {"way": way, "case": name, "round": number, **got, "shares": servers.sharing()}
        if way == "memory":
            row["promised"] = self.args.promised
        if number == 1:   # the report plays it
            row["replay"] = {"tick_ms": 1000 * TICK_S, "tokens": load.tokens(), **servers.turns(load.begin, load.end)}
        self.row(**row)
        print(f"{name:>4} {way:8} {row['tokens_per_s']:8.1f} tokens/s, {row['in_flight']:5.1f} in flight, ITL {row['itl_ms']} ms, TTFT {row['ttft_ms']} ms",
              flush=True)

    def rate(self, case):
        """Requests per second of a case whose requests come as they want."""
        base = case.name.replace("p", "")
        known = lambda: [r["tokens_per_s"] for r in self.rows if (r["way"], r.get("case")) == ("alone", base)]   # noqa: E731
        if not known():
            self.window("alone", base, 0)
        return POISSON_RATE * known()[0] / case.output

    def plan(self, ways, cases, number):
        """The windows of a round: one server that has the GPU has the load of all, and that of one of them."""
        done, n = set(), self.args.servers
        for case in map(self.case, cases):
            here = [(w, case.name) for w in ways if w == "alone" or case.load >= n and (w not in SOME or case.name in self.args.some)]
            if "alone" in ways and not case.poisson and case.load >= n:
                here.insert(1, ("alone", own(case.name, n)))
            here = [w for w in here if w not in done]
            done.update(here)
            yield from here if number % 2 else reversed(here)

    def guarded(self, way, name, number, settle=None):
        if way in self.failed or set_of(way) not in self.sets or time.monotonic() > self.end:
            return
        try:
            self.window(way, name, number, settle, settle and 0.1)
        except (RuntimeError, OSError) as e:
            self.fail(way, e)

    def phase(self, ways, cases, rounds, end):
        """Ways whose servers are there at the same time."""
        self.end = end
        self.start([s for s in dict.fromkeys(map(set_of, ways)) if s not in self.sets])
        for way in ways:
            self.guarded(way, self.args.some[0], 0, SETTLE_S.get(way, 1) * self.args.settle)
        for number in range(1, rounds + 1):
            for way, name in list(self.plan(ways, cases, number)):
                self.guarded(way, name, number)

    def keep(self, *names):
        """Ends all servers but some."""
        ending = [self.sets.pop(name) for name in list(self.sets) if name not in names]
        for servers in ending:
            servers.tell()
        for servers in ending:
            servers.stop()

    def run(self):
        args = self.args
        ways = [w for w in args.ways if w not in SOME or w != "memory" and set(args.cases) & set(args.some)]
        end = time.monotonic() + 60 * args.minutes
        windows = (args.lead + args.seconds) * (1 + MEMORY_LONGER) * len(args.some)
        reserved = (START_ABOUT_S + SETTLE_S["memory"] * args.settle + windows) * ("memory" in args.ways)
        try:
            self.phase(ways, args.cases, args.rounds, end - reserved)
            if "memory" in args.ways:
                self.keep("native")
                self.phase(["alone", "memory"] if "alone" in ways else ["memory"], args.some, 1, end)
        finally:
            self.keep()
            self.file.close()


# --- the table --------------------------------------------------------------------------------

def middle(rows, *keys):
    """The median over the windows, of the i-th of two quantiles where the last key is a number."""
    found = []
    for value in rows:
        for key in keys:
            value = value[key]
        found.append(value)
    found = [v for v in found if v is not None]
    return statistics.median(found) if found else None


def percent(value, of):
    return f"{100 * value / of:.0f} %" if value is not None and of else "-"


def figure(value):
    return "-" if value is None else f"{value:.1f}"


def table(args, rows):
    about = """date -u +%FT%TZ; nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | sort | uniq -c
        echo "commit $(cat "$0/commit" || git -C "$0" describe --always --dirty)" """
    said = subprocess.run(["sh", "-c", about, args.bundle], check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout
    model = f"{args.servers} servers of {args.model} ({args.parameters / 1e9:.2f}e9 parameters)"
    lines = [", ".join([*(" ".join(line.split()) for line in said.splitlines()), model]), "",
             f"A case is the requests in flight on the GPU, of {args.cases_said}. Medians of {args.rounds} windows of {args.seconds} s at most.", ""]
    windows = collections.defaultdict(list)
    for r in rows:
        if "case" in r:
            windows[r["gpu"], r["case"], r["way"]].append(r)
    # All ways of a case ran on the same GPU. One server may have had that load on others, too, to compare others with.
    at = {}
    for (gpu, case, way), of in sorted(windows.items(), key=lambda w: len({way for gpu, case, way in windows if (gpu, case) == w[0][:2]})):
        if case in args.cases:
            at[case, way] = gpu, of
    ways = [w for w in (*WAYS, *args.peers) if any(way == w for _, way in at)]

    def of_alone(case, way, other):
        gpu, of = at.get((case, way), ("", []))
        return percent(middle(of, "tokens_per_s"), middle(windows.get((gpu, other, "alone"), []), "tokens_per_s"))
    lines += ["Tokens per second of all servers together, of one server that has the GPU and all these requests:", "",
              "| case | one, tokens/s | " + " | ".join(ways[1:]) + " |", "|---" * (len(ways) + 1) + "|"]
    for case in args.cases:
        cells = [figure(middle(at.get((case, "alone"), ("", []))[1], "tokens_per_s")), *(of_alone(case, w, case) for w in ways[1:])]
        lines.append(f"| {case} | " + " | ".join(cells) + " |")
    lines += ["", "| case | way | tokens/s | of one, all requests | of one, a server's requests | in flight | ITL p50, p99 ms | TTFT p50, p99 ms | each server: tokens/s (ITL p50, p99; TTFT p50, p99) |",
              "|---" * 9 + "|"]
    for case in args.cases:
        for way in ways:
            of = at.get((case, way), ("", []))[1]
            if not of:
                continue

            def pair(i=None, of=of):
                from_ = of if i is None else [r["servers"][i] for r in of]
                return [", ".join(figure(middle(from_, key, k)) for k in (0, 1)) for key in ("itl_ms", "ttft_ms")]
            each = "; ".join(f"{figure(middle(of, 'servers', i, 'tokens_per_s'))} ({'; '.join(pair(i))})" for i in range(len(of[0]["servers"])))
            alone = "-" if way == "alone" or "p" in case else of_alone(case, way, own(case, args.servers))
            lines.append(f"| {case} | {way} | {figure(middle(of, 'tokens_per_s'))} | {of_alone(case, way, case)} | {alone} | {figure(middle(of, 'in_flight'))} | "
                         + " | ".join(pair()) + f" | {each if way != 'alone' else ''} |")
    failed = sum(r.get("failed", 0) for r in rows)
    lines += ["", *(f"- {way}: `{words}`" for way, words in args.peers.items()),
              *(f"- {r['way']} failed: {r['error']}" for r in rows if "error" in r), *[f"- {failed} requests failed"] * (failed > 0)]
    return "\n".join(lines).rstrip() + "\n"


def processors(args):
    """Each server has processors of its own, in each way the same; the client and the schedulers have a quarter of all."""
    have = sorted(os.sched_getaffinity(0))
    ours = len(have) // 4
    each = (len(have) - ours) // args.servers
    if not ours or not each:
        return [set(have)] * args.servers
    os.sched_setaffinity(0, have[:ours])
    return [set(have[ours + i * each:ours + (i + 1) * each]) for i in range(args.servers)]


def gpus_of(text):
    """The UUIDs of the GPUs that were asked for; nothing: the one that a program sees first."""
    if not text.isdigit():
        return text.split(",")
    listed = subprocess.run(["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"], check=True, text=True, stdout=subprocess.PIPE).stdout if text != "1" else ""
    return listed.split()[:int(text)] or [""]


def on_each(args, gpus, words):
    """A run on each GPU, of some of the cases, with some of the processors."""
    have, runs = sorted(os.sched_getaffinity(0)), []
    each = max(1, len(have) // len(gpus))
    parts = [*args.cases, *["memory"] * ("memory" in args.ways)]
    for i, gpu in enumerate(gpus):
        mine = parts[i::len(gpus)]
        cases = [c for c in mine if c != "memory"]
        ways = [w for w in args.ways if w != "memory" or "memory" in mine]
        if mine:
            # With memory alone a run has nothing else to do.
            more = ["--cases", ",".join(cases or args.some), "--ways", ",".join(ways if cases else [w for w in ways if w in ("alone", "memory")]),
                    "--gpus", gpu, "--child"]
            own_part = set(have[i * each:(i + 1) * each] or have)
            runs.append((i, subprocess.Popen([sys.executable, os.path.abspath(__file__), f"{args.results}/gpu-{i}", *words, *more],
                                             preexec_fn=lambda part=own_part: os.sched_setaffinity(0, part))))
    try:
        ended = [p.wait() for _, p in runs]
    finally:
        for _, p in runs:
            p.terminate()
            p.wait()
    rows = []
    for i, _ in runs:
        for file in pathlib.Path(f"{args.results}/gpu-{i}").glob("servers.[jm]*"):   # what is left is the log
            rows += [json.loads(line) for line in file.read_text().splitlines()] if file.suffix == ".jsonl" else []
            file.unlink()
    pathlib.Path(f"{args.results}/servers.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    args.parameters = max((r.get("parameters", 0) for r in rows), default=0)
    return rows, max(ended)


def peer(text):
    """The way of a peer, and what stands before its servers' commands."""
    name, named, words = text.partition("=")
    if "/" in name or not named:
        name, words = os.path.basename(text), f"LD_PRELOAD={shlex.quote(text)}"
    if not re.fullmatch(r"[\w.+-]+", name) or not shlex.split(words):
        raise argparse.ArgumentTypeError(f"{text}: neither a library nor NAME=WORDS")
    for word in shlex.split(words):   # of a library that is not there the loader only complains
        if word.startswith("LD_PRELOAD=") and not os.path.exists(word.partition("=")[2]):
            raise argparse.ArgumentTypeError(f"{word}: no such file")
    return f"peer {name}", words


def options(argv):
    parser = argparse.ArgumentParser(usage=__doc__, allow_abbrev=False)
    parser.add_argument("results", nargs="?", default="results")
    parser.add_argument("--cases", default="2,8,32,8p,16s", help="default %(default)s")
    parser.add_argument("--some", default="8", help=f"the cases of {', '.join(SOME)}; default %(default)s")
    parser.add_argument("--ways", default=",".join(WAYS), help="default %(default)s; and each peer")
    parser.add_argument("--servers", type=int, default=2, metavar="N")
    parser.add_argument("--model", default="llama-1b", help="llama-1b, qwen-1.7b, qwen-4b; tiny; spin: no model, for the simulated GPU")
    parser.add_argument("--peer", action="append", default=[], type=peer, metavar="PEER", help="a library, or NAME=WORDS; may be repeated")
    parser.add_argument("--rounds", type=int, default=2, help="windows of each case and way; default %(default)s")
    parser.add_argument("--seconds", type=float, default=4, help="of a window; default %(default)s")
    parser.add_argument("--lead", type=float, default=1.3, help="seconds of load before a window; default %(default)s")
    parser.add_argument("--settle", type=float, default=1, help="times as long as usual may a scheduler take to know its tenants")
    parser.add_argument("--minutes", type=float, default=8.6, help="begin no window that begins later; default %(default)s")
    parser.add_argument("--limit", type=int, default=30, help="percent, of the way limit; default %(default)s")
    parser.add_argument("--memory", type=int, default=12 << 10, metavar="MIB", help="of the GPU as it looks, of the way memory; default %(default)s")
    parser.add_argument("--promised", type=float, default=1.5, metavar="TIMES", help="as much memory as the GPU has by all servers of the way memory; default %(default)s")
    parser.add_argument("--scale", type=float, default=1, help="of the length of prompts and answers")
    parser.add_argument("--gpus", default="1", help="a number of GPUs, or UUIDs: with several each runs some of the cases")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)   # cpu: to try a tiny model
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--bundle", default=HERE, help="the unpacked bundle, or a build directory")
    args = parser.parse_args(argv)
    args.cases, args.some, args.ways = args.cases.split(","), args.some.split(","), args.ways.split(",")
    args.peers = dict(args.peer)
    if not args.child:
        args.ways += args.peers
    if wrong := [w for w in args.ways if w not in WAYS and w not in args.peers] or [c for c in args.cases + args.some if not re.fullmatch(r"[1-9]\d*[ps]{0,2}", c)]:
        parser.error(f"{wrong[0]}: no such way or case")
    args.bundle, args.results, args.parameters = os.path.abspath(args.bundle), os.path.abspath(args.results), 0
    return args


def main():
    args = options(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.makedirs(args.results, exist_ok=True)
    gpus = gpus_of(args.gpus)
    args.cases_said = " and ".join(f"{int(i * args.scale)} tokens of prompt and {int(o * args.scale)} of answer ({what})" for (i, o), what in ((LONG, "long"), (SHORT, "s: short")))
    if len(gpus) > 1:
        words = sys.argv[1:]
        if words and not words[0].startswith("-"):
            words = words[1:]
        rows, status = on_each(args, gpus, words)
    else:
        args.gpu = gpus[0]
        cases = [Case(c, args) for c in args.cases + args.some]
        args.spans = sorted({max(map(len, c.prompts)) + c.output + 127 & ~127 for c in cases})
        most = max(c.load for c in cases)
        # Requests may come unevenly; and the first server, in each way the same, is also the one that has the GPU.
        args.slots = max(1, most * 3 // 2 // args.servers), most
        args.parts = processors(args)
        with open(f"{args.results}/servers.log", "w") as log:
            run = Run(args, log)
            run.run()
        rows, status = run.rows, int(bool(run.failed) or any(r.get("failed") for r in run.rows))
    text = table(args, rows)
    pathlib.Path(f"{args.results}/servers.md").write_text(text)
    if not args.child:
        print(text)
    sys.exit(status)


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        from loads import server
        asyncio.run(server.serve(sys.argv[2:]))
    else:
        main()
