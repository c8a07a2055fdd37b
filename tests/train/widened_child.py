"""A member that is given a second worker: `python widened_child.py RANK FOLDER` goes on as one of two ranks."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import train_child as cases

from ensemble.spec import EMA, EarlyStopping
from ensemble.train import work

LOOP: dict[str, Any] = {
    "params": {"lr": 0.4, "dtype": "float64"},
    "train": cases.data(dtype="float64"),
    "valid": cases.data(13, 1, "float64"),
    "epochs": 9,
    "objective": "loss",
    "early_stopping": EarlyStopping(2),
    "keep": "best",
    "averaging": EMA(0.8),
    "validate_every": 2,
    "elastic": True,
}


def train(
    folder: Path, rank: int = 0, world: int = 1, stop: int | None = None
) -> tuple[str, list[dict[str, Any]]]:
    """Train the member, from its checkpoint where it has one; outcome and events."""
    ensemble = cases.declare(cases.SMOOTH, world, **LOOP)
    identity = replace(ensemble.identify(0), widened_from=1 if world > 1 else None)
    meet = (folder / "meet").as_uri() if world > 1 else None
    job = cases.make_job(folder / "run", ensemble, identity=identity, rank=rank, rendezvous=meet)
    events: list[dict[str, Any]] = []
    return work(job, ensemble, events.append, cases.Script(stop, "stop")), events


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    (folder / f"{rank}.json").write_text(json.dumps(train(folder, rank, world=2)))


if __name__ == "__main__":
    main()
