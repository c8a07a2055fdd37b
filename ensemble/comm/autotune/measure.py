"""Measures, in a few seconds when a member starts, all-reduces, bucket sizes, the link and the codecs.

Small buckets pay the latency of each message, large ones wait for each other: time over bucket size is a U
(**tensor fusion**). All ranks run the same measurements and call each function together. Rank 0's clock decides
when to stop, and rank 0 broadcasts each decision, so all ranks return the same times.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import ParamSpec

import torch

from ensemble.comm.autotune.decide import (
    CODECS,
    Rates,
    Timing,
    codec_options,
    drop_losers,
    extrapolate_s,
    has_enough_rounds,
    next_trial,
    sample_sizes,
    select_timings,
)
from ensemble.comm.communicator import Communicator
from ensemble.comm.compressed_all_reduce import make_exchange_codec
from ensemble.comm.gradients import BUCKET_BYTES, GradientExchange

#: Time for all measurements at a member's start, seconds.
BUDGET_S = 2.0
#: Message sizes to measure, bytes: 4 KiB to 16 MiB, densest where messages of gradients are.
SIZES = (2**12, 2**16, 2**20, 2**22, 2**24)
#: Bucket sizes to try, bytes: 64 KiB to 64 MiB.
BUCKETS = tuple(4**power * 65536 for power in range(6))
_PROBE_VALUES, _PROBE_REPEATS = 2**20, 5

_P = ParamSpec("_P")
#: Makes the exchange of some parameters in buckets of so many bytes.
MakeExchange = Callable[[Sequence[torch.nn.Parameter], int], GradientExchange]


class _Clock:
    """Measures time, and broadcasts rank 0's values.

    Args:
        budget_s: the time for all that is measured with this clock, seconds.
        now: returns the time in seconds.
    """

    def __init__(self, comm: Communicator, budget_s: float, now: Callable[[], float]) -> None:
        self._comm, self._now = comm, now
        self._end = now() + budget_s

    def left_s(self) -> float:
        return self._end - self._now()

    def agree(self, value: float) -> float:
        """Rank 0's value."""
        tensor = torch.tensor([value], dtype=torch.float64)
        self._comm.broadcast_(tensor)
        return float(tensor)

    def time(self, work: Callable[_P, None], *args: _P.args, **options: _P.kwargs) -> float:
        start = self._now()
        work(*args, **options)
        return self._now() - start


