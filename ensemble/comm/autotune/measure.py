"""Which way all-reduces go and how large buckets are, by a short measurement when a member starts.

What is tuned: the groups of a hierarchical all-reduce (whole hosts, or parts of them), the message sizes at which
it is better than a flat one, and **tensor fusion**: how many bytes of gradients travel in one message. Small
buckets pay for each message, large ones wait for each other: time over the size of the buckets is a U.

All ranks run the same measurements; rank 0's clock decides, and what it decides is told to all. The result is kept
with the member (`Tuned.as_dict`): it decides in which order values are added, hence the last bits of the weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, ParamSpec

import torch

from ensemble.comm.autotune.decide import Timed, Ways, by_size, enough, expected, in_the_race, next_trial, sample
from ensemble.comm.communicator import Communicator
from ensemble.comm.gradients import BUCKET_BYTES, GradientExchange
from ensemble.comm.hierarchical import Hierarchical, Hybrid
from ensemble.comm.hosts import Groups

BUDGET_S = 2.0
#: Sizes of messages whose way is measured: 4 KiB to 16 MiB, closest where messages of gradients are.
SIZES = (2**12, 2**16, 2**20, 2**22, 2**24)
#: Sizes of buckets that are tried.
BUCKETS = tuple(4**power * 65536 for power in range(6))  # 64 KiB to 64 MiB

_P = ParamSpec("_P")
#: Makes the exchange of some parameters in buckets of so many bytes.
Make = Callable[[Sequence[torch.nn.Parameter], int], GradientExchange]
Name = Literal["flat", "hierarchical", "hybrid"]


@dataclass(frozen=True)
class Tuned:
    """How a member's gradients are exchanged; JSON-able by `as_dict`.

    Attributes:
        name: "flat", "hierarchical" or "hybrid".
        groups: of the hierarchical all-reduce; empty for "flat".
        ways: of "hybrid": see `choices.choose`; empty otherwise.
        bucket_bytes: of gradients in one message.
        measured: what the choice is based on; empty where all was given.
    """

    name: Name = "flat"
    groups: Groups = ()
    ways: Ways = ()
    bucket_bytes: int = BUCKET_BYTES
    measured: tuple[Timed, ...] = ()

    def open(self, base: Communicator) -> Communicator:
        """The communicator of this choice over all ranks; every rank calls it."""
        if self.name == "flat":
            return base
        hierarchical = Hierarchical(base, self.groups)
        return hierarchical if self.name == "hierarchical" else Hybrid(hierarchical, self.ways)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, said: Mapping[str, Any]) -> Tuned:
        """What `as_dict` gave, also after a passage through JSON."""
        return cls(
            name=said["name"],
            groups=tuple(tuple(group) for group in said["groups"]),
            ways=tuple((up_to, way) for up_to, way in said["ways"]),
            bucket_bytes=said["bucket_bytes"],
            measured=tuple(Timed(**each) for each in said["measured"]),
        )


# --- how it is measured --------------------------------------------------------------------------------------


class _Clock:
    """Rank 0's clock, and its word for all."""

    def __init__(self, comm: Communicator, budget_s: float, now: Callable[[], float]) -> None:
        self._comm, self._now = comm, now
        self._until = now() + budget_s

    def left_s(self) -> float:
        return self._until - self._now()

    def agree(self, value: float) -> float:
        """Rank 0's value."""
        told = torch.tensor([value], dtype=torch.float64)
        self._comm.broadcast_(told)
        return float(told)

    def time(self, work: Callable[_P, None], *args: _P.args, **options: _P.kwargs) -> float:
        began = self._now()
        work(*args, **options)
        return self._now() - began


