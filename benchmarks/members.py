"""Trains the members of one Ensemble on this machine and returns each member's accuracy."""

from __future__ import annotations

import contextlib
import math
import tempfile
from argparse import Namespace
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from benchmarks import models
from benchmarks.models import Net
from benchmarks.results import Interval, Report, interval, paired_interval
from ensemble.spec import Ensemble, Member, Resources
from pipelines.environment.machine_limits import usable_cpus

if TYPE_CHECKING:
    from pipelines import Pipeline

# Members that train at the same time at most: each is a process, of some 100 MB on the CPU.
MOST_AT_ONCE = 16
_WARM_UP = 0.1  # of all epochs
VariantT = TypeVar("VariantT", bound=Hashable)


@dataclass(frozen=True)
class MemberResult:
    """How a member ended.

    Attributes:
        accuracy: after its last epoch, percent; None where it did not finish.
        failure: the reason that it did not, such as that its loss became infinite.
        history: its objective after each finished epoch, percent; NaN where it had none.
    """

    accuracy: float | None
    failure: str | None = None
    history: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Members of one variant over seeds; None and 0 where none was measured.

    Attributes:
        accuracy: percent, mean and interval over seeds.
        difference: from the baseline with the same seed, percentage points; None of the baseline itself.
        seeds: that finished.
        note: the reason why something is missing, such as how many seeds failed, of it or of the baseline.
    """

    accuracy: Interval | None = None
    difference: Interval | None = None
    seeds: int = 0
    note: str | None = None


def declare(
    name: str,
    net: Net,
    train: Pipeline,
    measured: Pipeline,
    members: list[Member],
    epochs: int,
    workers: int = 1,
    **more: Any,
) -> Ensemble:
    """An Ensemble whose members differ in what is compared and in nothing else.

    All read the same batches in the same order: seeds draw weights. Nothing is chosen by `measured`.

    Args:
        workers: of each member.
        more: fields of the Ensemble, in place of the network kind's optimizer and a cosine schedule.
    """
    at_once = min(workers * len(members), MOST_AT_ONCE)
    fields: dict[str, Any] = {
        "batch_size": models.BATCH_SIZE,
        "optimizer": models.OPTIMIZERS[net.kind],
        "schedule": {"name": "cosine", "warmup_epochs": _WARM_UP * epochs},
        "resources": Resources(
            workers=workers, cpus_per_worker=usable_cpus() / at_once, gpus_per_worker=1 / at_once
        ),
        "checkpoint_every": epochs,
        "combine": "average",
        "calibrate": False,
        "retries": 0,
    }
    recipe = models.recipe(net)
    fields |= {"recipe": recipe, "members": members, "train": train, "valid": measured, "epochs": epochs}
    return Ensemble(name=name, **{**fields, **more})


def declare_variants(
    name: str, net: Net, options: Namespace, variants: Sequence[dict[str, Any]], workers: int = 1, **more: Any
) -> Ensemble:
    """An Ensemble with a member of each seed in each variant, in this order; measured on the test split.

    Args:
        options: with those of `benchmarks.options.training_options`; without `epochs` a member of a few digits
            trains four times as many as one of a larger data set.
        variants: fields of `Member`.
        workers, more: see `declare`.

    Raises:
        SpecError: there is too little data.
        PipelineError: the data cannot be read.
    """
    splits = models.splits(net, options.data, options.samples, options.held_out)
    epochs = options.epochs or models.EPOCHS[net.kind] * (models.DIGITS_EPOCHS if options.data is None else 1)
    params = net.params(options.data)
    members = [Member(params, seed=seed, **variant) for seed in range(options.seeds) for variant in variants]
    return declare(name, net, splits.train, splits.test, members, epochs, workers, **more)


def train_members(ensemble: Ensemble, run_dir: str | None, report: Report) -> list[MemberResult]:
    """Train an ensemble's members as processes of this machine; returns how each ended, by number.

    Args:
        run_dir: under which the run is kept, in a directory of the ensemble's name. A run that is there is
            resumed: members that have finished are not trained again. None keeps nothing.
        report: receives a line of progress.
    """
    import ensemble as api

    count, ended = len(ensemble.members or ()), 0
    report(f"{ensemble.name}: {count} members, {ensemble.epochs} epochs of {ensemble.samples} samples")

    def on_event(event: dict[str, Any]) -> None:
        nonlocal ended
        if event["type"] in ("finished", "failed"):
            ended += 1
            if ended % max(1, -(-count // 5)) == 0 or ended == count:
                report(f"{ensemble.name}: {ended} of {count} members have ended")

    with contextlib.ExitStack() as stack:
        directory = run_dir or stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))
        run = api.submit(ensemble, Path(directory) / ensemble.name, executor="local", on_event=on_event)
        run.wait()
    results = []
    for member in (run.state.members[f"member-{number}"] for number in range(count)):
        history = tuple(100 * epoch.metrics.get(run.state.objective, math.nan) for epoch in member.history)
        if member.state == "finished":
            results.append(MemberResult(100 * member.metrics[run.state.objective], None, history))
        else:
            results.append(MemberResult(None, member.error or member.state, history))
    return results


def compare(
    results: Sequence[MemberResult], variants: Sequence[VariantT], baseline: VariantT
) -> dict[VariantT, Accuracy]:
    """Compare variants seed by seed; `results` are ordered by seed, and within a seed as `variants`."""
    columns = {variant: results[place :: len(variants)] for place, variant in enumerate(variants)}
    base = columns.get(baseline, ())
    compared = {}
    for variant, column in columns.items():
        accuracies = [result.accuracy for result in column]
        finished = [accuracy for accuracy in accuracies if accuracy is not None]
        failures = [result.failure for result in column if result.accuracy is None]
        notes = [f"{len(failures)} of {len(column)} seeds failed: {failures[0]}"] if failures else []
        pairs = zip(base, accuracies, strict=False)
        alone = [other.failure for other, own in pairs if other.accuracy is None and own is not None]
        notes += [f"{len(alone)} not compared, as {baseline} failed: {alone[0]}"] if alone else []
        compared[variant] = Accuracy(
            accuracy=interval(finished) if finished else None,
            difference=paired_interval(accuracies, [result.accuracy for result in base])
            if variant != baseline
            else None,
            seeds=len(finished),
            note="; ".join(notes) or None,
        )
    return compared
