"""Runs the parts of the scaling study.

Workers: one member over 1 to k workers, a step's time beside the model t = compute / n + communication(n).

Batches: the batch grows with the number of epochs fixed; SGD against LARS, each at its grid's best learning rate.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks import models
from benchmarks.members import declare, train_members
from benchmarks.models import Net
from benchmarks.scaling.rows import LARS, LARS_DECAY, REAL, SGD, STRONG, WEAK, BatchRow, WorkerRow
from benchmarks.training import TrainingSetup
from ensemble.bench.launch import hosts
from ensemble.bench.launch.ranks import contiguous, run_ranks
from ensemble.bench.results import Report, interval, paired_interval
from ensemble.spec import Member, SpecError
from ensemble.spec.options import COMPRESSIONS, resolve

if TYPE_CHECKING:
    from pipelines import Pipeline

_MEASURE = "benchmarks.scaling.measure:time_steps"
_WORKER_PRECISION, _MEMBER_PRECISION = "fp32", "bf16"


def study_workers(
    net: Net,
    workers: Sequence[int],
    *,
    data: str | None,
    scalings: Sequence[str],
    step_ms: Sequence[float | None],
    only_cores: bool,
    batch_size: int,
    steps: int,
    compression: str,
    on_hosts: int,
    link: str | None,
    report: Report,
) -> list[WorkerRow]:
    """Time a member's steps with each number of workers.

    Args:
        workers: how many; one worker is always added, as the baseline.
        step_ms: None computes for real; a number is an emulated accelerator's time for `batch_size` samples.
        only_cores: leave out more workers than cores where they compute for real.
        batch_size: global where scaling is strong; of each worker where it is weak.
        steps: of which medians are taken.
        on_hosts: on how many hosts in network namespaces the workers are, in equal parts.
        link: the rate of the hosts' links.

    Raises:
        SpecError: a batch has fewer samples than workers; there is no such compression; hosts cannot be made.
        RanksError: a worker failed.
    """
    workers = sorted({1, *workers})
    resolve("--compression", compression, COMPRESSIONS)
    if STRONG in scalings and workers[-1] > batch_size:
        raise SpecError(
            f"a batch of {batch_size} is too small for {workers[-1]} workers: take a larger --batch-size"
        )
    if on_hosts > 1 and (reason := hosts.unavailable()):
        raise SpecError(f"--hosts {on_hosts}: {reason}")
    cores = len(os.sched_getaffinity(0))
    options: dict[str, Any] = {"steps": steps, "precision": _WORKER_PRECISION, "compression": compression}
    rows: list[WorkerRow] = []
    with hosts.make_hosts(on_hosts if on_hosts > 1 else 0, link) as made:
        for wait_ms, scaling in itertools.product(step_ms, scalings):
            compute = REAL if wait_ms is None else f"{wait_ms:g} ms"
            one: dict[str, float] | None = None
            for count in workers:
                if only_cores and wait_ms is None and count > cores:
                    continue
                size = batch_size * (count if scaling == WEAK else 1)
                step_s = None if wait_ms is None else wait_ms / 1000 * size / batch_size
                report(f"{scaling} scaling, {count} workers, batch {size}, compute {compute}")
                setup = TrainingSetup(net=net, data=data, batch_size=size).to_options(**options, step_s=step_s)
                used_hosts = min(count, on_hosts)
                ranks = run_ranks(_MEASURE, setup, placement=contiguous(count, used_hosts), hosts=made)
                times = _merge_ranks(ranks)
                one = one or times
                communication_s = max(0.0, times["idle_s"] - one["idle_s"])
                shared_cores = cores if wait_ms is None else None
                predicted_s = predict_step_s(one["step_s"], communication_s, count, scaling, shared_cores)
                rows.append(
                    WorkerRow(
                        scaling=scaling,
                        compute=compute,
                        model=net.name,
                        precision=_WORKER_PRECISION,
                        compression=compression,
                        cores=cores,
                        workers=count,
                        hosts=used_hosts,
                        link=link if on_hosts > 1 else None,
                        batch_size=size,
                        examples_per_s=size / times["step_s"],
                        step_ms=1000 * times["step_s"],
                        compute_ms=1000 * (times["step_s"] - times["sync_s"]),
                        sync_ms=1000 * times["sync_s"],
                        communication_ms=1000 * communication_s,
                        predicted_ms=1000 * predicted_s,
                        efficiency=one["step_s"] * size / batch_size / times["step_s"] / count,
                        sent_mb=times["sent_bytes"] / 1e6,
                    )
                )
    return rows


def _merge_ranks(ranks: Sequence[dict[str, float]]) -> dict[str, float]:
    """The slowest rank's step and its synchronization, the longest idle step, the most bytes."""
    most = {name: max(rank[name] for rank in ranks) for name in ("idle_s", "sent_bytes")}
    return {**max(ranks, key=lambda rank: rank["step_s"]), **most}


