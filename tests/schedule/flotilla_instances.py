"""Seeded instances with rates that differ and scale less than linearly."""

from __future__ import annotations

import random

from ensemble.schedule.flotilla import Capacity, RatedMember

SAMPLES = 50_000


def rated(rng: random.Random, number: int, most_workers: int, epochs: int, fixed: bool = False) -> RatedMember:
    """Rates spread over a factor of 16; the efficiency of w workers is 1 / (1 + a(w - 1)), a up to 0.3."""
    alone, loss = 1000 * 2 ** rng.uniform(-2, 2), rng.uniform(0.0, 0.3)
    measured = {w: alone * w / (1 + loss * (w - 1)) for w in range(1, most_workers + 1)}
    workers = rng.randint(1, most_workers) if fixed else None
    return RatedMember(member=f"member-{number}", samples_per_s=measured, epochs=epochs, workers=workers)


def instance(seed: int, most_members: int = 6, most_slots: int = 6) -> tuple[list[RatedMember], Capacity]:
    """3 to 6 members on 3 to 6 slots of one node, or on two nodes of 2 or 3: half with equal epochs."""
    rng = random.Random(seed)
    count = rng.randint(3, most_members)
    nodes = rng.choice([1, 1, 2])
    slots = (rng.randint(3, most_slots),) if nodes == 1 else (rng.randint(2, most_slots // 2),) * 2
    streams = rng.choice([1, 2, count])
    even = rng.random() < 0.5
    listed = [
        rated(rng, number, max(slots), 10 if even else rng.choice([5, 10, 20]), fixed=rng.random() < 0.125)
        for number in range(count)
    ]
    return listed, Capacity(slots=slots, streams=streams)
