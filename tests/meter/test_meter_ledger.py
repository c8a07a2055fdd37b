"""What the ledger promises: parts that add up exactly, nobody charged for others, origins that do not improve."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.event_dicts import ledger, typed
from kit.property_examples import examples

from ensemble.meter import Ledger, LedgerView, ledger_view
from ensemble.meter.energy_allocator import METHODS, EnergyAllocator, split, spread
from ensemble.meter.ledger import COLUMNS, KINDS
from ensemble.meter.shared_cost_allocation import share_out
from ensemble.meter.usage_records import Owner, UsageSpan
from ensemble.meter.usage_sums import CPU

Event = dict[str, Any]


def usage(t: float, pid: int, cpu_s: float, role: str = "train", member: str | None = None, **more: Any) -> Event:
    fields = {"node": "n0", "rank": 0, "origin": "measured", **more}
    return {"v": 2, "t": t, "type": "usage", "role": role, "member": member, "pid": pid, "cpu_s": cpu_s, **fields}


def power(t: float, energy_j: float, origin: str = "measured", interval_s: float = 1.0, **more: Any) -> Event:
    fields = {"node": "n0", "watts": energy_j / interval_s, "interval_s": interval_s, "source": "rapl", **more}
    return {"v": 2, "t": t, "type": "power", "energy_j": energy_j, "origin": origin, **fields}


def part(energy_j: float, kind: str = "cpu", device: Any = None, **more: Any) -> Event:
    return {"name": kind, "kind": kind, "device": device, "energy_j": energy_j, "origin": "measured", **more}


def started(t: float) -> Event:
    return {"v": 2, "t": t, "type": "run_started"}


def rows(events: list[Event]) -> dict[tuple[str, str | None], Any]:
    return {(row.role, row.member): row for row in ledger(events).rows}


weights = st.dictionaries(
    st.tuples(st.sampled_from(["train", "prepare"]), st.sampled_from(["a", "b", "c", None])),
    st.integers(0, 2**44),
    min_size=1,
).filter(lambda w: sum(w.values()) > 0)


@given(total=st.integers(0, 2**50), weights=weights, random=st.randoms(use_true_random=False))
def test_shares_add_up_are_not_negative_and_do_not_depend_on_order(total: int, weights: Any, random: Any) -> None:
    shares = split(total, weights)
    assert sum(shares.values()) == total
    whole = sum(weights.values())
    for key, share in shares.items():
        assert share >= 0
        assert abs(share * whole - total * weights[key]) < whole  # off by less than a tick
    shuffled = list(weights.items())
    random.shuffle(shuffled)
    assert split(total, dict(shuffled)) == shares


@given(
    cuts=st.lists(st.floats(0, 100), min_size=2, max_size=20, unique=True),
    start=st.floats(-10, 110),
    length=st.floats(0, 50),
    ticks=st.integers(0, 2**45),
)
def test_a_span_in_the_metered_time_is_spread_whole(
    cuts: list[float], start: float, length: float, ticks: int
) -> None:
    cuts.sort()
    span = UsageSpan(Owner("train", "a"), start, start + length, ticks)
    used = spread([span], list(itertools.pairwise(cuts)))
    total = sum(share.get(span.owner, 0) for share in used)
    assert all(value >= 0 for share in used for value in share.values()) and total <= ticks
    if cuts[0] < start and span.end <= cuts[-1]:
        assert total == ticks


def test_a_lag_between_two_counters_is_charged_to_nobody_twice() -> None:
    # The run's use is told half an interval late: ahead in one interval, behind in the next.
    for busy, claimed, others in (
        ((10, 10, 10, 10), (5, 15, 5, 15), [5, 0, 0, 0]),
        ((10, None, 10), (4, 3, 4), [6, 0, 6]),
    ):
        allocator = EnergyAllocator()
        assert list(map(allocator.count_others, busy, claimed)) == others


@st.composite
def logs(draw: st.DrawFn) -> list[Event]:
    """A run on up to two nodes: counts that grow (or start over), power in intervals with and without parts, idle
    energy and activity where they are known, members that come and go.
    """
    events: list[Event] = [started(1000.0)]
    for node in ("n0", "n1"):
        events.append({"t": 1000.0, "type": "node", "node": node, "cpus": 4.0, "gpu_ids": [0], "gpu_parents": [0]})
    counts: dict[Any, float] = {}

    def flip() -> bool:
        return draw(st.booleans())

    def grow(key: Any, most: float) -> float:
        counts[key] = counts.get(key, 0.0) + draw(st.floats(0, most))
        return counts[key]

    for second in range(draw(st.integers(1, 8))):
        t = 1001.0 + second
        for node in ("n0", "n1")[: draw(st.integers(1, 2))]:
            for pid, role, member in ((1, "train", "member-0"), (2, "train", "member-1"), (3, "prepare", None)):
                if flip():
                    cpu_s, more = grow((node, pid), 3), {"cohort": 0} if role == "prepare" else {}
                    if role == "train" and flip():
                        more = {"gpu_busy_s": grow((node, pid, "gpu"), 1)}
                    events.append(usage(t, pid, cpu_s, role, member, node=node, **more))
            for name in ("member-0", "member-1"):
                what = draw(st.sampled_from(["placed", "epoch", "stopped", None, None]))
                if what is not None:
                    place = {"node": node, "devices": [draw(st.sampled_from([0, None]))], "cohort": 0}
                    samples = {"samples": draw(st.integers(0, 100)), "shared_batches": 5}
                    samples |= {"private_batches": draw(st.integers(0, 5))}
                    events.append({"t": t, "type": what, "member": name, **place, **samples})
            if flip():
                joules = [draw(st.floats(0, 500)) for _ in range(2)]
                origin = draw(st.sampled_from(["measured", "estimated"]))
                parts = [part(joules[0]) | {"origin": origin}, part(joules[1], "gpu", 0)]
                if flip():
                    for one in parts:
                        one["idle_j"] = draw(st.floats(0, 200))
                if flip():
                    owners = (("train", "member-0"), ("train", "member-1"), ("other", None))
                    parts[1]["activity"] = [[*owner, draw(st.floats(0, 1))] for owner in owners]
                more: Event = {"busy_s": draw(st.floats(0, 4)), "parts": parts}
                events.append(power(t, sum(joules), origin, node=node, **(more if flip() else {})))
        if draw(st.integers(0, 9)) == 0:
            events.append(started(t))
            counts.clear()
    return events


@given(events=logs())
def test_rows_add_up_to_every_total_exactly(events: list[Event]) -> None:
    check_sums(ledger(events))


def check_sums(book: Ledger) -> None:
    for node in book.nodes:
        parts = [row.energy_j for row in book.rows if row.node == node.node and row.energy_j is not None]
        assert all(part >= 0 for part in parts)
        assert sum(parts) == (node.energy_j or 0.0)  # exactly, in any order
        assert math.fsum(reversed(parts)) == (node.energy_j or 0.0)
    energies = [row.energy_j for row in book.rows if row.energy_j is not None]
    assert sum(energies) == (book.total.energy_j or 0.0)
    assert sum(total.energy_j or 0.0 for total in book.by_role().values()) == (book.total.energy_j or 0.0)
    assert sum(book.cpu_by_role().values()) == book.total.cpu_s == sum(row.cpu_s for row in book.rows)
    assert sum(row.cpu_s for row in book.full_rows) == book.total.cpu_s
    assert sum(row.energy_j or 0.0 for row in book.full_rows) == (book.total.energy_j or 0.0)
    assert sum(row.idle_j for row in book.rows) == sum(node.idle_j or 0.0 for node in book.nodes)
    for row in book.rows:
        assert row.cpu_s >= 0 and row.origin in ("attributed", "estimated", "unavailable")
        assert (row.energy_j is None) == (row.origin == "unavailable")
        assert sum(share.energy_j for share in row.parts.values()) == (row.energy_j or 0.0)
        assert all(sum(share.by.values()) == share.energy_j for share in row.parts.values())
    for member, own in book.by_member().items():
        full = book.member(member, full=True)
        assert full.cpu_s >= own.cpu_s and (full.energy_j or 0.0) >= (own.energy_j or 0.0)
    plain = book.as_dict()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain and plain["version"] == 3


@examples(20)
@given(events=logs(), cuts=st.sets(st.integers(1, 60)), margin_s=st.sampled_from([0.0, 1.0, 3.0]))
def test_a_view_that_reads_a_log_in_pieces_shows_what_the_log_says_up_to_then(
    events: list[Event], cuts: set[int], margin_s: float
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledger_view, "MARGIN_S", margin_s)
        patch.setattr(ledger_view, "SETTLE_S", margin_s / 2)
        view = LedgerView()
        for number, event in enumerate(events, start=1):
            view.apply(typed(event))
            if number in cuts or number == len(events):
                view = msgspec.msgpack.decode(msgspec.msgpack.encode(view), type=LedgerView)  # as a snapshot does
                check_sums(view.read())
                assert figures(view.read()) == figures(ledger(events[:number]))
                for member, total in view.read().by_member().items():
                    assert view.read(member).member(member) == total


def figures(book: Ledger) -> Event:
    """All but the power over time, which only a ledger of the whole log has."""
    found = book.as_dict()
    return {**found, "nodes": [node | {"power": None, "begins": None} for node in found["nodes"]]}


@given(events=logs(), random=st.randoms(use_true_random=False))
def test_the_order_of_reports_of_one_moment_changes_nothing(events: list[Event], random: Any) -> None:
    def moment(event: Event) -> tuple[float, bool, bool]:
        return event["t"], event["type"] == "run_started", event["type"] in ("usage", "power")

    reports = [event for event in events if event["type"] in ("usage", "power")]
    random.shuffle(reports)
    others = [event for event in events if event["type"] not in ("usage", "power")]
    shuffled = sorted([*others, *reports], key=moment)
    assert ledger(shuffled).as_dict() == ledger(sorted(events, key=moment)).as_dict()


def test_other_peoples_work_on_the_node_is_not_charged_to_the_run() -> None:
    events = [started(0.0), usage(1.0, 1, 1.0, member="member-0"), power(1.0, 80.0, busy_s=4.0)]
    book = ledger(events)
    assert book.member("member-0").energy_j == 20.0 and book.by_role()["other"].energy_j == 60.0
    assert book.run.energy_j == 20.0 and (book.total.energy_j, book.total.origin) == (80.0, "measured")
    assert book.member("member-0").origin == "attributed" and book.cpu_by_role() == {"train": 1.0}


def placed(t: float, member: str, devices: tuple[Any, ...] = (None,), share: float = 1.0, **more: Any) -> Any:
    """Its declaration and its placement: one core a rank."""
    who = {"t": t, "member": member}
    place = {"type": "placed", "node": "n0", "devices": list(devices), "cohort": 0, **more}
    return [who | {"type": "member", "cpus_per_worker": 1.0, "gpus_per_worker": share}, who | place]


NODE = {"t": 0.0, "type": "node", "node": "n0", "cpus": 4.0}


def test_what_is_not_known_is_missing_not_zero() -> None:
    used = [started(0.0), usage(1.0, 1, 1.0, member="member-0"), usage(1.0, 2, 1.0, member="member-1", node="n1")]
    known, unknown = power(1.0, 8.0, parts=[part(8.0, idle_j=0.0)]), power(1.0, 9.0, parts=[part(9.0)], node="n1")
    book = ledger([*used, known, unknown])
    assert {m: total.idle_j for m, total in book.by_member().items()} == {"member-0": 0.0, "member-1": None}
    assert book.total.idle_j == 0.0 and ledger([*used, unknown]).total.idle_j is None
    row = rows([started(0.0), usage(5.0, 1, 3.0, member="member-0")])["train", "member-0"]
    assert (row.energy_j, row.origin, row.cpu_s) == (None, "unavailable", 3.0), "while nothing metered"
    unread = {"t": 5.0, "type": "power", "node": "n0", "watts": None, "energy_j": None, "origin": "unavailable"}
    assert ledger([unread]).total.energy_j is None


def test_idle_power_goes_by_reservation_and_what_is_unknown_by_activity() -> None:
    events = [started(0.0), NODE, *(event for i in range(8) for event in placed(0.0, f"member-{i}"))]
    book = ledger([*events, power(1.0, 80.0, parts=[part(80.0, idle_j=80.0)])])
    assert [book.member(f"member-{i}").energy_j for i in range(8)] == [10.0] * 8, "cores are reserved twice"
    assert "idle" not in book.by_role()
    by = rows([*events, usage(1.0, 1, 1.0, member="member-0"), power(1.0, 100.0, parts=[part(100.0)])])
    assert by["train", "member-0"].parts["cpu"].by == {"cpu_time": 100.0} and ("train", "member-1") not in by


GPU_NODE = {**NODE, "gpu_ids": ["GPU-a"], "gpu_parents": ["GPU-a"]}


def on_gpu(t: float = 0.0) -> list[Event]:
    """Two members with a quarter of a GPU each."""
    both = [event for n in (0, 1) for event in placed(t, f"member-{n}", ("GPU-a",), 0.25)]
    return [started(t), GPU_NODE, *both]


def test_a_gpu_goes_by_sm_utilization_else_by_busy_time_else_by_share() -> None:
    gpu = {"idle_j": 20.0, "device": "GPU-a"}
    busy = [usage(1.0, i, 0.0, member=f"member-{i}", gpu_busy_s=0.5 / (i + 1)) for i in (0, 1)]
    seen = [["train", "member-0", 0.6], ["train", "member-1", 0.2], ["other", None, 0.2]]

    def shares(parts: Event, events: list[Event]) -> dict[str, dict[str, float]]:
        by = rows([*on_gpu(), *events, power(1.0, 120.0, parts=[part(120.0, "gpu", **gpu, **parts)])])
        return {member or role: dict(row.parts["gpu"].by) for (role, member), row in by.items() if row.parts}

    by_sm = shares({"activity": seen}, busy)
    expected = {"member-0": (5.0, 60.0), "member-1": (5.0, 20.0), "other": (0.0, 20.0), "idle": (10.0, 0.0)}
    for name, joules in expected.items():
        found = [by_sm[name].get(method, 0.0) for method in ("reservation", "sm_utilization")]
        assert found == pytest.approx(joules, abs=1e-4)
    by_busy = shares({}, busy)
    busy_j = [by_busy[f"member-{n}"]["busy_time"] for n in (0, 1)]
    assert busy_j == pytest.approx([100.0 * 2 / 3, 100.0 / 3], abs=1e-6)
    assert by_busy["idle"] == {"reservation": 10.0}
    by_share = shares({}, [])
    assert by_share["member-0"] == by_share["member-1"] == {"reservation": 5.0, "share": 50.0}
    assert shares({"activity": [["train", "member-0", 0.0]]}, busy) == by_busy, "nobody computed"


@pytest.mark.parametrize(("began", "joules"), [(0.0, 300.0), (4.0, 100.0)])
def test_the_first_count_of_busy_time_is_of_the_time_before_it_in_this_start(began: float, joules: float) -> None:
    """Also that of a profile, which names its GPU."""
    metered = [power(t, 100.0, parts=[part(100.0, "gpu", "GPU-a", idle_j=0.0)]) for t in (1.0, 2.0, 3.0, 4.0, 5.0)]
    told = usage(5.0, 1, 1.0, member="member-0", gpu_busy_s=3.0, gpu="GPU-a")
    begun = [] if began == 0.0 else [started(began)]
    by = rows([*on_gpu(), *metered[: int(began)], *begun, *metered[int(began) :], told])
    assert by["train", "member-0"].parts["gpu"].by["busy_time"] == joules
    told = usage(5.0, 2, 5.0, role="profile", gpu_busy_s=4.5, gpu="GPU-a")
    by = rows([started(0.0), GPU_NODE, *metered, told])
    assert by["profile", None].parts["gpu"].by == {"busy_time": 500.0} and ("other", None) not in by


def test_instances_of_a_gpu_bear_their_part_of_it() -> None:
    node = {**NODE, "gpu_ids": ["MIG-0", "MIG-1"], "gpu_parents": ["GPU-a"] * 2, "gpu_shares": [3 / 7, 2 / 7]}
    events = [started(0.0), node, *placed(0.0, "member-0", ("MIG-0",)), *placed(0.0, "member-1", ("MIG-1",))]
    busy = [usage(1.0, i, 0.0, member=f"member-{i}", gpu_busy_s=1.0) for i in (0, 1)]
    by = rows([*events, *busy, power(1.0, 120.0, parts=[part(120.0, "gpu", "GPU-a", idle_j=70.0)])])
    for member, joules in (("member-0", 30.0), ("member-1", 20.0)):
        expected = {"reservation": joules, "busy_time": joules}
        assert by["train", member].parts["gpu"].by == pytest.approx(expected, abs=1e-4)
    assert by["idle", None].energy_j == pytest.approx(20.0, abs=1e-4)
    assert by["train", "member-0"].gpu_s == 1.0, "busy seconds are the member's, whatever part of a GPU it has"


def test_the_rest_of_a_node_follows_what_its_known_parts_used_for_work() -> None:
    events = [*on_gpu(), usage(1.0, 1, 1.0, member="member-0")]
    seen = [["train", "member-1", 0.5]]
    known = [part(30.0, idle_j=10.0), part(80.0, "gpu", "GPU-a", idle_j=20.0, activity=seen)]
    by = rows([*events, power(1.0, 200.0, parts=[part(90.0, "node", idle_j=50.0), *known])])
    assert by["train", "member-0"].parts["node"].by["dynamic"] == pytest.approx(40.0 * 20 / 80)
    assert by["train", "member-1"].parts["node"].by["dynamic"] == pytest.approx(40.0 * 60 / 80)


def test_what_serves_all_is_shared_out_by_what_each_consumed() -> None:
    def epoch(member: str, samples: int, private: int) -> Event:
        batches = {"private_batches": private, "shared_batches": samples - private}
        return {"t": 9.0, "type": "epoch", "member": member, "samples": samples, **batches}

    events = [started(0.0), NODE, *placed(0.0, "member-0"), *placed(0.0, "member-1", (None, None))]
    events += [*placed(0.0, "member-2", cohort=1)]
    events += [epoch("member-0", 300, 0), epoch("member-1", 300, 200), epoch("member-2", 900, 0)]
    events += [usage(10.0, 5, 4.0, "prepare", cohort=0), usage(10.0, 6, 8.0, "orchestrate")]
    events += [power(10.0, 120.0, interval_s=10.0, parts=[part(120.0)])]
    book = ledger(events)
    full = {(row.role, str(row.member)[-1]): (row.cpu_s, row.energy_j) for row in book.full_rows}
    # Of cohort 0's stream member-0 had three times as much as member-1; all held a place for as long, one with two
    # ranks. Member-2 reads another stream.
    prepare = {("prepare", "0"): (3.0, 30.0), ("prepare", "1"): (1.0, 10.0)}
    orchestrate = {("orchestrate", str(n)): used for n, used in enumerate([(2.0, 20.0), (4.0, 40.0), (2.0, 20.0)])}
    assert full == prepare | orchestrate and book.member("member-1").energy_j is None
    assert book.member("member-1", full=True).energy_j == 50.0
    assert book.by_role()["prepare"].energy_j == 40.0, "the first view keeps it in one row"
    nobody = ledger([started(0.0), usage(1.0, 5, 4.0, "prepare", cohort=0), power(1.0, 120.0)])
    assert [(row.role, row.member) for row in nobody.full_rows] == [("prepare", None)]


def test_agents_are_shared_out_on_their_node_and_the_driver_among_all() -> None:
    events = [started(0.0), usage(1.0, 1, 1.0, "startup"), *placed(1.0, "member-0", node="n1")]
    events += [*placed(1.0, "member-1", (None, None), node="n2", nodes=["n2", "n3"])]
    events += [usage(9.0, 1, 6.0, "orchestrate"), usage(9.0, 2, 2.0, "orchestrate", node="n1")]
    events += [usage(9.0, 3, 4.0, "ray", node="n3"), usage(9.0, 4, 3.0, "ray", node="n4")]
    full = {(row.role, row.member, row.node): row.cpu_s for row in ledger(events).full_rows}
    assert full["orchestrate", "member-0", "n0"] == full["orchestrate", "member-1", "n0"] / 2 == 2.0
    assert full["orchestrate", "member-0", "n1"] == 2.0
    assert full["ray", "member-1", "n3"] == 4.0 and ("ray", "member-0", "n3") not in full
    assert full["ray", "member-0", "n4"] == 1.0, "a node without members serves all"
    assert sum(full.values()) == pytest.approx(16.0)


def test_the_time_that_was_metered_is_that_in_which_some_node_was() -> None:
    def seconds(node: str, first: int) -> list[Event]:
        idle = [part(50.0, idle_j=50.0)]
        return [power(float(t), 50.0, node=node, parts=idle) for t in range(first, first + 100)]

    events = [started(0.0), *seconds("a", 1), *seconds("b", 51), *placed(1999.0, "member-0", node="a")]
    events += seconds("a", 2000)
    book = ledger(events)
    assert book.metered_s == pytest.approx(250.0)
    assert [node.metered_s for node in book.nodes] == pytest.approx([200.0, 100.0])
    assert book.nodes[0].mean_watts == pytest.approx(50.0) and book.total.mean_w == pytest.approx(60.0)
    assert book.member("member-0").energy_j == pytest.approx(5000.0), "what it held while the node was metered"


def test_mean_watts_are_of_the_time_that_a_member_held_its_place() -> None:
    events = [started(0.0), NODE, *placed(0.0, "member-0"), usage(0.0, 1, 0.0, member="member-0")]
    for t, energy_j in ((1.0, 10.0), (2.0, 30.0)):
        events += [usage(t, 1, t, member="member-0"), power(t, energy_j, parts=[part(energy_j)])]
    events.append({"t": 2.0, "type": "finished", "member": "member-0"})
    events.append(power(4.0, 8.0, interval_s=2.0, parts=[part(8.0)]))
    book = ledger(events)
    assert (book.member("member-0").mean_w, book.total.mean_w) == (20.0, 12.0) and book.run.mean_w == 10.0


def test_an_estimate_stays_an_estimate_beside_a_measured_gpu() -> None:
    parts = [{**part(5.0), "origin": "estimated"}, part(300.0, "gpu", "GPU-a")]
    events = [*on_gpu(), usage(1.0, 1, 1.0, member="member-0", gpu_busy_s=1.0)]
    events += [power(1.0, 305.0, "estimated", parts=parts)]
    row = rows(events)["train", "member-0"]
    assert (row.energy_j, row.origin) == (305.0, "estimated")
    parts_of_row = {kind: (share.energy_j, share.origin) for kind, share in row.parts.items()}
    assert parts_of_row == {"cpu": (5.0, "estimated"), "gpu": (300.0, "attributed")}
    assert ledger(events).total.origin == "estimated"


def test_what_is_long_past_is_settled_and_its_details_are_dropped() -> None:
    view = LedgerView()
    events = [started(0.0), *placed(1.0, "member-0"), usage(2.0, 1, 1.0, member="member-0")]
    events += [power(2.0, 5.0), {"t": 3.0, "type": "finished", "member": "member-0"}]
    for event in [*events, *(power(float(t), 5.0) for t in range(3, 200))]:
        view.apply(typed(event))
    assert len(view.parser.nodes["n0"].power) < 80


def test_a_count_is_of_a_process_in_a_role() -> None:
    again = [usage(t, 7, cpu_s, began=200) for t, cpu_s in ((2.0, 1.0), (3.0, 1.5))]
    assert ledger([started(0.0), usage(1.0, 7, 4.0, began=100), *again]).total.cpu_s == 5.5, (
        "its id was used again"
    )
    resumed = [started(0.0), usage(1.0, 7, 4.0), started(10.0), usage(11.0, 7, 5.0)]
    assert ledger(resumed).total.cpu_s == 9.0
    lower = [usage(t, 7, cpu_s, began=100) for t, cpu_s in ((1.0, 6.9), (2.0, 0.5), (3.0, 7.0))]
    assert ledger([started(0.0), *lower]).total.cpu_s == pytest.approx(7.0), "no new count"
    inline = ledger([started(0.0), usage(1.0, 7, 4.0, member="m"), usage(2.0, 7, 5.0, member="n")])
    assert (inline.member("m").cpu_s, inline.member("n").cpu_s) == (4.0, 1.0), "one process for several members"
    used = [usage(1.0, 7, 1.0, "ray"), usage(1.0, 5, 2.0, "ray"), usage(2.0, 7, 1.5, "startup", "member-0")]
    assert ledger([started(0.0), *used]).cpu_by_role() == {"startup": 1.5, "ray": 2.0}, "an idle worker became it"


def test_readings_that_are_late_and_clocks_that_were_set_change_no_sum() -> None:
    events = [started(0.0), NODE, *placed(0.0, "member-0"), usage(0.0, 1, 0.0, member="member-0")]
    late = [power(4.0 + until / 1000, 10.0, until=until, parts=[part(10.0)]) for until in (1.0, 2.0, 3.0, 4.0)]
    last = power(4.006, 1.3, interval_s=0.001, until=4.001, parts=[part(1.3)])
    book = ledger([*events, usage(4.0, 1, 4.0, member="member-0"), *late, last])
    assert book.total.energy_j == pytest.approx(41.3), "the driver was busy for three seconds"
    metered = [power(t, 8.0, interval_s=4.0, busy_s=4.0) for t in (4.0, 8.0)]
    book = ledger([started(0.0), *metered, usage(8.0, 1, 8.0, member="m", since=3600.0, for_s=8.0)])
    assert book.member("m").energy_j == 16.0


def test_reuse_counts_private_preparation_as_prepared() -> None:
    def feeder(t: float, prepared: int, consumed: int) -> Event:
        return {"t": t, "type": "feeder", "node": "n0", "cohort": 0, "prepared": prepared, "consumed": consumed}

    def epoch(samples: int, shared: int, private: int, **more: Any) -> Event:
        batches = {"shared_batches": shared, "private_batches": private, **more}
        return {"t": 3.0, "type": "epoch", "member": "member-0", "samples": samples, **batches}

    shared = [started(0.0), feeder(1.0, 50, 150), feeder(2.0, 100, 400), epoch(100, 10, 0)]
    assert ledger(shared).reuse.factor == 4.0 and ledger([started(0.0)]).reuse.factor is None
    alone = ledger([started(0.0), epoch(100, 0, 10), epoch(100, 0, 10)]).reuse
    assert (alone.prepared, alone.consumed, alone.factor) == (200, 200, 1.0)
    left_out = ledger([*shared, epoch(100, 5, 5, private_skipped=3), epoch(100, 0, 10, private_skipped=4)])
    assert left_out.reuse.skipped == ledger(shared).reuse.skipped + 7
    mixed = ledger([*shared, epoch(100, 5, 5), epoch(100, 6, 4)]).reuse
    assert (mixed.prepared, mixed.consumed, mixed.private) == (190, 490, 90)
    again = ledger([started(0.0), feeder(1.0, 100, 400), feeder(2.0, 10, 40)]).reuse  # a new feeder in its place
    assert (again.prepared, again.consumed) == (110, 440)


def test_a_member_that_is_paused_bears_nothing_more_and_shares_are_those_of_who_holds_the_gpu() -> None:
    gpu = [part(90.0, "gpu", "GPU-a")]
    both = [*placed(0.0, "member-0", ("GPU-a",), 0.5), *placed(0.0, "member-1", ("GPU-a",), 0.25)]
    paused = {"t": 1.0, "type": "paused", "member": "member-0"}
    by = rows([started(0.0), GPU_NODE, *both, power(1.0, 90.0, parts=gpu), paused, power(2.0, 90.0, parts=gpu)])
    assert [by["train", f"member-{n}"].energy_j for n in (0, 1)] == [60.0, 30.0 + 90.0]
    idle = [part(100.0, idle_j=40.0)]
    events = [started(0.0), NODE, *placed(0.0, "member-0"), usage(0.0, 1, 0.0, member="member-0")]
    events += [power(1.0, 100.0, parts=idle), paused | {"t": 1.5}]
    events += [power(2.0, 100.0, parts=idle), power(3.0, 100.0, parts=idle)]
    assert rows(events)["train", "member-0"].idle_j == 15.0


def test_as_a_table_each_view_has_its_rows_with_all_digits_and_sums_to_the_whole_exactly() -> None:
    members = [event for n in (0, 1) for event in placed(0.0, f"member-{n}", ("GPU-a",), 0.3)]
    events = [started(0.0), GPU_NODE, *members]
    for t in (1.0, 2.0):
        train = [usage(t, n, t * (0.1 + 0.3 * n), "train", f"member-{n}", gpu_busy_s=0.3 * t) for n in (0, 1)]
        metered = [part(33.3, idle_j=10.1), part(77.7, "gpu", "GPU-a", idle_j=20.2)]
        events += [*train, usage(t, 2, 0.7 * t, "prepare", cohort=0), power(t, 111.0, busy_s=3.0, parts=metered)]
    shared = {"t": 2.0, "type": "epoch", "epoch": 0, "samples": 100, "shared_batches": 10}
    book = ledger([*events, *(shared | {"member": f"member-{n}"} for n in (0, 1))])
    lines = list(csv.DictReader(io.StringIO(book.as_csv())))
    of_views = [("direct", row) for row in book.rows] + [("full", row) for row in book.full_rows]
    assert len(of_views) > 8
    for line, (view, row) in zip(lines, of_views, strict=True):
        assert list(line) == list(COLUMNS)
        assert (line["view"], line["role"], line["member"]) == (view, row.role, row.member or "")
        assert (line["node"], line["cohort"]) == (row.node, "" if row.cohort is None else str(row.cohort))
        assert (line["cpu_origin"], line["origin"]) == (row.cpu_origin, row.origin)
        for name, value in (("cpu_s", row.cpu_s), ("energy_j", row.energy_j), ("gpu_s", row.gpu_s)):
            assert line[name] == ("" if value is None else repr(value))

    def total(of: list[dict[str, str]], *names: str) -> float:
        return sum(float(line[name] or 0) for line in of for name in names)

    for line in lines:
        kinds, methods = [f"{kind}_j" for kind in KINDS], [f"by_{method}_j" for method in METHODS]
        assert total([line], *kinds) == total([line], *methods) == total([line], "energy_j")
    filled = {name for line in lines for name, value in line.items() if value}
    assert {"cpu_j", "gpu_j", "by_reservation_j", "by_cpu_time_j", "by_busy_time_j", "cohort"} <= filled
    for view in ("direct", "full"):
        of_view = [line for line in lines if line["view"] == view]
        assert total(of_view, "energy_j") == book.total.energy_j == 222.0
        assert total(of_view, "cpu_s") == book.total.cpu_s


def test_each_column_of_the_table_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "concepts" / "accounting.md").read_text()
    table = page.split("`ledger.csv` has")[1].split("|---|---|")[1].split("Numbers have")[0]
    cells = [line.split("|")[1] for line in table.strip().splitlines()]
    assert [name for cell in cells for name in re.findall(r"`(\w+)`", cell)] == list(COLUMNS)


def test_a_stream_is_borne_by_samples_and_what_serves_all_by_the_time_of_ranks() -> None:
    shared: dict[Owner, Any] = {}
    uses: Any = {(Owner(role, None, 0), "n"): {CPU: (8, "measured")} for role in ("prepare", "feed", "verify")}
    share_out(
        uses, {("a", 0): 3, ("b", 0): 1}, {("a", "n"): 1, ("b", "n"): 3}, lambda o, _: shared.setdefault(o, {})
    )
    borne = {owner[:2]: ticks for owner, use in shared.items() for ticks, _ in use.values()}
    assert [borne[role, "a"] for role in ("prepare", "feed", "verify")] == [6, 6, 2]
    assert [borne[role, "b"] for role in ("prepare", "feed", "verify")] == [2, 2, 6]
