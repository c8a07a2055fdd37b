"""What a chaos run does: members, feeders and faults, drawn from a seed. Pure: the same seed, the same plan."""

from __future__ import annotations

import functools
import random
import time
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from core_pipes import noise

from pipelines import Pipeline, sources
from pipelines.order.epoch_order import steps_per_epoch
from pipelines.order.stream import min_capacity

Kind = Literal["plain", "noise", "skip"]
What = Literal["kill member", "stop member", "kill worker", "stop worker", "kill feeder", "stop feeder"]
BAD = frozenset({3, 13, 14, 15, 16, 17, 30})  # records that cannot be prepared, in `skip` pipelines


@dataclass(frozen=True, kw_only=True)
class Member:
    """A consumer, of one process for each rank.

    Attributes:
        epochs: stream epochs that it reads; where `boundary`, as many from the next boundary on.
        stream: number of the feeder that it attaches to.
        join_at: it comes when that many batches have been read, by all together.
        leave_after: batches after which each rank goes, with (`close`) or without (`exit`) a word.
        checkpoint_every: batches; from the last such point it is started again when one of its ranks dies.
        pause_s: how long it trains on a batch, while the batch has to stay what it is.
        spoil: it overwrites its batches in place.
        validate: after each epoch it reads the resident set, over which it writes, too.
    """

    name: str
    batch_size: int
    world: int
    epochs: tuple[int, int]
    stream: int
    boundary: bool
    drop_last: bool
    join_at: int
    leave_after: int | None
    leave: Literal["close", "exit"]
    checkpoint_every: int
    pause_s: float
    spoil: bool
    validate: bool


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that is done to somebody, `delay_s` after `at` batches have been read by all together.

    Attributes:
        whom: number of the member or of the stream whose feeder, or whose feeder's worker, is meant.
        which: of its ranks or workers, modulo how many there are.
        seconds: how long it is stopped; how long a feeder stays away.
    """

    at: int
    delay_s: float
    what: What
    whom: int
    which: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One chaos run. `feeders` is the number of streams; a late feeder comes after its members. `poison`, `policy`
    and `stall_limit_s` are the feeders'."""

    seed: int
    kind: Kind
    n: int
    slow_s: float
    capacity: int
    workers: int
    threads: bool
    cache: Literal["memory", "disk"] | None
    feeders: int
    late_feeder: bool
    gate: bool
    poison: bool
    policy: Literal["wait", "detach"]
    stall_limit_s: float
    members: tuple[Member, ...]
    faults: tuple[Fault, ...]

    def pipeline(self) -> Pipeline:
        """The pipeline that every process builds for itself."""
        return pipeline(self.kind, self.n, self.slow_s)

    def still(self) -> Pipeline:
        """The pipeline of the resident set."""
        return Pipeline(data(29), id="still", shuffle=False)


def data(n: int) -> Any:
    """Rows that are views of the ring (6912 bytes, a multiple of 64), that sometimes are, and that never are."""
    rng = np.random.default_rng(n)
    return sources.arrays(
        id=f"chaos {n}",
        image=rng.random((n, 3, 24, 24), dtype=np.float32),
        mask=rng.integers(0, 255, (n, 1000), dtype=np.uint8),
        label=np.arange(n),
    )


def refuse_bad(sample: dict[str, Any]) -> dict[str, Any]:
    if int(sample["label"]) in BAD:
        raise ValueError("a bad record")
    return sample


def halved(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "image": sample["image"] / 2}


def slowly(sample: dict[str, Any], *, seconds: float) -> dict[str, Any]:
    time.sleep(seconds)
    return sample


def pipeline(kind: Kind, n: int, slow_s: float = 0.0) -> Pipeline:
    """A pipeline; how slow it is changes no sample."""
    made = Pipeline(data(n), seed=n, on_error="skip" if kind == "skip" else "raise", max_skipped=1.0)
    made = made.map(refuse_bad if kind == "skip" else halved)
    if kind != "plain":
        made = made.map(noise)
    return made.map(functools.partial(slowly, seconds=slow_s)) if slow_s else made


