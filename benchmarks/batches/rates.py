"""What the part 'rates' of the study of batches measures: learning rates for n workers of a fixed batch each.

n workers with a batch of b each and one process that accumulates n batches of b before a step compute the same, so
that members of one Ensemble differ in n and in the law of the learning rate, and in nothing else. The networks are
those of Svyatkovskiy et al. 2019 in small: an LSTM that reads texts, and the CNN and LSTM of `examples/plasma.py`,
which warns of made up disruptions as theirs does of real ones.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import models
from benchmarks.batches.accuracy import best_rate
from benchmarks.members import Accuracy, MemberResult, compare, declare, train_members
from benchmarks.options import chosen_nets
from ensemble.bench.results import Interval, Report, interval, paired_interval
from ensemble.spec import Ensemble, Member, Resources
from ensemble.spec.recipe import Recipe
from ensemble.spec.spec_file import load_spec
from pipelines import Pipeline

PLASMA = "plasma"
UNSCALED, CAPPED, DAMPED = LAWS = ("unscaled", "capped_linear", "damped")
#: Of each optimizer: its options, and rates of one worker of which the best is taken. FRNN's is Adam.
OPTIMIZERS: dict[str, tuple[dict[str, Any], list[float]]] = {
    "adam": ({"name": "adam"}, [0.0003, 0.001, 0.003]),
    "sgd": ({"name": "sgd", "momentum": 0.9}, [0.01, 0.03, 0.1]),
}
_CLIP = 10.0  # FRNN's
_PLASMA_WIDTH = 16
_EXAMPLE = Path(__file__).parents[2] / "examples" / "plasma.py"


@dataclass(frozen=True, kw_only=True)
class RateRow(Accuracy):
    """One number of workers with one law.

    Attributes:
        model, data, metric, optimizer, law: what was run. `accuracy` is the metric in percent;
            `difference` is from the damped law with as many workers.
        less_one: the metric's difference from one worker with the same seed.
        workers: n.  batch_size: global, n times a worker's.  steps: of the whole training.
        grid: rate of one worker -> the metric there on the validation split, one seed; None where it diverged.
        lr0: the best of it.  edge: whether that is an end of the grid.
        lr: by the law.
        target: the metric to be reached, in percent: a part of the mean final one of one worker.
        trained, reached: the numbers of seeds, and of those that reached it.
        epochs: until then; of a seed that never did one more than it was trained for, which is the least possible.
    """

    model: str
    data: str
    metric: str
    optimizer: str
    law: str
    workers: int
    batch_size: int
    steps: int
    grid: dict[float, float | None]
    lr0: float
    edge: bool
    lr: float
    target: float
    less_one: Interval | None
    trained: int
    reached: int
    epochs: Interval

    @property
    def epochs_to_target(self) -> str:
        """For people: never reached is said."""
        missed = self.trained - self.reached
        return f"at least {self.epochs}; {missed} of {self.trained} never" if missed else str(self.epochs)


@dataclass(frozen=True)
class Task:
    """What is trained.

    Attributes:
        declared: an Ensemble with the recipe and the data.  params: of the network.
        train: to learn from.  valid: to choose by.  test: to measure by.
    """

    name: str
    data: str
    declared: Ensemble
    params: dict[str, Any]
    train: Pipeline
    valid: Pipeline
    test: Pipeline


def study_rates(tasks: Sequence[Task], options: Namespace, report: Report) -> list[RateRow]:
    """Choose the rate of one worker, then train each number of workers with each law, over seeds.

    One worker is trained unscaled alone: the laws differ from that by 1 % at most. It is always added.
    """
    return [row for task in tasks for row in _study_task(task, options, report)]


def _study_task(task: Task, options: Namespace, report: Report) -> list[RateRow]:
    batch, epochs = options.law_batch, options.law_epochs
    optimizer, usual = OPTIMIZERS[options.law_optimizer]
    grid_rates, seeds = options.law_rates or usual, range(1, options.law_seeds + 1)

    def train(name: str, cases: Sequence[tuple[int, str, float, int]], measured: Pipeline) -> list[MemberResult]:
        members = [
            Member(
                {**task.params, "lr": lr},
                seed=seed,
                optimizer=optimizer,
                batch_size=n * batch,
                accumulate=n,
                schedule=schedule_of(law, batch),
            )
            for n, law, lr, seed in cases
        ]
        declared = dataclasses.replace(task.declared, name=name, members=members, valid=measured)
        return train_members(declared, options.run_dir, report)

    found = train(f"rates-{task.name}-grid", [(1, UNSCALED, lr, 0) for lr in grid_rates], task.valid)
    grid = {lr: result.accuracy for lr, result in zip(grid_rates, found, strict=True)}
    lr0 = best_rate(grid)
    if lr0 is None:
        report(f"{task.name}: diverged at every rate of the grid, left out")
        return []
    counts = sorted({1, *options.law_workers})
    pairs = [(n, law) for n in counts for law in LAWS if n > 1 or law == UNSCALED]
    cases = [(n, law, lr0, seed) for n, law in pairs for seed in seeds]
    results = dict(zip(cases, train(f"rates-{task.name}", cases, task.test), strict=True))
    alone = [results[1, UNSCALED, lr0, seed].accuracy for seed in seeds]
    finished = [accuracy for accuracy in alone if accuracy is not None]
    target = options.target / 100 * statistics.fmean(finished) if finished else math.nan
    rows = []
    for n in counts:
        laws = [law for count, law in pairs if count == n]
        own = [results[n, law, lr0, seed] for seed in seeds for law in laws]
        compared = compare(own, laws, DAMPED)
        for place, law in enumerate(laws):
            seen = own[place :: len(laws)]
            times = [epochs_to(each.history, target) for each in seen]
            rows.append(
                RateRow(
                    model=task.name,
                    data=task.data,
                    metric=str(task.declared.objective),
                    optimizer=options.law_optimizer,
                    law=law,
                    workers=n,
                    batch_size=n * batch,
                    steps=epochs * -(-len(task.train) // (n * batch)),
                    grid=grid,
                    lr0=lr0,
                    edge=lr0 in (min(grid), max(grid)),
                    lr=rate_of(law, lr0, n),
                    target=target,
                    less_one=paired_interval([each.accuracy for each in seen], alone) if n > 1 else None,
                    trained=len(times),
                    reached=len(times) - times.count(None),
                    epochs=interval([epochs + 1 if time is None else time for time in times]),
                    **vars(compared[law]),
                )
            )
    return rows


def make_task(name: str, options: Namespace) -> Task:
    """A network of `benchmarks.models` on its data, or `PLASMA`.

    Raises:
        SpecError: there is no such network, or too little data.
        PipelineError: the data cannot be read.
    """
    common: dict[str, Any] = {
        "precision": options.precision,
        "epochs": options.law_epochs,
        "resources": Resources(cpus_per_worker=1.0),  # as many at once as there are cores
        "optimizer": None,  # each member has its own
        "schedule": None,
    }
    if name != PLASMA:
        [net] = chosen_nets(options, [name], images=False)
        splits = models.splits(net, options.data, options.law_samples, options.held_out)
        recipe, params = dataclasses.replace(models.recipe(net), clip_norm=_CLIP), net.params(options.data)
        declared = declare(name, net, splits.train, splits.test, [Member(params)], recipe=recipe, **common)
        return Task(name, net.data(options.data), declared, params, **vars(splits))
    example = load_spec(_EXAMPLE, [f"shots={options.law_samples}"])
    train, valid, test, params = example.train, example.valid, example.test, {"width": _PLASMA_WIDTH}
    assert isinstance(train, Pipeline) and valid and test and isinstance(example.recipe, Recipe)
    recipe = dataclasses.replace(example.recipe, objective="shot_roc_auc", mode="max", clip_norm=_CLIP)
    common |= {"recipe": recipe, "objective": None, "mode": None, "members": [Member(params)]}
    common |= {"checkpoint_every": options.law_epochs, "combine": "average", "calibrate": False, "retries": 0}
    declared = dataclasses.replace(example, test=None, **common)
    return Task(name, "made up", declared, params, train, valid, test)


def schedule_of(law: str, batch: int) -> dict[str, Any]:
    """The schedule of a law for any number of workers with a batch of that size each."""
    return {"name": "constant"} if law == UNSCALED else {"name": law, "base_batch_size": batch}


def rate_of(law: str, lr0: float, workers: int) -> float:
    """The learning rate by a law with its usual options."""
    from torch import nn, optim

    from ensemble.train.lr_schedulers import make_schedule

    optimizer = optim.SGD(nn.Linear(1, 1).parameters(), lr=lr0)
    make_schedule(schedule_of(law, 1), optimizer, {}, steps=1, steps_per_epoch=1, workers=1, batch_size=workers)
    return float(optimizer.param_groups[0]["lr"])


def epochs_to(history: Sequence[float], target: float) -> int | None:
    """The number of the first epoch, from 1, at whose end a metric has reached a target; None if none has."""
    return next((number for number, value in enumerate(history, start=1) if value >= target), None)
