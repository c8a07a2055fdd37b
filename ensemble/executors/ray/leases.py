"""Holds resources of a Ray cluster for a run: placement groups, and which GPUs of which node they are.

A lease is requested, then ready, and given back. Ray names the GPUs of a placement group only to a task that runs
in it, so a lease with GPUs is ready once such a task, the probe, has answered. A group whose node is lost is
removed: Ray would move it to another node.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ensemble.executors.ray.demand import Bundle, Request

_PINNED_S = 5.0  # how long a request for a named node may stay pending: somebody else was faster then


@dataclass(eq=False)
class Lease:
    """A placement group.

    Attributes:
        group: Ray's.
        probes: the answers of its probes, to come; empty without GPUs.
        since: when it was requested or, once it is ready, when it was last in use (monotonic clock).
        ray_id: Ray's id of its node; None: it is not ready.
        gpus: how Ray names its GPUs, by number or UUID.
        devices: the ids of these GPUs or of their instances, as the node's agent knows them.
    """

    request: Request
    group: Any
    probes: list[Any] = field(default_factory=list)
    since: float = field(default_factory=time.monotonic)
    ray_id: str | None = None
    gpus: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()

    @property
    def cpus(self) -> float:
        """Its cores."""
        return self.request.bundle.cpus

    @property
    def memory_gb(self) -> float:
        """Its memory in GiB."""
        return self.request.bundle.memory_gb


class Leases:
    """The leases of a run.

    Args:
        name: of the run, by which its placement groups are named.

    Attributes:
        pending: requested and not ready.
        held: ready.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.pending: list[Lease] = []
        self.held: list[Lease] = []

    def request(self, wanted: Counter[Request]) -> None:
        """Have these requests pending: others are withdrawn, missing ones are made.

        While one for a named node is pending, what is free is not known: nothing changes.
        """
        if any(lease.request.ray_id is not None for lease in self.pending):
            return
        missing = Counter(wanted)
        for lease in list(self.pending):
            if missing[lease.request] > 0:
                missing[lease.request] -= 1
            else:
                self.release(lease)
        self.pending += [_request(each, self._name) for each in missing.elements()]

    def collect(self) -> Iterator[Lease]:
        """The leases that have become ready; those for a named node that are late are withdrawn."""
        for lease in list(self.pending):
            if _is_ready(lease):
                self.pending.remove(lease)
                self.held.append(lease)
                yield lease
            elif _is_late(lease) and _find_node(lease) is None:  # else its probes are about to answer
                self.release(lease)

    def release(self, lease: Lease) -> None:
        """Give one back, or withdraw its request."""
        from ray.util import remove_placement_group

        for leases in (self.pending, self.held):
            if lease in leases:
                leases.remove(lease)
        remove_placement_group(lease.group)

    def release_node(self, ray_id: str) -> None:
        """Give back all of a node."""
        for lease in [
            lease for lease in (*self.held, *self.pending) if ray_id in (lease.ray_id, lease.request.ray_id)
        ]:
            self.release(lease)

    def release_all(self) -> None:
        """Give back all, and withdraw all requests."""
        for lease in (*self.pending, *self.held):
            self.release(lease)


def _request(request: Request, name: str) -> Lease:
    from ray.util import placement_group

    bundles = request.bundle.as_resources()
    labels = None if request.ray_id is None else [{"ray.io/node-id": request.ray_id}] * len(bundles)
    group = placement_group(
        bundles,
        strategy="STRICT_PACK",
        name=f"{name}/{secrets.token_hex(6)}",
        bundle_label_selector=labels,
    )
    return Lease(request, group, _start_probes(group, request.bundle))


def _start_probes(group: Any, bundle: Bundle) -> list[Any]:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    def probe() -> tuple[str, Sequence[str]]:  # pickled by value: the node need not find this module
        import ray

        context = ray.get_runtime_context()
        return context.get_node_id(), context.get_accelerator_ids()["GPU"]

    def start(number: int) -> Any:
        strategy = PlacementGroupSchedulingStrategy(group, number)
        make_remote: Any = ray.remote(num_cpus=0, num_gpus=1, scheduling_strategy=strategy)
        return make_remote(probe).remote()

    return [start(number) for number in range(bundle.gpus)]


def _is_late(lease: Lease) -> bool:
    return lease.request.ray_id is not None and time.monotonic() - lease.since > _PINNED_S


def _find_node(lease: Lease) -> str | None:
    """Ray's id of the node on which Ray has reserved what was requested; None: it has not."""
    from ray.util import placement_group_table

    table: Any = placement_group_table(lease.group)
    return table["bundles_to_node_id"][0] if table["state"] == "CREATED" else None


def _is_ready(lease: Lease) -> bool:
    """Whether Ray has given a lease its resources; if so, its node and GPUs are filled in."""
    import ray

    if not lease.probes:
        lease.ray_id = _find_node(lease)
        return lease.ray_id is not None
    answers: Any = None
    if len(ray.wait(lease.probes, num_returns=len(lease.probes), timeout=0)[0]) == len(lease.probes):
        try:
            answers = ray.get(lease.probes)
        except ray.exceptions.RayError:  # the node, or the probe's process, was lost: it is asked again
            lease.probes = _start_probes(lease.group, lease.request.bundle)
    if answers is None:
        return False
    lease.ray_id, lease.gpus = answers[0][0], tuple(gpu for _, gpus in answers for gpu in gpus)
    return True
