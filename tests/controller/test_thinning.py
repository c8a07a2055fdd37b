"""Thinned figures: a day's run stays small, and no sum changes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from event_dicts import as_dict, ledger, lines, typed
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples

from ensemble import events
from ensemble.controller.thinning import Thinning
from ensemble.meter.cpu import MOST_S

Event = dict[str, Any]


def raw(seconds: int, members: int, energy: list[int]) -> Iterator[tuple[float, Event]]:
    """What a run says in so many seconds: a node's power, its feeder, the members' progress, CPU time."""
    yield 0.0, {"type": "run_started", "epochs": 1, "members": members}
    for n in range(members):
        yield 0.0, {"type": "member", "member": f"member-{n}", "number": n}
        yield 0.0, {"type": "placed", "member": f"member-{n}", "attempt": 0, "node": "n", "devices": [0]}
    for second in range(1, seconds + 1):
        t, joules = float(second), energy[second % len(energy)] / 2**20
        parts = [
            {"name": kind, "kind": kind, "device": 0, "energy_j": joules, "origin": "measured"}
            for kind in ("cpu", "gpu")
        ]
        parts[0]["idle_j"] = joules / 2
        parts[1]["activity"] = [["train", f"member-{n}", 0.25] for n in range(members)]
        told = {"watts": 2 * joules, "energy_j": 2 * joules, "origin": "measured", "source": "rapl"}
        yield t, {"type": "power", "node": "n", **told, "interval_s": 1.0, "busy_s": 2.0, "parts": parts}
        feeder = {"node": "n", "cohort": 0, "pid": 7, "skipped": second // 1000, "restarts": 0, "detached": 0}
        yield (
            t,
            {
                "type": "feeder",
                **feeder,
                "prepared": 64 * second,
                "consumed": 128 * second,
                "fullness": {"ring": 0.5},
            },
        )
        for role in ("feed", "prepare"):
            yield t, usage(role, None, 7, 0.5 * second)
        for n in range(members):
            who = {"member": f"member-{n}", "attempt": 0}
            yield (
                t,
                {"type": "progress", **who, "epoch": 0, "step": second, "steps": seconds, "samples_per_s": 200.0},
            )
            # one process for every two members in turn, as a forked worker serves them
            owner, cpu_s = f"member-{n - n % 2 + second // 40 % 2}", 0.9 * second + n % 2 * 0.1
            yield t, usage("train", owner, 100 + n // 2 * 2, cpu_s)
    for n in range(members):
        yield seconds + 0.5, {"type": "finished", "member": f"member-{n}", "attempt": 0, "epoch": 0, "metrics": {}}
    yield seconds + 1.0, {"type": "run_finished"}


def usage(role: str, member: str | None, pid: int, cpu_s: float) -> Event:
    who = {"node": "n", "role": role, "member": member, "rank": 0, "pid": pid}
    return {"type": "usage", **who, "cpu_s": cpu_s, "origin": "measured"}


def make(event: Event) -> events.Event:
    return typed({"t": 0.0, **event})


def used(*given: Any) -> events.Event:
    return make(usage(*given))


def metered(*given: float) -> events.Event:
    return make(power(*given))


def thin(raw_events: Iterable[tuple[float, Event]]) -> list[Event]:
    """The log of those events that are left when they are thinned."""
    thinned, thinning = [], Thinning(0.0)
    for t, event in raw_events:
        for told in (*thinning.add(make(event), t), *thinning.pop_due(t)):
            thinned.append({**as_dict(told), "v": 2, "t": t})
    return thinned


def logs(raw_events: Iterator[tuple[float, Event]]) -> tuple[list[Event], list[Event]]:
    """The log of all events, and of those that are left when they are thinned."""
    told = list(raw_events)
    return [{**as_dict(make(event)), "v": 2, "t": t} for t, event in told], thin(told)


@examples(12)
@given(
    seconds=st.integers(1, 400),
    members=st.integers(1, 3),
    energy=st.lists(st.integers(0, 2**30), min_size=1, max_size=5),
)
def test_no_sum_changes(seconds: int, members: int, energy: list[int]) -> None:
    whole, thinned = logs(raw(seconds, members, energy))
    before, after = ledger(whole), ledger(thinned)
    for name in ("cpu_s", "energy_j", "idle_j", "origin"):
        assert getattr(after.total, name) == getattr(before.total, name), name
    assert after.reuse == before.reuse
    assert after.cpu_by_role() == before.cpu_by_role()
    assert {m: used.cpu_s for m, used in after.by_member().items()} == {
        m: used.cpu_s for m, used in before.by_member().items()
    }
    # CPU time that is told later may leave a moment's share of the node's to other processes.
    own = [[row for row in book.rows if row.role != "other"] for book in (before, after)]
    for then, now in zip(*own, strict=True):
        assert (then.role, then.member, then.parts.keys()) == (now.role, now.member, now.parts.keys())
        for kind, share in then.parts.items():
            assert now.parts[kind].by.keys() == share.by.keys(), "how it was shared out"
    assert 0 <= after.nodes[0].metered_s - before.nodes[0].metered_s <= 1.0, "until the end"


def test_a_day_of_training_is_a_few_megabytes_and_nothing_is_late() -> None:
    thinned = thin(raw(3600, 8, [10**7]))
    last = [event for event in thinned if event["t"] > 1800 and event["type"] not in ("finished", "run_finished")]
    assert 48 * len(lines(last)) < 25e6, "bytes a day"
    for kind in ("power", "feeder", "progress"):
        times = [
            event["t"] for event in thinned if event["type"] == kind and event.get("member") in (None, "member-3")
        ]
        assert max(after - before for before, after in itertools.pairwise(times)) <= MOST_S + 1
    skipped = [(event["skipped"], event["t"]) for event in thinned if event["type"] == "feeder"]
    assert dict(reversed(skipped)) == {0: 1.0, 1: 1000.0, 2: 2000.0, 3: 3000.0}, "at once"


def test_a_short_run_is_told_as_it_is() -> None:
    whole, thinned = logs(raw(45, 1, [5, 7]))
    assert thinned == whole


def test_what_is_held_is_told_as_soon_as_it_is_due() -> None:
    thinning = Thinning(0.0)
    for pid, t in ((1, 5000.0), (2, 5010.0)):
        assert thinning.add(used("train", f"member-{pid}", pid, 1.0), t)
    for pid, t in ((2, 5011.0), (1, 5012.0)):
        assert not thinning.add(used("train", f"member-{pid}", pid, 2.0), t)
    due = {t: [event.pid for event in thinning.pop_due(t)] for t in (5029.9, 5030.0, 5039.9, 5040.0, 5099.0)}
    assert due == {5029.9: [], 5030.0: [1], 5039.9: [], 5040.0: [2], 5099.0: []}


def test_what_is_held_is_told_before_an_end() -> None:
    thinning = Thinning(0.0)
    assert thinning.add(used("train", "member-0", 1, 1.0), 5000.0), "the first is told at once"
    assert not thinning.add(used("train", "member-0", 1, 2.0), 5001.0)
    assert thinning.add(used("train", "member-1", 2, 2.0), 5001.0)
    assert not thinning.add(used("train", "member-1", 2, 3.0), 5002.0)
    told = thinning.add(make({"type": "finished", "member": "member-0"}), 5003.0)
    assert [getattr(event, "cpu_s", None) for event in told] == [2.0, None]
    told = thinning.add(make({"type": "run_stopped"}), 5003.0)
    assert [getattr(event, "cpu_s", None) for event in told] == [3.0, None]
    assert thinning.pop_due(1e6) == [] and thinning.pop_all() == []


def test_the_cost_of_a_member_is_computed_from_all_that_is_known_of_its_nodes() -> None:
    thinning = Thinning(0.0)
    power = {"type": "power", "node": "n", "energy_j": 1.0, "origin": "measured", "interval_s": 1.0, "parts": []}
    feeder = {"type": "feeder", "node": "n", "cohort": 0, "pid": 3, "prepared": 1, "consumed": 1, "skipped": 0}
    figures = tuple(
        map(make, (power, usage("train", "member-0", 1, 1.0), usage("train", "member-1", 2, 1.0), feeder))
    )
    for figure in figures:
        assert thinning.add(figure, 5000.0) == [figure], "the first is told at once"
    for figure in figures:
        assert thinning.add(figure, 5001.0) == []
    assert thinning.pop_cost(5001.0) == list(figures[:3]), "the others' use too: they share the node's energy"
    assert thinning.pop_cost(5001.0) == []
    assert thinning.pop_all() == [figures[3]]


def power(energy_j: float, interval_s: float = 1.0) -> Event:
    parts = [{"name": "cpu", "kind": "cpu", "device": None, "energy_j": energy_j, "origin": "measured"}]
    figures = {"energy_j": energy_j, "watts": energy_j / interval_s, "interval_s": interval_s, "busy_s": 1.0}
    return {"type": "power", "node": "n", "origin": "measured", "source": "rapl", "parts": parts, **figures}


def test_the_end_of_a_process_does_not_delete_how_long_it_kept_its_gpu_busy() -> None:
    thinning = Thinning(0.0)
    assert thinning.add(make({**usage("train", "member-0", 7, 1.0), "gpu_busy_s": 1.0, "gpu": "GPU-a"}), 1000.0)
    assert not thinning.add(
        make({**usage("train", "member-0", 7, 10.0), "gpu_busy_s": 30.0, "gpu": "GPU-a"}), 1010.0
    )
    assert not thinning.add(used("train", "member-0", 7, 11.0), 1011.0), "as the executor reports an end"
    told = thinning.add(make({"type": "failed", "member": "member-0"}), 1011.0)[0]
    assert (told.cpu_s, told.gpu_busy_s, told.gpu) == (11.0, 30.0, "GPU-a")


@pytest.mark.parametrize("end", ["finished", "pruned", "stopped", "paused", "cancelled", "failed"])
def test_the_last_figures_of_an_attempt_are_logged_at_once(end: str) -> None:
    thinning = Thinning(0.0)
    assert thinning.add(used("train", "member-0", 7, 1.0), 5000.0)
    assert thinning.add(make({"type": end, "member": "member-0"}), 5001.0)
    for cpu_s, t in ((2.0, 5001.1), (3.0, 5001.5)):  # what it says last, and what its executor adds
        (told,) = thinning.add(used("train", "member-0", 7, cpu_s), t)
        assert told.cpu_s == cpu_s
    assert thinning.add(make({"type": "placed", "member": "member-0", "node": "n"}), 5002.0)
    assert thinning.add(used("train", "member-0", 8, 1.0), 5003.0), "the first is told at once"
    assert not thinning.add(used("train", "member-0", 8, 2.0), 5004.0), "the next attempt's are held"


@pytest.mark.parametrize("begins", ["agent_replaced", "node"])
def test_power_is_not_added_up_across_a_pause_of_its_node(begins: str) -> None:
    thinning = Thinning(0.0)
    assert thinning.add(metered(1.0), 5000.0)
    assert not thinning.add(metered(2.0), 5001.0)
    assert not thinning.add(metered(3.0), 5002.0)
    told = thinning.add(make({"type": begins, "node": "n"}), 5003.0)
    assert [(event.type, getattr(event, "energy_j", None)) for event in told] == [("power", 5.0), (begins, None)]
    assert told[0].interval_s == 2.0


def test_power_is_not_added_up_across_a_time_that_nothing_measured() -> None:
    thinning = Thinning(0.0)
    assert thinning.add(metered(1.0), 5000.0)
    assert not thinning.add(metered(2.0), 5001.0)
    assert not thinning.add(metered(3.0), 5006.0), "four seconds are nothing: reports may be late"
    assert not thinning.add(metered(4.0, 10.0), 5017.0), "the interval says itself how long it is"
    (told,) = thinning.add(metered(5.0), 5080.0)
    assert (told.energy_j, told.interval_s) == (9.0, 12.0)
    (told,) = thinning.pop_all()
    assert (told.energy_j, told.interval_s) == (5.0, 1.0)


def test_what_is_kept_of_ended_processes_does_not_grow() -> None:
    thinning = Thinning(0.0)
    for n in range(500):
        who, now = f"member-{n}", 5000.0 + n
        for event in (
            {"type": "placed", "member": who, "node": "n"},
            usage("train", who, n, 1.0),
            usage("prepare", who, n, 1.0),
            {"type": "finished", "member": who},
            usage("train", who, n, 2.0),
        ):
            assert make(event) in thinning.add(make(event), now)
    kept = {name: len(each) for name, each in vars(thinning).items() if hasattr(each, "__len__")}
    assert sum(kept.values()) == 500, f"the name of each member: {kept}"


def test_a_process_that_goes_on_to_another_member_is_thinned_as_before() -> None:
    thinning = Thinning(0.0)
    assert thinning.add(used("train", "member-0", 7, 1.0), 5000.0)
    assert not thinning.add(used("train", "member-1", 7, 2.0), 5001.0)
    assert len(thinning.add(make({"type": "placed", "member": "member-0", "node": "n"}), 5002.0)) == 1
    assert [event.cpu_s for event in thinning.pop_due(5030.0)] == [2.0]
