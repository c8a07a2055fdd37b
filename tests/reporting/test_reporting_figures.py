"""The figures say what the events say: asserted on the data inside them."""

from __future__ import annotations

from typing import Any

import pytest
import run_events as runs

from ensemble.meter import ledger
from ensemble.reporting import figures
from ensemble.reporting.scores import Scores
from ensemble.store import fold


def traces(figure: Any, name: str) -> list[Any]:
    assert not isinstance(figure, str), figure
    return [trace for trace in figure.data if trace.name == name]


@pytest.fixture(scope="module")
def events() -> list[dict[str, Any]]:
    return runs.list_run()


def test_learning_curves_hold_each_epoch_of_each_member_once_though_one_was_retried(events: Any) -> None:
    figure = figures.learning_curves(fold(events))
    accuracy, loss = traces(figure, "member-3")
    logged = {e["epoch"]: e["metrics"] for e in events if e["type"] == "epoch" and e["member"] == "member-3"}
    assert list(accuracy.x) == [1, 2, 3, 4, 5, 6]
    assert list(accuracy.y) == [logged[i]["accuracy"] for i in range(6)]
    assert list(loss.y) == [logged[i]["loss"] for i in range(6)]
    assert list(traces(figure, "member-6")[0].x) == [1, 2, 3, 4]


def test_learning_curves_leave_a_gap_where_a_metric_was_not_a_number(events: Any) -> None:
    broken = [dict(e) for e in events]
    first = next(e for e in broken if e["type"] == "epoch" and e["member"] == "member-0")
    first["metrics"] = {"loss": float("nan"), "accuracy": 0.5}
    assert traces(figures.learning_curves(fold(broken)), "member-0")[1].y[0] is None


def test_many_members_are_neutral_lines_with_the_best_one_named() -> None:
    state = fold(runs.search_run())
    figure = figures.learning_curves(state)
    named = [trace.name for trace in figure.data if trace.showlegend]
    assert len(named) == 1 and named[0].endswith("(best)")


def test_timeline_has_a_bar_for_each_attempt_coloured_by_its_end(events: Any) -> None:
    figure = figures.timeline(fold(events))
    (failed,) = [t for t in traces(figure, "failed") if t.type == "bar"]
    assert sorted(failed.y[1]) == ["member-3", "member-6"]
    (finished,) = traces(figure, "finished")
    assert sorted(finished.y[1]) == [f"member-{i}" for i in (0, 1, 2, 3, 4, 5, 7)]
    where = dict(zip(finished.y[1], finished.y[0], strict=True))
    assert where["member-4"] == "node-0, cohort 0" and where["member-5"] == "node-1, cohort 1"
    assert all(length > 0 for length in (*failed.x, *finished.x))
    assert any("NaN" in text or "nan" in text for t in figure.data if t.hovertext for text in t.hovertext)


def test_timeline_of_a_running_run_ends_at_the_last_event() -> None:
    events = runs.list_run(until=9.0)
    (running,) = traces(figures.timeline(fold(events)), "running")
    ends = [start + length for start, length in zip(running.base, running.x, strict=True)]
    assert ends == pytest.approx([events[-1]["t"] - runs.START] * 5)


def test_timeline_shows_an_attempt_that_a_resume_found_broken_off_as_interrupted() -> None:
    begun = runs.list_run(until=9.0)
    again = dict(begun[0], t=begun[-1]["t"] + 1000.0, resumed=True)
    figure = figures.timeline(fold([*begun, again]))
    (interrupted,) = traces(figure, "interrupted")
    ends = [start + length for start, length in zip(interrupted.base, interrupted.x, strict=True)]
    assert max(ends) < 10, "the time in which nothing ran is not part of the bar"


def test_timeline_shows_a_member_that_moves_where_it_is_when() -> None:
    events = runs.list_run(until=9.0)
    member = next(event["member"] for event in events if event["type"] == "started")
    attempt = max(event["attempt"] for event in events if event["type"] == "placed" and event["member"] == member)
    t = events[-1]["t"]
    for number, cohort in enumerate((7, None)):
        where = {"member": member, "attempt": attempt, "cohort": cohort, "feeder": None, "epoch": 1}
        events.append({"v": 1, "t": t + number, "type": "moved", **where, "shared": False})
    events.append({"v": 1, "t": t + 3, "type": "power", "node": "node-0", "watts": 1.0})
    figure = figures.timeline(fold(events))
    (moved,) = traces(figure, "moved")
    assert list(moved.y[1]) == [member] * 2 and moved.y[0][1] == "node-0, cohort 7"
    (running,) = traces(figure, "running")
    assert dict(zip(running.y[1], running.y[0], strict=True))[member] == "node-0, alone"


def test_reuse_adds_up_the_feeders_that_served_a_cohort_one_after_the_other() -> None:
    def feeder(t: float, prepared: int, consumed: int) -> dict[str, Any]:
        where = {"v": 1, "t": t, "type": "feeder", "node": "n", "cohort": 0, "skipped": 0, "restarts": 0}
        return where | {"prepared": prepared, "consumed": consumed}

    figure = figures.pipeline_reuse([feeder(1, 100, 300), feeder(2, 200, 600), feeder(3, 50, 150)])
    assert list(traces(figure, "prepared")[0].x) == [250]
    assert list(traces(figure, "consumed")[0].x) == [750]


def test_batches_are_split_into_shared_and_private(events: Any) -> None:
    figure = figures.batches_by_member(fold(events))
    private = dict(zip(*(traces(figure, "private batches")[0][axis] for axis in "xy"), strict=True))
    assert private["member-5"] == 36 and private["member-0"] == 0


