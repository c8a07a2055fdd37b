"""Documents and changes: what a page has after any changes is what it would have loaded anew."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import pytest
from document_parts import make_stream
from documents import make_documents
from event_dicts import typed
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples
from run_events import list_run, measured, search_run

from ensemble.events import Feeder
from ensemble.reporting.dashboard import projection, rows
from ensemble.reporting.dashboard.member_log import tidy, untouched
from ensemble.reporting.dashboard.progress import list_improvements, plot_progress
from ensemble.reporting.dashboard.rows import COLUMNS
from ensemble.reporting.dashboard.streams import StreamRates, describe_streams, group_streams
from ensemble.store import RunDir
from ensemble.store.state import RunState

Document = dict[str, Any]
NODES = measured(list_run(members=6, epochs=4))
RUNS = {"list": NODES, "search": search_run()}


class RunView(projection.RunView):
    """Takes events as dicts."""

    def apply(self, events: Any, offset: int) -> None:
        super().apply([typed(event) for event in events], offset)

    def change_since(self, events: Any) -> Any:
        return super().change_since([typed(event) for event in events])


class Clock:
    """Seconds that pass only from one change to the next."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def make_view(events: list[Document] | None = None, clock: Clock | None = None) -> RunView:
    view = RunView(RunDir("/nowhere/digits"), clock=clock or Clock())
    if events:
        view.apply(events, len(events))
    return view


def plain(document: Any) -> Any:
    """As a page receives it."""
    return json.loads(json.dumps(document, allow_nan=False))


class Page:
    """What a page holds: the documents, with changes applied as the contract of changes says."""

    def __init__(self, view: RunView) -> None:
        self.state, self.curves = plain(view.state_document()), plain(view.curves_document())["members"]
        self.answers: list[Any] = []

    def apply(self, change: Document) -> None:
        change = plain(change)
        for name in ("offset", "now", "run", "nodes", "streams", "cost", "progress"):
            if name in change:
                self.state[name] = change[name]
        self.state["members"]["rows"] |= change.get("members", {})
        self.state["spans"] |= change.get("spans", {})
        new = change.get("notices", [])
        known = {notice["key"] for notice in new}
        self.state["notices"] = [n for n in self.state["notices"] if n["key"] not in known] + new
        self.answers += change.get("answers", [])
        for name, epoch, t, values in change.get("epochs", []):
            curve = self.curves.setdefault(name, {"epoch": [], "t": [], "values": {}})
            keep = sum(known < epoch for known in curve["epoch"])
            for column in (curve["epoch"], curve["t"], *curve["values"].values()):
                del column[keep:]
            if values is not None:
                curve["epoch"].append(epoch)
                curve["t"].append(round(t, 3))
                for metric in values:
                    curve["values"].setdefault(metric, [None] * keep)
                for metric, column in curve["values"].items():
                    column.append(values.get(metric))
        self.curves = {name: curve for name, curve in self.curves.items() if curve["epoch"] or name in self.curves}

    def comparable(self) -> Any:
        """All of it but guesses of the time left, which depend on what was seen when."""
        run = {name: value for name, value in self.state["run"].items() if name != "left"}
        curves = {name: curve for name, curve in self.curves.items() if curve["epoch"]}
        return plain({**self.state, "run": run, "curves": curves})


def cut(events: list[Document], places: list[int]) -> list[list[Document]]:
    edges = [0, *sorted({place % (len(events) + 1) for place in places}), len(events)]
    return [events[a:b] for a, b in itertools.pairwise(edges)]


WHOLE: dict[str, Any] = {}


def whole(run: str) -> Any:
    """What a page has that loads the whole run."""
    if run not in WHOLE:
        WHOLE[run] = Page(make_view(RUNS[run])).comparable()
    return WHOLE[run]


@pytest.mark.parametrize("run", ["list", "search"])
@examples(10)
@given(places=st.lists(st.integers(0, 10**6), max_size=12))
def test_changes_lead_to_what_a_page_would_load_anew(run: str, places: list[int]) -> None:
    events = RUNS[run]
    clock = Clock()
    view = make_view(clock=clock)
    page, seen = Page(view), 0
    for part in cut(events, places):
        seen += len(part)
        view.apply(part, seen)
        clock.now += 10.0
        if (change := view.take_change()) is not None:
            page.apply(change)
    assert page.comparable() == whole(run)


@pytest.mark.parametrize("run", ["list", "search"])
@examples(10)
@given(left=st.integers(0, 10**6))
def test_a_page_that_comes_back_gets_all_that_it_has_missed(run: str, left: int) -> None:
    events = RUNS[run]
    left %= len(events)
    page = Page(make_view(events[:left]))
    view = make_view(events)
    page.apply(change := view.change_since(events[left:]))
    assert page.comparable() == whole(run)
    page.apply(change)
    assert page.comparable() == whole(run), "a change that comes twice does no harm"


