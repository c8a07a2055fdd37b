"""Decides from measured times: the all-reduce for each message size, groups, bucket size, codec. Pure functions.

Of several measurements of one thing the shortest counts: disturbances only make them longer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ensemble.comm.codecs import make_codec
from ensemble.comm.hierarchical import Way, Ways
from ensemble.spec.options import COMPRESSIONS, resolve

_ROUNDS, _CLEAR_ROUNDS, _FEW = 7, 4, 3
_GOLDEN = (math.sqrt(5) - 1) / 2
_HOPELESS, _CLEAR, _CONTENDER, _HARDLY_MORE = 2.0, 1.5, 1.25, 1.1  # times the best

#: Codecs that "auto" chooses from, by increasing error. Those that need error feedback must be declared.
CODECS = ("none", "bf16", "qsgd8", "qsgd4")
#: A codec with a larger error must be faster by this factor.
WORTH = 1.1


@dataclass(frozen=True)
class Timing:
    """One measurement.

    Attributes:
        what: "flat", "groups of 4" or "buckets".
        size: of the message or the bucket, bytes.
        seconds: that it took.
    """

    what: str
    size: int
    seconds: float


def select_timings(timings: Sequence[Timing], names: Sequence[str]) -> list[dict[int, float]]:
    """For each name, seconds by size in bytes."""
    return [{each.size: each.seconds for each in timings if each.what == name} for name in names]


# --- flat or hierarchical ------------------------------------------------------------------------------------


def choose_ways(flat_s: Mapping[int, float], hierarchical_s: Mapping[int, float]) -> Ways:
    """The faster way for each message size.

    Between two measured sizes with different ways, the limit lies where both would take equally long. The ratio of
    the two times changes steadily with the size. So where the ratio at one size differs from both its neighbours,
    that measurement was disturbed, and the median of the three counts.

    Args:
        flat_s, hierarchical_s: seconds by size in bytes, for the same sizes; one size at least.
    """
    sizes = sorted(flat_s)
    log_ratios = [math.log(flat_s[size] / hierarchical_s[size]) for size in sizes]
    medians = [sorted(log_ratios[i - 1 : i + 2])[1] for i in range(1, len(sizes) - 1)]
    gain = dict(zip(sizes, [*log_ratios[:1], *medians, *log_ratios[1:][-1:]], strict=True))
    ways: list[tuple[int, Way]] = []
    for size in sizes:
        way: Way = "hierarchical" if gain[size] > 0 else "flat"
        if ways and (ways[-1][1] == way or gain[size] == 0):
            ways[-1] = (size, ways[-1][1])
            continue
        if ways:  # linear interpolation between the two sizes, both axes logarithmic
            before = ways[-1][0]
            share = gain[before] / (gain[before] - gain[size])
            ways[-1] = (min(size - 1, round(before * (size / before) ** share)), ways[-1][1])
        ways.append((size, way))
    return tuple(ways)


def choose_groups(flat_s: Mapping[int, float], candidates: Sequence[Mapping[int, float]], hybrid: bool) -> int:
    """The index of the candidate with the least geometric mean of times; 0 unless another is clearly faster.

    Args:
        flat_s: seconds of the flat all-reduce by size in bytes.
        candidates: seconds by size for each set of groups, whole hosts first. A candidate that was not measured at
            all sizes is not chosen.
        hybrid: whether the flat all-reduce is used where it is faster.
    """

    def cost(seconds: Mapping[int, float]) -> float:
        if len(seconds) < len(flat_s):
            return math.inf
        return sum(math.log(min(s, flat_s[size]) if hybrid else s) for size, s in seconds.items()) / len(seconds)

    costs = [cost(each) for each in candidates]
    best = min(range(len(costs)), key=costs.__getitem__)
    return best if costs[best] < costs[0] - math.log(_HARDLY_MORE) else 0


def drop_losers(seconds: Sequence[Mapping[int, float]]) -> list[int]:
    """The indices of the candidates to measure further: parts of hosts that are slower than whole hosts are
    dropped.

    The flat way and whole hosts always stay: small messages do not show yet how busy the network will be.

    Args:
        seconds: by size in bytes, for the same sizes: flat, whole hosts, then parts of hosts.
    """
    costs = [sum(map(math.log, each.values())) / len(each) for each in seconds]
    return [i for i, cost in enumerate(costs) if i < 2 or cost <= costs[1] + math.log(_HARDLY_MORE)]


def has_enough_rounds(rounds: Sequence[Sequence[float]], share_s: float) -> bool:
    """Whether to stop measuring a message size: the best candidate is clear, or the time is used up.

    Args:
        rounds: seconds, [rounds][candidates].
        share_s: time for all rounds together, seconds.
    """
    spent_s = sum(map(sum, rounds))
    best, *others = sorted(min(column) for column in zip(*rounds, strict=True))
    is_clear = all(other > _CLEAR * best for other in others[:1])
    return (
        len(rounds) > _ROUNDS
        or (is_clear and len(rounds) >= _CLEAR_ROUNDS)
        or spent_s * (1 + 1 / len(rounds)) > share_s  # no time for another round
    )


def extrapolate_s(measured: Sequence[tuple[int, float]], size: int) -> float:
    """Seconds for a message of `size` bytes: a straight line through the last two pairs (bytes, seconds)."""
    last, seconds = measured[-1]
    before, seconds_before = measured[-2] if len(measured) > 1 else (0, seconds)
    return seconds + max(0.0, seconds - seconds_before) / (last - before) * (size - last)


# --- the size of buckets -------------------------------------------------------------------------------------


def choose_bucket_bytes(seconds: Mapping[int, float], default: int) -> int:
    """The fastest bucket size; among those that are hardly slower, the nearest to the default.

    Time over bucket size is a U with a flat bottom, known no better than that after a second or two.

    Args:
        seconds: by bucket size in bytes.
    """
    good = [size for size, s in seconds.items() if s <= _HARDLY_MORE * min(seconds.values())]
    return min(good, key=lambda size: (abs(math.log(size / default)), seconds[size]))


def next_trial(samples: Sequence[Sequence[float]], left_s: float, first: int) -> int | None:
    """The index of the setting to measure next; None to stop. Times over the settings form a U.

    Measures `first`, then its neighbours outwards, on each side until a setting is hopeless. Then repeats the
    settings that may be the best, in turn: at first all that are not hopeless, since a single measurement says
    little, and always `first`.

    Args:
        samples: seconds measured so far, for each setting.
        left_s: the time that is left, seconds.
    """
    known = {number: min(each) for number, each in enumerate(samples) if each}
    if not known:
        return first
    best = min(known.values())
    if left_s < best:
        return None
    for number in sorted(range(len(samples)), key=lambda i: (abs(i - first), i)):
        inwards = number + (1 if number < first else -1)
        if number not in known and known.get(inwards, math.inf) <= _HOPELESS * best:
            return number
    few = {n for n in known if len(samples[n]) < _FEW}
    limit = {n: (_HOPELESS if n in few else _CONTENDER) * best for n in known}
    rivals = [
        n for n, s in known.items() if len(samples[n]) < _ROUNDS and (s <= limit[n] or (n == first and n in few))
    ]
    return min(rivals, key=lambda number: (len(samples[number]), number), default=None)


def sample_sizes(sizes: Sequence[int], limit: int) -> list[int]:
    """Some of a model's tensors in its order, together at most `limit` values, large and small in its proportions.

    Multiples of the golden ratio pick evenly, whatever pattern the layers repeat. A tensor that is too large is
    cut.

    Args:
        sizes: values of each tensor.
    """
    share, left = limit / sum(sizes), limit
    sampled: list[int] = []
    for number, size in enumerate(sizes):
        if number * _GOLDEN % 1 < share and left > 0:
            sampled.append(min(size, left))
            left -= sampled[-1]
    return sampled


# --- the codec of a bucket (compression="auto") --------------------------------------------------------------


@dataclass(frozen=True)
class Rates:
    """Measured rates of the link and the codecs, those of the slowest rank.

    Attributes:
        latency_s: of an all-reduce of one value, seconds.
        bytes_per_s: that a rank sends in a large all-reduce.
        codecs: by codec, values encoded and values decoded per second.
    """

    latency_s: float
    bytes_per_s: float
    codecs: Mapping[str, tuple[float, float]]


def predict_s(codec: str, n: int, world: int, rates: Rates) -> float:
    """Seconds to sum n fp32 values over `world` ranks in a codec; "none" sends them as they are.

    The model is the latency, plus the bytes over the link's rate, plus the time to encode and decode.
    """
    share = (world - 1) / world
    if codec == "none":
        return rates.latency_s + 2 * share * 4 * n / rates.bytes_per_s
    encode, decode = rates.codecs[codec]
    sent = 2 * share * make_codec({"name": codec}).wire_bytes(n)
    return rates.latency_s + sent / rates.bytes_per_s + n / encode + (1 + share) * n / decode


def choose_codec(n: int, world: int, rates: Rates) -> str:
    """The fastest codec for a bucket of n values; of codecs that are about as fast, the one with the least error.

    A fast fabric gets no compression (Markov et al., MLSys 2022, found it useful in few data-center set-ups), a
    slow link gets 4 bits.
    """
    best = CODECS[0]
    for name in CODECS[1:]:
        if predict_s(name, n, world, rates) * WORTH < predict_s(best, n, world, rates):
            best = name
    return best


def choose_compression(n: int, world: int, rates: Rates, min_size: int) -> dict[str, Any] | None:
    """The compression of a bucket of n values by `choose_codec`; None for none."""
    name = choose_codec(n, world, rates)
    return None if name == "none" else resolve("compression", {"name": name, "min_size": min_size}, COMPRESSIONS)
