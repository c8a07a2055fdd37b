"""Times iterations on several ranks, in a row as nccl-tests does, and counts bytes at an interface."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import psutil
import torch

from ensemble.comm import Communicator

BARRIER_S = 600.0


def time_iterations(run: Callable[[], object], count: int, comm: Communicator) -> list[float]:
    """Seconds of each of `count` iterations that follow one another, after a barrier."""
    comm.barrier(BARRIER_S)
    seconds, before = [], time.perf_counter()
    for _ in range(count):
        run()
        now = time.perf_counter()
        seconds.append(now - before)
        before = now
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
    comm: Communicator,
    runs: Mapping[str, Callable[[], object]],
    iterations: Mapping[str, int],
    rounds: int,
    interface: str,
) -> dict[str, dict[str, Any]]:
    """Time several things in turn, so that other load affects all alike.

    Args:
        runs: by name.  iterations: of each in a round.

    Returns:
        Of each name `times` of this rank in seconds, and in the mean of an iteration `sent`, bytes by the
        communicator's count, and `wire`, bytes that this rank's host sent through the interface.
    """
    found: dict[str, dict[str, Any]] = {name: {"times": [], "sent": 0.0, "wire": 0.0} for name in runs}
    for _ in range(rounds):
        for name, case in found.items():
            sent, wire = comm.sent_bytes, interface_sent(interface)
            case["times"] += time_iterations(runs[name], iterations[name], comm)
            case["sent"] += comm.sent_bytes - sent
            comm.barrier(BARRIER_S)  # the host's other ranks have sent theirs, too
            case["wire"] += interface_sent(interface) - wire
    for case in found.values():
        for counted in ("sent", "wire"):
            case[counted] /= len(case["times"])
    return found


def interface_sent(interface: str) -> int:
    """Bytes of frames that this process's host has sent through an interface (proc_pid_net(5))."""
    counted = psutil.net_io_counters(pernic=True, nowrap=False).get(interface)
    return 0 if counted is None else counted.bytes_sent