def predict_step_s(
    compute_s: float, communication_s: float, workers: int, scaling: str, cores: int | None
) -> float:
    """Seconds of a step by the model: one worker's, divided by n where scaling is strong, plus communication.

    Args:
        compute_s: a step of one worker with its batch.
        cores: that the workers share, which limits them; None where each computes on a device of its own.
    """
    work = compute_s * (1 if scaling == STRONG else workers)
    return work / (workers if cores is None else min(workers, cores)) + communication_s


# --- batches -------------------------------------------------------------------------------------------------

_DECAY, _MOMENTUM = 5e-4, 0.9
# The share of a layer's norm that a step of rate 1 changes. The usual 0.001 needs rates of 10 to 30, which would
# apply unadapted to biases and normalization.
_TRUST = 0.02
# Running statistics of normalization are averages over 1,280 samples, as is usual with this batch. Averages over
# ten batches would lag behind the weights where there are few steps: at 8,192 SGD would lose one point and LARS,
# which changes weights faster, eight. (Akiba et al. 2017 use the last batch's for this reason.)
_NORM_BATCH = 128
_COMMON = {"momentum": _MOMENTUM, "weight_decay": _DECAY}
#: The options of each optimizer and the learning rates of its grid. Only the last one decays and adapts biases and
#: normalization.
OPTIMIZERS: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {
    SGD: ({"name": "sgd", **_COMMON, "decay_norm": False}, (0.05, 0.1, 0.2, 0.4, 0.8)),
    LARS: ({"name": "lars", **_COMMON, "trust": _TRUST, "decay_norm": False}, (0.5, 1.0, 2.0, 4.0)),
    LARS_DECAY: ({"name": "lars", **_COMMON, "trust": _TRUST, "decay_norm": True}, (0.5, 1.0, 2.0, 4.0)),
}


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """What is trained.

    Attributes:
        net: what is trained.  data: the directory of the data sets; None for the digits.
        batches: sizes, ascending.
        grids: optimizer -> its learning rates, ascending.
        epochs: of all members.  warmup: the share of the epochs in which the rate rises; then it falls, squared.
        samples, held_out: to learn from; to choose by, and as many to measure by.
        seeds: of the chosen.
        micro_batch: samples of the parts in which larger batches are trained, and which batch normalization then
            sees; None trains batches whole.
    """

    net: Net
    data: str | None
    batches: tuple[int, ...] = (128, 512, 2048, 8192)
    grids: dict[str, tuple[float, ...]] = field(default_factory=lambda: {k: v for k, (_, v) in OPTIMIZERS.items()})
    epochs: int = 12
    warmup: float = 0.2
    samples: int = 10_000
    held_out: int = 2_000
    seeds: int = 5
    micro_batch: int | None = None

    def member(self, optimizer: str, batch: int, lr: float, seed: int) -> Member:
        """The member with this optimizer, global batch, learning rate and seed."""
        parts = 1 if self.micro_batch is None else -(-batch // self.micro_batch)
        norm = min(1.0, models.NORM_MOMENTUM * batch / parts / _NORM_BATCH)
        return Member(
            {**self.net.params(self.data), "lr": lr, "norm_momentum": norm},
            batch_size=batch,
            seed=seed,
            optimizer=OPTIMIZERS[optimizer][0],
            accumulate=parts,
        )


def study_batches(plan: BatchPlan, run_dir: str | None, report: Report) -> list[BatchRow]:
    """Train the grid and then the best rate of each batch and optimizer with fresh seeds.

    The grid has one seed and is measured on the validation split, which chooses the rate; the fresh seeds are
    measured on the test split, by which nothing was chosen.

    Raises:
        SpecError: a batch is larger than the data, or there is too little data.
        PipelineError: the data cannot be read.
    """
    splits = models.splits(plan.net, plan.data, plan.samples, plan.held_out)
    if plan.batches[-1] > len(splits.train):
        raise SpecError(f"a batch of {plan.batches[-1]} is more than the {len(splits.train)} samples: take more")

    train = splits.train

    def run(name: str, members: list[Member], measured: Pipeline) -> list[float | None]:
        report(f"{name}: {len(members)} members, {plan.epochs} epochs of {len(train)} samples")
        declared = declare(
            name,
            plan.net,
            train,
            measured,
            members,
            plan.epochs,
            batch_size=plan.batches[0],
            precision=_MEMBER_PRECISION,
            schedule={"name": "polynomial", "power": 2.0, "warmup_epochs": plan.warmup * plan.epochs},
            cache=None if plan.data is None else "memory",  # digits are not decoded
            optimizer=None,  # each member has its own
        )
        return [result.accuracy for result in train_members(declared, run_dir, report)]

    cases = [(batch, name, lr) for batch in plan.batches for name, grid in plan.grids.items() for lr in grid]
    accuracies = run("scaling-grid", [plan.member(name, batch, lr, 0) for batch, name, lr in cases], splits.valid)
    grids: dict[tuple[int, str], dict[float, float | None]] = {}
    for (batch, optimizer, lr), accuracy in zip(cases, accuracies, strict=True):
        grids.setdefault((batch, optimizer), {})[lr] = accuracy
    rates = {key: best_rate(grid) for key, grid in grids.items()}
    seeds = range(1, plan.seeds + 1)
    repeated = [(key, lr, seed) for key, lr in rates.items() if lr is not None for seed in seeds]
    members = [plan.member(key[1], key[0], lr, seed) for key, lr, seed in repeated]
    accuracies = run("scaling-seeds", members, splits.test) if members else []
    found: dict[tuple[int, str], list[float | None]] = {key: [] for key in grids}
    for (key, _, _), accuracy in zip(repeated, accuracies, strict=True):
        found[key].append(accuracy)
    rows = []
    for (batch, optimizer), grid in grids.items():
        own, sgd = found[batch, optimizer], found.get((batch, SGD), [])
        finished = [accuracy for accuracy in own if accuracy is not None]
        rows.append(
            BatchRow(
                batch_size=batch,
                optimizer=optimizer,
                steps=plan.epochs * -(-len(train) // batch),
                lr=rates[batch, optimizer],
                edge=rates[batch, optimizer] in (min(grid), max(grid)),
                grid=grid,
                accuracy=interval(finished) if finished else None,
                against_sgd=paired_interval(own, sgd) if optimizer != SGD else None,
                diverged=len(own) - len(finished),
            )
        )
    return rows


def best_rate(grid: dict[float, float | None]) -> float | None:
    """The learning rate with the highest accuracy, the smaller one of equals; None where all diverged."""
    done = {lr: accuracy for lr, accuracy in grid.items() if accuracy is not None}
    return max(sorted(done), key=lambda lr: done[lr]) if done else None
