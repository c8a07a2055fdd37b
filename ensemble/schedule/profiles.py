"""Turns measurements of members into what packing and flotilla planning need: resource shares, rates and slots.

Members of one *shape* (network, batch size, precision, threads) are measured once; those with one cost key
certainly have one shape. Values that the user declared are never replaced by measured ones.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ensemble.schedule.cpu_sharing import LEAST_SHARE, CpuSharing, MemberRate, share_cores
from ensemble.schedule.flotilla.model import Capacity, RatedMember, interpolate_rate
from ensemble.schedule.memory_grants import add_margin, compute_gpu_share
from ensemble.schedule.needs import Node, compute_need, max_node_memory_gb, uses_gpus
from ensemble.schedule.packing import FreeCapacity, pack
from ensemble.spec import Identity
from ensemble.spec.identity import compute_cost_key

#: Shares of cores and GPUs are rounded to multiples of this, and are at least this. Measurements are no more
#: precise, and with unrounded shares two workers that keep one core busy each would not always fit on two cores.
SHARE_STEP = 0.05
#: Streams at one time on GPUs: a flotilla may start while the last members of the one before it end.
STREAMS = 2
_BY_WIDTH = ("step_s", "samples_per_s", "cpus", "gpus", "spread_samples_per_s")
#: Two nodes are better than one where they are faster by this factor at least: they hold two nodes' resources.
_SPREAD_GAIN = 1.1
_LISTS = ("members", "outlines")
_MEASURING_S, _MEASURING_SHARE = 0.5, 0.03  # that a small member takes, and at most of its training


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Measurements of the members of one shape on one kind of device.

    Attributes:
        shape: a digest of what determines the cost of a step.
        device: "cpu", or the GPU's model.
        members: ids of the members with this shape.
        outlines: cost keys of these members.
        step_s: seconds of one step over a global batch that is ready, by number of workers.
        samples_per_s: samples per second at that step time, by number of workers.
        cpus: cores that one worker keeps busy, by number of workers.
        gpus: share of its GPU that one worker keeps busy, by number of workers; empty on the CPU.
        spread_samples_per_s: as `samples_per_s`, with the workers on two nodes; empty where that is not measured.
        memory_gb: peak private host memory of one worker in GiB, evaluation included.
        gpu_memory_gb: peak memory of one worker on its GPU, in GiB; 0 on the CPU.
        gpu_size_gb: memory of such a GPU, in GiB; 0 on the CPU.
        prepare_s: CPU-seconds of preparing one training sample.
    """

    shape: str
    device: str
    members: tuple[str, ...]
    outlines: tuple[str, ...] = ()
    step_s: Mapping[int, float]
    samples_per_s: Mapping[int, float]
    cpus: Mapping[int, float]
    gpus: Mapping[int, float] = field(default_factory=dict)
    spread_samples_per_s: Mapping[int, float] = field(default_factory=dict)
    memory_gb: float
    gpu_memory_gb: float = 0.0
    gpu_size_gb: float = 0.0
    prepare_s: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """The fields of a `profile` event: plain JSON values."""
        return dataclasses.asdict(self) | {name: list(getattr(self, name)) for name in _LISTS}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Profile:
        """The inverse of `as_dict`, from JSON, where the numbers of workers have become strings."""
        values = {one.name: fields[one.name] for one in dataclasses.fields(cls) if one.name in fields}
        for name in _BY_WIDTH:
            values[name] = {int(width): float(value) for width, value in fields.get(name, {}).items()}
        return cls(**values | {name: tuple(fields.get(name, ())) for name in _LISTS})

    def merge(self, other: Profile) -> Profile:
        """Combine with another profile of the same shape and device; its values win where both measured."""
        merged: dict[str, Any] = {name: {**getattr(self, name), **getattr(other, name)} for name in _BY_WIDTH}
        for name in _LISTS:
            merged[name] = tuple(dict.fromkeys([*getattr(self, name), *getattr(other, name)]))
        for name in ("memory_gb", "gpu_memory_gb", "gpu_size_gb"):
            merged[name] = max(getattr(self, name), getattr(other, name))
        return dataclasses.replace(self, **merged)


