"""Finds the runs in a folder and says of each how it stands: the list that a page of several runs shows.

A run is read when its log has changed, and at most once a second; of one that has ended, or that has lost
its controller, only its row is kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ensemble.reporting import text
from ensemble.reporting.comparison.declarations import Declared, limit_record, make_record, read_declared
from ensemble.reporting.comparison.record import RecordForm, RowForm, SummaryForm
from ensemble.reporting.dashboard.run_section import describe_head
from ensemble.reporting.run_projection import RunProjection
from ensemble.reporting.status import SILENT_S, describe_lost_controller
from ensemble.store import RunDir, RunStatus, StoreError
from ensemble.store.files import write_bytes
from ensemble.store.folding import EVENT_ERRORS
from ensemble.store.regular_files import open_regular, read_regular

LEVELS = 2
SCAN_S = 2.0
#: Directories that are looked into, and seconds that reading runs may take before what is known is shown.
MOST_DIRECTORIES, READ_S = 10_000, 0.5

#: Of a log, by which one is told from another.
HEAD_BYTES = 256
#: What the list shows, from the section `run` of a run's document.
FIELDS = tuple(RowForm.__annotations__)


#: Version of `summary.json`, and bytes of one: one of ten thousand members that are all combined has two million.
SUMMARY_VERSION, MOST_SUMMARY = 1, 2**23


def write_summary(run_dir: RunDir, run: RunProjection, reached: Sequence[tuple[float, float]]) -> None:
    """Write the row of a run that has ended, and what a comparison says of it, beside its log: a list of many runs
    need not read their logs, and no comparison of them.

    Both count as long as the log has as many bytes as now.

    Args:
        reached: see `ensemble.reporting.comparison.declarations.follow_objective`.

    Raises:
        WriteError: it cannot be written.
    """
    row = describe_head(run_dir.path.name, run)
    found = {"v": SUMMARY_VERSION, "log_bytes": run_dir.events.stat().st_size, "row": row}
    found |= {"record": limit_record(make_record(run, reached))}
    write_bytes(run_dir.summary, json.dumps(found, separators=(",", ":")).encode())


def _read_summary(run_dir: RunDir, log_bytes: int) -> dict[str, Any] | None:
    """The summary of a run; None where there is none of a log of so many bytes."""
    try:
        found = msgspec.convert(json.loads(read_regular(run_dir.summary, MOST_SUMMARY)), SummaryForm)
    except (OSError, ValueError, RecursionError):
        return None
    return dict(found) if (found["v"], found["log_bytes"]) == (SUMMARY_VERSION, log_bytes) else None


def recall_declared(run_dir: RunDir, log_bytes: int) -> Declared:
    """A run for a comparison: from its summary where that is of a log of so many bytes, else from its log.

    Raises:
        StoreError: its log cannot be read, or says what cannot be compared.
    """
    found = _read_summary(run_dir, log_bytes)
    with contextlib.suppress(*EVENT_ERRORS):
        return Declared.from_record(run_dir, (found or {})["record"])
    read = read_declared(run_dir.path)
    try:
        record = msgspec.convert(limit_record(read.record), RecordForm)
        return Declared(run_dir, {**record}, read.state).check()
    except EVENT_ERRORS as error:
        raise StoreError(f"what its log says cannot be compared: {error}") from None


def is_run(path: Path) -> bool:
    """Whether a directory is a run's; one that may not be entered is none."""
    return any(os.path.isfile(path / name) for name in ("run.json", "events.jsonl"))


def make_key(path: Path) -> str:
    """Names a run in addresses, without naming its directory."""
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:16]


def find_runs(folder: Path) -> list[Path]:
    """Returns the run directories in a folder, up to two levels deep, in the order of their names.

    Hidden directories and symbolic links are left out: nothing outside the folder is served.
    """
    budget = MOST_DIRECTORIES

    def walk(directory: Path, levels: int) -> Iterator[Path]:
        nonlocal budget
        try:
            with os.scandir(directory) as entries:
                names = sorted(
                    entry.name
                    for entry in entries
                    if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
                )
        except OSError:
            return
        for name in names:
            budget -= 1
            if budget < 0:
                return
            if is_run(directory / name):
                yield directory / name
            elif levels > 1:
                yield from walk(directory / name, levels - 1)

    return list(walk(folder, LEVELS))


@dataclass
class _Known:
    """What is known of one run: its row, the log that it was made from, and what it can be continued from."""

    row: dict[str, Any]
    stamp: tuple[int, ...] | None = None
    head: bytes = b""
    status: RunStatus | None = None
    is_lost: bool = False
    read_at: float = 0.0
    listed: tuple[dict[str, Any], dict[str, Any]] | None = None


