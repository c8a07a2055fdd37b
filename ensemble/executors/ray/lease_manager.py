"""Keeps the leases of a run in line with its members: asks for what they need, returns what nobody uses.

A run that waits for more keeps only what its members can use as it is. Otherwise two runs, each of which holds
half of what a member needs, would wait for each other for ever.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

from ensemble.executors.ray import _compat
from ensemble.executors.ray.demand import plan_requests
from ensemble.executors.ray.leases import Lease, Leases, is_used, list_by_node, sum_use
from ensemble.executors.ray.planned_node import is_width_open
from ensemble.executors.ray.request import Offer, ResourceRequest
from ensemble.schedule.needs import UNITS, Node, Placement, compute_need, resolve_devices, uses_gpus
from ensemble.schedule.packing import pack
from ensemble.schedule.selection import explain_unselected, is_selected
from ensemble.spec import Identity
from ensemble.spec.nodes import describe_selection

REST_S = 60.0  # for which nothing is asked of a node where nothing starts
KEPT_S = 10.0  # for which a lease is kept that no member uses
_REPLAN_S = 5.0  # others of the cluster may have returned something
_PLANNED_PER_S = 2000  # waiting members for which requests are planned: ten thousand take a quarter of a second
POLL_S, RENEW_S = 0.2, 1.0
_SOON_S = 3.0
_ANSWER_S = 2.0
_EPSILON = 1e-6


class _RunLimits:
    """The GPUs and cores that a run may hold (`Ensemble.limits`), compared with what it holds.

    Attributes:
        limits: of `gpus` and `cpus`; what is absent has none.
    """

    def __init__(self, limits: Mapping[str, float], leases: Leases) -> None:
        self.limits, self._leases = limits, leases

    def limit_offer(self, offer: Offer) -> Offer:
        """A node with no more free than the run may take of it."""
        gpus, cpus = self._count_free()
        most = {"GPU": gpus, "CPU": cpus}
        return offer._replace(
            free={name: min(amount, most.get(name, amount)) for name, amount in offer.free.items()}
        )

    def list_within(self, waiting: Sequence[Identity], devices: str) -> list[Identity]:
        """The waiting members that the limits leave room for beside what is held."""
        if not self.limits:
            return list(waiting)
        (gpus, cpus), within = self._count_free(), list[Identity]()
        for identity in waiting:
            need = compute_need(identity)
            own_gpus = need.share * need.workers / UNITS if uses_gpus(identity, devices) else 0.0
            own_cpus = need.cpus_on(round(min(cpus, 1e6) * UNITS)) / UNITS
            if own_gpus <= gpus + _EPSILON and own_cpus <= cpus + _EPSILON:
                within.append(identity)
                gpus, cpus = gpus - own_gpus, cpus - own_cpus
        return within

    def choose(self, requests: Counter[ResourceRequest]) -> Counter[ResourceRequest]:
        (gpus, cpus), chosen = self._count_free(), Counter[ResourceRequest]()
        for request in requests.elements():
            bundle = request.bundle
            if bundle.gpus <= gpus + _EPSILON and bundle.cpus <= cpus + _EPSILON:
                chosen[request] += 1
                gpus, cpus = gpus - bundle.gpus, cpus - bundle.cpus
        return chosen

    def _count_free(self) -> tuple[float, float]:
        """The GPUs and the cores that the run may hold beyond what it holds."""
        leases = [lease for held in self._leases.held.values() for lease in held]
        gpus, cpus = sum(lease.bundle.gpus for lease in leases), sum(lease.cpus for lease in leases)
        return self.limits.get("gpus", math.inf) - gpus, self.limits.get("cpus", math.inf) - cpus


class LeaseManager:
    """The leases of a run on a cluster that it may share with others.

    Args:
        name: of the run, by which its placement groups are named.
        devices: "auto", "cpu" or "cuda", as the ensemble declares it.
        waiting: members for which to ask.
        has_gpus: whether the run has known any GPU before.
        limits: of the run (`Ensemble.limits`).

    Attributes:
        draining: Ray's ids of nodes that Ray drains: nothing is requested there; what is held there stays until
            `lose`.
    """

    def __init__(
        self,
        name: str,
        devices: str,
        waiting: Sequence[Identity],
        *,
        has_gpus: bool = False,
        limits: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self._leases, self._declared_devices, self._has_gpus = Leases(name), devices, has_gpus
        self._limits = _RunLimits(limits, self._leases)
        self._with_gpus: dict[str, Node] = {}  # by Ray's id, also those that are gone
        self._waiting, self._placed = list(waiting), list[Placement]()
        self._offers = list[Offer]()  # without those of which nothing is asked
        self.draining: set[str] = set()
        self._resting: dict[str, float] = {}  # by Ray's id of the node: until when nothing is asked of it
        self._replan_at = self._planned_at = 0.0
        self._unseen_until = math.inf  # `waiting` is older than some leases

    def set_offers(self, offers: Sequence[Offer], excluded: Collection[str] = ()) -> None:
        """The nodes of the cluster, with what they have free now; nothing is asked of those that rest.

        Args:
            excluded: Ray's ids of those of which nothing is asked, either.
        """
        ids = {offer.ray_id for offer in offers}
        self._resting = {ray_id: until for ray_id, until in self._resting.items() if ray_id in ids}
        resting = (ray_id for ray_id in self._resting if self.is_resting(ray_id))
        self._leases.avoided = frozenset((*resting, *excluded))
        self._offers = [offer for offer in offers if offer.ray_id not in self._leases.avoided]
        self._with_gpus |= {offer.ray_id: offer.node for offer in offers if offer.node.gpus}

    def rest(self, ray_id: str, seconds: float | None) -> None:
        """Ask nothing of a node for so long (None: in this run), for nothing starts there."""
        self._resting[ray_id] = time.monotonic() + (math.inf if seconds is None else seconds)
        self._leases.avoided |= {ray_id}
        self._offers = [offer for offer in self._offers if offer.ray_id != ray_id]
        self._leases.withdraw_node(ray_id)

    def is_resting(self, ray_id: str) -> bool:
        """Whether nothing is asked of a node now; see `rest`."""
        return time.monotonic() < self._resting.get(ray_id, -math.inf)

    def pop_failed(self) -> list[tuple[str, str]]:
        return self._leases.pop_failed()

    @property
    def devices(self) -> str:
        """How members are packed; see `ensemble.schedule.needs.resolve_devices`."""
        has_gpus = self._has_gpus or bool(self._with_gpus)
        return resolve_devices(self._declared_devices, has_gpus=has_gpus)

    def look_for_drained(self) -> dict[str, float | None]:
        """The nodes of which Ray says for the first time that it drains them, with the time of their end."""
        deadlines = _compat.list_draining_nodes(_ANSWER_S)
        new = {ray_id: until for ray_id, until in deadlines.items() if ray_id not in self.draining}
        self.draining.update(new)
        self._offers = [offer for offer in self._offers if offer.ray_id not in self.draining]
        for ray_id in new:
            self._leases.withdraw_node(ray_id)
        return new

    def set_demand(self, waiting: Sequence[Identity], placed: Sequence[Placement]) -> None:
        """Which members have no place in what the run holds, and where the others are."""
        self._waiting, self._placed = list(waiting), list(placed)
        pause_s = max(RENEW_S, len(waiting) / _PLANNED_PER_S)
        self._replan_at = min(self._replan_at, self._planned_at + pause_s)
        self._unseen_until = 0.0

    @property
    def is_replan_due(self) -> bool:
        """Whether `replan` is due; what nodes have free should be known then."""
        return bool(self._waiting or self._leases.pending) and time.monotonic() >= self._replan_at

    @property
    def poll_s(self) -> float:
        """How often to look whether requests were met: often at first, for that is when most are."""
        newest = max((lease.since for lease in self._leases.pending), default=0.0)
        return POLL_S if time.monotonic() - newest < _SOON_S else RENEW_S

    @property
    def is_pending(self) -> bool:
        """Whether there are requests that Ray has not met."""
        return bool(self._leases.pending)

    def on_node(self, ray_id: str) -> list[Lease]:
        return list(self._leases.held[ray_id])

    def collect(self) -> set[str]:
        """Returns the ids of the nodes on which leases have become ready."""
        now_s, ready = time.monotonic(), list(self._leases.collect())
        for lease in ready:
            lease.since = now_s
        if ready:
            self._replan_at = now_s
        if ready and math.isfinite(self._unseen_until):
            self._unseen_until = now_s + KEPT_S
        return {str(lease.ray_id) for lease in ready}

    def replan(self) -> None:
        """Request what the waiting members can use beyond what is held, and withdraw other requests."""
        self._planned_at = time.monotonic()
        self._replan_at = self._planned_at + _REPLAN_S
        offers = [self._limits.limit_offer(self._limit_free(offer)) for offer in self._offers]
        most = self._limits.limits.get("cpus", math.inf)
        within = self._limits.list_within(self._list_unserved(), self.devices)
        waiting = [_reduce_guess(identity, most) for identity in within]
        planned = plan_requests(waiting, offers, self.devices, list(self._with_gpus.values()))
        self._leases.request(self._limits.choose(planned))

    def _list_unserved(self) -> list[Identity]:
        """The waiting members for which resources are missing.

        Those that fit in what is held are left out while they have not been offered what has become ready, and if
        their number of workers is to be chosen. Others that fit wait for a reason, such as a limit on the members
        of a GPU.
        """
        is_unseen = time.monotonic() < self._unseen_until
        if not is_unseen and not any(is_width_open(identity) for identity in self._waiting):
            return self._waiting
        held = [self._describe_held(offer) for offer in self._offers]
        served = Counter(placement.member for placement in self._pack([node for node in held if node.cpus]))
        unserved = []
        for identity in self._waiting:  # trials to come have one name
            if served[identity.member] and (is_unseen or is_width_open(identity)):
                served[identity.member] -= 1
            else:
                unserved.append(identity)
        return unserved

    def _pack(self, nodes: Sequence[Node]) -> list[Placement]:
        """Where waiting members would find a place beside the others."""
        return pack(self._waiting, self._placed, nodes, self.devices)

    def _describe_held(self, offer: Offer) -> Node:
        """What the run holds of a node, as far as that is known before its agent has started."""
        leases = self.on_node(offer.ray_id)
        lent = (lease.devices or (() if lease.is_unusable else lease.gpus) for lease in leases)
        gpus = tuple(itertools.chain.from_iterable(lent))
        cpus, memory_gb = sum(lease.cpus for lease in leases), sum(lease.memory_gb for lease in leases)
        name, alike = offer.node.name, len(gpus) if offer.node.gpus else 0  # all of its GPUs are described alike
        return Node(
            name=name,
            cpus=cpus,
            gpus=offer.node.gpus[:1] * alike or ("",) * len(gpus),
            memory_gb=memory_gb,
            host=name,
            gpu_ids=gpus,
            gpu_memory_gb=offer.node.gpu_memory_gb[:1] * alike,
            labels=offer.node.labels,
        )

    def _limit_free(self, offer: Offer) -> Offer:
        """A node with no more free than it has: Ray may have been told of more."""
        held = self._leases.held[offer.ray_id]
        cpus, memory_gb = sum(lease.cpus for lease in held), sum(lease.memory_gb for lease in held)
        most = {"CPU": offer.node.cpus - cpus, "memory": (offer.node.memory_gb - memory_gb) * 2**30}
        free = {name: min(amount, most.get(name, amount)) for name, amount in offer.free.items()}
        return offer._replace(free=free)

    def release_unused(
        self, nodes: Iterable[tuple[str, Node]], feeding: Collection[str] = (), measuring: Collection[str] = ()
    ) -> list[str]:
        """Give back leases that no member has used for a while and that no waiting member can use.

        Args:
            nodes: Ray's id and what the run holds, of each node whose agent has answered; a gang is kept while one
                of its nodes is missing.
            feeding: the ids of those with a feeder, which keep a lease.
            measuring: the ids of those where members are measured, which keep all.

        Returns:
            The ids of the nodes on which something was given back.
        """
        now_s, changed, by_id = time.monotonic(), list[str](), dict(nodes)
        used, planned = list_by_node(self._placed), None
        has_open = any(is_width_open(identity) for identity in self._waiting)
        for ray_id, node in by_id.items():
            leases = self.on_node(ray_id)
            use = sum_use(used[node.name], node)
            is_kept = ray_id in measuring or (ray_id in feeding and len(leases) == 1)
            for lease in leases:
                is_partly_known = not all(one.ray_id in by_id for one in lease.gang)
                is_broken = lease.is_unusable and bool(self._waiting)
                in_use = is_used(lease, leases, use)
                if is_kept or is_partly_known or is_broken or in_use:
                    _keep(lease, now_s)
                elif _is_idle(lease, now_s):
                    if planned is None:
                        planned = list_by_node([*self._placed, *self._pack(list(by_id.values()))])
                    can_widen = has_open and any(is_width_open(one.identity) for one in self._pack([node]))
                    if can_widen or is_used(lease, leases, sum_use(planned[node.name], node)):
                        for one in lease.gang or [lease]:
                            one.awaited_until = now_s + KEPT_S
                    elif all(_is_idle(one, now_s) for one in lease.gang):
                        self._leases.release(lease)
                        changed += [str(one.ray_id) for one in lease.gang or [lease]]
                        break  # the others of this node are compared with what is left of it
        return list(dict.fromkeys(changed))

    def lose(self, ray_id: str) -> None:
        """A node is lost, or cannot be used."""
        self._offers = [offer for offer in self._offers if offer.ray_id != ray_id]
        self._leases.lose_node(ray_id)

    def describe_pending(self) -> str:
        """What Ray has not given yet, in words; empty if nothing is missing."""
        counts = Counter(lease.request for lease in self._leases.pending if not lease.request.is_pinned)
        return ", ".join(f"{count} x ({self._describe(request)})" for request, count in counts.items())

    def _describe(self, request: ResourceRequest) -> str:
        """A request in words, and what the nodes have where none fits it, whatever they have free."""
        nodes, text = [offer.node for offer in self._offers], _describe(request)
        missing = (
            selection
            for selection in request.selections
            if selection and not any(is_selected(selection, n) for n in nodes)
        )
        return "; ".join([text, *(explain_unselected(selection, nodes) for selection in missing)])

    def close(self) -> None:
        """Give back everything."""
        self._leases.release_all()


def _describe(request: ResourceRequest) -> str:
    bundle = request.bundle
    gpus = f"{bundle.gpus} GPU{'s' * (bundle.gpus > 1)}, " if bundle.gpus else ""
    memory = f", {bundle.memory_gb:.1f} GiB" if bundle.memory_gb else ""
    where = "".join(
        f", on nodes with {describe_selection(selection)}" for selection in request.selections if selection
    )
    return f"{gpus}{bundle.cpus:g} cores{memory}{where}"


def _reduce_guess(identity: Identity, most: float) -> Identity:
    """The member with no more cores than the run may have, where it left them to measurement (`Need.cpus_on`)."""
    workers = identity.workers
    if "cpus_per_worker" not in identity.auto or not most < workers * identity.cpus_per_worker:
        return identity
    return dataclasses.replace(identity, cpus_per_worker=most / workers) if workers <= max(1, most) else identity


def _is_idle(lease: Lease, now_s: float) -> bool:
    """Whether no member has used a lease for a while, and none was found that can."""
    return now_s - lease.since >= KEPT_S and now_s >= lease.awaited_until


def _keep(lease: Lease, now_s: float) -> None:
    """A lease is in use, and so is its gang."""
    for one in lease.gang or [lease]:
        one.since = now_s
