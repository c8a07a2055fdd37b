"""What other shells ask of a run: one small file each, put whole into `requests/` and taken by the controller.

| verb | of | what the controller does |
|---|---|---|
| stop | the run | members write a checkpoint (not if `at_once`), the run ends and can be gone on with |
| cancel | a member, or all | ends for good |
| pause | a member, or all | writes a checkpoint, ends, gives up its place; the run lives on |
| resume | a member, or all | goes on from its checkpoint as soon as there is a place |
| add | a `member` declared as `Ensemble.members` are | is declared and gets in line |

Each is answered by an event `asked` in the log: `request` (its id), `verb`, `member`, `done`, `said`. A request
belongs to whoever removes its file: the controller, or the one who asked and no longer waits.
"""

from __future__ import annotations

import json
import logging
import os
import time
import uuid
from pathlib import Path
from typing import Any

from ensemble.store.errors import StoreError
from ensemble.store.files import write_json
from ensemble.store.rundir import RunDir

VERSION = 1

_log = logging.getLogger(__name__)


def write_request(run_dir: RunDir | str | os.PathLike[str], verb: str, **fields: Any) -> Path:
    """Ask something of the run in a directory; the controller takes it within a moment, if it runs.

    Returns:
        Its file; the id of the request is the file's stem.

    Raises:
        StoreError: there is no run, or the directory cannot be written.
    """
    if not verb.isidentifier():
        raise StoreError(f"a request is a plain word such as stop or cancel, got {verb!r}")
    run = run_dir if isinstance(run_dir, RunDir) else RunDir(run_dir)
    if not run.requests.is_dir():
        raise StoreError(f"no run here: {run.requests} does not exist; give a run directory (such as runs/NAME)")
    path = run.requests / f"{verb}-{uuid.uuid4().hex}.json"
    write_json(path, {"v": VERSION, "t": time.time(), "verb": verb, **fields})
    return path


def withdraw_request(path: Path) -> bool:
    """Take a request back; False when it was taken by the controller already."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def take_requests(run_dir: RunDir | str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Take all requests that wait, oldest first, with their `id`s; each is handed out once.

    Unreadable ones are logged and removed.
    """
    run = run_dir if isinstance(run_dir, RunDir) else RunDir(run_dir)
    taken = []
    for path in run.requests.glob("*.json"):
        try:
            text = path.read_text()
        except FileNotFoundError:  # withdrawn
            continue
        if not withdraw_request(path):
            continue
        try:
            request = json.loads(text)
            if request["v"] > VERSION:
                raise ValueError(f"version {request['v']} is newer than {VERSION}")
            taken.append((float(request["t"]), str(request["verb"]), {**request, "id": path.stem}))
        except (ValueError, KeyError, TypeError) as error:
            _log.warning("ignoring the request %s: %s", path, error)
    return [request for *_, request in sorted(taken, key=lambda item: item[:2])]
