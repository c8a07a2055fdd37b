"""What other shells ask of a run that goes on: taken from `requests/`, done, and answered in the log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from ensemble.controller.queue import Emit, MemberQueue, RefusedError
from ensemble.store import RunDir, StoreError, receive_requests

log = logging.getLogger(__name__)


class RequestHandler:
    """Answers each request by an `asked` event, so that none is lost without a word.

    Args:
        stop: `stop(reason, until)` ends the run resumably; members have until then to write a checkpoint.
    """

    def __init__(
        self, run_dir: RunDir, queue: MemberQueue, emit: Emit, stop: Callable[[str, float], None]
    ) -> None:
        self._run_dir, self._queue, self._emit, self._stop = run_dir, queue, emit, stop
        self._stuck: set[str] = set()

    def handle_pending(self, now: float, until: float, *, stopping: bool, ended: bool) -> None:
        """Do what has been asked by now.

        Args:
            until: how long members may take to write a checkpoint.
            stopping, ended: how far the run's end has come.
        """
        for request in receive_requests(self._run_dir, self._stuck):
            try:
                if request["unreadable"]:
                    raise RefusedError(request["unreadable"])
                if ended:
                    raise RefusedError("the run has ended")
                if request["verb"] == "stop":
                    self._stop("asked to", now if request.get("at_once") else until)
                    stopping, said = True, "members write a checkpoint and end"
                else:
                    said = self._queue.answer(request, now, until, stopping=stopping)
            except RefusedError as error:
                self.refuse([request], str(error))
            except StoreError:  # the log cannot be written
                raise
            except Exception as error:  # what others write into a file must not end the run
                log.exception("the request %s", request["id"])
                self.refuse([request], f"it could not be done: {type(error).__name__}: {error}")
            else:
                self._answer(request, True, said)

    def refuse(self, requests: Iterable[dict[str, Any]], why: str) -> None:
        """Say of each why it is not done."""
        for request in requests:
            log.warning("refused to %s %s: %s", request["verb"], request.get("member") or "", why)
            self._answer(request, False, why)

    def _answer(self, request: dict[str, Any], done: bool, said: str) -> None:
        self._emit(
            "asked",
            request=request["id"],
            verb=request["verb"],
            member=request.get("member"),
            done=done,
            said=said,
        )
