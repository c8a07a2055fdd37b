"""Drivers on Ray: `driver_child.py nodes|spans|cleanup RUN_DIR ...`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from kit.execute_members import an_ensemble

import ensemble
from ensemble import Ensemble, Member, Resources

RATES = (0.1, 0.2, 0.3, 0.4)


def nodes(sharing: str = "auto", step_s: float = 0.0, epochs: int = 4) -> Ensemble:
    """Four members, two of which fit on a core."""
    members: list[Any] = [{"lr": lr, "step_s": float(step_s)} for lr in RATES]
    usual = {"gate_timeout_s": 240.0, "retries": 5, "resources": Resources(cpus_per_worker=0.4)}
    return an_ensemble(members, epochs=int(epochs), sharing=sharing, capacity=64, **usual)


def spans(step_s: float = 0.0, epochs: int = 3, cpus: float = 0.4) -> Ensemble:
    """For two hosts with a core each: one member has three ranks, for which no node has room."""
    first, second = ({"lr": lr, "step_s": float(step_s)} for lr in (0.1, 0.2))
    members: list[Any] = [Member(first, workers=3, communicator="torch"), second]
    resources = Resources(cpus_per_worker=cpus)
    return an_ensemble(members, epochs=int(epochs), gate_timeout_s=240.0, retries=1, resources=resources)


def cleanup(marker: str) -> Ensemble:
    """Two members end at once, each in its way, and one waits for a file."""
    waits: dict[str, Any] = {"fault": "wait", "after": 4, "marker": marker, "spawn": True}
    members: list[Any] = [{"lr": 0.1, "fault": "kill", "after": 2}, {"lr": 0.2, "fault": "exit", "after": 2}]
    members.append(Member({"lr": 0.3, **waits}, workers=2))
    usual = {"retries": 0, "rehearsal": None, "resources": Resources(cpus_per_worker=0.2)}
    return an_ensemble(members, epochs=3, valid=None, **usual)


if __name__ == "__main__":
    declare = {"nodes": nodes, "spans": spans, "cleanup": cleanup}[sys.argv[1]]
    ensemble.submit(declare(*sys.argv[3:]), sys.argv[2], executor="ray").wait()  # type: ignore[operator]
