"""Reports of figures: few in a long run, and no sum changes by them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.event_dicts import as_dict, ledger, typed
from kit.property_examples import examples

from ensemble.meter.cpu import MOST_S, ReportPace
from ensemble.meter.power import PowerReports

Event = dict[str, Any]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make_power(t: float, joules: float, members: int, interval_s: float = 1.0) -> Event:
    both = {"energy_j": joules, "origin": "measured"}
    parts: list[Event] = [{"name": k, "kind": k, "device": d, **both} for k, d in (("cpu", None), ("gpu", 0))]
    parts[0]["idle_j"] = joules / 2
    parts[1] |= {"idle_j": None, "activity": [("train", f"member-{n}", 0.25) for n in range(members)]}
    figures = {"watts": 2 * joules, "energy_j": 2 * joules, "interval_s": interval_s, "busy_s": 2.0, "until": t}
    return {"node": "n", "origin": "measured", "source": "rapl", "parts": parts, **figures}


def list_other_events(seconds: int, members: int) -> list[tuple[float, Event]]:
    """A run without its power: each second all processes say what they have used."""
    events: list[tuple[float, Event]] = [(0.0, {"type": "run_started", "epochs": 1, "members": members})]
    for n in range(members):
        who = {"member": f"member-{n}"}
        events.append((0.0, {"type": "member", **who, "number": n}))
        events.append((0.0, {"type": "placed", **who, "attempt": 0, "node": "n", "devices": [0]}))
    for second in range(1, seconds + 1):
        for n in range(members):
            who = {"node": "n", "role": "train", "member": f"member-{n}", "rank": 0, "pid": 100 + n}
            events.append((float(second), {"type": "usage", **who, "cpu_s": 0.9 * second, "origin": "measured"}))
    for n in range(members):
        end = {"type": "finished", "member": f"member-{n}", "attempt": 0, "epoch": 0, "metrics": {}}
        events.append((seconds + 0.5, end))
    return [*events, (seconds + 1.0, {"type": "run_finished"})]


def make_log(others: list[tuple[float, Event]], reported: list[tuple[float, Event]]) -> list[Event]:
    powers = [(t, {"type": "power", **power}) for t, power in reported]
    merged = sorted([*others, *powers], key=lambda item: item[0])
    return [{**as_dict(typed({"t": t, **event})), "v": 2, "t": t} for t, event in merged]


@examples(12)
@given(
    seconds=st.integers(1, 400),
    age_s=st.integers(0, 2000),
    members=st.integers(1, 3),
    energy=st.lists(st.integers(0, 2**30), min_size=1, max_size=5),
)
def test_no_sum_changes(seconds: int, age_s: int, members: int, energy: list[int]) -> None:
    clock = Clock()
    clock.now = -float(age_s)
    reports = PowerReports(ReportPace(clock=clock))
    measured, reported = list[tuple[float, Event]](), list[tuple[float, Event]]()
    for second in range(1, seconds + 1):
        clock.now = float(second)
        power = make_power(clock.now, energy[second % len(energy)] / 2**20, members)
        measured.append((clock.now, power))
        reported += [(clock.now, dict(sum_)) for sum_ in reports.add(power)]
    reported += [(clock.now, dict(sum_)) for sum_ in reports.take()]
    others = list_other_events(seconds, members)
    before, after = ledger(make_log(others, measured)), ledger(make_log(others, reported))
    for name in ("cpu_s", "energy_j", "idle_j", "origin"):
        assert getattr(after.total, name) == getattr(before.total, name), name
    assert after.cpu_by_role() == before.cpu_by_role() and after.nodes[0].metered_s == before.nodes[0].metered_s
    for row_before, row_after in zip(before.rows, after.rows, strict=True):
        assert (row_before.role, row_before.member) == (row_after.role, row_after.member)
        assert row_before.parts.keys() == row_after.parts.keys()
    kept = [sum(part["energy_j"] for part in power["parts"]) for _, power in reported]
    assert kept == [power["energy_j"] for _, power in reported], "the parts of a node sum up to it"
    assert all(sum(busy for *_, busy in power["parts"][1]["activity"]) for _, power in reported)


def test_a_short_run_reports_each_second_and_a_day_is_some_thousand_reports() -> None:
    clock = Clock()
    reports = PowerReports(ReportPace(clock=clock))
    times = []
    for second in range(1, 86_401):
        clock.now = float(second)
        times += [clock.now for _ in reports.add(make_power(clock.now, 1.0, 1))]
    assert times[:50] == [float(second) for second in range(1, 51)]
    assert max(after - before for before, after in itertools.pairwise(times)) == MOST_S
    assert len(times) < 86_400 / MOST_S + 200


def test_an_end_is_reported_soon_and_a_figure_that_may_wait_at_least_as_long() -> None:
    clock = Clock()
    pace, slow = ReportPace(clock=clock), ReportPace(5.0, clock)
    assert pace.is_due() and slow.is_due(), "the first is reported at once"
    clock.now = 5000.0
    assert pace.is_due()
    clock.now += MOST_S - 1
    assert not pace.is_due()
    pace.hurry()
    assert pace.is_due() and not pace.is_due()
    assert slow.is_due() and not slow.is_due()
    young = ReportPace(5.0, clock)
    for later_s, is_due in ((0.0, True), (4.9, False), (0.1, True)):
        clock.now += later_s
        assert young.is_due() == is_due


OTHERS = {"source": {"source": "another"}, "unread": {"parts": [], "energy_j": None}, "pause": {"until": 5080.0}}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_what_is_not_known_alike_is_not_added_up(change: Event) -> None:
    clock = Clock()
    reports = PowerReports(ReportPace(clock=clock))
    clock.now = 5000.0
    assert len(reports.add(make_power(5000.0, 1.0, 1))) == 1
    assert reports.add(make_power(5001.0, 2.0, 1)) == reports.add(make_power(5002.0, 3.0, 1)) == []
    assert reports.add(make_power(5006.0, 4.0, 1)) == [], "four seconds are nothing"
    assert reports.add(make_power(5016.0, 5.0, 1, interval_s=10.0)) == []
    [known] = reports.add(make_power(5017.0, 6.0, 1) | change)
    assert (known["energy_j"], known["interval_s"], known["until"]) == (28.0, 13.0, 5016.0)
    [other] = reports.take()
    assert other.items() >= change.items() and other["interval_s"] == 1.0 and reports.take() == []
