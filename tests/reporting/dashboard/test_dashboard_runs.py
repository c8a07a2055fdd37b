"""The list of runs, and what is kept of each: a damaged log hides no other run, none is taken for another."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
from pathlib import Path
from typing import Any

import run_events
from event_dicts import lines

from ensemble.reporting.dashboard.hub import MOST_KEPT, Runs
from ensemble.reporting.dashboard.runs import RunList


def append(run: Path, event: dict[str, Any]) -> None:
    with (run / "events.jsonl").open("a") as file:
        file.write(lines([event]).decode())


def test_a_run_with_an_event_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    names = ("fold", "good", "odd")
    for name in names:
        run_events.write_run(tmp_path / name, run_events.list_run())
    append(tmp_path / "fold", {"type": "feeder", "t": 5.5, "node": "node-0"})
    append(
        tmp_path / "odd",
        {"type": "combined", "t": 1e9, "method": "x", "members": [], "split": None, "metrics": {"ensemble": 5}},
    )
    runs = RunList(tmp_path, is_one=False)
    for _ in range(2):
        for _ in range(100):  # a call reads for a limited time
            words = [row["state"]["word"] for row in runs.update({})]
            if "not read yet" not in words:
                break
        assert words == ["unreadable", "finished, with failures", "unreadable"]
    shutil.rmtree(tmp_path / "odd")
    run_events.write_run(tmp_path / "odd", run_events.list_run())
    assert runs.update({})[2]["state"]["word"] == "finished, with failures"


def test_of_a_run_that_was_killed_only_its_row_is_kept_until_it_goes_on(tmp_path: Path) -> None:
    started = [
        event | ({"host": socket.gethostname()} if event["type"] == "run_started" else {})
        for event in run_events.list_run(until=8)
    ]
    run = run_events.write_run(tmp_path / "run", started)
    runs = RunList(run, is_one=True)
    for _ in range(3):
        (row,) = runs.update({})
        assert row["state"]["word"] == "interrupted"
    (known,) = runs._known.values()
    assert known.status is None
    append(run, {"type": "run_stopped", "t": started[-1]["t"] + 1, "reason": "asked to"})
    assert runs.update({})[0]["state"]["word"] == "stopped"


def test_the_analyses_of_a_run_that_took_the_place_of_another_are_its_own(tmp_path: Path) -> None:
    names = ["replaced", *(f"other-{number}" for number in range(MOST_KEPT + 1))]
    for name in names:
        run_events.write_run(tmp_path / name, run_events.list_run())

    async def read() -> None:
        runs = Runs(tmp_path)
        keys = {Path(row["dir"]).name: row["key"] for row in json.loads(await runs.read_list())}
        before = await runs.read_analysis(keys["replaced"], "importances")
        for name in names[1:]:
            runs.feed(keys[name])  # the feed of the first run is given up
        shutil.rmtree(tmp_path / "replaced")
        other = [
            event | ({"run_id": "other"} if event["type"] == "run_started" else {})
            for event in run_events.list_run(seed=99)
        ]
        run_events.write_run(tmp_path / "replaced", other)
        after = await runs.read_analysis(keys["replaced"], "importances")
        runs.close()
        alone = Runs(tmp_path)
        assert after == await alone.read_analysis(keys["replaced"], "importances") != before
        alone.close()

    asyncio.run(read())


def test_analyses_are_given_up_with_the_feed_of_their_run(tmp_path: Path) -> None:
    names = [f"run-{number}" for number in range(MOST_KEPT + 3)]
    for name in names:
        run_events.write_run(tmp_path / name, run_events.just_started())

    async def read() -> None:
        runs = Runs(tmp_path)
        for row in json.loads(await runs.read_list()):
            await runs.read_analysis(row["key"], "importances")
        assert runs._analyses.keys() == runs._locks.keys() == {(key, "importances") for key in runs._feeds}
        runs.close()

    asyncio.run(read())
