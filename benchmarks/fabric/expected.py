"""What is expected of networks: the tables, claims and findings of the fabric study."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.fabric.study import CollectiveRow, TrainingRow
from benchmarks.fabric.workers import REAL, WorkerRow
from benchmarks.results import Claim, Outcome, format_bytes, group_by, outcome_of, show_claims

_COLLECTIVE = "link backend collective size count time_us algbw busbw wrong predicted_us"
_TRAINING = "link backend net ranks samples_per_s alone_ms step_ms efficiency"
# A share of the speed over an unlimited link, from which on a link has no significant effect.
_NO_EFFECT = 0.9
_NAMES = {"resnet50": "ResNet-50", "inception": "Inception V3", "vgg16": "VGG-16"}
_FRNN = "Svyatkovskiy et al. 2019"
_LINEAR = 0.9  # of linear scaling, below which it is said not to be
_WORKER_COLUMNS = "scaling compute workers hosts batch_size examples_per_s step_ms compute_ms sync_ms "
_WORKER_COLUMNS += "communication_ms efficiency sent_mb"
_WORKER_HEADINGS = {"batch_size": "batch", "examples_per_s": "examples/s"}


# --- collectives ---------------------------------------------------------------------------------------------


def show_collectives(rows: Sequence[CollectiveRow]) -> Outcome:
    """What the part 'collectives' prints and writes."""
    heading = "collectives (algbw, busbw: GB/s)"
    return outcome_of(rows, heading, _COLLECTIVE, part="collective", findings=judge_collectives(rows))


def judge_collectives(rows: Sequence[CollectiveRow]) -> Iterator[str]:
    """What is wrong, and every backend's all-reduce beside gloo's."""
    for row in (row for row in rows if row.wrong):
        what = f"{row.collective} {format_bytes(row.size)}, {row.backend}, {row.link}"
        yield f"WRONG: {row.wrong} elements of {what}"
    reduced = [row for row in rows if row.collective == "all_reduce"]
    for link, own in group_by(reduced, lambda row: row.link).items():
        by_backend = group_by(own, lambda row: row.backend)
        us = {backend: {row.size: row.time_us for row in same} for backend, same in by_backend.items()}
        yield from _compare_backends(link, us)


def _compare_backends(link: str, us: Mapping[str, Mapping[int, float]]) -> Iterator[str]:
    """Every backend's all-reduce against gloo's; `us`: microseconds by size, by backend."""
    plain = us.get("gloo", {})
    for backend, own in us.items():
        times = [f"{plain[size] / own[size]:.2f} x at {format_bytes(size)}" for size in own if size in plain]
        if backend != "gloo" and times:
            yield f"all_reduce by {backend} against gloo's, {link}: {', '.join(times)}"


# --- training ------------------------------------------------------------------------------------------------


def show_training(rows: Sequence[TrainingRow]) -> Outcome:
    """What the part 'training' prints and writes."""
    heading = "training, data-parallel"
    shown = outcome_of(rows, heading, _TRAINING, part="training", findings=judge_training(rows))
    return show_claims(list(training_claims(rows))) + shown


def judge_training(rows: Sequence[TrainingRow]) -> Iterator[str]:
    """The efficiency of each net over each link."""
    for (net, backend), trained in group_by(rows, lambda row: (row.net, row.backend)).items():
        links = ", ".join(f"{row.efficiency:.0%} on {row.link}" for row in trained)
        yield f"{net} net, {trained[0].parameters:,} parameters, {backend}: efficiency {links}"


def training_claims(rows: Sequence[TrainingRow]) -> Iterator[Claim]:
    """Samsi et al.'s claim for each net on an emulated accelerator."""
    shaped_rows = [row for row in rows if row.hosts > 1]
    for own in group_by(shaped_rows, lambda row: (row.net, row.link.partition(", ")[2])).values():
        best = [min(same, key=lambda row: row.step_ms) for same in group_by(own, lambda row: row.link).values()]
        free = next((row for row in best if row.rate is None), None)
        shaped = [(row, free.step_ms / row.step_ms) for row in best if free is not None and row is not free]
        if free is None or not shaped:
            continue
        slow = [row.link for row, share in shaped if share < _NO_EFFECT]
        yield Claim(
            paper="Samsi et al. 2020",
            claim="A slower network (Ethernet) has no significant effect on common networks against a faster one"
            f" (OmniPath; here a shaped link against an unlimited one): {_NAMES[own[0].net]}, a P100 emulated",
            published="no significant effect",
            measured="; ".join(f"{row.link}: {share:.0%} of the speed, {row.backend}" for row, share in shaped),
            spread="quartiles of steps, ms: "
            + "; ".join(
                f"{row.link}: {row.low_ms:.0f} to {row.high_ms:.0f}" for row in (free, *(r for r, _ in shaped))
            ),
            loses=f"below {_NO_EFFECT:.0%} on {'; '.join(slow)}" if slow else "",
        )


# --- workers -------------------------------------------------------------------------------------------------


def show_workers(rows: Sequence[WorkerRow]) -> Outcome:
    """What the part 'workers' prints and writes."""
    claims = worker_findings(rows)
    shown = outcome_of(
        rows,
        "One member over workers",
        _WORKER_COLUMNS,
        headings=_WORKER_HEADINGS,
        part="workers",
        findings=claims,
    )
    return show_claims(list(worker_claims(rows))) + shown


def _curves(rows: Sequence[WorkerRow]) -> dict[tuple[str, str], list[WorkerRow]]:
    return group_by(rows, lambda row: (row.scaling, row.compute))


def worker_findings(rows: Sequence[WorkerRow]) -> Iterator[str]:
    """A line for each curve, of the most workers that had a core each."""
    for (scaling, compute), curve in _curves(rows).items():
        last = [row for row in curve if not row.shares_cores][-1]
        if last.workers > 1:
            yield (
                f"{scaling} scaling, compute {compute}: {last.workers} workers train "
                f"{last.examples_per_s / curve[0].examples_per_s:.3g} x the examples/s of one; "
                f"{last.step_ms:.3g} ms a step"
            )
    if any(row.shares_cores for row in rows):
        yield (
            f"more than {rows[0].cores} workers that compute share {rows[0].cores} cores: they cannot be faster; "
            "--step-ms emulates an accelerator for each worker"
        )


def worker_claims(rows: Sequence[WorkerRow]) -> Iterator[Claim]:
    """Linear runtime of each curve."""
    for (scaling, compute), curve in _curves(rows).items():
        last = [row for row in curve if not row.shares_cores][-1]
        if last.workers > 1:
            emulated = "computed" if compute == REAL else f"accelerators of {compute} emulated"
            yield Claim(
                paper=_FRNN,
                claim=f"the runtime scales linearly with the number of workers; here {scaling} scaling",
                published="linear",
                measured=f"{last.efficiency:.0%} of linear at {last.workers} workers, {emulated}",
                ratio=last.efficiency,
                loses="" if last.efficiency >= _LINEAR else f"below {_LINEAR:.0%} of linear",
            )
