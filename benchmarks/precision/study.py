"""Runs the precision study."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from benchmarks import models
from benchmarks.members import compare, declare, train_members
from benchmarks.models import Net
from benchmarks.precision.rows import FP32, Row
from benchmarks.training import TrainingSetup
from ensemble.bench.launch.ranks import run_ranks
from ensemble.bench.results import Report
from ensemble.spec import Ensemble, Member
from ensemble.spec.identity import PRECISIONS
from ensemble.spec.validation import check_choice

_MEASURE = "benchmarks.precision.measure:"
_FP16_ON_CPU = "fp16 has no fast kernels on the CPU: the metric is left out"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured.

    Attributes:
        steps: timed, of each precision.  threads: of torch, while steps are timed.
        batch_size, epochs: of the members; None for those of the network's kind.
        seeds: members in each precision.
        samples, held_out: to learn from, and to measure accuracy by.
    """

    steps: int = 15
    threads: int = 1
    batch_size: int | None = None
    seeds: int = 5
    epochs: int | None = None
    samples: int = 10_000
    held_out: int = 4_000

    def batch_of(self, net: Net) -> int:
        """Samples of a batch."""
        return self.batch_size or models.BATCH_SIZES[net.kind]


# The names of the networks whose steps are timed, of those whose accuracy is measured, and how much of each.
DEFAULTS = (("lstm", "lstm-small", "cnn"), ("lstm-small", "cnn"), Sizes())
FULL = (
    ("lstm", "lstm-small", "lstm-large", "cnn"),
    ("lstm", "lstm-small", "cnn"),
    Sizes(steps=30, seeds=10, epochs=10, samples=20_000),
)


def study(
    timed: Sequence[Net],
    trained: Sequence[Net],
    precisions: Sequence[str],
    *,
    data: str | None,
    sizes: Sizes,
    run_dir: str | None,
    report: Report,
) -> list[Row]:
    """Measure each network in each precision.

    Args:
        timed: networks whose steps are timed.  trained: whose accuracy is measured.
        data: the directory of the data sets; None for the digits.
        run_dir: where the members' runs are kept; None keeps nothing.

    Raises:
        SpecError: there is no such precision, or too little data.
        PipelineError: the data cannot be read.
        RanksError: a measurement failed.
    """
    for precision in precisions:
        check_choice("--precisions", precision, PRECISIONS)
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    nets = list({net.name: net for net in (*timed, *trained)}.values())
    for net in nets:
        models.splits(net, data, sizes.batch_of(net), 1)  # raises before anything is measured
    left_out = ["fp16"] if "fp16" in precisions and device == "cpu" else []
    compared = [precision for precision in precisions if precision not in left_out]
    declared = {net.name: _declare(net, data, compared, sizes) for net in trained if compared}
    rows = {
        (net.name, precision): Row(
            model=net.name,
            precision=precision,
            data=net.data(data),
            device=device,
            threads=sizes.threads,
            batch_size=sizes.batch_of(net),
            parameters=net.parameters(data),
        )
        for net in nets
        for precision in precisions
    }
    for net in timed:
        report(f"{net.name}: timing steps of {sizes.batch_of(net)} samples")
        setup = TrainingSetup(net=net, data=data, batch_size=sizes.batch_of(net), device=device)
        for precision, fields in _measure_steps(setup, precisions, sizes).items():
            rows[net.name, precision] = dataclasses.replace(rows[net.name, precision], **fields)
    for name, ensemble in declared.items():
        report(f"{name}: training {len(ensemble.members or ())} members on {ensemble.samples} samples")
        results = compare(train_members(ensemble, run_dir, report), compared, FP32)
        for precision in precisions:
            row = rows[name, precision]
            if precision in left_out:
                rows[name, precision] = dataclasses.replace(row, note=row.note or _FP16_ON_CPU)
                continue
            found = results[precision]
            rows[name, precision] = dataclasses.replace(
                row, metric=found.accuracy, difference=found.difference, note=row.note or found.note
            )
    return list(rows.values())


def _measure_steps(setup: TrainingSetup, precisions: Sequence[str], sizes: Sizes) -> dict[str, dict[str, Any]]:
    """Time, memory and exchanged bytes of training steps: fields of rows, by precision."""
    options = setup.to_options(precisions=list(precisions), steps=sizes.steps)
    [timed] = run_ranks(
        _MEASURE + "time_steps", options, placement=[0], device=setup.device, threads=sizes.threads
    )
    possible = [precision for precision in precisions if "refused" not in timed[precision]]
    found: dict[str, dict[str, Any]] = {
        precision: {"note": timed[precision]["refused"]} for precision in precisions if precision not in possible
    }
    if not possible:
        return found
    on_cpu = dataclasses.replace(setup, device="cpu").to_options(precisions=possible)
    sent = run_ranks(_MEASURE + "exchanged_bytes", on_cpu, placement=[0, 0])[0]
    # Each rank trains one precision by itself, on the current device: the ranks exchange nothing.
    options = setup.to_options(precisions=possible)
    peaks = run_ranks(_MEASURE + "peak_memory", options, placement=[0] * len(possible), threads=sizes.threads)
    for precision, peak in zip(possible, peaks, strict=True):
        median_s = timed[precision]["median_s"]
        found[precision] = {
            "step_ms": 1000 * median_s,
            "samples_per_s": setup.batch_size / median_s,
            "steps": len(timed[precision]["seconds"]),
            "memory_mb": peak / 1e6,
            "exchange_mb": sent[precision] / 1e6,
        }
    return found


def _declare(net: Net, data: str | None, precisions: Sequence[str], sizes: Sizes) -> Ensemble:
    """The run: for each seed a member in each precision; accuracy is measured on the test split."""
    splits = models.splits(net, data, sizes.samples, sizes.held_out)
    members = [
        Member(net.params(data), seed=seed, precision=precision)  # type: ignore[arg-type]
        for seed in range(sizes.seeds)
        for precision in precisions
    ]
    epochs = sizes.epochs or models.EPOCHS[net.kind]
    name = f"precision-{net.name}"
    return declare(name, net, splits.train, splits.test, members, epochs, batch_size=sizes.batch_of(net))
