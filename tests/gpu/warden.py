#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""warden.py: what nvshare-scheduler and nvshare-warden do to programs without a shim, on a real GPU.

usage: warden.py RESULTS [--orders] [--busy CUDA-BUSY]

As root, on a host with PyTorch and nobody else on its GPU. Programs that multiply matrices, also in CUDA
graphs, one that works as a decoder does, and some without CUDA (OpenGL, Vulkan) run as users of their own with nothing of nvshare in them. A
scheduler, which finds them by NVML, and a warden hold them: time slices, turns, core limits, short requests
beside them (and beside the same program with the shim), a fence of a program with the shim, and a memory
limit. It prints a table and writes RESULTS/warden.json, in five minutes. With --orders it gives the warden orders itself instead, and kills it while a process is
off. With --busy the programs are tests/workload/cuda-busy, on the simulated GPU.
"""
import argparse
import ctypes
import importlib
import json
import os
import platform
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback

N, AHEAD, US_OF_DRIVER = 8192, 8, 2000
LIMIT, PERIOD = 0.30, 0.100
WITHOUT_CUDA = ("picture", "vulkan")


CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 1, 2


def become(uid):
    """The process is a user's from now on, and can use PyTorch's files and the GPU's still."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(8, 1, 0, 0, 0)  # PR_SET_KEEPCAPS
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    caps = 1 << CAP_DAC_OVERRIDE | 1 << CAP_DAC_READ_SEARCH
    libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(caps, caps, caps, 0, 0, 0))
    for c in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
        libc.prctl(47, 2, c, 0, 0)  # PR_CAP_AMBIENT_RAISE: also after exec
    libc.prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE
    os.environ["HOME"] = "/tmp"


def say(event, **more):
    print(json.dumps({"event": event, **more}), flush=True)


def worker(kind, uid, command):
    if kind == "exec":
        become(uid)
        os.execv(command[0], command)
    if kind not in WITHOUT_CUDA:
        import torch
    if uid:
        become(uid)
    say("loaded")
    sys.stdin.readline()
    if kind in WITHOUT_CUDA:
        load = importlib.import_module("loads." + kind)
        try:
            name, step = load.begin()
        except load.Gone as e:
            return say("gone", why=str(e))
        say("renderer", name=name)
    elif kind == "present":
        torch.zeros(1, device="cuda").item()
        say("ready")
        return sys.stdin.read()
    elif kind == "hog":
        torch.zeros(1, device="cuda").item()
        say("ready")
        held = [torch.ones(256 << 20, device="cuda", dtype=torch.uint8) for _ in range(16)]
        torch.cuda.synchronize()
        say("progress", launches=len(held))
        time.sleep(600)
    else:
        step = {"gemm": gemm, "graph": replay, "decoder": decoder}[kind](torch)
    for _ in range(3):
        step()
    say("ready")
    n = 0
    while True:
        n += step()
        say("progress", launches=n)


def ahead(torch, submit):
    """A step that submits, waits for what was submitted AHEAD steps before, and returns how much of that has ended."""
    pending = []

    def step():
        submit()
        e = torch.cuda.Event()
        e.record()
        pending.append(e)
        if len(pending) < AHEAD:
            return 0
        pending.pop(0).synchronize()
        return 1
    return step


