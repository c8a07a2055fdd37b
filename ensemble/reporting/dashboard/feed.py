"""Follows the log of one run for all pages that watch it.

The log is read only while somebody watches, by one thread that also owns the projection: a long log keeps no
other request waiting. A document is made once for all pages, and again at most for a small share of the time.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
import math
import os
import time
from collections import OrderedDict, defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ensemble.reporting.dashboard import analysis
from ensemble.reporting.dashboard.projection import RunView
from ensemble.reporting.dashboard.run_section import describe_head
from ensemble.reporting.dashboard.runs import RunList, find_runs, is_run
from ensemble.reporting.status import describe_lost_controller
from ensemble.store import RunDir
from ensemble.store.files import StoreError
from ensemble.store.follower import LogFollower, LogReplacedError, Stamp, find_stamp
from pipelines.providers import import_object

if TYPE_CHECKING:
    from ensemble.store.rundir import RunDir
    from ensemble.store.state import RunState

T = TypeVar("T")

LOOK_S, CHANGE_S, DRIVER_S = 0.1, 0.2, 2.0
#: A document is made again after so many times what making it took; no more bytes a second are sent.
PAUSE, ANALYSIS_PAUSE, BYTES_PER_S = 20.0, 10.0, 2e6


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


def encode_message(data: bytes, *, id: int | None = None) -> bytes:
    """Returns a server-sent event; `data` has no line ends."""
    return (b"" if id is None else b"id: %d\n" % id) + b"data: " + data + b"\n\n"


def explain_read_only(run_dir: RunDir) -> str | None:
    """Returns why requests to a run cannot be written by this user; None where they can."""
    if os.access(run_dir.requests, os.W_OK | os.X_OK) or not run_dir.path.exists():
        return None
    return f"this page is served by a user who may only read {run_dir.path}"


class LogReader:
    """Keeps the projection of a run up to date; called by one thread at a time.

    Attributes:
        view: the projection of the present log; an empty one while there is none.
        generation: counts the logs; a log that was replaced or cut has another one.
    """

    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir, self.generation, self.closing = run_dir, 0, False
        self._next_driver = 0.0
        self._unreadable: Stamp | None = None
        self._begin()

    def _begin(self) -> None:
        self.view, self._log = RunView(self.run_dir), LogFollower(self.run_dir)
        self.generation += 1

    @property
    def stamp(self) -> tuple[Any, ...]:
        """Tells one state of the documents from another."""
        return self.generation, self.view.offset, self.view.driver

    def read(self) -> LogReader:
        """Applies what is new in the log; what is wrong with it becomes `view.driver`. Returns itself."""
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
        return self

    def _read_log(self) -> None:
        try:
            self._apply_new()
        except LogReplacedError:
            self._begin()
            self._apply_new()
        if (now_s := time.monotonic()) >= self._next_driver:
            self._next_driver = now_s + DRIVER_S
            self.view.driver = describe_lost_controller(self.run_dir, self.view.state)

    def _fail(self, why: str) -> None:
        if self.view.offset:
            self._begin()
        self.view.driver, self._next_driver = why, 0.0

    def _apply_new(self) -> None:
        for events, offset in self._log.read():
            self.view.apply(events, offset)
            if self.closing:
                break

    def describe(self) -> dict[str, Any]:
        """The document of the run's state; it says why the page cannot act, if it cannot."""
        document = self.view.state_document()
        if (why := explain_read_only(self.run_dir)) is not None:
            document["run"] |= {"actions": [], "actions_off": why}
        return document

    def describe_head(self) -> dict[str, Any]:
        return describe_head(self.run_dir.path.name, self.read().view.project(), with_used=False)

    def copy_state(self) -> RunState:
        """The present state; what happens later changes its members no more."""
        state = copy.copy(self.view.state)
        state.members = {
            name: dataclasses.replace(member, history=[*member.history], evaluations=[*member.evaluations])
            for name, member in state.members.items()
        }
        return state


@dataclass(frozen=True)
class _Document:
    """A document as it was made: of which state, encoded, and when it may be made again (monotonic seconds)."""

    stamp: tuple[Any, ...]
    content: bytes
    next: float


