"""A driver that is to be killed: runs members that are cloned, as the arguments say, or goes on with them."""

from __future__ import annotations

import sys
from pathlib import Path

from execute_members import an_ensemble, faulty_model, loss, momentum

import ensemble
from ensemble import Recipe, Resources


def declared(hold: Path) -> ensemble.Ensemble:
    """One member that ends soon, and one that holds the run open until `hold` exists."""
    recipe = Recipe(model=faulty_model, loss=loss, optimizer=momentum)
    short = {"lr": 0.1, "width": 8, "fault": "none", "after": 1, "marker": str(hold)}
    return an_ensemble(
        [short, short | {"fault": "wait"}],
        name="cloned",
        recipe=recipe,
        epochs=3,
        sharing="independent",
        resources=Resources(cpus_per_worker=0.2, gpus_per_worker=0.0, memory_gb=0.2),
    )


if __name__ == "__main__":
    ensemble.submit(declared(Path(sys.argv[2])), sys.argv[1], executor="local").wait()
