"""A plan of what goes wrong in one run, drawn from a seed: pure."""

from __future__ import annotations

import random
from typing import NamedTuple

#: Member i is this wide in every plan, so that one undisturbed run tells the weights that it must end with.
WIDTHS = (1, 2, 1, 1, 1)
EPOCHS = 8

WORKERS = ("kill worker", "kill worker", "kill rank", "stop worker")
OTHERS = ("kill feeder", "stop feeder", "kill fork server", "kill driver", "end driver", "interrupt driver")
LOCAL = WORKERS + OTHERS
RAY = (*LOCAL, "kill agent", "kill node", "kill node")


class Fault(NamedTuple):
    """Something that goes wrong: a verb and whom it befalls.

    "end" is SIGTERM, "interrupt" SIGINT, "stop" SIGSTOP for some seconds. It is due a delay after all members have
    told of `at` epochs, at -1: after the driver's start; `which` is the share of those whom it may befall.
    """

    what: str
    at: int
    delay_s: float
    which: float
    seconds: float


class Plan(NamedTuple):
    """One run on so many nodes of Ray, 1 for local, and its faults.

    A ring of small capacity lets who stands still keep the others waiting, or be detached.
    """

    seed: int
    executor: str
    nodes: int
    widths: tuple[int, ...]
    sharing: str
    stall_policy: str
    capacity: int
    step_s: float
    faults: tuple[Fault, ...]


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
        widths=WIDTHS[:members],
        sharing=rng.choice(("node", "auto") if executor == "local" else ("single", "multi", "all", "node")),
        stall_policy=rng.choice(("wait", "detach")),
        capacity=rng.choice((64, 256)),
        step_s=0.04,
        faults=tuple(sorted(faults, key=lambda fault: (fault.at, fault.delay_s))),
    )
