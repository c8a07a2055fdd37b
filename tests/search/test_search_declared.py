"""What is declared of a search holds to its end: its constraints and its identity."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ensemble
from ensemble import Ensemble, Search, choice, uniform
from ensemble.store import StoreError

WIDTHS = {"width": choice(8, 16, 32, 64)}
QUICK = {"trials": 4, "sampler": "tpe", "pruner": "none"}


def train(member: Any) -> None:
    for epoch in member.epochs():
        member.report(score=member.params["width"] * (epoch + 1), other=1.0)


def below_40(metrics: Any) -> dict[str, float]:
    return {"size": metrics["score"] - 40}


def declare(search: Any, **more: Any) -> Ensemble:
    options = {"objective": "score", "mode": "max", **more}
    return Ensemble(name="s", recipe=train, epochs=2, devices="cpu", search=search, **options)


def run(path: Path, search: Any, **more: Any) -> ensemble.Result:
    return ensemble.submit(declare(search, **more), path, "inline").wait()


def constrained(limit: Any) -> Search:
    return Search(
        WIDTHS, trials=4, pruner="none", constraints=limit, enqueue=[{"width": w} for w in (8, 16, 32, 64)]
    )


def test_the_best_member_keeps_the_constraints(tmp_path: Path) -> None:
    result = run(tmp_path / "run", constrained(below_40))
    assert result.best is not None and result.best.params == {"width": 16}
    assert "best member-1" in result.summary()
    result = run(tmp_path / "none", constrained(lambda metrics: {"never": 1.0}))
    assert result.best is None and result.stopped is None


@pytest.mark.parametrize(
    ("changed", "more", "named"),
    [
        ({"space": {"width": choice(8, 16)}}, {}, "space"),
        ({"space": {"width": choice(8, 16, 32, 64), "lr": uniform(0, 1)}}, {}, "space"),
        ({"sampler": "random"}, {}, "sampler"),
        ({"pruner": "median"}, {}, "pruner"),
        ({"seed": 5}, {}, "seed"),
        ({"constraints": below_40}, {}, "constraints"),
        ({}, {"objective": "other"}, "objective"),
        ({}, {"mode": "min"}, "objective"),
        ({"further_objectives": ["cpu_s"]}, {}, "further_objectives"),
    ],
)
def test_another_search_is_refused_in_the_directory_of_a_finished_one(
    tmp_path: Path, changed: Any, more: Any, named: str
) -> None:
    run(tmp_path, Search(**{"space": WIDTHS, **QUICK}))
    with pytest.raises(StoreError, match=named) as refused:
        run(tmp_path, Search(**{"space": WIDTHS, **QUICK, **changed}), **more)
    assert "--fresh" in str(refused.value)


def test_more_trials_are_one_search(tmp_path: Path) -> None:
    run(tmp_path, Search(WIDTHS, **{**QUICK, "trials": 2}))
    assert len(run(tmp_path, Search(WIDTHS, **QUICK)).members) == 4
