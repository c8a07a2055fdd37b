"""Usage of a rank: how often it is reported, and that nothing is left out."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from kit import train_child as cases

from ensemble.meter import CpuClock
from ensemble.train.reporter import EventReporter

Events = list[dict[str, Any]]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def open_reporter(folder: Path) -> tuple[EventReporter, Clock, Events]:
    events, clock = Events(), Clock()
    ensemble = cases.declare(cases.SMOOTH, 1)
    reporter = EventReporter(cases.make_job(folder, ensemble), events.append, CpuClock(), clock)
    return reporter, clock, events


def compute() -> None:
    sum(range(20_000))


def test_usage_is_reported_at_most_every_ten_seconds_and_less_often_by_an_old_rank(tmp_path: Path) -> None:
    reporter, clock, events = open_reporter(tmp_path)
    reporter.training_begins(0.0)
    begins, reported = clock.now, []
    for second in range(0, 4000, 5):
        clock.now, before = begins + second, len(events)
        compute()
        reporter.usage()
        reported += [second] if len(events) > before else []
    assert reported[:4] == [0, 10, 20, 30]
    assert {after - before for before, after in zip(reported[-10:], reported[-9:], strict=False)} == {30}


def test_the_last_usage_is_reported_in_any_case_and_has_all_of_it(tmp_path: Path) -> None:
    reporter, clock, events = open_reporter(tmp_path)
    reporter.training_begins(0.0)
    used_s = time.process_time()
    for prepare_cpu_s in (0.0, 0.0001, 0.0002):
        compute()
        reporter.usage(prepare_cpu_s)
    assert not [event for event in events if event["role"] == "prepare"], "held back"
    clock.now += 1.0
    reporter.usage(0.0003, is_last=True)
    last = {event["role"]: event["cpu_s"] for event in events}
    assert last["prepare"] == pytest.approx(0.0003)
    assert last["train"] + last["prepare"] >= time.process_time() - used_s - 0.001


def test_a_role_whose_figure_is_as_before_is_not_reported_again(tmp_path: Path) -> None:
    reporter, clock, events = open_reporter(tmp_path)
    reporter.usage()
    reporter.training_begins(0.0)
    count = len(events)
    for _ in range(3):
        clock.now += 60.0
        compute()
        reporter.usage()
    assert [event["role"] for event in events[count:]] == ["train"] * 3
