"""The steps before a start: all refusals are shown at once, the same by a start and by a dry run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ensemble
from ensemble.controller.start_steps import check_loggers
from ensemble.spec import Ensemble, Member, Recipe, SpecError
from ensemble.store import StoreError
from pipelines import Pipeline, sources


def an_ensemble(members: list[Member]) -> Ensemble:
    train = Pipeline(sources.arrays(x=np.zeros((8, 2), np.float32)))
    recipe = Recipe(model=len, loss=len, task="free")
    return Ensemble(name="refused", recipe=recipe, members=members, train=train, batch_size=8)


def test_all_refusals_are_shown_at_once_and_nothing_is_written(tmp_path: Path) -> None:
    declared = an_ensemble([Member({}, start=str(tmp_path / "nowhere")), Member({}, workers=2)])
    (foreign := tmp_path / "run").mkdir()
    (foreign / "notes.txt").write_text("mine")
    messages = []
    for start in (ensemble.submit, ensemble.dry_run):
        with pytest.raises((SpecError, StoreError)) as refused:
            start(declared, foreign, "inline")
        messages.append(str(refused.value))
    assert messages[0] == messages[1]
    for text in ("the inline executor is one process", "no run directory and not empty", "nowhere' is neither"):
        assert text in messages[0]
    assert [file.name for file in foreign.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("recorded", [{}, {"lines-logger-that-nobody-has": "0.1"}])
def test_a_logger_of_a_distribution_that_is_gone_is_named_with_it(recorded: dict[str, str]) -> None:
    run_dir = SimpleNamespace(find_info=lambda: {"versions": {"numpy": "2.4", **recorded}})
    start: Any = SimpleNamespace(ensemble=SimpleNamespace(loggers=["lines"]), run_dir=run_dir)
    with pytest.raises(SpecError, match="lines") as refused:
        check_loggers(start)
    assert ("pip install lines-logger-that-nobody-has==0.1" in str(refused.value)) is bool(recorded)
