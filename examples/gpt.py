"""Four small GPTs on film reviews, letter by letter. Reviews are packed into rows, once for all members.

ensemble run examples/gpt.py --set data=DIR          (DIR holds train.parquet and test.parquet)
"""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from ensemble import Ensemble, Recipe, Resources
from pipelines import Pipeline, sources

LETTERS = 128  # of ASCII; 0 ends a review, and fills rows


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 4):
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x, mask):
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.after(x))


class GPT(nn.Module):
    """Scores of the next letter, [b, length, letters]. A letter sees those before it in its own review alone."""

    def __init__(self, length: int, width: int, layers: int):
        super().__init__()
        self.letters, self.positions = nn.Embedding(LETTERS, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens, position, segment):
        mask = (segment[:, None, :, None] == segment[:, None, None, :]).tril()
        x = self.letters(tokens) + self.positions(position)
        for block in self.blocks:
            x = block(x, mask)
        return self.norm(x) @ self.letters.weight.T / self.letters.weight.shape[1] ** 0.5


def model(params):
    return GPT(params["length"], params["width"], params["layers"])


def optimizer(net, params):
    return torch.optim.AdamW(net.parameters(), lr=params["lr"])


def encode(record):
    return [*record["text"].encode("ascii", "replace"), 0]


def add_target(row):
    """The next letter of the same review; -100, which the loss leaves out, where there is none."""
    segment, following = row["segment"], np.append(row["segment"][1:], 0)
    has_next = (segment == following) & (segment > 0)
    return {**row, "target": np.where(has_next, np.append(row["tokens"][1:], 0), -100)}


def spec(data: str = "imdb", samples: int = 300, epochs: int = 2, length: int = 256, members: int = 4):
    train, test = (sources.parquet(f"{data}/{x}.parquet", columns=("text",)) for x in ("train", "test"))
    train, valid = train.take(samples).split(0.9, seed=0)  # reviews first: their rows have none in common

    def pipeline(reviews, seed=0):
        return Pipeline(sources.pack(reviews, encode, length), seed=seed).map(add_target)

    shapes = [(width, layers) for width in (32, 64) for layers in (2, 3)]
    return Ensemble(
        name="gpt",
        recipe=Recipe(
            model=model,
            loss="cross_entropy",
            inputs=("tokens", "position", "segment"),
            target="target",
            optimizer=optimizer,
            clip_norm=1.0,
        ),
        members=[{"width": w, "layers": n, "lr": 3e-3, "length": length} for w, n in shapes[:members]],
        train=pipeline(train),
        valid=pipeline(valid),
        test=pipeline(test.take(len(valid))),
        epochs=epochs,
        batch_size=8,
        objective="loss",
        resources=Resources(cpus_per_worker=0.5, gpus_per_worker=0.25),
    )