def gemm(torch):
    """Some products are always ahead of the GPU. All is zero: the power limit then holds no clock down."""
    a, b = (torch.zeros(N, N, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    c = torch.empty_like(a)
    return ahead(torch, lambda: torch.matmul(a, b, out=c))


def replay(torch):
    """The same as gemm, but what is ahead is graphs of eight smaller products."""
    a, b = (torch.zeros(N // 2, N // 2, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    c = torch.empty_like(a)
    torch.matmul(a, b, out=c)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(8):
            torch.matmul(a, b, out=c)
    return ahead(torch, graph.replay)


def decoder(torch):
    """A token is some short kernels one after the other, which read all weights, and the host waits for each token."""
    weights = [torch.zeros(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(24)]
    state = [torch.zeros(1, 8192, device="cuda", dtype=torch.bfloat16)]

    def step():
        x = state[0]
        for w in weights:
            x = torch.tanh(x @ w)
        state[0] = x
        x.sum().item()
        return 1
    return step


class Busy:
    """A process that uses the GPU, and when it got on."""

    def __init__(self, name, busy):
        command = [sys.executable, os.path.abspath(__file__), "worker", "gemm", "0"]
        if busy:
            command = [busy, "--report-ms", "2", "--depth", "4", "--kernel-us", "1000", "--tenant", name]
        self.simulated, self.samples, self.ready = bool(busy), [], threading.Event()
        env = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
        self.p = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.p.stdout:
            now = time.monotonic()
            try:
                v = json.loads(line)
            except ValueError:
                print(line, end="")
                continue
            if v["event"] == "ready":
                self.ready.set()
            elif v["event"] == "progress":
                self.samples.append((now, v["launches"]))

    def go(self):
        if not self.simulated:
            self.p.stdin.write("\n")
            self.p.stdin.flush()
        wait(self.ready, 120, "a process works")

    def at(self, t):
        s = self.samples
        lo, hi = 0, len(s)
        while lo < hi:
            mid = (lo + hi) // 2
            if s[mid][0] <= t:
                lo = mid + 1
            else:
                hi = mid
        return s[lo - 1][1] if lo else 0

    def rate(self, begin, end):
        return round((self.at(end) - self.at(begin)) / (end - begin), 1)

    def resumes(self, since, limit):
        """How long after a time it got on again, in seconds; None: it did not."""
        while time.monotonic() < since + limit:
            later = [t for t, _ in self.samples[-500:] if t > since]
            if later:
                return round(later[0] - since, 4)
            time.sleep(0.001)
        return None

    def stands(self, seconds):
        """Whether it makes no progress for so long, from now on."""
        n = len(self.samples)
        time.sleep(seconds)
        return len(self.samples) == n


class Warden:
    def __init__(self, program, directory, log):
        self.command, self.dir, self.log = [program, "--dir", directory], directory, log
        self.start()

    def start(self):
        began = time.monotonic()
        self.p = subprocess.Popen(self.command, stdout=self.log, stderr=self.log)
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(10)
        while True:
            try:
                self.sock.connect(self.dir + "/warden.sock")
                break
            except OSError:
                if self.p.poll() is not None or time.monotonic() > began + 20:
                    raise
                time.sleep(0.001)
        self.id = 0
        return time.monotonic() - began

    def do(self, *orders):
        self.id += 1
        self.sock.send(json.dumps({"id": self.id, "orders": list(orders)}).encode())
        reply = json.loads(self.sock.recv(1 << 16))
        if reply.get("error") or reply["id"] != self.id:
            raise RuntimeError(reply)
        return reply["results"]

    def must(self, *orders):
        results = self.do(*orders)
        for o, r in zip(orders, results):
            if r.get("error"):
                raise RuntimeError(f"{o}: {r['error']}")
        return results

    def guard(self):
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/cmdline", "rb") as f:
                    words = f.read().split(b"\0")
                with open(f"/proc/{pid}/stat") as f:
                    parent = int(f.read().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
            if b"--guard" in words and self.dir.encode() in words and parent == self.p.pid:
                return int(pid)
        return None

    def ended(self, sig):
        self.p.send_signal(sig)
        self.p.wait()
        self.sock.close()


def order(op, pid, **more):
    return {"op": op, "pid": pid, **more}


def middle(values):
    return {"p50": round(statistics.median(values), 3), "max": round(max(values), 3), "n": len(values)}


class Clocks:
    """The clocks of the GPU that CUDA calls the first, by NVML, 50 times a second: of its processors (SM), and of its memory, in MHz."""

    def __init__(self):
        self.samples = []
        try:
            self.nvml = ctypes.CDLL("libnvidia-ml.so.1")
            self.clock = self.nvml.nvmlDeviceGetClockInfo
        except (OSError, AttributeError):   # the simulated GPU has no clocks
            return
        self.gpu, first = ctypes.c_void_p(), os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        by = self.nvml.nvmlDeviceGetHandleByUUID if first.startswith("GPU-") else self.nvml.nvmlDeviceGetHandleByIndex_v2
        if self.nvml.nvmlInit_v2() == 0 and by(first.encode() if first.startswith("GPU-") else int(first), ctypes.byref(self.gpu)) == 0:
            threading.Thread(target=self.look, daemon=True).start()

    def look(self):
        mhz = [ctypes.c_uint(), ctypes.c_uint()]
        while True:
            for kind, to in zip((1, 2), mhz):   # NVML_CLOCK_SM, NVML_CLOCK_MEM
                self.clock(self.gpu, kind, ctypes.byref(to))
            self.samples.append((time.monotonic(), *[x.value for x in mhz]))
            time.sleep(0.02)

    def since(self, t):
        got = [s[1:] for s in self.samples if s[0] >= t]
        return {k: round(statistics.mean(v)) for k, v in zip(("sm", "memory"), zip(*got))} if got else {}


def window(seconds):
    time.sleep(0.3)
    begin = time.monotonic()
    time.sleep(seconds)
    return begin, time.monotonic()


class Steps:
    def __init__(self, args):
        os.makedirs(args.results, exist_ok=True)
        self.args, self.found = args, {}
        self.log = open(os.path.join(args.results, "warden.log"), "a")
        self.a, self.b = Busy("a", args.busy), Busy("b", args.busy)

    def save(self):
        with open(os.path.join(self.args.results, "warden.json"), "w") as f:
            json.dump(self.found, f, indent=1)

    def host(self):
        def text(path):
            try:
                with open(path) as f:
                    return f.read().strip()
            except OSError as e:
                return str(e)
        caps = [x for x in text("/proc/self/status").splitlines() if x.startswith(("CapEff", "NoNewPrivs", "Seccomp:"))]
        return {"kernel": platform.release(), "driver": text("/sys/module/nvidia/version"), "caps": caps,
                "ptrace_scope": text("/proc/sys/kernel/yama/ptrace_scope"), "node": os.path.exists("/dev/nvidiactl")}

    def start(self):
        self.directory = tempfile.mkdtemp(prefix="warden-")
        self.w = Warden(self.args.warden, self.directory, self.log)
        self.a.go()
        return {"guard": self.w.guard(), "a": self.a.p.pid, "b": self.b.p.pid}

    def look(self):
        r = subprocess.run([self.args.warden, "look", str(self.a.p.pid)], capture_output=True, text=True, timeout=20)
        print(r.stdout, r.stderr)
        took = [self.w.do(order("state", self.a.p.pid))[0] for _ in range(10)]
        return {"look": r.stdout[-6000:], "first": took[0], "took_ms": middle([t["took_ns"] / 1e6 for t in took[1:]])}

    def alone(self):
        self.alone_rate = self.a.rate(*window(4))
        return self.alone_rate

    def native(self):
        self.b.go()
        t = window(4)
        return self.both(t)

    def both(self, t):
        got = [self.a.rate(*t), self.b.rate(*t)]
        return {"products_per_s": got, "of_alone": round(sum(got) / self.alone_rate, 4)}

    def slices(self):
        found = {}
        for us in (20000, 50000, US_OF_DRIVER):
            r = self.w.must(order("slice", self.a.p.pid, us=us), order("slice", self.b.p.pid, us=us))
            found[us] = {**self.both(window(4)), "took_ms": [x["took_ns"] / 1e6 for x in r],
                         "read_back": [x["slice_us"] for x in self.w.must(order("state", self.a.p.pid), order("state", self.b.p.pid))]}
        return found

    def switch(self):
        """Off and on of one beside the other."""
        off, on, held = [], [], []
        for _ in range(40):
            off.append(self.w.must(order("off", self.a.p.pid))[0]["took_ns"] / 1e6)
            n = self.a.at(time.monotonic())
            time.sleep(0.03)
            held.append(self.a.at(time.monotonic()) - n)
            on.append(self.w.must(order("on", self.a.p.pid))[0]["took_ns"] / 1e6)
            time.sleep(0.02)
        return {"off_ms": middle(off), "on_ms": middle(on), "progress_while_off": middle(held)}

    def other(self):
        """While one is off the other has all."""
        self.w.must(order("off", self.a.p.pid))
        begin = time.monotonic() + 0.1
        for _ in range(8):
            time.sleep(0.25)
            self.w.must(order("off", self.a.p.pid))
        got = self.b.rate(begin, time.monotonic())
        self.w.must(order("on", self.a.p.pid))
        return {"products_per_s": got, "of_alone": round(got / self.alone_rate, 4)}

    def limit(self):
        """One process alone, by the account of sched/held: the time on earns a debt, and the time
        that the orders take is on."""
        self.b.p.kill()
        self.b.p.wait()
        base = self.a.rate(*window(3))
        self.alone_rate = base
        pid, parts, late, off, on = self.a.p.pid, [], [], [], []
        full = PERIOD * LIMIT * (1 - LIMIT)
        at = time.monotonic()
        balance = 0
        for _ in range(4):
            begin = time.monotonic()
            while time.monotonic() < begin + 5:
                until = time.monotonic() + max(balance / (1 - LIMIT), 0)
                time.sleep(max(0, until - time.monotonic()))
                late.append((time.monotonic() - until) * 1e3)
                off.append(self.w.must(order("off", pid, again=True))[0]["took_ns"] / 1e6)
                now = time.monotonic()
                balance, at = balance - (1 - LIMIT) * (now - at), now
                time.sleep((full - balance) / LIMIT)
                now = time.monotonic()
                balance, at = min(balance + LIMIT * (now - at), 1.5 * full), now
                on.append(self.w.must(order("on", pid))[0]["took_ns"] / 1e6)
            parts.append(round(self.a.rate(begin, time.monotonic()) / base, 4))
        self.w.must(order("on", pid))
        return {"alone": base, "parts": parts[1:], "late_ms": middle(late), "off_ms": middle(off), "on_ms": middle(on)}

    def off(self):
        self.w.must(order("off", self.a.p.pid))
        time.sleep(0.2)  # what was under way is read
        return time.monotonic()

    def again(self):
        """Taken off four times, and put on once."""
        t = self.off()
        for _ in range(3):
            self.w.must(order("off", self.a.p.pid, again=True))
        still = self.a.stands(0.3)
        t = time.monotonic()
        self.w.must(order("on", self.a.p.pid))
        return {"stood_still": still, "resumed_s": self.a.resumes(t, 3)}

    def lease(self):
        began = time.monotonic()
        self.off()
        return {"resumed_s": self.a.resumes(began + 0.2, 5), "after": "plus 0.2 s of off"}

    def scheduler_ends(self):
        t = self.off()
        self.w.sock.close()
        got = self.a.resumes(t, 5)
        self.w.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.w.sock.settimeout(10)
        self.w.sock.connect(self.directory + "/warden.sock")
        return {"resumed_s": got}

    def warden_killed(self):
        found = []
        for _ in range(3):
            t = self.off()
            self.w.ended(signal.SIGKILL)
            found.append(self.a.resumes(t, 5))
            self.w.start()
        return {"resumed_s": found}

    def warden_hangs(self):
        t = self.off()
        self.w.p.send_signal(signal.SIGSTOP)
        got = self.a.resumes(t, 5)
        self.w.p.send_signal(signal.SIGCONT)
        return {"resumed_s": got}

    def terminated(self):
        t = self.off()
        self.w.ended(signal.SIGTERM)
        got = self.a.resumes(t, 5)
        self.w.start()
        return {"resumed_s": got}

    def guard_killed(self):
        t = self.off()
        os.kill(self.w.guard(), signal.SIGKILL)
        got = self.a.resumes(t, 5)
        time.sleep(0.3)
        return {"resumed_s": got, "another": self.w.guard() is not None}

    def both_killed(self):
        self.off()
        os.kill(self.w.guard(), signal.SIGSTOP)  # so that it does not act in between
        guard = self.w.guard()
        self.w.p.kill()
        os.kill(guard, signal.SIGKILL)
        self.w.p.wait()
        still = self.a.stands(1.5)
        t = time.monotonic()
        ready = self.w.start()
        return {"stood_still": still, "resumed_s": self.a.resumes(t, 5), "started_s": round(ready, 3)}

    def end(self):
        rate = self.a.rate(*window(2))
        self.w.ended(signal.SIGTERM)
        return {"alone_at_the_end": rate, "of_alone": round(rate / self.alone_rate, 4)}

    def run(self):
        began, failed = time.monotonic(), []
        names = ("host", "start", "look", "alone", "native", "slices", "switch", "other", "limit", "again", "lease", "scheduler_ends",
                 "warden_killed", "warden_hangs", "terminated", "guard_killed", "both_killed", "end")
        for name in names:
            try:
                self.found[name] = getattr(self, name)()
            except Exception as e:
                traceback.print_exc(file=sys.stdout)
                self.found[name] = {"failed": repr(e)}
                failed.append(name)
            shown = {k: v for k, v in self.found[name].items() if k != "look"} if isinstance(self.found[name], dict) else self.found[name]
            print(f"{time.monotonic() - began:6.1f} {name}: {json.dumps(shown)}", flush=True)
            self.save()
        for x in (self.a, self.b):
            x.p.kill()
        kernel = subprocess.run(["dmesg"], capture_output=True, text=True).stdout.splitlines()
        lines = [x for x in kernel if "NVRM" in x]
        self.found["kernel_log"] = {"lines": len(lines), "last": lines[-8:]}
        self.save()
        print(json.dumps(self.found["kernel_log"], indent=1))
        self.log.close()
        with open(os.path.join(self.args.results, "warden.log")) as f:
            print(f.read()[-6000:])
        if failed:
            sys.exit(f"failed: {', '.join(failed)}")


def as_user(uid, *command):
    return [sys.executable, os.path.abspath(__file__), "worker", "exec", str(uid), *command]


class Program:
    """A program of a user, without the shim but where more says so. It begins to use the GPU with go."""
    simulated = {"gemm": ["--kernel-us", "1000", "--depth", "8"], "graph": ["--kernel-us", "1000", "--depth", "8", "--mode", "graph"], "decoder": ["--kernel-us", "300", "--depth", "2"],
                 "hog": ["--kernel-us", "1000", "--mem-mib", "1400"]}

    def __init__(self, kind, uid, args, **more):
        self.kind, self.uid, self.args, self.more = kind, uid, args, more
        self.samples, self.is_loaded, self.is_ready, self.p = [], threading.Event(), threading.Event(), None
        self.gone = self.renderer = None
        if not args.busy:
            self.start([sys.executable, os.path.abspath(__file__), "worker", kind, str(uid)], {})

    def start(self, command, more):
        env = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
        self.p = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**env, **self.args.env, "PYTHONUNBUFFERED": "1", **self.more}, **more)
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.p.stdout:
            now = time.monotonic()
            try:
                v = json.loads(line)
            except ValueError:
                print(line, end="")
                continue
            if v["event"] == "loaded":
                self.is_loaded.set()
            elif v["event"] == "ready":
                self.is_ready.set()
            elif v["event"] == "gone":
                self.gone = v["why"]
                self.is_ready.set()
            elif v["event"] == "renderer":
                self.renderer = v["name"]
            elif v["event"] == "progress":
                self.samples.append((now, v["launches"]))
                if self.args.busy:
                    self.is_ready.set()

    def go(self):
        if self.args.busy:
            self.start([self.args.busy, "--report-ms", "2", "--tenant", self.kind] + self.simulated[self.kind], {"user": self.uid, "group": self.uid, "extra_groups": []})
        else:
            wait(self.is_loaded, 120, "PyTorch is loaded")
            self.p.stdin.write("\n")
            self.p.stdin.flush()
        wait(self.is_ready, 60, f"the {self.kind} program works")
        return self

    at, rate = Busy.at, Busy.rate

    def end(self):
        self.p.kill()
        self.p.wait()


def wait(event, seconds, what):
    if not event.wait(seconds):
        raise RuntimeError(f"not within {seconds} s: {what}")


class Scheduled:
    """The steps. Each begins with what the one before has left."""
    first, second, third, hoarder = 23001, 23002, 23003, 23004

    def __init__(self, args):
        os.makedirs(args.results, exist_ok=True)
        os.chmod(args.results, 0o755)
        self.args, self.found, self.rows, self.failed = args, {}, [], []
        self.log = open(os.path.join(args.results, "warden.log"), "a")
        self.dir = tempfile.mkdtemp(prefix="warden-")
        os.chmod(self.dir, 0o755)
        self.env = {**os.environ, "NVSHARE_RUN_DIR": self.dir + "/run", "NVSHARE_WARDEN_DIR": self.dir + "/warden"}
        args.env = {}
        if args.busy:
            args.env = {k: os.environ[k] for k in ("NVSHARE_SIMGPU_DIR", "LD_LIBRARY_PATH") if k in os.environ}
        self.daemons = []

    def row(self, what, got, want, ok):
        self.rows.append((what, got, want, "ok" if ok else "MISSED"))
        print(f"{time.monotonic() - self.began:6.1f} {what}: {got} (wanted: {want})", flush=True)

    def program(self, name):
        return subprocess.Popen(name, env=self.env, stdout=self.log, stderr=self.log)

    def ctl(self, *words, ok=True):
        r = subprocess.run([self.args.ctl, *words], env=self.env, capture_output=True, text=True, timeout=20)
        if ok and r.returncode > 1:
            raise RuntimeError(f"nvsharectl {' '.join(words)}: {r.stdout} {r.stderr}")
        return r.stdout

    def status(self):
        try:
            return json.loads(self.ctl("status", "-o", "json"))
        except (ValueError, RuntimeError) as e:  # it has just begun
            self.last = str(e)
            return {"gpus": [], "problems": [str(e)]}

    def client(self, pid, held=True):
        for g in self.status()["gpus"]:
            for c in g["clients"]:
                if c["pid"] == pid and bool(c.get("held")) == held:
                    return {**c, "way": g["way"], "why": g["way_reason"]}
        return None

    def until(self, what, seconds, ok):
        end = time.monotonic() + seconds
        while True:
            got = ok()
            if got:
                return got
            if time.monotonic() > end:
                raise RuntimeError(f"not within {seconds} s: {what}\n{json.dumps(self.status())[:3000]}")
            time.sleep(0.1)

    def scheduler(self, *flags):
        s = self.program([self.args.scheduler, "--warden", self.dir + "/warden/warden.sock", *(["--simgpu", self.args.sim] if self.args.busy else []), *flags])
        self.daemons.append(s)
        self.until("the scheduler has found a GPU, and the warden", 30, lambda: [g for g in self.status()["gpus"]] and "is connected" in open(self.log.name).read())
        return s

    def set(self, uid, *terms):
        self.ctl("set", "--user", str(uid), *terms)

    def window(self, p, seconds):
        t = time.monotonic()
        time.sleep(seconds)
        rate = p.rate(t, time.monotonic())
        p.clocks = self.clocks.since(t)
        return rate

    def load(self):
        """All load PyTorch at once, before they are needed."""
        self.decoder, self.later = (Program("decoder", self.second, self.args) for _ in range(2))
        self.a, self.b, self.e = Program("gemm", self.first, self.args), Program("gemm", self.second, self.args), Program("gemm", self.third, self.args)
        self.graphs = [Program("graph", uid, self.args) for uid in (self.first, self.third)]
        self.without_cuda = {} if self.args.busy else {kind: [Program(kind, uid, self.args) for uid in (self.first, self.third)] for kind in WITHOUT_CUDA}
        self.shimmed = [Program("gemm", self.third, self.args, LD_PRELOAD=self.args.shim, NVSHARE_RUN_DIR=self.env["NVSHARE_RUN_DIR"]) for _ in range(2)]
        self.beside = Program("gemm", self.first, self.args)
        self.again = Program("gemm", self.first, self.args)
        self.turning = [Program("gemm", uid, self.args) for uid in (self.first, self.third)]
        self.hog = Program("hog", self.hoarder, self.args)
        self.clocks = Clocks()
        return {p.kind: p.p and p.p.pid for p in (self.decoder, self.a, self.hog)}

    def alone(self):
        """Without nvshare: each alone, and two by the driver."""
        self.decoder.go()
        self.decoder_alone = self.window(self.decoder, 3)
        self.decoder.end()
        self.a.go()
        self.gemm_alone = self.window(self.a, 3)
        self.gemm_clocks = self.a.clocks
        self.b.go()
        t = time.monotonic()
        time.sleep(3)
        both = self.a.rate(t, time.monotonic()) + self.b.rate(t, time.monotonic())
        return {"decoder": self.decoder_alone, "gemm": self.gemm_alone, "two gemm, by the driver": round(both / self.gemm_alone, 4)}

    def start(self):
        self.daemons.append(self.program([self.args.warden, "--dir", self.dir + "/warden", *(["--simgpu", self.args.sim] if self.args.busy else [])]))
        self.now = self.scheduler("--anti-thrash", "auto")
        for uid in (self.first, self.second, self.third):
            self.set(uid, "--weight", "100")
        t = time.monotonic()
        held = [self.until(f"{p.kind} is held", 20, lambda p=p: self.client(p.p.pid)) for p in (self.a, self.b)]
        took = round(time.monotonic() - t, 2)
        if self.args.steps and "slices" not in self.args.steps:   # these work for the first steps
            self.a.end()
            self.b.end()
        return {"held_after_s": took, "held": [c["held"] for c in held]}

    def slices(self):
        """Two share by time slices, which grow."""
        return self.by_slices(self.a, self.b, self.gemm_alone, "GEMM")[0]

    def by_slices(self, a, b, alone, what):
        """The second one is ended, and what the first does alone is measured again."""
        since = 0

        def long():
            c = [self.client(p.p.pid) for p in (a, b)]
            nonlocal since
            grown = all(c) and all(x["way"] == "slices" and x["slice_seconds"] >= 0.045 for x in c)
            since = (since or time.monotonic()) if grown else 0
            return grown and time.monotonic() - since > 5 and c   # between them the driver's are compared with
        t = time.monotonic()
        try:
            c = self.until("the slices are long", 60, long)
        except RuntimeError as e:
            print(e, flush=True)
            c = [self.client(p.p.pid) or {} for p in (a, b)]
        took = round(time.monotonic() - t, 1)
        parts = []
        for _ in range(2):
            t = time.monotonic()
            time.sleep(5)
            parts.append([a.rate(t, time.monotonic()), b.rate(t, time.monotonic())])
        b.end()
        time.sleep(1.5)
        again = self.window(a, 3)
        base = (alone + again) / 2
        best = max(sum(p) for p in parts) / base
        self.row(f"two {what} by time slices, of one alone", f"{100 * best:.1f} %", ">= 99.5 %", best >= 0.995)
        return {"long_after_s": took, "way": c[0].get("way"), "why": c[0].get("why"), "slices_s": [x.get("slice_seconds") for x in c], "products_per_s": parts, "alone": [alone, again], "of_alone": round(best, 4)}, again

    def limited(self, p, alone, clocks, where=""):
        """Alone and its clocks are of the same program without a limit. A GPU that rests most of the time has a higher clock, and
        one without a CUDA context a lower one, so work is compared by the clock that the program depends on."""
        by = "memory" if p.kind == "decoder" else "sm"
        self.set(p.uid, "--core-limit", str(round(100 * LIMIT)))
        self.until("it is limited", 20, lambda: self.window(p, 0.5) < 0.6 * alone)
        time.sleep(1)
        before = self.client(p.p.pid)
        parts, seen = [], []
        for _ in range(2):
            parts.append(round(self.window(p, 5) / alone, 4))
            seen.append(p.clocks)
        c = self.client(p.p.pid)
        self.set(p.uid, "--core-limit", "none")
        on = re.search(r"on for ([0-9.]+) %", c["held"]) if c else None
        same = [round(x * clocks[by] / now[by], 4) if now.get(by) else x for x, now in zip(parts, seen)]
        ok = all(abs(x - LIMIT) <= 0.01 for x in same) and on and abs(float(on.group(1)) / 100 - LIMIT) <= 0.01
        self.row(f"{p.kind}{where}, core limit 30 %, work in 5 s at the same clock", ", ".join(f"{100 * x:.1f} %" for x in same) + f" (on {on.group(1) if on else '?'} %)", "29 to 31 %; on 29 to 31 %", bool(ok))
        return {"parts": parts, "at the same clock": same, "clocks": [clocks, *seen], "held": c and c["held"], "turns": c and before and c["grants"] - before["grants"]}

    def limit_gemm(self):
        return self.limited(self.a, self.gemm_alone, self.gemm_clocks)

    def requests(self):
        """Short requests of a latency tenant, with the shim, beside a GEMM without the shim and one with it."""
        if self.args.busy:
            return {"not on": "the simulated GPU"}
        self.set(self.second, "--priority", "latency")
        found = {"without the shim": [], "with the shim": []}
        for i, p in enumerate((self.a, self.shimmed[0], self.beside, self.shimmed[1])):
            if i > 0:
                p.go()
                time.sleep(2)  # until one without the shim is held
            t = time.monotonic()
            r = subprocess.run(as_user(self.second, "/usr/bin/env", "LD_PRELOAD=" + self.args.shim, self.args.programs + "/short-request", "0", "9"),
                               env={k: v for k, v in self.env.items() if k != "LD_PRELOAD"}, capture_output=True, text=True, timeout=30)
            rate = p.rate(t, time.monotonic())
            p.end()
            v = json.loads(r.stdout)
            v.pop("percentiles_ms", None)
            found[list(found)[i % 2]].append({**v, "gemm": round(rate / self.gemm_alone, 4)})
        self.set(self.second, "--priority", "batch")
        held, gated = ([v["p99_ms"] for v in one] for one in found.values())
        self.row("short requests beside a GEMM without the shim, p99", f"{held} ms", f"<= {gated} ms, beside one with it", max(held) <= max(gated))
        return found

    def latency(self):
        """The decoder is a latency tenant beside the other."""
        self.set(self.second, "--priority", "latency")
        if not self.args.busy:
            self.a = self.again.go()
        self.later.go()

        def short():
            c = self.client(self.a.p.pid)
            return c and 0 < c["slice_seconds"] <= 60e-6 and c
        c = self.until("its slices are short", 20, short)
        t = time.monotonic()
        time.sleep(4)
        t = (t, time.monotonic())
        found = {"slice_s": c["slice_seconds"], "decoder": round(self.later.rate(*t) / self.decoder_alone, 4), "gemm": round(self.a.rate(*t) / self.gemm_alone, 4)}
        self.row("slice of a GEMM beside a latency decoder", f"{1e6 * c['slice_seconds']:.0f} us", "50 us", True)
        self.set(self.second, "--priority", "batch")
        self.a.end()
        return found

    def limit_decoder(self):
        if not self.later.is_ready.is_set():   # latency was left out
            self.later.go()
        alone = self.window(self.later, 3)   # again: what it does depends on the processor
        found = self.limited(self.later, alone, self.later.clocks)
        found["alone"] = [alone, self.window(self.later, 3)]
        self.later.end()
        return found

    def one(self, p):
        """One with a limit, which is held by then, and what it does alone."""
        alone = self.window(p.go(), 3)
        clocks = p.clocks
        self.until("it is held", 20, lambda: self.client(p.p.pid))
        return self.limited(p, alone, clocks), self.window(p, 3)

    def graph(self):
        """Programs that replay CUDA graphs."""
        a, b = self.graphs
        limit, alone = self.one(a)
        b.go()
        found = self.by_slices(a, b, alone, "graph programs")[0]
        a.end()
        return {"limit": limit, **found}

    def picture(self):
        """Programs that draw with OpenGL."""
        return self.two_without_cuda("picture")

    def vulkan(self):
        """Programs that move memory with Vulkan."""
        return self.two_without_cuda("vulkan")

    def two_without_cuda(self, kind):
        """One with a limit, also beside a process of root's that has a CUDA context and no work; then two in turns. The driver gives
        channels of graphics no groups whose slices can be set."""
        if not self.without_cuda:
            return {"not on": "the simulated GPU"}
        pair = self.without_cuda[kind]
        gone = pair[1].go().gone
        if gone:
            print(f"no {kind} program works: {gone}", flush=True)
            return {"not on this host": gone}
        pair[1].end()
        pair[1], present = Program(kind, self.third, self.args), Program("present", 0, self.args)
        a, b = pair
        try:
            limit, alone = self.one(a)
            present.go()
            time.sleep(1)
            beside = self.limited(a, self.window(a, 3), a.clocks, " beside a CUDA context")
            present.end()
            b.go()
            self.until("both have turns", 20, lambda: all((self.client(p.p.pid) or {}).get("way") == "turns" for p in pair))
            time.sleep(2)
            of = self.in_turns(pair, alone, f"{kind} programs")
            return {"limit": limit, "limit, beside a CUDA context": beside, "alone": alone, **of}
        finally:   # what cannot be held would disturb what follows
            for p in (*pair, present):
                if p.p and p.p.poll() is None:
                    p.end()

    def in_turns(self, pair, alone, what):
        t = time.monotonic()
        time.sleep(8)
        got = [p.rate(t, time.monotonic()) for p in pair]
        of = round(sum(got) / alone, 4)
        self.row(f"two {what} in turns, of one alone", f"{100 * of:.1f} %", ">= 98 %", of >= 0.98)
        return {"per_s": got, "of_alone": of}

    def turns(self):
        """Two GEMM in turns; then two with small kernels, which note when they were on the GPU."""
        self.now.terminate()
        self.now.wait()
        self.now = self.scheduler("--anti-thrash", "on", "--grace", "1s")
        a, b = self.turning
        alone = self.window(a.go(), 3)
        b.go()
        for p in (a, b):
            self.until("it has turns", 20, lambda p=p: (self.client(p.p.pid) or {}).get("way") == "turns")
        time.sleep(2)
        of = self.in_turns((a, b), alone, "GEMM")
        b.end()
        a.end()
        records = tempfile.mkdtemp(prefix="records-")
        os.chmod(records, 0o1777)
        busy = self.args.busy or self.args.programs + "/cuda-busy"
        env = {k: v for k, v in {**os.environ, **self.args.env}.items() if k != "LD_PRELOAD"}
        pair = [subprocess.Popen(as_user(uid, busy, "--kernel-us", "500", "--seconds", "9", "--report-ms", "0", "--tenant", str(uid), "--record", f"{records}/{uid}"),
                                 env=env, stdout=subprocess.DEVNULL) for uid in (self.first, self.third)]
        for p in pair:
            p.wait(40)
        work = []
        for name in os.listdir(records):
            with open(f"{records}/{name}") as f:
                work += [(v["start_ns"], v["end_ns"], v["tenant"]) for v in map(json.loads, f) if "start_ns" in v]
        shutil.rmtree(records)
        work.sort()
        # The first three seconds are the driver's: nobody is held yet.
        work = [w for w in work if w[0] > work[0][0] + 3e9]
        gaps = sorted((b[0] - a[1]) / 1e6 for a, b in zip(work, work[1:]) if a[2] != b[2])
        found = {"alone": alone, **of, "handovers": len(gaps), "overlaps": sum(g < 0 for g in gaps)}
        if gaps:
            found.update({f"p{q}_ms": round(gaps[min(len(gaps) - 1, len(gaps) * q // 100)], 3) for q in (50, 90, 99)})
            self.row("hand-over between two without the shim, p50", f"{found['p50_ms']} ms of {len(gaps)}", "<= 1.5 ms", found["p50_ms"] <= 1.5)
        return found

    def fence(self):
        """A program with the shim is stopped in the middle of its work."""
        busy, env = self.args.busy or self.args.programs + "/cuda-busy", {**self.env, **self.args.env, "LD_PRELOAD": self.args.shim}
        if self.args.busy:
            env["NVSHARE_SIMGPU_RM"] = "hidden"  # there a process that is stopped answers nobody
        self.set(self.third, "--weight", "900")
        x = subprocess.Popen([busy, "--kernel-us", "100000", "--depth", "100" if self.args.busy else "400", "--report-ms", "0", "--tenant", "fenced"], env=env, stdout=subprocess.DEVNULL, stderr=self.log)
        try:
            self.until("it holds the GPU", 20, lambda: (self.client(x.pid, held=False) or {}).get("state") == "holding")
            time.sleep(1)
            if not self.args.busy:
                x.send_signal(signal.SIGSTOP)
            self.e.go()
            c = self.until("it is fenced, and held", 30, lambda: (self.client(x.pid) or {}).get("state") == "fenced" and self.client(x.pid))
            self.until("the other one is held", 20, lambda: self.client(self.e.p.pid))
            time.sleep(1)
            got = round(self.window(self.e, 5) / self.gemm_alone, 4)
            problems = [p for p in self.status()["problems"] if "fenced" in p]
            x.send_signal(signal.SIGCONT)
            self.row("a GEMM (weight 900) beside a fenced program (100)", f"{100 * got:.1f} %", ">= 85 %, and half if it were not held", got >= 0.85)
            found = {"gemm": got, "problems": problems, "held": c.get("held")}
            if not self.args.busy:
                t = time.monotonic()
                self.until("it has released", 30, lambda: (self.client(x.pid, held=False) or {"state": "fenced"})["state"] != "fenced")
                found["released_after_s"] = round(time.monotonic() - t, 2)
            return found
        finally:
            x.kill()
            x.wait()
            self.e.end()

    def out_of_memory(self):
        self.set(self.hoarder, "--memory-limit", "512Mi")
        self.hog.go()
        t = time.monotonic()
        try:
            self.hog.p.wait(20)
        except subprocess.TimeoutExpired:
            pass
        took, code = round(time.monotonic() - t, 2), self.hog.p.returncode
        events = self.ctl("events", "--type", "oom-kill", ok=False).strip().splitlines()
        self.row("4 GiB with a memory limit of 512 MiB", f"killed after {took} s" if code == -signal.SIGKILL else f"ended with {code}", "killed within 3 s", code == -signal.SIGKILL and took < 3)
        return {"after_s": took, "status": code, "events": events[-2:]}

    host = Steps.host

    def run(self):
        self.began = time.monotonic()
        names = ["slices", "limit_gemm", "requests", "latency", "limit_decoder", "graph", "picture", "vulkan", "out_of_memory", "turns", "fence"]
        chosen = self.args.steps.split(",") if self.args.steps else names
        if not set(chosen) <= set(names):
            sys.exit(f"warden.py: --steps are some of {','.join(names)}")
        for name in ["host", "load", "alone", "start"] + [n for n in names if n in chosen]:
            t = time.monotonic()
            try:
                self.found[name] = getattr(self, name)()
            except Exception as e:
                traceback.print_exc(file=sys.stdout)
                self.found[name] = {"failed": repr(e)[:2000]}
                self.failed.append(name)
            print(f"{time.monotonic() - self.began:6.1f} {name} ({time.monotonic() - t:.1f} s): {json.dumps(self.found[name])}", flush=True)
            with open(os.path.join(self.args.results, "warden.json"), "w") as f:
                json.dump({"rows": self.rows, **self.found}, f, indent=1)
        for p in (self.decoder, self.later, self.a, self.b, self.e, self.hog, *self.shimmed, self.beside, self.again, *self.graphs, *sum(self.without_cuda.values(), []), *self.turning):
            if p.p and p.p.poll() is None:
                p.end()
        for d in reversed(self.daemons):
            if d.poll() is None:
                d.terminate()
                d.wait()
        kernel = subprocess.run(["dmesg"], capture_output=True, text=True).stdout.splitlines()
        self.found["kernel_log_lines"] = sum("NVRM" in x for x in kernel)
        self.log.close()
        with open(self.log.name) as f:
            print(f.read()[-4000:])
        width = max(len(r[0]) for r in self.rows) if self.rows else 0
        for what, got, want, ok in self.rows:
            print(f"{what:{width}}  {got:>32}  {want:>20}  {ok}")
        if self.failed:
            sys.exit(f"failed: {', '.join(self.failed)}")


def main():
    if sys.argv[1:2] == ["worker"]:
        return worker(sys.argv[2], int(sys.argv[3]), sys.argv[4:])
    beside = os.path.dirname(os.path.abspath(__file__))
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("results")
    programs = [beside + "/bin/nvshare-warden", beside + "/nvshare-warden"]
    p.add_argument("--orders", action="store_true")
    p.add_argument("--steps", help="only some of the scheduler's steps, separated by commas; limit_decoder and those from graph on need no other")
    p.add_argument("--warden", default=next((x for x in programs if os.path.exists(x)), "nvshare-warden"))
    p.add_argument("--scheduler", default=beside + "/nvml/nvshare-scheduler")
    p.add_argument("--ctl", default=beside + "/bin/nvsharectl")
    p.add_argument("--shim", default=beside + "/lib/libnvshare.so")
    p.add_argument("--programs", default=beside + "/bin")
    p.add_argument("--busy")
    p.add_argument("--sim", help="the directory of the simulated GPU, with --busy")
    args = p.parse_args()
    args.results = os.path.abspath(args.results)
    (Steps if args.orders else Scheduled)(args).run()


if __name__ == "__main__":
    main()
