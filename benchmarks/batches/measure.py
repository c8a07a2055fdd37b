"""How near a large batch comes to a small one in as many epochs, after Jia et al. 2018.

Their recipe is LARS, no decay and no adaptation of biases and normalization, a warm-up and polynomial decay. A
worker trains a large batch in parts of the size of the smallest one (`Ensemble.accumulate`).
"""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks import models
from benchmarks.members import Accuracy, MemberResult, compare, declare, train_members
from benchmarks.models import Net
from benchmarks.results import Interval, Report, paired_interval
from ensemble.spec import Member, Recipe, SpecError

if TYPE_CHECKING:
    from pipelines import Pipeline

SGD, LARS = "sgd", "lars"
_WARM_UP = 0.2  # of a member's epochs; then the rate falls with the square of what is left
_SMOOTHING = 0.1
_COMMON = {"momentum": 0.9, "nesterov": True, "weight_decay": 5e-4}
# The share of a layer's norm that a step of rate 1 changes. The usual 0.001 needs rates of 10 to 60, which would
# apply unadapted to biases and normalization.
_LARS = {"name": "lars", **_COMMON, "trust": 0.02}
#: The options of each optimizer, which do not decay and adapt biases and normalization.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    SGD: {"name": "sgd", **_COMMON, "decay_norm": False},
    LARS: {**_LARS, "decay_norm": False},
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained over seeds, at the best learning rate of its own grid.

    Attributes:
        optimizer: a name of `OPTIMIZERS`; "lars" is the recipe, "sgd" the same without adaptation.
        batch_size: global.  epochs: of the training.
    """

    optimizer: str
    batch_size: int
    epochs: int

    def __str__(self) -> str:
        return f"{self.optimizer} at {self.batch_size}, {self.epochs} epochs"


@dataclass(frozen=True, kw_only=True)
class BatchRow(Accuracy):
    """One case; `difference` is from SGD with the smallest batch, in points of accuracy.

    Attributes:
        data: what was learned.
        optimizer, batch_size, epochs: see `Case`.  steps: of the whole training.
        lr: the best on the validation split.  edge: whether it is an end of the grid: a better one may lie beyond.
        grid: rate -> accuracy there in percent, one seed; None where it diverged. Empty where one rate was given.
        less_sgd: the difference from SGD with the same batch and epochs, paired by seed.
    """

    data: str
    optimizer: str
    batch_size: int
    epochs: int
    steps: int
    lr: float | None
    edge: bool
    grid: dict[float, float | None]
    less_sgd: Interval | None

    @property
    def grid_percent(self) -> str:
        """The grid in a line, for people."""
        return "  ".join(
            f"{lr:g}: {'-' if accuracy is None else f'{accuracy:.1f}'}" for lr, accuracy in self.grid.items()
        )


def make_cases(batches: Sequence[int], epochs: int, longer: Sequence[int]) -> list[Case]:
    """SGD at each batch, the smallest first, LARS at each larger one; both at the largest for longer, too.

    Args:
        batches: global, ascending.  longer: multiples of `epochs`.
    """
    sizes = [(batch, epochs) for batch in batches]
    sizes += [(batches[-1], epochs * times) for times in sorted({*longer} - {1})]
    made = [Case(optimizer=name, batch_size=batch, epochs=times) for batch, times in sizes for name in OPTIMIZERS]
    return [case for case in made if case.optimizer == SGD or case.batch_size > batches[0]]


def study_accuracy(net: Net, options: Namespace, report: Report) -> list[BatchRow]:
    """Train the grid of each case, and then its best rate with fresh seeds.

    The grid has one seed and is measured on the validation split, which chooses the rate; the fresh seeds are
    measured on the test split, by which nothing was chosen. Where one rate is given, it is taken.

    Raises:
        SpecError: there are not two batches, one is larger than the data, or there is too little data.
        PipelineError: the data cannot be read.
    """
    splits = models.splits(net, options.data, options.samples, options.held_out)
    batches = sorted(set(options.batches or ((64, 256, 1024) if options.data else (32, 256))))
    if len(batches) < 2 or batches[-1] > len(splits.train):
        raise SpecError(f"--batches: two at least, of at most {len(splits.train)} samples, got {batches}")

    def train(name: str, tried: Sequence[tuple[Case, float, int]], measured: Pipeline) -> list[MemberResult]:
        params = net.params(options.data)
        declared = declare(
            name,
            net,
            splits.train,
            measured,
            [make_member(case, params, lr, seed, batches[0]) for case, lr, seed in tried],
            options.epochs,
            recipe=Recipe(model=models.model, loss="cross_entropy", inputs=("image",), label_smoothing=_SMOOTHING),
            batch_size=batches[0],
            precision=options.precision,
            cache=None if options.data is None else "memory",  # digits are not decoded
            optimizer=None,  # each member has its own, and its schedule
            schedule=None,
        )
        return train_members(declared, options.run_dir, report)

    cases = make_cases(batches, options.epochs, options.longer)
    rates = {name: options.rates if name == SGD else options.lars_rates for name in OPTIMIZERS}
    single_rates = {case: rates[case.optimizer][0] for case in cases if len(rates[case.optimizer]) == 1}
    tried = [(case, lr, 0) for case in cases if case not in single_rates for lr in rates[case.optimizer]]
    grids: dict[Case, dict[float, float | None]] = {case: {} for case in cases}
    searched = train("batches-grid", tried, splits.valid) if tried else []
    for (case, lr, _), result in zip(tried, searched, strict=True):
        grids[case][lr] = result.accuracy
    best = {case: lr for case in cases if (lr := single_rates.get(case) or best_rate(grids[case])) is not None}
    chosen = [(case, lr, seed) for seed in range(1, options.seeds + 1) for case, lr in best.items()]
    results = train("batches-seeds", chosen, splits.test) if chosen else []
    return make_rows(grids, best, results, len(splits.train), net.data(options.data))


def make_rows(
    grids: Mapping[Case, dict[float, float | None]],
    best: Mapping[Case, float],
    results: Sequence[MemberResult],
    samples: int,
    data: str,
) -> list[BatchRow]:
    """A row of each case of `grids`, the baseline first.

    Args:
        best: the rates of cases that did not diverge everywhere.
        results: of those, ordered by seed, and within a seed as `best`.
    """
    compared = compare(results, [*best], next(iter(grids)))
    accuracies = {case: [one.accuracy for one in results[i :: len(best)]] for i, case in enumerate(best)}
    rows = []
    for case, grid in grids.items():
        sgd = accuracies.get(dataclasses.replace(case, optimizer=SGD), [])
        rows.append(
            BatchRow(
                data=data,
                **vars(case),
                steps=case.epochs * -(-samples // case.batch_size),
                lr=best.get(case),
                edge=bool(grid) and best.get(case) in (min(grid), max(grid)),
                grid=grid,
                less_sgd=None if case.optimizer == SGD else paired_interval(accuracies.get(case, []), sgd),
                **vars(compared.get(case, Accuracy(note="diverged at every rate of the grid"))),
            )
        )
    return rows


def make_member(case: Case, params: dict[str, Any], lr: float, seed: int, part: int) -> Member:
    """The member of a case, which normalizes `part` samples together."""
    return Member(
        {**params, "lr": lr},
        batch_size=case.batch_size,
        epochs=case.epochs,
        accumulate=max(1, case.batch_size // part),
        seed=seed,
        optimizer=OPTIMIZERS[case.optimizer],
        schedule={"name": "polynomial", "power": 2.0, "warmup_epochs": _WARM_UP * case.epochs},
    )


def best_rate(grid: Mapping[float, float | None]) -> float | None:
    """The learning rate with the highest accuracy, the smaller one of equals; None where all diverged."""
    done = {lr: accuracy for lr, accuracy in grid.items() if accuracy is not None}
    return max(sorted(done), key=lambda lr: done[lr]) if done else None
