"""The exit status of a search that ends by an error, and of one that has nothing to combine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ensemble.result
from ensemble.cli.parser import main
from ensemble.store import RunDir

SPEC = """
from ensemble import Ensemble, Search, choice

def train(member):
    for epoch in member.epochs():
        assert (member.seed, member.rank, member.world) == (member.identity.seed, 0, 1)
        member.report(score=member.params["width"] * (epoch + 1))

def keep(metrics):
    if metrics["score"] > 2 * FAILS_ABOVE:
        raise KeyError("latency")
    return {"size": metrics["score"] - 40}

FAILS_ABOVE = 1000

def spec(fails_above: int = 1000, prune: bool = False):
    global FAILS_ABOVE
    FAILS_ABOVE = fails_above
    points = [{"width": width} for width in (8, 16, 4, 64)]
    pruner = {"name": "median", "startup_trials": 1} if prune else "none"
    search = Search({"width": choice(4, 8, 16, 64)}, trials=4, pruner=pruner, enqueue=points,
                    constraints=None if prune else keep)
    return Ensemble(name="s", recipe=train, epochs=2, objective="score", mode="max", devices="cpu", search=search)
"""


@pytest.mark.parametrize("fails_above", [1, 60])
def test_constraints_that_fail_end_the_command_as_an_error(tmp_path: Path, fails_above: int) -> None:
    """Also those that fail on the last trial alone."""
    (tmp_path / "spec.py").write_text(SPEC)
    arguments = ["run", str(tmp_path / "spec.py"), "--run-dir", str(tmp_path / "run"), "--executor", "inline"]
    assert main([*arguments, "--set", f"fails_above={fails_above}", "--allow-failed"]) == 3
    assert main(arguments) == 2, "the function has changed"
    assert main([*arguments, "--accept-code"]) == 0
    result = ensemble.result.make_result(RunDir(tmp_path / "run"))
    assert result.best is not None and result.best.params == {"width": 16}


def test_a_search_without_a_pipeline_has_nothing_to_combine_and_is_done(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "spec.py").write_text(SPEC)
    arguments = ["run", str(tmp_path / "spec.py"), "--run-dir", str(tmp_path / "run"), "--executor", "inline"]
    assert main([*arguments, "--set", "prune=True"]) == 0
    shown = capsys.readouterr()
    assert "pruned" in shown.out and "valid" not in shown.out + shown.err
