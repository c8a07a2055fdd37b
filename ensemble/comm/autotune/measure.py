"""Measures, in a few seconds when a member starts, all-reduces, bucket sizes, the link and the codecs.

Small buckets pay the latency of each message, large ones wait for each other: time over bucket size is a U
(**tensor fusion**). All ranks run the same measurements and call each function together. Rank 0's clock decides
when to stop, and rank 0 broadcasts each decision, so all ranks return the same times.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from ensemble.comm.autotune.decide import (
    CODECS,
    Rates,
    Timing,
    drop_losers,
    extrapolate_s,
    has_enough_rounds,
    next_trial,
    sample_sizes,
    select_timings,
)
from ensemble.comm.codecs import make_codec
from ensemble.comm.communicator import Communicator
from ensemble.comm.gradients import BUCKET_BYTES, GradientExchange

#: Time for all measurements at a member's start, seconds.
BUDGET_S = 2.0
#: Message sizes to measure, bytes: 4 KiB to 16 MiB, densest where messages of gradients are.
SIZES = (2**12, 2**16, 2**20, 2**22, 2**24)
#: Bucket sizes to try, bytes: 64 KiB to 64 MiB.
BUCKETS = tuple(4**power * 65536 for power in range(6))
_PROBE_VALUES, _PROBE_REPEATS = 2**20, 5

#: Makes the exchange of some parameters; called with them and `bucket_bytes`.
MakeExchange = Callable[..., GradientExchange]


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
    clock: Clock, candidates: Sequence[tuple[str, Communicator]], largest: int = SIZES[-1]
) -> list[Timing]:
    """Time an all-reduce of each message size by each candidate, in turn. Large sizes are left out without time.

    Args:
        candidates: names and communicators of the same ranks: flat, whole hosts, then parts of hosts, which are
            dropped once they are clearly slower.
        largest: the largest message of interest, bytes.
    """
    timings: list[Timing] = []
    remaining = list(candidates)
    round_s: list[tuple[int, float]] = []
    sizes = [size for size in SIZES if size <= largest] or [SIZES[0]]
    for number, size in enumerate(sizes):
        tensor = torch.zeros(size // 4, device=clock.device)
        share_s = clock.left_s() / (len(sizes) - number)
        rounds: list[list[float]] = []
        while not rounds or clock.agree(not has_enough_rounds(rounds, share_s)):
            rounds.append([clock.time(partial(comm.all_reduce_, tensor)) for _, comm in remaining])
        seconds = [clock.agree(min(column)) for column in zip(*rounds, strict=True)]
        timings += [Timing(name, size, each) for (name, _), each in zip(remaining, seconds, strict=True)]
        remaining = [remaining[i] for i in drop_losers(select_timings(timings, [name for name, _ in remaining]))]
        round_s.append((size, sum(seconds)))
        if clock.agree(number + 1 == len(sizes) or clock.left_s() < extrapolate_s(round_s, sizes[number + 1])):
            break
    return timings


def measure_buckets(clock: Clock, sizes: Sequence[int], make: MakeExchange) -> list[Timing]:
    """Time the exchange of a model's gradients for several bucket sizes, without a backward pass beside it.

    Args:
        clock: of the communicator that carries the gradients.
        sizes: values of each of the model's parameters, in its order.
    """
    probe = torch.zeros(2**18, device=clock.device)  # 1 MiB
    send = partial(clock.comm.all_reduce_, probe)
    clock.time(send)
    bytes_per_s = probe.nbytes / min(clock.time(send) for _ in range(3))
    # So many bytes that there is time for a dozen exchanges or more, where the model has them.
    limit = int(clock.agree(min(max(bytes_per_s * clock.budget_s / 12, 2**23), 2**25)))
    parameters = [torch.nn.Parameter(torch.zeros(n, device=clock.device)) for n in sample_sizes(sizes, limit // 4)]
    total = sum(4 * p.numel() for p in parameters)
    settings = [size for size in BUCKETS if size < total] + [size for size in BUCKETS if size >= total][:1]
    first = settings.index(BUCKET_BYTES) if BUCKET_BYTES in settings else len(settings) - 1
    exchanges: dict[int, GradientExchange] = {}
    samples: list[list[float]] = [[] for _ in settings]

    def choose() -> int:
        number = next_trial(samples, clock.left_s(), first)
        return int(clock.agree(-1 if number is None else number))

    def run(exchange: GradientExchange) -> None:
        for parameter in parameters:
            parameter.grad = parameter.detach()
        exchange.finish()

    while (number := choose()) >= 0:
        size = settings[number]
        if size not in exchanges:
            exchanges[size] = make(parameters, bucket_bytes=size)
            clock.time(partial(run, exchanges[size]))  # touches its memory for the first time
        samples[number].append(clock.time(partial(run, exchanges[size])))
    for exchange in exchanges.values():
        exchange.close()
    return [
        Timing("buckets", size, clock.agree(min(each)))
        for size, each in zip(settings, samples, strict=True)
        if each
    ]


def measure_rates(comm: Communicator, device: torch.device) -> Rates:
    """Measure the link and the codecs; well under a second on a fast link."""
    clock = Clock(comm, device)
    small, large = (torch.zeros(n, device=device) for n in (1, _PROBE_VALUES))
    latency_s = _median_s(clock, partial(comm.all_reduce_, small))
    large_s = _median_s(clock, partial(comm.all_reduce_, large))
    sent = 2 * (comm.world - 1) / comm.world * large.nbytes
    costs = [latency_s, max(large_s - latency_s, 1e-9) / sent]
    values = torch.randn(_PROBE_VALUES, device=device, generator=torch.Generator(device).manual_seed(0))
    for name in CODECS[1:]:
        codec = make_codec({"name": name})
        wire = torch.zeros(codec.wire_bytes(len(values)), dtype=torch.uint8, device=device)
        for work in (partial(codec.encode, values, wire, key=0), partial(codec.decode, wire, large)):
            costs.append(_median_s(clock, work) / len(values))
    slowest = torch.tensor(costs, dtype=torch.float64, device=device)
    comm.all_reduce_(slowest, "max")
    latency_s, s_per_byte, *s_per_value = slowest.tolist()
    pairs = zip(s_per_value[::2], s_per_value[1::2], strict=True)
    codecs = {name: (1 / encode, 1 / decode) for name, (encode, decode) in zip(CODECS[1:], pairs, strict=True)}
    return Rates(latency_s, 1 / s_per_byte, codecs)


def _median_s(clock: Clock, work: Callable[[], object]) -> float:
    work()
    return max(statistics.median(clock.time(work) for _ in range(_PROBE_REPEATS)), 1e-9)
