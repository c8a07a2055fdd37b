"""What a node has free, the members that are planned there, and the requests that follow; all in `UNITS`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ensemble.executors.ray.request import Bundle, Offer, RequestPart, ResourceRequest
from ensemble.schedule.needs import SLACK, UNITS, Need, Node, Placement, needs_gpu
from ensemble.schedule.selection import is_selected
from ensemble.spec import Identity
from ensemble.spec.nodes import Selection

_BYTE = 2**30 / UNITS  # of a unit of memory
_PARTS = 8  # of a node's cores


class Shape(NamedTuple):
    """What the empty node offers, cores and memory in `UNITS`, and which selections of nodes it fits."""

    cpus: int
    memory: int
    gpus: int
    fits: tuple[Selection, ...] = ((),)

    def holds(self, need: Need) -> bool:
        if need.selection not in self.fits:
            return False
        return need.cpus_on(self.cpus) <= self.cpus + SLACK and need.memory <= self.memory + SLACK

    def count_ranks(self, need: Need, most: int) -> int:
        """How many ranks of one member, `most` at the most, it holds."""
        return next((n for n in range(min(most, need.workers), 0, -1) if self.holds(need.take_ranks(n))), 0)

    def puts_on_gpu(self, need: Need, devices: str) -> bool | None:
        """Whether a member trains on GPUs there, as `ensemble.schedule.packing` decides; None: it is refused."""
        if needs_gpu(need, devices):
            return True if self.gpus >= need.workers else None
        return devices != "cpu" and not need.cpu_only and self.gpus >= need.workers


def is_width_open(identity: Identity) -> bool:
    """Whether a member's number of workers is still to be chosen: it can use whatever a node has."""
    return "workers" in identity.auto and identity.workers == 1


