"""The process of one logger.

    python -m ensemble.reporting.loggers.process_main '{"name": ..., "run_dir": ..., "temporary": ...}'

The first line of its standard input has the options, which may be secret, as JSON. Another one comes when the run
ends: `{"last": EVENT}`, the event that will be logged last, null where that is in the log already. When it is
closed the controller is gone, and this process ends: at once, or when the logger has said so. To its standard
output it writes JSON, a line each: `{"failed": TEXT}` when it begins to fail, `{"works": true}` when it works
again, and at the end `{"ended": true, "missing": TEXT}`, TEXT null where everything was written.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import os
import queue
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from ensemble.events import Event, read_event
from ensemble.reporting.loggers.base import Kept, Logger, LostRecordsError
from ensemble.reporting.loggers.follower import Follower, describe_missing
from ensemble.reporting.loggers.mirror import MirrorFollower
from ensemble.store import RunDir
from ensemble.store.files import group_read_mode, make_directory

WORK_SHARE = 0.1  # of the time that a logger works at most, until the run ends
LAST_S = 20.0  # for a last word when the controller is gone
LOST = {"lost": True}
RETRY_S = 5.0  # after a failure; doubled with each one that follows

Say = Callable[[dict[str, Any]], None]


def make_logger(name: str, run_dir: RunDir, options: Mapping[str, Any]) -> Logger | MirrorFollower:
    """The logger of a name; imports no library."""
    return find_logger(name)(run_dir, options)


def find_logger(name: str) -> type[Logger] | type[MirrorFollower]:
    """The class of a logger; one of several of a kind has a number behind its name."""
    module = importlib.import_module(f"ensemble.reporting.loggers.{name.partition('-')[0]}")
    found: type[Logger] | type[MirrorFollower] = module.LOGGER
    return found


class LoggerProcess:
    """The loop of the process: follows the log, tries again after a failure, ends on request.

    Args:
        name, options: of the logger.
        requests: what the controller sends.
        say: sends a message to the controller.
    """

    def __init__(
        self, name: str, run_dir: RunDir, options: Mapping[str, Any], requests: queue.Queue[Any], say: Say
    ) -> None:
        self._name, self._run_dir, self._options = name, run_dir, options
        self._requests, self._say = requests, say
        self._kind = find_logger(name)
        self._kept = Kept(run_dir, name, self._kind.identify(options))
        self._follower: Follower | MirrorFollower | None = None
        self._failures = 0

    def run(self) -> None:
        """Follow the log until the run ends."""
        pause_s = 0.0
        while (request := self._wait(pause_s)) is None:
            pause_s = self._catch_up()
        if request == LOST:
            self._try(lambda follower: follower.lose())
            return
        self._end(read_event(request["last"]))

    def _wait(self, seconds: float) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = self._requests.get(timeout=seconds)
        except queue.Empty:
            return None
        return found

    def _catch_up(self) -> float:
        """Write what is new; returns the seconds to wait before the next time."""
        began = time.monotonic()
        try:
            self._try(lambda follower: follower.catch_up())
        except Exception as error:
            self._failures += 1
            if self._failures == 1:
                self._say({"failed": describe(error)})
            return min(self._kind.longest_retry_s, RETRY_S * 2.0 ** (self._failures - 1))
        if self._failures:
            self._failures = 0
            self._say({"works": True})
        pause_s, worked_s = self._kind.follow_s, time.monotonic() - began
        return pause_s if self._kind.may_wait else max(pause_s, worked_s * (1 / WORK_SHARE - 1))

    def _end(self, last: Event | None) -> None:
        missing = None
        try:
            self._try(lambda follower: follower.end(last))
            self._close()
        except Exception as error:
            missing = f"{describe(error)}; {self._kind.missing or describe_missing(self._run_dir, self._kept)}"
        self._say({"ended": True, "missing": missing})

    def _try(self, step: Callable[[Follower | MirrorFollower], None]) -> None:
        try:
            step(self._get_follower())
        except LostRecordsError:  # once more, from the first event on
            self._close()
            step(self._get_follower())
        except Exception:
            with contextlib.suppress(Exception):
                self._close()
            raise

    def _get_follower(self) -> Follower | MirrorFollower:
        if self._follower is None:
            logger = make_logger(self._name, self._run_dir, self._options)
            if isinstance(logger, MirrorFollower):
                self._follower = logger
            else:
                self._follower = Follower(self._run_dir, logger, self._kept)
        return self._follower

    def _close(self) -> None:
        if isinstance(self._follower, MirrorFollower):  # it stays: it knows what is copied already
            return
        follower, self._follower = self._follower, None
        if follower is not None:
            follower.close()


def describe(error: Exception) -> str:
    """An error in one line of at most 300 characters."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 300 else text[:297] + "..."


def _receive(requests: queue.Queue[Any], temporary: str, done: threading.Event | None) -> None:
    """Pass on what the controller sends; when it is gone, end this process and remove its temporary directory.

    Args:
        done: is waited for, for a limited time, after the logger was told that the controller is gone.
    """
    for line in sys.stdin:
        requests.put(json.loads(line))
    if done is not None:
        requests.put(LOST)
        done.wait(LAST_S)
    shutil.rmtree(temporary, ignore_errors=True)
    os._exit(1)


def main() -> None:
    """Run the process."""
    given = json.loads(sys.argv[1])
    output = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no message
    requests, done = queue.Queue[Any](), threading.Event()
    options = json.loads(sys.stdin.readline())
    waits = done if find_logger(given["name"]).may_wait else None
    arguments = [requests, given["temporary"], waits]
    threading.Thread(target=_receive, args=arguments, name="controller", daemon=True).start()
    run_dir = RunDir(given["run_dir"])
    make_directory(run_dir.loggers)
    os.umask(0o027 if group_read_mode(run_dir.path) else 0o077)
    with open(run_dir.loggers / f"{given['name']}.lock", "ab") as lock:
        # That of a controller that was killed may be ending.
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        process = LoggerProcess(
            given["name"],
            run_dir,
            options,
            requests,
            lambda message: print(json.dumps(message), file=output, flush=True),
        )
        try:
            process.run()
        finally:
            done.set()
    os._exit(0)  # libraries' threads and exit handlers may wait for a server


if __name__ == "__main__":
    main()
