"""Answers the requests that other processes make to a running session."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from ensemble.controller.queue import MemberQueue, RefusedError
from ensemble.controller.session_state import SessionState

log = logging.getLogger(__name__)


class RequestHandler:
    """Answers each request with exactly one `request` event.

    Args:
        stop: `stop(reason, until)` stops the run; members have until then to write a checkpoint.
        stop_timeout_s: how long they may take.
    """

    def __init__(
        self,
        session: SessionState,
        queue: MemberQueue,
        stop: Callable[[str, float], None],
        stop_timeout_s: float,
    ) -> None:
        self._session, self._queue, self._stop, self._stop_timeout_s = session, queue, stop, stop_timeout_s

    def handle(self, event: Mapping[str, Any]) -> None:
        """Handle a `request`, or the result of one: `added`, `add_refused`.

        Args:
            event: in a `request`, the field `refused` may say why it cannot be fulfilled.
        """
        request = event["request"]
        try:
            if event["type"] == "added":
                done: str | None = self._queue.handle_addition(event["identity"])
                request = {**request, "member": event["identity"].member}
            elif event["type"] == "add_refused":
                raise RefusedError(event["error"])
            else:
                done = self._fulfil(request, event.get("refused"))
        except RefusedError as error:
            self._refuse(request, str(error))
        except Exception as error:  # a malformed request must not end the run
            log.exception("the request %s", request["id"])
            self._refuse(request, f"it could not be done: {type(error).__name__}: {error}")
        else:
            if done is not None:
                self._answer(request, True, done)

    def _fulfil(self, request: Mapping[str, Any], refused: str | None) -> str | None:
        reason = request["unreadable"] or refused
        if reason:
            raise RefusedError(reason)
        until = self._session.now + self._stop_timeout_s
        if request["verb"] == "stop":
            self._stop("asked to", self._session.now if request.get("at_once") else until)
            return "members write a checkpoint and end"
        return self._queue.fulfil(request, until)

    def _refuse(self, request: Mapping[str, Any], why: str) -> None:
        log.warning("refused to %s %s: %s", request["verb"], request.get("member") or "", why)
        self._answer(request, False, why)

    def _answer(self, request: Mapping[str, Any], done: bool, message: str) -> None:
        self._session.log(
            "request",
            request=request["id"],
            verb=request["verb"],
            member=request.get("member"),
            done=done,
            message=message,
        )
