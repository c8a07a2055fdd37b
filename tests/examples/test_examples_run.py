"""The examples as a user runs them, on a part of their data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ensemble.meter import ledger
from ensemble.store import RunState, fold, read_events

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
DATA = os.environ.get("ENSEMBLE_DATA")
needs_data = pytest.mark.skipif(
    DATA is None, reason="ENSEMBLE_DATA does not name the folder that holds cifar10/ and imdb/"
)


def run(example: str, run_dir: Path, **settings: Any) -> tuple[RunState, list[dict[str, Any]]]:
    """Run an example by the local executor; its state at the end, and its rows."""
    sets = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    command = [sys.executable, "-m", "ensemble.cli", "run", f"examples/{example}.py", "--executor", "local", *sets]
    done = subprocess.run(
        [*command, "--run-dir", str(run_dir), "--json", "-"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return fold(read_events(run_dir / "events.jsonl")), json.loads(done.stdout)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_says_how_it_is_run(example: Path) -> None:
    text = example.read_text()
    assert len(text.splitlines()) < 80
    assert f"ensemble run examples/{example.name}" in text.split('"""')[1]


def check_trained(state: RunState, rows: list[dict[str, Any]], run_dir: Path) -> None:
    assert [row["state"] for row in rows] == ["finished", "finished"]
    assert state.combined is not None and state.combined["split"] == "test"
    assert {"accuracy", "nll", "ece"} <= set(state.combined["metrics"]["ensemble"])
    reuse = ledger(read_events(run_dir / "events.jsonl")).reuse
    assert (reuse.prepared, reuse.consumed, reuse.factor) == (360, 720, 2.0)  # nine tenths of 400, for two


@needs_data
def test_cifar10_trains_on_photographs(tmp_path: Path) -> None:
    state, rows = run("cifar10", tmp_path, data=f"{DATA}/cifar10", samples=400, epochs=1, members=2)
    check_trained(state, rows, tmp_path)


@needs_data
def test_imdb_trains_on_text(tmp_path: Path) -> None:
    small = {"samples": 400, "epochs": 1, "members": 2, "length": 64, "words": 2000}
    state, rows = run("imdb", tmp_path, data=f"{DATA}/imdb", **small)
    check_trained(state, rows, tmp_path)


def test_pruned_trials_of_the_search_give_their_place_to_new_ones(tmp_path: Path) -> None:
    # Enough that some wait for a place when the first are pruned, though the first wave may all have finished.
    state, rows = run("search", tmp_path, trials=18, epochs=3, concurrent=3)
    ends = [(member.state, member.error) for member in state.members.values()]
    assert len(ends) == 18 and set(ends) == {("finished", None), ("pruned", None)}, ends
    assert all(row["epoch"] < 3 for row in rows if row["state"] == "pruned")
    events = read_events(tmp_path / "events.jsonl")
    training: set[str] = set()
    most = after_a_prune = 0
    pruned = False
    for event in events:
        if event["type"] == "placed":
            training.add(event["member"])
            most = max(most, len(training))
            after_a_prune += pruned
        elif event["type"] in ("pruned", "finished"):
            training.discard(event["member"])
            pruned |= event["type"] == "pruned"
    assert after_a_prune > 0 and most > 1
    assert (ledger(events).reuse.factor or 0.0) > 1.0
    assert state.combined is not None


@pytest.mark.parametrize("pruner", ["median", "patience", "none"])
@pytest.mark.slow
def test_the_search_works_with_every_pruner(pruner: str, tmp_path: Path) -> None:
    _, rows = run("search", tmp_path, trials=4, epochs=2, pruner=pruner)
    assert {row["state"] for row in rows} <= {"finished", "pruned"} and len(rows) == 4
