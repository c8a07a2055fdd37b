"""`compression="auto"`: which codec a bucket travels in, from the measured rates of the link and of the codecs.

An exchange is modelled as its messages' latency, its bytes over the link's rate, and the time to encode and decode
them; whatever is fastest is taken, and of what is about as fast the one that loses least. A fast fabric gets no
compression at all (Markov et al., MLSys 2022, found it to help in few data-center set-ups), a slow link 4 bits.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ensemble.comm.buckets import Choose
from ensemble.comm.communicator import Communicator
from ensemble.comm.compressed_all_reduce import codec_of
from ensemble.spec.options import COMPRESSIONS, resolve

#: From what loses nothing to what loses most; codecs that need error feedback are for those who ask for them.
CANDIDATES = ("none", "bf16", "qsgd8", "qsgd4")
#: A codec that loses more must be faster by this.
WORTH = 1.1
_PROBE_VALUES = 2**20
_REPEATS = 5


@dataclass(frozen=True)
class Rates:
    """What was measured, the slowest rank's.

    Attributes:
        latency_s: of an all-reduce of next to nothing.
        bytes_per_s: that a rank sends in a large one.
        codecs: of each, values encoded and decoded a second.
    """

    latency_s: float
    bytes_per_s: float
    codecs: Mapping[str, tuple[float, float]]

    def as_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Rates:
        """What `as_dict` gave."""
        codecs = {name: (float(pair[0]), float(pair[1])) for name, pair in values["codecs"].items()}
        return cls(values["latency_s"], values["bytes_per_s"], codecs)


def predicted_s(name: str, n: int, world: int, rates: Rates) -> float:
    """Seconds to sum n fp32 values over `world` ranks in a codec, or plainly ("none")."""
    share = (world - 1) / world
    if name == "none":
        return rates.latency_s + 2 * share * 4 * n / rates.bytes_per_s
    encode, decode = rates.codecs[name]
    sent = 2 * share * codec_of(options(name)).wire_bytes(n)
    return rates.latency_s + sent / rates.bytes_per_s + n / encode + (1 + share) * n / decode


def chosen(n: int, world: int, rates: Rates) -> str:
    """The codec for a bucket of n values."""
    best = CANDIDATES[0]
    for name in CANDIDATES[1:]:
        if predicted_s(name, n, world, rates) * WORTH < predicted_s(best, n, world, rates):
            best = name
    return best


def chooser(rates: Rates, world: int, min_size: int) -> Choose:
    """What a bucket of so many values travels as."""

    def choose(n: int) -> dict[str, Any] | None:
        name = chosen(n, world, rates)
        return None if name == "none" else options(name, min_size=min_size)

    return choose


def options(name: str, **given: Any) -> dict[str, Any]:
    """A codec's options, all filled in."""
    return resolve("compression", {"name": name, **given}, COMPRESSIONS)


def measured(comm: Communicator, device: torch.device) -> Rates:
    """Measure, in well under a second on a fast link; all ranks call it together and get the same."""
    small, large = (torch.zeros(n, device=device) for n in (1, _PROBE_VALUES))
    latency_s = _timed(lambda: comm.all_reduce_(small), device)
    large_s = _timed(lambda: comm.all_reduce_(large), device)
    sent = 2 * (comm.world - 1) / comm.world * large.nbytes
    figures = [latency_s, max(large_s - latency_s, 1e-9) / sent]
    values = torch.randn(_PROBE_VALUES, device=device, generator=torch.Generator(device).manual_seed(0))
    for name in CANDIDATES[1:]:
        codec = codec_of(options(name))
        wire = torch.zeros(codec.wire_bytes(len(values)), dtype=torch.uint8, device=device)
        figures += [
            _timed(lambda codec=codec, wire=wire: codec.encode(values, wire, key=0), device) / len(values),  # type: ignore[misc]
            _timed(lambda codec=codec, wire=wire: codec.decode(wire, large), device) / len(values),  # type: ignore[misc]
        ]
    slowest = torch.tensor(figures, dtype=torch.float64, device=device)
    comm.all_reduce_(slowest, "max")
    latency_s, s_per_byte, *per_value = slowest.tolist()
    codecs = {
        name: (1 / per_value[2 * number], 1 / per_value[2 * number + 1])
        for number, name in enumerate(CANDIDATES[1:])
    }
    return Rates(latency_s, 1 / s_per_byte, codecs)


def _timed(work: Callable[[], object], device: torch.device) -> float:
    """Median seconds."""
    work()
    seconds = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return max(statistics.median(seconds), 1e-9)
