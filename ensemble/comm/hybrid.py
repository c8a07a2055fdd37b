"""Measures, when a member starts, which all-reduce is faster for which message size, for a hybrid communicator.

All ranks run the same measurements and call each function together. Rank 0's clock decides when to stop, and it
broadcasts each decision, so all ranks return the same times. The shortest of several counts: disturbances only
make them longer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from ensemble.comm.communicator import Communicator
from ensemble.comm.exchange_plan import BUDGET_S, Timing, Way, Ways

#: Message sizes to measure, bytes: 4 KiB to 16 MiB, densest where messages of gradients are.
SIZES = (2**12, 2**16, 2**20, 2**22, 2**24)
#: How often each thing is measured at most; the shortest time counts.
ROUNDS = 5


class Clock:
    """Measures the time of work on a device, and broadcasts rank 0's values.

    Args:
        comm: the ranks that measure together.
        device: of the tensors.
        budget_s: the time for all that is measured with this clock, seconds.
        now: returns the time in seconds.
    """

    def __init__(
        self,
        comm: Communicator,
        device: torch.device | str = "cpu",
        budget_s: float = BUDGET_S,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.comm, self.device, self.budget_s, self._now = comm, torch.device(device), budget_s, now
        self._end = now() + budget_s

    def left_s(self) -> float:
        """The rest of the budget, seconds."""
        return self._end - self._now()

    def agree(self, value: float) -> float:
        """Rank 0's value."""
        tensor = torch.tensor([value], dtype=torch.float64)
        self.comm.broadcast_(tensor)
        return float(tensor)

    def time(self, work: Callable[[], object]) -> float:
        """The seconds of a call, until the device has done its work."""
        start = self._now()
        work()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self._now() - start


def measure_ways(
    base: Communicator,
    candidates: Sequence[tuple[str, Communicator]],
    largest: int = SIZES[-1],
    device: torch.device | str = "cpu",
    budget_s: float = BUDGET_S,
    now: Callable[[], float] = time.perf_counter,
) -> list[Timing]:
    """Time an all-reduce of each message size by each candidate, in turn. Large sizes are left out without time.

    Args:
        candidates: names and communicators of the same ranks.
        largest: the largest message of interest, bytes.
    """
    clock, timings = Clock(base, device, budget_s, now), list[Timing]()
    sizes = [size for size in SIZES if size <= largest] or [SIZES[0]]
    for number, size in enumerate(sizes):
        tensor = torch.zeros(size // 4, device=clock.device)
        share_s, rounds = clock.left_s() / (len(sizes) - number), list[list[float]]()
        while not rounds or clock.agree(len(rounds) < ROUNDS and sum(map(sum, rounds)) < share_s):
            rounds.append([clock.time(partial(comm.all_reduce_, tensor)) for _, comm in candidates])
        seconds = [clock.agree(min(column)) for column in zip(*rounds, strict=True)]
        timings += [Timing(name, size, s) for (name, _), s in zip(candidates, seconds, strict=True)]
        if clock.agree(clock.left_s() < sum(seconds)):
            break
    return timings


def choose_ways(flat_s: Mapping[int, float], hierarchical_s: Mapping[int, float]) -> Ways:
    """The faster way for each message size; between two measured sizes the limit is their geometric mean.

    Args:
        flat_s, hierarchical_s: seconds by size in bytes, for the same sizes; one size at least.
    """
    ways: list[tuple[int, Way]] = []
    for size in sorted(flat_s):
        way: Way = "hierarchical" if hierarchical_s[size] < flat_s[size] else "flat"
        if ways and ways[-1][1] == way:
            ways.pop()
        elif ways:
            ways[-1] = (math.isqrt(ways[-1][0] * size), ways[-1][1])
        ways.append((size, way))
    return tuple(ways)
