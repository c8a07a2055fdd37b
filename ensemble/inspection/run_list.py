"""`list_runs`: a row for each run in a folder, from the same projection as the page's list of runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ensemble.reporting.dashboard.runs import RunList
from ensemble.spec.frames import Rows
from ensemble.store import StoreError


def list_runs(folder: str | os.PathLike[str] = "runs") -> Rows:
    """The runs in a folder, the newest first.

    Args:
        folder: up to two levels below it runs are found, except in directories that this user may not enter; or a
            run directory.

    Returns:
        A row for each run: `run_dir`; `name`; `state` ("running", "paused", "finished", "finished, with failures",
        "stopped", "failed": no member finished, "interrupted": nothing drives it any more, "not started",
        "unreadable"); `members`, `finished`, `failed` (counts; members of a search that are still to come count,
        too); `best_member`; `best` (the objective as that member reported it, usually of the validation split);
        `combined` (the objective of the combined model) and `combined_split` (of which split); `objective`;
        `cpu_s`; `energy_j` and `energy_origin`; `started` (Unix seconds); `wall_s`. None where it is not
        known.

    Raises:
        StoreError: there is no such folder.
    """
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise StoreError(f"there is no folder {path}: give the one that holds the run directories")
    rows = [_flatten(path, row) for row in RunList(path.absolute(), is_one=False).read_all()]
    return Rows(sorted(rows, key=lambda row: -(row["started"] or 0.0)))


def count_closed(folder: str | os.PathLike[str]) -> int:
    """The number of directories in a folder that this user may not read, which may be runs of others."""
    directories = (path for path in Path(folder).expanduser().iterdir() if path.is_dir())
    return sum(not os.access(path, os.R_OK | os.X_OK) for path in directories)


def _flatten(folder: Path, row: Mapping[str, Any]) -> dict[str, Any]:
    counts, best, used = row["counts"], row["best"] or {}, row["used"] or {}
    return {
        "run_dir": str(folder / Path(row["dir"]).relative_to(folder.absolute())),
        "name": row["name"],
        "state": row["state"]["word"],
        "members": sum(counts.values()),
        "finished": counts.get("finished", 0),
        "failed": counts.get("failed", 0),
        "best_member": best.get("member"),
        "best": best.get("value"),
        "combined": row["combined_value"],
        "combined_split": row["combined_split"],
        "objective": row["objective"],
        "cpu_s": used.get("cpu_s"),
        "energy_j": used.get("energy_j"),
        "energy_origin": used.get("energy_origin"),
        "started": row["started"],
        "wall_s": row["wall_s"],
    }
