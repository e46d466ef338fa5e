"""Serves a loss through prometheus_client until its input ends; prints the port."""

import sys

from prometheus_client import Gauge, Histogram, start_http_server

server, _ = start_http_server(0, addr="127.0.0.1")
loss = Gauge("train_loss", "Loss of the training.", ["phase"])
step = Gauge("train_global_step", "Optimizer steps.")
Histogram("batch_seconds", "Time of a batch.").observe(0.3)
print(server.server_port, flush=True)
for n, line in enumerate(sys.stdin):
    loss.labels(phase="train").set(float(line))
    step.set(n + 1)
    print("set", flush=True)
