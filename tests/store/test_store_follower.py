"""A log is followed while it grows; another one in its place is noticed, whatever its name, inode and size."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from kit.event_dicts import lines, typed
from kit.run_events import list_run

from ensemble.events import Event
from ensemble.store import RunDir, RunState, RunStatus, StoreError, fold
from ensemble.store.follower import LogFollower, LogReplacedError

EVENTS = list_run(members=2)
OTHERS = [{**EVENTS[0], "run_id": "another"}, *EVENTS[1:]]


def read(follower: LogFollower) -> list[Event]:
    return [event for batch, _ in follower.read() for event in batch]


def make_log(run: Path, content: bytes) -> LogFollower:
    run.mkdir(exist_ok=True)
    (run / "events.jsonl").write_bytes(content)
    return LogFollower(RunDir(run))


@pytest.mark.parametrize("seed", range(3))
def test_each_event_is_read_once_wherever_writing_pauses(tmp_path: Path, seed: int) -> None:
    rng, whole, found = random.Random(seed), lines(EVENTS), list[Event]()
    follower, at = make_log(tmp_path, b""), 0
    while at < len(whole):
        with open(tmp_path / "events.jsonl", "ab") as log:
            log.write(whole[at : (at := at + rng.randrange(1, 9000))])
        found += read(follower)
        assert read(follower) == [], "nothing is new"
    assert found == [typed(event) for event in EVENTS]
    assert follower.offset == len(whole)


CHANGES: dict[str, Callable[[Path], object]] = {
    "replaced": lambda log: (log.with_name("new").write_bytes(lines(OTHERS)), log.with_name("new").replace(log)),
    "written over": lambda log: log.write_bytes(lines(OTHERS)),
    "written over by a longer one": lambda log: log.write_bytes(lines(OTHERS) + lines(EVENTS[-1:])),
    "another end of the same size": lambda log: log.write_bytes(lines(EVENTS)[:-4] + b'9"}\n'),
    "cut": lambda log: os.truncate(log, len(lines(EVENTS[:5]))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_log_is_noticed_and_then_read_from_its_beginning(tmp_path: Path, change: str) -> None:
    follower = make_log(tmp_path, lines(EVENTS))
    assert len(read(follower)) == len(EVENTS)
    status = RunStatus.load(RunDir(tmp_path))
    CHANGES[change](tmp_path / "events.jsonl")
    with pytest.raises(LogReplacedError, match="another log"):
        read(follower)
    assert read(follower) == read(LogFollower(RunDir(tmp_path)))
    status.update()
    fresh = RunStatus.load(RunDir(tmp_path))
    assert (status.state.run_id, status.offset, status.state) == (fresh.state.run_id, fresh.offset, fresh.state)


def test_a_reader_goes_on_where_he_stopped_within_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ensemble.store.event_log.BATCH_BYTES", 2000)
    follower = make_log(tmp_path, lines(EVENTS))
    first, offset = next(follower.read())
    assert 0 < len(first) < len(EVENTS) and follower.offset == offset
    assert len(first) + len(read(follower)) == len(EVENTS)


def test_what_is_no_log_is_said_and_not_waited_for(tmp_path: Path) -> None:
    follower = LogFollower(RunDir(tmp_path))
    with pytest.raises(StoreError, match="no run here"):
        read(follower)
    os.mkfifo(tmp_path / "events.jsonl")
    with pytest.raises(StoreError, match="not a regular file"):
        read(follower)
    (tmp_path / "events.jsonl").unlink()
    (tmp_path / "events.jsonl").write_bytes(lines(EVENTS))
    assert isinstance(fold(read(follower)), RunState)
