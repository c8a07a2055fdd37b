"""What a few real steps of a member showed, and what follows from it for packing: pure.

Members of one *shape* (the same network, batch, precision and threads) are measured once. What the user declared
is never replaced by what was measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ensemble.spec import Identity


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What was measured of the members of one shape on one kind of device.

    Attributes:
        shape: what they have in common, as a digest.
        device: "cpu", or the GPU's model.
        members: the ids of those it holds for.
        step_s: seconds of one step over a global batch that lies ready, by number of workers.
        samples_per_s: what a member takes in at that, by number of workers.
        cpus: cores that one worker keeps busy meanwhile, by number of workers.
        gpus: share of its GPU that one worker keeps busy, by number of workers; empty on the CPU.
        memory_gb: most host memory of one worker that it shares with nobody, in GiB, evaluation included.
        gpu_memory_gb: most memory of one worker on its GPU, in GiB; 0 on the CPU.
    """

    shape: str
    device: str
    members: tuple[str, ...]
    step_s: Mapping[int, float]
    samples_per_s: Mapping[int, float]
    cpus: Mapping[int, float]
    gpus: Mapping[int, float] = field(default_factory=dict)
    memory_gb: float
    gpu_memory_gb: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """The fields of a `profile` event: plain JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Profile:
        """What `as_dict` wrote, read back from JSON, in which the numbers of workers have become words."""
        by_width = ("step_s", "samples_per_s", "cpus", "gpus")
        known = {one.name: fields[one.name] for one in dataclasses.fields(cls)}
        for name in by_width:
            known[name] = {int(width): float(value) for width, value in fields[name].items()}
        return cls(**known | {"members": tuple(fields["members"])})


def settled(identity: Identity, profile: Profile | None, workers: int | None = None) -> Identity:
    """The identity with what it left to measurement filled in; without a profile its careful guesses stay.

    Args:
        workers: chosen for one that left it to measurement; None leaves the number that it has.
    """
    chosen = workers if workers is not None and "workers" in identity.auto else identity.workers
    asked: dict[str, Any] = {"workers": chosen}
    if profile is not None:
        width = min(profile.cpus, key=lambda known: (abs(known - chosen), known))
        measured = {"cpus_per_worker": profile.cpus[width], "memory_gb": profile.memory_gb}
        if profile.gpus:
            measured["gpus_per_worker"] = profile.gpus[min(profile.gpus, key=lambda n: (abs(n - chosen), n))]
        asked |= {name: value for name, value in measured.items() if name in identity.auto}
    return dataclasses.replace(identity, **asked)
