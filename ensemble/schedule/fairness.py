"""Divides a cluster between the runs that share it: who may take more, who gives back what, and to whom.

Every run computes `divide` from the same rows, so all come to the same answer and no server decides. What jobs
that have no row hold counts as not there. A run's **level** is its dominant share (the largest of its parts of all
GPUs, cores and memory) by its weight: weighted dominant-resource fairness (Ghodsi et al., NSDI 2011), in whole
gangs. Those that wait are served by priority, then the lowest level first, then whoever has waited longest. What
is free is given as it is; else a run gives something back, to one of

- a higher priority;
- a lower level, if it is above that still without it: levels become more equal, and the way back is never one;
- equal levels, in turn: to a run that holds nothing, or one that has waited for a quantum and would change places
  with it.

It gives back when a member ends. Its members are paused for that at once for a higher priority; else after the
other run has waited, and it has held what it gives back, for a quantum; never to change places. Each member is
paused at most once in a quantum (`Holding.is_pausable`).

**Bound.** Let q be the quantum and p the time in which a member writes its checkpoint and another is placed. Of R
runs of one priority that stay, and that are not kept out by a higher one, one that holds nothing and whose gang
fits in what they hold together waits at most R (q + p). One of a higher priority than the others waits at most
q + p, and p unless a member that it needs was paused in the last quantum.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from ensemble.spec.limits import LEAST_WEIGHT, MOST_PRIORITY, MOST_WEIGHT

QUANTUM_S = 600.0
MOST_AT_ONCE = 8  # gangs for which a run is made room at a time; others follow
_EPSILON = 1e-6

MOST_WANTS = 64  # in a row

# What others say is decoded within these ranges, or not at all.
_Measure = Annotated[float, Meta(ge=0.0, le=1e9)]
_Seconds = Annotated[float, Meta(ge=0.0, le=1e12)]


class Amount(NamedTuple):
    """GPUs, cores and GiB of memory."""

    gpus: _Measure
    cpus: _Measure
    memory_gb: _Measure = 0.0

    def plus(self, other: Amount) -> Amount:
        """Both together."""
        return Amount(self.gpus + other.gpus, self.cpus + other.cpus, self.memory_gb + other.memory_gb)

    def minus(self, other: Amount) -> Amount:
        """Without the other; perhaps negative."""
        return Amount(self.gpus - other.gpus, self.cpus - other.cpus, self.memory_gb - other.memory_gb)

    def fits_in(self, other: Amount) -> bool:
        """Whether the other one has as much of each."""
        return (  # no loop: it is asked for each node and gang
            self.gpus <= other.gpus + _EPSILON
            and self.cpus <= other.cpus + _EPSILON
            and self.memory_gb <= other.memory_gb + _EPSILON
        )


NOTHING = Amount(0.0, 0.0, 0.0)


def sum_amounts(amounts: Iterable[Amount]) -> Amount:
    """All of them together."""
    total = NOTHING
    for each in amounts:
        total = total.plus(each)
    return total


class Holding(Struct, frozen=True):
    """What a run was given as a whole, and gives back as a whole.

    Attributes:
        id: unique within the run.
        parts: what it is, by node.
        held_s: for how long it has been held, in seconds.
        is_busy: whether members use it, or are about to.
        is_pausable: whether none of its members was paused for others in the last quantum.
    """

    id: str
    parts: dict[str, Amount]
    held_s: _Seconds = 0.0
    is_busy: bool = True
    is_pausable: bool = True


class Want(Struct, frozen=True):
    """What a run waits for: so many times these parts, each on one node, all together or not at all.

    Attributes:
        nodes: those that may give it; None: all but those that its run leaves out.
        waited_s: seconds since the run waits for as large a one, or was last given one: it may be given small ones
            all the time. At least those of the run count.
    """

    parts: Annotated[tuple[Amount, ...], Meta(min_length=1)]
    count: Annotated[int, Meta(ge=1, le=MOST_WANTS)] = 1
    nodes: tuple[str, ...] | None = None
    waited_s: _Seconds = 0.0


class RunClaim(Struct, frozen=True, kw_only=True):
    """What a run holds and wants.

    Attributes:
        run: its id, another one at each of its starts.
        priority: a run of a higher one is served first.
        weight: runs of one priority have parts in proportion to their weights.
        limits: the most GPUs (`gpus`) and cores (`cpus`) that it holds, where it has limits.
        wants: within its limits, the first ones first.
        waited_s: seconds since it waits, or was last given something.
        excluded: nodes that it cannot use now: they give it nothing.
    """

    run: str
    priority: Annotated[int, Meta(ge=-MOST_PRIORITY, le=MOST_PRIORITY)] = 0
    weight: Annotated[float, Meta(ge=LEAST_WEIGHT, le=MOST_WEIGHT)] = 1.0
    limits: dict[str, float] = {}
    holdings: tuple[Holding, ...] = ()
    wants: Annotated[tuple[Want, ...], Meta(max_length=MOST_WANTS)] = ()
    waited_s: _Seconds = 0.0
    excluded: tuple[str, ...] = ()

    def sum_held(self) -> dict[str, Amount]:
        """What it holds of each node."""
        held: dict[str, Amount] = {}
        for node, part in itertools.chain.from_iterable(holding.parts.items() for holding in self.holdings):
            held[node] = held.get(node, NOTHING).plus(part)
        return held


class GangGrant(NamedTuple):
    """A run may take these parts, on these nodes, once what the debts for it name is given back."""

    run: str
    parts: tuple[Amount, ...]
    nodes: tuple[str, ...]


class Debt(NamedTuple):
    """What a run is to give back.

    Attributes:
        run: that owes it.
        to: the run that waits for it.
        holding: the id of what it owes.
        instead: ids of what would do as well: whichever of them is free first is given back.
        is_pause_due: whether members are paused for it; else it is given back when they end.
    """

    run: str
    to: str
    holding: str
    instead: tuple[str, ...] = ()
    is_pause_due: bool = False


class ClusterDivision(NamedTuple):
    """The answer of `divide`."""

    grants: list[GangGrant]
    debts: list[Debt]

    def sum_on_node(self, node: str, run: str) -> tuple[Amount, Amount]:
        """What a run may take of a node beyond what it holds, and what others are to have of it."""
        sums = {True: NOTHING, False: NOTHING}
        for grant in self.grants:
            for on, part in zip(grant.nodes, grant.parts, strict=True):
                if on == node:
                    sums[grant.run == run] = sums[grant.run == run].plus(part)
        return sums[True], sums[False]


def divide(
    claims: Sequence[RunClaim], free: Mapping[str, Amount], quantum_s: float = QUANTUM_S
) -> ClusterDivision:
    """Decide which runs may take what, and what others give back for it.

    Args:
        claims: of all runs.
        free: what nobody holds of each node; other nodes count as not there.
        quantum_s: see the module.
    """
    board = _Board(claims, free, quantum_s)
    waiting = {claim.run: [want for want in claim.wants for _ in range(want.count)] for claim in claims}
    made = dict.fromkeys(waiting, 0)  # gangs for which room is made
    while runs := [run for run, wants in waiting.items() if wants]:
        run = min(runs, key=board.rank)
        want = waiting[run].pop(0)
        needs_room = board.grant(run, want, may_displace=made[run] < MOST_AT_ONCE)
        if needs_room is None:  # and so would its equals
            waiting[run] = [each for each in waiting[run] if each != want]
        else:
            made[run] += needs_room
    return ClusterDivision(board.grants, board.list_debts())


class _Given(NamedTuple):
    """A holding that is to be given back.

    Attributes:
        run: its owner.
        to: who waits for it.
        waited_s: for how long.
        is_exchange: whether they only change places.
        grant: the number of the grant for which it is.
        alone: what it is for, if it is the only one that is given back for that grant.
    """

    holding: Holding
    run: str
    to: str
    waited_s: float
    is_exchange: bool
    grant: int
    alone: Want | None = None


class _Board:
    """What runs hold and are granted while it is decided."""

    def __init__(self, claims: Sequence[RunClaim], free: Mapping[str, Amount], quantum_s: float) -> None:
        self._claims = {claim.run: claim for claim in claims}
        self._quantum_s = quantum_s
        self._left = dict(free)  # of each node, without what is granted
        self._held: dict[str, dict[tuple[str, str], Holding]] = {node: {} for node in free}
        self.grants: list[GangGrant] = []
        self._given: dict[tuple[str, str], _Given] = {}
        self._usable: dict[tuple[str, tuple[str, ...] | None], list[str]] = {}
        held = {claim.run: claim.sum_held() for claim in claims}
        there = [part for parts in held.values() for node, part in parts.items() if node in free]
        self._total = sum_amounts([*free.values(), *there])
        self._levels = {run: self._weigh(run, parts.values()) for run, parts in held.items()}
        for claim in claims:
            for holding in claim.holdings:
                for node in holding.parts.keys() & self._held.keys():
                    self._held[node][claim.run, holding.id] = holding

    def _weigh(self, run: str, parts: Iterable[Amount]) -> float:
        """By how much these parts raise the level of a run."""
        amount = sum_amounts(parts)
        shares = (mine / of for mine, of in zip(amount, self._total, strict=True) if of > 0)
        return max(shares, default=0.0) / self._claims[run].weight

    def _list_usable(self, run: str, want: Want) -> list[str]:
        """The nodes that may give a run what it wants."""
        key = run, want.nodes
        if key not in self._usable:
            named = self._left.keys() if want.nodes is None else self._left.keys() & set(want.nodes)
            self._usable[key] = sorted(named - set(self._claims[run].excluded))
        return self._usable[key]

    def rank(self, run: str) -> tuple[float, float, float, str]:
        """The order in which those that wait are served."""
        claim = self._claims[run]
        return -claim.priority, round(self._levels[run], 6), -claim.waited_s, run

    def grant(self, run: str, want: Want, *, may_displace: bool) -> bool | None:
        """Grant a gang to a run; returns whether others give something back for it. None: there is no room."""
        left, given, levels = dict(self._left), dict(self._given), dict(self._levels)
        parts, nodes = want.parts, list[str]()
        for part in parts:
            node = self._find_free(run, want, part)
            if node is None and may_displace:
                node = self._make_room(run, want, part)
            if node is None:
                self._left, self._given, self._levels = left, given, levels
                return None
            self._left[node] = self._left[node].minus(part)
            nodes.append(node)
        self.grants.append(GangGrant(run, parts, tuple(nodes)))
        self._levels[run] += self._weigh(run, parts)
        return len(self._given) > len(given)

    def _find_free(self, run: str, want: Want, part: Amount) -> str | None:
        """The node with room for a part that has least beside it."""
        fitting = [node for node in self._list_usable(run, want) if part.fits_in(self._left[node])]
        return min(fitting, key=lambda node: (self._left[node], node), default=None)

    def _make_room(self, run: str, want: Want, part: Amount) -> str | None:
        """Have others give back what a part needs on one node: that on which it is least, and can be first."""
        best: tuple[tuple[float, ...], str, list[_Given]] | None = None
        richest = {
            node: max((self._levels[owner] for owner, _ in there), default=0.0)
            for node, there in self._held.items()
        }
        for node in sorted(self._list_usable(run, want), key=lambda node: (-richest[node], node)):
            found = self._plan_room(run, want, part, node)
            if found is None:
                continue
            busy = [each for each in found if each.holding.is_busy]
            late = [each for each in busy if not self._may_pause(each)]
            key = (len(late), len(busy), len(found), -max(self._levels[each.run] for each in found))
            if best is None or key < best[0]:
                best = key, node, found
            if not late and len(found) == 1:
                break  # none is better: those with the highest levels come first
        if best is None:
            return None
        is_alone = len(want.parts) == len(best[2]) == 1
        for each in best[2]:
            self._given[each.run, each.holding.id] = each._replace(alone=want if is_alone else None)
            self._levels[each.run] -= self._weigh(each.run, each.holding.parts.values())
            for node, amount in each.holding.parts.items():
                if node in self._left:
                    self._left[node] = self._left[node].plus(amount)
        return best[1]

    def _plan_room(self, run: str, want: Want, part: Amount, node: str) -> list[_Given] | None:
        """What others give back on a node so that a part has room there; None: they need not give so much."""
        levels, left, found = dict(self._levels), self._left[node], list[_Given]()
        waited_s = max(self._claims[run].waited_s, want.waited_s)
        there = [each for each in self._held[node].items() if each[0] not in self._given and each[0][0] != run]
        if not there or not part.fits_in(sum_amounts([left, *(holding.parts[node] for _, holding in there)])):
            return None
        there.sort(key=lambda each: self._order_of_loss(*each))
        while not part.fits_in(left):
            for each in there:
                (owner, _), holding = each
                below = levels[owner] - self._weigh(owner, holding.parts.values())
                kind = self._judge(run, want.parts, owner, levels[owner], below, waited_s)
                if kind is not None:
                    break
            else:
                return None
            there.remove(each)
            levels[owner] = below
            left = left.plus(holding.parts[node])
            found.append(_Given(holding, owner, run, waited_s, kind, len(self.grants)))
        for given in list(found):  # those that others have made superfluous
            rest = left.minus(given.holding.parts[node])
            if part.fits_in(rest):
                found.remove(given)
                left = rest
        return found

    def _order_of_loss(self, key: tuple[str, str], holding: Holding) -> tuple[object, ...]:
        owner = self._claims[key[0]]
        level = -round(self._levels[owner.run], 6)
        return owner.priority, holding.is_busy, level, not holding.is_pausable, -holding.held_s, key

    def _judge(
        self, run: str, parts: tuple[Amount, ...], owner: str, level: float, below: float, waited_s: float
    ) -> bool | None:
        """Whether an owner gives back to a run: None: no; True: to change places; False: for another reason.

        Args:
            level, below: of the owner, before and after.
        """
        mine, its = self._claims[run], self._claims[owner]
        if mine.priority != its.priority:
            return False if mine.priority > its.priority else None
        now = self._levels[run]
        if below > now + _EPSILON or (not mine.holdings and now < _EPSILON):
            return False
        after = now + self._weigh(run, parts)
        changes_places = level > now + _EPSILON and after <= level + _EPSILON
        return True if changes_places and waited_s >= self._quantum_s else None

    def _may_pause(self, given: _Given) -> bool:
        holding, mine, its = given.holding, self._claims[given.to], self._claims[given.run]
        if not holding.is_busy or mine.priority > its.priority:
            return holding.is_pausable
        is_late = given.waited_s >= self._quantum_s and holding.held_s >= self._quantum_s
        return is_late and holding.is_pausable and not given.is_exchange

    def list_debts(self) -> list[Debt]:
        """What runs owe; members are paused when all of those may be that a gang needs."""
        given = self._given.values()
        awaited = {each.grant for each in given if each.holding.is_busy and not self._may_pause(each)}
        return [
            Debt(
                each.run,
                each.to,
                each.holding.id,
                tuple(self._list_instead(each, each.alone)) if each.alone is not None else (),
                each.holding.is_busy and each.grant not in awaited,
            )
            for each in given
        ]

    def _list_instead(self, given: _Given, want: Want) -> Iterator[str]:
        """The ids of the owner's other holdings each of which makes as much room."""
        (chosen,), (part,) = self.grants[given.grant].nodes, want.parts
        usable = set(self._list_usable(given.to, want))
        for other in self._claims[given.run].holdings:
            for node, amount in other.parts.items():
                left = self._left[node] if node in usable else None
                if node == chosen and left is not None:
                    left = left.plus(part).minus(given.holding.parts[node])
                is_free = (given.run, other.id) not in self._given
                if is_free and left is not None and part.fits_in(left.plus(amount)):
                    yield other.id
                    break
