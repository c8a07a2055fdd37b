"""A driver on a cluster: two members end at once, each in its way, and one waits for a file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from kit.execute_members import an_ensemble

import ensemble
from ensemble import Ensemble, Member, Resources


def declare(marker: str) -> Ensemble:
    waits: dict[str, Any] = {"fault": "wait", "after": 4, "marker": marker, "spawn": True}
    members: list[Member | dict[str, Any]] = [
        {"lr": 0.1, "fault": "kill", "after": 2},
        {"lr": 0.2, "fault": "exit", "after": 2},
        Member({"lr": 0.3, **waits}, workers=2),
    ]
    return an_ensemble(members, epochs=3, valid=None, retries=0, resources=Resources(cpus_per_worker=0.2))


if __name__ == "__main__":
    run_dir, marker = sys.argv[1:]
    ensemble.submit(declare(marker), run_dir, executor="ray").wait()
