"""What the precision study measures of training steps and of members: a row for each model and precision."""

from __future__ import annotations

import dataclasses
import statistics
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import models
from benchmarks.members import Accuracy, compare, declare_variants, train_members
from benchmarks.models import Net
from benchmarks.training import TrainingSetup, make_trainer
from ensemble.bench.launch.ranks import run_ranks
from ensemble.bench.results import Report
from ensemble.comm import SingleRank
from ensemble.spec.identity import PRECISIONS
from ensemble.spec.validation import check_choice

if TYPE_CHECKING:
    from ensemble.comm import Communicator

FP32 = "fp32"
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
        options: of the study.
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
        for net in trained
        if compared
    }
    rows = []
    for name, net in nets.items():
        steps: dict[str, dict[str, Any]] = {}
        if net in timed:
            report(f"{name}: timing steps of {size} samples")
            steps = _measure_steps(TrainingSetup(net=net, data=data, batch_size=size, device=device), options)
        accuracies: dict[str, Accuracy] = {}
        if net in trained:
            accuracies = dict.fromkeys(options.precisions, Accuracy(note=_FP16_ON_CPU))
        if name in declared:
            results = train_members(declared[name], options.run_dir, report)
            accuracies |= compare(results, compared, FP32)
        for precision in options.precisions:
            row = Row(
                model=name,
                precision=precision,
                data=net.data(data),
                device=device,
                threads=options.threads,
                batch_size=size,
                parameters=net.parameters(data),
                **vars(accuracies.get(precision, Accuracy())),
            )
            rows.append(dataclasses.replace(row, **steps.get(precision, {})))
    return rows


def _measure_steps(setup: TrainingSetup, options: Namespace) -> dict[str, dict[str, Any]]:
    """Time, memory and exchanged bytes of training steps: fields of rows, by precision."""
    here = __name__ + ":"
    ranks: dict[str, Any] = {"device": setup.device, "threads": options.threads}
    given = {"setup": asdict(setup), "precisions": options.precisions, "steps": options.steps}
    [timed] = run_ranks(here + "time_steps", given, placement=[0], **ranks)
    found = {name: {"note": figures["refused"]} for name, figures in timed.items() if "refused" in figures}
    possible = [precision for precision in options.precisions if precision not in found]
    if not possible:
        return found
    on_cpu = {"setup": asdict(dataclasses.replace(setup, device="cpu")), "precisions": possible}
    sent = run_ranks(here + "exchanged_bytes", on_cpu, placement=[0, 0])[0]
    # Each rank trains one precision by itself, on the current device: the ranks exchange nothing.
    given = {"setup": asdict(setup), "precisions": possible}
    peaks = run_ranks(here + "peak_memory", given, placement=[0] * len(possible), threads=options.threads)
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


# --- what ranks measure --------------------------------------------------------------------------------------


def time_steps(comm: Communicator, options: dict[str, Any]) -> dict[str, Any]:
    """Time training steps: {precision: {"seconds": [...], "median_s": s} or {"refused": reason}}.

    Precisions take steps in turn, in one order and then the reverse, so that other load affects all alike.

    Args:
        options: `setup`, of a `TrainingSetup`, and `precisions`, `steps` of each.
    """
    from ensemble.train.job import TrainingError

    setup = TrainingSetup.of(options["setup"])
    batches = setup.batches()
    found: dict[str, dict[str, Any]] = {}
    trainers = {}
    for precision in options["precisions"]:
        trainers[precision] = make_trainer(setup, precision, comm)
        try:
            for number in range(_WARM_UP_STEPS):
                trainers[precision].step(batches[number % len(batches)])
        except TrainingError as error:
            found[precision] = {"refused": str(error)}
            del trainers[precision]
        else:
            found[precision] = {"seconds": []}
    for number in range(options["steps"]):
        for precision in list(trainers)[:: -1 if number % 2 else 1]:
            seconds = found[precision]["seconds"]
            if len(seconds) < _LEAST_STEPS or sum(seconds) < _LIMIT_S:
                seconds.append(trainers[precision].step(batches[number % len(batches)])[0])
    for figures in found.values():
        if "seconds" in figures:
            figures["median_s"] = statistics.median(figures["seconds"])
    return found


def peak_memory(comm: Communicator, options: dict[str, Any]) -> float:
    """Bytes at the peak of a few training steps above those of the process before it made the network.

    On the CPU it is the resident set, with the kernels' own memory; on CUDA what torch has allocated.

    Args:
        options: `setup`, of a `TrainingSetup`, and `precisions`: rank r trains with number r, alone.
    """
    alone = SingleRank()
    setup = TrainingSetup.of(options["setup"])
    batches = setup.batches()
    _load_libraries(setup)
    cuda = setup.device == "cuda"
    before = torch.cuda.memory_allocated() if cuda else _status_bytes("VmRSS")
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets the peak (proc_pid_clear_refs(5))
    trainer = make_trainer(setup, options["precisions"][comm.rank], alone)
    for number in range(_MEMORY_STEPS):
        trainer.step(batches[number % len(batches)])
    peak = torch.cuda.max_memory_allocated() if cuda else _status_bytes("VmHWM")
    return float(peak - before)


def _load_libraries(setup: TrainingSetup) -> None:
    """Train a very small network for a step, so that what torch loads at its first step is not measured."""
    net = dataclasses.replace(setup.net, width=2, words=10, embed=2, hidden=2)
    small = dataclasses.replace(setup, net=net, data=None, batch_size=2)
    make_trainer(small, "fp32", SingleRank()).step(small.batches()[0])


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


def exchanged_bytes(comm: Communicator, options: dict[str, Any]) -> dict[str, float]:
    """Bytes that a rank sends in a training step, with each precision's compression.

    The number of bytes does not depend on the values: gradients are zeros, and nothing is computed.

    Args:
        options: `setup`, of a `TrainingSetup`, and `precisions`.
    """
    setup = TrainingSetup.of(options["setup"])
    batch = setup.batches(comm.rank, comm.world)[0]
    found = {}
    for precision in options["precisions"]:
        trainer = make_trainer(setup, "fp32", comm, _COMPRESSIONS[precision])
        trainer.step(batch, emulated_s=0.0)
        before = comm.sent_bytes
        trainer.step(batch, emulated_s=0.0)
        found[precision] = comm.sent_bytes - before
    return found
