"""What the precision study measures of training steps and of members: a row for each model and precision."""

from __future__ import annotations

import dataclasses
import statistics
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from benchmarks import models
from benchmarks.launch.ranks import run_ranks
from benchmarks.members import Accuracy, compare, declare_variants, train_members
from benchmarks.models import Net
from benchmarks.results import Report
from benchmarks.training import TrainingSetup, make_trainer
from ensemble.comm import SingleRank
from ensemble.meter.memory import peak_memory_gb, reset_peak_memory
from ensemble.spec.identity import PRECISIONS
from ensemble.spec.validation import check_choice

if TYPE_CHECKING:
    from ensemble.comm import Communicator

FP32: Final = "fp32"
_FP16_ON_CPU = "fp16 has no fast kernels on the CPU: accuracy is left out"
# In a precision's first two steps kernels are chosen and memory is allocated.
_WARM_UP_STEPS = 2
# A precision that has been timed for this long takes no more than the least number of steps.
_LIMIT_S, _LEAST_STEPS = 15.0, 3
# The compression of gradients that sends them in the precision of the computation.
_COMPRESSIONS = {"fp32": "none", "bf16": "bf16", "fp16": "fp16"}
_MEMORY_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Row(Accuracy):
    """One model in one precision; None where it was not measured; `note` has the reason.

    Attributes:
        model, precision, data, device, threads, batch_size: what was run.
        parameters: weights of the model.
        step_ms: a training step, the median of `steps`.  samples_per_s: at that speed.
        memory_mb: peak of training above what the process had before, 10^6 bytes.
        exchange_mb: bytes that a rank of two sends in a step, its gradients in this precision, 10^6.
    """

    model: str
    precision: str
    data: str
    device: str
    threads: int
    batch_size: int
    parameters: int
    step_ms: float | None = None
    samples_per_s: float | None = None
    steps: int = 0
    memory_mb: float | None = None
    exchange_mb: float | None = None


def study(options: Namespace, timed: Sequence[Net], trained: Sequence[Net], report: Report) -> list[Row]:
    """Measure each network in each precision.

    Args:
        timed: networks whose steps are timed.  trained: whose accuracy is measured.

    Raises:
        SpecError: there is no such precision, or too little data.
        PipelineError: the data cannot be read.
        RanksError: a measurement failed.
    """
    for precision in options.precisions:
        check_choice("--precisions", precision, PRECISIONS)
    data, size, device = options.data, options.batch_size, "cuda" if torch.cuda.is_available() else "cpu"
    nets = {net.name: net for net in (*timed, *trained)}
    for net in nets.values():
        models.splits(net, data, size, 1)  # raises before anything is measured
    compared = [precision for precision in options.precisions if precision != "fp16" or device == "cuda"]
    variants = [{"precision": precision} for precision in compared]
    declared = {
        net.name: declare_variants(f"precision-{net.name}", net, options, variants, batch_size=size)
        for net in (trained if compared else ())
    }
    steps: dict[tuple[str, str], dict[str, Any]] = {}
    for net in timed:
        report(f"{net.name}: timing steps of {size} samples")
        setup = TrainingSetup(net=net, data=data, batch_size=size, device=device)
        steps |= {(net.name, precision): fields for precision, fields in _measure_steps(setup, options).items()}
    accuracies = {(net.name, "fp16"): Accuracy(note=_FP16_ON_CPU) for net in trained}
    for name, ensemble in declared.items():
        by_precision = compare(train_members(ensemble, options.run_dir, report), compared, FP32)
        accuracies |= {(name, precision): accuracy for precision, accuracy in by_precision.items()}
    same = {"device": device, "threads": options.threads, "batch_size": size}
    return [
        Row(
            model=name,
            precision=precision,
            data=net.data(data),
            parameters=net.parameters(data),
            **same,
            **steps.get((name, precision), {}),
            **vars(accuracies.get((name, precision), Accuracy())),
        )
        for name, net in nets.items()
        for precision in options.precisions
    ]


