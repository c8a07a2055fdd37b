"""Optuna's journal with many operations in one go: what others read of it, and what a full disk leaves."""

import os
from pathlib import Path

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import StudyDirection
from studies import read_study

from ensemble.search.journal import Journal


def begun(path: Path) -> tuple[Journal, int]:
    storage = Journal(str(path), 3)
    return storage, storage.create_new_study([StudyDirection.MAXIMIZE], "s")


def read(path: Path) -> list[dict[int, float]]:
    """Intermediate values of each trial, as any other process of Optuna reads them."""
    return [trial.intermediate_values for trial in read_study(path, "s").trials]


def test_operations_together_are_one_write_and_what_others_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal"
    storage, study = begun(path)
    flushes: list[int] = []
    monkeypatch.setattr(os, "fsync", flushes.append)
    with storage.batch():
        trials = [storage.create_new_trial(study) for _ in range(3)]
        for trial in trials:
            for step in range(4):
                storage.set_trial_intermediate_value(trial, step, trial + step / 10)
        assert storage.get_trial(trials[2]).intermediate_values[3] == 2.3, "at once for this process"
    assert len(flushes) == 1
    assert read(path) == [{step: trial + step / 10 for step in range(4)} for trial in range(3)]
    storage.set_trial_intermediate_value(trials[0], 4, 0.5)
    with storage.batch():
        storage.set_trial_intermediate_value(trials[0], 5, 0.75)
    assert read(path)[0] == {0: 0.0, 1: 0.1, 2: 0.2, 3: 0.3, 4: 0.5, 5: 0.75}
    assert not path.with_name("journal.lock").exists()


def test_what_others_wrote_meanwhile_is_seen_first(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    storage, study = begun(path)
    other = JournalStorage(JournalFileBackend(str(path)))
    for number in range(3):
        with storage.batch():
            trial = storage.create_new_trial(study)
            storage.set_trial_intermediate_value(trial, 0, float(number))
        other.set_trial_user_attr(trial, "note", f"seen {number}")
    assert read(path) == [{0: 0.0}, {0: 1.0}, {0: 2.0}]
    assert [trial.user_attrs["note"] for trial in storage.get_all_trials(study)] == ["seen 0", "seen 1", "seen 2"]


def test_after_many_operations_together_the_next_does_not_read_them_again(tmp_path: Path) -> None:
    def read_bytes() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    storage, study = begun(tmp_path / "journal")
    trial = storage.create_new_trial(study)
    with storage.batch():
        for step in range(5000):
            storage.set_trial_intermediate_value(trial, step, 0.5)
    before = read_bytes()
    storage.set_trial_user_attr(trial, "note", "one more")
    assert read_bytes() - before < (tmp_path / "journal").stat().st_size / 4


def test_a_full_disk_leaves_the_journal_whole_and_the_storage_as_the_file_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal"
    storage, study = begun(path)
    storage.create_new_trial(study)
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    def two_more() -> None:
        with storage.batch():
            storage.create_new_trial(study)
            storage.create_new_trial(study)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        two_more()
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert len(storage.get_all_trials(study)) == 1
    two_more()
    assert len(read(path)) == len(storage.get_all_trials(study)) == 3
    assert optuna.load_study(study_name="s", storage=storage).trials[2].number == 2
