"""What a run of listed members does, in one process and in local ones; `tests/test_deletable.py` runs it, too.

Nothing here, or in `core_spec.py`, may name an extension.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import core_spec
import pytest
import torch

import ensemble

SPEC = Path(core_spec.__file__)


def command(*words: str | Path) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "ensemble", *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True)


def assert_same_weights(one: Path, other: Path) -> None:
    weights, others = (ensemble.load(path).state_dict() for path in (one, other))
    assert list(weights) == list(others)
    assert all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.fixture(scope="module")
def inline(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ensemble.Result]:
    path = tmp_path_factory.mktemp("core") / "run"
    return path, ensemble.submit(core_spec.spec(), path, executor="inline").wait()


def test_two_members_train_and_are_combined(inline: tuple[Path, ensemble.Result]) -> None:
    path, result = inline
    assert [row["state"] for row in result.members] == ["finished", "finished"]
    assert result.combined is not None and result.combined["metrics"]["ensemble"]["accuracy"] > 0.5
    batch = next(iter(core_spec.table(128, 3).loader(batch_size=128)))
    probabilities = ensemble.load(path)(batch)
    accuracy = (probabilities.argmax(1) == batch["label"]).double().mean()
    assert float(accuracy) == pytest.approx(result.combined["metrics"]["ensemble"]["accuracy"])


def test_local_processes_train_the_same_weights(inline: tuple[Path, ensemble.Result], tmp_path: Path) -> None:
    done = command("run", SPEC, "--run-dir", tmp_path / "run", "--executor", "local")
    assert done.returncode == 0, done.stderr
    assert_same_weights(inline[0], tmp_path / "run")


def test_the_commands_show_the_run(inline: tuple[Path, ensemble.Result], tmp_path: Path) -> None:
    path, result = inline
    rows = tmp_path / "rows.json"
    assert command("status", path, "--json", rows).returncode == 0
    assert [row["member"] for row in json.loads(rows.read_text(encoding="utf-8"))] == ["member-0", "member-1"]
    assert result.ledger


def test_a_run_whose_driver_is_killed_goes_on(inline: tuple[Path, ensemble.Result], tmp_path: Path) -> None:
    line = [sys.executable, "-m", "ensemble", "run", str(SPEC), "--run-dir", str(tmp_path / "run")]
    driver = subprocess.Popen([*line, "--executor", "local"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    events = tmp_path / "run" / "events.jsonl"
    while not (events.exists() and '"epoch"' in events.read_text(encoding="utf-8")):
        assert driver.poll() is None, "it ended before it was killed"
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    done = command("resume", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert_same_weights(inline[0], tmp_path / "run")
