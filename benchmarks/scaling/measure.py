"""What ranks of the scaling study do: training steps, real or emulated."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import sklearn.datasets  # noqa: F401 - what every rank needs is imported before they are forked

from benchmarks.training import Trainer, TrainingSetup
from ensemble.train.optimizers import warm_up

if TYPE_CHECKING:
    from ensemble.comm import Communicator

warm_up()  # before they are forked, too

_WARM_UP = 2
_BARRIER_S = 600.0


def time_steps(comm: Communicator, options: dict[str, Any]) -> dict[str, Any]:
    """Medians of this rank's training steps, of their waits for other ranks, and of steps that compute nothing.

    Args:
        options: of a `TrainingSetup`; `steps`, how many of each; `precision`, `compression`; `step_s`: seconds
            of an emulated accelerator for a global batch, of which a rank sleeps its part; None computes for real.

    Returns:
        "step_s" and "sync_s"; "idle_s", a step without computing: what exchange and optimizer cost alone;
        "sent_bytes" of a step.
    """
    setup = TrainingSetup.from_options(options)
    batches = setup.batches(comm.rank, comm.world)
    trainer = Trainer(setup, options["precision"], comm, options["compression"])
    idle, _, sent = _median_step(trainer, batches, comm, options["steps"], emulated_s=0.0)
    step, sync, _ = _median_step(trainer, batches, comm, options["steps"], emulated_s=options["step_s"])
    return {"step_s": step, "sync_s": sync, "idle_s": idle, "sent_bytes": sent}


def _median_step(
    trainer: Trainer, batches: list[Any], comm: Communicator, steps: int, emulated_s: float | None
) -> tuple[float, float, float]:
    """Medians of a step's seconds and its wait; bytes sent in a step."""
    found = []
    before = 0.0
    for number in range(_WARM_UP + steps):
        if number == _WARM_UP:
            comm.barrier(_BARRIER_S)
            before = comm.sent_bytes
        found.append(trainer.step(batches[number % len(batches)], emulated_s))
    timed = found[_WARM_UP:]
    sent = (comm.sent_bytes - before) / steps
    return statistics.median(step for step, _ in timed), statistics.median(sync for _, sync in timed), sent