def select_unmeasured(
    waiting: Sequence[Identity],
    nodes: Sequence[Node],
    devices: str,
    known: Mapping[str, Profile],
    coming: int = 0,
    crowded: bool = False,
    samples: int = 0,
) -> list[Identity]:
    """The waiting members to measure before they are packed; only those whose measurement affects a decision.

    Members that declared all their needs are not measured. No member is measured if every node has a fixed number
    of places, if all members fit at once by their guesses and no number of workers is to be chosen, or if others
    were measured by which it costs too much (trials of a search over small models).

    Args:
        known: profiles by member.
        coming: number of further members like the first one (trials of a search).
        crowded: whether other members train already.
        samples: of an epoch; 0 if unknown.
    """
    if all(node.places is not None for node in nodes):
        return []
    gpus = devices != "cpu" and any(node.gpus for node in nodes)
    irrelevant = set() if gpus else {"gpus_per_worker"}
    new = [
        one
        for one in waiting
        if one.member not in known and (set(one.auto) - irrelevant or is_spread_open(one, nodes))
    ]
    if new and known:
        profiles = {id(profile): profile for profile in known.values()}
        outlines = {outline for profile in profiles.values() for outline in profile.outlines}
        new = [one for one in new if compute_cost_key(one) not in outlines]
        if not gpus:
            new = [one for one in new if not _costs_too_much(one, list(profiles.values()), nodes, samples)]
    if not new or crowded or any("workers" in one.auto or is_spread_open(one, nodes) for one in new):
        return new
    copies = [dataclasses.replace(waiting[0], member=f"coming-{number}") for number in range(coming)]
    everyone = [*waiting, *copies]
    return new if len(pack(everyone, [], nodes, devices)) < len(everyone) else []


def _costs_too_much(one: Identity, known: Sequence[Profile], nodes: Sequence[Node], samples: int) -> bool:
    """Whether measuring a member takes too much of its time on CPUs, by the slowest and largest of those known.

    Memory is not to bound how many are packed: nodes have four times that of the largest for each core.
    """
    rate = min(min(profile.samples_per_s.values(), default=0.0) for profile in known)
    most_gb = 4 * max(profile.memory_gb for profile in known)
    is_short = 0 < one.epochs * samples * _MEASURING_SHARE < rate * _MEASURING_S
    is_narrow = "workers" not in one.auto and one.workers == 1
    return is_narrow and is_short and all(most_gb * node.cpus <= node.memory_gb for node in nodes)


def is_spread_open(identity: Identity, nodes: Sequence[Node]) -> bool:
    """Whether it is to be measured if a member is faster on two nodes than on one."""
    is_wide = identity.workers > 1 and "workers" not in identity.auto
    return is_wide and identity.span_nodes == "auto" and len(nodes) > 1


def list_candidate_widths(identity: Identity, node: Node, devices: str) -> list[int]:
    """The numbers of workers to measure a member with: its own, or the candidates if it leaves the choice.

    Candidates are 1, 2, 3, 4, 6, 8, 12, 16 ... as far as the empty node has a GPU for each worker, or, on the CPU,
    the cores of each (its threads, unless cores are declared), and at most one worker per sample of a batch.
    """
    if "workers" not in identity.auto:
        return [identity.workers]
    if "cpus_per_worker" in identity.auto:
        identity = dataclasses.replace(identity, cpus_per_worker=float(identity.threads))
    steps = [1] + [w for power in range(1, 12) for w in (2**power, 3 * 2 ** (power - 1))]
    # no guessed cores: packing reduces these to what the node has; where there are GPUs, one for each worker
    auto = [name for name in identity.auto if name == "gpus_per_worker" and not node.gpus]
    candidates = [dataclasses.replace(identity, workers=w, auto=auto) for w in steps if w <= identity.batch_size]
    room = [one.workers for one in candidates if pack([one], [], [node], devices)]
    return sorted(room) or [1]


