"""Requests for what finds no room now, on any node: Ray has a queue for it, and an autoscaler adds nodes.

They are planned with what the nodes offer when they are empty. A member asks for no more than one of them has.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ensemble.executors.ray.request import Bundle, Offer, RequestPart, ResourceRequest
from ensemble.schedule.needs import SLACK, UNITS, Need, compute_need, needs_gpu
from ensemble.schedule.selection import has_labels, is_selected, make_label_selector
from ensemble.spec import Ensemble, Identity
from ensemble.spec.nodes import Selection

MOST_PENDING = 64  # requests beside each other that no node has room for


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


def list_declared(ensemble: Ensemble) -> list[Identity]:
    """The members of a run, as far as they are known before it starts; of a search, trials to request."""
    if ensemble.search is not None:
        return [ensemble.identify(number, {}) for number in range(min(ensemble.search.trials, MOST_PENDING))]
    return [ensemble.identify(number) for number in range(len(ensemble.members or ()))]


def queue_members(
    on_gpus: Sequence[Identity],
    on_cores: Sequence[Identity],
    shapes: Counter[Shape],
    devices: str,
    gone: Sequence[Shape] = (),
    offers: Sequence[Offer] = (),
) -> Counter[ResourceRequest]:
    """At most `MOST_PENDING` requests for any node, for the members that want GPUs and for the others.

    Args:
        gone: nodes with GPUs that were lost: where no other has any, further ones are taken to be like these.
        offers: the nodes: which of them do not fit although their labels do is known to no one else.
    """
    alike = shapes if any(shape.gpus for shape in shapes) else shapes + Counter(gone)
    found = Counter[ResourceRequest]()
    for selection in dict.fromkeys(compute_need(one).selection for one in (*on_gpus, *on_cores)):
        here, there = ([o for o in many if compute_need(o).selection == selection] for many in (on_gpus, on_cores))
        asked = _queue_gpus(here, alike) + _queue_cores(there, shapes, devices)
        found += _select_nodes(asked, selection, offers) if selection else asked
    return _limit_pending(found)


def _select_nodes(
    asked: Counter[ResourceRequest], selection: Selection, offers: Sequence[Offer]
) -> Counter[ResourceRequest]:
    """The requests, to be met by nodes that fit a selection."""
    plain = make_label_selector(selection)
    misfits = [o for o in offers if _is_found(plain, o) and not is_selected(selection, o.node)]
    labels = make_label_selector(selection, [offer.node for offer in misfits])
    left_out = tuple(sorted(offer.ray_id for offer in misfits))
    return Counter(
        {
            each._replace(selections=(selection,), labels=labels, misfits=left_out): count
            for each, count in asked.items()
        }
    )


def _is_found(labels: Selection, offer: Offer) -> bool:
    """Whether Ray takes a node for one with these labels; that of a node with GPUs of several models is of one."""
    return has_labels(labels, offer.node.labels if offer.labels is None else offer.labels)


def _queue_gpus(waiting: Sequence[Identity], shapes: Counter[Shape]) -> Counter[ResourceRequest]:
    """Requests for GPUs of any node; who shares them is decided by first-fit decreasing."""
    needs = Counter(map(compute_need, waiting))
    groups: dict[tuple[int, bool], list[_GpuGroup]] = {}
    for need in sorted(needs, key=lambda need: (need.workers, need.share, need), reverse=True):
        able = [shape for shape in shapes if need.selection in shape.fits]
        usable = [shape for shape in able if shape.gpus >= (1 if need.spans_nodes else need.workers)]
        left, cpus = needs[need], _reduce_guess(need, usable)
        if need.spans_nodes:
            cpus = need.workers * min(_divide_cores(need, shapes, on_gpus=True))
        known = groups.setdefault((need.workers, need.spans_nodes), [])
        for group in known:
            left -= group.add(need, cpus, left)
        # Where no node that could hold it is known, nor how many share one of its GPUs, the first one shows.
        while left and len(known) < (MOST_PENDING if usable else 1):
            known.append(_GpuGroup.of(need.workers, usable))
            left -= known[-1].add(need, cpus, left)
    return Counter(
        _split([group.cpus // group.width] * group.width, group.reserve_memory(), on_gpus=True)
        if spans
        else ResourceRequest(make_bundle(group.cpus, group.reserve_memory(), group.width))
        for (_, spans), known in groups.items()
        for group in known
    )


def _split(cpus: Sequence[int], memory: int, *, on_gpus: bool) -> ResourceRequest:
    """A request for ranks of members, which may be on several nodes: the cores of each, the memory of all."""
    return join_parts([RequestPart(make_bundle(each, memory // len(cpus), int(on_gpus))) for each in cpus])


def _divide_cores(need: Need, shapes: Counter[Shape], *, on_gpus: bool) -> list[int]:
    """The cores of each rank in units: a guess is at most what empty nodes have, those with most ranks first."""
    most = {shape: shape.count_ranks(need, shape.gpus if on_gpus else need.workers) for shape in shapes}
    found: list[int] = []
    for shape in sorted(shapes, key=lambda shape: (most[shape], shape), reverse=True):
        for _ in range(shapes[shape]):
            if here := min(most[shape], need.workers - len(found)):
                found += [need.take_ranks(here).cpus_on(shape.cpus) // here] * here
    rest = min(found, default=need.cpus // need.workers)  # of those that only further nodes could hold
    return sorted(found + [rest] * (need.workers - len(found)), reverse=True)


def _queue_cores(waiting: Sequence[Identity], shapes: Counter[Shape], devices: str) -> Counter[ResourceRequest]:
    """Requests for cores and memory of any node, one a member."""
    found = Counter[ResourceRequest]()
    for need, count in Counter(map(compute_need, waiting)).items():
        usable = [shape for shape in shapes if shape.puts_on_gpu(need, devices) is False]
        able = [shape for shape in usable if shape.holds(need.take_ranks(1) if need.spans_nodes else need)]
        ranks = _divide_cores(need, Counter({shape: shapes[shape] for shape in able}), on_gpus=False)
        cpus = sum(ranks) if need.spans_nodes else _reduce_guess(need, able)
        memory = need.memory or min((shape.memory * cpus // shape.cpus for shape in able), default=0)
        request = (
            _split(ranks, memory, on_gpus=False)
            if need.spans_nodes
            else ResourceRequest(make_bundle(cpus, memory))
        )
        found[request] += count
    return found


def _reduce_guess(need: Need, shapes: Iterable[Shape]) -> int:
    """The cores of a member in units: a guess is at most what some node has that could hold it."""
    return max((need.cpus_on(shape.cpus) for shape in shapes if shape.holds(need)), default=need.cpus)


@dataclass
class _GpuGroup:
    """So many GPUs of one node, each with a rank of each member; amounts in `UNITS`.

    Members that share GPUs take no more than these GPUs' part of any node's cores and memory. One member may take
    more.

    Attributes:
        share: what is left of each GPU.
        cpus, memory: what the members take of the node.
        part_cpus, part_memory: the GPUs' part.
        has_undeclared: whether a member did not declare its memory.
    """

    width: int
    part_cpus: int
    part_memory: int
    share: int = UNITS
    cpus: int = 0
    memory: int = 0
    has_undeclared: bool = False

    @classmethod
    def of(cls, width: int, shapes: Sequence[Shape]) -> _GpuGroup:
        cpus = min((shape.cpus * width // shape.gpus for shape in shapes), default=0)
        return cls(width, cpus, min((shape.memory * width // shape.gpus for shape in shapes), default=0))

    def add(self, need: Need, cpus: int, count: int) -> int:
        """Add up to `count` members that need so many cores each, and return how many."""
        for taken, limit, each in (
            (UNITS - self.share, UNITS, need.share),
            (self.cpus, self.part_cpus, cpus),
            (self.memory, self.part_memory, need.memory),
        ):
            if each:
                count = min(count, max(0, limit + SLACK - taken) // each)
        count = max(count, int(not self.cpus))  # one member alone
        self.share -= count * need.share
        self.cpus, self.memory = self.cpus + count * cpus, self.memory + count * need.memory
        self.has_undeclared |= bool(count and not need.memory)
        return count

    def reserve_memory(self) -> int:
        """The memory to ask for."""
        return max(self.memory, self.part_memory) if self.has_undeclared else self.memory


def _limit_pending(requests: Counter[ResourceRequest]) -> Counter[ResourceRequest]:
    """At most `MOST_PENDING` requests for any node, of each number of GPUs and selection with an equal right."""
    by_width = Counter[tuple[int, tuple[Selection, ...]]]()
    for request, count in requests.items():
        if request.ray_id is None:
            by_width[request.bundle.gpus, request.selections] += count
    allowed, left = Counter[tuple[int, tuple[Selection, ...]]](), MOST_PENDING
    for n, width in enumerate(sorted(by_width, key=by_width.__getitem__)):
        allowed[width] = min(by_width[width], max(1, left // (len(by_width) - n)))
        left -= allowed[width]
    kept = Counter[ResourceRequest]()
    for request, count in requests.items():
        if request.ray_id is None:
            width = request.bundle.gpus, request.selections
            count = min(count, allowed[width])
            allowed[width] -= count
        if count:
            kept[request] = count
    return kept


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
