"""How a run's log reaches the pages and the list of runs: they hold what a fresh load gives."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from dashboard_process import HANG_S
from kit import run_events
from kit.event_dicts import lines

from ensemble.reporting.dashboard import feed as feeds
from ensemble.reporting.dashboard.feed import MOST_KEPT, Feed, LogReader, Runs, encode
from ensemble.reporting.dashboard.runs import RunList
from ensemble.store import RunDir

Document = dict[str, Any]


def write(run: Path, events: list[dict[str, Any]], mode: str = "a") -> None:
    with (run / "events.jsonl").open(mode) as file:
        file.write(lines(events).decode())


def parse(message: bytes) -> Document:
    (data,) = (line for line in message.decode().splitlines() if line.startswith("data: "))
    return json.loads(data.removeprefix("data: "))


def write_run(path: Path, events: list[Document] | None = None) -> Path:
    return run_events.write_run(path, run_events.list_run() if events is None else events)


def with_feed(run: Path, use: Callable[[Feed], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        with contextlib.closing(Feed(RunDir(run))) as feed:
            async with asyncio.timeout(HANG_S):
                await use(feed)

    asyncio.run(main())


async def load(feed: Feed) -> Document:
    return json.loads(await feed.make_document("state", LogReader.describe))


def test_a_page_that_follows_holds_what_a_fresh_load_gives(tmp_path: Path) -> None:
    events = run_events.list_run()
    run = write_run(tmp_path / "run", events[:60])

    async def use(feed: Feed) -> None:
        async with contextlib.aclosing(feed.follow()) as messages:
            document = parse(await anext(messages))
            for begin in range(60, len(events), 40):
                write(run, events[begin : begin + 40])
                document = parse(await anext(messages))
            while document["offset"] < (run / "events.jsonl").stat().st_size:
                document = parse(await anext(messages))
        assert document == await load(feed)

    with_feed(run, use)


def test_a_log_that_is_replaced_or_gone_is_shown_as_it_is(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")

    async def use(feed: Feed) -> None:
        async with contextlib.aclosing(feed.follow()) as messages:
            assert len(parse(await anext(messages))["members"]["rows"]) == 8
            (run / "events.jsonl").unlink()
            gone = parse(await anext(messages))
            assert gone["members"]["rows"] == {} and "has no event log" in gone["run"]["driver"]
            write(run, run_events.just_started(), "w")
            while parse(await anext(messages))["run"]["name"] != "fresh":
                pass

    with_feed(run, use)


def test_the_log_is_looked_at_only_while_somebody_watches(tmp_path: Path, monkeypatch: Any) -> None:
    run = write_run(tmp_path / "run")
    looks: list[float] = []
    look = LogReader.read
    monkeypatch.setattr(LogReader, "read", lambda reader: (looks.append(time.monotonic()), look(reader))[1])

    async def use(feed: Feed) -> None:
        async with contextlib.aclosing(feed.follow()) as messages:
            await anext(messages)
            reading = asyncio.create_task(anext(messages))
            begun, before = time.monotonic(), len(looks)
            while len(looks) < before + 9:
                await asyncio.sleep(0.01)
            assert time.monotonic() - begun > 5 * feeds.LOOK_S, "not more than ten times a second"
            assert not reading.done(), "nothing was sent, as nothing has happened"
            reading.cancel()
            await asyncio.wait((reading,))
        assert feed.watchers == 0
        quiet = len(looks)
        await asyncio.sleep(4 * feeds.LOOK_S)
        assert len(looks) == quiet

    with_feed(run, use)


def test_changes_are_encoded_once_for_all_at_most_five_times_a_second(tmp_path: Path, monkeypatch: Any) -> None:
    events = run_events.list_run()
    run = write_run(tmp_path / "run", events[:20])
    encoded: list[Any] = []
    monkeypatch.setattr(feeds, "encode", lambda value: (encoded.append(value), encode(value))[1])

    async def use(feed: Feed) -> None:
        async def read_all() -> int:
            offset = 0
            async with contextlib.aclosing(feed.follow()) as messages:
                while not done or offset < (run / "events.jsonl").stat().st_size:
                    offset = parse(await anext(messages))["offset"]
            return offset

        done: list[bool] = []
        begun = time.monotonic()
        readers = [asyncio.create_task(read_all()) for _ in range(5)]
        for event in events[20:120]:
            write(run, [event])
            await asyncio.sleep(0.01)
        done.append(True)
        write(run, events[120:121])
        assert len(set(await asyncio.gather(*readers))) == 1
        assert len(encoded) <= (time.monotonic() - begun) / feeds.CHANGE_S + 2

    with_feed(run, use)


def test_what_is_wrong_with_a_log_is_said_in_place_of_the_run(tmp_path: Path) -> None:
    events = run_events.list_run()
    run, odd = write_run(tmp_path / "run"), write_run(tmp_path / "odd", events[:60])

    async def use(feed: Feed) -> None:
        write(run, [{"v": 999, "type": "later", "t": 1.0}])
        assert "another version of ray-ensemble" in (await load(feed))["run"]["driver"]
        (run / "events.jsonl").unlink()
        os.mkfifo(run / "events.jsonl")
        assert "not a regular file" in (await load(feed))["run"]["driver"]

    async def use_odd(feed: Feed) -> None:
        assert (await load(feed))["members"]["rows"]
        write(odd, [{"v": 2, "type": "feeder", "t": 5.5, "node": "node-0"}, *events[60:]])
        document = await load(feed)
        why = document["run"]["driver"]
        assert "events.jsonl, line 61 is damaged" in why and "required field `cohort`" in why
        assert document["members"]["rows"] == {}

    with_feed(run, use)
    with_feed(odd, use_odd)


def test_a_document_of_any_figures_is_json() -> None:
    value = {"a": [float("nan"), 1.5, (float("inf"), {"b": -float("inf")})], "c": "\ud800 </script>\u2028"}
    assert json.loads(encode(value)) == {"a": [None, 1.5, [None, {"b": None}]], "c": value["c"]}
    assert encode(value).isascii() and b"\n" not in encode({"a": "\n"})


def test_a_run_that_is_about_to_start_is_not_taken_for_an_interrupted_one(tmp_path: Path) -> None:
    async def use(feed: Feed) -> None:
        assert (await load(feed))["run"]["state"]["word"] == "not started"
        run_events.write_run(tmp_path / "run", run_events.just_started())
        assert (await load(feed))["run"]["name"] == "fresh"

    with_feed(tmp_path / "run", use)


def test_a_run_with_an_event_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    for name in ("fold", "good", "odd"):
        write_run(tmp_path / name)
    write(tmp_path / "fold", [{"type": "feeder", "t": 5.5, "node": "node-0"}])
    odd = {"type": "combined", "t": 1e9, "method": "x", "members": [], "split": None, "metrics": {"ensemble": 5}}
    write(tmp_path / "odd", [odd])
    runs = RunList(tmp_path, is_one=False)
    for _ in range(2):
        words = ["not read yet"]
        while "not read yet" in words:  # a call reads for a limited time
            words = [row["state"]["word"] for row in runs.update({})]
        assert words == ["unreadable", "finished, with failures", "unreadable"]
    shutil.rmtree(tmp_path / "odd")
    write_run(tmp_path / "odd")
    assert runs.update({})[2]["state"]["word"] == "finished, with failures"


def test_of_a_run_that_was_killed_only_its_row_is_kept_until_it_goes_on(tmp_path: Path) -> None:
    begin, *others = run_events.list_run(until=8)
    run = write_run(tmp_path / "run", [begin | {"host": socket.gethostname()}, *others])
    runs = RunList(run, is_one=True)
    for _ in range(3):
        assert [row["state"]["word"] for row in runs.update({})] == ["interrupted"]
    (known,) = runs._known.values()
    assert known.status is None
    write(run, [{"type": "run_stopped", "t": others[-1]["t"] + 1, "reason": "asked to"}])
    assert runs.update({})[0]["state"]["word"] == "stopped"


def test_the_analyses_of_a_run_that_took_the_place_of_another_are_its_own(tmp_path: Path) -> None:
    names = ["replaced", *(f"other-{number}" for number in range(MOST_KEPT + 1))]
    for name in names:
        write_run(tmp_path / name)

    async def read() -> None:
        runs = Runs(tmp_path)
        keys = {Path(row["dir"]).name: row["key"] for row in json.loads(await runs.read_list())}
        before = await runs.read_analysis(keys["replaced"], "importances")
        for name in names[1:]:
            runs.feed(keys[name])  # the feed of the first run is given up
        shutil.rmtree(tmp_path / "replaced")
        begin, *others = run_events.list_run(seed=99)
        write_run(tmp_path / "replaced", [begin | {"run_id": "other"}, *others])
        after = await runs.read_analysis(keys["replaced"], "importances")
        runs.close()
        with contextlib.closing(Runs(tmp_path)) as alone:
            assert after == await alone.read_analysis(keys["replaced"], "importances") != before

    asyncio.run(read())


def test_the_list_goes_on_when_a_run_that_is_watched_was_deleted(tmp_path: Path) -> None:
    for name in ("gone", "there"):
        write_run(tmp_path / name)

    async def read() -> None:
        with contextlib.closing(Runs(tmp_path)) as runs:
            for row in json.loads(await runs.read_list()):
                runs.feed(row["key"]).watchers += 1
            shutil.rmtree(tmp_path / "gone")
            runs._list.scan()
            assert [Path(row["dir"]).name for row in json.loads(await runs.read_list())] == ["there"]

    asyncio.run(read())
