"""What the ledger promises: parts that add up exactly, nobody charged for others, origins that do not improve."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ensemble.meter import ledger
from ensemble.meter.account import Account
from ensemble.meter.proportional_split import Span, split, spread, subtract_claimed

Event = dict[str, Any]


def usage(t: float, pid: int, cpu_s: float, role: str = "train", member: str | None = None, **more: Any) -> Event:
    fields = {"node": "n0", "rank": 0, "origin": "measured", **more}
    return {"v": 1, "t": t, "type": "usage", "role": role, "member": member, "pid": pid, "cpu_s": cpu_s, **fields}


def power(t: float, energy_j: float, origin: str = "measured", interval_s: float = 1.0, **more: Any) -> Event:
    fields = {"node": "n0", "watts": energy_j / interval_s, "interval_s": interval_s, "source": "rapl", **more}
    return {"v": 1, "t": t, "type": "power", "energy_j": energy_j, "origin": origin, **fields}


def started(t: float) -> Event:
    return {"v": 1, "t": t, "type": "run_started"}


def rows(events: list[Event]) -> dict[tuple[str, str | None], Any]:
    return {(row.role, row.member): row for row in ledger(events).rows}


# --- the splits -----------------------------------------------------------------------------------------------

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
def test_a_span_inside_the_metered_time_is_spread_without_loss(
    cuts: list[float], start: float, length: float, ticks: int
) -> None:
    cuts.sort()
    span = Span(("train", "a"), start, start + length, ticks)
    used = spread([span], list(itertools.pairwise(cuts)))
    total = sum(share.get(span.owner, 0) for share in used)
    assert all(value >= 0 for share in used for value in share.values())
    assert total <= ticks
    if cuts[0] < start and span.end <= cuts[-1]:
        assert total == ticks


def test_a_lag_between_two_counters_is_charged_to_nobody_twice() -> None:
    # The run's use is told half an interval late: ahead in one interval, behind in the next.
    assert subtract_claimed([10, 10, 10, 10], [5, 15, 5, 15]) == [5, 0, 0, 0]
    assert subtract_claimed([10, None, 10], [4, 3, 4]) == [6, 0, 6]


def test_there_is_no_share_of_nothing() -> None:
    with pytest.raises(ValueError, match="cannot split 3 ticks"):
        split(3, {("train", "a"): 0})


# --- whole logs -----------------------------------------------------------------------------------------------


@st.composite
def logs(draw: st.DrawFn) -> list[Event]:
    """A run on up to two nodes: counts that grow (or start over), power in intervals with and without parts."""
    events: list[Event] = [started(1000.0)]
    counts: dict[Any, float] = {}
    seconds = draw(st.integers(1, 8))
    for second in range(seconds):
        t = 1001.0 + second
        for node in ("n0", "n1")[: draw(st.integers(1, 2))]:
            for pid, role, member in ((1, "train", "member-0"), (2, "train", "member-1"), (3, "prepare", None)):
                if draw(st.booleans()):
                    key = (node, pid)
                    counts[key] = counts.get(key, 0.0) + draw(st.floats(0, 3))
                    events.append(usage(t, pid, counts[key], role, member, node=node))
            if draw(st.booleans()):
                cpu_j, gpu_j = draw(st.floats(0, 500)), draw(st.floats(0, 500))
                origin = draw(st.sampled_from(["measured", "estimated"]))
                parts = [
                    {"kind": "cpu", "device": None, "energy_j": cpu_j, "origin": origin},
                    {"kind": "gpu", "device": 0, "energy_j": gpu_j, "origin": "measured"},
                ]
                more: Event = {"node": node, "busy_s": draw(st.floats(0, 4)), "parts": parts}
                events.append(power(t, cpu_j + gpu_j, origin, **(more if draw(st.booleans()) else {"node": node})))
        if draw(st.integers(0, 9)) == 0:
            events.append(started(t))
            counts.clear()
    return events


@settings(max_examples=60)
@given(events=logs())
def test_rows_add_up_to_every_total_exactly(events: list[Event]) -> None:
    book = ledger(events)
    for node in book.nodes:
        parts = [row.energy_j for row in book.rows if row.node == node.node and row.energy_j is not None]
        assert all(part >= 0 for part in parts)
        assert sum(parts) == (node.energy_j or 0.0)  # exactly, in any order
        assert math.fsum(reversed(parts)) == (node.energy_j or 0.0)
    energies = [row.energy_j for row in book.rows if row.energy_j is not None]
    assert sum(energies) == (book.total.energy_j or 0.0)
    assert sum(total.energy_j or 0.0 for total in book.by_role().values()) == (book.total.energy_j or 0.0)
    assert sum(book.cpu_by_role().values()) == book.total.cpu_s == sum(row.cpu_s for row in book.rows)
    for row in book.rows:
        assert row.cpu_s >= 0
        assert row.origin in ("attributed", "estimated", "unavailable")
        assert (row.energy_j is None) == (row.origin == "unavailable")
        assert sum(share.energy_j for share in row.parts.values()) == (row.energy_j or 0.0)


@settings(max_examples=40)
@given(events=logs(), random=st.randoms(use_true_random=False))
def test_the_order_of_reports_of_one_moment_changes_nothing(events: list[Event], random: Any) -> None:
    def moment(event: Event) -> tuple[float, bool]:
        return event["t"], event["type"] == "run_started"

    shuffled = list(events)
    random.shuffle(shuffled)
    shuffled.sort(key=moment)
    assert ledger(shuffled).as_dict() == ledger(sorted(events, key=moment)).as_dict()


@settings(max_examples=40)
@given(events=logs())
def test_exchanging_two_members_exchanges_their_figures(events: list[Event]) -> None:
    other = {"member-0": "member-1", "member-1": "member-0"}
    exchanged = [{**event, "member": other[event["member"]]} if event.get("member") else event for event in events]
    before, after = ledger(events), ledger(exchanged)
    for name in other:
        was, now = before.member(name), after.member(other[name])
        assert (was.cpu_s, was.origin) == (now.cpu_s, now.origin)
        # A tick that is left over goes by name where remainders are equal: at most one an interval and kind.
        assert was.energy_j == pytest.approx(now.energy_j, abs=len(events) * 2e-6)


@settings(max_examples=30)
@given(events=logs())
def test_the_dict_is_plain_json(events: list[Event]) -> None:
    plain = ledger(events).as_dict()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert plain["version"] == 1


def test_energy_follows_cpu_time_within_each_interval() -> None:
    events = [started(0.0)]
    for t, a, b in ((1.0, 1.0, 0.0), (2.0, 1.0, 1.0)):  # a works in the first second, b in the second
        events += [usage(t, 1, a, member="member-0"), usage(t, 2, b, member="member-1"), power(t, 100.0 * t)]
    by = rows(events)
    assert by["train", "member-0"].energy_j == 100.0
    assert by["train", "member-1"].energy_j == 200.0
    assert by["train", "member-1"].origin == "attributed"
    assert ledger(events).total.origin == "measured"


def test_other_peoples_work_on_the_node_is_not_charged_to_the_run() -> None:
    events = [started(0.0), usage(1.0, 1, 1.0, member="member-0"), power(1.0, 80.0, busy_s=4.0)]
    book = ledger(events)
    assert book.member("member-0").energy_j == 20.0
    assert book.by_role()["other"].energy_j == 60.0
    assert book.run.energy_j == 20.0
    assert book.total.energy_j == 80.0
    assert book.cpu_by_role() == {"train": 1.0}


def test_an_estimate_stays_an_estimate_beside_a_measured_gpu() -> None:
    parts = [
        {"name": "cpu", "kind": "cpu", "device": None, "energy_j": 5.0, "origin": "estimated"},
        {"name": "gpu-1", "kind": "gpu", "device": 1, "energy_j": 300.0, "origin": "measured"},
    ]
    events = [
        started(0.0),
        {"t": 0.0, "type": "placed", "member": "member-0", "node": "n0", "devices": [1]},
        usage(1.0, 1, 1.0, member="member-0"),
        power(1.0, 305.0, "estimated", parts=parts),
    ]
    row = rows(events)["train", "member-0"]
    assert (row.energy_j, row.origin) == (305.0, "estimated")
    assert {kind: (share.energy_j, share.origin) for kind, share in row.parts.items()} == {
        "cpu": (5.0, "estimated"),
        "gpu": (300.0, "attributed"),
    }
    assert ledger(events).total.origin == "estimated"


def test_a_gpu_is_split_by_share_and_time_and_nobodys_gpu_is_other() -> None:
    def gpu(t: float) -> Event:
        parts = [{"kind": "gpu", "device": d, "energy_j": 90.0, "origin": "measured"} for d in (0, 1)]
        return power(t, 180.0, parts=parts)

    def member(name: str, share: float) -> list[Event]:
        return [
            {"t": 0.0, "type": "member", "member": name, "gpus_per_worker": share},
            {"t": 0.0, "type": "placed", "member": name, "node": "n0", "devices": [0]},
        ]

    events = [started(0.0), *member("member-0", 0.5), *member("member-1", 0.25), gpu(1.0)]
    events += [{"t": 1.0, "type": "finished", "member": "member-0"}, gpu(2.0)]
    by = rows(events)
    assert by["train", "member-0"].energy_j == 60.0
    assert by["train", "member-1"].energy_j == 30.0 + 90.0
    assert by["other", None].energy_j == 180.0


WAITS = [
    {"t": 0.0, "type": "placed", "member": "member-0", "node": "n0", "devices": [0]},
    {"t": 1.0, "type": "waiting", "member": "member-0", "detail": "no place yet"},
]


def test_a_member_that_waits_for_the_cluster_is_charged_for_no_gpu() -> None:
    parts = [{"kind": "gpu", "device": 0, "energy_j": 90.0, "origin": "measured"}]
    each = [power(t, 90.0, parts=parts) for t in (1.0, 2.0, 3.0, 4.0)]
    begun = {"t": 3.0, "type": "started", "member": "member-0"}
    by = rows([started(0.0), *WAITS, *each[:3], begun, each[3]])
    assert (by["train", "member-0"].energy_j, by["other", None].energy_j) == (90.0, 270.0)


def test_a_member_that_waits_for_the_cluster_holds_up_no_account() -> None:
    account = Account()
    for event in [started(0.0), *WAITS, *(power(float(t), 5.0) for t in range(2, 2000))]:
        account.apply(event)
    account.settle()
    assert len(account.as_dict()["nodes"][0][1]) < 100, "what is long past is settled"
    again = Account.from_dict(json.loads(json.dumps(account.as_dict())))
    assert again.as_dict() == account.as_dict()


def test_what_ran_while_nothing_metered_has_no_energy() -> None:
    by = rows([started(0.0), usage(5.0, 1, 3.0, member="member-0")])
    assert by["train", "member-0"].energy_j is None
    assert by["train", "member-0"].origin == "unavailable"
    assert by["train", "member-0"].cpu_s == 3.0
    unread = {"t": 5.0, "type": "power", "node": "n0", "watts": None, "energy_j": None, "origin": "unavailable"}
    assert ledger([unread]).total.energy_j is None


def test_a_process_id_used_again_counts_from_zero() -> None:
    within = [started(0.0), usage(1.0, 7, 4.0), usage(2.0, 7, 1.0), usage(3.0, 7, 1.5)]
    assert ledger(within).total.cpu_s == 5.5
    resumed = [started(0.0), usage(1.0, 7, 4.0), started(10.0), usage(11.0, 7, 5.0)]
    assert ledger(resumed).total.cpu_s == 9.0


def test_one_process_that_trains_several_members_is_counted_once() -> None:
    # The count is that of the process in the role, as with the inline executor.
    events = [started(0.0), usage(1.0, 7, 4.0, member="member-0"), usage(2.0, 7, 5.0, member="member-1")]
    book = ledger(events)
    assert (book.member("member-0").cpu_s, book.member("member-1").cpu_s) == (4.0, 1.0)


def test_ray_is_not_charged_for_a_worker_that_became_a_members() -> None:
    events = [
        started(0.0),
        usage(1.0, 7, 1.0, "ray"),
        usage(1.0, 5, 2.0, "ray"),
        usage(2.0, 7, 1.5, "startup", "member-0"),
    ]
    assert ledger(events).cpu_by_role() == {"startup": 1.5, "ray": 2.0}


def test_reuse_counts_private_preparation_as_prepared() -> None:
    def feeder(t: float, prepared: int, consumed: int) -> Event:
        return {"t": t, "type": "feeder", "node": "n0", "cohort": 0, "prepared": prepared, "consumed": consumed}

    def epoch(samples: int, shared: int, private: int, **more: Any) -> Event:
        batches = {"shared_batches": shared, "private_batches": private, **more}
        return {"t": 3.0, "type": "epoch", "member": "member-0", "samples": samples, **batches}

    shared = [started(0.0), feeder(1.0, 50, 150), feeder(2.0, 100, 400), epoch(100, 10, 0)]
    assert ledger(shared).reuse.factor == 4.0
    alone = ledger([started(0.0), epoch(100, 0, 10), epoch(100, 0, 10)]).reuse
    assert (alone.prepared, alone.consumed, alone.factor) == (200, 200, 1.0)
    mixed = ledger([*shared, epoch(100, 5, 5), epoch(100, 5, 5, private_samples=40)]).reuse
    assert (mixed.prepared, mixed.consumed, mixed.private) == (190, 490, 90)
    again = ledger([started(0.0), feeder(1.0, 100, 400), feeder(2.0, 10, 40)]).reuse  # a new feeder in its place
    assert (again.prepared, again.consumed) == (110, 440)
    assert ledger([started(0.0)]).reuse.factor is None


def test_members_are_listed_in_their_order() -> None:
    events = [started(0.0), *(usage(1.0, i, 1.0, member=f"member-{i}") for i in (10, 2, 0))]
    assert list(ledger(events).by_member()) == ["member-0", "member-2", "member-10"]
    assert ledger(events).as_dict()["members"][1]["cpu_s_by_role"] == {"train": 1.0}


def test_cpu_time_is_spread_over_the_time_that_was_measured_whatever_a_clock_said() -> None:
    """The node's clock is an hour ahead: its `since` would put all CPU time at the end, and energy at nobody's."""
    power = {
        "v": 1,
        "type": "power",
        "node": "n",
        "energy_j": 8.0,
        "origin": "measured",
        "interval_s": 4.0,
        "busy_s": 4.0,
    }
    used = {"v": 1, "t": 8.0, "type": "usage", "node": "n", "role": "train", "member": "m", "pid": 1, "cpu_s": 8.0}
    events = [{"v": 1, "t": 0.0, "type": "run_started"}, {**power, "t": 4.0}, {**power, "t": 8.0}]
    found = ledger([*events, {**used, "origin": "measured", "since": 3600.0, "for_s": 8.0}])
    assert found.member("m").energy_j == 16.0
