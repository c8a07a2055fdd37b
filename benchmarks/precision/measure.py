"""What the ranks of the precision study measure of a training step."""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sklearn.datasets  # noqa: F401 - what every rank needs is imported before they are forked

from benchmarks.training import Trainer, TrainingSetup
from ensemble.comm import SingleRank
from ensemble.train.optimizers import warm_up

if TYPE_CHECKING:
    from ensemble.comm import Communicator

warm_up()  # before they are forked, too

# In a precision's first two steps kernels are chosen and memory is allocated.
_WARM_UP_STEPS = 2
# A precision that has been timed for this long takes no more than the least number of steps.
_LIMIT_S, _LEAST_STEPS = 15.0, 3
# The compression of gradients that sends them in the precision of the computation.
_COMPRESSIONS = {"fp32": "none", "bf16": "bf16", "fp16": "fp16"}

_MEMORY_STEPS = 3


def time_steps(comm: Communicator, options: dict[str, Any]) -> dict[str, Any]:
    """Time training steps: {precision: {"seconds": [...], "median_s": s} or {"refused": reason}}.

    Precisions take steps in turn, in one order and then the reverse, so that other load affects all alike.

    Args:
        options: of a `TrainingSetup`, and `precisions`, `steps` of each.
    """
    from ensemble.train.job import TrainingError

    setup = TrainingSetup.from_options(options)
    batches = setup.batches()
    found: dict[str, dict[str, Any]] = {}
    trainers = {}
    for precision in options["precisions"]:
        trainers[precision] = Trainer(setup, precision, comm)
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
        options: of a `TrainingSetup`, and `precisions`: rank r trains with number r, alone.
    """
    import torch

    alone = SingleRank()
    setup = TrainingSetup.from_options(options)
    batches = setup.batches()
    _load_libraries(setup)
    cuda = setup.device == "cuda"
    before = torch.cuda.memory_allocated() if cuda else _status_bytes("VmRSS")
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets the peak (proc_pid_clear_refs(5))
    trainer = Trainer(setup, options["precisions"][comm.rank], alone)
    for number in range(_MEMORY_STEPS):
        trainer.step(batches[number % len(batches)])
    peak = torch.cuda.max_memory_allocated() if cuda else _status_bytes("VmHWM")
    return float(peak - before)


def _load_libraries(setup: TrainingSetup) -> None:
    """Train a very small network for a step, so that what torch loads at its first step is not measured."""
    net = dataclasses.replace(setup.net, width=2, words=10, embed=2, hidden=2)
    small = dataclasses.replace(setup, net=net, data=None, batch_size=2)
    Trainer(small, "fp32", SingleRank()).step(small.batches()[0])


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


def exchanged_bytes(comm: Communicator, options: dict[str, Any]) -> dict[str, float]:
    """Bytes that a rank sends in a training step, with each precision's compression.

    The number of bytes does not depend on the values: gradients are zeros, and nothing is computed.

    Args:
        options: of a `TrainingSetup`, and `precisions`.
    """
    setup = TrainingSetup.from_options(options)
    batch = setup.batches(comm.rank, comm.world)[0]
    found = {}
    for precision in options["precisions"]:
        trainer = Trainer(setup, "fp32", comm, _COMPRESSIONS[precision])
        trainer.step(batch, emulated_s=0.0)
        before = comm.sent_bytes
        trainer.step(batch, emulated_s=0.0)
        found[precision] = comm.sent_bytes - before
    return found
