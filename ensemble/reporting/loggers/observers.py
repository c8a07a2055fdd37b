"""The process of a run's observers, for the controller: started again when it dies, ended in bounded time."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ensemble.events import Event, Report, make_event, to_dict
from ensemble.executors.private_directory import PrivateDirectory
from ensemble.meter.cpu import make_usage, read_start
from ensemble.reporting.sections.notices import describe
from ensemble.spec.loggers import LoggerOptions, list_fields
from ensemble.store import RunDir
from ensemble.store.files import make_directory
from ensemble.store.mirror_status import MirrorOptions
from pipelines.ipc.child_processes import child_environment, reap

log = logging.getLogger(__name__)

#: Time limit for the end: for imports and a database, of which MLflow's take 5 s of CPU time, and for each member,
#: of which W&B takes 0.05 s. A machine on which others are at work may take many times as long.
END_S, END_MEMBER_S = 120.0, 0.5
LOOK_S = 0.5  # between two looks for a request that the run ends at once
RESTART_S, LONGEST_RESTART_S = 5.0, 300.0  # before the process is started a second time; doubled with each death
MOST_LAST_STARTS = 3  # of a process that dies while the run ends
_ROOM = 32  # bytes for the path of a socket below its directory


class _Process:
    """The process, and those that its libraries start."""

    def __init__(self, run_dir: RunDir, observers: Mapping[str, Mapping[str, Any]]) -> None:
        self._messages = run_dir.loggers / "observers.log"
        self._private = PrivateDirectory("ensemble-logger-", _ROOM)
        temporary = str(self._private.path)
        assert self._private.lock is not None
        command = [sys.executable, "-P", "-m", "ensemble.reporting.loggers.observer_main"]
        self._buffer, self._used_s, self._began = b"", 0.0, time.monotonic()
        with open(self._messages, "ab") as messages:
            self._process = subprocess.Popen(
                [*command, str(run_dir.path), temporary],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=messages,
                env=child_environment() | {"TMPDIR": temporary},
                pass_fds=(self._private.lock,),  # the directory is in use until both processes have ended
                process_group=0,  # Ctrl-C is for the controller
            )
        self._send({"observers": observers})  # arguments could be read by all users of the machine
        self._start = read_start(self._process.pid)
        assert self._process.stdout is not None
        self.output = self._process.stdout.fileno()
        os.set_blocking(self.output, False)
        self.is_open = True  # whether more messages may come

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def read(self) -> list[dict[str, Any]]:
        """New messages of the process."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.output, 2**16):
                self._buffer += data
            self.is_open = False
        *lines, self._buffer = self._buffer.split(b"\n")
        return [json.loads(line) for line in lines]

    def request_end(self, names: Sequence[str], last: Event | None) -> None:
        """Ask observers to write what is left, and to end."""
        self._send({"end": list(names), "last": None if last is None else to_dict(last)})

    def make_usage(self, node: str) -> Report:
        """A `usage` event with the CPU time of it and of the processes that its libraries have started."""
        if self._process.returncode is None:
            times = [process.cpu_times() for process in self._list_processes()]
            self._used_s = max(self._used_s, sum(used.user + used.system for used in times))
        usage = make_usage(node, "orchestrate", self._process.pid, self._used_s, began=self._start)
        return {**usage, "for_s": time.monotonic() - self._began}

    def _list_processes(self) -> list[Any]:
        import psutil

        try:
            process = psutil.Process(self._process.pid)
            return [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def close(self) -> None:
        """End it and the processes that its libraries have started, and wait for it."""
        if self._process.returncode is not None:
            return
        for process in reversed(self._list_processes()):
            with contextlib.suppress(Exception):
                process.send_signal(signal.SIGKILL)
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        self._used_s = max(self._used_s, reap(self._process) or 0.0)
        self._private.close()
        with contextlib.suppress(OSError):
            if self._messages.stat().st_size == 0:
                self._messages.unlink()


class Observers:
    """The observers of a run, in one process that is started again when it dies.

    Args:
        run_dir: of the run.
        loggers: their options.
        notify: addresses of webhooks.
        mirror: where the run is mirrored.

    Attributes:
        names: of all of them.
        has_mirror: whether the mirror is one of them.
    """

    def __init__(
        self,
        run_dir: RunDir,
        loggers: Sequence[LoggerOptions] = (),
        notify: Sequence[str] = (),
        mirror: MirrorOptions | None = None,
    ) -> None:
        self._run_dir = run_dir
        self._observers = {
            logger.name: {"kind": logger.name, "options": list_fields(logger)} for logger in loggers
        }
        for number, url in enumerate(notify, 1):
            self._observers[f"webhook-{number}"] = {"kind": "webhook", "options": {"url": url}}
        self._loggers, self.has_mirror = list(self._observers), mirror is not None
        if mirror is not None:
            self._observers[mirror.name] = {"kind": "mirror", "options": dataclasses.asdict(mirror)}
        self.names = list(self._observers)
        self._process: _Process | None = None
        self._closed: list[_Process] = []  # their CPU time is still reported
        self._failure = ""  # why the process cannot be started
        self._failing: set[str] = set()  # as was last said, also by a process that has died
        self._is_started, self._deaths, self._start_at = False, 0, 0.0

    def start(self) -> None:
        """Start the process, once the run's start is in the log."""
        if self.names:
            self._is_started = True
            self._start()

    def _start(self) -> _Process | None:
        """Start the process; None where it cannot be started, such as on a full disk: `_failure` says why."""
        try:
            make_directory(self._run_dir.loggers)
            self._process = _Process(self._run_dir, self._observers)
        except OSError as error:
            self._failure = f"it cannot be started: {error.strerror or error}"
        return self._process

    def read(self) -> list[Report]:
        """News of the observers, as `logger` events; a process that has died is started again."""
        events: list[Report] = []
        if self._process is not None:
            events += filter(None, map(self._make_event, self._process.read()))
            if not self._process.is_open:
                events.append(self._note_death())
        is_due = self._is_started and self._process is None and time.monotonic() >= self._start_at
        if is_due and self._start() is None:
            events.append(self._note_death(f"{self._failure}; it is tried again"))
        for event in events:
            if event["state"] != "works":
                log.warning("%s", describe(make_event(**event)))
        return events

    def _make_event(self, message: Mapping[str, Any]) -> Report | None:
        if "failed" in message:
            self._failing.add(message["name"])
            return _describe(message["name"], "failing", f"{message['failed']}; it is tried again")
        if "works" in message and message["name"] in self._failing:
            self._failing.remove(message["name"])
            return _describe(message["name"], "works", "")
        return _describe("process", "works", "") if "started" in message and self._deaths else None

    def _note_death(self, why: str = "") -> Report:
        self._close()
        self._deaths += 1
        wait_s = 0.0 if self._deaths == 1 else min(LONGEST_RESTART_S, RESTART_S * 2.0 ** (self._deaths - 2))
        self._start_at = time.monotonic() + wait_s
        return _describe("process", "failing", why or f"it died and is started again; see {self._messages}")

    @property
    def _messages(self) -> str:
        return f"{self._run_dir.loggers}/observers.log"

    def make_usage(self, node: str) -> list[Report]:
        """`usage` events of the process, and of those that have died.

        Args:
            node: where the controller runs, and they.
        """
        processes = [*([] if self._process is None else [self._process]), *self._closed]
        return [process.make_usage(node) for process in processes]

    def forget_closed(self) -> None:
        """Leave out from now on what has died: its usage is logged."""
        self._closed.clear()

    def end_loggers(self, last: Event | None, members: int) -> list[str]:
        """Let all but the mirror write what is left, and end.

        Args:
            last: the event that will be logged last; None if it is in the log.
            members: of the run, for the time limit.

        Returns:
            What could not be written, a line for each logger that lacks something.
        """
        missing = self._end(self._loggers, last, END_S + END_MEMBER_S * members)
        if not self.has_mirror:
            self.close()
        lines = [f"{name}: {what}" for name, what in missing.items() if not name.startswith("webhook")]
        for name in missing.keys() - {line.partition(":")[0] for line in lines}:
            log.warning("%s: %s", name, missing[name])  # the run's results lack nothing by it
        return lines

    def end_mirror(self, limit_s: float) -> None:
        """Let the mirror copy what is left, with the run's last event, for a limited time."""
        self._end(["mirror"], None, limit_s)
        self.close()

    def _end(self, names: Sequence[str], last: Event | None, limit_s: float) -> dict[str, str]:
        """Let observers end, at once where the run is asked to end so; returns what they lack, by name."""
        until, starts, waiting = time.monotonic() + limit_s, 1, list(names)
        if not self._is_started or not waiting:
            return {}
        missing, process = dict[str, str](), self._process or self._start()
        if process is None:
            return dict.fromkeys(waiting, self._failure)
        process.request_end(waiting, last)
        while waiting and time.monotonic() < until and not self._is_hurried():
            _wait_for(process.output)
            for message in process.read():
                if "ended" in message and message["name"] in waiting:
                    waiting.remove(message["name"])
                    missing |= {message["name"]: message["missing"]} if message["missing"] else {}
            if waiting and not process.is_open:
                self._note_death()
                if starts == MOST_LAST_STARTS:
                    return missing | dict.fromkeys(waiting, f"the process died; see {self._messages}")
                starts += 1
                if (again := self._start()) is None:
                    return missing | dict.fromkeys(waiting, self._failure)
                process = again
                process.request_end(waiting, last)
        when = "before the run was to end at once" if self._is_hurried() else f"within {limit_s:.0f} s"
        return missing | dict.fromkeys(waiting, f"has not ended {when}; the log's end is missing")

    def _is_hurried(self) -> bool:
        for path in self._run_dir.requests.glob("stop-*.json"):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                if json.loads(path.read_text(encoding="utf-8")).get("at_once"):
                    return True
        return False

    def close(self) -> None:
        """End the process at once; a later start of the run goes on where its observers have come to."""
        self._is_started = False
        self._close()

    def _close(self) -> None:
        if self._process is not None:
            self._process.close()
            self._closed.append(self._process)
            self._process = None


def _wait_for(output: int) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(output, selectors.EVENT_READ)
        selector.select(LOOK_S)


def _describe(name: str, state: str, detail: str) -> Report:
    return {"type": "logger", "logger": name, "state": state, "detail": detail}
