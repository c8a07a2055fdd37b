"""Which sample a rank is preparing: noted for its next attempt and the controller, never a failure by itself."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kit.execute_members import an_ensemble, samples

from ensemble.store import RunDir
from ensemble.train import Job
from ensemble.train.job import Inbox
from ensemble.train.poison_records import PoisonRecords, note_file, read_interrupted
from pipelines.samples.poison_records import PreparationNote


def settle(run_dir: RunDir, attempt: int) -> PreparationNote | None:
    declared, alone = an_ensemble([{"lr": 0.1}]), SimpleNamespace(world=1)
    made: dict[str, Any] = {"rendezvous": None, "interface": None, "device": "cpu", "feeder": None}
    job = Job(run_dir=str(run_dir.path), identity=declared.identify(0), attempt=attempt, rank=0, **made)
    pipeline = samples(96, 0)
    PoisonRecords(job, declared, alone, {"train": pipeline}, lambda *_, **__: None).start(Inbox())  # type: ignore[arg-type]
    return pipeline.poison_records.note


def test_an_attempt_that_lives_on_notes_in_no_file_of_its_successor(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "run", an_ensemble([{"lr": 0.1}]))
    first = settle(run_dir, 0)
    assert first is not None
    first.words[1], first.words[0] = 3, 8
    assert read_interrupted(note_file(run_dir, "member-0", 0, 0)) == {"train": (7, 3)}
    second = settle(run_dir, 1)
    first.words[0] = 9
    assert second is not None and second.at is None
    assert read_interrupted(note_file(run_dir, "member-0", 0, 1)) == {}
    assert not note_file(run_dir, "member-0", 0, 0).exists(), "it has been judged"


def test_where_nothing_can_be_noted_a_member_goes_on_without(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "run", an_ensemble([{"lr": 0.1}]))
    path = note_file(run_dir, "member-0", 0, 0)
    path.mkdir(parents=True)  # refuses to be written and read for anybody
    assert settle(run_dir, 0) is None
    assert read_interrupted(path) == {}


def test_a_note_has_its_room_before_it_is_written() -> None:
    """A mapped file without it, on a file system that is full, ends by SIGBUS whoever writes there."""
    descriptor = os.memfd_create("note")
    try:
        PreparationNote(descriptor)
        assert os.fstat(descriptor).st_blocks > 0
    finally:
        os.close(descriptor)
