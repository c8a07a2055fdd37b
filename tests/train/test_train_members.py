"""Two members of two workers each, side by side in four processes: what one does in a step is its own affair."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

CHILD = Path(__file__).with_name("members_child.py")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process said."""
    folder = tmp_path_factory.mktemp("members")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(CHILD), str(number), str(folder)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(4)
    ]
    errors = [process.communicate(timeout=200)[1] for process in processes]
    assert [p.returncode for p in processes] == [0] * 4, "\n".join(errors)
    return [json.loads((folder / f"{number}.json").read_text()) for number in range(4)]


def epochs(said: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [event for event in said[name]["events"] if event["type"] == "epoch"]


def test_the_gradients_of_four_ranks_are_summed_in_fp32(four: list[dict[str, Any]]) -> None:
    half = torch.tensor([2048.0, 1.0, 1.0, 1.0]).half()
    assert (half[0] + half[1] + half[2] + half[3]).item() == 2048.0, "which is what a sum in half precision loses"
    # fp16 has no 2051: the sum of fp16 gradients is rounded to the next even one, once, at the end
    assert [said["sum"] for said in four] == [{"fp16": [2052.0, 32.0], "fp32": [2051.0, 32.0]}] * 4


def test_an_overflow_skips_the_step_on_all_ranks_of_its_member_and_of_no_other(four: list[dict[str, Any]]) -> None:
    assert [said["overflowing"]["outcome"] for said in four[:2]] == ["finished"] * 2
    assert [said["sound"]["outcome"] for said in four[2:]] == ["finished"] * 2
    assert [e["skipped_steps"] for e in epochs(four[0], "overflowing")] == [1, 1, 1]
    assert [e["skipped_steps"] for e in epochs(four[2], "sound")] == [0, 0, 0]
    for name, ranks in (("overflowing", four[:2]), ("sound", four[2:])):
        assert ranks[0][name]["weights"] == ranks[1][name]["weights"], "both ranks took the same steps"


@pytest.mark.parametrize("name", ["overflowing", "sound"])
def test_skipped_steps_change_nothing(four: list[dict[str, Any]], tmp_path: Path, name: str) -> None:
    """The member alone, in one worker, skips the same steps and learns the same from the others."""
    import members_child
    import train_child

    from ensemble.train import Inbox, work

    ensemble = members_child.declare(name, 1)
    events: list[dict[str, Any]] = []
    assert work(train_child.make_job(tmp_path, ensemble), ensemble, events.append, Inbox()) == "finished"
    ours = epochs(four[0 if name == "overflowing" else 2], name)
    for mine, alone in zip(ours, [e for e in events if e["type"] == "epoch"], strict=True):
        assert mine["skipped_steps"] == alone["skipped_steps"]
        assert mine["metrics"] == pytest.approx(alone["metrics"], rel=2e-3), "fp16 rounds by the batch's shape"
