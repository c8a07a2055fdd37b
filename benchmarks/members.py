"""Trains the members of one Ensemble on this machine and returns each member's accuracy."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import models
from benchmarks.models import Net
from ensemble.bench.results import Interval, Report, interval, paired_interval
from ensemble.spec import Ensemble, Member, Resources
from pipelines.machine_limits import usable_cpus

if TYPE_CHECKING:
    from pipelines import Pipeline

# Members that train at the same time at most: each is a process, of some 100 MB on the CPU.
MOST_AT_ONCE = 16
_WARM_UP = 0.1  # of all epochs


@dataclass(frozen=True)
class MemberResult:
    """How a member ended.

    Attributes:
        accuracy: after its last epoch, percent; None where it did not finish.
        failure: the reason that it did not, such as that its loss became infinite.
    """

    accuracy: float | None
    failure: str | None = None


@dataclass(frozen=True)
class Comparison:
    """Members of one variant over seeds.

    Attributes:
        accuracy: mean and interval over seeds, percent; None where no member finished.
        difference: from the baseline with the same seed, percentage points.
        note: how many seeds failed, and why; None where none did.
    """

    accuracy: Interval | None
    difference: Interval | None
    note: str | None


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
        "batch_size": models.BATCH_SIZES[net.kind],
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


def train_members(ensemble: Ensemble, run_dir: str | None, report: Report) -> list[MemberResult]:
    """Train an ensemble's members as processes of this machine; returns how each ended, by number.

    Args:
        run_dir: under which the run is kept, in a directory of the ensemble's name. A run that is there is
            resumed: members that have finished are not trained again. None keeps nothing.
        report: receives a line of progress.
    """
    import ensemble as api

    count, failures = len(ensemble.members or ()), dict[str, str]()
    ended = 0

    def on_event(event: dict[str, Any]) -> None:
        nonlocal ended
        if event["type"] == "failed":
            failures[event["member"]] = event["error"]
        if event["type"] in ("finished", "failed"):
            ended += 1
            if ended % max(1, -(-count // 5)) == 0 or ended == count:
                report(f"{ensemble.name}: {ended} of {count} members have ended")

    with contextlib.ExitStack() as stack:
        directory = run_dir or stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))
        run = api.submit(ensemble, Path(directory) / ensemble.name, executor="local", on_event=on_event)
        rows = {row["member"]: row for row in run.wait().members}
    results = []
    for row in (rows[f"member-{number}"] for number in range(count)):
        finished = row["state"] == "finished"
        failure = None if finished else failures.get(row["member"], row["state"])
        results.append(MemberResult(100 * row["metric"] if finished else None, failure))
    return results


def compare(results: Sequence[MemberResult], variants: Sequence[str], baseline: str) -> dict[str, Comparison]:
    """Compare variants seed by seed; `results` are ordered by seed, and within a seed as `variants`."""
    columns = {variant: results[place :: len(variants)] for place, variant in enumerate(variants)}
    comparisons = {}
    for variant, column in columns.items():
        accuracies = [result.accuracy for result in column]
        finished = [accuracy for accuracy in accuracies if accuracy is not None]
        failures = [result.failure for result in column if result.accuracy is None]
        comparisons[variant] = Comparison(
            interval(finished) if finished else None,
            paired_interval(accuracies, [result.accuracy for result in columns.get(baseline, ())]),
            f"{len(failures)} of {len(column)} seeds failed: {failures[0]}" if failures else None,
        )
    return comparisons
