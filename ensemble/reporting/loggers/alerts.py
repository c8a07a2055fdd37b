"""Sends a run's alerts (`ensemble.reporting.alerts`) to a webhook or a command, as a follower of its log.

What was sent is in the logger's file, so that a resume repeats nothing. The address and the command, which may
hold tokens, are in no file, message or event; what is said of a failure names the host or the program.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urljoin, urlsplit

from ensemble.events import Event, RunStarted
from ensemble.reporting.alerts import Alert, AlertGate, AlertReader
from ensemble.reporting.loggers.base import Logger
from ensemble.reporting.loggers.points import RunEnd
from ensemble.store import RunState

REQUEST_S, COMMAND_S = 10.0, 30.0  # that one may take
TRIES, BACK_OFF_S = 3, 1.0  # until the process waits longer; doubled with each one that follows
MOST_REDIRECTS = 3  # on the same host


class DeliveryError(RuntimeError):
    """An alert was not taken; the message holds no secret."""


class _Start:
    """Stands among alerts for a start of the run."""


class _Reader(AlertReader):
    def read(self, event: Event) -> list[Any]:
        """As usual, with each start of the run."""
        return [*([_Start()] if isinstance(event, RunStarted) else []), *super().read(event)]


class AlertLogger(Logger):
    """Sends alerts, each once."""

    may_wait: ClassVar[bool] = True
    missing: ClassVar[str] = "the last alerts were not sent"

    @classmethod
    def identify(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Nothing of the options: another receiver is not told again what the one before knows."""
        return {}

    def make_reader(self) -> AlertReader:
        """Finds the alerts in the events."""
        self._reader = _Reader(self.options.get("stalled_after", 5.0))
        return self._reader

    def open(self, state: RunState, ids: dict[str, Any]) -> None:
        """Begin with what is kept; a run that has had no alerts before begins with its present start."""
        self._is_first, self._gate = not ids, AlertGate(ids)

    def is_due(self) -> bool:
        """Whether something is to be sent that no event has brought."""
        now = time.time()
        self._gate.add(self._reader.look(now))
        return self._gate.next(now) is not None

    def write(self, points: Sequence[Any]) -> dict[str, Any]:
        """Send the alerts that may pass.

        Raises:
            DeliveryError: the first of them was not taken; that a later one is not, the next call says.
        """
        starts = [place for place, each in enumerate(points) if isinstance(each, _Start)]
        if self._is_first and starts:
            points, self._is_first = points[starts[-1] :], False
        self._gate.add(each for each in points if isinstance(each, Alert))
        return self._send_all()

    def end(self, end: RunEnd, state: RunState) -> dict[str, Any]:
        """Send that the run has ended, and what is left."""
        self._gate.add(self._reader.describe_end())
        return self._send_all(tries=2, is_last=True)

    def lose(self) -> dict[str, Any]:
        """Send that the run's controller is gone."""
        self._gate.add(self._reader.describe_loss(time.time()))
        return self._send_all(tries=1, is_last=True)

    def _send_all(self, tries: int = TRIES, *, is_last: bool = False) -> dict[str, Any]:
        sent = 0
        while (alert := self._gate.next(math.inf if is_last else time.time())) is not None:
            try:
                self._deliver(alert, tries)
            except DeliveryError:
                if sent == 0:
                    raise
                break  # what was sent is kept first
            self._gate.confirm(alert, time.time())
            sent += 1
        return self._gate.keep()

    def _deliver(self, alert: Alert, tries: int) -> None:
        run = self._reader.state.name or self.run_dir.path.name
        body = json.dumps(alert.as_message(run, self.options.get("page"))).encode()
        for left in reversed(range(tries)):
            try:
                if self.options.get("url") is not None:
                    post(self.options["url"], body)
                else:
                    run_command(self.options["command"], body + b"\n")
                return
            except DeliveryError:
                if left == 0:
                    raise
                time.sleep(BACK_OFF_S * 2 ** (tries - 1 - left))


def post(url: str, body: bytes, limit_s: float = REQUEST_S) -> None:
    """Posts JSON to a webhook; follows redirections to the same host only.

    Raises:
        DeliveryError: it was not taken within the limit.
    """
    host = _host_of(url)
    try:
        status = asyncio.run(_post(url, body, limit_s))
    except DeliveryError:
        raise
    except TimeoutError:
        raise DeliveryError(f"the webhook at {host} did not answer within {limit_s:g} s") from None
    except Exception as error:  # whose text may hold the address
        raise DeliveryError(f"the webhook at {host} cannot be reached ({type(error).__name__})") from None
    if not 200 <= status < 300:
        raise DeliveryError(f"the webhook at {host} answered with status {status}")


async def _post(url: str, body: bytes, limit_s: float) -> int:
    import aiohttp

    headers = {"Content-Type": "application/json", "User-Agent": "ray-ensemble"}
    async with asyncio.timeout(limit_s), aiohttp.ClientSession() as session:
        for _ in range(MOST_REDIRECTS + 1):
            async with session.post(url, data=body, headers=headers, allow_redirects=False) as answer:
                location = answer.headers.get("Location")
                if answer.status not in (301, 302, 303, 307, 308) or location is None:
                    return answer.status
            target = urljoin(url, location)
            if (urlsplit(target).scheme, urlsplit(target).netloc) != (urlsplit(url).scheme, urlsplit(url).netloc):
                raise DeliveryError(f"the webhook at {_host_of(url)} redirects to another host")
            url = target
    raise DeliveryError(f"the webhook at {_host_of(url)} redirects without end")


def _host_of(url: str) -> str:
    parts = urlsplit(url)
    return parts.hostname or "?" if parts.port is None else f"{parts.hostname}:{parts.port}"


def run_command(command: Sequence[str], body: bytes, limit_s: float = COMMAND_S) -> None:
    """Runs a command without a shell, an alert on its standard input, and ends it at a time limit.

    Raises:
        DeliveryError: it could not be run, failed, or took too long.
    """
    name = Path(command[0]).name
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # what it starts ends with it
        )
    except OSError as error:
        raise DeliveryError(f"the command {name} cannot be run: {error.strerror}") from None
    try:
        process.communicate(body, timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise DeliveryError(f"the command {name} took more than {limit_s:g} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode:
        raise DeliveryError(f"the command {name} ended with exit status {process.returncode}")


LOGGER = AlertLogger
