"""What a run takes of a cluster at most: its leases, on a model of Ray."""

from __future__ import annotations

from typing import Any

import pytest
from ray_model import Run, World, make_member


def count(run: Run) -> tuple[int, float]:
    leases = [lease for held in run.list_held().values() for lease in held]
    return sum(lease.bundle.gpus for lease in leases), sum(lease.cpus for lease in leases)


def turn(world: World, run: Run, seconds: int) -> None:
    for _ in range(seconds):
        world.cluster.schedule()
        run.renew()
        run.place()
        world.cluster.clock += 1.0


CASES: list[tuple[dict[str, Any], dict[str, float], tuple[int, float]]] = [
    ({}, {"gpus": 2}, (2, 2.0)), ({}, {"cpus": 3.0}, (3, 3.0)), ({"workers": 2}, {"gpus": 3}, (2, 2.0)),
    ({"gpus_per_worker": 0.5}, {"gpus": 1}, (1, 2.0)),
    ({"gpus_per_worker": 0.0, "cpus_per_worker": 2.0}, {"cpus": 5.0}, (0, 4.0)),
    ({"auto": ["cpus_per_worker", "workers"], "gpus_per_worker": 0.0}, {"cpus": 3.0}, (0, 3.0)),
    ({"auto": ["cpus_per_worker"], "gpus_per_worker": 0.0}, {"cpus": 0.5}, (0, 0.5)),
    ({"auto": ["cpus_per_worker"], "cpus_per_worker": 3.0}, {"cpus": 2.0}, (1, 2.0)),
]  # fmt: skip


@pytest.mark.parametrize(("options", "limits", "most"), CASES)
def test_a_run_holds_no_more_than_its_limits_and_all_its_members_have_their_turn(
    world: World, options: dict[str, Any], limits: dict[str, float], most: tuple[int, float]
) -> None:
    cluster = world.make([(8.0, 64.0, 4), (8.0, 64.0, 4)])
    members = [make_member(number, **options) for number in range(6)]
    run = Run(cluster, "limited", "auto", members, limits)
    seen = set()
    for _ in range(60):
        turn(world, run, 1)
        seen.add(count(run))
        if run.running and count(run) == most:
            run.end(run.running[0])
    assert max(seen) == most and all(gpus <= most[0] and cpus <= most[1] for gpus, cpus in seen), seen
    while not run.is_done and run.running:
        run.end(run.running[0])
        turn(world, run, 12)
    assert run.is_done
