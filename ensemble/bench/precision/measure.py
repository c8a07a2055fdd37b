"""What ranks of the precision study measure of a training step; called by `ensemble.bench.launch.ranks`."""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sklearn.datasets  # noqa: F401 - what every rank needs is imported before they are forked

from ensemble.bench.training import Trainer, Training
from ensemble.comm import SingleRank
from ensemble.train.optimizers import load_optimizers

if TYPE_CHECKING:
    from ensemble.comm import Communicator

load_optimizers()  # before they are forked, too

# Steps of each precision before the clock starts: kernels are chosen and memory is taken in the first two.
WARM_UP = 2
# A precision that has taken so long, and has a few steps, takes no more.
LONG_S, FEW = 15.0, 3
# What the gradients of a member in this precision travel as, so that no more is sent than it computes with.
COMPRESSIONS = {"fp32": "none", "bf16": "bf16", "fp16": "fp16"}

_MEMORY_STEPS = 3


def speed(comm: Communicator, options: dict[str, Any]) -> dict[str, Any]:
    """Seconds of training steps: {precision: {"seconds": [...]} or {"refused": why}}.

    Precisions take steps in turn, in one order and then the other, so that what else goes on meets all alike.

    Args:
        options: of a `Training`, and `precisions`, `steps` of each.
    """
    from ensemble.train.job import TrainingError

    training = Training.of(options)
    batches = training.batches()
    found: dict[str, dict[str, Any]] = {}
    trainers = {}
    for precision in options["precisions"]:
        trainers[precision] = Trainer(training, precision, comm)
        try:
            for number in range(WARM_UP):
                trainers[precision].step(batches[number % len(batches)])
        except TrainingError as error:
            found[precision] = {"refused": str(error)}
            del trainers[precision]
        else:
            found[precision] = {"seconds": []}
    for number in range(options["steps"]):
        for precision in list(trainers)[:: -1 if number % 2 else 1]:
            seconds = found[precision]["seconds"]
            if len(seconds) < FEW or sum(seconds) < LONG_S:
                seconds.append(trainers[precision].step(batches[number % len(batches)])[0])
    for figures in found.values():
        if "seconds" in figures:
            figures["median_s"] = statistics.median(figures["seconds"])
    return found


def memory(comm: Communicator, options: dict[str, Any]) -> float:
    """Bytes at the peak of a few training steps above what the process had before it made the network.

    On the CPU it is the resident set, with what kernels keep for themselves; on CUDA what torch has allocated.

    Args:
        options: of a `Training`, and `precisions`, of which rank r has number r: a rank trains alone.
    """
    import torch

    alone = SingleRank()
    training = Training.of(options)
    batches = training.batches()
    _load_libraries(training)
    cuda = training.device == "cuda"
    before = torch.cuda.memory_allocated() if cuda else _status_bytes("VmRSS")
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew here (proc_pid_clear_refs(5))
    trainer = Trainer(training, options["precisions"][comm.rank], alone)
    for number in range(_MEMORY_STEPS):
        trainer.step(batches[number % len(batches)])
    peak = torch.cuda.max_memory_allocated() if cuda else _status_bytes("VmHWM")
    return float(peak - before)


def _load_libraries(training: Training) -> None:
    """A step of a very small network: what torch loads and keeps at its first step is no matter of precision."""
    net = dataclasses.replace(training.net, width=2, words=10, embed=2, hidden=2)
    small = dataclasses.replace(training, net=net, data=None, batch_size=2)
    Trainer(small, "fp32", SingleRank()).step(small.batches()[0])


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


def exchanged(comm: Communicator, options: dict[str, Any]) -> dict[str, float]:
    """Bytes that a rank sends in a training step, for each precision's compression.

    What travels does not depend on what was computed, so nothing is: gradients are zeros.

    Args:
        options: of a `Training`, and `precisions`.
    """
    training = Training.of(options)
    batch = training.batches(comm.rank, comm.world)[0]
    found = {}
    for precision in options["precisions"]:
        trainer = Trainer(training, "fp32", comm, COMPRESSIONS[precision])
        trainer.step(batch, emulated_s=0.0)
        before = comm.sent_bytes
        trainer.step(batch, emulated_s=0.0)
        found[precision] = comm.sent_bytes - before
    return found
