"""What a run requests of a cluster at most (`Ensemble.limits`): none of it follows from what others hold."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from ensemble.executors.ray.leases import Leases
from ensemble.executors.ray.request import Offer, ResourceRequest
from ensemble.schedule.needs import UNITS, compute_need, uses_gpus
from ensemble.spec import Identity

_EPSILON = 1e-6


class RunLimits:
    """The GPUs and cores that a run may hold, compared with what it holds.

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
        """As many of these requests as the limits allow."""
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