def measure_ways(
    base: Communicator,
    candidates: Sequence[tuple[str, Communicator]],
    *,
    largest: int = SIZES[-1],
    budget_s: float = BUDGET_S / 2,
    device: torch.device | str = "cpu",
    now: Callable[[], float] = time.perf_counter,
) -> list[Timing]:
    """Time an all-reduce of each message size by each candidate, in turn. Large sizes are left out without time.

    Args:
        base: all ranks.
        candidates: names and communicators of the same ranks: flat, whole hosts, then parts of hosts, which are
            dropped once they are clearly slower.
        largest: the largest message of interest, bytes.
        now: returns the time in seconds.
    """
    clock = _Clock(base, budget_s, now)
    timings: list[Timing] = []
    remaining = list(candidates)
    round_s: list[tuple[int, float]] = []
    sizes = [size for size in SIZES if size <= largest] or [SIZES[0]]
    for number, size in enumerate(sizes):
        tensor = torch.zeros(size // 4, device=device)
        share_s = clock.left_s() / (len(sizes) - number)
        rounds: list[list[float]] = []
        while not rounds or clock.agree(not has_enough_rounds(rounds, share_s)):
            rounds.append([clock.time(_all_reduce, comm, tensor) for _, comm in remaining])
        seconds = [clock.agree(min(column)) for column in zip(*rounds, strict=True)]
        timings += [Timing(name, size, each) for (name, _), each in zip(remaining, seconds, strict=True)]
        remaining = [remaining[i] for i in drop_losers(select_timings(timings, [name for name, _ in remaining]))]
        round_s.append((size, sum(seconds)))
        if clock.agree(number + 1 == len(sizes) or clock.left_s() < extrapolate_s(round_s, sizes[number + 1])):
            break
    return timings


def measure_buckets(
    comm: Communicator,
    sizes: Sequence[int],
    make: MakeExchange,
    *,
    budget_s: float = BUDGET_S / 2,
    device: torch.device | str = "cpu",
    now: Callable[[], float] = time.perf_counter,
) -> list[Timing]:
    """Time the exchange of a model's gradients for several bucket sizes, without a backward pass beside it.

    Args:
        comm: carries the gradients.
        sizes: values of each of the model's parameters, in its order.
        now: returns the time in seconds.
    """
    clock = _Clock(comm, budget_s, now)
    probe = torch.zeros(2**18, device=device)  # 1 MiB
    _all_reduce(comm, probe)
    bytes_per_s = probe.nbytes / min(clock.time(_all_reduce, comm, probe) for _ in range(3))
    # So many bytes that there is time for a dozen exchanges or more, where the model has them.
    limit = int(clock.agree(min(max(bytes_per_s * budget_s / 12, 2**23), 2**25)))
    parameters = [torch.nn.Parameter(torch.zeros(n, device=device)) for n in sample_sizes(sizes, limit // 4)]
    total = sum(4 * p.numel() for p in parameters)
    settings = [size for size in BUCKETS if size < total] + [size for size in BUCKETS if size >= total][:1]
    first = settings.index(BUCKET_BYTES) if BUCKET_BYTES in settings else len(settings) - 1
    exchanges: dict[int, GradientExchange] = {}
    samples: list[list[float]] = [[] for _ in settings]

    def choose() -> int:
        number = next_trial(samples, clock.left_s(), first)
        return int(clock.agree(-1 if number is None else number))

    while (number := choose()) >= 0:
        size = settings[number]
        if size not in exchanges:
            exchanges[size] = make(parameters, size)
            _exchange(exchanges[size], parameters)  # touches its memory for the first time
        samples[number].append(clock.time(_exchange, exchanges[size], parameters))
    for exchange in exchanges.values():
        exchange.close()
    return [
        Timing("buckets", size, clock.agree(min(each)))
        for size, each in zip(settings, samples, strict=True)
        if clock.agree(bool(each))
    ]


def measure_rates(comm: Communicator, device: torch.device) -> Rates:
    """Measure the link and the codecs; well under a second on a fast link."""
    small, large = (torch.zeros(n, device=device) for n in (1, _PROBE_VALUES))
    latency_s = _median_s(lambda: comm.all_reduce_(small), device)
    large_s = _median_s(lambda: comm.all_reduce_(large), device)
    sent = 2 * (comm.world - 1) / comm.world * large.nbytes
    costs = [latency_s, max(large_s - latency_s, 1e-9) / sent]
    values = torch.randn(_PROBE_VALUES, device=device, generator=torch.Generator(device).manual_seed(0))
    for name in CODECS[1:]:
        codec = make_exchange_codec(codec_options(name))
        wire = torch.zeros(codec.wire_bytes(len(values)), dtype=torch.uint8, device=device)
        costs += [
            _median_s(lambda codec=codec, wire=wire: codec.encode(values, wire, key=0), device) / len(values),  # type: ignore[misc]
            _median_s(lambda codec=codec, wire=wire: codec.decode(wire, large), device) / len(values),  # type: ignore[misc]
        ]
    slowest = torch.tensor(costs, dtype=torch.float64, device=device)
    comm.all_reduce_(slowest, "max")
    latency_s, s_per_byte, *s_per_value = slowest.tolist()
    pairs = zip(s_per_value[::2], s_per_value[1::2], strict=True)
    codecs = {name: (1 / encode, 1 / decode) for name, (encode, decode) in zip(CODECS[1:], pairs, strict=True)}
    return Rates(latency_s, 1 / s_per_byte, codecs)


def _median_s(work: Callable[[], object], device: torch.device) -> float:
    work()
    seconds = []
    for _ in range(_PROBE_REPEATS):
        start = time.perf_counter()
        work()
        _synchronize(device)
        seconds.append(time.perf_counter() - start)
    return max(statistics.median(seconds), 1e-9)


def _all_reduce(comm: Communicator, tensor: torch.Tensor) -> None:
    comm.all_reduce_(tensor)
    _synchronize(tensor.device)


def _exchange(exchange: GradientExchange, parameters: Sequence[torch.nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = parameter.detach()
    exchange.finish()
    _synchronize(parameters[0].device)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
