"""How fast PyTorch jobs train with teams of given sizes, alone and beside each other.

    teams.py OUT SCENARIO...

A scenario is `TEAMS[/WEIGHTS][/OPTION...]`, with one number for each job: `5,5,5` or
`3,3,10/17,17,67/apart`. The jobs are three VAEs and three convolutional nets as in `cargo xtask
bench cores` (VAE, net, net, VAE, net, VAE), each in a control group of its own; jobs without a
team, or with a team of 0, pause. `apart` gives each job CPUs of its own, `yield` sets `cpu.idle`
for all jobs but the third. Needs root, control groups of version 2 and PyTorch; the script train.py
must lie beside this file. Every line of OUT is one scenario as JSON: steps a second and busy cores
of each job, and idle cores. All jobs stay alive from scenario to scenario, with threads that wait
passively, as `gainshare run` starts them. `GOMP_SPINCOUNT` of the environment lets them spin first.
"""

import json
import mmap
import os
import subprocess
import sys
import time

GROUPS = "/sys/fs/cgroup"
PAGE = "/dev/shm/gainshare-teams"
VAE, CONV = ("vae", 1200, 512), ("conv", 128, 128)
MODELS = [VAE, CONV, CONV, VAE, CONV, VAE]
# Words of one job in the page.
WORDS = 8
TEAM, STEPS, AT_NS, READY = range(4)
SETTLE_S, MEASURE_S = 0.7, 2.5


def page():
    with open(PAGE, "r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 4096)).cast("q")


def work(index):
    """Trains for ever with the team that the page contains."""
    import torch

    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "train.py")) as file:
        text = file.read().rstrip()
    script = {}
    exec(text.removesuffix("main()"), script)
    words, here = page(), index * WORDS
    kind, hidden, batch = MODELS[index]
    x, labels = script["images"](8192, seed=7)
    model = script["MODELS"][kind](hidden)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    words[here + READY] = 1
    team = 0
    while True:
        if words[here + TEAM] == 0:
            time.sleep(0.02)
            continue
        if words[here + TEAM] != team:
            team = words[here + TEAM]
            torch.set_num_threads(team)
        pick = torch.randint(0, len(x), (batch,))
        loss = model.loss(x[pick], labels[pick])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        words[here + STEPS] += 1
        words[here + AT_NS] = time.monotonic_ns()


def write(path, text):
    with open(path, "w") as file:
        file.write(str(text))


def idle_s():
    with open("/proc/stat") as file:
        times = [int(word) for word in file.readline().split()[1:]]
    return (times[3] + times[4]) / 100


def busy_s(group):
    with open(f"{group}/cpu.stat") as file:
        return int(file.readline().split()[1]) / 1e6


def apart(teams):
    """CPUs of its own for each job, as many as its team."""
    first = [sum(teams[:i]) for i in range(len(teams))]
    return [f"{a}-{a + team - 1}" if team else None for a, team in zip(first, teams)]


def measure(scenario, words, groups):
    teams, *rest = scenario.split("/")
    teams = ([int(team) for team in teams.split(",")] + [0] * len(groups))[: len(groups)]
    weights = next((part.split(",") for part in rest if part[0].isdigit()), []) + ["100"] * len(groups)
    everything = f"0-{os.cpu_count() - 1}"
    cpus = apart(teams) if "apart" in rest else [None] * len(teams)
    for i, group in enumerate(groups):
        does_yield = "yield" in rest and i != 2
        write(f"{group}/cpu.idle", int(does_yield))
        if not does_yield:
            write(f"{group}/cpu.weight", weights[i])
        write(f"{group}/cpuset.cpus", cpus[i] or everything)
        words[i * WORDS + TEAM] = teams[i]
    time.sleep(SETTLE_S)
    read = lambda: [(words[i * WORDS + STEPS], words[i * WORDS + AT_NS] / 1e9, busy_s(g)) for i, g in enumerate(groups)]
    before, began, idle = read(), time.monotonic(), idle_s()
    time.sleep(MEASURE_S)
    after, elapsed_s, idle = read(), time.monotonic() - began, idle_s() - idle
    pairs = [pair for pair, team in zip(zip(before, after), teams) if team]
    return {
        "scenario": scenario,
        "steps_per_s": [round((b[0] - a[0]) / max(b[1] - a[1], 1e-9), 2) for a, b in pairs],
        "busy_cores": [round((b[2] - a[2]) / elapsed_s, 2) for a, b in pairs],
        "idle_cores": round(idle / elapsed_s, 2),
    }


def main(out, scenarios):
    with open(PAGE, "wb") as file:
        file.write(bytes(4096))
    words = page()
    base = f"{GROUPS}/gainshare-teams"
    write(f"{GROUPS}/cgroup.subtree_control", "+cpu +cpuset")
    os.makedirs(base, exist_ok=True)
    write(f"{base}/cgroup.subtree_control", "+cpu +cpuset")
    passive = {"GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
    passive = {name: os.environ.get(name, value) for name, value in passive.items()}
    passive |= {"OMP_NUM_THREADS": str(os.cpu_count()), "CUDA_VISIBLE_DEVICES": ""}
    groups, jobs = [f"{base}/{i}" for i in range(len(MODELS))], []
    try:
        for i, group in enumerate(groups):
            os.makedirs(group, exist_ok=True)
            job = subprocess.Popen([sys.executable, __file__, "--work", str(i)], env=os.environ | passive)
            write(f"{group}/cgroup.procs", job.pid)
            jobs.append(job)
        while not all(words[i * WORDS + READY] for i in range(len(jobs))):
            time.sleep(0.1)
            if any(job.poll() is not None for job in jobs):
                sys.exit("a job ended before it was ready")
        with open(out, "w") as file:
            for scenario in scenarios:
                line = json.dumps(measure(scenario, words, groups))
                print(line, file=file, flush=True)
                print(line, flush=True)
    finally:
        for job in jobs:
            job.kill()
            job.wait()
        for group in [*groups, base]:
            os.rmdir(group)
        os.remove(PAGE)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(int(sys.argv[2]))
    elif len(sys.argv) > 2:
        main(sys.argv[1], sys.argv[2:])
    else:
        sys.exit(__doc__)
