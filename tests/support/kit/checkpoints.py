"""Finds checkpoints that tests look into."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ensemble.store import RunDir


def newest_checkpoint(run_dir: RunDir, member: str, attempt: int) -> Any:
    """The last checkpoint that an attempt of a member has written; None: it has written none."""
    written = [path for (of, *_), path in run_dir.list_checkpoints(member) if of == attempt]
    newest: Path | None = written[-1] if written else None
    return newest
