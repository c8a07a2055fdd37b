"""Watches whether the head of the cluster answers, and makes the calls that need it.

Ray's calls to the head (its GCS) have no time limit: they wait for a head that is gone for a minute, and then Ray
ends the whole process. What agents send and are sent needs no head, so a run can end in order meanwhile.
"""

from __future__ import annotations

import contextvars
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from ensemble.executors.ray import _compat

_CHECK_S = 1.0
_ANSWER_S = 2.0
_BLOCKED_S = 5.0  # after which a call is taken for one that waits for the head
_POLL_S = 0.5

_RAY_S = "RAY_gcs_rpc_server_reconnect_timeout_s"  # how long Ray waits for a head; operators raise it
_RAY_DEFAULT_S = 60.0

Value = TypeVar("Value")


class HeadLostError(Exception):
    """The head of the cluster has not answered for too long."""


def read_patience() -> float:
    """Seconds for which Ray waits for a head that does not answer, before it ends the processes."""
    try:
        return max(1.0, float(os.environ[_RAY_S]))
    except (KeyError, ValueError):
        return _RAY_DEFAULT_S


class Head:
    """Asks the head each second whether it is there, and makes calls in a thread of its own.

    Args:
        is_answering: asks the head, and returns within some seconds.
        patience_s: for which Ray waits for it. A third of that without an answer, and it is taken for lost; the
            rest is for members to write checkpoints.

    Attributes:
        is_given_up: whether it was taken for lost for good.
    """

    def __init__(
        self,
        is_answering: Callable[[float], bool] = _compat.is_head_answering,
        patience_s: float | None = None,
    ) -> None:
        self._is_answering = is_answering
        self._patience_s = read_patience() if patience_s is None else patience_s
        self._answered_at = time.monotonic()
        self.is_given_up = False
        self._closed = threading.Event()
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        # Daemons, since nothing ends a call that waits for a head which is gone.
        threading.Thread(target=self._watch, name="head", daemon=True).start()
        threading.Thread(target=self._make_calls, name="head-calls", daemon=True).start()

    @property
    def is_lost(self) -> bool:
        """Whether it has not answered for too long."""
        return time.monotonic() - self._answered_at > self._patience_s / 3

    @property
    def are_nodes_ending(self) -> bool:
        """Whether Ray is about to end the nodes, for they miss the head."""
        return time.monotonic() - self._answered_at > self._patience_s * 3 / 4

    def call(self, function: Callable[..., Value], *arguments: Any) -> Value:
        """Call a function, in the caller's context, and return its result.

        Raises:
            HeadLostError: the head is lost and the call, which may wait for it, has not returned.
        """
        future, began = Future[Value](), time.monotonic()
        context = contextvars.copy_context()  # with the signals that the caller defers
        self._calls.put((future, lambda: context.run(function, *arguments)))
        while True:
            try:
                return future.result(_POLL_S)
            except TimeoutError:
                if future.done():
                    raise
                if self.is_lost and time.monotonic() - began > _BLOCKED_S:
                    raise HeadLostError from None

    def ask(self, function: Callable[..., Value], *arguments: Any, **options: Any) -> Value:
        """Make a call, within `call`, that may wait for the head; it is the last one if that was given up.

        Another thread goes on then, with the same agents and events.

        Raises:
            HeadLostError: it was given up.
        """
        result = function(*arguments, **options)
        if self.is_given_up:
            raise HeadLostError
        return result

    def give_up(self) -> None:
        """Take the head for lost, whatever it answers later."""
        self.is_given_up = True

    def close(self) -> None:
        """End the threads, unless a call still waits for the head."""
        self._closed.set()
        self._calls.put(None)

    def _watch(self) -> None:
        while not self._closed.wait(_CHECK_S):
            if self._is_answering(_ANSWER_S):
                self._answered_at = time.monotonic()

    def _make_calls(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function = call
            try:
                with _compat.start_no_ray():
                    future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
