"""Follows the log of one run for all pages that watch it.

The log is looked at only while somebody watches, ten times a second at most, by one thread that also owns the
projection: a log that takes long to read keeps no other request waiting. A change is encoded once for all
subscribers. Each of them holds one message at most: one that reads more slowly than changes come receives what it
missed as one change, made again from the events, or is told to load everything anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import json
import math
import os
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from ensemble.events import MemberDeclared
from ensemble.reporting.dashboard.projection import OF_ANALYSES, RunView
from ensemble.reporting.dashboard.run_section import describe_head
from ensemble.reporting.status import SILENT_S, describe_lost_controller
from ensemble.store.files import StoreError
from ensemble.store.follower import LogFollower, LogReplacedError, Stamp, find_stamp
from ensemble.store.log_lines import identify_log, read_batches

if TYPE_CHECKING:
    from ensemble.store.rundir import RunDir
    from ensemble.store.state import RunState

T = TypeVar("T")

LOOK_S, CHANGE_S, DRIVER_S = 0.1, 0.2, 2.0
#: Of the log, that a subscriber may be behind; beyond that it loads everything anew.
MOST_BEHIND_BYTES = 8 * 2**20

_OF_ANALYSES = frozenset[str]().union(*OF_ANALYSES.values())


def encode(value: Any) -> bytes:
    """Returns a document as JSON in ASCII, on one line; NaN and infinities become null."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    except ValueError:
        return json.dumps(_replace_nan(value), separators=(",", ":"), allow_nan=False).encode()


def _replace_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _replace_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replace_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def encode_message(data: bytes, *, id: int | None = None, event: str | None = None) -> bytes:
    """Returns a server-sent event; `data` has no line ends."""
    head = (b"" if event is None else b"event: %s\n" % event.encode()) + (b"" if id is None else b"id: %d\n" % id)
    return head + b"data: " + data + b"\n\n"


RESET = encode_message(b"{}", event="reset")


def explain_read_only(run_dir: RunDir) -> str | None:
    """Returns why requests to a run cannot be written by this user; None where they can."""
    if os.access(run_dir.requests, os.W_OK | os.X_OK) or not run_dir.path.exists():
        return None
    return f"this page is served by a user who may only read {run_dir.path}"


class LogReader:
    """Keeps the projection of a run up to date; called by one thread at a time.

    Attributes:
        view: the projection of the present log; an empty one while there is none.
        members: names of the members in the log.
        analysed: counts the events after which the analyses are others.
        generation: counts the logs; a log that was replaced or cut has another one.
    """

    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir, self.generation, self.closing = run_dir, 0, False
        self._read_only = explain_read_only(run_dir)
        self._described_driver: str | None = None
        self._next_change = self._next_driver = 0.0
        self._unreadable: Stamp | None = None
        self._has_log = False
        self._begin()

    def _begin(self) -> None:
        """Starts with an empty projection."""
        self.view, self.members, self.analysed = RunView(self.run_dir), set[str](), 0
        self.generation += 1
        self._log = LogFollower(self.run_dir)

    def read(self) -> int:
        """Applies what is new in the log; what is wrong with it becomes `view.driver`. Returns the generation."""
        try:
            stamp = find_stamp(self.run_dir.events)
            if stamp != self._unreadable:  # else it is not read again before it changes
                self._unreadable = stamp
                self._read_log()
                self._unreadable = None
        except (FileNotFoundError, NotADirectoryError):
            self._fail(f"{self.run_dir.path} has no event log: its run has not started, or the directory is gone")
        except OSError as error:
            self._fail(f"cannot read {self.run_dir.events}: {error.strerror}")
        except Exception as error:  # part of a batch may have been applied: nothing of it is kept
            self._fail(str(error) if isinstance(error, StoreError) else f"{type(error).__name__}: {error}")
        return self.generation

    def _read_log(self) -> None:
        if not self._has_log:
            self._has_log = True
            self._begin()
        try:
            self._apply_new()
        except LogReplacedError:
            self._begin()
            self._apply_new()
        if (now := time.monotonic()) >= self._next_driver:
            self._next_driver = now + DRIVER_S
            self._read_only = explain_read_only(self.run_dir)
            self.view.driver = describe_lost_controller(self.run_dir, self.view.state, silent_s=SILENT_S)

    def _fail(self, why: str) -> None:
        if self._has_log:
            self._has_log = False
            self._begin()
        self.view.driver, self._next_driver = why, 0.0

    def _apply_new(self) -> None:
        for events, offset in self._log.read():
            self.view.apply(events, offset)
            self.members.update(event.member for event in events if isinstance(event, MemberDeclared))
            self.analysed += sum(event.type in _OF_ANALYSES for event in events)
            if self.closing:
                break
        if self.view.offset and not self.view.log:
            self.view.log = identify_log(self.run_dir.events)[:16]

    def describe(self) -> dict[str, Any]:
        """The document of the run's state."""
        self._described_driver = self.view.driver
        return self._add_access(self.view.state_document())

    def describe_head(self) -> dict[str, Any]:
        """How the run stands now, for a list of runs."""
        self.read()
        return describe_head(self.run_dir.path.name, self.view.project(), with_used=False)

    def copy_state(self) -> RunState:
        """The present state; what happens later changes its members no more."""
        state = copy.copy(self.view.state)
        state.members = {
            name: dataclasses.replace(member, history=list(member.history))
            for name, member in state.members.items()
        }
        return state

    def _add_access(self, document: dict[str, Any]) -> dict[str, Any]:
        """Says in a document or a change why the page cannot act, if it cannot."""
        if self._read_only is not None and "run" in document:
            document["run"] |= {"actions": [], "actions_off": self._read_only}
        return document

    def begin_watch(self) -> int:
        """Reads what is new, and forgets what has changed while nobody watched: it is in the documents.

        Returns:
            The generation.
        """
        self.read()
        if self.view.driver == self._described_driver:
            self.view.take_change()
        return self.generation

    def step(self) -> tuple[int, bytes | None, int]:
        """Reads what is new; returns the generation, the change as a message if one is due, and the offset."""
        self.read()
        view, now = self.view, time.monotonic()
        if now < self._next_change or not view.has_change:
            return self.generation, None, view.offset
        change = view.take_change()
        self._next_change = time.monotonic() + CHANGE_S
        message = None if change is None else encode_message(encode(self._add_access(change)), id=view.offset)
        return self.generation, message, view.offset

    def catch_up(self, offset: int, log: str) -> tuple[bytes, int]:
        """What a page that has seen a log up to an offset has missed, as a message, and the new offset.

        One that has seen all of it is told how the run stands and what it has used, too: what it has of these may
        be older than what it has seen of the log.

        Returns:
            `RESET` if it must load everything anew.
        """
        self.read()
        view = self.view
        try:
            if (
                log != view.log
                or not 0 <= view.offset - offset <= MOST_BEHIND_BYTES
                or not self._begins_line(offset)
            ):
                return RESET, offset
            batches = read_batches(self.run_dir.events, offset) if offset < view.offset else ()
            events = [event for batch, _ in batches for event in batch]
        except (OSError, StoreError):  # it has just been replaced
            return RESET, offset
        change = self._add_access(view.change_since(events))
        return encode_message(encode(change), id=view.offset), view.offset

    def _begins_line(self, offset: int) -> bool:
        if offset == 0:
            return True
        with open(self.run_dir.events, "rb") as file:
            file.seek(offset - 1)
            return file.read(1) == b"\n"


