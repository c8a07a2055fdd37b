"""The documents of a run: equal however its events came, and what is said in them."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.event_dicts import typed
from kit.property_examples import examples
from kit.run_events import list_run, measured, search_run

from ensemble.reporting.dashboard import projection
from ensemble.reporting.dashboard.member_log import tidy
from ensemble.reporting.dashboard.rows import FIELDS
from ensemble.store import RunDir

Document = dict[str, Any]
NODES = measured(list_run(members=6, epochs=4))
RUNS = {"list": NODES, "search": search_run()}


class RunView(projection.RunView):
    def apply(self, events: Any, offset: int) -> None:
        super().apply([typed(event) for event in events], offset)


def make_view(events: list[Document], path: str = "/nowhere/digits") -> RunView:
    view = RunView(RunDir(path))
    if events:
        view.apply(events, len(events))
    return view


def list_rows(document: Document) -> dict[str, Document]:
    return {name: dict(zip(FIELDS, row, strict=True)) for name, row in document["members"]["rows"].items()}


def plain(document: Any) -> Any:
    return json.loads(json.dumps(document, allow_nan=False))


def show(view: RunView) -> Any:
    """All of it but guesses of the time left, which depend on what was seen when."""
    state = view.state_document()
    run = {name: value for name, value in state["run"].items() if name != "left"}
    return plain({**state, "run": run, "curves": view.curves_document(), "tables": view.tables_document()})


@pytest.mark.parametrize("run", ["list", "search"])
@examples(10)
@given(places=st.lists(st.integers(0, 10**6), max_size=12))
def test_documents_are_the_same_in_whatever_pieces_the_log_came(run: str, places: list[int]) -> None:
    view, events = make_view([]), RUNS[run]
    edges = [0, *sorted({place % (len(events) + 1) for place in places}), len(events)]
    for begin, end in itertools.pairwise(edges):
        view.apply(events[begin:end], end)
        view.state_document()
    assert show(view) == show(make_view(events))


@pytest.mark.parametrize(("kind", "stale"), [("finished", {"quality", "importances"}), ("epoch", {"curves"})])
def test_a_document_is_stale_after_what_it_is_made_of_has_changed(kind: str, stale: set[str]) -> None:
    at = next(i for i, event in enumerate(NODES) if event["type"] == kind)
    view = make_view(NODES[:at])
    before = dict(view.stamps)
    view.apply(NODES[at : at + 1], at + 1)
    assert {name for name in before if view.stamps[name] != before[name]} == stale


def test_of_a_run_that_nobody_drives_nothing_runs() -> None:
    at = next(i for i, event in enumerate(NODES) if event["type"] == "progress" and event["epoch"] == 1) + 1
    view = make_view(NODES[:at])
    before = view.state_document()["run"]
    tiles = {tile["key"]: tile["figure"] for tile in before["tiles"]}
    assert before["counts"]["running"] > 1 and tiles["power"] != "–"
    view.driver = "the controller (process 1) is gone"
    document = view.state_document()
    rows, run = list_rows(document).values(), document["run"]
    assert "interrupted" in {row["state"] for row in rows} and {row["left_s"] for row in rows} == {None}
    assert "running" not in run["counts"] and run["counts"]["interrupted"] == before["counts"]["running"]
    tiles = {tile["key"]: tile["figure"] for tile in run["tiles"]}
    assert (run["left"], tiles["power"], tiles["rate"], run["actions"]) == (None, "–", "–", [])
    view.driver = None
    assert view.state_document()["run"]["counts"] == before["counts"]


def test_what_several_members_failed_of_is_said_once_with_the_log_of_one(tmp_path: Any) -> None:
    events = [event for event in list_run() if event["type"] != "run_finished"]
    error = {"v": 1, "type": "failed", "reason": "error", "error": "ValueError: no such column", "retry": False}
    events += [error | {"t": events[-1]["t"] + at, "member": f"member-{at}"} for at in (1, 2)]
    log = tmp_path / "members" / "member-1" / "log.txt"
    log.parent.mkdir(parents=True)
    log.write_text("banner\nTraceback (most recent call last):\n  File x\nValueError: no such column\n")
    document = make_view(events, tmp_path).state_document()
    cause = document["run"]["failures"][0]
    assert (cause["text"], cause["members"]) == ("2 × ValueError: no such column", ["member-1", "member-2"])
    assert cause["log"].startswith("Traceback") and "banner" not in cause["log"]
    notice = document["notices"][-1]
    says = "2 × failed (error): ValueError: no such column; it is not tried again before a resume"
    assert (notice["text"], notice["count"]) == (says, 2)
    assert notice["who"] == "member-1, attempt 1, member-2, attempt 1"


def test_a_log_is_shown_without_its_noise() -> None:
    bar, warning = "".join(f"\r{percent}% |####" for percent in range(100)), "a.py:3: UserWarning: old\n  f(x)\n"
    given = f"\x1b[31mred\x1b[0m\n{bar}\r\n{warning * 12}end\nend\n\n\nlast"
    assert tidy(given) == "red\n99% |####\na.py:3: UserWarning: old\n  f(x)  (× 12)\nend  (× 2)\n\n\nlast"


def test_no_log_takes_long_to_clean() -> None:
    for line in ("\n", "\x1b[0m\n", "\r", "a\r\n", "a\nb\nc\n", "a\n\n\n\n", "a", "\x1b]", "\x1b[0"):
        began = time.process_time()
        tidy((line * 2**16)[: 2**16])
        assert time.process_time() - began < 2.0, line  # 0.06 s where it is linear, minutes where it is not


def test_what_a_member_failed_of_and_what_to_do_is_in_its_row_and_answers_in_the_document() -> None:
    said = {"request": "pause-1", "verb": "pause", "member": "member-1", "done": False, "message": "it has ended"}
    events = list_run()
    document = make_view([*events, {"v": 2, "t": events[-1]["t"], "type": "request", **said}]).state_document()
    rows = list_rows(document)
    assert rows["member-6"]["reason"] == "nan" and "learning rate" in rows["member-6"]["advice"]
    assert rows["member-0"]["advice"] is None
    assert [span[-1] for span in document["spans"]["member-3"]] == ["failed", "finished"]
    assert any("member-3, attempt 1: failed (lost)" in notice["text"] for notice in document["notices"])
    assert document["run"]["counts"] == {"finished": 7, "failed": 1}
    assert document["run"]["state"] == {"word": "finished, with failures", "tone": "warn"}
    assert document["answers"] == [said]


def test_numbers_that_json_lacks_and_hostile_names_do_no_harm() -> None:
    events = list_run(members=3, epochs=2)
    hostile = "</script><img src=x onerror=alert(1)>\"'\u2028\x00"
    for event in events:
        if event["type"] == "member":
            event["params"] = {hostile: float("nan"), "lr": float("inf"), "shape": (1, 2), "of": {"a": [1.0]}}
        if event["type"] in ("epoch", "finished"):
            event["metrics"] = {**event["metrics"], hostile: float("nan")}
    row = list_rows(plain(make_view(events).state_document()))["member-0"]
    assert row["params"].pop("seed") is not None
    assert row["params"] == {hostile: "nan", "lr": "inf", "shape": [1, 2], "of": {"a": [1.0]}}
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
