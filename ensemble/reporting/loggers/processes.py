"""The processes of a run's loggers, as the controller sees them: started, listened to, ended in bounded time."""

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
from collections.abc import Sequence
from typing import Any

from ensemble.events import Event, to_dict
from ensemble.executors.private_directory import PrivateDirectory
from ensemble.meter.cpu import make_usage, read_start
from ensemble.reporting.sections.notices import describe_logger
from ensemble.spec import LoggerOptions, Notify
from ensemble.store import RunDir
from ensemble.store.files import make_directory
from ensemble.store.mirror import MirrorOptions
from pipelines.ipc.child_processes import child_environment, reap

log = logging.getLogger(__name__)

MOST_STARTS = 3  # of a process that dies
#: Time limit for the end: for imports and a database, of which MLflow's take 5 s of CPU time, and for each member,
#: of which W&B takes 0.05 s. A machine on which others are at work may take many times as long.
END_S, END_MEMBER_S = 120.0, 0.5
_ROOM = 32  # bytes for the path of a socket below its directory
LOOK_S = 0.5  # between two looks for a request that the run ends at once

Options = LoggerOptions | Notify | MirrorOptions


class _Process:
    """The process of one logger, and those that its library starts."""

    def __init__(self, run_dir: RunDir, name: str, options: Options) -> None:
        self.name = name
        self._messages = run_dir.loggers / f"{self.name}.log"
        self._private = PrivateDirectory("ensemble-logger-", _ROOM)
        temporary = str(self._private.path)
        assert self._private.lock is not None
        given = {"name": self.name, "run_dir": str(run_dir.path)}
        command = [sys.executable, "-P", "-m", "ensemble.reporting.loggers.process_main"]
        self._buffer, self._used_s, self._began = b"", 0.0, time.monotonic()
        with open(self._messages, "ab") as messages:
            self._process = subprocess.Popen(
                [*command, json.dumps({**given, "temporary": temporary})],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=messages,
                env=child_environment() | {"TMPDIR": temporary},
                pass_fds=(self._private.lock,),  # the directory is in use until both processes have ended
                process_group=0,  # Ctrl-C is for the controller
            )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # arguments can be read by all users of the machine
            self._process.stdin.write(json.dumps(dataclasses.asdict(options)).encode() + b"\n")
            self._process.stdin.flush()
        self._start = read_start(self._process.pid)
        assert self._process.stdout is not None
        self.output = self._process.stdout.fileno()
        os.set_blocking(self.output, False)
        self.is_open = True  # whether more messages may come

    def read(self) -> list[dict[str, Any]]:
        """New messages of the process."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.output, 2**16):
                self._buffer += data
            self.is_open = False
        *lines, self._buffer = self._buffer.split(b"\n")
        return [json.loads(line) for line in lines]

    def request_end(self, last: Event | None) -> None:
        """Ask it to write what is left, and to end."""
        assert self._process.stdin is not None
        line = json.dumps({"last": None if last is None else to_dict(last)}).encode()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()

    def make_usage(self, node: str) -> dict[str, Any]:
        """A `usage` event with the CPU time of it and of the processes that its library has started."""
        if self._process.returncode is None:
            found = [process.cpu_times() for process in self._list_processes()]
            self._used_s = max(self._used_s, sum(times.user + times.system for times in found))
        used = make_usage(node, "orchestrate", self._process.pid, self._used_s, began=self._start)
        return {**used, "for_s": time.monotonic() - self._began}

    def _list_processes(self) -> list[Any]:
        import psutil

        try:
            process = psutil.Process(self._process.pid)
            return [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def close(self) -> None:
        """End it and the processes that its library has started, and wait for it."""
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


class LoggerProcesses:
    """The loggers of a run.

    Args:
        run_dir: of the run.
        loggers: their options; those of a mirror, too.
        notify: who gets alerts.

    Attributes:
        names: of all of them.
    """

    def __init__(self, run_dir: RunDir, loggers: Sequence[Options], notify: Sequence[Notify] = ()) -> None:
        self._run_dir = run_dir
        self._loggers: dict[str, Options] = {each.name: each for each in loggers}
        self._loggers |= {f"{each.name}-{place}": each for place, each in enumerate(notify, 1)}
        self.names = list(self._loggers)
        self._processes: dict[str, _Process] = {}
        self._starts: dict[str, int] = {}
        self._closed: list[_Process] = []  # their CPU time is still reported

    def start(self) -> None:
        """Start a process for each logger, once the run's start is in the log."""
        for name in self.names:
            self._start(name)

    def _start(self, name: str) -> None:
        make_directory(self._run_dir.loggers)
        self._starts[name] = self._starts.get(name, 0) + 1
        self._processes[name] = _Process(self._run_dir, name, self._loggers[name])

    def read(self) -> list[dict[str, Any]]:
        """News of the loggers, as `logger` events; a process that has died is started again."""
        events = []
        for name in self.names:
            process = self._processes.get(name)
            if process is None:
                continue
            events += [event for message in process.read() if (event := _as_event(process.name, message))]
            if not process.is_open:
                events.append(self._replace(process))
        for event in events:
            if event["state"] != "works":
                log.warning("%s", describe_logger(event["logger"], event["state"], event["detail"]))
        return events

    def _replace(self, process: _Process) -> dict[str, Any]:
        self._close(process)
        again = self._starts[process.name] < MOST_STARTS
        if again:
            self._start(process.name)
        detail = f"its process died; see {self._run_dir.loggers / process.name}.log"
        return _make_event(process.name, "failing" if again else "ended", detail)

    def make_usage(self, node: str) -> list[dict[str, Any]]:
        """`usage` events of all processes of loggers.

        Args:
            node: where the controller runs, and they.
        """
        return [process.make_usage(node) for process in (*self._processes.values(), *self._closed)]

    def end(self, last: Event | None, members: int, limit_s: float | None = None) -> list[str]:
        """Let all loggers write what is left, and end them, at once where the run is asked to end so.

        Args:
            last: the event that will be logged last; None if it is in the log.
            members: of the run, for the time limit.
            limit_s: for a run without members; None: `END_S`.

        Returns:
            What could not be written, a line for each logger that lacks something.
        """
        limit_s = (END_S if limit_s is None else limit_s) + END_MEMBER_S * members
        until = time.monotonic() + limit_s
        gone = [name for name in self.names if name not in self._processes]
        lines = [f"{name}: its process died; the log's end is missing" for name in gone if self._starts]
        waiting = list(self._processes.values())
        with selectors.DefaultSelector() as selector:
            for process in waiting:
                process.request_end(last)
                selector.register(process.output, selectors.EVENT_READ)
            while waiting and time.monotonic() < until and not self._is_hurried():
                selector.select(LOOK_S)
                for process in list(waiting):
                    ended = next((each for each in process.read() if "ended" in each), None)
                    if ended is None and process.is_open:
                        continue
                    waiting.remove(process)
                    selector.unregister(process.output)
                    missing = ended["missing"] if ended else "its process died; the log's end is missing"
                    lines += [f"{process.name}: {missing}"] if missing else []
        when = "before the run was to end at once" if self._is_hurried() else f"within {limit_s:.0f} s"
        late = f"has not ended {when}; the log's end is missing"
        lines += [f"{process.name}: {late}" for process in waiting]
        self.close()
        alerts = [line for line in lines if isinstance(self._loggers[line.partition(":")[0]], Notify)]
        for line in alerts:  # the run's results lack nothing by them
            log.warning("%s", line)
        return [line for line in lines if line not in alerts]

    def _is_hurried(self) -> bool:
        """Whether the run was asked to end at once, as by a second Ctrl-C."""
        for path in self._run_dir.requests.glob("stop-*.json"):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                if json.loads(path.read_text(encoding="utf-8")).get("at_once"):
                    return True
        return False

    def close(self) -> None:
        """End all processes at once; a later start of the run goes on where they have come to."""
        for process in list(self._processes.values()):
            self._close(process)

    def _close(self, process: _Process) -> None:
        process.close()
        self._closed.append(self._processes.pop(process.name))


def _as_event(name: str, message: dict[str, Any]) -> dict[str, Any] | None:
    if "failed" in message:
        return _make_event(name, "failing", f"{message['failed']}; it is tried again")
    return _make_event(name, "works", "") if "works" in message else None


def _make_event(name: str, state: str, detail: str) -> dict[str, Any]:
    return {"type": "logger", "logger": name, "state": state, "detail": detail}
