"""A driver on a cluster that others use, too: its members have two workers of a core each, and take some time."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from execute_members import an_ensemble

import ensemble
from ensemble import Ensemble, Resources


def declared(step_s: float = 0.0, epochs: int = 4, members: int = 2, priority: int = 0) -> Ensemble:
    rates = [{"lr": 0.1 * (1 + number), "step_s": step_s} for number in range(members)]
    usual = {"gate_timeout_s": 240.0, "retries": 5, "resources": Resources(workers=2, cpus_per_worker=1.0)}
    return an_ensemble(rates, epochs=epochs, priority=priority, **usual)


if __name__ == "__main__":
    run_dir, step_s, *numbers = sys.argv[1:]
    ensemble.submit(declared(float(step_s), *map(int, numbers)), run_dir, executor="ray").wait()