def test_cpu_bars_add_up_to_the_ledger(events: Any) -> None:
    book = ledger(events)
    figure = figures.cpu_seconds(book)
    by_row: dict[str, float] = {}
    for trace in figure.data:
        for row, used in zip(trace.y, trace.x, strict=True):
            by_row[row] = by_row.get(row, 0.0) + used
    whole = by_row.pop("whole run")
    assert whole == pytest.approx(book.run.cpu_s) == pytest.approx(sum(by_row.values()))
    assert by_row["member-2"] == pytest.approx(book.member("member-2").cpu_s)


def test_cpu_rows_beyond_what_can_be_read_are_added_up_and_nothing_is_lost() -> None:
    usage = {"v": 1, "type": "usage", "node": "n", "role": "train", "rank": 0, "origin": "measured"}
    events = [{**usage, "t": 10.0 + i, "member": f"member-{i}", "pid": i, "cpu_s": 1.0 + i} for i in range(100)]
    figure = figures.cpu_seconds(ledger(events))
    rows, values = figure.data[1].y, figure.data[1].x
    assert len(rows) == 40 and "61 other members" in rows
    assert sum(values) == pytest.approx(sum(range(1, 101)))


def test_power_says_that_it_is_estimated_wherever_it_is_named(events: Any) -> None:
    figure = figures.power_over_time(ledger(events), events[0]["t"])
    assert "estimated" in figure.layout.yaxis.title.text
    assert all("estimated" in trace.name and "12 W per busy core" in trace.name for trace in figure.data)
    assert list(figure.data[0].x[:2]) == pytest.approx([0.0, 2.0])


def test_measured_power_is_not_called_estimated(events: Any) -> None:
    measured = [e | {"origin": "measured", "source": "RAPL"} if e["type"] == "power" else e for e in events]
    figure = figures.power_over_time(ledger(measured), events[0]["t"])
    assert figure.layout.yaxis.title.text == "watts (measured)"


def test_a_long_power_curve_is_thinned_to_means_that_keep_its_mean() -> None:
    event = {"v": 1, "type": "power", "node": "n", "origin": "measured", "source": "RAPL"}
    many = [event | {"t": 1.0 * i, "watts": float(i % 7), "energy_j": float(i % 7)} for i in range(1, 7001)]
    (curve,) = figures.power_over_time(ledger(many), 0.0).data
    assert len(curve.x) <= 1500
    assert sum(curve.y) / len(curve.y) == pytest.approx(3.0, abs=0.01)


def test_combined_stands_first_and_in_its_own_colour_beside_the_members() -> None:
    members = {f"member-{i}": {"accuracy": 0.9 + i / 100, "nll": 0.3 - i / 100, "ece": 0.02} for i in range(3)}
    combined = {"accuracy": 0.95, "nll": 0.2, "ece": 0.01}
    curves = {"best": [(0.9, 0.85, 80), (0.5, 0.4, 20)], "combined": [(0.9, 0.9, 100)]}
    scores = Scores("test", 100, members, combined, "member-2", curves)
    accuracy, nll = figures.members_and_ensemble(scores).data
    assert list(accuracy.y) == ["combined", "member-2", "member-1", "member-0"]
    assert list(accuracy.x) == pytest.approx([0.95, 0.92, 0.91, 0.90])
    assert nll.x[0] == 0.2
    colours = accuracy.marker.color
    assert colours[0] not in colours[1:] and colours[1] not in colours[2:]
    diagram = figures.calibration(scores)
    assert list(traces(diagram, "combined, ECE 0.0100")[0].y) == [0.9]
    assert list(traces(diagram, "best member (member-2), ECE 0.0200")[0].x) == [0.9, 0.5]


def test_search_slices_have_a_panel_for_each_hyperparameter_that_varies() -> None:
    events = runs.search_run()
    figure = figures.search_slices(fold(events))
    titles = [figure.layout[f"xaxis{n}"].title.text for n in ("", "2", "3")]
    assert titles == ["lr", "width", "dropout"], "momentum is the same in all"
    assert figure.layout.xaxis.type == "log" and figure.layout.xaxis2.type == "category"
    points = sum(len(trace.x) for trace in figure.data if trace.xaxis == "x")
    assert points == 24


def test_search_history_keeps_the_best_of_finished_trials_in_the_direction_of_the_search() -> None:
    state = fold(runs.search_run())
    (best,) = traces(figures.search_history(state), "best so far")
    assert list(best.y) == sorted(best.y)
    finished = [m.metrics["accuracy"] for m in state.members.values() if m.state == "finished"]
    assert best.y[-1] == max(finished)
    state.direction = "min"
    (best,) = traces(figures.search_history(state), "best so far")
    assert best.y[-1] == min(finished)


def test_a_run_that_just_started_gives_reasons_instead_of_empty_figures() -> None:
    events = runs.just_started()
    state, book = fold(events), ledger(events)
    drawn = [
        figures.learning_curves(state),
        figures.timeline(state),
        figures.pipeline_reuse(events),
        figures.batches_by_member(state),
        figures.cpu_seconds(book),
        figures.power_over_time(book, events[0]["t"]),
        figures.members_and_ensemble(Scores(missing="No predictions.")),
        figures.calibration(Scores(missing="No predictions.")),
        figures.search_history(state),
        figures.search_slices(state),
    ]
    for reason in drawn:
        assert isinstance(reason, str) and reason.endswith(".") and "\n" not in reason
