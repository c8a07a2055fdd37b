"""A driver on Ray: trains four members, two of which fit on a core; says when one started or ended an epoch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from kit.execute_members import an_ensemble

import ensemble
from ensemble import Ensemble, Resources

RATES = (0.1, 0.2, 0.3, 0.4)


def declared(sharing: str = "auto", step_s: float = 0.0, epochs: int = 4, capacity: int = 128) -> Ensemble:
    members = [{"lr": lr, "step_s": step_s} for lr in RATES]
    usual = {"gate_timeout_s": 240.0, "retries": 5, "resources": Resources(cpus_per_worker=0.4)}
    return an_ensemble(members, epochs=epochs, sharing=sharing, capacity=capacity, **usual)


def say(event: dict[str, Any]) -> None:
    if event["type"] in ("started", "epoch"):
        print(event["type"], flush=True)


if __name__ == "__main__":
    run_dir, sharing, step_s, *numbers = [*sys.argv[1:], *("auto", "0.0")[len(sys.argv) - 2 :]]
    made = declared(sharing, float(step_s), *map(int, numbers))
    ensemble.submit(made, run_dir, executor="ray", on_event=say).wait()
