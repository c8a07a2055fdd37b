"""Whether a member that failed is restarted, and how much memory it gets then.

`RetryPolicy` is a pure function of the session's failures in their order, so that a simulation and a test decide
as a run does.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ensemble.events import MemoryIncrease
from ensemble.schedule.memory_grants import Grants, as_event, increase_grant
from ensemble.schedule.needs import Placement

REASONS = ("error", "nan", "lost", "oom", "hang", "disk", "sharing", "unreachable")

#: Never retried in the same session: a loss that is not a number would come again, because the batches are the
#: same. A resume tries the member again.
FINAL_REASONS = frozenset(("nan",))

#: How long a member waits first for room on a full disk, and then twice as long each time.
DISK_PAUSE_S = 4.0

#: By how much a grant must exceed the one before, to be tried at no cost.
LEAST_GROWTH = 1.01

#: Of the reason why a run was stopped because its members fail alike.
ALIKE = "failed alike"

_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The failure of one attempt.

    Attributes:
        reason: one of `REASONS`.
        reached: (epoch, step) of the checkpoint from which the next attempt starts.
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
        mine = [earlier for earlier in before if earlier.member == failure.member]
        if mine and _is_repeated(mine[-1], failure):
            return Decision(False)
        counted = without_progress = 0
        has_shared_wrongly = False
        last: Failure | None = None
        for attempt in [*mine, failure]:
            has_progress = last is None or last.reached != attempt.reached
            without_progress = 1 if has_progress else without_progress + 1
            is_excused = (
                attempt.has_more_memory or attempt.is_due_to_record or attempt.agent_lost or attempt.gpu_lost
            )
            is_excused |= attempt.reason == "sharing" and not has_shared_wrongly
            has_shared_wrongly |= attempt.reason == "sharing"  # once: it shares nothing from then on
            is_excused |= attempt.node_lost and has_progress
            is_excused |= attempt.reason == "disk"
            counted += not is_excused
            last = attempt
        if not is_excused and counted > self.retries:
            return Decision(False)
        pause_s = self.pause_s * 2.0 ** min(without_progress - 2, 1000) if without_progress > 1 else 0.0
        if failure.reason == "disk":
            return Decision(True, min(DISK_PAUSE_S * 2.0 ** min(without_progress - 1, 1000), self.longest_s))
        return Decision(True, 0.0 if is_excused else min(pause_s, self.longest_s))


def _is_repeated(before: Failure, failure: Failure) -> bool:
    """Whether the same exception at the same step ended both attempts; addresses in its text, and the member's own
    name, are ignored.
    """
    texts = {_ADDRESS.sub("", one.error).replace(one.member, "") for one in (before, failure)}
    is_comparable = failure.position is not None and failure.reason == before.reason == "error"
    return is_comparable and failure.position == before.position and len(texts) == 1


def explain_alike(given_up: Sequence[Failure], furthest: tuple[int, int]) -> str | None:
    """Say that the last two members that failed for good did so alike, where no member has got beyond.

    Args:
        given_up: the last failure of each member that is not tried again, in order.
        furthest: (epoch, step) of the member of the run that has got furthest.

    Returns:
        The reason to start no others; None where there is none.
    """
    last = given_up[-1]
    before = next((one for one in given_up[:-1] if one.member != last.member and _is_repeated(one, last)), None)
    if before is None or last.position is None or furthest > last.position:
        return None
    where = f"in epoch {last.position[0] + 1}, step {last.position[1]}"
    return (
        f"{before.member} and {last.member} {ALIKE} {where}, and the others would, too: mend it, then "
        f"`ensemble resume` goes on ({_ADDRESS.sub('0x', last.error)})"
    )


class FailureTracker:
    """The failures of a session in their order.

    Attributes:
        grants: the least memory of members, learnt from those that ran out of it.
        limits: node -> most members at one time, learnt from the same.
        given_up: the failures of members that are not tried again.
    """

    def __init__(
        self,
        policy: RetryPolicy,
        log_event: Callable[..., None],
        memory_increases: Sequence[MemoryIncrease] = (),
    ) -> None:
        self._policy, self._log = policy, log_event
        self.grants = Grants(memory_increases)
        self.limits: dict[str, int] = {}
        self._promised: dict[tuple[str, str], float] = {}  # (member, field of `Grant`) -> what it was granted last
        self._failures: list[Failure] = []
        self.given_up: list[Failure] = []

    def decide(self, failure: Failure) -> Decision:
        """Decide whether the member is tried again, and remember the failure."""
        decision = self._policy.decide(failure, self._failures)
        self._failures.append(failure)
        self.given_up += [] if decision.retry else [failure]
        return decision

    def excuse_last(self, member: str) -> None:
        """Do not count a member's last failure: it was due to a record that will not be prepared again."""
        for position in reversed(range(len(self._failures))):
            if self._failures[position].member == member:
                self._failures[position] = dataclasses.replace(self._failures[position], is_due_to_record=True)
                return

    def relieve(
        self,
        placement: Placement,
        error: str,
        together: int,
        memory_gb: Mapping[str, float],
        rank: int = 0,
        *,
        may_grow: bool = True,
        was_killed: bool = False,
    ) -> bool:
        """Grant more memory to a member that ran out of it, and to members like it, or let fewer run beside it.

        It is granted none twice: a node that holds less than it offers would never end.

        Args:
            together: members on its node, itself included.
            memory_gb: host memory of each node, in GiB.
            rank: that ran out of it.
            may_grow: whether it is tried again.
            was_killed: whether the node ran out of memory, and not the member out of its grant: alone on the node
                it had all.

        Returns:
            Whether it was granted more; False where it had all the memory that there is.
        """
        may_grow = may_grow and not (was_killed and together == 1)
        has_more = may_grow and self._grant_memory(placement, error, together, memory_gb, rank)
        if not has_more or placement.identity.memory_gb is None:  # else it exceeded its own limit
            node, fewer = placement.find_node(rank), max(1, together - 1)
            self.limits[node] = min(fewer, self.limits.get(node, fewer))
        return has_more

    def _grant_memory(
        self, placement: Placement, error: str, together: int, memory_gb: Mapping[str, float], rank: int
    ) -> bool:
        identity, on_gpu = placement.identity, None not in placement.devices
        node = placement.find_node(rank)
        # all ranks get the same: where the member has been it finds room again
        parts = {
            name: memory_gb[name] / len(r) for name, r in placement.ranks_by_node.items() if name in memory_gb
        }
        least = min(parts, key=parts.__getitem__) if node in parts else node
        grant = increase_grant(
            identity,
            error,
            on_gpu=on_gpu,
            together=together,
            node_memory_gb=memory_gb.get(least),
            ranks=placement.count_ranks(least),
        )
        if grant is None:
            return False
        ((kind, value),) = [
            (name, value) for name, value in dataclasses.asdict(grant).items() if value is not None
        ]
        if value < LEAST_GROWTH * self._promised.get((identity.member, kind), 0.0):
            return False
        self._promised[identity.member, kind] = value
        event = as_event(identity, node, grant)
        self._log("memory_increase", **event)
        self.grants.add(MemoryIncrease(**event))
        return True
