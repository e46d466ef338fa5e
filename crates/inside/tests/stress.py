"""Thread teams that change every few milliseconds while PyTorch trains: no memory may be damaged.

usage: stress.py LIBRARY SECONDS [KIND...]. Every kind runs in programs of its own until the time is over. The team
in the page flips between the sizes 1 to 8. Prints one line for each kind; exit status 1 if a program failed.
"""

import mmap
import os
import random
import struct
import subprocess
import sys
import tempfile
import time

KINDS = {
    # Reductions have one result for each thread that PyTorch expects, in memory from the heap.
    "reduce": """
x = torch.randn(64, 4096)
while time.time() < end:
    x.sum(); x.mean(0); x.norm(); x.std(); x.argmax(1); x.max()
""",
    "norm": """
model = nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU(), nn.BatchNorm1d(256), nn.Linear(256, 10))
while time.time() < end:
    model(torch.randn(512, 256)).pow(2).mean().backward()
""",
    # Convolutions are prepared for a number of threads and then run, with new shapes all the time.
    "conv": """
model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU())
while time.time() < end:
    model(torch.randn(random.randint(1, 16), 1, 28, 28)).pow(2).mean().backward()
""",
    "threads": """
import threading
def train():
    model = nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 10))
    optimizer = torch.optim.Adam(model.parameters())
    while time.time() < end:
        x = torch.randn(512, 256)
        loss = model(x).pow(2).mean() + x.sum()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
for _ in range(2):
    threading.Thread(target=train).start()
train()
""",
    "loader": """
data = torch.utils.data.TensorDataset(torch.randn(2048, 256), torch.randint(0, 10, (2048,)))
while time.time() < end:
    for x, label in torch.utils.data.DataLoader(data, batch_size=64, num_workers=2):
        x.sum(); nn.functional.layer_norm(x, (256,)).std()
""",
    # Short programs that end at once after their first parallel region.
    "short": "torch.randn(512, 512).mm(torch.randn(512, 512)).sum()\n",
}

START = """
import random, sys, time, torch
from torch import nn
end = time.time() + float(sys.argv[1])
"""


def run(library, kind, seconds):
    """The number of programs that ran, and what the first failed one printed."""
    path = tempfile.mktemp()
    report = struct.pack("<8sII", b"GAINRPRT", 1, 4096).ljust(4096, b"\0")
    for name, content in ((path, b"\0" * 4096), (path + ".report", report)):
        with open(name, "wb") as file:
            file.write(content)
    page = mmap.mmap(os.open(path, os.O_RDWR), 4096)
    variables = {"LD_PRELOAD": library, "GAINSHARE_INSIDE_PAGE": path, "OMP_NUM_THREADS": "8"}
    variables |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "MALLOC_PERTURB_": "165", "MALLOC_CHECK_": "3"}
    end, programs, errors = time.time() + seconds, 0, tempfile.TemporaryFile()
    while time.time() < end:
        words = [sys.executable, "-c", START + KINDS[kind], str(min(20.0, end - time.time()))]
        job = subprocess.Popen(words, env=os.environ | variables, stderr=errors)
        while job.poll() is None:
            now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
            team = random.choice((1, 2, 3, 8))
            page[0:48] = struct.pack("<8sIIQQIIII", b"GAINPAGE", 1, 4096, 1, now, team, 0, 1, 0)
            time.sleep(random.random() * 0.003)
        programs += 1
        if job.returncode != 0:
            errors.seek(0)
            return programs, f"ended with {job.returncode}: {errors.read()[-1500:].decode(errors='replace')}"
    words = struct.unpack("<7Q", open(path + ".report", "rb").read(56))
    os.unlink(path), os.unlink(path + ".report")
    if words[5] == 0 and kind != "short":
        return programs, "the team never changed"
    print(f"{kind}: {words[4]} regions, {words[5]} changes", flush=True)
    return programs, None


def main():
    library, seconds, kinds = os.path.abspath(sys.argv[1]), float(sys.argv[2]), sys.argv[3:] or list(KINDS)
    failed = False
    for kind in kinds:
        programs, failure = run(library, kind, seconds / len(kinds))
        print(f"{kind}: {programs} programs, {failure or 'no failure'}", flush=True)
        failed |= failure is not None
    sys.exit(failed)


main()
