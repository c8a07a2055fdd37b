"""Keeps what processes of a run have used where it outlives them.

What a process has used is in its reports, or is told by the parent that waits for it. When the driver of a run is
killed, nobody does either for it and for what ends with it. Therefore a thread of the driver, and of each node's
agent, writes the `usage` events that would be due now into a file of the run directory, often at first, then
whenever a hundredth of its age has passed. The next start of the run logs what the log has not
(`list_unreported`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ensemble.events import Report
from ensemble.meter.cpu import report_interval_s
from ensemble.meter.origin import from_ticks, to_ticks

#: Roles between which a process moves what it has used when it reports: what they have together only grows.
MOVING = ("startup", "train", "prepare")

LEAST_S = 0.05  # between two writings

log = logging.getLogger(__name__)


class Tally:
    """The file of one process, written until `close`.

    Args:
        folder: of the run's tallies; made and removed with the first and the last of them.
        list_usage: returns `usage` events with all that was used up to now. Called in a thread of its own.
    """

    def __init__(self, folder: Path, list_usage: Callable[[], Sequence[Report]]) -> None:
        self._file = folder / f"{os.uname().nodename}-{os.getpid()}-{id(self):x}.json"
        self._list_usage, self._over = list_usage, threading.Event()
        self._thread = threading.Thread(target=self._run, name="tally", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        began = time.monotonic()
        while True:
            try:
                self._write()
            except Exception as error:  # such as a full disk: a kill loses what was not reported
                log.debug("%s cannot be written: %s", self._file, error)
            if self._over.wait(max(LEAST_S, report_interval_s(time.monotonic() - began) / 2)):
                return

    def _write(self) -> None:
        self._file.parent.mkdir(mode=0o700, exist_ok=True)
        written = self._file.with_suffix(".new")
        written.write_text(
            json.dumps([{**used, "until": time.time()} for used in self._list_usage()]), encoding="utf-8"
        )
        os.replace(written, self._file)

    def close(self) -> None:
        """End it: all that is in it is reported."""
        self._over.set()
        self._thread.join()
        remove([self._file])


def read_tallies(folder: Path) -> tuple[list[Report], list[Path]]:
    """The `usage` events that killed processes have left, and the files to `remove` when these are in the log.

    What a kill or a power failure has left in part is removed with them.
    """
    files = sorted([*folder.glob("*.json"), *folder.glob("*.new")])
    return [event for file in files if file.suffix == ".json" for event in _read(file)], files


def list_unreported(left: Sequence[Report], logged: Mapping[tuple[Any, ...], tuple[float, int]]) -> list[Report]:
    """The `usage` events among those of tallies that say more than the log, one of each process and role.

    A process that reported after its tally was written may have moved seconds to another role: these are not
    counted in both.

    Args:
        left: as `read_tallies` returns them.
        logged: `last_usage` of the log's account.
    """
    latest: dict[tuple[Any, ...], dict[str, Report]] = {}
    for event in left:
        role, began = event["role"], event["began"]
        of_process = latest.setdefault((event["node"], event["pid"], began, None if role in MOVING else role), {})
        if role not in of_process or of_process[role]["cpu_s"] <= event["cpu_s"]:
            of_process[role] = event
    found = []
    for (*of, apart), events in latest.items():
        known = {role: logged.get((*of, role), (0.0, 0))[1] for role in (MOVING if apart is None else (apart,))}
        rest = sum(to_ticks(event["cpu_s"]) for event in events.values()) - sum(known.values())
        for role, event in events.items():
            grown = min(to_ticks(event["cpu_s"]) - known[role], rest)
            if grown > 0:
                found.append({**event, "cpu_s": from_ticks(known[role] + grown)})
                rest -= grown
    return found


def remove(files: Sequence[Path]) -> None:
    """Remove tallies; the last one with its folder."""
    for file in files:
        with contextlib.suppress(OSError):
            for each in (file, file.with_suffix(".new")):
                each.unlink(missing_ok=True)
            file.parent.rmdir()


def _read(file: Path) -> list[Report]:
    try:
        events = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        log.warning("%s cannot be read, and is left out: %s", file, error)
        return []
    if isinstance(events, list) and all(map(_is_usage, events)):
        return events
    log.warning("%s holds no usage figures, and is left out", file)
    return []


def _is_usage(event: object) -> bool:
    """Whether it is a `usage` event whose fields have the types that `make_usage` gives them."""
    if not isinstance(event, dict) or event.get("type") != "usage" or "began" not in event:
        return False
    kinds = {"node": str, "role": str, "pid": int, "cpu_s": int | float, "began": int | None}
    return all(isinstance(event.get(name), kind) for name, kind in kinds.items())
