"""The closing summary: who was best, what it cost, where the figures come from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import run_events as runs
from event_dicts import fold, ledger, project

from ensemble.reporting import status_notes, status_rows, summary
from ensemble.store import RunDir

Event = dict[str, Any]


@pytest.fixture(scope="module")
def events() -> list[dict[str, Any]]:
    return runs.list_run()


def summary_text(*given: Any, width: int = 110) -> str:
    """The summary as plain lines."""
    return "\n".join(line for line, _ in summary(*given, width=width)) + "\n"


def test_members_are_ranked_by_the_objective_with_failed_ones_last(events: Any) -> None:
    state = fold(events)
    lines = [line for line in summary_text(project(events)).splitlines() if "member-" in line]
    order = [line.split()[1] for line in lines[:8]]
    finished = [m for m in state.members.values() if m.state == "finished"]
    by_accuracy = sorted(finished, key=lambda m: -m.metrics["accuracy"])
    assert order == [*(m.id for m in by_accuracy), "member-6"]
    assert f"{by_accuracy[0].metrics['accuracy']:.4f}" in lines[0] and "width 128" in lines[0]


def test_a_smaller_objective_is_better_when_the_run_says_so(events: Any) -> None:
    turned = [e | {"objective": "loss", "direction": "min"} if e["type"] == "run_started" else e for e in events]
    state = fold(turned)
    lines = [line for line in summary_text(project(turned)).splitlines() if "member-" in line]
    finished = [m for m in state.members.values() if m.state == "finished"]
    assert lines[0].split()[1] == min(finished, key=lambda m: m.metrics["loss"]).id


def test_combined_stands_beside_the_best_and_the_mean_member(events: Any) -> None:
    state = fold(events)
    shown = summary_text(project(events))
    metrics = state.combined.metrics
    for key, words in (
        ("ensemble", "combined (average, 7 members)"),
        ("best", "best member"),
        ("mean", "mean of"),
    ):
        (line,) = [line for line in shown.splitlines() if line.startswith(words)]
        for name in ("accuracy", "nll", "ece"):
            assert f"{metrics[key][name]:.4f}" in line
    assert "on the test split" in shown


def test_costs_name_reuse_roles_and_the_origin_of_the_energy(events: Any, tmp_path: Path) -> None:
    book = ledger(events)
    (tmp_path / "report.html").touch()
    shown = summary_text(project(events), RunDir(tmp_path))
    assert f"each was used {book.reuse.factor:.2f} times" in shown
    for words in ("starting up", "training", "preparing samples", "feeding", "orchestrating"):
        assert words in shown
    (energy,) = [line for line in shown.splitlines() if line.startswith("energy")]
    assert "estimated" in energy and "12 W per busy core" in energy and "measured" not in energy
    assert str(tmp_path) in shown.replace("\n", "")
    assert "report.html" in shown


def test_the_bottleneck_of_each_cohort_is_named_with_what_would_help(events: Any) -> None:
    def named(shown: list[Event]) -> str:
        lines = " ".join(summary_text(project(shown)).split())
        return lines.partition("bottleneck ")[2].partition("CPU time")[0].strip()

    def told(cores: int, processes: int, node: str = "node-0", **levels: float) -> list[Event]:
        head = [e | {"cpus": cores} if e["type"] == "node" else e for e in events if e["type"] != "feeder"]
        end = next(e for e in reversed(events) if e["type"] == "feeder")
        return [*head, end | {"node": node, "cohort": 0, "workers": processes, "fullness": levels}]

    assert named(events) == (
        "preparation in stream group 0 (a member waited 63% of the time): try prep_workers=2 "
        "the members in stream group 1 (a member waited 8% of the time)"
    )
    assert "try prep_workers=3" in named(told(3, 2, waiting=0.9, workers=1.0))
    assert "2 workers on 2 cores" in named(told(2, 2, waiting=0.9, workers=1.0))
    assert "try a larger capacity" in named(told(2, 1, waiting=0.9, workers=0.2))
    fatal = {"type": "bad_record", "node": "node-0", "split": "train", "where": "a.jpg", "reason": "it ended"}
    for levels in ({"workers": 0.2}, {"workers": 1.0}):
        held = told(8, 1, waiting=0.9, **levels)
        lost = [held[-1] | fatal | {"cohort": 0, "index": index} for index in (1, 2)]
        line = named([*held, *lost])
        assert "the time lost on 2 bad records" in line and "try" not in line, "workers were hung, not too few"
        assert named([*held, lost[0] | {"cohort": 1}]) == named(held), "another cohort's"
    slow_link = told(2, 1, waiting=0.9, workers=0.5, link=0.9)
    assert named(slow_link).startswith(
        "the links between nodes (a member waited 90% of the time, links were used 90%)"
    )
    both = [*slow_link, *told(2, 1, node="node-1", waiting=0.1, workers=0.5, link=0.1)[-1:]]
    assert "waited 50%" in named(both), "the mean over nodes"
    restarted = [*slow_link, slow_link[-1] | {"fullness": {}}]
    assert named(restarted) == named(slow_link), "the levels of the feeder before it"
    assert named([e for e in events if e["type"] != "feeder"]) == ""
    assert f"bottleneck: {named(slow_link)}" in status_notes(project(slow_link))


def test_energy_that_could_not_be_had_is_called_unavailable() -> None:
    events = runs.search_run()
    shown = summary_text(project(events))
    assert "unavailable" in shown and "0 J" not in shown
    assert "and 4 more" in shown, "of 24 trials the best 20 are listed"


def test_a_run_that_just_started_has_a_summary_without_a_combined_model() -> None:
    events = runs.just_started()
    shown = summary_text(project(events))
    assert "none prepared yet" in shown and "combined" not in shown and "next" not in shown


def test_a_run_that_has_ended_says_what_can_be_done_next_and_where_the_model_lies(events: Any) -> None:
    def last_lines(shown: list[Event]) -> list[str]:
        lines = [" ".join(line.split()) for line in wide(shown)]
        return lines[next(at for at, line in enumerate(lines) if line.startswith(("model ", "next "))) :]

    def wide(shown: list[Event]) -> list[str]:
        return summary_text(project(shown), Path("runs/digits"), width=300).splitlines()

    load = '`ensemble.load("runs/digits")` in Python gives the combined model'
    page = "`ensemble dashboard runs/digits` shows the run in a browser"
    assert last_lines(events) == [
        f"model in runs/digits/members; {load}, `ensemble export runs/digits OUT` exports it",
        "next `ensemble resume runs/digits` tries what failed again",
        page,
    ]
    well = [e for e in events if e.get("member") != "member-6" or e["type"] != "failed"]
    well += [e | {"member": "member-6"} for e in well if e["type"] == "finished"][:1]
    more = "next `ensemble resume runs/digits --epochs N` trains the members on, to N epochs in all"
    assert last_lines(well)[1:] == [more, page]
    why = "its recipe is a train function alone"
    alone = [e | {"unloadable": why} if e["type"] == "combined" else e for e in events]
    assert last_lines(alone)[0] == f"model in runs/digits/members; it cannot be loaded as one model: {why}"
    none = [e for e in events if e["type"] in ("run_started", "run_finished", "member")]
    assert last_lines(none) == [f"next {page}"]
    assert any(line.split() == ["samples", "none", "were", "prepared"] for line in wide(none))


def test_a_calibration_that_is_not_distinguishable_from_0_is_called_so(events: Any) -> None:
    def clip(event: Event) -> Event:
        found = event.get("intervals") or {}
        return event | {"intervals": {**found, "best": {**found.get("best", {}), "ece": [0.0, 0.0]}}}

    assert "0 within noise" not in summary_text(project(events))
    clipped = [clip(e) if e["type"] == "combined" else e for e in events]
    shown = summary_text(project(clipped))
    assert "0 within noise" in shown and "0.0000 … 0.0000" not in shown


def test_combination_that_was_refused_has_no_table(events: Any) -> None:
    none = {"metrics": None, "reason": "no class", "members": [], "weights": {}}
    refused = [e | none if e["type"] == "combined" else e for e in events]
    shown = summary_text(project(refused))
    assert "best member" not in shown
    (line,) = [line for line in shown.splitlines() if line.startswith("combined")]
    assert "none: no class" in line


def test_a_run_that_was_stopped_ends_with_the_reason_and_how_it_goes_on(events: Any, tmp_path: Path) -> None:
    stopped = [e for e in events if e["t"] < runs.START + 9]
    stopped.append({"v": 2, "t": stopped[-1]["t"], "type": "run_stopped", "reason": "disk full"})
    last = summary_text(project(stopped), Path("runs/digits")).splitlines()[-1]
    assert last.split(maxsplit=1) == ["stopped", "disk full; `ensemble resume runs/digits` goes on"]


def test_records_that_could_not_be_prepared_are_not_called_skipped(events: Any) -> None:
    shown = " ".join(summary_text(project(events)).split())
    assert "4 could not be prepared" in shown and "skipped" not in shown


def test_wall_time_leaves_out_the_hours_between_a_kill_and_a_resume(events: Any) -> None:
    killed = [e for e in events if e["t"] < runs.START + 10]
    again = events[0] | {"t": killed[-1]["t"] + 7200, "resumed": True}
    resumed = [*killed, again, again | {"type": "run_finished", "t": again["t"] + 5.0}]
    at_work = killed[-1]["t"] - killed[0]["t"] + 5.0
    assert fold(resumed).wall_s == pytest.approx(at_work)
    (line,) = [x for x in summary_text(project(resumed)).splitlines() if x.startswith("wall time")]
    assert line.split(maxsplit=2)[2] == f"{round(at_work)} s"


def test_samples_a_second_are_those_of_training_in_every_place(events: Any) -> None:
    # Epochs of 10 s and 20 s of training, each with as long again for evaluation.
    rates = {0: 500.0, 1: 250.0}
    slow = [
        e | {"samples_per_s": rates.get(e["epoch"] % 2), "wall_s": 40.0} if e["type"] == "epoch" else e
        for e in events
    ]
    (row,) = [row for row in status_rows(project(slow)) if row["member"] == "member-0"]
    assert row["samples_per_s"] == pytest.approx(2 * 5000 / (10 + 20))
    (line,) = [x for x in summary_text(project(slow)).splitlines() if "member-0 " in x and "width" in x]
    assert " 333 " in line


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (60, []),
        (100, ["hyperparameters", "samples/s", "CPU-s", "full J"]),
        (140, ["hyperparameters", "loss", "samples/s", "CPU-s", "full J", "mean W"]),
    ],
)
def test_the_table_of_members_shows_whole_columns_as_many_as_have_room(width: int, shown: list[str]) -> None:
    events = runs.measured(runs.list_run())
    head, *lines = summary_text(project(events), width=width).splitlines()
    names = re.split("  +", head.strip())
    assert [name for name in names if name not in ("member", "state", "accuracy", "J (attributed)")] == shown
    assert {"member", "state", "accuracy", "J (attributed)"} <= set(names)
    assert len(head) <= width and "…" not in "".join([head, *lines[:24]])


def test_members_that_do_not_differ_show_their_hyperparameters() -> None:
    for members in (1, 3):
        events = runs.list_run(members=members)
        same = [e | {"params": {"width": 8, "lr": 0.5}} if e["type"] == "member" else e for e in events]
        lines = summary_text(project(same)).splitlines()
        rows = [line for line in lines if re.match(r" *\d +member-\d ", line)]
        assert len(rows) == members
        assert all("width 8, lr 0.5" in row for row in rows)


def test_causes_of_failures_are_named_once_with_the_log_that_shows_more(events: Any) -> None:
    name = Path("runs/a run")
    lines = summary_text(project(events), name).splitlines()
    (cause,) = [line for line in lines if line.startswith("failed")]
    assert "member-6 (nan): loss is nan at epoch 5, step 12" in cause and "lost" not in "".join(lines[-20:])
    assert any(line.split()[:4] == ["log", "`ensemble", "logs", "'runs/a"] for line in lines)

    def fail(event: Event) -> Event:
        member = int(event["member"].removeprefix("member-"))
        return event | {
            "type": "failed",
            "error": f"no file\nfor {min(member, 3)}",
            "reason": "error",
            "retry": False,
        }

    failed = [fail(event) if event["type"] == "finished" else event for event in runs.list_run()]
    text = summary_text(project(failed))
    assert re.findall(r"^(?:failed)? +(member-\d.*\(.*)$", text, re.MULTILINE) == [
        "member-3 and 3 others (error): no file for 3",
        "member-0 (error): no file for 0",
        "member-1 (error): no file for 1",
    ]
    assert "and 2 others, for other causes: see `ensemble status`" in text
    finished = runs.list_run(members=2)
    assert "failed" not in summary_text(project(finished), name)
