"""Runs the precision study."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from ensemble.bench import models
from ensemble.bench.intervals import interval, paired
from ensemble.bench.launch.ranks import run_ranks
from ensemble.bench.members import Came, train_members
from ensemble.bench.models import Net
from ensemble.bench.precision.parity import ensemble_of
from ensemble.bench.precision.rows import FP32, Row
from ensemble.bench.training import Training
from ensemble.spec import Ensemble
from ensemble.spec.identity import PRECISIONS
from ensemble.spec.validation import check_choice

_STEPS = "ensemble.bench.precision.measure:"
SLOW = "fp16 has no fast kernels on the CPU: the metric is left out"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured.

    Attributes:
        steps: timed, of each precision.  threads: of torch, while steps are timed.
        batch_size, epochs: of each precision's members; None for each kind's usual ones.
        seeds: members in each precision.
        samples, held_out: to learn from, and to measure the metric by.
    """

    steps: int = 15
    threads: int = 1
    batch_size: int | None = None
    seeds: int = 5
    epochs: int | None = None
    samples: int = 10_000
    held_out: int = 4_000

    def batch(self, net: Net) -> int:
        """Samples of a batch."""
        return self.batch_size or models.BATCH_SIZES[net.kind]

    def lasts(self, net: Net) -> int:
        """Epochs."""
        return self.epochs or models.EPOCHS[net.kind]


def study(
    nets: Sequence[Net],
    trained: Sequence[Net],
    precisions: Sequence[str] = PRECISIONS,
    *,
    data: str | None = None,
    sizes: Sizes = Sizes(),
    run_dir: str | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """Measure each network in each precision.

    Args:
        nets: whose steps are timed.
        trained: whose metric is measured.
        data: the directory with real data; None takes the digits.
        run_dir: where the members' runs are kept, None for nowhere.
        say: gets a line of progress.

    Raises:
        SpecError: there is no such precision, or not so much data.
        PipelineError: the data cannot be read.
        RanksError: a measurement failed.
    """
    for precision in precisions:
        check_choice("--precisions", precision, PRECISIONS)
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    everything = {net.name: net for net in (*nets, *trained)}.values()
    for net in everything:
        models.splits(net, data, sizes.batch(net), 1)  # or says why the data cannot be had, before any measurement
    left_out = [precision for precision in precisions if precision == "fp16" and device == "cpu"]
    members = [precision for precision in precisions if precision not in left_out]
    declared = {net.name: _declared(net, data, members, sizes) for net in trained if members}
    rows: dict[tuple[str, str], Row] = {}
    for net in everything:
        for precision in precisions:
            rows[net.name, precision] = Row(
                model=net.name,
                precision=precision,
                data=net.data(data),
                device=device,
                threads=sizes.threads,
                batch_size=sizes.batch(net),
                parameters=net.parameters(data),
            )
    for net in nets:
        say(f"{net.name}: timing steps of {sizes.batch(net)} samples")
        training = Training(net=net, data=data, batch_size=sizes.batch(net), device=device)
        for precision, found in speed(training, precisions, sizes).items():
            rows[net.name, precision] = dataclasses.replace(rows[net.name, precision], **found)
    for name, ensemble in declared.items():
        say(f"{name}: training {len(ensemble.members or ())} members on {ensemble.samples} samples")
        found = parity(train_members(ensemble, run_dir, say), members)
        for precision, fields in {**found, **{precision: {"note": SLOW} for precision in left_out}}.items():
            known = rows[name, precision]
            rows[name, precision] = dataclasses.replace(
                known, **{**fields, "note": known.note or fields.get("note")}
            )
    return list(rows.values())


def speed(training: Training, precisions: Sequence[str], sizes: Sizes) -> dict[str, dict[str, Any]]:
    """Fields of rows, by precision: step, memory, bytes exchanged."""
    options = training.to_options(precisions=list(precisions), steps=sizes.steps)
    run: dict[str, Any] = {"device": training.device, "threads": sizes.threads}
    [timed] = run_ranks(_STEPS + "speed", options, placement=[0], **run)
    can = [precision for precision in precisions if "refused" not in timed[precision]]
    if not can:
        return {precision: {"note": figures["refused"]} for precision, figures in timed.items()}
    on_cpu = dataclasses.replace(training, device="cpu").to_options(precisions=can)
    sent = run_ranks(_STEPS + "exchanged", on_cpu, placement=[0, 0])[0]
    found: dict[str, dict[str, Any]] = {}
    # On one host each rank would have a GPU of its own; the ranks of this take no part in each other's training.
    peaks = run_ranks(
        _STEPS + "memory", training.to_options(precisions=can), placement=[0] * len(can), threads=sizes.threads
    )
    for precision, figures in timed.items():
        if precision not in can:
            found[precision] = {"note": figures["refused"]}
            continue
        found[precision] = {
            "step_ms": 1000 * figures["median_s"],
            "samples_per_s": training.batch_size / figures["median_s"],
            "steps": len(figures["seconds"]),
            "memory_mb": peaks[can.index(precision)] / 1e6,
            "exchange_mb": sent[precision] / 1e6,
        }
    return found


def _declared(net: Net, data: str | None, precisions: Sequence[str], sizes: Sizes) -> Ensemble:
    return ensemble_of(
        net,
        data,
        precisions,
        seeds=sizes.seeds,
        epochs=sizes.lasts(net),
        samples=sizes.samples,
        held_out=sizes.held_out,
        batch_size=sizes.batch(net),
    )


def parity(came: Sequence[Came], precisions: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Fields of rows, by precision: the metric and its paired difference from fp32.

    Args:
        came: what became of the members, as `ensemble_of` numbers them: seeds, and in each the precisions.
    """
    by = {precision: came[place :: len(precisions)] for place, precision in enumerate(precisions)}
    found: dict[str, dict[str, Any]] = {}
    for precision, each in by.items():
        done = [member.percent for member in each if member.percent is not None]
        fields: dict[str, Any] = {"metric": interval(done)} if done else {}
        both = [(a.percent, b.percent) for a, b in zip(each, by.get(FP32, ()), strict=False)]
        whole = [(a, b) for a, b in both if a is not None and b is not None]
        if whole:
            fields["difference"] = paired([a for a, _ in whole], [b for _, b in whole])
        failed = [member.why for member in each if member.percent is None]
        if failed:
            fields["note"] = f"{len(failed)} of {len(each)} seeds failed: {failed[0]}"
        found[precision] = fields
    return found


@dataclasses.dataclass(frozen=True)
class Extent:
    """What is measured unless it is said: whose steps are timed, whose metric is measured, how much of each."""

    models: tuple[str, ...]
    trained: tuple[str, ...]
    sizes: Sizes


USUAL = Extent(("lstm", "lstm-small", "cnn"), ("lstm-small", "cnn"), Sizes())
FULL = Extent(
    ("lstm", "lstm-small", "lstm-large", "cnn"),
    ("lstm", "lstm-small", "cnn"),
    Sizes(steps=30, seeds=10, epochs=10, samples=20_000),
)
