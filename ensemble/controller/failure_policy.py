"""Policies for failures: whether a member is restarted, and which nodes are avoided for a while.

Both policies are pure functions of the session's failures in their order, so that a simulation and a test decide
as a run does.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from ensemble.schedule.explain import explain_unplaceable
from ensemble.schedule.needs import Node
from ensemble.spec import Identity

REASONS = ("error", "nan", "lost", "oom", "hang", "disk", "sharing", "unreachable")

#: Never retried in the same session: a loss that is not a number would come again, because the batches are the
#: same. A resume tries the member again.
FINAL_REASONS = frozenset(("nan",))

#: How long a member waits first for room on a full disk, and then twice as long each time.
DISK_PAUSE_S = 4.0

#: Failures that a broken node may cause.
NODE_REASONS = frozenset(("error", "lost", "hang", "unreachable"))

_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The failure of one attempt.

    Attributes:
        reason: one of `REASONS`.
        at: seconds of a clock that does not go back.
        began, reached: (epoch, step) of the checkpoints from which this attempt and the next one start.
        is_retry_useful: False where another attempt is known to fail in the same way.
        node_lost: whether the whole node was lost.
        agent_lost: whether the node's agent ended, and its ranks with it.
        gpu_lost: whether a GPU of the member has broken.
        has_more_memory: whether the next attempt will have more memory, or fewer neighbours.
        is_due_to_record: whether a record ended the process; it will not be prepared again.
        error: the exception's text.
        position: (epoch, step) of the exception; None: unknown.
    """

    reason: str
    member: str
    node: str
    at: float = 0.0
    began: tuple[int, int] = (0, 0)
    reached: tuple[int, int] = (0, 0)
    is_retry_useful: bool = True
    node_lost: bool = False
    agent_lost: bool = False
    gpu_lost: bool = False
    has_more_memory: bool = False
    is_due_to_record: bool = False
    error: str = ""
    position: tuple[int, int] | None = None


@dataclass(frozen=True)
class Decision:
    """Whether a member that failed is tried again, and after how many seconds."""

    retry: bool
    wait_s: float = 0.0


@dataclass(frozen=True)
class RetryPolicy:
    """Restarts a member from its last checkpoint, at most `retries` times in a session.

    Failures that the member did not cause are not counted: a full disk, where it waits for room; running out of
    memory while it can be given more, a record that ends the process, samples that were not its own (after
    which it shares nothing), the end of its node's agent (which is replaced a few times only), a GPU that has
    broken (which is not used again), and the loss of its node. A lost node is counted if the member has reached
    no further checkpoint since its last failure: then the member may be what ends its nodes.

    A member that fails repeatedly without reaching a further checkpoint waits `pause_s` before its third attempt,
    twice as long before each further one, and at most `longest_s`; other members are restarted at once. The same
    exception at the same step as before is final, because the batches are the same. In the first step of all a
    second attempt is spared where the exception is one that comes again (`ensemble.train.forward_errors`).
    """

    retries: int
    pause_s: float = 1.0
    longest_s: float = 60.0

    def decide(self, failure: Failure, before: Sequence[Failure]) -> Decision:
        """Decide about a failure; `before` has the earlier failures of all members in this session, in order."""
        if failure.reason in FINAL_REASONS or not failure.is_retry_useful:
            return Decision(False)
        mine = [known for known in before if known.member == failure.member]
        if mine and _is_repeated(mine[-1], failure):
            return Decision(False)
        counted = without_progress = 0
        has_shared_wrongly = False
        last: Failure | None = None
        for each in [*mine, failure]:
            has_progress = last is None or last.reached != each.reached
            without_progress = 1 if has_progress else without_progress + 1
            is_excused = each.has_more_memory or each.is_due_to_record or each.agent_lost or each.gpu_lost
            is_excused |= each.reason == "sharing" and not has_shared_wrongly
            has_shared_wrongly |= each.reason == "sharing"  # once: it shares nothing from then on
            is_excused |= each.node_lost and has_progress
            is_excused |= each.reason == "disk"
            counted += not is_excused
            last = each
        if not is_excused and counted > self.retries:
            return Decision(False)
        pause_s = self.pause_s * 2.0 ** min(without_progress - 2, 1000) if without_progress > 1 else 0.0
        if failure.reason == "disk":
            return Decision(True, min(DISK_PAUSE_S * 2.0 ** min(without_progress - 1, 1000), self.longest_s))
        return Decision(True, 0.0 if is_excused else min(pause_s, self.longest_s))


def _is_repeated(before: Failure, failure: Failure) -> bool:
    """Whether the same exception at the same step ended both attempts; addresses in its text are ignored."""
    texts = {_ADDRESS.sub("", each.error) for each in (before, failure)}
    known = failure.position is not None and failure.reason == before.reason == "error"
    return known and failure.position == before.position and len(texts) == 1


@dataclass(frozen=True)
class NodePolicy:
    """Avoids, for a while, nodes on which members fail that succeed elsewhere.

    A node is avoided that had, in the last `within_s` seconds, at least `failures` failures of at least `members`
    different members, and more than twice as many as the median of the other nodes: what fails everywhere is not
    the node's fault. Only attempts that reached no checkpoint count.
    """

    failures: int = 3
    members: int = 2
    within_s: float = 600.0

    def choose_avoided(self, failures: Sequence[Failure], nodes: Collection[str], now: float) -> frozenset[str]:
        """Choose the nodes, out of the given ones, on which nobody is to be placed now; never all of them."""
        on: dict[str, list[str]] = {node: [] for node in nodes}
        for each in failures:
            counts = each.reason in NODE_REASONS and each.is_retry_useful
            counts &= not (each.node_lost or each.agent_lost or each.gpu_lost)
            if counts and each.began == each.reached and now - each.at < self.within_s and each.node in on:
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
    nodes: Sequence[Node], avoided: Collection[str], wanted: Iterable[Identity], devices: str = "auto"
) -> list[Node]:
    """The nodes without the avoided ones; all of them where a waiting member fits on no other node."""
    rest = [node for node in nodes if node.name not in avoided]
    if len(rest) == len(nodes):
        return rest
    stuck = [identity for identity in wanted if explain_unplaceable(identity, rest, devices)]
    return list(nodes) if any(not explain_unplaceable(one, nodes, devices) for one in stuck) else rest
