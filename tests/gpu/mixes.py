#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Usage: mixes.py [RESULTS-DIR] [--windows N] [--seconds S] [--only REGEX]

Mixes in which one condition of one tenant could decide for all the others: memory that is nearly
full, a core limit, an idle rank of a gang, a process whose slices cannot be set, a latency tenant.
Each mix runs natively and under nvshare in mode auto, window after window, on the same GPU. Run it
as root from the unpacked bundle; it needs PyTorch and transformers. It writes mixes.json."""
import argparse
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
DIR = "/run/gpu-mixes"   # which every user can enter
FIRST_USER = 30100
SETTLE_S = 30            # mode auto measures turns, and searches the length of slices
WINDOW_GAP_S = 1.5

# A program is its load, its user and what is set for that user.
MIXES = {
    "decode + decode": [("decode", 0, ""), ("decode", 1, "")],
    "decode + decode, 94 % reserved": [("decode", 0, ""), ("decode", 1, "")],
    "decode + decode, one tenant limited to 95 %": [("decode", 0, "--core-limit 95"), ("decode", 0, "--core-limit 95")],
    "decode + decode limited to 60 %": [("decode", 0, ""), ("decode", 1, "--core-limit 60")],
    "decode + decode + an idle rank": [("decode", 0, ""), ("decode", 1, ""), ("idle", 2, "--gang g")],
    "decode limited to 30 % + decode + decode": [("decode", 0, "--core-limit 30"), ("decode", 1, ""), ("decode", 2, "")],
    "gemm limited to 30 % + decode + decode": [("gemm", 0, "--core-limit 30"), ("decode", 1, ""), ("decode", 2, "")],
    "gemm limited to 30 % + decode": [("gemm", 0, "--core-limit 30"), ("decode", 1, "")],
    "decode limited to 60 % + gemm": [("decode", 0, "--core-limit 60"), ("gemm", 1, "")],
    "decode + decode + a latency tenant": [("decode", 0, ""), ("decode", 1, ""), ("embed", 2, "--priority latency")],
    "decode + decode of weight 200 + a latency tenant": [("decode", 0, ""), ("decode", 1, "--weight 200"), ("embed", 2, "--priority latency")],
}
FULL = {"decode + decode, 94 % reserved"}   # on a GPU that looks as large as that needs


def worker():
    """One program: reads "window BEGIN END", answers with what it did in that time."""
    load, gpu = sys.argv[2], 0
    sys.path.insert(0, DIR)
    if load == "idle":
        import torch
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
        run = None
    else:
        from loads import programs
        backend = programs.Backend()
        backend.load()
        backend.init()
        run = backend.build(load, gpu)
        if hasattr(run, "step"):
            run.step()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        begin, end = map(float, line.split()[1:])
        ends = []
        if run is None:
            time.sleep(max(0, end - time.monotonic()))
        else:
            time.sleep(max(0, begin - 1 - time.monotonic()))
            while time.monotonic() < end:
                run.step()
                programs.torch.cuda.synchronize()
                ends.append(time.monotonic())
        inside = [t for t in ends if begin <= t < end]
        rate = (len(inside) - 1) / (inside[-1] - inside[0]) if len(inside) > 1 else 0.0
        print(json.dumps({"rate": rate}), flush=True)


class Program:
    def __init__(self, load, user, processors, run_dir=None):
        env = dict(os.environ, HOME=DIR, TMPDIR=DIR, PYTHONWARNINGS="ignore", USER="t", LOGNAME="t",
                   CUDA_CACHE_PATH=f"{DIR}/cache-{user}", TRITON_CACHE_DIR=f"{DIR}/cache-{user}")
        if run_dir:
            env.update(LD_PRELOAD=f"{DIR}/libnvshare.so", NVSHARE_RUN_DIR=run_dir)
        uid = FIRST_USER + user

        def become():
            os.sched_setaffinity(0, processors)
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
        self.process = subprocess.Popen([sys.executable, f"{DIR}/mixes.py", "worker", load], env=env, text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=become)

    def say(self, text):
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a program ended with status {self.process.wait()}")
        return json.loads(line)

    def end(self):
        self.process.stdin.close()
        self.process.wait()


def window(programs, seconds):
    begin = time.monotonic() + WINDOW_GAP_S
    for p in programs:
        p.say(f"window {begin} {begin + seconds}")
    return [p.answer()["rate"] for p in programs]


def processors_of(n):
    """Each program has processors of its own; natively and under nvshare the same ones."""
    all_of = sorted(os.sched_getaffinity(0))[1:]   # the scheduler has the first
    each = max(len(all_of) // n, 1)
    return [set(all_of[i * each:(i + 1) * each] or all_of) for i in range(n)]


def ctl(run_dir, *args):
    return subprocess.run([f"{HERE}/bin/nvsharectl", "--run-dir", run_dir, *args], check=False, text=True, capture_output=True).stdout


def interval(of, to):
    """The ratio of two sums of windows, and what 95 % of 2,000 samples of the windows have."""
    rng = random.Random(1)
    ratios = []
    for _ in range(2000):
        picks = [rng.randrange(len(of)) for _ in of]
        ratios.append(sum(of[k] for k in picks) / max(sum(to[k] for k in picks), 1e-9))
    ratios.sort()
    return [round(sum(of) / max(sum(to), 1e-9), 4), round(ratios[50], 4), round(ratios[1949], 4)]


def mix(name, tenants, args, alone):
    run_dir = f"{DIR}/run"
    shutil.rmtree(run_dir, ignore_errors=True)
    os.makedirs(run_dir)
    os.chmod(run_dir, 0o755)
    flags = ["--run-dir", run_dir, "--anti-thrash", "auto"]
    if name in FULL:
        flags += ["--gpu-memory", "10Gi"]
    log = open(f"{args.results}/scheduler.log", "a")
    scheduler = subprocess.Popen([f"{HERE}/nvml/nvshare-scheduler", *flags], stdout=log, stderr=log)
    parts = processors_of(len(tenants))
    natives, ours = [], []
    try:
        for _ in range(100):
            if "GPU 0" in ctl(run_dir, "status"):
                break
            time.sleep(0.1)
        for _, user, share in tenants:
            if share:
                ctl(run_dir, "set", "--user", str(FIRST_USER + user), *share.split())
        natives = [Program(load, user, parts[i]) for i, (load, user, _) in enumerate(tenants)]
        ours = [Program(load, user, parts[i], run_dir) for i, (load, user, _) in enumerate(tenants)]
        for p in natives + ours:
            p.answer()
        for i, (load, _, _) in enumerate(tenants):
            if load not in alone and load != "idle":
                alone[load] = window([natives[i]], args.seconds)[0]
        window(ours, SETTLE_S)
        rates = {"native": [], "auto": []}
        for k in range(args.windows):
            order = [("native", natives), ("auto", ours)]
            for way, programs in order if k % 2 == 0 else reversed(order):
                if way == "auto":
                    window(programs, 2)   # after a pause
                rates[way].append(window(programs, args.seconds))
        status = json.loads(ctl(run_dir, "status", "-o", "json") or "{}")
        gpu = (status.get("gpus") or [{}])[0]
        events = ctl(run_dir, "events")
    finally:
        for p in natives + ours:
            p.end()
        scheduler.terminate()
        scheduler.wait()
    sums = {way: [sum(r / alone[load] for r, (load, _, _) in zip(rs, tenants) if load != "idle") for rs in rates[way]] for way in rates}
    ratio = interval(sums["auto"], sums["native"])
    row = {"mix": name, "tenants": tenants, "rates": rates, "alone": {k: alone[k] for k, _, _ in tenants if k != "idle"},
           "sum_of_alone": {w: round(statistics.mean(s), 4) for w, s in sums.items()}, "of_native": ratio,
           "way": gpu.get("way"), "way_code": gpu.get("way_code"), "refused": gpu.get("refused"),
           "got": {str(t.get("uid")): t.get("got") for t in gpu.get("tenants") or []},
           "used_s": {str(t.get("uid")): t.get("used_seconds") for t in gpu.get("tenants") or []},
           "reserved_bytes": sum(m.get("used_bytes", 0) for m in gpu.get("memory") or [])}
    if args.events:
        with open(f"{args.results}/events-{re.sub('[^a-z0-9]+', '-', name)}.txt", "w") as f:
            f.write("\n".join(line for line in events.splitlines() if "grant" not in line and "release" not in line and "revoke" not in line))
    means = {w: [round(statistics.mean(r[i] for r in rs), 2) for i in range(len(tenants))] for w, rs in rates.items()}
    print(f"{name}: {ratio[0]:.3f} ({ratio[1]:.3f} to {ratio[2]:.3f}) of native; native {means['native']}, auto {means['auto']} steps/s; "
          f"{row['way']} ({row['way_code']}), got {row['got']}", flush=True)
    return row


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("results", nargs="?", default="results")
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--only", default="")
    parser.add_argument("--events", action="store_true")
    args = parser.parse_args()
    os.makedirs(args.results, exist_ok=True)
    shutil.rmtree(DIR, ignore_errors=True)
    os.makedirs(DIR)
    os.chmod(DIR, 0o777)   # caches of all users
    shutil.copy(f"{HERE}/lib/libnvshare.so", DIR)
    shutil.copy(os.path.abspath(__file__), f"{DIR}/mixes.py")
    shutil.copytree(f"{HERE}/loads", f"{DIR}/loads")
    subprocess.run(["chmod", "-R", "a+rX", DIR], check=True)
    rows, alone = [], {}
    for name, tenants in MIXES.items():
        if args.only and not re.search(args.only, name):
            continue
        try:
            rows.append(mix(name, tenants, args, alone))
        except (RuntimeError, OSError) as e:
            print(f"{name}: {e}", flush=True)
        with open(f"{args.results}/mixes.json", "w") as f:
            json.dump({"windows": args.windows, "seconds": args.seconds, "alone_steps_per_s": alone, "mixes": rows}, f, indent=1)
    shutil.rmtree(DIR, ignore_errors=True)


if __name__ == "__main__":
    worker() if sys.argv[1:2] == ["worker"] else main()
