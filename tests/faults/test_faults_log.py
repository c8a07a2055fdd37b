"""A log that ends in the middle of a line, wherever that is: it reads, folds, and a run goes on from it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from faults_members import lost_and_doubled
from faults_members import train_two as train
from kit.finished_runs import hashes, read_state

EPOCHS = 3


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained")
    train(path / "run", path / "account")
    return path


def places(content: bytes, last: int, kinds: tuple[str, ...]) -> dict[str, int]:
    """Bytes to cut at: within each of the last lines, and within the first one of each of these kinds."""
    lines = content.splitlines(keepends=True)
    starts = [sum(map(len, lines[:number])) for number in range(len(lines))]
    chosen = {f"line {number - len(lines)}": number for number in range(len(lines) - last, len(lines))}
    for number, line in enumerate(lines):
        kind = json.loads(line)["type"]
        if kind in kinds:
            chosen.setdefault(kind, number)  # of the first member
    return {what: starts[number] + len(lines[number]) // 2 for what, number in chosen.items()}


@pytest.mark.parametrize(
    ("last", "kinds"),
    [(2, ("epoch", "checkpoint")), pytest.param(3, ("placed", "started", "finished"), marks=pytest.mark.more)],
)
def test_a_run_goes_on_from_a_log_that_was_cut_and_comes_to_the_same_weights(
    trained: Path, tmp_path: Path, last: int, kinds: tuple[str, ...]
) -> None:
    content = (trained / "run" / "events.jsonl").read_bytes()
    expected = hashes(trained / "run")
    for number, (what, cut) in enumerate(places(content, last, kinds).items()):
        path = tmp_path / str(number)
        shutil.copytree(trained / "run", path)
        (path / "events.jsonl").write_bytes(content[:cut])
        before = read_state(path)
        state = train(path, trained / "account")
        assert {m.state for m in state.members.values()} == {"finished"} and hashes(path) == expected, what
        for member, known in before.members.items():
            if what.startswith("line"):  # the rest is on the disk before a checkpoint is: no crash takes more
                assert [event.epoch for event in state.members[member].history] == list(range(EPOCHS)), what
            if known.state == "finished":
                assert state.members[member].attempts == known.attempts, "it is not trained again"
        assert state.ended is not None and state.ended.type == "run_finished"
        assert (path / "report.html").stat().st_mtime > (trained / "run" / "report.html").stat().st_mtime
        assert all(lost_and_doubled(trained / "account", member, 1, EPOCHS) == (0, 0) for member in expected)
