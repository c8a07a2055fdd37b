"""Trains ensembles whose members read one order of the samples, and ensembles whose members have their own.

Batches are those of `Pipeline.loader`, as members of a run get them; all members of an arm train side by side by
`torch.vmap`. Member m of seed s starts from the weights of seed 1000 s + m. Its own order is that of a pipeline
with this seed; the shared order is that of member 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, stack_module_state
from torch.nn import functional

from benchmarks.results import Spread
from benchmarks.what_it_buys.tasks import TASKS, Arrays, Task, make_pipelines, read_pool, split

SHARED, OWN, SAME = "shared", "own", "same"
RARE, RARE_CLASS, RARE_SAMPLES, FOUND, SPLITS = "rare", 8, 15, 0.25, 3
MEMBERS, FOLDS = 8, 5


@dataclass(frozen=True, kw_only=True)
class OrderRow:
    """A figure of a task's ensembles: medians over seeds, of `rare` means, with bootstrap intervals of 95 %.

    Attributes:
        shared, own, same: one order; orders of their own; these with equal initial weights.
        change: own - shared, paired by seed.
    """

    task: str
    figure: str
    shared: Spread
    own: Spread
    same: Spread | None
    change: Spread
    ensembles: int


def build(task: Task) -> nn.Module:
    """Returns a perceptron for a table, two convolutions for images."""
    if task.has_augmentation:
        layers: list[nn.Module] = []
        for before, after in ((3, 8), (8, 16)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, 10))
    inputs, classes = (30, 2) if task.name == "cancer" else (64, 10)
    return nn.Sequential(*_dense(inputs, 32), *_dense(32, 32), nn.Linear(32, classes))


def _dense(inputs: int, outputs: int) -> tuple[nn.Module, nn.Module]:
    return nn.Linear(inputs, outputs), nn.ReLU()


def train_members(
    task: Task, starts: list[int], streams: list[tuple[Arrays, int]], kept: np.ndarray | None = None
) -> list[nn.Module]:
    """Train a member from the weights of each seed in `starts`.

    Args:
        streams: arrays and pipeline seed of each stream; as many members in a row read each.
        kept: which samples each member learns from, bool [m, n]; None for all.
    """
    nets = []
    for start in starts:
        torch.manual_seed(start)
        nets.append(build(task))
    parameters = {name: value.detach().requires_grad_() for name, value in stack_module_state(nets)[0].items()}
    optimizer = torch.optim.AdamW(parameters.values(), lr=3e-3)

    def loss(of: Any, x: torch.Tensor, label: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        each = functional.cross_entropy(functional_call(nets[0], of, (x,)), label, reduction="none")
        return (each * weight).sum() / weight.sum().clip(1)

    readers = [make_pipelines(task, *stream)["train"].loader(task.batch_size, task.epochs) for stream in streams]
    for batches in zip(*readers, strict=True):
        x, label, index = (
            torch.stack([batch[name] for batch in batches]).repeat_interleave(len(nets) // len(streams), 0)
            for name in ("x", "label", "index")
        )
        weight = np.ones(label.shape) if kept is None else np.take_along_axis(kept, index.numpy(), 1)
        optimizer.zero_grad()
        torch.vmap(loss)(parameters, x, label, torch.from_numpy(weight).float()).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    for number, net in enumerate(nets):
        net.load_state_dict({name: value[number].detach() for name, value in parameters.items()})
    return nets


def predict(nets: list[nn.Module], task: Task, arrays: Arrays) -> np.ndarray:
    """Returns the probabilities [m, n, classes] of the test split."""
    [batch] = make_pipelines(task, arrays)["test"].loader(len(arrays["test"][1]))
    with torch.inference_mode():
        values = [net(batch["x"]).softmax(1)[batch["index"].argsort()].numpy() for net in nets]
    return np.stack(values)


def describe(values: np.ndarray, label: np.ndarray) -> dict[str, float]:
    """Returns the figures of an ensemble with the members' probabilities [m, n, classes]."""
    chosen, mean = values.argmax(2), values.mean(0)
    wrong, distinct = chosen != label, ~np.eye(len(values), dtype=bool)

    def nll(of: np.ndarray) -> float:
        return -float(np.log(of[..., np.arange(len(label)), label].clip(1e-12)).mean())

    erring = wrong[wrong.any(1)]  # a member without errors has no correlation
    pairs = np.corrcoef(erring)[~np.eye(len(erring), dtype=bool)] if len(erring) > 1 else np.zeros(1)
    return {
        "correlation of errors": float(pairs.mean()),
        "disagreement, %": 100 * float((chosen[:, None] != chosen).mean(2)[distinct].mean()),
        "member accuracy, %": 100 * float(1 - wrong.mean()),
        "member NLL": nll(values),
        "ensemble accuracy, %": 100 * float((mean.argmax(1) == label).mean()),
        "ensemble NLL": nll(mean),
    }


