"""Takes the predictions on one split out of the file of a member, as if it had saved none."""

from __future__ import annotations

from pathlib import Path

from ensemble.store import load_predictions
from ensemble.store.predictions import list_splits
from kit.kept_predictions import save_predictions


def drop_split(path: Path, split: str) -> None:
    """Write the file again without a split; without a file where it has no other."""
    kept = {name: load_predictions(path, name) for name in list_splits(path) if name != split}
    path.unlink()
    for name, found in kept.items():
        save_predictions(path, name, found.values, found.index, found.target, found.task)