def test_the_share_of_batches_that_a_member_prepared_for_itself_is_in_its_row() -> None:
    document = make_view(NODES).state_document()
    for name, row in document["members"]["rows"].items():
        epochs = {e["epoch"]: e for e in NODES if e["type"] == "epoch" and e["member"] == name}.values()
        private, shared = (sum(e[f"{what}_batches"] for e in epochs) for what in ("private", "shared"))
        assert dict(zip(COLUMNS, row, strict=True))["private"] == round(private / (private + shared), 4)


def test_a_stream_counts_what_all_its_feeders_in_turn_have_done() -> None:
    count = {"type": "feeder", "v": 2, "node": "a", "cohort": 0, "workers": 1, "fullness": {}}
    feeders = [
        {**count, "t": 1.0, "pid": 7, "prepared": 100, "consumed": 400, "sent_bytes": 10},
        {**count, "t": 2.0, "pid": 7, "prepared": 150, "consumed": 600, "sent_bytes": 20},
        {**count, "t": 9.0, "pid": 8, "prepared": 30, "consumed": 90, "sent_bytes": 5},  # the first one has died
    ]
    start = {"type": "run_started", "v": 2, "t": 0.0, "name": "r", "run_id": "r", "data": {"samples": 1078}}
    document = make_view([start, *feeders]).state_document()
    (group,) = document["streams"]
    (stream,) = group["streams"]
    assert (stream["prepared"], stream["consumed"], stream["sent_bytes"]) == (180, 690, 25)
    assert stream["prepared_per_s"] == 50.0
    assert document["run"]["samples"] == 1078


@pytest.mark.parametrize(("direction", "best"), [("max", max), ("min", min)])
def test_the_best_so_far_is_bettered_up_to_the_best_of_all_curves(direction: str, best: Any) -> None:
    curves = make_documents(40)["curves"]["members"]
    series = [(name, curve["t"], curve["values"]["accuracy"]) for name, curve in curves.items()]
    steps = list_improvements(series, direction)
    values = [value for _, value, _ in steps]
    assert values[-1] == best(value for *_, values in series for value in values)
    assert steps == sorted(steps) and values == sorted(values, reverse=direction == "min")
    plot = plot_progress(steps, "accuracy", steps[0][0] - 60.0, steps[-1][0] + 540.0)
    line, dots = plot["series"]
    assert [point[2]["member"] for point in dots["points"]] == [name for *_, name in steps]
    assert line["points"][-1] == pytest.approx([plot["x"]["range"][1], values[-1]], rel=1e-5), "to the present"
    assert f"accuracy {values[-1]:.4f} of {steps[-1][2]} after" in plot["reading"]


def test_a_group_of_streams_says_which_part_is_slow() -> None:
    levels = {
        "preparation": {"ring": 0.2, "workers": 0.9, "waiting": 0.8},
        "links": {"ring": 0.2, "workers": 0.3, "waiting": 0.8, "link": 0.9},
        "members": {"ring": 0.9, "workers": 0.3, "waiting": 0.1},
    }
    feeders = {("a", i): Feeder(node="a", cohort=i, fullness=of) for i, of in enumerate(levels.values())}
    groups = describe_streams(RunState(feeders=feeders), StreamRates())
    assert [group["slow"] for group in groups] == list(levels)


def test_streams_of_several_nodes_add_up_to_one() -> None:
    first = make_stream("node-0", 0, 8)
    second = {**first, "node": "node-1", "prepared_per_s": 400.0, "levels": {"ring": 0.5}, "consumed_per_s": None}
    (merged,) = group_streams([first, second])
    assert (merged["prepared_per_s"], merged["consumed_per_s"]) == (3000.0, first["consumed_per_s"])
    assert merged["levels"]["ring"] == pytest.approx((first["levels"]["ring"] + 0.5) / 2)
    assert merged["nodes"] == ["node-0", "node-1"]


def test_active_groups_of_streams_are_shown_then_the_newest() -> None:
    ended = {"prepared_per_s": None, "consumed_per_s": None}
    rows = [make_stream("a", i, 8) | (ended if i not in (0, 1) else {}) for i in range(9)]
    assert [group["cohort"] for group in group_streams(rows) if group["is_shown"]] == [0, 1, 5, 6, 7, 8]
    assert all(group["is_shown"] for group in group_streams(make_stream("a", i, 8) for i in range(9)))


