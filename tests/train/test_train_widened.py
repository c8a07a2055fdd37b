"""A member that is given more workers while it trains keeps, averages and stops as with one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from kit import train_child as cases
from kit.ranks import run_ranks

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


def train(rank: int, folder: Path, world: int = 1, stop: int | None = None) -> tuple[str, list[dict[str, Any]]]:
    ensemble = cases.declare(cases.SMOOTH, world, **LOOP)
    identity = replace(ensemble.identify(0), widened_from=1 if world > 1 else None)
    meet = (folder / "meet").as_uri() if world > 1 else None
    job = cases.make_job(folder / "run", ensemble, identity=identity, rank=rank, rendezvous=meet)
    events: list[dict[str, Any]] = []
    return work(job, ensemble, events.append, cases.Script(stop, "stop")), events


def end(ended: tuple[str, list[dict[str, Any]]]) -> dict[str, Any]:
    outcome, events = ended
    assert outcome == "finished", events[-1]
    return next(event for event in events if event["type"] == "finished")


@pytest.mark.parametrize("stop", [4, 13], ids=["within the first epoch", "later"])
def test_a_widened_member_decides_as_it_would_have_with_one_worker(tmp_path: Path, stop: int) -> None:
    whole = end(train(0, tmp_path / "whole"))
    folder = tmp_path / "widened"
    assert train(0, folder, stop=stop)[0] == "stopped"
    ranks = run_ranks(2, train, folder, 2)
    wide = end(ranks[0])
    assert ranks[1][0] == "finished"
    assert [wide["epoch"], wide["kept"]["epoch"], wide["kept"]["step"]] == [
        whole["epoch"],
        whole["kept"]["epoch"],
        whole["kept"]["step"],
    ]
    assert whole["epoch"] < 8 and wide["metrics"] == pytest.approx(whole["metrics"], rel=1e-9)
