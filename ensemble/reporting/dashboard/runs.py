"""Finds the runs in a folder and says of each how it stands: the list that a page of several runs shows.

A run is read when its log has changed, and at most once a second; of one that has ended only its row is kept.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ensemble.reporting import text
from ensemble.reporting.dashboard.run_section import describe_head
from ensemble.reporting.run_projection import RunProjection
from ensemble.reporting.status import describe_lost_controller
from ensemble.store import RunDir, RunState, RunStatus, StoreError
from ensemble.store.folding import EVENT_ERRORS
from ensemble.store.follower import Stamp, find_stamp

LEVELS = 2
SCAN_S = 2.0
#: Directories that are looked into, and seconds that reading runs may take before what is known is shown.
MOST_DIRECTORIES, READ_S = 10_000, 0.5


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
    stamp: Stamp | None = None
    status: RunStatus | None = None
    lost: str | None = None
    read_at: float = 0.0


def describe_row(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns a row of the list as the page has it: beside its fields, by the names that the filter knows, the
    texts of its columns (`cells`), and what they are sorted and filtered by (`params`).

    Args:
        where: its directory, from the folder on, which is its name.
    """
    counts, best, used = row["counts"], row["best"] or {}, row["used"] or {}
    many, failed, value = sum(counts.values()), counts.get("failed", 0), best.get("value")
    energy, origin, cpu = used.get("energy_j"), used.get("energy_origin"), used.get("cpu_s")
    columns = {
        "name": (where, where),
        "dir": (where, where),
        "declared": (row["name"], row["name"]),
        "members": (str(many), many),
        "failed": (str(failed), failed),
        "best": (text.score(value), value),
        "combined": (text.score(row["combined_value"]), row["combined_value"]),
        "objective": (row["objective"] or text.ABSENT, row["objective"]),
        "state": (row["state"]["word"], row["state"]["word"]),
        "cpu_s": (text.cpu(cpu), cpu),
        "energy_j": (text.joules(energy, origin), energy),
        "took_s": (text.duration(row["wall_s"]), row["wall_s"]),
    }
    cells, params = ({name: pair[at] for name, pair in columns.items()} for at in (0, 1))
    return {**row, "cells": cells, "params": params}


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
        self.paths: dict[str, Path] = {}

    def update(self, heads: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns a row for each run (`describe_row`); of some in a large folder it has only the name at first.

        Args:
            heads: by key, how runs stand that are followed anyway (`describe_head`); their logs are not read here.
        """
        now_s = time.monotonic()
        if now_s >= self._next_scan:
            self.scan()
        for key, head in heads.items():
            if key in self.paths:
                self._known[key].row = {**head, "key": key, "dir": str(self.paths[key])}
        for key in sorted(self.paths.keys() - heads.keys(), key=lambda key: self._known[key].read_at):
            self._read(key, self.paths[key])
            if time.monotonic() > now_s + READ_S:
                break
        return self._list()

    def read_all(self) -> list[dict[str, Any]]:
        """Returns a row for each run, what it has used included, however long it takes to read them."""
        self.scan()
        for key, path in self.paths.items():
            self._read(key, path, with_used=True)
            self._known[key].status = None
        return self._list()

    def scan(self) -> None:
        paths = [self._path] if self._is_one or is_run(self._path) else find_runs(self._path)
        self.paths = {make_key(path): path for path in paths}
        self._known = {
            key: self._known.get(key) or _Known(_name_row(key, path)) for key, path in self.paths.items()
        }
        self._next_scan = time.monotonic() + SCAN_S

    def _list(self) -> list[dict[str, Any]]:
        names = {
            key: str(path.relative_to(self._path)) if path != self._path else path.name
            for key, path in self.paths.items()
        }
        return [describe_row(self._known[key].row, name) for key, name in names.items()]

    def _read(self, key: str, path: Path, *, with_used: bool = False) -> None:
        entry, run_dir = self._known[key], RunDir(path)
        entry.read_at = time.monotonic()
        try:
            stamp = find_stamp(run_dir.events)
            if stamp == entry.stamp and entry.status is None:  # nothing follows before the log changes
                return
            if entry.status is None:
                entry.status = RunStatus.load(run_dir)
            else:
                entry.status.update()
            lost = describe_lost_controller(run_dir, entry.status.state)
            if stamp != entry.stamp or lost != entry.lost:
                run = RunProjection.from_status(entry.status, lost)
                entry.row = {**describe_head(path.name, run, with_used=with_used), "key": key, "dir": str(path)}
            entry.stamp, entry.lost = stamp, lost
            if entry.status.state.ended is not None or lost is not None:
                entry.status = None
        except FileNotFoundError:
            self._known[key] = _Known(_name_row(key, path, "not started"), read_at=entry.read_at)
        except (OSError, StoreError, *EVENT_ERRORS):
            self._known[key] = _Known(_name_row(key, path, "unreadable"), read_at=entry.read_at)


def _name_row(key: str, path: Path, word: str = "not read yet") -> dict[str, Any]:
    row = describe_head(path.name, RunProjection(RunState()), with_used=False)
    nothing = dict.fromkeys(("updated", "best", "objective", "wall_s"))
    return {**row, **nothing, "key": key, "dir": str(path), "state": {"word": word, "tone": "soft"}}
