"""Two jobs that each fill a GPU: the second one paced by the library inside it. Prints one JSON object.

usage: pace.py LIBRARY [SECONDS [KINDS]]. The script writes the page that the daemon writes otherwise. Every figure is
also printed to stderr as soon as it is known, so that a run that is cut off loses only the rest. The jobs of one kind
are started once, because that takes longer than the measurements.
"""

import json
import math
import mmap
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time

LIBRARY, SECONDS = os.path.abspath(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 4.0

PYTORCH = """
import sys, time, torch
kind, seconds = sys.argv[1], float(sys.argv[2])
if kind == "mlp":
    layers = [torch.nn.Sequential(torch.nn.Linear(4096, 4096), torch.nn.GELU()) for _ in range(8)]
    model, x = torch.nn.Sequential(*layers).cuda().bfloat16(), torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
else:
    layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, dropout=0)
    model, x = torch.nn.TransformerEncoder(layer, 4).cuda(), torch.randn(64, 256, 512, device="cuda")
optimizer = torch.optim.Adam(model.parameters(), 1e-4)
def step():
    loss = model(x).float().pow(2).mean()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return loss
for _ in range(5):
    step().item()
finish = lambda loss: loss.item()
"""

JAX = """
import sys, time, os
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
import jax, jax.numpy as jnp
seconds = float(sys.argv[2])
weights = [jnp.ones((4096, 4096), jnp.bfloat16) * 0.01 for _ in range(8)]
x = jnp.ones((4096, 4096), jnp.bfloat16)
def loss_of(ws):
    h = x
    for w in ws:
        h = jax.nn.gelu(h @ w)
    return (h.astype(jnp.float32) ** 2).mean()
update = jax.jit(lambda ws: [w - 0.001 * g for w, g in zip(ws, jax.grad(loss_of)(ws))])
def step():
    global weights
    weights = update(weights)
    return weights[0]
for _ in range(5):
    step().block_until_ready()
finish = lambda w: w.block_until_ready()
"""

LOOP = """
print("ready", flush=True)
for _ in sys.stdin:
    began = time.time()
    marks, count = [], 0
    while time.time() - began < seconds:
        last = step()
        count += 1
        if count % 5 == 0:
            finish(last)
            marks.append((time.time() - began, count))
    finish(last)
    print(count / (time.time() - began), *[f"{t:.4f}:{n}" for t, n in marks], flush=True)
"""


class Page:
    """What the daemon writes: see crates/page."""

    def __init__(self, share):
        self.path = tempfile.mktemp()
        # The library counts launches in both: their cost is in the figures.
        for suffix, name in ((".report", b"GAINRPRT"), (".rhythm", b"GAINRTHM")):
            with open(self.path + suffix, "wb") as file:
                file.write(struct.pack("<8sII", name, 1, 4096).ljust(4096, b"\0"))
        with open(self.path, "wb") as page:
            page.write(b"\0" * 4096)
        self.share = share
        self.file = open(self.path, "r+b")
        self.map = mmap.mmap(self.file.fileno(), 4096)
        self.write()
        self.is_alive = True
        threading.Thread(target=self.beat, daemon=True).start()

    def write(self):
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        self.map[0:48] = struct.pack("<8sIIQQIIII", b"GAINPAGE", 1, 4096, 1, now, 0, self.share, 0, 2)

    def beat(self):
        while self.is_alive:
            self.write()
            time.sleep(0.2)

    def set(self, share):
        self.share = share
        self.write()

    def report(self):
        words = struct.unpack("<10Q", open(self.path + ".report", "rb").read(80))
        has_rhythm = any(open(self.path + ".rhythm", "rb").read()[16:])
        return {"launches": words[7], "pauses": words[8], "paused_s": round(words[9] / 1e9, 3), "rhythm": has_rhythm}


def start(kind, page=None):
    environment = dict(os.environ)
    if page:
        environment |= {"LD_PRELOAD": LIBRARY, "GAINSHARE_INSIDE_PAGE": page.path, "GAINSHARE_INSIDE_GPU": "1"}
    code = (JAX if kind == "jax" else PYTORCH) + LOOP
    words = [sys.executable, "-c", code, kind, str(SECONDS)]
    pipe = subprocess.PIPE
    return subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)


def go(job, times=1):
    job.stdin.write("go\n" * times)
    job.stdin.flush()


def result(job):
    """The speed and the marks of a job's last turn."""
    words = job.stdout.readline().split()
    assert words, "a job failed: " + job.communicate()[1][-1500:]
    return float(words[0]), [tuple(map(float, mark.split(":"))) for mark in words[1:]]