def resample(statistic: Callable[[np.ndarray], Any], values: np.ndarray) -> Spread:
    """Returns a statistic of values [splits, seeds, ...] with its bootstrap interval of 95 % over seeds."""
    rng, seeds = np.random.default_rng(0), values.shape[1]
    drawn = [float(statistic(values[:, rng.integers(seeds, size=seeds)])) for _ in range(2000)]
    low, high = np.quantile(drawn, (0.025, 0.975))
    return Spread(float(statistic(values)), float(low), float(high))


def compare_orders(name: str, data: str | None, seeds: int, epochs: int | None = None) -> list[OrderRow]:
    """Train an ensemble of each seed in each arm; each seed has a split of its own."""
    task = dataclasses.replace(TASKS[name], epochs=epochs or TASKS[name].epochs)
    pool = read_pool(task, data)
    arrays = [split(task, pool, seed) for seed in range(seeds)]
    own = [1000 * seed + member for seed in range(seeds) for member in range(MEMBERS)]
    found = {}
    for arm in (SHARED, OWN, SAME):
        starts = [seed - seed % 1000 for seed in own] if arm == SAME else own
        streams = [(arrays[seed // 1000], seed) for seed in own if arm != SHARED or seed % 1000 == 0]
        nets = train_members(task, starts, streams)
        of_seed = [nets[first : first + MEMBERS] for first in range(0, len(nets), MEMBERS)]
        pairs = zip(of_seed, arrays, strict=True)
        figures = [describe(predict(members, task, part), part["test"][1]) for members, part in pairs]
        found[arm] = {figure: np.array([[each[figure] for each in figures]]) for figure in figures[0]}
    rows = []
    for figure in found[OWN]:
        shared, own_order, same = (found[arm][figure] for arm in found)
        shown = {"shared": shared, "own": own_order, "same": same, "change": own_order - shared}
        spreads = {key: resample(np.median, values) for key, values in shown.items()}
        rows.append(OrderRow(task=name, figure=figure, ensembles=seeds, **spreads))
    return rows


def compare_rare(seeds: int, epochs: int | None = None) -> list[OrderRow]:
    """Train five fold members on digits with a rare class, for each seed of three splits, in both arms."""
    task = dataclasses.replace(TASKS["digits"], epochs=epochs or 6, batch_size=8)
    pool = read_pool(task, None)
    own = [1000 * seed + member for seed in range(seeds) for member in range(FOLDS)]
    parts = [make_rare(split(task, pool, number)) for number in range(SPLITS)]
    both = np.stack([[_find_rare(order, task, part, own) for part in parts] for order in (SHARED, OWN)], 2)
    figures: dict[str, Callable[[np.ndarray], Any]] = {
        f"members of {FOLDS} that learn it": lambda recall: FOLDS * (recall[..., :-1] >= FOUND).mean(),
        "variance ratio": lambda recall: variance_ratio(recall[..., :-1] >= FOUND),
        "ensembles without one, %": lambda recall: 100 * (recall[..., :-1] < FOUND).all(-1).mean(),
        "ensemble recall, %": lambda recall: 100 * recall[..., -1].mean(),
    }
    rows = []
    for figure, of in figures.items():
        shared, own_order = (resample(of, both[:, :, arm]) for arm in (0, 1))
        change = resample(_difference(of), both)
        shown = {"shared": shared, "own": own_order, "change": change}
        rows.append(OrderRow(task=RARE, figure=figure, ensembles=SPLITS * seeds, same=None, **shown))
    return rows


def _difference(of: Callable[[np.ndarray], Any]) -> Callable[[np.ndarray], Any]:
    return lambda both: of(both[:, :, 1]) - of(both[:, :, 0])


def make_rare(arrays: Arrays) -> Arrays:
    """Returns digits with few eights to learn from, about 1.5 %; all others are to measure by."""
    x, label = (np.concatenate(parts) for parts in zip(*arrays.values(), strict=True))
    learned = np.arange(len(label)) < len(arrays["train"][1])
    learned[np.flatnonzero(learned & (label == RARE_CLASS))[RARE_SAMPLES:]] = False
    return {"train": (x[learned], label[learned]), "test": (x[~learned], label[~learned])}


def _find_rare(order: str, task: Task, arrays: Arrays, own: list[int]) -> np.ndarray:
    """Returns the share of the rare test samples that members, and last their average, find: [seeds, 6]."""
    label = arrays["train"][1]
    kept = np.random.default_rng(0).permutation(len(label)) % FOLDS != np.arange(FOLDS)[:, None]
    streams = [(arrays, seed) for seed in own if order != SHARED or seed % 1000 == 0]
    nets = train_members(task, own, streams, np.tile(kept, (len(own) // FOLDS, 1)))
    values = predict(nets, task, arrays)[:, arrays["test"][1] == RARE_CLASS]
    values = values.reshape(-1, FOLDS, *values.shape[1:])
    chosen = np.concatenate([values, values.mean(1, keepdims=True)], 1).argmax(3)
    return np.asarray((chosen == RARE_CLASS).mean(2))


def variance_ratio(learned: np.ndarray) -> float:
    """Returns the variance of how many members learn, over that of independent ones; bool [splits, seeds, m]."""
    share = learned.mean(1)
    return float(learned.sum(2).var(1).sum() / max((share * (1 - share)).sum(), 1e-9))
