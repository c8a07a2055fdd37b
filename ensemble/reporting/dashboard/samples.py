"""What the view "Samples" asks for: lists of samples, and their records, both made off the server's event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from ensemble.reporting.dashboard.analysis import explain
from ensemble.reporting.dashboard.feed import Feed, LogReader, encode
from ensemble.reporting.dashboard.security import BrowserSession, Refused
from ensemble.reporting.samples.document import EMPTY, Query, list_samples
from ensemble.reporting.samples.ranking import Ranking, rank_samples
from ensemble.reporting.samples.reader import MOST_SAMPLES, RecordReader
from ensemble.store import RunState

#: Who sees samples: nobody, those who may act, or viewers, too.
Access = Literal["nobody", "owner", "viewers"]
#: Requests for records that may wait for each other.
MOST_WAITING = 4
#: Seconds for which predictions are held after they were looked at last.
KEPT_S = 120.0


@dataclass(frozen=True)
class _Known:
    """The ranking of a run at some state; of another one it is computed anew."""

    stamp: tuple[str, int, int]
    ranking: Ranking | None
    state: RunState

    @property
    def list_id(self) -> str:
        """What tells the samples of a list from those of another one: the run's log and the split."""
        return f"{self.stamp[0]}.{self.ranking.evaluated.split if self.ranking is not None else ''}"


class SamplePages:
    """The lists and the records of the run that was asked for last."""

    def __init__(self) -> None:
        self._ranker = ThreadPoolExecutor(1, thread_name_prefix="samples")
        self._readers = ThreadPoolExecutor(1, thread_name_prefix="records")
        self._reader = RecordReader()
        self._known: _Known | None = None
        self._forgetting: asyncio.TimerHandle | None = None
        self._lock = asyncio.Lock()
        self._counting, self._waiting = threading.Lock(), 0

    async def read_list(self, feed: Feed, query: Query) -> bytes:
        """One page of a list, encoded: `list_samples`, and an `id` for `read_records`."""
        loop = asyncio.get_running_loop()
        try:
            known = await self._rank(feed)
            found = await loop.run_in_executor(self._ranker, list_samples, known.ranking, known.state, query)
        except Exception as error:
            return encode(EMPTY | {"missing": f"The saved predictions cannot be listed: {explain(error)}."})
        return encode({**found, "id": known.list_id})

    async def read_records(self, feed: Feed, id: str, indices: Sequence[int]) -> bytes:
        """The records of some samples, encoded (`reader.Records`).

        Raises:
            Refused: the list is of other samples than there are now, or too many requests wait.
        """
        try:
            known = await self._rank(feed)
        except Exception as error:
            raise Refused(409, f"the saved predictions cannot be read: {explain(error)}") from None
        if known.ranking is None or known.list_id != id:
            raise Refused(409, "the run has other samples now: load the page anew")
        with self._counting:
            if self._waiting >= MOST_WAITING:
                raise Refused(429, "other records are being read; try again in a moment")
            self._waiting += 1
        reading = self._readers.submit(self._reader.read, feed.run_dir, known.state, known.ranking, indices)
        reading.add_done_callback(self._leave)
        return encode(vars(await asyncio.wrap_future(reading)))

    def _leave(self, _: object) -> None:
        with self._counting:
            self._waiting -= 1

    async def _rank(self, feed: Feed) -> _Known:
        async with self._lock:
            stamp = await feed.call(stamp_of)
            if self._known is None or self._known.stamp != stamp:
                self._known = None  # its memory is free before that of the next one is taken
                stamp, state = await feed.call(lambda reader: (stamp_of(reader), reader.copy_state()))
                loop = asyncio.get_running_loop()
                ranking = await loop.run_in_executor(self._ranker, rank_samples, feed.run_dir, state)
                self._known = _Known(stamp, ranking, state)
            if self._forgetting is not None:
                self._forgetting.cancel()
            self._forgetting = asyncio.get_running_loop().call_later(KEPT_S, self._forget)
            return self._known

    def _forget(self) -> None:
        self._known = None  # it has the predictions of all members

    def close(self) -> None:
        """Ends the threads and the process that reads records."""
        if self._forgetting is not None:
            self._forgetting.cancel()
        self._ranker.shutdown(wait=False, cancel_futures=True)
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._reader.close()


def stamp_of(reader: LogReader) -> tuple[str, int, int]:
    """Tells one state that is analysed from another one, of another log as well."""
    generation = reader.read()
    return reader.view.log, generation, reader.analysed


def check_access(access: Access, session: BrowserSession) -> None:
    """Checks that a session may see samples.

    Raises:
        Refused: it may not.
    """
    if access == "nobody":
        raise Refused(403, "Samples are not shown here: the page was started with --no-samples.")
    if access == "owner" and not session.may_act:
        raise Refused(403, "Samples are not shown to viewers: the page was started without --viewer-samples.")


def parse_indices(given: str) -> list[int]:
    """The indices of samples in an address, such as "3,17".

    Raises:
        ValueError: they are none, or too many.
    """
    parts = given.split(",")
    if len(parts) > MOST_SAMPLES or not all(
        each.isascii() and each.isdigit() and len(each) < 19 for each in parts
    ):
        raise ValueError(f"index= has at most {MOST_SAMPLES} numbers, with commas between them")
    return [int(each) for each in parts]
