#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""warden.py: what nvshare-warden does to programs without a shim, on a real GPU.

usage: warden.py RESULTS [--warden PROGRAM] [--busy CUDA-BUSY]

As root. Two processes multiply 8192x8192 bf16 matrices in PyTorch, with nothing of
nvshare in them. This program gives the warden the scheduler's orders: time slices, off and on,
a limit of 30 %; and it kills the warden while a process is off. Writes RESULTS/warden.json, and
prints each step. With --busy the processes are tests/workload/cuda-busy, on the simulated GPU.
Where the scheduler and nvsharectl are there, it also has these hold a process to the limit.
It takes two minutes and needs nothing but PyTorch and these programs.
"""
import argparse
import json
import os
import platform
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


def worker():
    import torch
    a = torch.randn(N, N, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(N, N, device="cuda", dtype=torch.bfloat16)
    c = torch.empty_like(a)
    for _ in range(20):
        torch.matmul(a, b, out=c)
    torch.cuda.synchronize()
    print(json.dumps({"event": "ready"}), flush=True)
    sys.stdin.readline()
    pending, n = [], 0
    while True:
        torch.matmul(a, b, out=c)
        e = torch.cuda.Event()
        e.record()
        pending.append(e)
        if len(pending) >= AHEAD:
            pending.pop(0).synchronize()
            n += 1
            print(json.dumps({"event": "progress", "launches": n}), flush=True)


class Busy:
    """A process that uses the GPU, and when it got on."""

    def __init__(self, name, busy):
        command = [sys.executable, os.path.abspath(__file__), "worker"]
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
        for x in (self.a, self.b):
            if not x.ready.wait(120):
                raise RuntimeError("a process did not become ready")
        return {"guard": self.w.guard(), "a": self.a.p.pid, "b": self.b.p.pid}

    def look(self):
        r = subprocess.run([self.args.warden, "look", str(self.a.p.pid)], capture_output=True, text=True, timeout=20)
        print(r.stdout, r.stderr)
        took = [self.w.do(order("state", self.a.p.pid))[0] for _ in range(10)]
        return {"look": r.stdout[-6000:], "first": took[0], "took_ms": middle([t["took_ns"] / 1e6 for t in took[1:]])}

    def alone(self):
        self.a.go()
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

    def scheduled(self):
        """The scheduler, which finds the process by NVML, holds it to the limit of its user."""
        if not os.path.exists(self.args.scheduler):
            return {"skipped": "no " + self.args.scheduler}
        env = {**os.environ, "NVSHARE_RUN_DIR": self.directory + "/run", "NVSHARE_WARDEN_DIR": self.directory}
        scheduler = subprocess.Popen([self.args.scheduler], env=env, stdout=self.log, stderr=self.log)

        def ctl(*words):
            return subprocess.run([self.args.ctl, *words], env=env, capture_output=True, text=True, timeout=20)

        def until(ok):
            end = time.monotonic() + 20
            while not ok():
                if time.monotonic() > end:
                    raise RuntimeError(ctl("status").stdout)
                time.sleep(0.05)
        try:
            limit = ["set", "--user", str(os.getuid()), "--core-limit"]
            until(lambda: ctl("status", "-o", "json").returncode < 2)
            time.sleep(2)  # it is connected to the warden
            began = time.monotonic()
            until(lambda: ctl(*limit, str(round(100 * LIMIT))).returncode == 0)
            until(lambda: self.a.rate(time.monotonic() - 0.3, time.monotonic()) < 0.6 * self.alone_rate)
            found = {"held_after_s": round(time.monotonic() - began, 2), "parts": []}
            time.sleep(1)
            for _ in range(4):
                t = time.monotonic()
                time.sleep(5)
                found["parts"].append(round(self.a.rate(t, time.monotonic()) / self.alone_rate, 4))
            found["status"] = [x for x in ctl("status").stdout.splitlines() if "PROBLEM" in x]
            ctl(*limit, "none")
            found["without"] = round(self.a.rate(*window(2)) / self.alone_rate, 4)
            return found
        finally:
            scheduler.terminate()
            scheduler.wait()

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
        names = ("host", "start", "look", "alone", "native", "slices", "switch", "other", "limit", "scheduled", "again", "lease", "scheduler_ends",
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


def main():
    if sys.argv[1:] == ["worker"]:
        return worker()
    beside = os.path.dirname(os.path.abspath(__file__))
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("results")
    programs = [beside + "/bin/nvshare-warden", beside + "/nvshare-warden"]
    p.add_argument("--warden", default=next((x for x in programs if os.path.exists(x)), "nvshare-warden"))
    p.add_argument("--scheduler", default=beside + "/nvml/nvshare-scheduler")
    p.add_argument("--ctl", default=beside + "/bin/nvsharectl")
    p.add_argument("--busy")
    Steps(p.parse_args()).run()


if __name__ == "__main__":
    main()