class Feed:
    """One run, for all pages that watch it."""

    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir, self.watchers = run_dir, 0
        self._reader = LogReader(run_dir)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="feed")
        self._documents: dict[str, _Document] = {}
        self._analysing = defaultdict[str, asyncio.Lock](asyncio.Lock)

    async def call(self, function: Callable[[LogReader], T]) -> T:
        """Returns what a function makes of the reader, in the thread that owns it."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, self._reader)

    async def make_document(self, name: str, make: Callable[[LogReader], Any], *, anew: bool = True) -> bytes:
        """Returns a document of the run, encoded; the same bytes while the run does not change.

        Args:
            anew: whether it is made again as often as the run has changed; else after a pause.
        """

        def update(reader: LogReader) -> bytes:
            document, began = self._documents.get(name), time.monotonic()
            stamp = reader.read().stamp
            if document is not None and (document.stamp == stamp or (not anew and began < document.next)):
                return document.content
            content = encode(make(reader))
            ended = time.monotonic()
            pause_s = max(CHANGE_S, PAUSE * (ended - began), len(content) / BYTES_PER_S)
            self._documents[name] = _Document(stamp, content, ended + pause_s)
            return content

        return await self.call(update)

    async def make_analysis(self, name: str, make: Callable[[RunDir, RunState], Any], analyst: Executor) -> bytes:
        """Returns a document that is made anew when members have ended, encoded.

        It is made of a copy of the state, in another thread: meanwhile the page is told of what happens. In a run
        in which members end all the time it is made for a tenth of the time at most.
        """

        def find_stamp(reader: LogReader) -> tuple[Any, ...]:
            reader.read()
            return reader.generation, reader.view.stamps[name]

        async with self._analysing[name]:
            document = self._documents.get(name)
            if document is not None and document.stamp == await self.call(find_stamp):
                return document.content
            if document is not None:
                await asyncio.sleep(max(0.0, document.next - time.monotonic()))
            began = time.monotonic()
            stamp, state = await self.call(lambda reader: (find_stamp(reader), reader.copy_state()))
            made = asyncio.get_running_loop().run_in_executor(analyst, make, self.run_dir, state)
            content, ended = encode(await made), time.monotonic()
            self._documents[name] = _Document(stamp, content, ended + ANALYSIS_PAUSE * (ended - began))
            return content

    async def follow(self) -> AsyncGenerator[bytes, None]:
        """Yields the run's state as a message, and again each time that it has changed."""
        sent = b""
        self.watchers += 1
        try:
            while True:
                content = await self.make_document("state", LogReader.describe, anew=False)
                if content is not sent:
                    sent = content
                    yield encode_message(content)
                await asyncio.sleep(LOOK_S)
        finally:
            self.watchers -= 1

    def stop_reading(self) -> None:
        """Leaves the rest of a long log unread."""
        self._reader.closing = True

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


#: Runs that nobody watches whose projections are kept.
MOST_KEPT = 4
MOST_RUNS = 10  # that are compared
COMPARISON = "ensemble.reporting.comparison.page:describe_comparison"
ANALYSES = {"quality": analysis.read_quality, "importances": analysis.read_importances}


class Runs:
    """The runs that are served, and a feed for each that a page has opened.

    Args:
        path: a run directory, or a folder of runs.
        is_one: whether it is a run directory, which need not be there yet; None: as it is found.
    """

    def __init__(self, path: Path, *, is_one: bool | None = None) -> None:
        self.path = path
        self.is_one = is_run(path) if is_one is None else is_one
        self._list = RunList(path, is_one=self.is_one)
        self._list.scan()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="runs")
        self._analyst = ThreadPoolExecutor(1, thread_name_prefix="analysis")
        self._feeds: OrderedDict[str, Feed] = OrderedDict()
        self.closing = asyncio.Event()

    def list_paths(self) -> dict[str, Path]:
        """The directories of the runs by their names below the folder; any thread may ask."""
        if self.is_one:
            return {self.path.name: self.path}
        return {str(path.relative_to(self.path)): path for path in find_runs(self.path)}

    async def read_list(self) -> bytes:
        """The list of runs, encoded. A run that is followed anyway is not read a second time for it."""
        watched = [key for key, feed in self._feeds.items() if feed.watchers]
        keys = list(self._list.paths) if self.is_one else watched
        heads = dict[str, Any]()
        for key in keys:
            try:
                feed = self.feed(key)
            except KeyError:  # the run was deleted while it was watched
                continue
            heads[key] = await feed.call(LogReader.describe_head)
        loop = asyncio.get_running_loop()
        return encode(await loop.run_in_executor(self._thread, self._list.update, heads))

    async def read_comparison(self, keys: Sequence[str]) -> bytes:
        """The document of several runs side by side (`comparing`), encoded.

        Raises:
            KeyError: there is no such run.
        """
        paths = {key: self._list.paths[key] for key in keys}
        loop = asyncio.get_running_loop()
        return encode(await loop.run_in_executor(self._analyst, import_object(COMPARISON), paths))

    def feed(self, key: str) -> Feed:
        """The feed of a run.

        Raises:
            KeyError: there is no such run.
        """
        path = self._list.paths[key]
        if key not in self._feeds:
            self._feeds[key] = Feed(RunDir(path))
        self._feeds.move_to_end(key)
        unwatched = [unwatched_key for unwatched_key, feed in self._feeds.items() if not feed.watchers]
        for unwatched_key in unwatched[:-MOST_KEPT]:
            del self._feeds[unwatched_key]
        return self._feeds[key]

    async def read_analysis(self, key: str, name: str) -> bytes:
        """The document `quality` or `importances` of a run, which is made anew when members have ended."""
        return await self.feed(key).make_analysis(name, ANALYSES[name], self._analyst)

    def end_streams(self) -> None:
        """Has all streams end, and what is being read."""
        self.closing.set()
        for feed in self._feeds.values():
            feed.stop_reading()

    def close(self) -> None:
        for feed in self._feeds.values():
            feed.close()
        for thread in (self._thread, self._analyst):
            thread.shutdown(wait=False, cancel_futures=True)
