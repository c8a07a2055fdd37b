"""A run's part in the division of a cluster: what it may request, what it leaves to others, what it gives back.

`ensemble.schedule.fairness` decides, from the rows of all runs (`ensemble.executors.ray.registry`). What is here
follows from its answer for the leases of one run. Nothing is done on the first sight of a debt: rows, and what
nodes have free, are up to a second old, and what has just changed hands is in one and not yet in the other.
"""

from __future__ import annotations

import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from ensemble.executors.ray.lease_use import PlacedThere, do_hold, sum_use
from ensemble.executors.ray.leases import Lease, Leases
from ensemble.executors.ray.request import Bundle, Offer, ResourceRequest
from ensemble.schedule import Node, Placement
from ensemble.schedule.fairness import (
    MOST_WANTS,
    NOTHING,
    QUANTUM_S,
    Amount,
    ClusterDivision,
    Holding,
    RunClaim,
    Want,
    divide,
)
from ensemble.schedule.needs import UNITS, compute_need, uses_gpus
from ensemble.spec import Identity, SpecError

#: In the environment: seconds for which a run is left what others wait for as well; the same for all of a cluster.
QUANTUM = "ENSEMBLE_SHARE_QUANTUM_S"
START_S = 120.0  # for which a lease is kept for its first member although others wait for it
SETTLE_S = 2.5  # for which a debt must be owed, or nothing given back, before something is
MOST_DEFERRED = 8

_Size = tuple[tuple[float, float], ...]

log = logging.getLogger(__name__)


class Shared(NamedTuple):
    """What a run declares of itself (see `Ensemble`), and the quantum of `ensemble.schedule.fairness`."""

    run: str = ""
    priority: int = 0
    weight: float = 1.0
    limits: Mapping[str, float] = {}
    quantum_s: float = QUANTUM_S


ALONE = Shared()


def read_quantum() -> float:
    """The quantum that the environment sets.

    Raises:
        SpecError: it is no number above 0.
    """
    text = os.environ.get(QUANTUM, str(QUANTUM_S))
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < math.inf:
        raise SpecError(f"{QUANTUM} must be a number of seconds above 0, got {text!r}")
    return value


class Owed(NamedTuple):
    """One of the leases of these numbers is given back to a run, the first one unless another is free before."""

    to: str
    numbers: list[int]
    is_pause_due: bool


class Pause(NamedTuple):
    """Members that are to write a checkpoint and make way for a run."""

    members: list[str]
    to: str


