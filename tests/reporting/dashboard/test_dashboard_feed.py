"""How a run's log reaches the pages that watch it: what they hold equals what a fresh load would give them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import run_events
from dashboard_process import HANG_S, serve
from event_dicts import lines

from ensemble.reporting.dashboard import feed as feeds
from ensemble.reporting.dashboard.feed import RESET, Feed, LogReader, Subscriber, encode
from ensemble.store import RunDir

Document = dict[str, Any]


def write(run: Path, events: list[dict[str, Any]], mode: str = "a") -> None:
    with (run / "events.jsonl").open(mode) as file:
        file.write(lines(events).decode())


def apply_change(document: Document, change: Document) -> None:
    """As the page does: rows replace rows."""
    document["offset"] = change["offset"]
    for name in ("run", "nodes", "streams"):
        if name in change:
            document[name] = change[name]
    document["members"]["rows"] |= change.get("members", {})
    document["spans"] |= change.get("spans", {})


def shown(document: Document) -> Document:
    """What must be equal however a page came by it."""
    run = {name: document["run"][name] for name in ("state", "counts", "best", "done", "ended")}
    return {"run": run, **{name: document[name] for name in ("offset", "members", "spans")}}


def parse(message: bytes) -> Document:
    (data,) = (line for line in message.decode().splitlines() if line.startswith("data: "))
    return json.loads(data.removeprefix("data: "))


def with_feed(run: Path, use: Callable[[Feed], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        feed = Feed(RunDir(run))
        try:
            async with asyncio.timeout(HANG_S):
                await use(feed)
        finally:
            feed.close()

    asyncio.run(main())


async def load(feed: Feed) -> Document:
    return json.loads(await feed.make_document("state", LogReader.describe))


@contextlib.asynccontextmanager
async def follow(feed: Feed, document: Document) -> AsyncGenerator[AsyncGenerator[bytes, None], None]:
    async with contextlib.aclosing(feed.follow(document["offset"], document["log"])) as messages:
        yield messages


def test_a_page_that_follows_holds_what_a_fresh_load_gives(tmp_path: Path) -> None:
    events = run_events.list_run()
    run = run_events.write_run(tmp_path / "run", events[:60])

    async def use(feed: Feed) -> None:
        document = await load(feed)
        async with follow(feed, document) as messages:
            for begin in range(60, len(events), 40):
                write(run, events[begin : begin + 40])
                apply_change(document, parse(await anext(messages)))
        while document["offset"] < (run / "events.jsonl").stat().st_size:
            async with follow(feed, document) as messages:
                apply_change(document, parse(await anext(messages)))
        assert shown(document) == shown(await load(feed))

    with_feed(run, use)


def test_a_page_that_comes_back_is_told_what_it_missed_in_one_change(tmp_path: Path) -> None:
    events = run_events.list_run()
    run = run_events.write_run(tmp_path / "run", events[:100])

    async def use(feed: Feed) -> None:
        document = await load(feed)
        write(run, events[100:])
        async with follow(feed, document) as messages:
            apply_change(document, parse(await anext(messages)))
        assert shown(document) == shown(await load(feed))

    with_feed(run, use)


def test_a_page_that_reads_slowly_holds_one_message_and_catches_up(tmp_path: Path) -> None:
    events = run_events.list_run()
    run = run_events.write_run(tmp_path / "run", events[:60])

    async def use(feed: Feed) -> None:
        slow, fast = await load(feed), await load(feed)
        async with follow(feed, slow) as slowly, follow(feed, fast) as quickly:
            for document, messages in ((slow, slowly), (fast, quickly)):
                apply_change(document, parse(await anext(messages)))  # how the run stands
            for begin in range(60, 260, 20):  # ten changes, of which the slow one reads none until the last
                write(run, events[begin : begin + 20])
                if begin == 60:
                    apply_change(slow, parse(await anext(slowly)))
                apply_change(fast, parse(await anext(quickly)))
            missed = 0
            while slow["offset"] < fast["offset"]:
                apply_change(slow, parse(await anext(slowly)))
                missed += 1
            assert missed == 1
            while shown(slow) != shown(fast):  # what is computed from all members comes when it is due
                apply_change(fast, parse(await anext(quickly)))

    with_feed(run, use)


def test_of_several_changes_a_subscriber_that_has_not_read_keeps_only_that_it_is_behind() -> None:
    async def main() -> None:
        subscriber = Subscriber(1, 0)
        for offset in range(10, 1000, 10):
            subscriber.offer(1, b"a change", offset)
        assert (await subscriber.receive(), subscriber.offset) == (None, 0)
        subscriber.is_behind = False
        subscriber.offer(1, b"the next", 1010)
        assert (await subscriber.receive(), subscriber.offset) == (b"the next", 1010)
        subscriber.offer(2, None, 0)  # another log
        subscriber.offer(2, b"of the new log", 10)
        assert await subscriber.receive() is RESET

    asyncio.run(main())


def test_a_log_that_is_replaced_cut_or_gone_has_the_page_load_everything_anew(tmp_path: Path) -> None:
    events = run_events.list_run()
    run = run_events.write_run(tmp_path / "run", events)

    async def use(feed: Feed) -> None:
        async def is_reset(act: Callable[[], object]) -> Document:
            document = await load(feed)
            async with follow(feed, document) as messages:
                assert await anext(messages) is not RESET
                act()
                assert await anext(messages) is RESET
            return await load(feed)

        whole = (run / "events.jsonl").read_bytes()
        lines = whole.splitlines(keepends=True)
        cut = await is_reset(lambda: os.truncate(run / "events.jsonl", len(b"".join(lines[:50]))))
        assert cut["offset"] == len(b"".join(lines[:50]))
        gone = await is_reset(lambda: shutil.rmtree(run))
        assert gone["offset"] == 0 and "has no event log" in gone["run"]["driver"]
        other = [event | ({"run_id": "r-2"} if event["type"] == "run_started" else {}) for event in events]
        back = await is_reset(lambda: run_events.write_run(run, other))
        assert back["log"] not in ("", cut["log"]) and len(back["members"]["rows"]) == 8

        def overwrite() -> None:  # in place, and no shorter than before
            (run / "events.jsonl").write_bytes(whole + whole.splitlines(keepends=True)[-1])

        again = await is_reset(overwrite)
        assert again["log"] == cut["log"]

    with_feed(run, use)


def test_a_page_that_comes_back_is_told_what_has_no_offset(tmp_path: Path) -> None:
    """The lost driver, and figures of cost that were sent, late, while it was away."""
    events = run_events.list_run()
    run = run_events.write_run(tmp_path / "run", events[:400])

    async def use(feed: Feed) -> None:
        early = await load(feed)
        with open(run / "events.jsonl", "ab") as log:
            log.write(lines(events[400:]))
        late = await load(feed)
        assert late["cost"] != early["cost"]
        async with follow(feed, early) as messages:
            change = parse(await anext(messages))
        assert change["cost"] == late["cost"]
        async with follow(feed, late) as messages:
            change = parse(await anext(messages))
        assert change["run"]["state"] == late["run"]["state"]
        assert change["cost"] == late["cost"]

    with_feed(run, use)


def test_an_offset_of_another_log_or_within_a_line_is_refused_by_a_reset(tmp_path: Path) -> None:
    run = run_events.write_run(tmp_path / "run", run_events.list_run())

    async def use(feed: Feed) -> None:
        document = await load(feed)
        for wrong in (
            {"log": "another"},
            {"offset": document["offset"] - 5},
            {"offset": document["offset"] + 1},
            {"offset": -1},
        ):
            async with follow(feed, document | wrong) as messages:
                assert await anext(messages) is RESET
                assert await anext(messages, None) is None

    with_feed(run, use)


def test_the_log_is_looked_at_only_while_somebody_watches(tmp_path: Path, monkeypatch: Any) -> None:
    run = run_events.write_run(tmp_path / "run", run_events.list_run())
    looks: list[float] = []
    look = LogReader.read
    monkeypatch.setattr(LogReader, "read", lambda reader: (looks.append(time.monotonic()), look(reader))[1])

    async def use(feed: Feed) -> None:
        document = await load(feed)
        async with follow(feed, document) as messages:
            await anext(messages)  # how the run stands
            reading = asyncio.create_task(anext(messages))
            begun, before = time.monotonic(), len(looks)
            while len(looks) < before + 9:
                await asyncio.sleep(0.01)
            took = time.monotonic() - begun
            assert took > 5 * feeds.LOOK_S, "not more than ten times a second"
            assert not reading.done(), "nothing was sent, as nothing has happened"
            reading.cancel()
            await asyncio.wait((reading,))
        await asyncio.sleep(2 * feeds.LOOK_S)
        quiet = len(looks)
        await asyncio.sleep(4 * feeds.LOOK_S)
        assert len(looks) == quiet

    with_feed(run, use)


def test_changes_come_at_most_five_times_a_second_and_are_encoded_once(tmp_path: Path, monkeypatch: Any) -> None:
    events = run_events.list_run()
    run = run_events.write_run(tmp_path / "run", events[:20])
    encoded: list[Any] = []
    monkeypatch.setattr(feeds, "encode", lambda value: (encoded.append(value), encode(value))[1])

    async def use(feed: Feed) -> None:
        document = await load(feed)
        encoded.clear()
        pages = [dict(document) for _ in range(5)]

        async def read_all(page: Document) -> None:
            async with follow(feed, page) as messages:
                while page["offset"] < (run / "events.jsonl").stat().st_size or not done:
                    page["offset"] = parse(await anext(messages))["offset"]

        done: list[bool] = []
        readers = [asyncio.create_task(read_all(page)) for page in pages]
        write(run, events[20:21])
        while not all(page["offset"] > document["offset"] for page in pages):
            await asyncio.sleep(0.01)
        encoded.clear()  # each page has been told what it had missed
        begun = time.monotonic()
        for event in events[21:120]:
            write(run, [event])
            await asyncio.sleep(0.01)
        done.append(True)
        write(run, events[120:121])
        await asyncio.gather(*readers)
        assert len(encoded) <= (time.monotonic() - begun) / feeds.CHANGE_S + 2

    with_feed(run, use)


def test_what_is_wrong_with_a_log_is_said_on_the_page(tmp_path: Path) -> None:
    run = run_events.write_run(tmp_path / "run", run_events.list_run())

    async def use(feed: Feed) -> None:
        write(run, [{"v": 999, "type": "later", "t": 1.0}])
        assert "another version of ray-ensemble" in (await load(feed))["run"]["driver"]
        (run / "events.jsonl").unlink()
        os.mkfifo(run / "events.jsonl")
        assert "no regular file" in (await load(feed))["run"]["driver"]

    with_feed(run, use)


def test_an_event_that_cannot_be_applied_is_said_in_place_of_the_run(tmp_path: Path) -> None:
    events = run_events.list_run()
    run = run_events.write_run(tmp_path / "run", events[:60])

    async def use(feed: Feed) -> None:
        assert (await load(feed))["members"]["rows"]
        write(run, [{"v": 2, "type": "feeder", "t": 5.5, "node": "node-0"}, *events[60:]])
        said = json.dumps(await load(feed))
        assert "events.jsonl, line 61 is damaged" in said and "required field `cohort`" in said

    with_feed(run, use)


def test_where_no_change_can_be_made_of_an_event_the_page_has_to_load_everything_anew(tmp_path: Path) -> None:
    run = run_events.write_run(tmp_path / "run", run_events.list_run(until=8))

    async def use(feed: Feed) -> None:
        async with follow(feed, await load(feed)) as messages:
            write(run, [{"v": 2, "type": "resources", "t": 1e9, "missing": "a node"}])
            assert await anext(messages) is not RESET
            odd = {"method": "x", "members": [], "split": None, "metrics": {"ensemble": 5}}
            write(run, [{"v": 2, "type": "combined", "t": 1e9, **odd}])
            while await anext(messages) is not RESET:  # what is computed from all members is told after the rest
                pass

    with_feed(run, use)


def test_a_document_of_any_figures_is_json() -> None:
    value = {"a": [float("nan"), 1.5, (float("inf"), {"b": -float("inf")})], "c": "\ud800 </script>\u2028"}
    assert json.loads(encode(value)) == {"a": [None, 1.5, [None, {"b": None}]], "c": value["c"]}
    assert encode(value).isascii() and b"\n" not in encode({"a": "\n"})


@pytest.mark.slow  # it measures time
def test_a_line_reaches_a_page_in_less_than_half_a_second(tmp_path: Path) -> None:
    events = run_events.list_run()
    run = run_events.write_run(tmp_path / "run", events[:60])
    with serve(run) as server:
        state = server.get(f"/api/runs/{server.key}/state")
        target = f"/api/runs/{server.key}/events?from={state['offset']}&log={state['log']}"
        took = []
        with server.stream(target) as messages:
            for event in events[60:70]:
                write(run, [event])
                began = time.monotonic()
                _, id, change = messages.next()
                took.append(time.monotonic() - began)
                assert id == change["offset"] == (run / "events.jsonl").stat().st_size
        assert sorted(took)[len(took) // 2] < 0.5, took


def test_a_run_that_is_about_to_start_is_not_taken_for_an_interrupted_one(tmp_path: Path) -> None:
    async def use(feed: Feed) -> None:
        document = await load(feed)
        assert document["run"]["state"]["word"] == "not started" and document["log"] == ""
        run_events.write_run(tmp_path / "run", run_events.just_started())
        async with follow(feed, document) as messages:
            assert await anext(messages) is RESET
        assert (await load(feed))["run"]["name"] == "fresh"

    with_feed(tmp_path / "run", use)