def wait_until_ready(jobs):
    for job in jobs:
        while (line := job.stdout.readline().strip()) != "ready":
            assert line or job.poll() is None, job.stderr.read()[-2000:]


def take_turns(first, second):
    """Lets two jobs run one after the other, five times; the speed of the first, and that of the second as part of it.

    Clocks of a GPU change by half a percent from minute to minute: only turns show smaller differences.
    """
    speeds = []
    for _ in range(5):
        for job in (first, second):
            go(job)
            speeds.append(result(job)[0])
    parts = [second / first for first, second in zip(speeds[::2], speeds[1::2])]
    return statistics.median(speeds[::2]), statistics.median(parts), parts


def run(jobs, during=lambda: None, turns=1):
    """Lets jobs run side by side, one or several turns; the speed and the marks of each one's last turn."""
    for job in jobs:
        go(job, turns)
    during()
    return [[result(job) for _ in range(turns)][-1] for job in jobs]


def end(jobs):
    for job in jobs:
        job.stdin.close()
        try:
            job.wait(20)
        except subprocess.TimeoutExpired:
            job.kill()


def change_latencies(page):
    """Milliseconds until a paced job that is set free waits no more, and until a free job that is paced waits."""

    def last_pause_after(change, seconds):
        began, pauses, last = time.monotonic(), page.report()["pauses"], 0.0
        change()
        while time.monotonic() - began < seconds:
            if (now := page.report()["pauses"]) != pauses:
                pauses, last = now, time.monotonic() - began
            time.sleep(0.0005)
        return last

    def first_pause_after(change, seconds):
        began, pauses = time.monotonic(), page.report()["pauses"]
        change()
        while time.monotonic() - began < seconds:
            if page.report()["pauses"] != pauses:
                return time.monotonic() - began
            time.sleep(0.0005)
        return None

    to_free, to_paced = [], []
    time.sleep(0.5)
    for _ in range(5):
        to_free.append(round(1000 * last_pause_after(lambda: page.set(0), 0.2), 1))
        first = first_pause_after(lambda: page.set(333_333), 0.5)
        to_paced.append(first and round(1000 * first, 1))
        time.sleep(0.1)
    return {"to_free_ms": to_free, "to_paced_ms": to_paced}


def half_speeds(marks):
    middle = SECONDS / 2
    first = [n for t, n in marks if t <= middle]
    return (first[-1] if first else 0) / middle, (marks[-1][1] - (first[-1] if first else 0)) / middle


LATENCIES_S = 4.5
"""The changes of `change_latencies` take no longer than this."""


def measure(kind, tell):
    """All figures of jobs of one kind, each passed to `tell`."""
    page = Page(0)
    favoured, paced, other = jobs = start(kind), start(kind, page), start(kind)
    try:
        wait_until_ready(jobs)
        alone, unpaced, turns = take_turns(favoured, paced)
        assert page.report()["rhythm"], "the library has counted no launches: is it of this version?"
        parts = lambda results: [round(speed / alone, 3) for speed, _ in results]
        tell("alone_steps_per_s", round(alone, 1))
        tell("unpaced_speed", round(unpaced, 4))
        tell("unpaced_turns", [round(part, 4) for part in turns])
        tell("time_slices", parts(run([favoured, other])))
        for name, share in (("two_to_one", 333_333), ("floor_10", 100_000), ("floor_5", 50_000)):
            before = page.report()
            page.set(share)
            tell(name, parts(run([favoured, paced])))
            report = page.report()
            counts = {key: round(report[key] - before[key], 3) for key in ("launches", "pauses", "paused_s")}
            tell(name + "_report", counts)
        page.set(50_000)
        results = run([favoured, paced], lambda: (time.sleep(SECONDS / 2), page.set(0)))
        tell("floor_5_then_free", [[round(s / alone, 3) for s in half_speeds(marks)] for _, marks in results])
        page.set(333_333)
        latencies = {}
        turns = math.ceil(LATENCIES_S / SECONDS)
        run([favoured, paced], lambda: latencies.update(change_latencies(page)), turns)
        tell("change_in_force", latencies)
    finally:
        page.is_alive = False
        end(jobs)


def main():
    figures = {}
    for kind in sys.argv[3].split(",") if len(sys.argv) > 3 else ("mlp", "transformer", "jax"):
        of = figures.setdefault(kind, {})

        def tell(name, value):
            of[name] = value
            print(kind, name, json.dumps(value), file=sys.stderr, flush=True)

        try:
            measure(kind, tell)
        except Exception as error:
            tell("error", repr(error)[-1500:])
    print(json.dumps(figures))


main()