class Sharing:
    """The part of one run.

    Attributes:
        others: what other runs hold and want.
        wanted: the requests that would give all waiting members a place, whatever others want.
        withheld: the numbers of leases in which nothing is placed any more.
        owed: what is owed for long enough to be given back.
    """

    def __init__(self, shared: Shared, leases: Leases) -> None:
        self.shared, self._leases, self._quantum_s = shared, leases, shared.quantum_s
        self.others: Sequence[RunClaim] = ()
        self.wanted = Counter[ResourceRequest]()
        self.withheld: frozenset[int] = frozenset()
        self.owed: list[Owed] = []
        self._division, self._has_failed = ClusterDivision([], []), False
        self._owed_since: dict[str, float] = {}  # by run
        self._gave_at = -math.inf
        self._waits_since: float | None = None
        self._waits_for: dict[_Size, float] = {}  # since when
        self._paused_at: dict[str, float] = {}  # by member

    @property
    def is_contended(self) -> bool:
        """Whether another run waits for something."""
        return any(other.wants for other in self.others)

    # -- the row --------------------------------------------------------------------------------------------------

    def note_gain(self, requests: Iterable[ResourceRequest], now: float) -> None:
        """These requests were met: the run waits anew, and for what is of another size as long as before."""
        self._waits_since = now
        for request in requests:
            self._waits_for.pop(_measure(_as_amount(part.bundle) for part in request.list_parts()), None)

    def make_claim(
        self,
        idle_after_s: float,
        placed: Iterable[Placement],
        offers: Sequence[Offer],
        now: float,
        excluded: Iterable[str] = (),
    ) -> RunClaim:
        """What the run holds and wants.

        Args:
            idle_after_s: for which a lease must be unused to be idle.
            placed: where its members are.
            offers: the nodes.
            excluded: Ray's ids of those of which nothing is asked now.
        """
        resting = [each for each in placed if not self._may_pause(each.member, now)]
        devices = {device for each in resting for device in each.devices}
        on_cpu = {name for each in resting if None in each.devices for name in each.ranks_by_node}
        names = {offer.ray_id: offer.node.name for offer in offers}
        holdings: dict[int, Holding] = {}
        for ray_id, leases in self._leases.held.items():
            for lease in leases:
                known = holdings.get(lease.number)
                is_resting = not devices.isdisjoint(lease.devices)
                is_resting |= not lease.gpus and names.get(ray_id) in on_cpu
                holdings[lease.number] = Holding(
                    id=str(lease.number),
                    parts={**(known.parts if known else {}), ray_id: _as_amount(lease.bundle)},
                    held_s=max(0.0, now - lease.ready_at),
                    is_busy=now - lease.since < idle_after_s or (known is not None and known.is_busy),
                    is_pausable=not is_resting and (known is None or known.is_pausable),
                )
        wants = self._list_wants(holdings, offers)
        if not wants:
            self._waits_since = None
        elif self._waits_since is None:
            self._waits_since = now
        sizes = {want: _measure(want.parts) for want in wants}
        self._waits_for = {size: self._waits_for.get(size, now) for size in sizes.values()}
        return RunClaim(
            run=self.shared.run,
            priority=self.shared.priority,
            weight=self.shared.weight,
            limits=dict(self.shared.limits),
            holdings=tuple(holdings.values()),
            wants=tuple(
                Want(want.parts, count, want.nodes, now - self._waits_for[sizes[want]])
                for want, count in wants.items()
            ),
            waited_s=now - self._waits_since if self._waits_since is not None else 0.0,
            excluded=tuple(sorted(excluded)),
        )

    def _may_pause(self, member: str, now: float) -> bool:
        return now - self._paused_at.get(member, -math.inf) >= self._quantum_s

    def _list_wants(self, holdings: dict[int, Holding], offers: Sequence[Offer]) -> Counter[Want]:
        """What is wanted; what Ray has reserved of it is added to the holdings."""
        wants = Counter[Want]()
        for request in self.choose(self.wanted).elements():
            if wants.total() < MOST_WANTS:
                gang = tuple(_as_amount(part.bundle) for part in request.list_parts())
                wants[Want(gang, nodes=request.list_nodes(offers))] += 1
        for lease, nodes in self._leases.list_reserved() if self.others else ():
            parts, numbers = dict[str, Amount](), iter(nodes)
            for part in lease.request.list_parts():
                ray_id, *_ = [next(numbers) for _ in part.bundle.as_resources()]
                parts[ray_id] = parts.get(ray_id, NOTHING).plus(_as_amount(part.bundle))
            holdings[lease.number] = Holding(str(lease.number), parts)
            gpus = lease.bundle.gpus
            alike = [each for each in wants if sum(part.gpus for part in each.parts) == gpus]
            if alike:
                wants -= Counter([alike[0]])
        return wants

    # -- what may be requested ------------------------------------------------------------------------------------

    def decide(self, claim: RunClaim, free: Mapping[str, Amount], now: float) -> bool:
        """Divide the cluster anew; returns whether it is divided otherwise than before."""
        before, known = self._division.grants, {other.run for other in self.others}
        self._divide([claim, *self.others], free)
        debts = [debt for debt in self._division.debts if debt.run == self.shared.run and debt.to in known]
        self._owed_since = {debt.to: self._owed_since.get(debt.to, now) for debt in debts}
        starting = self._list_starting(now)
        self.owed = []
        for debt in debts:
            numbers = [int(id) for id in (debt.holding, *debt.instead)]
            numbers = [number for number in numbers if debt.is_pause_due or number not in starting]
            if numbers and now - self._owed_since[debt.to] >= SETTLE_S:
                self.owed.append(Owed(debt.to, numbers, debt.is_pause_due))
        self.withheld = frozenset(number for owed in self.owed for number in owed.numbers)
        return self._division.grants != before

    def _divide(self, claims: Iterable[RunClaim], free: Mapping[str, Amount]) -> None:
        """Divide the cluster; where that fails, it stays divided as it is, and the run goes on."""
        if not self.is_contended:
            self._division = ClusterDivision([], [])
            return
        try:
            self._division = divide(sorted(claims, key=lambda each: each.run), free, self._quantum_s)
        except Exception as error:  # of rows of others, perhaps: it must not end this run
            if not self._has_failed:
                log.warning("the cluster cannot be divided between its runs, and stays as it is: %r", error)
            self._has_failed = True

    def _list_starting(self, now: float) -> set[int]:
        """The numbers of leases in which the first member is about to start: their turn has not begun yet."""
        held = [lease for leases in self._leases.held.values() for lease in leases]
        return {lease.number for lease in held if not lease.was_used and now - lease.ready_at < START_S}

    def limit_offer(self, offer: Offer) -> Offer:
        """A node with no more free than the run may take of it."""
        left = self._count_left()
        most = {"GPU": left.gpus, "CPU": left.cpus}
        free = {name: min(amount, most.get(name, amount)) for name, amount in offer.free.items()}
        if self.is_contended:
            own, reserved = self._division.sum_on_node(offer.ray_id, self.shared.run)
            cpus = free.get("CPU", 0.0) - reserved.cpus
            free["GPU"] = max(0.0, min(own.gpus, free.get("GPU", 0.0)))
            free["CPU"] = max(0.0, cpus if own.gpus else min(own.cpus, cpus))
            free["memory"] = max(0.0, free.get("memory", 0.0) - reserved.memory_gb * 2**30)
        return offer._replace(free=free)

    def _count_left(self) -> Amount:
        """What the limits leave beyond what is held."""
        leases = [lease for held in self._leases.held.values() for lease in held]
        gpus, cpus = sum(lease.bundle.gpus for lease in leases), sum(lease.cpus for lease in leases)
        limits = self.shared.limits
        return Amount(limits.get("gpus", math.inf) - gpus, limits.get("cpus", math.inf) - cpus, math.inf)

    def list_within(self, waiting: Sequence[Identity], devices: str) -> list[Identity]:
        """The waiting members that the limits leave room for beside what is held."""
        if not self.shared.limits:
            return list(waiting)
        left, found = self._count_left(), list[Identity]()
        for identity in waiting:
            need = compute_need(identity)
            gpus = need.share * need.workers / UNITS if uses_gpus(identity, devices) else 0.0
            amount = Amount(gpus, need.cpus_on(round(min(left.cpus, 1e6) * UNITS)) / UNITS)
            if amount.fits_in(left):
                found.append(identity)
                left = left.minus(amount)
        return found

    def choose(self, requests: Counter[ResourceRequest]) -> Counter[ResourceRequest]:
        """As many of these requests as the limits allow."""
        left, found = self._count_left(), Counter[ResourceRequest]()
        for request in requests.elements():
            amount = _as_amount(request.bundle)
            if amount.fits_in(left):
                found[request] += 1
                left = left.minus(amount)
        return found

    def defer(
        self, requests: Counter[ResourceRequest]
    ) -> tuple[Counter[ResourceRequest], Counter[ResourceRequest]]:
        """The requests that are made now, and those that further nodes may meet only: others come first here."""
        if not self.is_contended:
            return requests, Counter()
        now = Counter({request: count for request, count in requests.items() if request.is_pinned})
        later = Counter[ResourceRequest]()
        for request in (requests - now).elements():
            if later.total() < MOST_DEFERRED:
                later[request] += 1
        return now, later

    # -- what is given back ---------------------------------------------------------------------------------------

    def choose_returns(self, is_idle: Callable[[int], bool], now: float) -> list[int]:
        """The numbers of leases that are given back now."""
        if self._is_settling(now):
            return []
        chosen: list[int] = []
        for owed in self.owed:
            found = next((number for number in owed.numbers if number not in chosen and is_idle(number)), None)
            chosen += [] if found is None else [found]
        if chosen:
            self._gave_at = now
        return chosen

    def _is_settling(self, now: float) -> bool:
        """Whether something was given back just now, which the rows of others do not have yet."""
        return now - self._gave_at < SETTLE_S

    def choose_pauses(
        self, nodes: Mapping[str, Node], placed: Mapping[str, PlacedThere], now: float
    ) -> list[Pause]:
        """The members that are paused now, each once.

        Args:
            nodes: by Ray's id.
            placed: the members on each node, by its name.
        """
        if self._is_settling(now):
            return []
        due: dict[str, set[int]] = {}
        for owed in self.owed:
            if owed.is_pause_due:
                due.setdefault(owed.to, set()).add(owed.numbers[0])
        found = []
        for to, numbers in due.items():
            members = dict[str, None]()
            for ray_id, node in nodes.items():
                members |= dict.fromkeys(
                    _choose_members(self._leases.held[ray_id], numbers, placed[node.name], node)
                )
            new = [each for each in members if self._may_pause(each, now)]
            self._paused_at |= dict.fromkeys(new, now)
            found += [Pause(new, to)] if new else []
        return found


