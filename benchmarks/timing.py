"""Times iterations on several ranks, in a row as nccl-tests does."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ensemble.comm import Communicator

BARRIER_S = 600.0


def time_iterations(run: Callable[[], object], count: int, comm: Communicator) -> list[float]:
    """Seconds of each of `count` iterations that follow one another, after a barrier."""
    comm.barrier(BARRIER_S)
    seconds, before = [], time.perf_counter()
    for _ in range(count):
        run()
        end = time.perf_counter()
        seconds.append(end - before)
        before = end
    return seconds


def fitting_iterations(comm: Communicator, warm_s: float, limit_s: float, least: int, most: int) -> int:
    """How many iterations fit into `limit_s` on the slowest rank, from `least` to `most`; the same on all ranks.

    Args:
        warm_s: seconds of one iteration on this rank.
    """
    slowest = torch.tensor([warm_s], dtype=torch.float64)
    comm.all_reduce_(slowest, "max")
    return min(most, max(least, int(limit_s / max(slowest.item(), 1e-6))))


def take_turns(
    comm: Communicator, runs: Mapping[str, Callable[[], object]], iterations: Mapping[str, int], rounds: int
) -> dict[str, dict[str, Any]]:
    """Time several things in turn, so that other load affects all alike.

    Args:
        runs: by name.  iterations: of each in a round.

    Returns:
        Of each name `times` of this rank in seconds, and in the mean of an iteration `sent`, bytes by the
        communicator's count.
    """
    cases: dict[str, dict[str, Any]] = {name: {"times": [], "sent": 0.0} for name in runs}
    for _ in range(rounds):
        for name, case in cases.items():
            sent = comm.sent_bytes
            case["times"] += time_iterations(runs[name], iterations[name], comm)
            case["sent"] += comm.sent_bytes - sent
    for case in cases.values():
        case["sent"] /= len(case["times"])
    return cases