class MemoryCap:
    """Bounds measured memory, so that a member has a place on the nodes when they are empty."""

    def __init__(self, nodes: Sequence[Node], devices: str) -> None:
        self._most_gb = max_node_memory_gb(nodes)
        self._has_place = functools.cache(
            lambda need: FreeCapacity(nodes, devices).count_if_empty({need: 1}, {}, 1) > 0
        )

    def apply(self, identity: Identity, memory_gb: float) -> float:
        """The memory of each rank in GiB, at most `memory_gb`.

        All ranks share the largest node; where they may be on several nodes, as few of them as leave the member a
        place.
        """
        if math.isinf(self._most_gb):
            return memory_gb
        last = self._share(identity.workers)
        if memory_gb <= last or not compute_need(identity).spans_nodes:
            return min(memory_gb, last)
        for ranks in range(1, identity.workers):
            capped = min(memory_gb, self._share(ranks))
            if self._has_place(compute_need(dataclasses.replace(identity, memory_gb=capped))):
                return capped
        return last

    def _share(self, ranks: int) -> float:
        return math.floor(1000 * (self._most_gb / ranks)) / 1000


def apply_profile(
    identity: Identity, profile: Profile | None, workers: int | None = None, cap: MemoryCap | None = None
) -> Identity:
    """The identity with measured values where it left them to measurement; without a profile its guesses stay.

    Args:
        workers: number chosen for a member that left it to measurement; None keeps its number.
        cap: of the measured memory; None: it has no bound.
    """
    chosen = workers if workers is not None and "workers" in identity.auto else identity.workers
    changes: dict[str, Any] = {"workers": chosen}
    if profile is not None:
        measured = {
            "cpus_per_worker": _get_nearest_share(profile.cpus, chosen),
            "memory_gb": add_margin(profile.memory_gb),
        }
        if profile.gpus:
            busy = _get_nearest_share(profile.gpus, chosen)
            measured["gpus_per_worker"] = compute_gpu_share(busy, profile.gpu_memory_gb, profile.gpu_size_gb)
        changes |= {name: value for name, value in measured.items() if name in identity.auto}
        if identity.span_nodes == "auto" and chosen in profile.spread_samples_per_s:
            gain = profile.spread_samples_per_s[chosen] / profile.samples_per_s.get(chosen, math.inf)
            changes["span_nodes"] = "spread" if gain >= _SPREAD_GAIN else True
    filled = dataclasses.replace(identity, **changes)
    if cap is None or "memory_gb" not in changes:
        return filled
    return dataclasses.replace(filled, memory_gb=cap.apply(filled, changes["memory_gb"]))


def _get_nearest_share(known: Mapping[int, float], workers: int) -> float:
    """The share measured with the nearest number of workers, rounded to `SHARE_STEP`."""
    nearest = min(known, key=lambda width: (abs(width - workers), width))
    return round(max(1, round(known[nearest] / SHARE_STEP)) * SHARE_STEP, 2)


def compute_own_rate(epoch: Mapping[str, Any]) -> float | None:
    """Samples per second of a member when batches are ready, from its `epoch` event; None if unknown.

    Time in which it waited for batches (the pace of its stream) or for a core does not count.
    """
    waited_s = (epoch.get("waited_s") or 0.0) + (epoch.get("queued_s") or 0.0)
    busy_s = (epoch.get("train_s") or 0.0) - waited_s
    return epoch["samples"] / busy_s if epoch.get("samples") and busy_s > 0 else None