def draw(seed: int) -> Plan:
    """The plan of a seed."""
    dice = random.Random(seed)
    n = dice.choice([48, 77, 120])
    feeders = dice.choice([1, 1, 1, 2])
    members = tuple(_member(dice, number, n, feeders) for number in range(dice.randint(2, 4)))
    largest = min(n, max(member.batch_size for member in members))
    capacity = min_capacity(largest) + dice.choice([0, 1, 7, 40, 150])
    total = sum(_batches(member, n) for member in members)
    at = sorted(dice.randrange(1, total) for _ in range(dice.randint(3, 6)))
    return Plan(
        seed=seed,
        kind=dice.choice(["plain", "noise", "noise", "skip"]),
        n=n,
        slow_s=dice.choice([0.0, 0.001, 0.003]),
        # In one of a multiple of 16 the images' column has whole pages, and is mapped twice in a row.
        capacity=(capacity + 15) // 16 * 16 if dice.random() < 0.5 else capacity,
        workers=dice.choice([1, 1, 2]),
        threads=dice.random() < 0.3,
        cache=dice.choice([None, None, "memory", "disk"]),
        feeders=feeders,
        late_feeder=dice.random() < 0.15,
        gate=dice.random() < 0.5,
        poison=dice.random() < 0.6,
        policy=dice.choice(["wait", "wait", "detach"]),
        stall_limit_s=dice.choice([0.02, 0.1, 60.0, 60.0]),
        members=members,
        faults=tuple(_fault(dice, when, len(members), feeders) for when in at),
    )


def _member(dice: random.Random, number: int, n: int, feeders: int) -> Member:
    """The first is there from the start and stays to the end, so that every fault finds a run."""
    world = dice.choice([1, 1, 1, 2, 3])
    start = dice.choice([0, 0, 0, 1, 2]) if number else 0
    boundary = bool(number) and world == 1 and dice.random() < 0.3
    return Member(
        name=f"member-{number}",
        batch_size=dice.choice([2, 5, 8, 13, 16, 25, n + 3]) if number else dice.choice([5, 8, 13]),
        world=world,
        epochs=(start, start + dice.randint(1, 4) if number else 5),
        stream=dice.randrange(feeders) if number else 0,
        boundary=boundary,
        drop_last=dice.random() < 0.2,
        join_at=dice.choice([0, 0, 0, 5, 20]) if number else 0,
        leave_after=dice.randint(1, 12) if number and dice.random() < 0.25 else None,
        leave=dice.choice(["close", "exit"]),
        checkpoint_every=dice.choice([1, 3, 7]),
        pause_s=dice.choice([0.0, 0.002, 0.01]) if number else dice.choice([0.004, 0.008]),
        spoil=dice.random() < 0.5,
        validate=dice.random() < 0.3,
    )


def _batches(member: Member, n: int) -> int:
    steps = steps_per_epoch(n, member.batch_size, drop_last=member.drop_last)
    each = steps * (member.epochs[1] - member.epochs[0])
    return member.world * (each if member.leave_after is None else min(each, member.leave_after))


def _fault(dice: random.Random, at: int, members: int, feeders: int) -> Fault:
    # What happens often in a long run is drawn often.
    kinds: list[What] = ["kill member", "kill member", "stop member", "kill worker", "kill worker"]
    what: What = dice.choice([*kinds, "stop worker", "kill feeder", "kill feeder", "stop feeder"])
    return Fault(
        at=at,
        delay_s=dice.choice([0.0, dice.uniform(0.0, 0.02)]),
        what=what,
        whom=dice.randrange(members if what.endswith("member") else feeders),
        which=dice.randrange(6),
        seconds=dice.choice([0.0, dice.uniform(0.0, 0.3)]),
    )
