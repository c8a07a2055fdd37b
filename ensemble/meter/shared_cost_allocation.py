"""Shares out the cost of work that serves several members: the second view of a ledger. Pure functions of ticks.

What prepares and feeds a stream is shared by the samples that each member consumed from it; all else by the
rank-seconds for which members held a place: the driver's among all members, an agent's among those on its node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from ensemble.meter.energy_allocator import IDLE, OTHER, split
from ensemble.meter.usage_records import Owner
from ensemble.meter.usage_sums import Use, add

BY_SAMPLES = ("prepare", "batch", "feed")
DRIVER = Owner("startup")  # the start of the process that drives the run

T = TypeVar("T")
Weights = Mapping[tuple[str], int]  # by member


def share_out(
    uses: Mapping[tuple[Owner, str], Use],
    consumed: Mapping[tuple[str, int | None], int],
    ranks: Mapping[tuple[str, str], int],
    find: Callable[[Owner, str], Use],
) -> None:
    """Adds each use to one of a member to whom it belongs, as far as there is one; totals stay the same exactly.

    Idle power that nobody reserved, what others used, and what served nobody stay without a member.

    Args:
        uses: by owner and node.
        consumed: samples from a shared stream, by (member, cohort).
        ranks: ticks of rank-seconds for which members held a place, by (member, node).
        find: returns the use to which what an owner used on a node is added.
    """
    by_cohort, by_node, held = _group(consumed), _group(ranks), dict[tuple[str], int]()
    for (member, _), ticks in ranks.items():
        held[member,] = held.get((member,), 0) + ticks
    held = {member: ticks for member, ticks in held.items() if ticks}
    central = {node for owner, node in uses if owner == DRIVER}
    for (owner, node), use in uses.items():
        among: Weights = {}
        if owner.member is None and owner not in (IDLE, OTHER):
            of_stream = by_cohort.get(owner.cohort, {}) if owner.role in BY_SAMPLES else {}
            among = of_stream or (by_node.get(node, {}) if node not in central else {}) or held
        if among:
            use_of = {to: find(Owner(owner.role, *to), node) for to in among}
            for what, (whole, origin) in use.items():
                for to, ticks in split(whole, among).items():
                    add(use_of[to], what, ticks, origin)
        else:
            whole_use = find(owner, node)
            for what, (whole, origin) in use.items():
                add(whole_use, what, whole, origin)


def _group(amounts: Mapping[tuple[str, T], int]) -> dict[T, dict[tuple[str], int]]:
    """Amounts by what they are of, and member; those of 0 are left out."""
    groups: dict[T, dict[tuple[str], int]] = {}
    for (member, of), amount in amounts.items():
        if amount:
            groups.setdefault(of, {})[member,] = amount
    return groups