def test_nothing_is_told_while_nothing_happens() -> None:
    view = make_view(NODES[:40])
    assert view.take_change() is not None
    assert view.take_change() is None
    assert not view.has_change
    view.driver = "the controller (process 1) is gone"
    change = view.take_change()
    assert change is not None
    assert change["run"]["driver"] == view.driver
    assert change["run"]["state"] == {"word": "interrupted", "tone": "warn"}
    assert change["run"]["actions"] == []
    assert view.take_change() is None


def test_what_the_description_of_cost_takes_counts_in_its_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()

    def describe_slowly(*given: Any) -> Document:
        clock.now += 1.0
        return describe(*given)

    describe = rows.describe_cost
    monkeypatch.setattr(rows, "describe_cost", describe_slowly)
    view = make_view(NODES[:60], clock)
    view.state_document()
    view.take_change()
    view.apply(NODES[60:90], 90)
    clock.now += 40.0
    change = view.take_change()
    assert change is not None and "cost" not in change, "it would take a fortieth of the time"
    clock.now += 40.0
    change = view.take_change()
    assert change is not None and "cost" in change


def test_of_a_run_that_nobody_drives_nothing_runs() -> None:
    at = next(i for i, event in enumerate(NODES) if event["type"] == "progress" and event["epoch"] == 1) + 1
    view = make_view(NODES[:at])
    before = view.state_document()
    assert before["run"]["counts"]["running"] > 1
    assert before["run"]["totals"]["watts"] is not None
    view.take_change()
    view.driver = "the controller (process 1) is gone"
    change = view.take_change()
    assert change is not None
    states = [dict(zip(COLUMNS, row, strict=True)) for row in change["members"].values()]
    assert "interrupted" in {row["state"] for row in states}
    assert {row["left_s"] for row in states} == {None}
    run = change["run"]
    assert "running" not in run["counts"]
    assert run["counts"]["interrupted"] == before["run"]["counts"]["running"]
    assert (run["left"], run["totals"]["watts"], run["totals"]["samples_per_s"]) == (None, None, None)
    view.driver = None
    change = view.take_change()
    assert change is not None
    assert change["run"]["counts"] == before["run"]["counts"]


def test_figures_of_cost_wait_for_their_turn_and_are_not_forgotten() -> None:
    clock = Clock()
    view = make_view(NODES[:60], clock)
    view.state_document()
    view.take_change()
    view.apply(NODES[60:90], 90)
    change = view.take_change()
    assert change is not None
    assert "cost" not in change, "computed a moment ago"
    assert not view.has_change
    clock.now += 10.0
    assert view.has_change, "its turn comes without another event"
    change = view.take_change()
    assert change is not None
    assert change["cost"] == plain(make_view(NODES[:90]).state_document())["cost"]
    assert view.take_change() is None


def test_only_what_events_touched_is_told() -> None:
    view = make_view(NODES[:60])
    view.state_document()
    view.take_change()
    progress = next(event for event in NODES[60:] if event["type"] == "progress")
    view.apply([progress], 61)
    change = view.take_change()
    assert change is not None
    assert set(change) == {"offset", "now", "run", "members"}
    assert list(change["members"]) == [progress["member"]]
    row = dict(zip(COLUMNS, change["members"][progress["member"]], strict=True))
    assert (row["epoch"], row["step"], row["state"]) == (progress["epoch"], progress["step"], "running")


def test_what_several_members_failed_of_is_said_once_with_the_log_of_one(tmp_path: Any) -> None:
    events = [event for event in list_run() if event["type"] != "run_finished"]
    error = {"reason": "error", "error": "ValueError: no such column", "retry": False}
    failed = [
        {"v": 1, "t": events[-1]["t"] + at, "type": "failed", "member": f"member-{at}", **error} for at in (1, 2)
    ]
    log = tmp_path / "members" / "member-1" / "log.txt"
    log.parent.mkdir(parents=True)
    log.write_text("banner\nTraceback (most recent call last):\n  File x\nValueError: no such column\n")
    view = RunView(RunDir(tmp_path), clock=Clock())
    view.apply([typed(event) for event in (*events, *failed)], 1)
    document = view.state_document()
    cause = document["run"]["failures"][0]
    assert (cause["text"], cause["members"]) == ("2 × ValueError: no such column", ["member-1", "member-2"])
    assert cause["log"].splitlines()[0].startswith("Traceback") and "banner" not in cause["log"]
    said = document["notices"][-1]
    assert said["text"] == "2 × failed (error): ValueError: no such column; it is not tried again before a resume"
    assert said["who"] == "member-1, attempt 1, member-2, attempt 1" and said["count"] == 2