def _choose_members(leases: Sequence[Lease], numbers: set[int], placed: PlacedThere, node: Node) -> list[str]:
    """The members without which a node's leases of these numbers are not used."""
    gone = [lease for lease in leases if lease.number in numbers]
    rest = [lease for lease in leases if lease.number not in numbers]
    devices = {device for lease in gone for device in lease.devices}
    left = [each for each in placed if gone and devices.isdisjoint(each[0].devices)]
    found = [placement.member for placement, _ in placed if gone and not devices.isdisjoint(placement.devices)]
    while left and not do_hold(rest, sum_use(left, node)):
        last = next((each for each in reversed(left) if None in each[0].devices), left[-1])
        left.remove(last)
        found.append(last[0].member)
    return found


def _measure(parts: Iterable[Amount]) -> _Size:
    """The size of what is asked for, which does not change with what nodes have free: GPUs, or else cores."""
    return tuple((part.gpus, 0.0 if part.gpus else part.cpus) for part in parts)


def _as_amount(bundle: Bundle) -> Amount:
    return Amount(float(bundle.gpus), bundle.cpus, bundle.memory_gb)


def as_amount(offer: Offer) -> Amount:
    """What a node has free."""
    free = offer.free
    return Amount(free.get("GPU", 0.0), free.get("CPU", 0.0), free.get("memory", 0.0) / 2**30)
