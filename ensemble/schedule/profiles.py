"""What a few real steps of a member showed, and what follows from it for packing: pure.

Members of one *shape* (the same network, batch, precision and threads) are measured once. What the user declared
is never replaced by what was measured.

A shape is known only where the network is built. Members of one *outline* (the same hyperparameters but for those
that an optimizer or a schedule takes, such as `lr`) have one shape for certain, and that is seen without building
anything: a trial that departs from one already measured in its learning rate alone needs no measurement.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ensemble.schedule.cost_key import outline
from ensemble.schedule.memory_grants import gpu_share, with_margin
from ensemble.schedule.needs import Node
from ensemble.schedule.places import pack
from ensemble.spec import Identity

#: Shares of cores and GPUs are asked for in steps of this: measurements are no finer, two workers that keep a core
#: busy each are to fit on two, and however little its steps do, a process takes something.
SHARE_STEP = 0.05
_BY_WIDTH = ("step_s", "samples_per_s", "cpus", "gpus")
_LISTS = ("members", "outlines")


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What was measured of the members of one shape on one kind of device.

    Attributes:
        shape: what they have in common, as a digest.
        device: "cpu", or the GPU's model.
        members: the ids of those it holds for.
        outlines: the outlines of those it holds for.
        step_s: seconds of one step over a global batch that lies ready, by number of workers.
        samples_per_s: what a member takes in at that, by number of workers.
        cpus: cores that one worker keeps busy meanwhile, by number of workers.
        gpus: share of its GPU that one worker keeps busy, by number of workers; empty on the CPU.
        memory_gb: most host memory of one worker that it shares with nobody, in GiB, evaluation included.
        gpu_memory_gb: most memory of one worker on its GPU, in GiB; 0 on the CPU.
        gpu_size_gb: all the memory that such a GPU has, in GiB; 0 on the CPU.
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
    memory_gb: float
    gpu_memory_gb: float = 0.0
    gpu_size_gb: float = 0.0
    prepare_s: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """The fields of a `profile` event: plain JSON values."""
        return dataclasses.asdict(self) | {name: list(getattr(self, name)) for name in _LISTS}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Profile:
        """What `as_dict` wrote, read back from JSON, in which the numbers of workers have become words."""
        known = {one.name: fields[one.name] for one in dataclasses.fields(cls) if one.name in fields}
        for name in _BY_WIDTH:
            known[name] = {int(width): float(value) for width, value in fields.get(name, {}).items()}
        return cls(**known | {name: tuple(fields.get(name, ())) for name in _LISTS})

    def with_(self, other: Profile) -> Profile:
        """This one and another of the same shape and device together; where both measured, the other counts."""
        merged: dict[str, Any] = {name: {**getattr(self, name), **getattr(other, name)} for name in _BY_WIDTH}
        for name in _LISTS:
            merged[name] = tuple(dict.fromkeys([*getattr(self, name), *getattr(other, name)]))
        for name in ("memory_gb", "gpu_memory_gb", "gpu_size_gb"):
            merged[name] = max(getattr(self, name), getattr(other, name))
        return dataclasses.replace(self, **merged)


def to_measure(
    waiting: Sequence[Identity],
    nodes: Sequence[Node],
    devices: str,
    known: Mapping[str, Profile],
    coming: int = 0,
    crowded: bool = False,
) -> list[Identity]:
    """The waiting members to be measured before they are packed; what would decide nothing is not.

    Nothing is where every node has a fixed number of places; of members that declared all they need; and, unless
    numbers of workers are to be chosen, where all find room at once by their guesses.

    Args:
        known: what was measured, by member.
        coming: how many more like the first of them will come (trials of a search).
        crowded: whether others train already, and these are to find room beside them.
    """
    if all(node.places is not None for node in nodes):
        return []
    gpus = devices != "cpu" and any(node.gpus for node in nodes)
    moot = set() if gpus else {"gpus_per_worker"}
    new = [one for one in waiting if one.member not in known and set(one.auto) - moot]
    if new and known:
        profiles = {id(profile): profile for profile in known.values()}
        outlines = {each for profile in profiles.values() for each in profile.outlines}
        new = [one for one in new if outline(one) not in outlines]
    if not new or crowded or any("workers" in one.auto for one in new):
        return new
    copies = [dataclasses.replace(waiting[0], member=f"coming-{number}") for number in range(coming)]
    everyone = [*waiting, *copies]
    return new if len(pack(everyone, [], nodes, devices)) < len(everyone) else []


def widths(identity: Identity, node: Node, devices: str) -> list[int]:
    """The numbers of workers to measure a member with: its own, or those among which it leaves the choice.

    1, 2, 3, 4, 6, 8, 12, 16 ... as far as the empty node has a GPU for each, or, on the CPU, the cores that each
    asks for (its threads, unless cores are declared); no more than there are samples in a batch.
    """
    if "workers" not in identity.auto:
        return [identity.workers]
    if "cpus_per_worker" in identity.auto:
        identity = dataclasses.replace(identity, cpus_per_worker=float(identity.threads))
    steps = [1] + [w for power in range(1, 12) for w in (2**power, 3 * 2 ** (power - 1))]
    # as if declared: a guess alone would be content with less
    candidates = [dataclasses.replace(identity, workers=w, auto=[]) for w in steps if w <= identity.batch_size]
    room = [one.workers for one in candidates if pack([one], [], [node], devices)]
    return sorted(room) or [1]


def settled(
    identity: Identity, profile: Profile | None, workers: int | None = None, largest_gb: float = math.inf
) -> Identity:
    """The identity with what it left to measurement filled in; without a profile its careful guesses stay.

    Args:
        workers: chosen for one that left it to measurement; None leaves the number that it has.
        largest_gb: memory of the largest node (`largest_gb`); the margin on what was measured asks for no more.
    """
    chosen = workers if workers is not None and "workers" in identity.auto else identity.workers
    asked: dict[str, Any] = {"workers": chosen}
    if profile is not None:
        measured = {
            "cpus_per_worker": _share(profile.cpus, chosen),
            "memory_gb": min(with_margin(profile.memory_gb), _thousandths(largest_gb / chosen)),
        }
        if profile.gpus:
            busy = _share(profile.gpus, chosen)
            measured["gpus_per_worker"] = gpu_share(busy, profile.gpu_memory_gb, profile.gpu_size_gb)
        asked |= {name: value for name, value in measured.items() if name in identity.auto}
    return dataclasses.replace(identity, **asked)


def _thousandths(value: float) -> float:
    return math.floor(1000 * value) / 1000 if math.isfinite(value) else value


def largest_gb(nodes: Sequence[Node]) -> float:
    """The most memory that one of these nodes has; of those with GPUs where there are some."""
    return max(node.memory_gb for node in [node for node in nodes if node.gpus] or nodes) if nodes else math.inf


def _share(known: Mapping[int, float], workers: int) -> float:
    """What was measured with so many workers, or the nearest number of them."""
    nearest = min(known, key=lambda width: (abs(width - workers), width))
    return round(max(1, round(known[nearest] / SHARE_STEP)) * SHARE_STEP, 2)