class Subscriber:
    """What one page has still to receive: one change, or that it is behind, or that its log is gone."""

    def __init__(self, generation: int, offset: int) -> None:
        self.generation, self.offset, self.is_behind = generation, offset, False
        self._message: tuple[bytes, int] | None = None
        self._filled = asyncio.Event()

    def offer(self, generation: int, message: bytes | None, offset: int) -> None:
        """Takes note of a change; of a second one that comes before the first was received, that it has come."""
        if generation != self.generation:
            self.reset()
        elif message is None or (self._message is not None and self._message[0] is RESET):
            return
        elif self._message is not None or self.is_behind:
            self._message, self.is_behind = None, True
        else:
            self._message = (message, offset)
        self._filled.set()

    def reset(self) -> None:
        """Has the page load everything anew, in place of all that it has not received."""
        self._message, self.is_behind = (RESET, self.offset), False
        self._filled.set()

    async def receive(self) -> bytes | None:
        """Waits for the next message; None where several were missed."""
        await self._filled.wait()
        self._filled.clear()
        if self._message is None:
            return None
        (message, self.offset), self._message = self._message, None
        return message


class Feed:
    """One run, for all pages that watch it."""

    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir = run_dir
        self._reader = LogReader(run_dir)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="feed")
        self._subscribers: set[Subscriber] = set()
        self._task: asyncio.Task[None] | None = None
        self._documents: dict[str, tuple[tuple[int, int, str | None], bytes]] = {}

    @property
    def is_watched(self) -> bool:
        """Whether a page is connected."""
        return bool(self._subscribers)

    async def call(self, function: Callable[[LogReader], T]) -> T:
        """Returns what a function makes of the reader, in the thread that owns it."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, self._reader)

    async def make_document(self, name: str, make: Callable[[LogReader], Any]) -> bytes:
        """Returns a document of the run as it is now, encoded; the same bytes while the run does not change."""

        def update(reader: LogReader) -> bytes:
            reader.read()
            stamp = (reader.generation, reader.view.offset, reader.view.driver)
            known = self._documents.get(name)
            if known is None or known[0] != stamp:
                known = self._documents[name] = (stamp, encode(make(reader)))
            return known[1]

        return await self.call(update)

    async def follow(self, offset: int, log: str) -> AsyncGenerator[bytes, None]:
        """Yields messages for a page that has seen a log up to an offset, until it must load everything anew."""
        generation = await self.call(LogReader.read if self._subscribers else LogReader.begin_watch)
        with self._subscribe(Subscriber(generation, offset)) as subscriber:
            message: bytes | None = None
            while True:
                if message is None:
                    subscriber.is_behind = False
                    found = await self.call(lambda reader: reader.catch_up(subscriber.offset, log))
                    message, subscriber.offset = found[0], found[1]
                yield message
                if message is RESET:
                    return
                message = await subscriber.receive()

    @contextlib.contextmanager
    def _subscribe(self, subscriber: Subscriber) -> Iterator[Subscriber]:
        self._subscribers.add(subscriber)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._look())
        try:
            yield subscriber
        finally:
            self._subscribers.discard(subscriber)

    async def _look(self) -> None:
        """Hands out changes while somebody watches. Where one cannot be made, no page is left without a word."""
        try:
            while self._subscribers:
                found = await self.call(LogReader.step)
                for subscriber in self._subscribers:
                    subscriber.offer(*found)
                await asyncio.sleep(LOOK_S)
        finally:
            for subscriber in self._subscribers:
                subscriber.reset()

    def stop_reading(self) -> None:
        """Leaves the rest of a long log unread."""
        self._reader.closing = True

    def close(self) -> None:
        """Ends the thread."""
        if self._task is not None:
            self._task.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)
