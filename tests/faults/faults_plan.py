"""A plan of what goes wrong in one run, drawn from a seed: pure."""

from __future__ import annotations

import random
from dataclasses import dataclass

#: Member i is this wide in every plan, so that one undisturbed run tells the weights that it must end with.
WIDTHS = (1, 2, 1, 1, 1)
EPOCHS = 8

WORKERS = ("kill worker", "kill worker", "kill rank", "stop worker")
OTHERS = ("kill feeder", "stop feeder", "kill fork server", "kill driver", "end driver", "interrupt driver")
LOCAL = WORKERS + OTHERS
RAY = (*LOCAL, "kill agent", "kill node", "kill node")


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong.

    Attributes:
        what: a verb and whom it befalls. "end" is SIGTERM, "interrupt" SIGINT, "stop" SIGSTOP for a while.
        at: how many epochs all members together have told of when it is due; -1: counted from the driver's start.
        delay_s: how long after that.
        which: of several that it may befall, as a share of them.
        seconds: for how long who is stopped stands still.
    """

    what: str
    at: int
    delay_s: float
    which: float
    seconds: float


@dataclass(frozen=True)
class Plan:
    """One run and its faults.

    Attributes:
        executor: "local" or "ray".
        nodes: Ray's nodes; 1 for local.
        members: how many, of `WIDTHS`.
        sharing, stall_policy: as of an Ensemble.
        capacity: of the ring; a small one lets who stands still keep the others waiting, or be detached.
        step_s: what a step takes at least.
    """

    seed: int
    executor: str
    nodes: int
    members: int
    sharing: str
    stall_policy: str
    capacity: int
    step_s: float
    faults: tuple[Fault, ...]

    @property
    def widths(self) -> tuple[int, ...]:
        return WIDTHS[: self.members]


def draw(seed: int) -> Plan:
    """The plan of a seed; even ones are on this machine alone, odd ones on several nodes."""
    rng = random.Random(seed)
    executor = ("local", "ray")[seed % 2]
    nodes = rng.choice((2, 3)) if executor == "ray" else 1
    members = rng.choice((3, 4, 5))
    total = members * EPOCHS
    faults: list[Fault] = []
    for _ in range(rng.choice((2, 3, 3, 4))):
        what = rng.choice(RAY if executor == "ray" else LOCAL)
        if what == "kill node" and any(fault.what == what for fault in faults):
            what = "kill worker"
        early = what.endswith("driver") and rng.random() < 0.25
        at = -1 if early else rng.randrange(int(total * 0.8))
        delay_s = rng.uniform(0.0, 8.0) if early else rng.uniform(0.0, 0.3)
        faults.append(Fault(what, at, delay_s, rng.random(), rng.uniform(0.2, 1.5)))
    return Plan(
        seed=seed,
        executor=executor,
        nodes=nodes,
        members=members,
        sharing=rng.choice(("node", "auto") if executor == "local" else ("single", "multi", "all", "node")),
        stall_policy=rng.choice(("wait", "detach")),
        capacity=rng.choice((64, 256)),
        step_s=0.04,
        faults=tuple(sorted(faults, key=lambda fault: (fault.at, fault.delay_s))),
    )
