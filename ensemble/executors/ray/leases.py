"""Holds resources of a Ray cluster for a run: placement groups, and which GPUs of which node they are.

Ray names GPUs only to a task that runs in the group, so a lease is ready once such a probe has answered. A group
over several nodes is a lease on each, a *gang*: all are given back together.
"""

from __future__ import annotations

import itertools
import math
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ensemble.executors.ray.request import Bundle, ResourceRequest
from ensemble.schedule.needs import UNITS, Node, Placement

_PROBE_S = 120.0  # for a probe to answer once its group is reserved: Ray starts a process for it
_EPSILON = 1e-6  # cores, and GiB
_PINNED_S = 5.0  # how long a request for a named node may stay pending: somebody else was faster then


@dataclass(eq=False)
class Lease:
    """A placement group, or its part on one node.

    Attributes:
        group: Ray's.
        bundle: what it holds.
        probes: the answers of its probes, to come; empty without GPUs.
        since: when it was requested or, once it is ready, when it was last in use (monotonic clock).
        ray_id: Ray's id of its node; None: it is not ready.
        gpus: how Ray names its GPUs, by number or UUID.
        devices: the ids of these GPUs or of their instances, as the node's agent knows them.
        reserved_at: when Ray was first seen to have reserved it although its probes have not answered.
        gang: all leases of its group, where that is on several nodes; without those on nodes that were lost.
        is_unusable: whether one of them is quarantined, or nothing of them can be used, as its node's agent says
            (`Agent.is_unusable`). It is kept while members wait, else Ray would lend the same GPUs again.
        number: of its group.
        awaited_until: until when it is kept unused, for a waiting member fits in it (monotonic clock).
    """

    request: ResourceRequest
    group: Any
    bundle: Bundle
    probes: list[Any] = field(default_factory=list)
    since: float = field(default_factory=time.monotonic)
    ray_id: str | None = None
    gpus: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    reserved_at: float | None = None
    gang: list[Lease] = field(default_factory=list)
    is_unusable: bool = False
    number: int = field(default_factory=itertools.count().__next__)
    awaited_until: float = -math.inf

    @property
    def cpus(self) -> float:
        return self.bundle.cpus

    @property
    def memory_gb(self) -> float:
        return self.bundle.memory_gb


class Leases:
    """The leases of a run.

    Args:
        name: of the run, by which its placement groups are named.

    Attributes:
        pending: requested and not ready.
        held: ready, by Ray's id of the node.
        avoided: Ray's ids of nodes that no request is met by.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.pending: list[Lease] = []
        self.avoided: frozenset[str] = frozenset()
        self._failed: list[tuple[str, str]] = []
        self.held: defaultdict[str, list[Lease]] = defaultdict(list)

    def request(self, wanted: Counter[ResourceRequest]) -> None:
        """Have these requests pending: others are withdrawn, missing ones are made.

        While one for a named node is pending, what is free is not known: nothing changes.
        """
        if any(lease.request.is_pinned for lease in self.pending):
            return
        missing = Counter(wanted)
        for lease in list(self.pending):
            if missing[lease.request] > 0:
                missing[lease.request] -= 1
            else:
                self.release(lease)
        self.pending += [_request(request, self._name, self.avoided) for request in missing.elements()]

    def collect(self) -> Iterator[Lease]:
        """The leases that have become ready; those for a named node that are late are withdrawn."""
        for lease in list(self.pending):
            try:
                bundles = _find_given(lease)
            except ProbeError as error:
                self._failed.append((error.ray_id, str(error)))
                self.release(lease)
                continue
            if bundles is not None:
                self.pending.remove(lease)
                ready = _divide(lease, bundles)
                for one in ready:
                    self.held[str(one.ray_id)].append(one)
                yield from ready
            elif _is_late(lease) and _find_nodes(lease) is None:  # else its probes are about to answer
                self.release(lease)

    def pop_failed(self) -> list[tuple[str, str]]:
        """Ray's ids of nodes where it reserved resources and no process started, and why; they are given back."""
        failed, self._failed = self._failed, []
        return failed

    def release(self, lease: Lease) -> None:
        """Give one back with its gang, or withdraw its request."""
        from ray.util import remove_placement_group

        for one in lease.gang or [lease]:
            (self.pending if one.ray_id is None else self.held[one.ray_id]).remove(one)
        remove_placement_group(lease.group)

    def lose_node(self, ray_id: str) -> None:
        """Give back all of a node that is lost, and withdraw the requests for it.

        The other leases of a gang stay: members may run there, and Ray would lend their resources to others.
        """
        requested = [
            pending for pending in self.pending if ray_id in [part.ray_id for part in pending.request.list_parts()]
        ]
        for lease in (*self.held[ray_id], *requested):
            if len(lease.gang) > 1:
                lease.gang.remove(lease)
                self.held[ray_id].remove(lease)
            else:
                self.release(lease)

    def withdraw_node(self, ray_id: str) -> None:
        """Withdraw requests for a node, and those that Ray was about to meet there."""
        for lease in list(self.pending):
            if ray_id in [part.ray_id for part in lease.request.list_parts()] or ray_id in (
                _find_nodes(lease) or ()
            ):
                self.release(lease)

    def release_all(self) -> None:
        """Give back all, and withdraw all requests."""
        while unreleased := [*self.pending, *itertools.chain.from_iterable(self.held.values())]:
            self.release(unreleased[0])


#: Ray does not say why no process starts on a node; it writes their logs there.
IS_FULL = ": is the disk of its temporary directory full?"


