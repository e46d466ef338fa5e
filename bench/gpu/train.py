"""An ordinary PyTorch training script for a GPU: it knows nothing of Gainshare and prints its loss as scripts do.

Models: a wide classifier and a transformer encoder, on data made from a seed. Both fill a large GPU.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        width = 4096
        layers = [layer for _ in range(6) for layer in (nn.Linear(width, width), nn.GELU())]
        self.layers = nn.Sequential(*layers, nn.Linear(width, 10))
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                nn.init.kaiming_normal_(layer.weight)

    def forward(self, x):
        return self.layers(x)


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, dropout=0)
        self.layers, self.out = nn.TransformerEncoder(layer, 4), nn.Linear(512, 10)

    def forward(self, x):
        return self.out(self.layers(x.view(len(x), -1, 512)).mean(1))


# The model, its batch, its number of features, and a rate with which its loss falls and stays a number.
MODELS = {"mlp": (Mlp, 4096, 4096, 0.001), "transformer": (Transformer, 64, 128 * 512, 0.01)}


def main():
    p = argparse.ArgumentParser()
    p.add_argument("model", choices=MODELS)
    p.add_argument("--steps", type=int, default=1000)
    p.add_argument("--every", type=int, default=10, help="steps between two printed losses")
    args = p.parse_args()
    kind, batch, features, rate = MODELS[args.model]
    torch.manual_seed(1)
    model = kind().cuda().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    # A few prototypes with noise: quick to learn, never exactly.
    prototypes = torch.randn(10, features, device="cuda")
    print("ready to train", flush=True)
    for step in range(1, args.steps + 1):
        labels = torch.randint(0, 10, (batch,), device="cuda")
        x = (prototypes[labels] / 4 + torch.randn(batch, features, device="cuda")).bfloat16()
        loss = F.cross_entropy(model(x).float(), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % args.every == 0:
            print(f"step {step}/{args.steps} loss: {loss.item():.5f}", flush=True)


main()
