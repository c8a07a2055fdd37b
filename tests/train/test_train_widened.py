"""A member that is given more workers while it trains keeps, averages and stops as with one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import widened_child as child

ROOT = Path(__file__).resolve().parents[2]


def end(ended: tuple[str, list[dict[str, Any]]]) -> dict[str, Any]:
    outcome, events = ended
    assert outcome == "finished", events[-1]
    return next(event for event in events if event["type"] == "finished")


@pytest.mark.parametrize("stop", [4, 13], ids=["within the first epoch", "later"])
def test_a_widened_member_decides_as_it_would_have_with_one_worker(tmp_path: Path, stop: int) -> None:
    whole = end(child.train(tmp_path / "whole"))
    folder = tmp_path / "widened"
    assert child.train(folder, stop=stop)[0] == "stopped"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, child.__file__, str(rank), str(folder)], env=environment)
        for rank in range(2)
    ]
    assert [rank.wait(timeout=200) for rank in ranks] == [0, 0]
    outcomes = [json.loads((folder / f"{rank}.json").read_text())[0] for rank in range(2)]
    assert outcomes == ["finished", "finished"]
    wide = end(json.loads((folder / "0.json").read_text()))
    assert (wide["epoch"], wide["kept"]["epoch"], wide["kept"]["step"]) == (
        whole["epoch"],
        whole["kept"]["epoch"],
        whole["kept"]["step"],
    )
    assert whole["epoch"] < 8 and wide["metrics"] == pytest.approx(whole["metrics"], rel=1e-9)
