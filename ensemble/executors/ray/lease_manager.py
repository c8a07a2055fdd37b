"""Keeps the leases of a run in line with its members: asks for what they need, returns what nobody uses."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from ensemble.executors.ray.demand import Offer, Request, plan_requests
from ensemble.executors.ray.leases import Lease, Leases
from ensemble.schedule import Node, Placement
from ensemble.schedule.needs import UNITS
from ensemble.spec import Identity

KEPT_S = 10.0  # for which a lease is kept that no member uses
_REPLAN_S = 5.0  # others of the cluster may have returned something
POLL_S, RENEW_S = 0.2, 1.0
_SOON_S = 3.0
_EPSILON = 1e-6  # cores, and GiB


class LeaseManager:
    """The leases of a run on a cluster that it may share with others.

    Args:
        name: of the run, by which its placement groups are named.
        devices: "auto", "cpu" or "cuda".
        waiting: members for which to ask.
    """

    def __init__(self, name: str, devices: str, waiting: Sequence[Identity]) -> None:
        self._leases, self._devices = Leases(name), devices
        self._waiting, self._placed = list(waiting), list[Placement]()
        self._offers: list[Offer] = []
        self._replan_at = self._planned_at = 0.0

    def set_offers(self, offers: Sequence[Offer]) -> None:
        """The nodes of the cluster, with what they have free now."""
        self._offers = list(offers)

    def set_demand(self, waiting: Sequence[Identity], placed: Sequence[Placement]) -> None:
        """Which members have no place in what the run holds, and where the others are."""
        self._waiting, self._placed = list(waiting), list(placed)
        self._replan_at = min(self._replan_at, self._planned_at + RENEW_S)

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
        """The leases held on a node."""
        return [lease for lease in self._leases.held if lease.ray_id == ray_id]

    def collect(self) -> set[str]:
        """Returns the ids of the nodes on which leases have become ready."""
        return {str(lease.ray_id) for lease in self._leases.collect()}

    def replan(self) -> None:
        """Request what the waiting members can use beyond what is held, and withdraw other requests."""
        self._planned_at = time.monotonic()
        self._replan_at = self._planned_at + _REPLAN_S
        self._leases.request(plan_requests(self._waiting, self._offers, self._devices))

    def release_unused(self, nodes: Iterable[tuple[str, Node]], feeding: Collection[str] = ()) -> list[str]:
        """Give back leases that no member has used for a while, if nobody waits.

        Args:
            nodes: Ray's id and what the run holds, of each node.
            feeding: the ids of those with a feeder, which keep a lease.

        Returns:
            The ids of the nodes on which something was given back.
        """
        now, changed = time.monotonic(), []
        for ray_id, node in nodes:
            placed = [placement for placement in self._placed if placement.node == node.name]
            for lease in self.on_node(ray_id):
                is_last = ray_id in feeding and len(self.on_node(ray_id)) == 1
                if self._waiting or is_last or _is_used(lease, placed, node):
                    lease.since = now
                elif now - lease.since >= KEPT_S:
                    self._leases.release(lease)
                    changed.append(ray_id)
                    break  # the others of this node are compared with what is left of it
        return changed

    def lose(self, ray_id: str) -> None:
        """A node is lost, or cannot be used."""
        self._leases.release_node(ray_id)
        self._offers = [offer for offer in self._offers if offer.ray_id != ray_id]

    def describe_pending(self) -> str:
        """What Ray has not given yet, in words; empty if nothing is missing."""
        counts = Counter(lease.request for lease in self._leases.pending if lease.request.ray_id is None)
        return ", ".join(f"{count} x ({_describe(request)})" for request, count in counts.items())

    def close(self) -> None:
        """Give back everything."""
        self._leases.release_all()


def _is_used(lease: Lease, placed: Sequence[Placement], node: Node) -> bool:
    """Whether the members on a node need a lease: its GPUs, or its part of the cores and of the memory."""
    if any(device in lease.devices for placement in placed for device in placement.devices):
        return True
    total = round(node.cpus * UNITS)
    cpus = sum(placement.need.cpus_on(total) for placement in placed) / UNITS
    memory_gb = sum(placement.need.memory for placement in placed) / UNITS
    return cpus > node.cpus - lease.cpus + _EPSILON or memory_gb > node.memory_gb - lease.memory / 2**30 + _EPSILON


def _describe(request: Request) -> str:
    bundle = request.bundle
    gpus = f"{bundle.copies} GPU{'s' * (bundle.copies > 1)}, " if bundle.on_gpu else ""
    memory = f", {bundle.memory * bundle.copies / 2**30:.1f} GiB" if bundle.memory else ""
    return f"{gpus}{bundle.cpus * bundle.copies:g} cores{memory}"
