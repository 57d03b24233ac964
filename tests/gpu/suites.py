#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Usage: suites.py [RESULTS-DIR] [--samples PATHS] [--cupy TESTS] [--torch TESTS] [--numba TESTS] [--jax TESTS] [OPTION...]

Suites that others wrote, from checkouts and builds on this host: natively, in mode auto, in turns of 5 ms beside a
tenant that keeps the GPU busy, with swapping on a small GPU, and with a memory limit. PATHS are built programs, or
directories of them; TESTS are files or directories of tests or names of packages of tests, like numba.cuda.tests, and then
arguments for pytest. Each program and each file of tests is a process. Without pytest unittest runs the tests. What
natively takes longer than --bound is left out of the modes: of a file, with pytest, the test at which it stands then, and,
if the rest takes too long too, what is after that. What differs from its native run runs again alone, in the
mode and natively: if it is the same then, it depends on what runs before or beside it. The exit status is 1 if
anything else differs that suites.explained does not explain, and 2 if a mode could not be tried. It writes
suites.md, which is a table, suites.jsonl and scheduler.log. Run it as root: the neighbour is then another tenant."""
import argparse
import concurrent.futures
import contextlib
import importlib.util
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from collections import Counter, defaultdict, namedtuple

HERE = os.path.dirname(os.path.abspath(__file__))
NEIGHBOUR_USER = 30100
LONGER = 3   # times as long as natively may a process take in a mode
AGAIN = 40   # processes of a suite that run again alone, in each mode
STATUS = {"difference": 1, "failed": 2}
SMALL_GPU = {"samples": "3Gi", "cupy": "8Gi", "torch": "8Gi", "numba": "3Gi", "jax": "8Gi"}   # with swapping
MODES = {"auto": (), "turns": ("--anti-thrash", "on", "--tq", "5ms"), "swap": ("--swap-memory", "{swap}", "--gpu-memory", "{gpu}"),
         "limit": ("--default-memory-limit", "{limit}")}

NATIVE = dict(os.environ, PYTHONDONTWRITEBYTECODE="1", XLA_PYTHON_CLIENT_PREALLOCATE="false")   # not all memory for JAX
NEIGHBOUR = """import torch
a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
while True:
    for _ in range(8):
        torch.matmul(a, a)
    torch.cuda.synchronize()
    print("works", flush=True)"""

# words: of a program's command, or for pytest, of which the last is the file. tests: those that run of it; none: all
Job = namedtuple("Job", "suite name words cwd tests", defaults=[()])
# How a process ended, what a program said, and what each test came to and why.
Run = namedtuple("Run", "ended lines tests seconds")


def with_pytest(pytest, words, say):
    class Recorder:
        def pytest_runtest_logstart(self, nodeid, location):
            say(nodeid, "did not end")

        def pytest_runtest_logreport(self, report):
            if report.when == "call" or report.outcome != "passed":
                say(report.nodeid, report.outcome, report.longrepr if report.failed else "")

        def pytest_collectreport(self, report):
            if report.failed:
                say(report.nodeid, "failed", report.longrepr)
    # The names of tests are relative to this directory, so that each can be run by its name. Tests of an installed
    # package are its modules, also where it lies elsewhere than its name says: numba.cuda does.
    sys.exit(pytest.main(["--rootdir", os.getcwd(), "--confcutdir", "/", "-o", "consider_namespace_packages=true", "-q", "-p", "no:cacheprovider", *words],
                         plugins=[Recorder()]))


def module_of(file):
    """The name under which a file of tests is imported, so that it finds what is beside it: as pytest has it."""
    path = pathlib.Path(file).resolve().with_suffix("")
    root = path.parent
    while (root / "__init__.py").exists():
        root = root.parent
    for base in (root, *root.parents):
        name = ".".join(path.relative_to(base).parts)
        with contextlib.suppress(ImportError, ValueError, AttributeError):
            if pathlib.Path(importlib.util.find_spec(name).origin).resolve().with_suffix("") == path:
                return name
    sys.path.insert(0, str(root))
    return ".".join(path.relative_to(root).parts)


def with_unittest(words, say):
    if len(words) > 1:
        sys.exit(f"{words[:-1]} are for pytest, which {sys.executable} does not have")
    file, _, name = words[0].partition("::")

    class Recorder(unittest.TestResult):
        def failed(self):
            return self.errors + self.failures + [(t, "unexpected success") for t in self.unexpectedSuccesses]

        def startTest(self, test):
            super().startTest(test)
            self.before = len(self.failed()), len(self.skipped)
            self.name = "::".join([file, *test.id().split(".")[-2:]])
            say(self.name, "did not end")

        def stopTest(self, test):
            if len(self.failed()) > self.before[0]:
                say(self.name, "failed", self.failed()[-1][1])
            else:
                say(self.name, "skipped" if len(self.skipped) > self.before[1] else "passed")
    unittest.defaultTestLoader.loadTestsFromName(".".join([module_of(file), *filter(None, name.split("::"))])).run(Recorder())


def tests_process(record, words):
    """Records each test as it begins and ends, so that a crash has a place."""
    sys.argv[1:], pytest = [], None
    del sys.path[0]   # our directory, whose modules have common names
    with contextlib.suppress(ImportError):
        import pytest
    with open(record, "w", buffering=1) as f:
        def say(test, outcome, why=""):
            f.write(json.dumps([test, outcome, str(why)[-400:]]) + "\n")
        with_pytest(pytest, words, say) if pytest else with_unittest(words, say)


def is_program(file):
    if not os.access(file, os.X_OK) or ".so" in os.path.basename(file):
        return False
    with open(file, "rb") as f:
        return f.read(4) == b"\x7fELF"


def package(name):
    """Where a package is, which only an interpreter of its own imports for that."""
    find = "import importlib.util, sys; print(*importlib.util.find_spec(sys.argv[1]).submodule_search_locations)"
    return subprocess.run([sys.executable, "-c", find, name], env=NATIVE, check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout.strip()


def jobs(suite, text):
    """The processes of a suite: each program or file of tests below the paths that text has."""
    words = shlex.split(text)
    if words and suite != "samples" and not os.path.exists(words[0]):
        words[0] = package(words[0]) or words[0]
    paths = [os.path.abspath(w) for w in words if os.path.exists(w)]
    rest = [w for w in words if not os.path.exists(w)]
    if not paths:
        sys.exit(f"--{suite} {text}: there is no such file or directory")
    base = os.path.commonpath([p if os.path.isdir(p) else os.path.dirname(p) for p in paths])
    for path in paths:
        below = sorted(f"{folder}/{name}" for folder, _, names in os.walk(path) if "CMakeFiles" not in folder for name in names)
        for file in below or [path]:
            name = os.path.relpath(file, base)
            if suite == "samples" and is_program(file):
                yield Job(suite, name, (file,), os.path.dirname(file))
            elif suite != "samples" and (file == path or re.fullmatch(r"test_.*\.py|.*_test\.py", os.path.basename(file))):
                yield Job(suite, name, (*rest, name), base)


RUNNING, STOPPED = set(), threading.Event()


def stop(*_):
    """Ends the jobs, which have sessions of their own, and then, by the exit, the scheduler and the neighbour."""
    STOPPED.set()
    for pid in list(RUNNING):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    sys.exit(143)


def run(job, env, bound, test=None):
    """Runs a job, or one of its tests, with all processes that it starts."""
    with tempfile.TemporaryDirectory() as scratch, open(f"{scratch}/out", "w+b") as out:
        tests_words = [sys.executable, os.path.abspath(__file__), "tests", f"{scratch}/record", *job.words[:-1], *([test] if test else job.tests or job.words[-1:])]
        words = job.words if job.suite == "samples" else tests_words
        began = time.monotonic()
        process = subprocess.Popen(words, cwd=job.cwd, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
        RUNNING.add(process.pid)
        try:
            ended = f"exit {process.wait(0 if STOPPED.is_set() else bound)}"
        except subprocess.TimeoutExpired:
            ended = "did not end"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        RUNNING.discard(process.pid)
        seconds = round(time.monotonic() - began, 2)
        if job.suite == "samples":
            out.seek(0)
            return Run(ended, set(out.read(1 << 22).decode(errors="replace").splitlines()), {}, seconds)
        record = pathlib.Path(scratch, "record")
        lines = record.read_text().splitlines() if record.exists() else []
        tests = {name: (outcome, why) for name, outcome, why in map(json.loads, lines)}
        # Whether tests failed (1) or there are none (5), the tests say.
        return Run("exit 0" if ended in ("exit 1", "exit 5") else ended, set(), tests, seconds)


class Scheduler:
    """The scheduler of a mode, with the neighbour where the mode has one."""

    def __init__(self, args, mode, suite, log):
        self.dir = tempfile.mkdtemp(prefix="suites-")
        self.log, self.neighbour, self.ctl = log, None, [f"{args.bundle}/bin/nvsharectl", "--run-dir", self.dir + "/run"]
        os.chmod(self.dir, 0o755)
        for file in (f"{args.bundle}/lib/libnvshare.so", f"{args.bundle}/bin/cuda-busy"):
            shutil.copy(file, self.dir)   # where each user can read it
        self.env = dict(NATIVE, NVSHARE_RUN_DIR=self.dir + "/run", LD_PRELOAD=self.dir + "/libnvshare.so")
        flags = [f.format(swap=args.swap_memory, gpu=SMALL_GPU[suite], limit=args.memory_limit) for f in MODES[mode]]
        program = next(f for f in (f"{args.bundle}/nvml/nvshare-scheduler", f"{args.bundle}/bin/nvshare-scheduler") if os.path.exists(f))
        self.process = subprocess.Popen([program, "--run-dir", self.dir + "/run", *flags], stdout=log, stderr=log)

    def start(self, neighbour):
        while not self.status().get("gpus"):
            if self.process.poll() is not None:
                raise RuntimeError("the scheduler ended: see scheduler.log")
            time.sleep(0.1)
        if not neighbour:
            return
        words = {"gemm": [sys.executable, "-c", NEIGHBOUR], "busy": [self.dir + "/cuda-busy", "--seconds", "0"]}
        user = {"user": NEIGHBOUR_USER, "group": NEIGHBOUR_USER, "extra_groups": []} if os.geteuid() == 0 else {}
        self.neighbour = subprocess.Popen(words[neighbour], env=dict(self.env, HOME=self.dir), stdout=subprocess.PIPE, stderr=self.log, **user)
        if not self.neighbour.stdout.readline():
            raise RuntimeError("the neighbour ended: see scheduler.log")
        threading.Thread(target=self.neighbour.stdout.read, daemon=True).start()   # so that it never waits for us

    def status(self):
        return json.loads(subprocess.run([*self.ctl, "status", "-o", "json"], check=False, text=True, capture_output=True).stdout or "{}")

    def failed(self):
        """Why what has run says nothing about the mode."""
        if any(p.poll() is not None for p in filter(None, (self.process, self.neighbour))):
            return "the scheduler or the neighbour ended: see scheduler.log"
        grants, revokes, fences = (sum(gpu[k] for gpu in self.status()["gpus"]) for k in ("grants", "revokes", "fences"))
        if not grants or self.neighbour and not revokes:
            return "the shim was not at work"
        return f"{fences} times a process did not release the GPU" if fences else None

    def end(self):
        for process in filter(None, (self.neighbour, self.process)):
            process.terminate()
            process.wait()
        shutil.rmtree(self.dir, ignore_errors=True)


def form(line):
    return re.sub(r"[-+]?(0x[0-9a-fA-F]+|\d+(\.\d+)?(e[-+]?\d+)?)", "#", line)


def differences(native, got, changing):
    """What is not as it is natively, by test; "" is the process. The order of lines does not count, because a GPU's
    threads print in any, nor do lines of a form that changes natively."""
    found = defaultdict(list)
    if got.ended != native.ended:
        found[""].append(f"{got.ended}, natively {native.ended}")
    for line in sorted(got.lines ^ native.lines):
        if form(line) not in changing:
            found[""].append(("has " if line in got.lines else "has not ") + line)
    for test in sorted(native.tests.keys() | got.tests.keys()):
        a, b = (r.tests.get(test, ("did not run", ""))[0] for r in (got, native))
        if a != b:
            found[test].append(f"{a}, natively {b}")
    return found


class Suite:
    def __init__(self, name, args, rules, log):
        self.name, self.args, self.rules, self.log = name, args, rules, log
        self.jobs = [job for job in jobs(name, getattr(args, name)) if re.search(args.only, job.name)]
        self.alone, self.seconds, self.rows = {}, {}, []
        self.native = self.all("native", NATIVE, args.bound)
        self.shorten()
        # Only a second run says which lines of programs change by themselves.
        second = self.all("native", NATIVE, args.bound) if name == "samples" else self.native
        self.changing = {job: set(map(form, self.native[job].lines ^ second[job].lines)) for job in self.jobs}
        for job in [job for job in self.jobs if "did not end" in (self.native[job].ended, second[job].ended)]:
            self.leave_out(job)
            self.jobs.remove(job)

    def leave_out(self, job, test=""):
        text = f"takes longer than {self.args.bound:g} s natively"
        self.row("native", job.name, test=test, kind="left out", texts=[text], reason=None, said="")

    def shorten(self):
        """Has files of tests that take too long run without the test at which they stand, or as far as they come."""
        try:
            import pytest as _  # only it runs a part of a file
        except ImportError:
            return

        def slow():
            return [job for job in self.jobs if self.native[job].ended == "did not end" and self.native[job].tests]

        def replace(job, tests):
            at = self.jobs.index(job)
            self.jobs[at] = job._replace(tests=tuple(tests))
            return self.jobs[at]

        for job in slow():
            stands = [test for test, (outcome, _) in self.native[job].tests.items() if outcome == "did not end"]
            for test in stands:
                self.leave_out(job, test)
            replace(job, [*(f"--deselect={test}" for test in stands), job.words[-1]])
        self.native.update(self.some([job for job in self.jobs if job.tests], "native", NATIVE, self.args.bound))
        for job in slow():
            ended = {test: r for test, r in self.native[job].tests.items() if r[0] != "did not end"}
            self.leave_out(job, "what is after its first " + str(len(ended)) + " tests")
            part = replace(job, ended)
            self.native[part] = Run("exit 0", set(), ended, self.native[job].seconds)

    def all(self, mode, env, bound):
        began = time.monotonic()
        got = self.some(self.jobs, mode, env, bound)
        self.seconds[mode] = round(time.monotonic() - began)
        return got

    def some(self, jobs, mode, env, bound):
        with concurrent.futures.ThreadPoolExecutor(self.args.at_a_time) as pool:
            got = dict(zip(jobs, pool.map(lambda job: run(job, env, bound), jobs)))
        for job, r in got.items():
            self.row(mode, job.name, ended=r.ended, seconds=r.seconds, tests=Counter(outcome for outcome, _ in r.tests.values()))
        return got

    def cell(self, mode):
        count = Counter(row["kind"] for row in self.rows if "kind" in row and row["mode"] == mode)
        if mode == "native":
            for r in map(self.native.get, self.jobs):
                count.update([outcome for outcome, _ in r.tests.values()] + [r.ended] * (not r.tests or r.ended != "exit 0"))
        said = ", ".join(f"{n} {what}" for what, n in sorted(count.items())) or ("same" if mode in self.seconds else "not run")
        return f"{said}; {self.seconds[mode]} s" if mode in self.seconds else said

    def row(self, mode, name, **more):
        self.rows.append({"suite": self.name, "mode": mode, "name": name, **more})

    def why(self, mode, job, test, texts):
        """The reasons, or None if one of the texts has none."""
        said = [f"{job.suite}/{test or job.name}: {text}" for text in texts]
        why = [next((r for where, pattern, r in self.rules if where in ("any", mode) and re.search(pattern, s)), None) for s in said]
        return None if None in why else ", ".join(sorted(set(why)))

    def mode(self, mode):
        bound, again = self.args.bound * LONGER, {}
        scheduler = Scheduler(self.args, mode, self.name, self.log)
        try:
            scheduler.start(self.args.neighbour if mode == "turns" else None)
            got = self.all(mode, scheduler.env, bound)
            found = {(job, test): texts for job in self.jobs
                     for test, texts in differences(self.native[job], got[job], self.changing[job]).items()}
            for key in [key for key in found if self.why(mode, *key, found[key]) is None][:AGAIN]:
                again[key] = run(key[0], scheduler.env, bound, key[1])
            failed = scheduler.failed()
        finally:
            scheduler.end()
        for (job, test), texts in found.items():
            kind, reason, r = None, self.why(mode, job, test, texts), again.get((job, test))
            if r:
                still = self.still(job, test, r)
                kind, texts, reason = None if still else "same alone", still or texts, self.why(mode, job, test, still)
            elif reason is None:
                kind, reason = "difference", "not run again"
            kind = kind or ("difference" if reason is None else "explained")
            self.row(mode, job.name, test=test, kind=kind, texts=texts, reason=reason, said=(r or got[job]).tests.get(test, ("", ""))[1] or self.native[job].tests.get(test, ("", ""))[1])
        if failed:
            raise RuntimeError(failed)

    def still(self, job, test, got):
        """What differs also when the test, or the program, runs alone."""
        if (job, test) not in self.alone:
            self.alone[job, test] = run(job, NATIVE, self.args.bound, test)
        native = self.alone[job, test]
        if test and test not in native.tests.keys() | got.tests.keys():
            return ["could not be run alone"]
        changing = self.changing[job] | set(map(form, self.native[job].lines ^ native.lines))
        return differences(native, got, changing).get(test, [])


def table(args, suites):
    about = """date -u +%FT%TZ; nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
        echo "commit $(cat "$0/commit" || git -C "$0" describe --always --dirty)" """
    said = subprocess.run(["sh", "-c", about, args.bundle], check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout
    lines = [", ".join([*said.splitlines(), f"{args.at_a_time} processes at a time"]), "",
             "| " + " | ".join(["suite", "processes", "native", *args.modes]) + " |", "|---" * (3 + len(args.modes)) + "|"]
    for name in SMALL_GPU:
        cells = [str(len(suites[name].native)), *map(suites[name].cell, ["native", *args.modes])] if name in suites else ["not given"]
        lines.append("| " + " | ".join([name, *cells]) + " |")
    modes = defaultdict(list)   # the same in several modes is one line
    for row in (row for suite in suites.values() for row in suite.rows if "kind" in row):
        for text in row["texts"][:6]:
            modes[row["kind"], f"{row['suite']}/{row['test'] or row['name']}: {text}", f" ({row['reason']})" if row["reason"] else ""].append(row["mode"])
    lines += ["", *(f"- {kind} ({', '.join(where)}): {what}{reason}" for (kind, what, reason), where in sorted(modes.items()))]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(usage=__doc__, allow_abbrev=False)
    parser.add_argument("results", nargs="?", default="results")
    for suite in SMALL_GPU:
        parser.add_argument("--" + suite, metavar="PATHS")
    parser.add_argument("--modes", default=",".join(MODES), help="some of %(default)s")
    parser.add_argument("--only", default="", help="a regular expression: names of programs and files of tests")
    parser.add_argument("--at-a-time", type=int, default=4, metavar="N", help="processes that run at the same time")
    parser.add_argument("--bound", type=float, default=300, help=f"seconds that a process may take natively; in a mode {LONGER} times that")
    parser.add_argument("--swap-memory", default="30Gi")
    parser.add_argument("--memory-limit", default="16Gi")
    parser.add_argument("--neighbour", choices=("gemm", "busy"), default="gemm" if importlib.util.find_spec("torch") else "busy")
    parser.add_argument("--explained", default=f"{HERE}/suites.explained")
    parser.add_argument("--bundle", default=HERE, help="the unpacked bundle, or a build directory")
    args = parser.parse_args()
    args.modes, args.bundle = args.modes.split(","), os.path.abspath(args.bundle)
    signal.signal(signal.SIGTERM, stop)
    rules, suites, results = re.findall(r"^(\w+) +(.+?)  # (.+)$", pathlib.Path(args.explained).read_text(), re.M), {}, pathlib.Path(args.results)
    results.mkdir(parents=True, exist_ok=True)
    with open(results / "scheduler.log", "w") as log:
        for name in filter(vars(args).get, SMALL_GPU):
            suites[name] = suite = Suite(name, args, rules, log)
            for mode in args.modes:
                try:
                    suite.mode(mode)
                except (RuntimeError, OSError) as e:
                    suite.row(mode, "", test="", kind="failed", texts=[str(e)], reason=None, said="")
                print(f"{name}, {mode}: {suite.cell(mode)}", flush=True)
                (results / "suites.jsonl").write_text("".join(json.dumps(row) + "\n" for s in suites.values() for row in s.rows))
                (results / "suites.md").write_text(table(args, suites))
    print(table(args, suites))
    sys.exit(max((STATUS.get(row.get("kind"), 0) for suite in suites.values() for row in suite.rows), default=0))


if __name__ == "__main__":
    if sys.argv[1:2] == ["tests"]:
        tests_process(sys.argv[2], sys.argv[3:])
    else:
        main()
