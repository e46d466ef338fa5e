"""An ordinary PyTorch training script: it knows nothing of Gainshare and prints its loss as scripts do.

Models: a variational auto-encoder, a classifier, a convolutional classifier, a recurrent classifier and a transformer,
on digit-like images made from a seed (no download). `--style` chooses what is printed: each style is that of a public
example or library. The number of steps is the script's own choice (the variable TRAIN_STEPS) unless `--steps` gives it.
"""

import argparse
import json
import os

import torch
from torch import nn
from torch.nn import functional as F


def images(count, seed):
    """Ten blotchy prototypes of 28x28 pixels, shifted, with flipped pixels and some wrong labels.

    They are quick to learn, but never exactly.
    """
    g = torch.Generator().manual_seed(seed)
    coarse = torch.rand(10, 1, 7, 7, generator=g)
    prototypes = F.interpolate(coarse, size=(28, 28), mode="bilinear", align_corners=False).squeeze(1) > 0.6
    labels = torch.randint(0, 10, (count,), generator=g)
    shifts = torch.randint(-3, 4, (count,), generator=g)
    x = torch.stack([torch.roll(prototypes[k], int(s), dims=1) for k, s in zip(labels, shifts)])
    x = x ^ (torch.rand(count, 28, 28, generator=g) < 0.03)
    wrong = torch.rand(count, generator=g) < 0.1
    labels[wrong] = torch.randint(0, 10, (int(wrong.sum()),), generator=g)
    return x.float().view(count, 784), labels


class Vae(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.encode = nn.Linear(784, hidden)
        self.mean, self.spread = nn.Linear(hidden, 20), nn.Linear(hidden, 20)
        self.decode = nn.Sequential(nn.Linear(20, hidden), nn.ReLU(), nn.Linear(hidden, 784))

    def loss(self, x, _labels):
        h = F.relu(self.encode(x))
        mean, spread = self.mean(h), self.spread(h)
        z = mean + torch.exp(0.5 * spread) * torch.randn_like(mean)
        reconstruction = F.binary_cross_entropy_with_logits(self.decode(z), x, reduction="sum")
        divergence = -0.5 * torch.sum(1 + spread - mean.pow(2) - spread.exp())
        return (reconstruction + divergence) / len(x)


class Mlp(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10)
        )

    def loss(self, x, labels):
        return F.cross_entropy(self.layers(x), labels)


class Conv(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * 14 * 14, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 10),
        )

    def loss(self, x, labels):
        return F.cross_entropy(self.layers(x.view(-1, 1, 28, 28)), labels)


class Rnn(nn.Module):
    """Reads an image row by row."""

    def __init__(self, hidden):
        super().__init__()
        self.cell = nn.GRU(28, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 10)

    def loss(self, x, labels):
        states, _ = self.cell(x.view(-1, 28, 28))
        return F.cross_entropy(self.out(states[:, -1]), labels)


class Transformer(nn.Module):
    """Every row of an image is a token."""

    def __init__(self, hidden):
        super().__init__()
        width = max(hidden // 8, 1) * 4
        self.embed = nn.Linear(28, width)
        self.place = nn.Parameter(torch.zeros(28, width))
        layer = nn.TransformerEncoderLayer(width, 4, hidden, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.out = nn.Linear(width, 10)

    def loss(self, x, labels):
        states = self.layers(self.embed(x.view(-1, 28, 28)) + self.place)
        return F.cross_entropy(self.out(states.mean(dim=1)), labels)


MODELS = {"vae": Vae, "mlp": Mlp, "conv": Conv, "rnn": Rnn, "transformer": Transformer}

# Steps in an epoch, for the styles that print epochs.
EPOCH = 64


def report(style, step, steps, loss, batch):
    """One report as a public script of this style prints it."""
    epoch, place = (step - 1) // EPOCH + 1, (step - 1) % EPOCH + 1
    if style == "steps":  # says how many there will be
        return f"step {step}/{steps} loss: {loss:.5f}"
    if style == "keras":  # says how many epochs there will be
        return f"Epoch {epoch}/{-(-steps // EPOCH)}\n{place}/{EPOCH} - loss: {loss:.4f}"
    if style == "json":  # says the total
        return json.dumps({"step": step, "total_steps": steps, "loss": round(loss, 5)})
    if style == "examples":  # PyTorch's examples: the place in an epoch, and not how many epochs there will be
        return f"Train Epoch: {epoch} [{place * batch}/{EPOCH * batch} ({100 * place / EPOCH:.0f}%)]\tLoss: {loss:.6f}"
    if style == "language":  # PyTorch's language model: the same
        return f"| epoch {epoch:3d} | {place:5d}/{EPOCH:5d} batches | lr 0.00 | ms/batch 0.00 | loss {loss:5.2f}"
    # Hugging Face's trainer where no bar is drawn: neither steps nor a total
    return str({"loss": round(loss, 4), "learning_rate": 1e-3, "epoch": round(step / EPOCH, 2)})


STYLES = ["steps", "keras", "json", "examples", "language", "trainer"]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("model", choices=MODELS)
    p.add_argument("--steps", type=int, default=int(os.environ.get("TRAIN_STEPS", "1000")))
    p.add_argument("--batch", type=int, default=128)
    p.add_argument("--hidden", type=int, default=400)
    p.add_argument("--every", type=int, default=20, help="steps between two printed losses (their mean)")
    p.add_argument("--style", choices=STYLES, default="steps", help="what a report looks like")
    args = p.parse_args()
    torch.manual_seed(1)
    x, labels = images(8192, seed=7)
    model = MODELS[args.model](args.hidden)
    # The first optimizer of a program imports much of PyTorch, on one core.
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    print("ready to train", flush=True)
    mean = 0.0
    for step in range(1, args.steps + 1):
        pick = torch.randint(0, len(x), (args.batch,))
        loss = model.loss(x[pick], labels[pick])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean += loss.item() / args.every
        if step % args.every == 0:
            print(report(args.style, step, args.steps, mean, args.batch), flush=True)
            mean = 0.0


main()
