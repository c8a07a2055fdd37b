"""Shares out the cost of work that serves several members: the second view of a ledger. Pure functions of ticks.

What prepares and feeds a stream is shared by the samples that each member of its cohort consumed from it; what
starts, schedules and watches the run (its driver, its agents, Ray) by the rank-seconds for which members held a
place. A member that prepared its own batches consumed nothing from the stream, and pays nothing for it.
"""

from __future__ import annotations

from collections.abc import Mapping

from ensemble.meter.account import Use
from ensemble.meter.attribution import IDLE, OTHER
from ensemble.meter.proportional_split import Owner, split

BY_SAMPLES = ("prepare", "feed")

Uses = dict[tuple[Owner, str], Use]


def share_out(
    uses: Mapping[tuple[Owner, str], Use],
    consumed: Mapping[tuple[str, int | None], int],
    held: Mapping[str, tuple[int, int]],
) -> Uses:
    """Each use with a member to whom it belongs, as far as there is one; sums to the same totals exactly.

    Args:
        uses: by owner and node.
        consumed: samples from a shared stream, by (member, cohort).
        held: ticks in which each member held a place, and the sum of these over its ranks.

    Returns:
        The same kinds of rows. Idle power that nobody reserved, what others used, and what served nobody stay
        without a member.
    """
    ranks = {Owner("", member): each for member, (_, each) in held.items() if each}
    shared: Uses = {}
    for (owner, node), use in uses.items():
        weights = {} if owner.member is not None or owner in (IDLE, OTHER) else _weigh(owner, consumed) or ranks
        for part, share in split_use(use, weights).items():
            to = owner if part.member is None else Owner(owner.role, part.member)
            shared.setdefault((to, node), Use(cpu_origin=share.cpu_origin)).add(share)
    return shared


def _weigh(owner: Owner, consumed: Mapping[tuple[str, int | None], int]) -> dict[Owner, int]:
    """Who consumed of the stream that a feeder serves; nobody where it is none, or nobody has yet."""
    if owner.role not in BY_SAMPLES:
        return {}
    weights: dict[Owner, int] = {}
    for (member, cohort), samples in consumed.items():
        if samples and owner.cohort in (None, cohort):  # an older log does not say for which cohort
            key = Owner("", member)
            weights[key] = weights.get(key, 0) + samples
    return weights


def split_use(use: Use, weights: Mapping[Owner, int]) -> dict[Owner, Use]:
    """Splits each count of a use exactly; without weights it stays whole, under an owner without a member."""
    if not weights:
        return {Owner(""): use}
    parts = {to: Use(cpu_origin=use.cpu_origin) for to in weights}
    for name in ("cpu", "sm", "busy"):
        for to, ticks in split(getattr(use, name), weights).items():
            setattr(parts[to], name, ticks)
    for key, (ticks, origin) in use.energy.items():
        for to, share in split(ticks, weights).items():
            parts[to].energy[key] = (share, origin)
    return parts
