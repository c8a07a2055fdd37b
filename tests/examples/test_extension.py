"""The example of an extension, installed as a distribution of its own: its names work like ours."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "extension"

SPEC = """
import torch
from example_extension import WeightLimit

from ensemble import Ensemble, Recipe
from pipelines import Pipeline, sources

CALLBACKS = [WeightLimit(0.25)]


def model(params):
    return torch.nn.Linear(2, 1)


def loss(model, batch):
    x = torch.stack([batch["x"], batch["y"]], 1).float()
    return torch.nn.functional.mse_loss(model(x)[:, 0], batch["z"].float(), reduction="none")


def predict(model, batch):
    return model(torch.stack([batch["x"], batch["y"]], 1).float())[:, 0]


def spec():
    data = sources.fixed_width("data.txt", columns=("x", "y", "z"))
    train, valid = data.split(0.8, seed=0)
    return Ensemble(
        name="extended", members=[{"lr": 0.1}, {"lr": 0.2}], epochs=2, batch_size=16, callbacks=CALLBACKS,
        recipe=Recipe(model=model, loss=loss, predict=predict, task="regression", target="z"),
        train=Pipeline(train, seed=0), valid=Pipeline(valid, seed=0), loggers=["sqlite"],
    )
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process in which the example is installed."""
    folder = tmp_path_factory.mktemp("extension")
    shutil.copytree(EXAMPLE, folder / "source")
    target = folder / "installed"
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(folder / "source")], check=True)
    supplies = folder / "power_supply" / "BAT0"
    supplies.mkdir(parents=True)
    (supplies / "power_now").write_text("12500000\n", encoding="utf-8")
    path = os.pathsep.join([str(target), str(ROOT)])
    return {**os.environ, "PYTHONPATH": path, "POWER_SUPPLIES": str(supplies.parent)}


def run(installed: dict[str, str], where: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "ensemble", *words], cwd=where, env=installed, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def trained(installed: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that uses all of the extension."""
    folder = tmp_path_factory.mktemp("trained")
    lines = [f"{i:8.3f}{i * i % 7:8.3f}{i / 50 - 1:8.3f}" for i in range(100)]
    (folder / "data.txt").write_text("\n".join(lines), encoding="utf-8")
    (folder / "spec.py").write_text(SPEC, encoding="utf-8")
    run(installed, folder, "run", "spec.py", "--run-dir", "run", "--executor", "local")
    return folder


def test_its_logger_writes_each_epoch_once(trained: Path) -> None:
    with sqlite3.connect(trained / "run" / "metrics.sqlite") as database:
        logged = database.execute("SELECT DISTINCT member, epoch FROM metrics ORDER BY member, epoch").fetchall()
    assert logged == [(f"member-{number}", epoch) for number in (0, 1) for epoch in (0, 1)]


def test_its_power_source_measures_the_node(trained: Path) -> None:
    lines = (trained / "run" / "events.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    (node,) = (event for event in events if event["type"] == "node")
    assert "battery" in node["power"]["source"] and node["power"]["origin"] == "measured"
    powers = [event for event in events if event["type"] == "power"]
    joules = sum(event["energy_j"] for event in powers)
    seconds = sum(event["interval_s"] for event in powers)
    assert joules == pytest.approx(12.5 * seconds, rel=0.1)


def test_its_callback_has_limited_the_weights(installed: dict[str, str], trained: Path) -> None:
    code = "import ensemble; print(max(w.abs().max().item() for w in ensemble.load('run').parameters()))"
    largest = subprocess.check_output([sys.executable, "-c", code], cwd=trained, env=installed, text=True)
    assert float(largest) <= 0.25


def test_the_doctor_lists_it(installed: dict[str, str], tmp_path: Path) -> None:
    shown = run(installed, tmp_path, "doctor")
    for name in ("fixed_width", "sqlite", "battery"):
        assert f"{name} (ensemble-example-extension 0.1)" in " ".join(shown.split())


def test_without_it_a_run_says_what_to_install(installed: dict[str, str], trained: Path) -> None:
    without = {**installed, "PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-m", "ensemble", "resume", "run"]
    done = subprocess.run(line, cwd=trained, env=without, capture_output=True, text=True)
    assert done.returncode == 2 and "pip install ensemble-example-extension==0.1" in done.stderr
    assert "Traceback" not in done.stderr
