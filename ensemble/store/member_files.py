"""Reads what members have saved, as it is when its digest is the one in the log."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ensemble.spec.validation import unknown_name
from ensemble.store.checkpoint import load_checkpoint
from ensemble.store.digests import open_checked
from ensemble.store.errors import DamagedError, StoreError
from ensemble.store.member import MemberState
from ensemble.store.predictions import Predictions, list_splits, load_predictions
from ensemble.store.rundir import RunDir


def read_checkpoint(
    run_dir: RunDir, member: MemberState, parts: Collection[str] | None = None, *, mapped: bool = False
) -> dict[str, Any]:
    """The last checkpoint of a member.

    Args:
        parts: the keys of the state that are read; None: all.
        mapped: see `load_checkpoint`.

    Raises:
        DamagedError: there is none, or it is damaged.
        StoreError: it is of another format.
    """
    with _naming_remedy(run_dir):
        return load_checkpoint(
            run_dir.valid_checkpoint(member),
            parts,
            member.checkpoint.digest if member.checkpoint else None,
            mapped=mapped,
        )


def read_predictions(run_dir: RunDir, member: MemberState, split: str, *, mapped: bool = False) -> Predictions:
    """The predictions of a member on a split.

    Args:
        mapped: see `load_predictions`.

    Raises:
        DamagedError: there are none, or they are damaged.
        StoreError: the file holds something else.
    """
    digest = (member.predictions or {}).get(split)
    with _naming_remedy(run_dir):
        return load_predictions(run_dir.predictions(member.id), split, mapped=mapped, digest=digest)


def find_file(run_dir: RunDir, member: MemberState, name: str) -> Path:
    """A file that a member has saved itself.

    Raises:
        DamagedError: it is not what was saved, or gone.
        StoreError: the member has saved no such file, or has not finished.
    """
    if name not in (files := member.files or {}):
        what = f"{run_dir.path}: {member.id} ({member.state}) has finished with no file"
        raise StoreError(unknown_name(what, name, list(files)))
    path = run_dir.files(member.id) / name
    with _naming_remedy(run_dir), contextlib.suppress(FileNotFoundError), open_checked(path, files[name]):
        return path
    raise DamagedError(f"{path} is gone; `ensemble resume {run_dir.path}` makes it again")


def has_predictions(run_dir: RunDir, member: MemberState, split: str) -> bool:
    """Whether a member has saved predictions on a split as it is now; early logs have no digests of them."""
    saved = list_splits(run_dir.predictions(member.id)) if member.predictions is None else member.predictions
    return split in saved and member.outdated is None


@contextmanager
def _naming_remedy(run_dir: RunDir) -> Iterator[None]:
    try:
        yield
    except DamagedError as error:
        raise DamagedError(f"{error}; `ensemble resume {run_dir.path}` makes it again") from None
