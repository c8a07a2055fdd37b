"""Six LSTMs that tell good film reviews from bad ones, on one shared pipeline of tokenized text.

ensemble run examples/imdb.py --set data=DIR         (DIR holds train.parquet and test.parquet)
"""

import torch
from torch import nn
from torch.nn import functional as F

from ensemble import Ensemble, Recipe, Resources
from pipelines import Pipeline, sources, stages


class Reader(nn.Module):
    """Words to vectors, an LSTM over them, the average of its outputs over the words that are there."""

    def __init__(self, words: int, width: int):
        super().__init__()
        self.embed = nn.Embedding(words, width, padding_idx=0)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.out = nn.Linear(width, 2)

    def forward(self, text):
        there = (text != 0).unsqueeze(-1)
        read, _ = self.lstm(self.embed(text))
        return self.out((read * there).sum(1) / there.sum(1).clamp(min=1))


def model(params):
    return Reader(params["words"], params["width"])


def loss(net, batch):
    return F.cross_entropy(net(batch["text"]), batch["label"], reduction="none")


def optimizer(net, params):
    return torch.optim.AdamW(net.parameters(), lr=params["lr"])


def spec(
    data: str = "imdb",
    samples: int = 25_000,
    epochs: int = 5,
    length: int = 256,
    words: int = 20_000,
    members: int = 6,
):
    train, test = (sources.parquet(f"{data}/{x}.parquet", columns=("text", "label")) for x in ("train", "test"))
    train, valid = train.take(min(samples, len(train))).split(0.9, seed=0)
    vocabulary = stages.build_vocabulary((train[i]["text"] for i in range(min(len(train), 5000))), size=words - 2)

    def pipeline(source, seed=0):
        tokens = Pipeline(source, seed=seed).map(stages.tokenize("text", vocabulary=vocabulary))
        return tokens.map(stages.pad("text", length=length, truncate="end"))

    return Ensemble(
        name="imdb",
        recipe=Recipe(model=model, loss=loss, optimizer=optimizer, clip_norm=10.0),
        members=[{"width": w, "lr": lr, "words": words} for w in (64, 96, 128) for lr in (1e-3, 3e-3)][:members],
        train=pipeline(train),
        valid=pipeline(valid),
        test=pipeline(test.take(min(samples, len(test)))),
        epochs=epochs,
        batch_size=64,
        precision="bf16",
        resources=Resources(cpus_per_worker=0.3, gpus_per_worker=0.125),
    )