class PlannedNode:
    """A node: what is free of it, cores and memory in `UNITS`, and the members that are planned there."""

    def __init__(self, offer: Offer, devices: str, selections: Sequence[Selection]) -> None:
        self.ray_id, free = offer.ray_id, offer.free
        self.node = dataclasses.replace(offer.node.select_gpus(lambda i: devices != "cpu"), name=offer.ray_id)
        self.shape = make_shape(self.node, selections)
        self.cpus = _clip(round(free.get("CPU", 0.0) * UNITS), self.shape.cpus)
        self.memory = _clip(round(free.get("memory", 0.0) / _BYTE), self.shape.memory)
        self.gpus = _clip(int(free.get("GPU", 0.0)), self.shape.gpus)
        self.placed: list[Placement] = []

    def make_empty(self, number: int, gpus: int) -> PlannedNode:
        """A further node like this one, with nobody on it; or some GPUs of it, with their part of the rest."""
        node, part = self.node, 1.0
        if gpus:
            node, part = node.select_gpus(lambda i: i < gpus), gpus / self.shape.gpus
        node = dataclasses.replace(node, cpus=node.cpus * part, memory_gb=node.memory_gb * part)
        free = {"CPU": node.cpus, "memory": node.memory_gb * 2**30, "GPU": float(gpus)}
        return PlannedNode(Offer(f"{self.ray_id}/{number}", node, free), "cuda", self.shape.fits)

    def describe_free_gpus(self) -> Node:
        """The node without the GPUs that others hold."""
        return self.node.select_gpus(lambda i: i < self.gpus)

    def describe_taken(self, example: Identity) -> Placement:
        """The cores and memory that are not free, as a member."""
        cpus, memory_gb = (self.shape.cpus - self.cpus) / UNITS, (self.shape.memory - self.memory) / UNITS
        other = dataclasses.replace(example, workers=1, cpus_per_worker=cpus, memory_gb=memory_gb, auto=[])
        return Placement(other, self.ray_id, (None,))

    def request_placed(self) -> list[ResourceRequest]:
        """Requests for the members planned here, a few for those on the CPU; what they take is free no more.

        A request is given back as a whole: one for all of a node could be shared with no other run.
        """
        on_cpu = [placement for placement in self.placed if placement.devices[0] is None]
        groups = [(frozenset[str | None](), chunk) for chunk in self._divide(on_cpu)]
        groups += _group_by_gpus(placement for placement in self.placed if placement.devices[0] is not None)
        self.memory -= sum(placement.need.memory for placement in self.placed)
        return [self._request(placements, len(gpus)) for gpus, placements in groups]

    def _divide(self, on_cpu: Iterable[Placement]) -> list[list[Placement]]:
        """Members on the CPU in groups that take an `_PARTS`-th of the cores or little more."""
        chunks, taken = list[list[Placement]](), 0
        for placement in on_cpu:
            if not chunks or taken * _PARTS >= self.shape.cpus:
                chunks, taken = [*chunks, []], 0
            chunks[-1].append(placement)
            taken += placement.need.cpus_on(self.shape.cpus)
        return chunks

    def _request(self, placements: Sequence[Placement], gpus: int) -> ResourceRequest:
        """A request for members; those that did not declare their memory get a part of what nobody declared."""
        total = self.shape.cpus
        cpus, memory = (
            sum(placement.need.cpus_on(total) for placement in placements),
            sum(p.need.memory for p in placements),
        )
        undeclared = sum(placement.need.cpus_on(total) for placement in placements if not placement.need.memory)
        part = self.shape.memory * gpus // self.shape.gpus if gpus else self.shape.memory * undeclared // total
        more = _clip(part - memory if gpus else part, self.memory) if undeclared else 0
        self.cpus, self.memory, self.gpus = self.cpus - cpus, self.memory - more, self.gpus - gpus
        bundle, selections = (
            make_bundle(cpus, memory + more, gpus),
            {placement.need.selection for placement in placements},
        )
        return ResourceRequest(bundle, self.ray_id, selections=tuple(sorted(selections)))

    def request_ranks(self, placement: Placement, ranks: int) -> RequestPart:
        """A part for so many ranks of a member, with a GPU each where it trains on GPUs."""
        need, gpus = placement.need.take_ranks(ranks), ranks * (placement.devices[0] is not None)
        cpus = need.cpus_on(self.shape.cpus)
        memory = need.memory or min(self.shape.memory * cpus // max(1, self.shape.cpus), max(0, self.memory))
        self.cpus, self.memory, self.gpus = self.cpus - cpus, self.memory - memory, self.gpus - gpus
        return RequestPart(make_bundle(cpus, memory, gpus), self.ray_id)

    def request_gpu(self, cpus: int, selections: Iterable[Selection]) -> ResourceRequest | None:
        """A request for one more GPU with so many cores, or with its part of them; None: that is not free."""
        if not self.gpus or cpus > self.cpus + SLACK:
            return None
        cpus = min(max(cpus, self.shape.cpus // self.shape.gpus), max(cpus, self.cpus // self.gpus))
        memory = min(self.shape.memory // self.shape.gpus, max(0, self.memory) // self.gpus)
        self.cpus, self.memory, self.gpus = self.cpus - cpus, self.memory - memory, self.gpus - 1
        return self._request_rest(make_bundle(cpus, memory, 1), selections)

    def is_usable(self, needs: Iterable[Need]) -> bool:
        """Whether one of these members on the CPU could use the cores that are left."""
        needs = [need for need in needs if need.selection in self.shape.fits]
        here = {placement.need for placement in self.placed if is_width_open(placement.identity)}
        has_room = any(need in here or need.cpus_on(self.shape.cpus) <= self.cpus for need in needs)
        return has_room and not self.shape.gpus and self.cpus > SLACK

    def request_cores(self, selections: Iterable[Selection]) -> ResourceRequest:
        """A request for all cores and memory that are left."""
        cpus, memory, self.cpus, self.memory = self.cpus, max(0, self.memory), 0, 0
        return self._request_rest(make_bundle(cpus, memory), selections)

    def _request_rest(self, bundle: Bundle, selections: Iterable[Selection]) -> ResourceRequest:
        """A request for any member of some selections that fits here."""
        fitting = set(selections).intersection(self.shape.fits)
        return ResourceRequest(bundle, self.ray_id, selections=tuple(sorted(fitting)))


def make_shape(node: Node, selections: Iterable[Selection]) -> Shape:
    fits = tuple(selection for selection in selections if is_selected(selection, node))
    return Shape(round(node.cpus * UNITS), round(node.memory_gb * UNITS), len(node.gpus), fits)


def _group_by_gpus(
    placements: Iterable[Placement],
) -> list[tuple[frozenset[str | None], list[Placement]]]:
    """Sets of GPUs that no member joins to others, each with its members."""
    groups: list[tuple[frozenset[str | None], list[Placement]]] = []
    for placement in placements:
        gpus, members, others = frozenset(placement.devices), [placement], []
        for group in groups:
            if gpus & group[0]:
                gpus, members = gpus | group[0], group[1] + members
            else:
                others.append(group)
        groups = [*others, (gpus, members)]
    return groups


def _clip(amount: int, most: int) -> int:
    return max(0, min(amount, most))


def join_parts(parts: Sequence[RequestPart]) -> ResourceRequest:
    """A request for all parts together."""
    bundle = functools.reduce(Bundle.add, (part.bundle for part in parts))
    return (
        ResourceRequest(bundle, parts[0].ray_id)
        if len(parts) == 1
        else ResourceRequest(bundle, None, tuple(parts))
    )


def make_bundle(cpus: int, memory: int, gpus: int = 0) -> Bundle:
    """A bundle of cores and memory in `UNITS`, and of whole GPUs."""
    return Bundle(cpus / UNITS, memory / UNITS, gpus)
