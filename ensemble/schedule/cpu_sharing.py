"""Chooses the width and the core share of each member when all of them train at once on CPU nodes, on one stream.

With T_i the seconds of an epoch of member i alone, c_i the cores that it keeps busy and P the CPU-seconds of
preparing an epoch, all finish an epoch in max(max_i T_i, (sum_i c_i T_i + P) / cores) seconds: more workers help
the slowest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: Minimum share of a core of one worker. It bounds how many workers share a core: each is a process with its own
#: memory, and they evict each other's working sets from the caches.
LEAST_SHARE = 0.125


@dataclass(frozen=True, kw_only=True)
class MemberRate:
    """The measured rate of a member.

    Attributes:
        member: its id.
        epoch_s: seconds of an epoch alone, by number of workers.
        cpus: cores that one worker keeps busy meanwhile, by number of workers.
        has_open_width: whether its number of workers is to be chosen; else the smallest known one is used.
    """

    member: str
    epoch_s: Mapping[int, float]
    cpus: Mapping[int, float]
    has_open_width: bool = False


@dataclass(frozen=True, kw_only=True)
class CpuSharing:
    """Widths and core shares of members that share one stream.

    Attributes:
        pace_s: seconds of an epoch, for all members.
        workers: by member.
        cpus: cores for each worker at that pace, by member.
    """

    pace_s: float
    workers: Mapping[str, int]
    cpus: Mapping[str, float]


def share_cores(members: Sequence[MemberRate], cores: float, widest: int, prepare_s: float = 0.0) -> CpuSharing:
    """Choose widths and core shares for members that share one stream.

    Args:
        members: at least one.
        cores: of all nodes, without those reserved for other members.
        widest: maximum number of workers of one member.
        prepare_s: CPU-seconds of preparing one epoch.
    """
    choices = [_list_widths(one, widest) for one in members]
    # Wider members shorten the longest epoch and increase the work: the optimum is where the two are equal.
    levels = sorted({epoch_s for choice in choices for epoch_s in choice.values()}, reverse=True)
    levels = [level for level in levels if level >= max(min(choice.values()) for choice in choices)]

    def at(level: float) -> tuple[float, float, list[int]]:
        widths = [min(w for w, epoch_s in choice.items() if epoch_s <= level) for choice in choices]
        work_s = sum(w * one.cpus[w] * one.epoch_s[w] for one, w in zip(members, widths, strict=True))
        longest_s = max(one.epoch_s[w] for one, w in zip(members, widths, strict=True))
        return longest_s, (work_s + prepare_s) / cores, widths

    first, last = 0, len(levels) - 1
    while first < last:
        middle = (first + last) // 2
        longest_s, work_s, _ = at(levels[middle])
        first, last = (middle + 1, last) if longest_s > work_s else (first, middle)
    longest_s, work_s, widths = min((at(level) for level in levels[max(0, first - 1) : first + 1]), key=_rank)
    pace_s = max(longest_s, work_s)
    workers = {one.member: width for one, width in zip(members, widths, strict=True)}
    shares = {one.member: one.cpus[w] * one.epoch_s[w] / pace_s for one, w in zip(members, widths, strict=True)}
    return CpuSharing(
        pace_s=pace_s, workers=workers, cpus=_apply_least_share(shares, workers, cores - prepare_s / pace_s)
    )


def _apply_least_share(shares: Mapping[str, float], workers: Mapping[str, int], cores: float) -> dict[str, float]:
    """Raise each share to the minimum, and scale the larger ones down so that the sum fits the cores."""
    small: set[str] = set()
    while True:
        free_cores = cores - LEAST_SHARE * sum(workers[name] for name in small)
        wanted = sum(workers[name] * share for name, share in shares.items() if name not in small)
        scale = min(1.0, max(0.0, free_cores) / wanted) if wanted else 1.0
        new = {name for name, share in shares.items() if share * scale < LEAST_SHARE} - small
        if not new:
            return {name: LEAST_SHARE if name in small else share * scale for name, share in shares.items()}
        small |= new


def _list_widths(one: MemberRate, widest: int) -> dict[int, float]:
    """Seconds of an epoch by number of workers that a member may have, decreasing."""
    least = min(one.epoch_s)
    widths = {least: one.epoch_s[least]}
    for width, epoch_s in sorted(one.epoch_s.items()) if one.has_open_width else ():
        if width <= widest and epoch_s < min(widths.values()):
            widths[width] = epoch_s
    return widths


def _rank(at: tuple[float, float, list[int]]) -> tuple[float, int]:
    return max(at[0], at[1]), sum(at[2])
