"""A driver on a cluster of two hosts with a core each: one member has three ranks, for which no node has room."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from kit.execute_members import an_ensemble

import ensemble
from ensemble import Ensemble, Member, Resources


def declared(step_s: float = 0.0, epochs: int = 3, communicator: str = "torch", cpus: float = 0.4) -> Ensemble:
    members = [
        Member({"lr": 0.1, "step_s": step_s}, workers=3, communicator=communicator),
        Member({"lr": 0.2, "step_s": step_s}),
    ]
    resources = Resources(cpus_per_worker=cpus)
    return an_ensemble(members, epochs=epochs, gate_timeout_s=240.0, retries=1, resources=resources)


if __name__ == "__main__":
    run_dir, step_s, epochs, communicator = sys.argv[1:]
    ensemble.submit(declared(float(step_s), int(epochs), communicator), run_dir, executor="ray").wait()