def rate_members(
    waiting: Iterable[tuple[Identity, int]],
    profiles: Mapping[str, Profile],
    begun: Container[str] = (),
    slowdown: float = 1.0,
    widest: float = math.inf,
) -> list[RatedMember] | None:
    """Waiting members, each with its epochs left and the rates of its profile.

    A member without a profile is taken to be as fast as the median of the others.

    Args:
        begun: members that have started to train; they keep their width.
        slowdown: factor by which members are slower than they were measured alone.
        widest: what a node has slots for. A member that is wider (it has more ranks than there are GPUs now, or
            its node is lost) counts as that wide: packing says where it goes.

    Returns:
        None if less than half of them were measured.
    """
    members = list(waiting)
    rates = {one.member: profiles[one.member].samples_per_s for one, _ in members if one.member in profiles}
    if 2 * len(rates) < len(members) or not rates:
        return None
    typical = statistics.median(by_width[min(by_width)] / min(by_width) for by_width in rates.values())
    return [
        RatedMember(
            member=identity.member,
            samples_per_s={w: rate / slowdown for w, rate in rates.get(identity.member, {1: typical}).items()},
            epochs=max(1, epochs),
            workers=(
                None
                if "workers" in identity.auto and identity.member in rates and identity.member not in begun
                else int(min(identity.workers, widest))
            ),
        )
        for identity, epochs in members
    ]


def rate_member(identity: Identity, profile: Profile, samples: int, begun: bool = False) -> MemberRate:
    """The measured seconds of an epoch of `samples` samples; a member that has started keeps its width."""
    free = "workers" in identity.auto and not begun
    widths = sorted(profile.samples_per_s) if free else [identity.workers]
    return MemberRate(
        member=identity.member,
        epoch_s={width: samples / interpolate_rate(profile.samples_per_s, width) for width in widths},
        cpus={width: profile.cpus.get(width, identity.cpus_per_worker) for width in widths},
        has_open_width=free,
    )


def plan_core_shares(
    members: Sequence[tuple[Identity, Profile | None]],
    samples: int,
    *,
    cores: float,
    widest: int,
    begun: Container[str] = (),
) -> CpuSharing | None:
    """Divide the cores so that members that train at one time have the same epoch time; None: none was measured.

    Args:
        samples: of an epoch.
        cores: that they have together.
        widest: maximum number of workers of one member.
        begun: members that keep their width.
    """
    measured = [profile for _, profile in members if profile is not None]
    if not measured:
        return None
    # a member that could not be measured is assumed to be as slow as the slowest
    slowest = min(measured, key=lambda one: min(one.samples_per_s.values()))
    rates = [rate_member(one, profile or slowest, samples, one.member in begun) for one, profile in members]
    prepare_s = max((profile or slowest).prepare_s for _, profile in members) * samples
    return share_cores(rates, cores=max(LEAST_SHARE, cores), widest=widest, prepare_s=prepare_s)


def estimate_capacity(nodes: Sequence[Node], waiting: Sequence[Identity], devices: str = "auto") -> Capacity:
    """Convert nodes to slots for members like those that wait.

    A slot is what the median of their workers takes: a share of a GPU on nodes with GPUs, cores elsewhere, and
    where no member uses GPUs. With unequal shares the plan is an estimate, and packing decides what fits.
    """
    using = [one for one in waiting if uses_gpus(one, devices)]
    on_gpus = bool(using) and any(node.gpus for node in nodes)
    shares = [one.gpus_per_worker for one in using] if on_gpus else [one.cpus_per_worker for one in waiting]
    share = statistics.median(shares)
    per_gpu = max(1, int(1 / share + 1e-9)) if share > 0 else len(waiting)
    if on_gpus:
        slots = tuple(len(node.gpus) * per_gpu for node in nodes)
        return Capacity(slots=slots, widest=max(node.physical_gpus for node in nodes), streams=STREAMS)
    # a second stream would take the cores that members are packed on
    return Capacity(slots=tuple(max(1, int(node.cpus / share + 1e-9)) for node in nodes))
