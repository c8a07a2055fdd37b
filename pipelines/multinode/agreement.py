"""Decides, on every node alike, how far a shared stream advances and in which design.

Every so often each node tells all others its `NodeState`. From the same states each comes to the same `Round`: how
far the stream goes on, in which design. There is no leader and nothing else is said between nodes but samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, fields

from pipelines.multinode.designs import Design, Rates, list_candidates, predict_rate
from pipelines.multinode.rendezvous import GroupAssignment
from pipelines.order.stream import Block

_ANYWHERE = -1.0


@dataclass(frozen=True)
class NodeState:
    """What one node reports for a round, as numbers that a communicator can carry.

    Attributes:
        gate: 1 once its start gate is open.
        leave: 1 if the group has to form anew, because a node waits to join it.
        head: the position up to which its stream is being prepared; -1 if it has no reader and may be anywhere.
        low: the position of its slowest reader.
        limit: the position up to which its ring has room.
        end: the position at which its last reader stops.
        ready: all positions below are prepared.
        idle: 1 while nothing is being prepared, received or sent.
        clock_s: its monotonic clock, in seconds.
        waiting: the fraction of the recent time in which one of its readers waited.
        prepare: samples/s that it can prepare; 0 while unknown.
        consume: samples/s that its readers consume; 0 while unknown.
        link_bps: measured bytes/s of its interface; 0 while unknown.
    """

    gate: float = 0.0
    leave: float = 0.0
    head: float = _ANYWHERE
    low: float = 0.0
    limit: float = 0.0
    end: float = 0.0
    ready: float = 0.0
    idle: float = 0.0
    clock_s: float = 0.0
    waiting: float = 0.0
    prepare: float = 0.0
    consume: float = 0.0
    link_bps: float = 0.0

    def as_numbers(self) -> list[float]:
        """The fields in order."""
        return [float(value) for value in astuple(self)]


STATE_NUMBERS = len(fields(NodeState))


@dataclass(frozen=True)
class Round:
    """What the nodes do next.

    Attributes:
        start, stop: the stream advances over [start, stop); a node that is not yet at `start` prepares the samples
            before it by itself.
        design: who prepares and who sends.
        disband: whether the nodes leave the group instead, to form a new one.
    """

    start: int
    stop: int
    design: Design
    disband: bool = False


@dataclass
class Membership:
    """A group that this node has joined, or is joining.

    Attributes:
        last_exchange_s: when it requested to join, or last exchanged states (time.monotonic).
        has_exchanged: whether the nodes have exchanged states.
        state_sent: when the state was sent that is still to be answered, or None.
        sent_position: `_stream_position` of the last state that was sent.
        needed: whether any node needed more samples at the last exchange.
        own_blocks: blocks that this node has to prepare.
        incoming: blocks that other nodes will send.
        copies: block -> how many nodes receive it from here.
        prepare_until: the position up to which this node prepares alone, to catch up with the others.
        holds_others: see `NodeGroup.holds_others`.
        head: the furthest position of all nodes at the last exchange.
    """

    assignment: GroupAssignment
    selector: DesignSelector
    last_exchange_s: float
    joined: bool = False
    link_bps: float = 0.0
    busy: int = 0
    has_exchanged: bool = False
    state_sent: float | None = None
    sent_position: tuple[int, ...] | None = None
    needed: bool = True
    own_blocks: list[Block] = field(default_factory=list)
    incoming: set[Block] = field(default_factory=set)
    copies: Counter[Block] = field(default_factory=Counter)
    prepare_until: int | None = None
    holds_others: bool = False
    head: int = -1


NEAR_RINGS = 4


def agree(
    states: Sequence[NodeState], design: Design, block_size: int, max_samples: int, capacity: int
) -> Round | None:
    """The next round; None while there is nothing to do, or no room for it.

    Args:
        states: of all nodes, by rank.
        design: of the round.
        max_samples: the largest number of samples in a round.
        capacity: samples in a ring; nodes whose streams are more than NEAR_RINGS rings apart disband.
    """
    if any(state.leave for state in states):
        return Round(0, 0, design, disband=True)
    # A node without readers has room wherever the stream is.
    reading = [state for state in states if state.head != _ANYWHERE]
    if not reading or not all(state.gate for state in states):
        return None
    heads, end = [int(state.head) for state in reading], max(int(state.end) for state in states)
    start, low = max(heads), min(int(state.low) for state in reading)
    if start - min(heads) > NEAR_RINGS * capacity:
        return Round(0, 0, design, disband=True)
    if min(heads) < start:
        return Round(start, start, design)
    limit = min(int(state.limit) for state in reading)
    if low > start:  # no reader needs the next samples
        if not all(state.idle for state in states):
            return None
        start, limit = low, low + capacity
    stop = min(limit // block_size * block_size, start + max_samples)
    stop = end if end <= stop else stop // block_size * block_size
    return Round(start, stop, design) if stop > start else None


_SETTLE_S = 1.0
_TRIAL_S = 2.0
_MIN_GAIN = 1.1
_MAX_CHANGE = 1.5


class DesignSelector:
    """Selects the design of the rounds: a given one, or `auto`, by measurement.

    `auto` begins with `node`, to learn what each node can prepare, and goes on with the design that is predicted
    to be the fastest (`designs.predict_rate`). Where members wait all the same, what a design carries is measured;
    a measured figure replaces the predicted one, what it fell short of it by is taken off the other predictions
    too, and another design is tried as long as one promises a tenth more.
    Where members do not wait, a faster design is of no use: then one that prepares once for all replaces `node`.
    When the measured rates change by half, everything is decided anew. It is fed with the same states on every
    node, and so chooses alike on all of them.

    Args:
        name: "auto", or a design that stays.
        nodes: how many there are.
        preparers: of `single` and `multi`; None for the usual ones.
    """

    def __init__(self, name: str, nodes: int, preparers: int | None, sample_bytes: int) -> None:
        self._is_auto = name == "auto"
        self._nodes = nodes
        self._sample_bytes = sample_bytes
        self._candidates = list_candidates(nodes, preparers)
        self.design = Design.create("node" if name == "auto" else name, nodes, preparers)  # type: ignore[arg-type]
        self.measured: dict[Design, float] = {}
        self._decided_on: Rates | None = None
        self._trial_since: tuple[float, float] | None = None
        self._waiting: list[float] = []

    def update(self, states: Sequence[NodeState]) -> Design:
        """Update the measurements with the nodes' states; returns the design of the next round."""
        if not self._is_auto or not all(state.gate for state in states):
            return self.design
        rates = Rates(
            tuple(state.prepare for state in states),
            min(state.link_bps for state in states),
            max(state.consume for state in states),
            self._sample_bytes,
        )
        if not all(rates.prepare):
            return self.design
        if self._decided_on is None or _have_changed(rates, self._decided_on):
            self._decided_on = rates
            self.measured.clear()
            self._switch_to(self._select_best(rates))
        elif self._finish_trial(states):
            self._switch_to(self._select_best(rates))
        return self.design

    @property
    def is_undecided(self) -> bool:
        """Whether `auto` does not yet know how fast the nodes prepare."""
        return self._is_auto and self._decided_on is None

    def _select_best(self, rates: Rates) -> Design:
        """The first design that is faster than the members, or else the fastest one known."""
        promised = {design: predict_rate(design, rates) for design in self._candidates}
        kept = [self.measured[design] / promised[design] for design in self.measured if design.name != "node"]
        share = min(1.0, max(kept, default=1.0))
        score = {
            design: promised[design] * (1.0 if design.name == "node" else share) for design in self._candidates
        }
        score.update(self.measured)
        enough = [
            design for design in self._candidates if rates.consume and score[design] >= _MIN_GAIN * rates.consume
        ]
        if enough:
            return enough[0]
        best = max(self._candidates, key=lambda design: score[design])
        return best if not self.measured or score[best] > _MIN_GAIN * score[self.design] else self.design

    def _switch_to(self, design: Design) -> None:
        self.design = design
        self._trial_since, self._waiting = None, []

    def _finish_trial(self, states: Sequence[NodeState]) -> bool:
        """Record the rate of the present design once measured long enough.

        Returns:
            Whether it was recorded, or its readers waited: another design may be better.
        """
        now_s, ready = states[0].clock_s, states[0].ready
        if self._trial_since is None:
            self._trial_since = (now_s + _SETTLE_S, _ANYWHERE)
        began, from_ready = self._trial_since
        if now_s < began:
            return False
        if from_ready == _ANYWHERE:
            self._trial_since = (now_s, ready)
            return False
        self._waiting.append(max(state.waiting for state in states))
        if now_s - began < _TRIAL_S:
            return False
        rate = (ready - from_ready) / (now_s - began)
        limited = sum(self._waiting) / len(self._waiting) > 0.5
        self._trial_since, self._waiting = (now_s, ready), []
        if limited and rate > 0:
            self.measured[self.design] = rate
        return limited


def _have_changed(here: Rates, before: Rates) -> bool:
    """Whether the prepare rate or the bandwidth has changed by half or more."""
    pairs = [(sum(here.prepare), sum(before.prepare)), (here.link_bps, before.link_bps)]
    return any(a and b and not 1 / _MAX_CHANGE < a / b < _MAX_CHANGE for a, b in pairs)
