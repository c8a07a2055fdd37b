"""The plain script and its three ports: they find the same, and the page shows what was measured."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from kit.scripts import run_python

ROOT = Path(__file__).parents[2]
PORT = ROOT / "examples" / "port"
PAGE = (ROOT / "docs" / "how-to" / "port-a-script.md").read_text()
POINTS = [{"width": width, "lr": lr} for width in (8, 16) for lr in (0.02, 0.05, 0.1, 0.2)]
SCRIPTS = ["plain", "attach_only", "train_function", "recipe"]
DATA = os.environ.get("ENSEMBLE_DATA")

sys.path.insert(0, str(PORT))
import measure  # noqa: E402 - of examples/port


def sort_trials(trials: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(trials, key=lambda trial: (trial["params"]["width"], trial["params"]["lr"]))


@pytest.mark.more
def test_the_page_shows_what_measure_prints_of_the_figures_and_of_the_scripts_as_they_are(tmp_path: Path) -> None:
    printed = run_python(PORT / "measure.py", cwd=tmp_path, timeout_s=800)
    assert printed.count("\n") > len(SCRIPTS)
    assert printed in PAGE, f"write into docs/how-to/port-a-script.md what this prints:\n{printed}"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_page_includes_each_script_whole(script: str) -> None:
    assert f'\n    --8<-- "examples/port/{script}.py"\n' in PAGE
    assert len((PORT / f"{script}.py").read_text().splitlines()) < 140


def test_the_same_hyperparameters_were_measured_to_give_similar_accuracy_on_all_sides() -> None:
    figures = json.loads((PORT / "figures.json").read_text())
    found = measure.compare_trials(figures["runs"])
    plain = found["plain"]
    assert len(plain) == len(POINTS) and min(plain.values()) > 0.2, "ten classes: all have learned"
    for script in SCRIPTS[1:]:
        differences = [found[script][point] - value for point, value in plain.items()]
        assert abs(sum(differences)) / len(differences) < 0.02
        assert max(map(abs, differences)) < 0.08


def test_what_the_page_says_of_the_figures_is_so() -> None:
    rows = measure.summarize(json.loads((PORT / "figures.json").read_text())["runs"])
    plain, attach_only, train_function, recipe = rows
    assert "little more than half" in PAGE and 0.5 < attach_only["pss_mib"] / plain["pss_mib"] < 0.6
    assert "two fifths" in " ".join(PAGE.split())
    assert all(0.35 < row["pss_mib"] / plain["pss_mib"] < 0.45 for row in (train_function, recipe))
    saved = [round(100 * (1 - row["cpu_s"] / plain["cpu_s"])) for row in (attach_only, train_function, recipe)]
    assert f"{min(saved)} to {max(saved)} % less CPU" in PAGE
    longer = [row["seconds"] / plain["seconds"] for row in (attach_only, train_function, recipe)]
    assert "no speed-up here" in PAGE and longer[0] > 0.95
    assert f"{100 * (max(longer) - 1):.0f} % longer at most" in PAGE


@pytest.mark.slow
@pytest.mark.skipif(DATA is None, reason="ENSEMBLE_DATA does not name the folder that holds cifar10/")
def test_all_four_train_the_same_trials_of_real_images_alike(tmp_path: Path) -> None:
    out, small = tmp_path / "figures.json", ["--samples", "2000", "--epochs", "2", "--repeats", "1"]
    shown = run_python(PORT / "measure.py", f"{DATA}/cifar10", "--out", out, *small, cwd=tmp_path, timeout_s=800)
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"], "nothing else is left"
    figures = json.loads(out.read_text())
    for script in SCRIPTS:
        (run,) = figures["runs"][script]
        assert [trial["params"] for trial in sort_trials(run["trials"])] == POINTS
        best = max(run["trials"], key=lambda trial: trial["value"])
        assert run["best"] == best["value"] > 0.15 and run["seconds"] > 1 and run["cpu_s"] > 1
        assert run["pss_mib"] > 100
        assert {"value": run["best"], "params": run["params"]} in run["trials"]
        assert all(trial["value"] * 200 == pytest.approx(round(trial["value"] * 200)) for trial in run["trials"])
    rows = {row["script"]: row for row in measure.summarize(figures["runs"])}
    assert re.findall(r"`(\w+)\.py`", shown) == list(rows) == SCRIPTS
    for script in SCRIPTS[1:]:
        assert rows[script]["accuracy"] == pytest.approx(rows["plain"]["accuracy"], abs=0.05)
        assert rows[script]["pss_mib"] < rows["plain"]["pss_mib"], "no process decodes for one trial alone"