def measure_ways(
    base: Communicator,
    candidates: Sequence[tuple[str, Communicator]],
    *,
    largest: int = SIZES[-1],
    budget_s: float = BUDGET_S / 2,
    device: torch.device | str = "cpu",
    now: Callable[[], float] = time.perf_counter,
) -> list[Timed]:
    """Time an all-reduce of each size by each candidate, in turn; larger sizes are left out when time is over.

    Args:
        base: all ranks.
        candidates: names, and communicators of the same ranks: the flat one, and others, of which those that turn
            out much worse than the best are not measured to the end.
        largest: bytes of the largest message of interest.
        now: the clock.
    """
    clock = _Clock(base, budget_s, now)
    timed: list[Timed] = []
    racing = list(candidates)
    took: list[tuple[int, float]] = []
    sizes = [size for size in SIZES if size <= largest] or [SIZES[0]]
    for number, size in enumerate(sizes):
        tensor = torch.zeros(size // 4, device=device)
        share_s = clock.left_s() / (len(sizes) - number)
        rounds: list[list[float]] = []
        while not rounds or clock.agree(not enough(rounds, share_s)):
            rounds.append([clock.time(_finished, comm, tensor) for _, comm in racing])
        columns = list(zip(*rounds, strict=True))
        seconds = [clock.agree(min(column)) for column in columns]
        timed += [Timed(name, size, each) for (name, _), each in zip(racing, seconds, strict=True)]
        racing = [racing[i] for i in in_the_race(by_size(timed, [name for name, _ in racing]))]
        took.append((size, sum(seconds)))
        if clock.agree(number + 1 == len(sizes) or clock.left_s() < expected(took, sizes[number + 1])):
            break
    return timed


def _finished(comm: Communicator, tensor: torch.Tensor) -> None:
    comm.all_reduce_(tensor)
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)


def plain(comm: Communicator) -> Make:
    """Gradients as they are, over a communicator."""

    def make(parameters: Sequence[torch.nn.Parameter], bucket_bytes: int) -> GradientExchange:
        return GradientExchange(parameters, comm, bucket_bytes=bucket_bytes)

    return make


def measure_buckets(
    comm: Communicator,
    sizes: Sequence[int],
    *,
    make: Make | None = None,
    budget_s: float = BUDGET_S / 2,
    device: torch.device | str = "cpu",
    now: Callable[[], float] = time.perf_counter,
) -> list[Timed]:
    """Time the exchange of a model's gradients by the size of its buckets, without a backward pass beside it.

    Args:
        comm: by which they will be exchanged.
        sizes: values of each of the model's parameters, in its order.
        make: the exchange of some parameters in buckets of so many bytes; None: as they are, over `comm`.
        now: the clock.
    """
    make = make or plain(comm)
    clock = _Clock(comm, budget_s, now)
    probe = torch.zeros(2**18, device=device)  # 1 MiB
    _finished(comm, probe)
    bytes_per_s = probe.nbytes / min(clock.time(_finished, comm, probe) for _ in range(3))
    # So many that there is time for a dozen exchanges or more, where the model has them.
    most = int(clock.agree(min(max(bytes_per_s * budget_s / 12, 2**23), 2**25)))
    parameters = [torch.nn.Parameter(torch.zeros(n, device=device)) for n in sample(sizes, most // 4)]
    total = sum(4 * p.numel() for p in parameters)
    tried = [size for size in BUCKETS if size < total] + [size for size in BUCKETS if size >= total][:1]
    begin = tried.index(BUCKET_BYTES) if BUCKET_BYTES in tried else len(tried) - 1
    exchanges: dict[int, GradientExchange] = {}
    samples: list[list[float]] = [[] for _ in tried]
    while (number := int(clock.agree(_or_none(next_trial(samples, clock.left_s(), begin))))) >= 0:
        size = tried[number]
        if size not in exchanges:
            exchanges[size] = make(parameters, size)
            _exchange(exchanges[size], parameters)  # its memory was never touched
        samples[number].append(clock.time(_exchange, exchanges[size], parameters))
    for exchange in exchanges.values():
        exchange.close()
    return [
        Timed("buckets", size, clock.agree(min(each)))
        for size, each in zip(tried, samples, strict=True)
        if clock.agree(bool(each))
    ]


def _or_none(number: int | None) -> float:
    return -1.0 if number is None else number


def _exchange(exchange: GradientExchange, parameters: Sequence[torch.nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = parameter.detach()
    exchange.finish()
    if parameters[0].device.type == "cuda":
        torch.cuda.synchronize(parameters[0].device)
