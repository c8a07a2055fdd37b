"""Holds what is served: the list of runs, a feed for each run that a page has opened, and their analyses."""

from __future__ import annotations

import asyncio
import json
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ensemble.reporting.dashboard import analysis
from ensemble.reporting.dashboard.comparing import Comparisons
from ensemble.reporting.dashboard.feed import Feed, LogReader, encode
from ensemble.reporting.dashboard.runs import RunList, find_runs, is_run
from ensemble.reporting.dashboard.samples import SamplePages, stamp_of
from ensemble.store import RunDir

#: Runs that nobody watches whose projections are kept.
MOST_KEPT = 4


ANALYSES = {"quality": analysis.read_quality, "importances": analysis.read_importances}
#: Times as long as an analysis took, until it is made again.
ANALYSIS_PAUSE = 10.0


@dataclass(frozen=True)
class _Analysis:
    """An analysis: of which state, encoded, and when it may be made again (monotonic seconds)."""

    stamp: tuple[str, int, int]
    found: bytes
    next: float


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
        self._comparer = ThreadPoolExecutor(1, thread_name_prefix="comparisons")
        self._comparisons = Comparisons()
        self._feeds: OrderedDict[str, Feed] = OrderedDict()
        self.samples = SamplePages()
        self._analyses: dict[tuple[str, str], _Analysis] = {}
        self._locks: dict[tuple[str, str], asyncio.Lock] = {}
        self.closing = asyncio.Event()

    def list_paths(self) -> dict[str, Path]:
        """The directories of the runs by their names below the folder; any thread may ask."""
        if self.is_one:
            return {self.path.name: self.path}
        return {str(path.relative_to(self.path)): path for path in find_runs(self.path)}

    async def read_list(self) -> bytes:
        """The list of runs, encoded. A run that is followed anyway is not read a second time for it."""
        keys = (
            list(self._list.paths)
            if self.is_one
            else [key for key, feed in self._feeds.items() if feed.is_watched]
        )
        heads = {key: await self.feed(key).call(LogReader.describe_head) for key in keys}
        loop = asyncio.get_running_loop()
        return encode(await loop.run_in_executor(self._thread, self._list.update, heads))

    async def read_comparison(self, keys: Sequence[str]) -> bytes:
        """The document of several runs side by side (`comparison_document`), encoded.

        Raises:
            KeyError: there is no such run.
        """
        paths = {key: self._list.paths[key] for key in keys}
        listed = await self.read_list()

        def compare() -> bytes:
            rows = {row["key"]: row for row in json.loads(listed)}
            if not paths.keys() <= rows.keys():
                raise KeyError(keys)
            return encode(self._comparisons.compare(paths, rows))

        return await asyncio.get_running_loop().run_in_executor(self._comparer, compare)

    def feed(self, key: str) -> Feed:
        """The feed of a run.

        Raises:
            KeyError: there is no such run.
        """
        path = self._list.paths[key]
        if key not in self._feeds:
            self._feeds[key] = Feed(RunDir(path))
        self._feeds.move_to_end(key)
        unwatched = [each for each, feed in self._feeds.items() if not feed.is_watched]
        for each in unwatched[:-MOST_KEPT]:
            del self._feeds[each]
            for name in ANALYSES:
                self._analyses.pop((each, name), None)
                self._locks.pop((each, name), None)
        return self._feeds[key]

    async def read_analysis(self, key: str, name: str) -> bytes:
        """The document `quality` or `importances` of a run, which is made anew when members have ended.

        It is made of a copy of the state, in another thread: meanwhile the page is told of what happens. In a run
        in which members end all the time it is made for a tenth of the time at most.
        """
        feed = self.feed(key)
        make = ANALYSES[name]
        async with self._locks.setdefault((key, name), asyncio.Lock()):
            known = self._analyses.get((key, name))
            stamp = await feed.call(stamp_of)
            if known is not None and known.stamp == stamp:
                return known.found
            if known is not None and (wait_s := known.next - time.monotonic()) > 0:
                await asyncio.sleep(wait_s)
            began = time.monotonic()
            stamp, state = await feed.call(lambda reader: (stamp_of(reader), reader.copy_state()))
            loop = asyncio.get_running_loop()
            found = encode(await loop.run_in_executor(self._analyst, make, feed.run_dir, state))
            ended = time.monotonic()
            self._analyses[key, name] = _Analysis(stamp, found, ended + ANALYSIS_PAUSE * (ended - began))
            return found

    def end_streams(self) -> None:
        """Has all streams end, and what is being read."""
        self.closing.set()
        for feed in self._feeds.values():
            feed.stop_reading()
        self.samples.close()

    def close(self) -> None:
        """Ends all threads."""
        for feed in self._feeds.values():
            feed.close()
        for thread in (self._thread, self._analyst, self._comparer):
            thread.shutdown(wait=False, cancel_futures=True)