def test_a_log_is_shown_without_its_noise() -> None:
    bar = "".join(f"\r{percent}% |####" for percent in range(100))
    warning = "a.py:3: UserWarning: old\n  f(x)\n"
    given = f"\x1b[31mred\x1b[0m\n{bar}\r\n{warning * 12}end\nend\n\n\nlast"
    shown = "red\n99% |####\na.py:3: UserWarning: old\n  f(x)  (× 12)\nend  (× 2)\n\n\nlast"
    assert tidy(given) == shown
    assert untouched("a\rb\r\nc") == "a\nb\nc"


@pytest.mark.parametrize(
    "line", ["\n", "\x1b[0m\n", "\r", "a\r\n", "a\nb\nc\n", "a\n\n\n\n", "a", "\x1b]", "\x1b[0"]
)
def test_no_log_takes_long_to_clean(line: str) -> None:
    began = time.process_time()
    tidy((line * 2**16)[: 2**16])
    assert time.process_time() - began < 2.0  # 0.06 s where it is linear, minutes where it is not


def test_what_a_member_failed_of_and_what_to_do_is_in_its_row() -> None:
    document = make_view(list_run()).state_document()
    rows = {name: dict(zip(COLUMNS, row, strict=True)) for name, row in document["members"]["rows"].items()}
    assert rows["member-6"]["reason"] == "nan"
    assert "learning rate" in rows["member-6"]["advice"]
    assert rows["member-0"]["advice"] is None
    assert [span[-1] for span in document["spans"]["member-3"]] == ["failed", "finished"]
    assert any("member-3, attempt 1: failed (lost)" in notice["text"] for notice in document["notices"])
    assert document["run"]["counts"] == {"finished": 7, "failed": 1}
    assert document["run"]["state"] == {"word": "finished, with failures", "tone": "warn"}


def test_a_request_is_answered_in_a_change() -> None:
    view = make_view(NODES[:60])
    view.take_change()
    said = {"request": "pause-1", "verb": "pause", "member": "member-1", "done": False, "message": "it has ended"}
    view.apply([{"v": 2, "t": NODES[59]["t"], "type": "request", **said}], 61)
    change = view.take_change()
    assert change is not None
    assert change["answers"] == [said]


def test_numbers_that_json_lacks_and_hostile_names_do_no_harm() -> None:
    events = list_run(members=3, epochs=2)
    hostile = "</script><img src=x onerror=alert(1)>\"'\u2028\x00"
    for event in events:
        if event["type"] == "member":
            event["params"] = {hostile: float("nan"), "lr": float("inf"), "shape": (1, 2), "of": {"a": [1.0]}}
        if event["type"] in ("epoch", "finished"):
            event["metrics"] = {**event["metrics"], hostile: float("nan")}
    document = plain(make_view(events).state_document())
    row = dict(zip(COLUMNS, document["members"]["rows"]["member-0"], strict=True))
    assert row["params"] == {
        "seed": row["params"]["seed"],
        hostile: "nan",
        "lr": "inf",
        "shape": [1, 2],
        "of": {"a": [1.0]},
    }
    assert row["metrics"][hostile] is None


def test_late_epochs_of_an_attempt_that_was_given_up_change_nothing() -> None:
    events = list_run(members=5, epochs=4)
    again = next(i for i, e in enumerate(events) if e["type"] == "placed" and e.get("attempt") == 1)
    late = next(e for e in events if e["type"] == "epoch" and e["member"] == events[again]["member"])
    with_late = [*events[: again + 1], {**late, "t": events[again]["t"], "epoch": 3}, *events[again + 1 :]]
    assert make_view(with_late).curves_document()["members"] == make_view(events).curves_document()["members"]


def test_what_a_document_costs_grows_with_the_members_and_no_faster() -> None:
    def measure(members: int) -> float:
        view, times = make_view(list_run(members=members, epochs=2)), []
        for _ in range(4):
            began = time.process_time()
            json.dumps(view.state_document())
            times.append(time.process_time() - began)
        return min(times)

    assert measure(200) < 16 * measure(25)


def test_a_metric_that_is_called_as_a_field_of_ours_is_shown_as_it_was_reported() -> None:
    events = list_run(members=1, epochs=2)
    for event in events:
        if event["type"] == "epoch":
            event |= {"grad_norm": 9.0, "metrics": {**event["metrics"], "grad_norm": 1.5, "waited": 3.0}}
    (curve,) = make_view(events).curves_document()["members"].values()
    assert curve["values"]["grad_norm"] == [1.5, 1.5] and curve["values"]["waited"] == [3.0, 3.0]
