"""What other shells ask of a run: one small file each, put whole into `requests/` and taken by the controller.

Verbs: `stop` (the run), `cancel` (a member, or all of them).
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


def take_requests(run_dir: RunDir | str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Take all requests that wait, oldest first; each is handed out once. Unreadable ones are logged, removed."""
    run = run_dir if isinstance(run_dir, RunDir) else RunDir(run_dir)
    taken = []
    for path in run.requests.glob("*.json"):
        try:
            request = json.loads(path.read_text())
            if request["v"] > VERSION:
                raise ValueError(f"version {request['v']} is newer than {VERSION}")
            taken.append((float(request["t"]), str(request["verb"]), request))
        except (ValueError, KeyError, TypeError) as error:
            _log.warning("ignoring the request %s: %s", path, error)
        path.unlink(missing_ok=True)
    return [request for *_, request in sorted(taken, key=lambda item: item[:2])]