def describe_row(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns a row of the list as the page has it: beside its fields, by the names that the filter knows, the
    texts of its columns (`cells`), and what they are sorted and filtered by (`params`).

    Args:
        where: its directory, from the folder on, which is its name.
    """
    found = _write_cells(row, where)
    cells, params = ({name: each[at] for name, each in found.items()} for at in (0, 1))
    return {**row, "cells": cells, "params": params}


def _write_cells(row: Mapping[str, Any], where: str) -> dict[str, tuple[str, Any]]:
    counts, best, used = row["counts"] or {}, row["best"] or {}, row["used"] or {}
    many, failed = sum(counts.values()), counts.get("failed", 0)
    energy, cpu, value, combined = (
        used.get("energy_j"),
        used.get("cpu_s"),
        best.get("value"),
        row["combined_value"],
    )
    origin = "" if energy is None else f" ({used['energy_origin']})"
    return {
        "name": (where, where),
        "dir": (where, where),
        "declared": (row["name"], row["name"]),
        "members": (str(many), many),
        "failed": (str(failed), failed),
        "best": (text.score(value), value),
        "combined": (text.score(combined), combined),
        "objective": (row["objective"] or text.ABSENT, row["objective"]),
        "state": (row["state"]["word"], row["state"]["word"]),
        "cpu_s": (text.cpu(cpu), cpu),
        "energy_j": (text.joules(energy) + origin, energy),
        "took_s": (text.duration(row["wall_s"]), row["wall_s"]),
    }


class RunList:
    """The runs below a folder, or the one run in a directory; called by one thread at a time.

    Args:
        path: of the folder or of the run, which need not be there yet where `is_one`.
        is_one: whether it is a run directory.
    """

    def __init__(self, path: Path, *, is_one: bool) -> None:
        self._path, self._is_one = path, is_one
        self._known: dict[str, _Known] = {}
        self._next_scan = 0.0
        self._with_used = False
        self.paths: dict[str, Path] = {}

    def update(self, heads: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns a row for each run (`describe_row`); of some in a large folder it has only the name at first.

        Args:
            heads: by key, how runs stand that are followed anyway (`describe_head`); their logs are not read here.
        """
        now = time.monotonic()
        if now >= self._next_scan:
            self.scan()
        for key, head in heads.items():
            if key in self.paths:
                self._known[key].row = {**head, "key": key, "dir": str(self.paths[key])}
        for key in sorted(self.paths.keys() - heads.keys(), key=lambda key: self._known[key].read_at):
            self._read(key, self.paths[key])
            if time.monotonic() > now + READ_S:
                break
        return [self._list(key) for key in self.paths]

    def read_all(self) -> list[dict[str, Any]]:
        """Returns a row for each run, what it has used included, however long it takes to read them."""
        self.scan()
        self._with_used = True
        for key, path in self.paths.items():
            self._read(key, path)
            self._known[key].status = None
        return [self._list(key) for key in self.paths]

    def scan(self) -> None:
        """Looks for runs."""
        found = [self._path] if self._is_one or is_run(self._path) else find_runs(self._path)
        self.paths = {make_key(path): path for path in found}
        self._known = {
            key: self._known.get(key) or _Known(_name_row(key, path)) for key, path in self.paths.items()
        }
        self._next_scan = time.monotonic() + SCAN_S

    def _list(self, key: str) -> dict[str, Any]:
        """The row of a run as the page has it; the same object until the run is read again."""
        known = self._known[key]
        if known.listed is None or known.listed[0] is not known.row:
            where = self.paths[key]
            where = where.relative_to(self._path) if where != self._path else Path(where.name)
            known.listed = (known.row, describe_row(known.row, str(where)))
        return known.listed[1]

    def _read(self, key: str, path: Path) -> None:
        known, run_dir = self._known[key], RunDir(path)
        known.read_at, stamp = time.monotonic(), None
        try:
            found = os.stat(run_dir.events)
            stamp = (found.st_ino, found.st_size, found.st_mtime_ns)
            if stamp == known.stamp and known.status is None:  # nothing follows before the log changes
                return
            with open_regular(run_dir.events, follows_link=True) as file:
                head = file.read(HEAD_BYTES)
            if known.status is None and (summary := _read_summary(run_dir, stamp[1])) is not None:
                known.row = {**summary["row"], "key": key, "dir": str(path)}
                known.stamp, known.head, known.is_lost = stamp, head, False
                return
            if known.status is None or known.stamp is None or head != known.head or stamp[1] < known.stamp[1]:
                known.status = RunStatus.load(run_dir)
            elif stamp != known.stamp:
                known.status.update()
            status = known.status
            lost = describe_lost_controller(run_dir, status.state, silent_s=SILENT_S)
            is_lost = lost is not None
            if stamp == known.stamp and is_lost == known.is_lost:
                if is_lost:
                    known.status = None
                return
            row = describe_head(path.name, RunProjection.from_status(status, lost), with_used=self._with_used)
        except FileNotFoundError:
            self._known[key] = _Known(_name_row(key, path, "not started"), read_at=known.read_at)
            return
        except (OSError, StoreError, *EVENT_ERRORS):
            self._known[key] = _Known(_name_row(key, path, "unreadable"), stamp, read_at=known.read_at)
            return
        known.row = {**row, "key": key, "dir": str(path)}
        known.stamp, known.head, known.is_lost = stamp, head, is_lost
        known.status = status if status.state.ended is None else None


def _name_row(key: str, path: Path, said: str = "not read yet") -> dict[str, Any]:
    row = dict.fromkeys(FIELDS) | {
        "name": path.name,
        "state": {"word": said, "tone": "soft"},
        "counts": {},
        "done": 0.0,
    }
    return {"key": key, "dir": str(path), **row}
