"""When pictures end after on and off orders. usage: glprobe.py BUNDLE OUT"""
import sys, os, time, json, subprocess, tempfile, statistics, threading
bundle, out = sys.argv[1], sys.argv[2]
sys.path.insert(0, bundle)
import warden as W
if len(sys.argv) > 3:
    kind, rounds = sys.argv[3], int(sys.argv[4])
    import importlib
    load = importlib.import_module("loads." + kind)
    name, step = load.begin(rounds) if kind == "picture" else load.begin()
    for _ in range(3): step()
    print("ready", flush=True)
    ends = []
    t0 = time.monotonic()
    while time.monotonic() < t0 + 14:
        if step(): ends.append(time.monotonic())
    json.dump(ends, open(out, "w"))
    sys.exit()
d = tempfile.mkdtemp(); log = open(out + ".log", "a")
w = W.Warden(bundle + "/bin/nvshare-warden", d, log)
found = {}
for kind, rounds in (("picture", 500), ("picture", 50), ("vulkan", 0)):
    f = f"{out}-{kind}-{rounds}.json"
    p = subprocess.Popen([sys.executable, os.path.abspath(__file__), bundle, f, kind, str(rounds)], stdout=subprocess.PIPE, text=True)
    line = p.stdout.readline()
    if "ready" not in line:
        print(kind, "did not begin", line); continue
    time.sleep(2.5)
    acts = []
    for on, off in ((0.0375, 0.0875), (0.075, 0.175)):
        for _ in range(16 if on < 0.05 else 8):
            a = time.monotonic(); r = w.do(W.order("off", p.pid))[0]; b = time.monotonic()
            acts.append(["off", a, b, r.get("error")]); time.sleep(off)
            a = time.monotonic(); r = w.do(W.order("on", p.pid))[0]; b = time.monotonic()
            acts.append(["on", a, b, r.get("error")]); time.sleep(on)
    p.wait(30)
    ends = json.load(open(f)); json.dump({"ends": ends, "acts": acts}, open(f, "w"))
    free = [e for e in ends if e < acts[0][1]]
    period = (free[-1] - free[0]) / max(1, len(free) - 1)
    print(kind, rounds, "period ms", round(period * 1e3, 3), [x[3] for x in acts if x[3]][:2])
    for i in range(1, len(acts) - 1, 2):
        on0, on1, off0, off1 = acts[i][1], acts[i][2], acts[i + 1][1], acts[i + 1][2]
        during = [e for e in ends if on0 <= e <= off1]
        nxt = acts[i + 2][1] if i + 2 < len(acts) else off1 + .05
        after = [e for e in ends if off1 < e <= nxt]
        if i in (5, 7, 9, 11, 35, 37, 39):
            print("  on took %.2f off took %.2f; ends after on: %s; after off: %s" % ((on1 - on0) * 1e3, (off1 - off0) * 1e3,
              [round((e - on1) * 1e3, 1) for e in during][:12], [round((e - off1) * 1e3, 1) for e in after][:6]))
    for k, span in ((0, 16), (32, 8)):
        ons = sum(acts[j + 1][2] - acts[j][1] for j in range(k + 1, k + 2 * span - 2, 2))
        a, b = acts[k + 1][1], acts[k + 2 * span - 1][1]
        n = sum(a <= e < b for e in ends)
        print("  on for %.1f %%, work %.1f %%" % (100 * ons / (b - a), 100 * n * period / (b - a)))
w.ended(15)