def _measure_steps(setup: TrainingSetup, options: Namespace) -> dict[str, dict[str, Any]]:
    """Time, memory and exchanged bytes of training steps: fields of rows, by precision."""
    here = __name__ + ":"
    ranks: dict[str, Any] = {"device": setup.device, "threads": options.threads}
    arguments = {"setup": asdict(setup), "precisions": options.precisions, "steps": options.steps}
    [timed] = run_ranks(here + "time_steps", arguments, placement=[0], **ranks)
    # Each rank trains one precision by itself, on the current device: the ranks exchange nothing.
    alone = [0] * len(options.precisions)
    peaks = run_ranks(here + "peak_memory", arguments, placement=alone, threads=options.threads)
    on_cpu = {**arguments, "setup": asdict(dataclasses.replace(setup, device="cpu"))}
    sent = run_ranks(here + "exchanged_bytes", on_cpu, placement=[0, 0])[0]
    return {
        precision: {
            "step_ms": 1000 * statistics.median(timed[precision]),
            "samples_per_s": setup.batch_size / statistics.median(timed[precision]),
            "steps": len(timed[precision]),
            "memory_mb": peak / 1e6,
            "exchange_mb": sent[precision] / 1e6,
        }
        for precision, peak in zip(options.precisions, peaks, strict=True)
    }


# --- what ranks measure --------------------------------------------------------------------------------------


def time_steps(comm: Communicator, options: dict[str, Any]) -> dict[str, list[float]]:
    """Seconds of training steps in each precision.

    Precisions take steps in turn, in one order and then the reverse, so that other load affects all alike.

    Args:
        options: `setup`, of a `TrainingSetup`, and `precisions`, `steps` of each.
    """
    setup = TrainingSetup.of(options["setup"])
    batches = setup.batches()
    trainers = {precision: make_trainer(setup, precision, comm) for precision in options["precisions"]}
    seconds_of: dict[str, list[float]] = {precision: [] for precision in trainers}
    for number in range(_WARM_UP_STEPS + options["steps"]):
        for precision in list(trainers)[:: -1 if number % 2 else 1]:
            timed = seconds_of[precision][_WARM_UP_STEPS:]
            if len(timed) < _LEAST_STEPS or sum(timed) < _LIMIT_S:
                seconds_of[precision].append(trainers[precision].step(batches[number % len(batches)])[0])
    return {precision: seconds[_WARM_UP_STEPS:] for precision, seconds in seconds_of.items()}


def peak_memory(comm: Communicator, options: dict[str, Any]) -> float:
    """Bytes at the peak of a few training steps above those of the process before it made the network.

    On the CPU it is what this process alone holds, with the kernels' own memory; on CUDA what torch has allocated.

    Args:
        options: `setup`, of a `TrainingSetup`, and `precisions`: rank r trains with number r, alone.
    """
    setup = TrainingSetup.of(options["setup"])
    batches = setup.batches()
    # A very small network trains a step before: what torch loads at its first step is not measured.
    net = dataclasses.replace(setup.net, width=2, words=10, embed=2, hidden=2)
    small = dataclasses.replace(setup, net=net, data=None, batch_size=2)
    make_trainer(small, FP32, SingleRank()).step(small.batches()[0])
    cuda = setup.device == "cuda"
    (torch.cuda.reset_peak_memory_stats if cuda else reset_peak_memory)()
    before = torch.cuda.memory_allocated() if cuda else peak_memory_gb() * 2**30
    trainer = make_trainer(setup, options["precisions"][comm.rank], SingleRank())
    for number in range(_MEMORY_STEPS):
        trainer.step(batches[number % len(batches)])
    return (torch.cuda.max_memory_allocated() if cuda else peak_memory_gb() * 2**30) - before


def exchanged_bytes(comm: Communicator, options: dict[str, Any]) -> dict[str, float]:
    """Bytes that a rank sends in a training step, with each precision's compression.

    The number of bytes does not depend on the values: gradients are zeros, and nothing is computed.

    Args:
        options: `setup`, of a `TrainingSetup`, and `precisions`.
    """
    setup = TrainingSetup.of(options["setup"])
    batch = setup.batches(comm.rank, comm.world)[0]
    sent_bytes = {}
    for precision in options["precisions"]:
        trainer = make_trainer(setup, "fp32", comm, _COMPRESSIONS[precision])
        trainer.step(batch, emulated_s=0.0)
        before = comm.sent_bytes
        trainer.step(batch, emulated_s=0.0)
        sent_bytes[precision] = comm.sent_bytes - before
    return sent_bytes
