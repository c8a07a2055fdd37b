"""Checks the log of a run that was fetched: anybody may have written it, and it must not steer which code runs.

The digest that a user trusts is of the files of the declaration and the code. The log says what these are, too, so
that damage is found, and where copies of them are. It is believed in neither where it differs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ensemble.events import (
    Checkpoint,
    CheckpointReduced,
    CodeSaved,
    Event,
    Finished,
    MemberEvent,
    Packed,
    RunStarted,
)
from ensemble.store.digests import digest_file
from ensemble.store.errors import StoreError
from ensemble.store.frozen_arrays import is_name
from ensemble.store.log_lines import SavedFiles, read_batches, read_files
from ensemble.store.mirror.layout import is_declared, is_of_run
from ensemble.store.mirror.status import is_fetched
from ensemble.store.rundir import RunDir


def check_log(run_dir: RunDir, where: str) -> None:
    """Check that a log names files of a run alone, and says of run.json and the declaration what they are.

    Args:
        run_dir: with the files whose digest is trusted.
        where: it comes from, for messages.

    Raises:
        StoreError: it does not.
    """
    saved = read_files(run_dir.events)
    for path in (run_dir.info_file, run_dir.ensemble_file):
        if path.name in saved.files and digest_file(path) not in saved.files[path.name]:
            raise _refuse(where, f"{path.name} is another file than the one there, which is trusted")
    _check_names(run_dir, saved, where)


def check_fetched(run_dir: RunDir) -> None:
    """Check the names in the log of a directory, and what it says of run.json, if it was fetched from a mirror.

    Raises:
        StoreError: it names what no run has.
    """
    if is_fetched(run_dir) and run_dir.events.exists():
        _check_names(run_dir, read_files(run_dir.events), str(run_dir.path))


def _check_names(run_dir: RunDir, saved: SavedFiles, where: str) -> None:
    wrong = [name for name in saved.files if not is_declared(name)]
    wrong += [name for names in saved.arrays.values() for name in names if not is_name(name)]
    info: Mapping[str, Any] | None = None
    with contextlib.suppress(StoreError):  # that it is damaged is said by whoever reads it
        info = run_dir.info
    for events, _ in read_batches(run_dir.events):
        for event in events:
            wrong += [name for name in _list_names(event) if not is_of_run(name)]
            if isinstance(event, CodeSaved) and event.info and info is not None and event.info != info:
                raise _refuse(where, "run.json says something else than it does there, where it is trusted")
        if wrong:
            raise _refuse(where, f"a file {wrong[0][:100]!r} is part of the run, which has no such files")


def _list_names(event: Event) -> Iterator[str]:
    """Yields the files that readers open by an event, by their paths in the run directory."""
    match event:
        case Packed():
            yield event.path
        case RunStarted() | CodeSaved():
            yield from event.files
        case MemberEvent():
            folder = f"members/{event.member}"
            yield f"{folder}/log.txt"
            logged = event.checkpoint if isinstance(event, Finished) else event
            if isinstance(logged, Checkpoint | CheckpointReduced) and logged.path is not None:
                yield f"{folder}/{Path(logged.path).name}"


def _refuse(where: str, what: str) -> StoreError:
    return StoreError(
        f"{where} is damaged, or was forged: its log says that {what}; nothing of it is used. Somebody who may "
        "write to the mirror may have written the log"
    )
