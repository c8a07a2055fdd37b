"""What people write about a run: a name to show, tags, a note; beside its log, in `notes.json`.

Whoever lists the runs of a folder sees them. They take no part in what the run is: nothing of them is in its log,
in its identity or in its results. Who may write into the run's directory may change them, while it trains as well
as years later. An edit replaces the fields that it names, under a lock of the directory (flock(2)): of two of
one field the last counts, those of different fields both hold. Where the file system has no such locks, one of two
edits at the same moment may be lost, and the file is whole all the same.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ensemble.store.errors import StoreError
from ensemble.store.files import find_other_owner, write_json
from ensemble.store.regular_files import read_regular
from ensemble.store.run_paths import RunPaths

VERSION = 1
MOST_BYTES = 2**16
MOST_TAGS, LONGEST_TAG, LONGEST_NAME, LONGEST_NOTE = 32, 40, 100, 2000
#: Seconds that an edit waits for others, and between two looks.
WAIT_S, LOOK_S = 2.0, 0.01


@dataclass(frozen=True)
class RunNotes:
    """What is written about one run.

    Attributes:
        name: what the run is called in lists; empty: as it was declared.
        tags: in the order in which they were given, each once.
        note: a text of one or several lines.
    """

    name: str = ""
    tags: tuple[str, ...] = ()
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The notes as JSON has them."""
        return asdict(self) | {"tags": list(self.tags)}

    def edit(self, changes: Mapping[str, Any]) -> RunNotes:
        """Returns the notes after an edit.

        Args:
            changes: any of `name`, `note` (texts; empty ones remove them), `tags` (all that it has then), `add`,
                `remove` (tags, beside those that it has); tags are a list, or a text with blanks or commas.

        Raises:
            StoreError: they are of another form, too many or too long.
        """
        if unknown := sorted(set(changes) - {"name", "note", "tags", "add", "remove"}):
            raise StoreError(f"a run has no {unknown[0][:LONGEST_NAME]!r} to note: name, note, tags, add, remove")
        tags = _check_tags(changes.get("tags", self.tags))
        removed = set(_check_tags(changes.get("remove", ())))
        tags = [tag for tag in tags if tag not in removed]
        tags = list(dict.fromkeys([*tags, *_check_tags(changes.get("add", ()))]))
        if len(tags) > MOST_TAGS:
            raise StoreError(f"a run has at most {MOST_TAGS} tags")
        name = _check_text("name", changes.get("name", self.name), LONGEST_NAME).strip()
        if not name.isprintable():
            raise StoreError("a run's name is one line of printable letters")
        return RunNotes(
            name, tuple(tags), _check_text("note", changes.get("note", self.note), LONGEST_NOTE).strip()
        )


def _check_text(what: str, value: Any, longest: int) -> str:
    if not isinstance(value, str) or len(value) > longest:
        raise StoreError(f"a run's {what} is a text of at most {longest} letters")
    if any("\ud800" <= letter <= "\udfff" for letter in value):
        raise StoreError(f"a run's {what} must be text in UTF-8")
    return value


def _check_tags(value: Any) -> list[str]:
    value = value.replace(",", " ").split() if isinstance(value, str) else value
    if not isinstance(value, Sequence) or len(value) > MOST_TAGS:
        raise StoreError(f"tags are a list of at most {MOST_TAGS} texts")
    for tag in value:
        is_word = isinstance(tag, str) and 0 < len(tag) <= LONGEST_TAG and tag.isprintable()
        if not is_word or "," in tag or " " in tag:
            raise StoreError(f"a tag is one word of at most {LONGEST_TAG} letters without commas, not {tag!r:.60}")
    return list(value)


def load_notes(run_dir: RunPaths) -> RunNotes:
    """Returns what is written about a run; nothing where there is no file.

    Raises:
        StoreError: there is one that cannot be read, or of another form.
    """
    try:
        given = json.loads(read_regular(run_dir.notes, MOST_BYTES))
        if given["v"] != VERSION:
            raise ValueError(f"it has the format {given['v']!r:.20}, and this version reads {VERSION}")
        return RunNotes().edit({name: given[name] for name in ("name", "tags", "note")})
    except FileNotFoundError:
        return RunNotes()
    except (OSError, ValueError, KeyError, TypeError, RecursionError, StoreError) as error:
        why = (isinstance(error, OSError) and error.strerror) or f"{type(error).__name__}: {error}"
        raise StoreError(
            f"{run_dir.notes} cannot be read ({why:.200}): mend or remove it, it is not written over"
        ) from None


def read_notes(run_dir: RunPaths) -> RunNotes:
    """Returns what is written about a run, for lists: nothing where that cannot be read."""
    with contextlib.suppress(StoreError):
        return load_notes(run_dir)
    return RunNotes()


def explain_no_notes(run_dir: RunPaths) -> str | None:
    """Returns why this user may not write about a run; None where they may."""
    if not run_dir.events.exists() and not run_dir.info_file.exists():
        return f"there is no run in {run_dir.path}"
    if os.access(run_dir.path, os.W_OK | os.X_OK):
        return None
    owner = find_other_owner(run_dir.path)
    whose = "it is read-only" if owner is None else f"it belongs to {owner}"
    return f"{run_dir.path} cannot be written to, {whose}: its name, tags and note stay as they are"


def edit_notes(run_dir: RunPaths, changes: Mapping[str, Any]) -> RunNotes:
    """Changes what is written about a run, and returns it.

    Args:
        changes: see `RunNotes.edit`.

    Raises:
        StoreError: this user may not, the changes are none, what is written cannot be read and would be lost, or
            somebody else holds the lock for too long.
        WriteError: it cannot be written.
    """
    if (why := explain_no_notes(run_dir)) is not None:
        raise StoreError(why)
    with _hold(run_dir):
        notes = load_notes(run_dir).edit(changes)
        if notes != RunNotes():
            write_json(run_dir.notes, {"v": VERSION, **notes.as_dict()}, like=run_dir.path)
        else:
            run_dir.notes.unlink(missing_ok=True)
    return notes


@contextlib.contextmanager
def _hold(run_dir: RunPaths) -> Iterator[None]:
    """Keeps other edits of a run waiting, where its file system has locks of directories.

    Whoever may read the directory can lock it: nobody is waited for without end.
    """
    descriptor = os.open(run_dir.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        end = time.monotonic() + WAIT_S
        with contextlib.suppress(OSError):
            while not _lock(descriptor):
                if time.monotonic() > end:
                    raise StoreError(f"another process has kept {run_dir.path} locked for {WAIT_S:g} s: try again")
                time.sleep(LOOK_S)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
