"""Trains a small PyTorch model; reports through SummaryWriter, tqdm and plain lines.

Writes the losses to expected.json.
"""

import json

import torch
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

torch.manual_seed(7)
torch.set_num_threads(1)
x = torch.rand(256, 8)
y = x.sum(1, keepdim=True)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
writer = SummaryWriter(max_queue=1, flush_secs=1)
losses = []
bar = tqdm(range(20), desc="training")
for step in bar:
    loss = ((model(x) - y) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    writer.add_scalar("Loss/train", loss.item(), step)
    writer.add_scalar("lr", 0.05, step)
    writer.add_text("note", "not a number", step)
    bar.set_postfix(loss=loss.item())
    print(f"step {step + 1}/20 loss: {loss.item():.6f}", flush=True)
# More than any reader decodes in one piece: must be stepped over, not choked on.
writer.add_text("large", "x" * 300_000, 20)
writer.add_scalar("Loss/train", 0.125, 20)
writer.close()
with open("expected.json", "w") as f:
    json.dump(losses, f)
