"""Shares out the cost of work that serves several members: the second view of a ledger. Pure functions of ticks.

What prepares and feeds a stream is shared by the samples that each member of its cohort consumed from it; what
starts, schedules and watches the run by the rank-seconds for which members held a place: the driver, and whatever
is on its node, among all members, agents and Ray on another node among the members there. A member that prepared
its own batches consumed nothing from the stream, and pays nothing for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from ensemble.meter.account import Use
from ensemble.meter.attribution import IDLE, OTHER
from ensemble.meter.origin import weakest
from ensemble.meter.proportional_split import Owner, split

BY_SAMPLES = ("prepare", "feed")
DRIVER = Owner("startup")  # the start of the process that drives the run


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
    weights = _Weights(consumed, ranks, {node for owner, node in uses if owner == DRIVER})
    for (owner, node), use in uses.items():
        among = {} if owner.member is not None or owner in (IDLE, OTHER) else weights.find(owner, node)
        if among:
            split_use(use, among, {to: find(Owner(owner.role, to.member), node) for to in among})
        else:
            find(owner, node).add(use)


class _Weights:
    """By what uses are shared out.

    Args:
        consumed, ranks: see `share_out`.
        central: nodes with a process that serves the members of all nodes.
    """

    def __init__(
        self,
        consumed: Mapping[tuple[str, int | None], int],
        ranks: Mapping[tuple[str, str], int],
        central: Collection[str],
    ) -> None:
        self._central = central
        self._samples: dict[int | None, dict[Owner, int]] = {}  # by cohort
        self._ranks: dict[str | None, dict[Owner, int]] = {None: {}}  # by node, and of all nodes
        for (member, cohort), samples in consumed.items():
            _add(self._samples.setdefault(cohort, {}), member, samples)
        for (member, node), ticks in ranks.items():
            _add(self._ranks.setdefault(node, {}), member, ticks)
            _add(self._ranks[None], member, ticks)

    def find(self, owner: Owner, node: str) -> Mapping[Owner, int]:
        """Among whom a use is shared out; nobody: it stays whole."""
        if owner.role in BY_SAMPLES:
            found = self._samples.get(owner.cohort, {})
            if found:
                return found
        here = {} if node in self._central else self._ranks.get(node, {})
        return here or self._ranks[None]


def _add(weights: dict[Owner, int], member: str, ticks: int) -> None:
    if ticks:
        owner = Owner("", member)
        weights[owner] = weights.get(owner, 0) + ticks


def split_use(use: Use, weights: Mapping[Owner, int], into: Mapping[Owner, Use]) -> None:
    """Splits each count of a use exactly, and adds the shares to other uses."""
    for name in ("cpu", "sm", "busy"):
        if whole := getattr(use, name):
            for to, ticks in split(whole, weights).items():
                setattr(into[to], name, getattr(into[to], name) + ticks)
    for key, (whole, origin) in use.energy.items():
        for to, ticks in split(whole, weights).items():
            into[to].add_energy({key: (ticks, origin)})
    for share in into.values():
        if share.cpu_origin != use.cpu_origin:
            share.cpu_origin = weakest((share.cpu_origin, use.cpu_origin))
