"""Passes requests from other processes to the controller of a run, each as one small file in `requests/`.

Verbs: stop (the run), cancel, pause and resume (members), add (a member, or a clone by `from`). Each is answered
by an event `request` in the log. A request belongs to whoever removes its file: the controller, or the one who
asked and no longer waits. One that cannot be read is put aside as `NAME.unreadable`, and answered as well.
"""

from __future__ import annotations

import functools
import json
import math
import os
import pwd
import socket
import time
import uuid
from pathlib import Path
from typing import Any

from ensemble.store.files import StoreError, encode_json, find_other_owner, write_bytes
from ensemble.store.regular_files import read_regular
from ensemble.store.rundir import RunDir

#: A controller refuses what is of another version.
VERSION = 2

#: Of one request; a hundred hyperparameters are a few kB.
MOST_BYTES = 2**20
LONGEST_BY = 200


@functools.cache
def find_user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return f"user {os.geteuid()}"


def write_request(run_dir: str | os.PathLike[str], verb: str, *, by: str | None = None, **fields: Any) -> Path:
    """Writes a request to the run in a directory; a running controller receives it in less than a second.

    Asked by root, it belongs to whom the directory belongs to, that their controller can read it.

    Args:
        by: who asks, for the run's log; default: the user, on this host.

    Returns:
        Its file; the id of the request is the file's stem.

    Raises:
        StoreError: there is no run, it is another user's, or the directory cannot be written.
    """
    if not verb.isidentifier():
        raise StoreError(f"a request is a plain word such as stop or cancel, got {verb!r}")
    run = RunDir(run_dir)
    owner = find_other_owner(run.path)
    if owner is not None and not os.access(run.requests, os.W_OK | os.X_OK) and os.path.lexists(run.path):
        raise StoreError(f"{run.path} is a run of {owner}: only they and root can {verb} it")
    if not run.requests.is_dir():
        raise StoreError(f"no run here: {run.requests} does not exist; give a run directory (such as runs/NAME)")
    path = run.requests / f"{verb}-{uuid.uuid4().hex}.json"
    head = {
        "v": VERSION,
        "t": time.time(),
        "verb": verb,
        "by": by or f"{find_user()} on {socket.gethostname()}",
    }
    write_bytes(path, encode_json({**head, **fields}), run.requests, mode=0o600)
    return path


def withdraw_request(path: Path) -> bool:
    """Removes a request; False where the controller has received it already."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def receive_requests(run_dir: str | os.PathLike[str], stuck: set[str]) -> list[dict[str, Any]]:
    """Removes and returns all pending requests with their `id`s, oldest first; each is returned once.

    Of one that cannot be heeded `unreadable` says why, in others it is None; it has a `verb` of some kind.

    Args:
        stuck: ids of files that could be neither read nor put aside; they are left alone, and grow by those found.
    """
    run = RunDir(run_dir)
    taken = []
    for path in run.requests.glob("*.json"):
        if path.stem in stuck:
            continue
        try:
            request = _validate(json.loads(read_regular(path, MOST_BYTES).decode()))
            if not withdraw_request(path):
                continue
            taken.append((float(request["t"]), {**request, "id": path.stem, "unreadable": None}))
        except FileNotFoundError:  # withdrawn
            continue
        except (OSError, ValueError, RecursionError) as error:
            name = path.name.encode(errors="backslashreplace").decode()  # it may be no text
            why = f"the request {name} cannot be read: {_explain_error(error)}"
            try:
                os.replace(path, path.with_suffix(".unreadable"))
            except OSError:
                stuck.add(path.stem)
            taken.append((0.0, {"id": path.stem, "verb": path.stem.partition("-")[0], "unreadable": why}))
    return [request for _, request in sorted(taken, key=lambda item: item[0])]


def _validate(request: Any) -> dict[str, Any]:
    """Returns the request if it has the form of one, whatever its verb.

    Raises:
        ValueError: it has not.
    """
    if not isinstance(request, dict):
        raise ValueError("it is not a JSON object")
    version, t, verb, member, by = (request.get(name) for name in ("v", "t", "verb", "member", "by"))
    if version != VERSION:
        raise ValueError(f"it has the format {version!r:.20}, and this controller reads {VERSION}")
    if not isinstance(t, (int, float)) or not -1e15 < t < 1e15 or not math.isfinite(t):
        raise ValueError("its `t` is not a time in Unix seconds")
    if not isinstance(verb, str) or not all(isinstance(text, (str, type(None))) for text in (member, by)):
        raise ValueError("its `verb`, its `member`, or its `by`, is not text")
    request["by"] = by and by[:LONGEST_BY]
    json.dumps(request, ensure_ascii=False, allow_nan=False).encode()  # what the log and the study can hold
    return request


def _explain_error(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeError):
        return "it is not UTF-8 text"
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
