"""Saves predictions that tests make up."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ensemble.spec.task import CLASSIFICATION, Task
from ensemble.store.digests import digest_file
from ensemble.store.predicted_rows import PredictedRows


def save_predictions(
    path: str | os.PathLike[str], split: str, values: Any, index: Any, target: Any, task: Task = CLASSIFICATION
) -> str:
    """`PredictedRows.save` of arrays: values [n, ...], index [n], target [n, ...] or None; other splits stay.

    Returns:
        The digest of the file.
    """
    rows = PredictedRows(Path(path).parent)
    try:
        rows.add(values, index, target)
        beside = digest_file(path) if os.path.exists(path) else None
        return rows.save(path, split, task, beside=beside)
    finally:
        rows.close()
