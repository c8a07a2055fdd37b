"""From what was measured and observed to the terms that flotillas are planned in: rated members, slots. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from ensemble.schedule.cpu_sharing import Paced
from ensemble.schedule.flotilla import RatedMember, Room, rate
from ensemble.schedule.needs import Node
from ensemble.schedule.profiles import Profile
from ensemble.spec import Identity

STREAMS = 2  # at one time on GPUs: the next flotilla may start while the last members of the one before it end


def own_rate(epoch: Mapping[str, Any]) -> float | None:
    """Samples per second that a member trains at when batches lie ready, from its `epoch` event.

    What it waited for batches was the pace of its stream and not its own, nor was what it waited for a core. None
    where it cannot be said.
    """
    waited_s = (epoch.get("waited_s") or 0.0) + (epoch.get("queued_s") or 0.0)
    busy_s = (epoch.get("train_s") or 0.0) - waited_s
    return epoch["samples"] / busy_s if epoch.get("samples") and busy_s > 0 else None


def rated(
    waiting: Iterable[tuple[Identity, int]],
    profiles: Mapping[str, Profile],
    begun: Container[str] = (),
    slowdown: float = 1.0,
    widest: float = math.inf,
) -> list[RatedMember] | None:
    """Members that wait, each with its epochs left, with the rates that their profiles say.

    One that could not be measured is taken to be as fast as the median of the others.

    Args:
        begun: members that have begun to train: they keep their width.
        slowdown: how much slower members turned out to be than they were measured alone.
        widest: what a node has slots for. A member that is wider (it has more ranks than there are GPUs now, or
            its node is lost) counts as that wide: packing says where it goes.

    Returns:
        None where not even half of them were measured: then there is nothing to plan with.
    """
    known = list(waiting)
    rates = {one.member: profiles[one.member].samples_per_s for one, _ in known if one.member in profiles}
    if 2 * len(rates) < len(known) or not rates:
        return None
    typical = statistics.median(by_width[min(by_width)] / min(by_width) for by_width in rates.values())
    return [
        RatedMember(
            member=identity.member,
            samples_per_s={w: found / slowdown for w, found in rates.get(identity.member, {1: typical}).items()},
            epochs=max(1, epochs),
            workers=(
                int(min(identity.workers, widest))
                if identity.member in begun or not _open(identity, rates)
                else None
            ),
        )
        for identity, epochs in known
    ]


def paced(identity: Identity, profile: Profile, samples: int, begun: bool = False) -> Paced:
    """A member as it was measured, in seconds of an epoch of so many samples; one that began keeps its width."""
    free = "workers" in identity.auto and not begun
    widths = sorted(profile.samples_per_s) if free else [identity.workers]
    return Paced(
        member=identity.member,
        epoch_s={width: samples / rate(profile.samples_per_s, width) for width in widths},
        cpus={width: profile.cpus.get(width, identity.cpus_per_worker) for width in widths},
        open=free,
    )


def _open(identity: Identity, rates: Container[str]) -> bool:
    """Whether its number of workers is to be chosen, and can be."""
    return "workers" in identity.auto and identity.member in rates


def room(nodes: Sequence[Node], waiting: Sequence[Identity], devices: str = "auto") -> Room:
    """What these nodes offer to members like those that wait, in slots.

    A slot is what the median of their workers takes: a share of a GPU on nodes that have some, cores elsewhere. So
    with unequal shares the plan is a good guess of what fits, and packing has the last word.
    """
    on_gpus = devices != "cpu" and any(node.gpus for node in nodes)
    share = statistics.median(one.gpus_per_worker if on_gpus else one.cpus_per_worker for one in waiting)
    per_gpu = max(1, int(1 / share + 1e-9)) if share > 0 else len(waiting)
    if on_gpus:
        slots = tuple(len(node.gpus) * per_gpu for node in nodes)
        return Room(slots=slots, widest=max(len(node.gpus) for node in nodes), streams=STREAMS)
    # a second stream would take the cores that members are packed on
    return Room(slots=tuple(max(1, int(node.cpus / share + 1e-9)) for node in nodes))
