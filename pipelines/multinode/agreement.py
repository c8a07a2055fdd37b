"""What the nodes of one stream agree on, round by round.

Every so often each node tells all others its `State`. From the same states each comes to the same `Round`: how far
the stream goes on, in which design. There is no leader and nothing else is said between nodes but samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

from pipelines.multinode.designs import Design, Rates, candidates, predicted

_NOWHERE = -1.0


@dataclass(frozen=True)
class State:
    """One node's part of a round; all are numbers, so that a communicator carries them.

    Attributes:
        gate: 1 once its start gate is open.
        leave: 1 if the nodes are to meet anew: this one ends its part, or somebody waits to come in.
        head: the position up to which its stream is being prepared; -1 if it has no reader and may be anywhere.
        low: where the slowest of its readers is.
        limit: the position up to which its ring has room.
        end: where the last of its readers stops.
        ready: everything below is prepared here.
        idle: 1 while nothing is being prepared, fetched or sent.
        clock_s: its clock.
        waiting: the share of the time in which one of its readers waited, lately.
        prepare: samples/s that it can prepare; 0 while unknown.
        consume: samples/s that its readers take; 0 while unknown.
        link_bps: bytes/s that its interface was measured at; 0 while unknown.
    """

    gate: float = 0.0
    leave: float = 0.0
    head: float = _NOWHERE
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

    def numbers(self) -> list[float]:
        """The fields in order."""
        return [float(value) for value in astuple(self)]


STATE_NUMBERS = len(fields(State))


@dataclass(frozen=True)
class Round:
    """What happens next: the stream goes on from `start` to `stop`; a node that is not at `start` yet prepares
    what lies before it by itself. `meet`: the nodes part, and meet anew."""

    start: int
    stop: int
    design: Design
    meet: bool = False


NEAR_RINGS = 4


def agree(states: Sequence[State], design: Design, block: int, longest: int, capacity: int) -> Round | None:
    """The next round; None while there is nothing to do, or no room for it.

    Args:
        longest: samples in a round at most.
        capacity: samples of a ring; where the nodes' streams are farther apart than NEAR_RINGS of them they part.
    """
    if any(state.leave for state in states):
        return Round(0, 0, design, meet=True)
    # A node without readers has its ring for itself wherever the stream goes.
    reading = [state for state in states if state.head != _NOWHERE]
    if not reading or not all(state.gate for state in states):
        return None
    heads, end = [int(state.head) for state in reading], max(int(state.end) for state in states)
    start, low = max(heads), min(int(state.low) for state in reading)
    if start - min(heads) > NEAR_RINGS * capacity:
        return Round(0, 0, design, meet=True)
    if min(heads) < start:
        return Round(start, start, design)
    limit = min(int(state.limit) for state in reading)
    if low > start:  # nobody reads what comes next
        if not all(state.idle for state in states):
            return None
        start, limit = low, low + capacity
    stop = min(limit // block * block, start + longest)
    stop = end if end <= stop else stop // block * block
    return Round(start, stop, design) if stop > start else None


_SETTLE_S = 1.0
_TRIAL_S = 2.0
_BETTER = 1.1
_CHANGED = 1.5


class Choice:
    """The design of the rounds: the one that was asked for, or by measurement.

    `auto` begins with `node`, to learn what each node can prepare, and goes on with the design that is predicted
    to be the fastest (`designs.predicted`). Where members wait all the same, what a design carries is measured; a
    measured figure replaces the predicted one, what it fell short of it by is taken off the other predictions too,
    and another design is tried as long as one promises a tenth more.
    Where members do not wait, a faster design is of no use: then one that prepares once for all replaces `node`.
    When the measured rates change by half, everything is decided anew. It is fed with the same states on every
    node, and so chooses alike on all of them.

    Args:
        name: "auto", or a design that stays.
        nodes: how many there are.
        preparers: of `single` and `multi`; None for the usual ones.
        sample_bytes: of a sample in the ring.
    """

    def __init__(self, name: str, nodes: int, preparers: int | None, sample_bytes: int) -> None:
        self._auto = name == "auto"
        self._nodes = nodes
        self._sample_bytes = sample_bytes
        self._candidates = candidates(nodes, preparers)
        self.design = Design.of("node" if name == "auto" else name, nodes, preparers)  # type: ignore[arg-type]
        self.measured: dict[Design, float] = {}
        self._decided_on: Rates | None = None
        self._since: tuple[float, float] | None = None
        self._waiting: list[float] = []

    def update(self, states: Sequence[State]) -> Design:
        """The design of the next round."""
        if not self._auto or not all(state.gate for state in states):
            return self.design
        rates = Rates(
            tuple(state.prepare for state in states),
            min(state.link_bps for state in states),
            max(state.consume for state in states),
            self._sample_bytes,
        )
        if not all(rates.prepare):
            return self.design
        if self._decided_on is None or _differ(rates, self._decided_on):
            self._decided_on = rates
            self.measured.clear()
            self._go_to(self._best(rates))
        elif self._trial_over(states):
            self._go_to(self._best(rates))
        return self.design

    @property
    def undecided(self) -> bool:
        """Whether `auto` does not know yet what the nodes can prepare."""
        return self._auto and self._decided_on is None

    def _best(self, rates: Rates) -> Design:
        """The fastest by what is known; of those that are as fast as the members, the first."""
        promised = {each: predicted(each, rates) for each in self._candidates}
        kept = [self.measured[each] / promised[each] for each in self.measured if each.name != "node"]
        share = min(1.0, max(kept, default=1.0))
        score = {each: promised[each] * (1.0 if each.name == "node" else share) for each in self._candidates}
        score.update(self.measured)
        enough = [each for each in self._candidates if rates.consume and score[each] >= _BETTER * rates.consume]
        if enough:
            return enough[0]
        best = max(self._candidates, key=lambda each: score[each])
        return best if not self.measured or score[best] > _BETTER * score[self.design] else self.design

    def _go_to(self, design: Design) -> None:
        self.design = design
        self._since, self._waiting = None, []

    def _trial_over(self, states: Sequence[State]) -> bool:
        """Whether the present design was measured long enough; takes down what it carries."""
        now, ready = states[0].clock_s, states[0].ready
        if self._since is None:
            self._since = (now + _SETTLE_S, _NOWHERE)
        began, from_ready = self._since
        if now < began:
            return False
        if from_ready == _NOWHERE:
            self._since = (now, ready)
            return False
        self._waiting.append(max(state.waiting for state in states))
        if now - began < _TRIAL_S:
            return False
        rate = (ready - from_ready) / (now - began)
        limited = sum(self._waiting) / len(self._waiting) > 0.5
        self._since, self._waiting = (now, ready), []
        if limited and rate > 0:
            self.measured[self.design] = rate
        return limited


def _differ(here: Rates, before: Rates) -> bool:
    """Whether the sums of the rates are another by half."""
    pairs = [(sum(here.prepare), sum(before.prepare)), (here.link_bps, before.link_bps)]
    return any(a and b and not 1 / _CHANGED < a / b < _CHANGED for a, b in pairs)
