"""Tells a webhook that the run has ended, was stopped or has lost its controller: a POST of one JSON object.

The address may hold a token: it is in no file, message or event; what is said of a failure names the host.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar
from urllib.parse import urlsplit

from ensemble.events import RunFinished
from ensemble.reporting import text
from ensemble.reporting.loggers.base import Logger
from ensemble.reporting.loggers.points import Point, RunEnd
from ensemble.store import RunState

REQUEST_S = 10.0  # that a request may take
TRIES, BACK_OFF_S = 3, 1.0  # doubled with each try that follows


class DeliveryError(RuntimeError):
    """A message was not taken; the text holds no secret."""


class WebhookLogger(Logger):
    """Posts one message at the end of each start of the run."""

    missing: ClassVar[str] = "the end of the run was not sent"
    tells_loss: ClassVar[bool] = True

    @classmethod
    def identify(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Nothing: the address is not kept."""
        return {}

    def open(self, state: RunState, ids: dict[str, Any]) -> None:
        """Read which end was told last."""
        self._told = ids.get("told")

    def write(self, points: Sequence[Point]) -> dict[str, Any]:
        """Write nothing yet."""
        return {"told": self._told}

    def end(self, end: RunEnd, state: RunState) -> dict[str, Any]:
        """Tell how the run has ended.

        Raises:
            DeliveryError: nobody took the message.
        """
        return self._tell(state, *describe_end(state))

    def lose(self, state: RunState) -> dict[str, Any]:
        """Tell that the run's controller is gone.

        Raises:
            DeliveryError: nobody took the message.
        """
        if state.ended is not None:
            return {"told": self._told}
        return self._tell(state, "run_lost", "the process that drives the run is gone; `ensemble resume` goes on")

    def _tell(self, state: RunState, kind: str, what: str) -> dict[str, Any]:
        end = f"{kind} of start {state.starts}"
        if self._told != end:
            run, t = state.name or self.run_dir.path.name, time.time() if state.ended is None else state.ended.t
            at = datetime.fromtimestamp(t, UTC).isoformat(timespec="seconds")
            message = {"run": run, "kind": kind, "text": text.visible(f"{run}: {what}"), "time": at}
            self._deliver(json.dumps(message))
            self._told = end
        return {"told": self._told}

    def _deliver(self, body: str) -> None:
        for tries_left in reversed(range(TRIES)):
            try:
                post(self.options["url"], body.encode())
                return
            except DeliveryError:
                if tries_left == 0:
                    raise
                time.sleep(BACK_OFF_S * 2 ** (TRIES - 1 - tries_left))


def describe_end(state: RunState) -> tuple[str, str]:
    """The kind of a run's end, and what is told of it."""
    counts = Counter(member.state for member in state.members.values())
    how = ", ".join(f"{count} {name}" for name, count in counts.items()) or "no members"
    if not isinstance(state.ended, RunFinished):
        reason = state.ended.reason if state.ended is not None else None
        return "run_stopped", f"stopped ({reason or 'no reason given'}): {how}"
    if counts["finished"]:
        return "run_ended", f"ended: {how}"
    return "run_failed", f"failed, no member finished: {how}"


def post(url: str, body: bytes, limit_s: float = REQUEST_S) -> None:
    """Post JSON to a webhook. A redirection is not followed: it may lead to another host.

    Raises:
        DeliveryError: it was not taken within the limit.
    """
    parts = urlsplit(url)
    host = parts.hostname or "?" if parts.port is None else f"{parts.hostname}:{parts.port}"
    try:
        status = asyncio.run(_post(url, body, limit_s))
    except TimeoutError:
        raise DeliveryError(f"the webhook at {host} did not answer within {limit_s:g} s") from None
    except Exception as error:  # whose text may hold the address
        raise DeliveryError(f"the webhook at {host} cannot be reached ({type(error).__name__})") from None
    if not 200 <= status < 300:
        raise DeliveryError(f"the webhook at {host} answered with status {status}")


async def _post(url: str, body: bytes, limit_s: float) -> int:
    import aiohttp

    headers = {"Content-Type": "application/json", "User-Agent": "ray-ensemble"}
    async with (
        asyncio.timeout(limit_s),
        aiohttp.ClientSession() as session,
        session.post(url, data=body, headers=headers, allow_redirects=False) as answer,
    ):
        return answer.status