class ProbeError(Exception):
    """No process starts in what Ray has reserved on a node; the message says why.

    Attributes:
        ray_id: Ray's id of the node.
    """

    def __init__(self, ray_id: str, reason: str) -> None:
        super().__init__(reason)
        self.ray_id = ray_id


def _request(request: ResourceRequest, name: str, avoided: Collection[str] = ()) -> Lease:
    from ray.util import placement_group

    group = placement_group(
        [bundle for part in request.list_parts() for bundle in part.bundle.as_resources()],
        strategy="PACK" if request.parts else "STRICT_PACK",
        name=f"{name}/{secrets.token_hex(6)}",
        bundle_label_selector=request.make_label_selectors(avoided),
    )
    return Lease(request, group, request.bundle, _start_probes(group, request.bundle))


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
    return lease.request.is_pinned and time.monotonic() - lease.since > _PINNED_S


def _find_nodes(lease: Lease) -> list[str] | None:
    """Ray's id of the node of each of the group's bundles; None: Ray has not reserved them."""
    from ray.util import placement_group_table

    table: Any = placement_group_table(lease.group)
    nodes = table["bundles_to_node_id"]
    return [nodes[number] for number in sorted(nodes)] if table["state"] == "CREATED" else None


def _find_given(lease: Lease) -> list[tuple[str, tuple[str, ...]]] | None:
    """Ray's id of the node, and the GPUs, of each of the group's bundles; None: it is not ready.

    Raises:
        ProbeError: a node on which it was reserved starts no process, as where its temporary directory is full.
    """
    import ray

    if not lease.probes:
        nodes = _find_nodes(lease)
        return None if nodes is None else [(node, ()) for node in nodes]
    if len(ray.wait(lease.probes, num_returns=len(lease.probes), timeout=0)[0]) < len(lease.probes):
        _check_silence(lease)
        return None
    answers: list[Any] = []
    for probe in lease.probes:
        try:
            answers.append(ray.get(probe))
        except ray.exceptions.RayError as error:
            nodes = _find_nodes(lease)
            if nodes is None:  # the node was lost, and Ray looks for another: it is asked again
                lease.probes = _start_probes(lease.group, lease.request.bundle)
                return None
            raise ProbeError(nodes[len(answers)], f"Ray's processes end there at once{IS_FULL}") from error
    return [(node, tuple(gpus)) for node, gpus in answers]


def _check_silence(lease: Lease) -> None:
    """Raise `ProbeError` where a group has been reserved for long and a probe of it has not answered."""
    import ray

    now_s = time.monotonic()
    if now_s - max(lease.since, lease.reserved_at or 0.0) < _PROBE_S or (nodes := _find_nodes(lease)) is None:
        return
    if lease.reserved_at is None:
        lease.reserved_at = now_s
        return
    silent = ray.wait(lease.probes, num_returns=len(lease.probes), timeout=0)[1]
    ray_id = nodes[lease.probes.index(silent[0])]
    raise ProbeError(ray_id, f"Ray has started no process there for {_PROBE_S:g} s{IS_FULL}")


def _divide(lease: Lease, bundles: Sequence[tuple[str, tuple[str, ...]]]) -> list[Lease]:
    """The leases of a group that is ready, one for each of its nodes."""
    by_id: dict[str, Lease] = {}
    remaining = iter(bundles)
    for part in lease.request.list_parts():
        of_part = list(itertools.islice(remaining, max(1, part.bundle.gpus)))
        ray_id = of_part[0][0]
        empty = Lease(lease.request, lease.group, Bundle(0.0, 0.0), since=lease.since, ray_id=ray_id)
        on = by_id.setdefault(ray_id, empty)
        on.bundle = on.bundle.add(part.bundle)
        on.gpus += tuple(gpu for _, gpus in of_part for gpu in gpus)
    leases = list(by_id.values())
    for one in leases:
        one.number = lease.number
        one.gang = leases if len(leases) > 1 else []
    return leases


# -- which leases members use -------------------------------------------------------------------------------------


class Use(NamedTuple):
    """What members take of a node: the ids of GPUs, cores, GiB."""

    devices: frozenset[str | None]
    cpus: float
    memory_gb: float


def list_by_node(placed: Iterable[Placement]) -> Mapping[str, list[tuple[Placement, list[int]]]]:
    """The members on each node, by its name, with their ranks there; a node without members has an empty list."""
    by_node = defaultdict[str, list[tuple[Placement, list[int]]]](list)
    for placement in placed:
        for name, ranks in placement.ranks_by_node.items():
            by_node[name].append((placement, ranks))
    return by_node


def sum_use(placed: Sequence[tuple[Placement, list[int]]], node: Node) -> Use:
    """What members with some of their ranks on a node take of it."""
    needs = [placement.need.take_ranks(len(ranks)) for placement, ranks in placed]
    total = round(node.cpus * UNITS)
    return Use(
        frozenset(placement.devices[rank] for placement, ranks in placed for rank in ranks),
        sum(need.cpus_on(total) for need in needs) / UNITS,
        sum(need.memory for need in needs) / UNITS,
    )


def is_used(lease: Lease, leases: Sequence[Lease], use: Use) -> bool:
    """Whether members need one of a node's leases: its GPUs, or its part of the cores and of the memory."""
    if not use.devices.isdisjoint(lease.devices):
        return True
    others = [other for other in leases if other is not lease]
    return (
        use.cpus > sum(other.cpus for other in others) + _EPSILON
        or use.memory_gb > sum(other.memory_gb for other in others) + _EPSILON
    )
