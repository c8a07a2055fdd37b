"""A study on disk, for tests of searches."""

from __future__ import annotations

from pathlib import Path

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend


def read_study(journal: Path, name: str) -> optuna.Study:
    """The study in a journal, as any other process of Optuna reads it."""
    return optuna.load_study(study_name=name, storage=JournalStorage(JournalFileBackend(str(journal))))
