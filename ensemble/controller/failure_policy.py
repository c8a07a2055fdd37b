"""What follows from a failure: policies are handed failures and return decisions; nobody acts here.

Everything is a function of the failures of this session in their order, on whatever clock they were noted by, so
that a simulation and a test decide as a run does. `RetryPolicy` says what becomes of the member that failed,
`NodePolicy` which nodes are better left alone for a while.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from ensemble.schedule.needs import Node
from ensemble.schedule.packing import explain_unplaceable
from ensemble.spec import Identity

REASONS = ("error", "nan", "lost", "oom", "hang", "disk")

#: A loss that is not a number comes again: by law 1 the batches are the same. A disk that is full is as full a
#: moment later; a resume takes the member up, when there is room.
FINAL = frozenset(("nan", "disk"))

_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")

#: What a broken node may be the cause of.
OF_NODES = frozenset(("error", "lost", "hang"))


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One attempt's failure.

    Attributes:
        reason: one of `REASONS`.
        member, node: whose, where.
        at: when, in seconds on any clock that does not go back.
        began, reached: (epoch, step) of the checkpoints that this attempt went on from, and the next one will.
        may_help: False where the same is known to happen again, as with a mistake in the recipe.
        node_lost: whether the whole node went.
        said, place: the exception, and the step at which it came; None where that is not known.
        more_room: whether the next attempt will have more memory, or fewer neighbours, than this one.
        a_records: whether it was found to be the doing of a record, which nobody will prepare again.
    """

    reason: str
    member: str
    node: str
    at: float = 0.0
    began: tuple[int, int] = (0, 0)
    reached: tuple[int, int] = (0, 0)
    may_help: bool = True
    node_lost: bool = False
    more_room: bool = False
    a_records: bool = False
    said: str = ""
    place: tuple[int, int] | None = None


@dataclass(frozen=True)
class Decision:
    """What becomes of a member that failed: tried again after `wait_s` seconds, or given up."""

    retry: bool
    wait_s: float = 0.0


class FailurePolicy(Protocol):
    """Maps failures to decisions."""

    def decide(self, failure: Failure, before: Sequence[Failure]) -> Decision:
        """What becomes of the member; `before`: the session's failures of all members so far, in order."""


@dataclass(frozen=True)
class RetryPolicy:
    """Restarts from the last checkpoint, at most `retries` of them counted in a session.

    Not counted are failures that are not the member's: running out of memory, while more room can be given, a
    record that ends whoever prepares it, and the loss of its node; unless (of a node) it had come no further since
    it failed before, for then it may be the member that ends its nodes. One that fails again and again without
    coming any further waits `pause_s` before its third attempt, twice as long before each further one, and
    `longest_s` at most; all others are tried again at once.
    An exception that came again at the same step, over the same batches, would come a third time: it is final.
    """

    retries: int
    pause_s: float = 1.0
    longest_s: float = 60.0

    def decide(self, failure: Failure, before: Sequence[Failure]) -> Decision:
        """See `FailurePolicy`."""
        if failure.reason in FINAL or not failure.may_help:
            return Decision(False)
        mine = [known for known in before if known.member == failure.member]
        if mine and comes_again(mine[-1], failure):
            return Decision(False)
        counted = without_progress = 0
        last: Failure | None = None
        for each in [*mine, failure]:
            further = last is None or last.reached != each.reached
            without_progress = 1 if further else without_progress + 1
            forgiven = each.more_room or each.a_records or (each.node_lost and further)
            counted += not forgiven
            last = each
        if not forgiven and counted > self.retries:
            return Decision(False)
        pause_s = self.pause_s * 2.0 ** min(without_progress - 2, 1000) if without_progress > 1 else 0.0
        return Decision(True, 0.0 if forgiven else min(pause_s, self.longest_s))


def comes_again(before: Failure, failure: Failure) -> bool:
    """Whether an attempt ended by the very exception, at the very step, that ended the one before it."""
    known = failure.place is not None and failure.reason == before.reason == "error"
    return known and failure.place == before.place and _lasting(failure.said) == _lasting(before.said)


def _lasting(said: str) -> str:
    """An exception's text without what differs in each process."""
    return _ADDRESS.sub("", said)


@dataclass(frozen=True)
class NodePolicy:
    """Leaves a node alone for a while on which members fail that do well elsewhere.

    That is one with at least `failures` failures of at least `members` different members in the last `within_s`
    seconds, and more than twice as many as the median of the other nodes has: what fails everywhere is not the
    node's fault. Only attempts that came to no checkpoint count.
    """

    failures: int = 3
    members: int = 2
    within_s: float = 600.0

    def avoided(self, failures: Sequence[Failure], nodes: Collection[str], now: float) -> frozenset[str]:
        """The nodes, of these, to place nobody on now; never all of them."""
        on: dict[str, list[str]] = {node: [] for node in nodes}
        for each in failures:
            without_progress = each.began == each.reached
            blames = each.reason in OF_NODES and without_progress and each.may_help and not each.node_lost
            if blames and now - each.at < self.within_s and each.node in on:
                on[each.node].append(each.member)
        avoided = set()
        for node, failed in on.items():
            if len(failed) < self.failures or len(set(failed)) < self.members:
                continue
            others = [len(there) for other, there in on.items() if other != node]
            if others and len(failed) > 2 * statistics.median_low(others):
                avoided.add(node)
        return frozenset(avoided)


def exclude_avoided(
    nodes: Sequence[Node], avoided: Collection[str], wanted: Sequence[Identity], devices: str = "auto"
) -> list[Node]:
    """The nodes without those to be avoided; all of them where somebody who wants a place fits on no other."""
    rest = [node for node in nodes if node.name not in avoided]
    if len(rest) < len(nodes) and any(explain_unplaceable(identity, rest, devices) for identity in wanted):
        return list(nodes)
    return rest


def lower_limit(reason: str, together: int, limit: int | None) -> int | None:
    """Most members at one time on a node after a failure there, None for no limit.

    Args:
        reason: out of memory ("oom") lowers the packing by one; nothing else changes it.
        together: members that were on the node, the failed one included.
        limit: what held before.
    """
    if reason != "oom":
        return limit
    fewer = max(1, together - 1)
    return fewer if limit is None else min(limit, fewer)
