"""The closing summary and `ensemble status`: who was best, what it cost, and true of a run that nobody drives."""

from __future__ import annotations

import math
import os
import re
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kit import run_events as runs
from kit.event_dicts import fold, ledger, project
from kit.task_events import TASKS, task_run

from ensemble.events import NOT_COMBINED
from ensemble.reporting import describe_lost_controller, status_head, status_lines, status_notes, status_rows
from ensemble.reporting.summary import summary, summary_lines
from ensemble.reporting.text import number
from ensemble.store import EventLog, RunDir

Event = dict[str, Any]


def lengthen(events: list[Event]) -> list[Event]:
    """The run with a name, members, hyperparameters, errors and remarks that are longer than a line."""
    long = "a sentence that goes on and on " * 9
    t = events[-1]["t"]
    remarks = [{"v": 2, "t": t, "type": "remark", "member": f"member-{n}", "text": long} for n in (1, 2)]
    changed = {"name": long, "error": long, "params": {f"hyperparameter {n}": long for n in range(9)}}
    wide = [e | {name: value for name, value in changed.items() if name in e} for e in (*events, *remarks)]
    return [e | {"member": f"{e['member']}-{'x' * 80}"} if e.get("member") else e for e in wide]


RUN = runs.list_run()
STOP = {"v": 2, "t": runs.START + 9.0, "type": "run_stopped", "reason": "disk full"}
KINDS = {kind: task_run(kind) for kind in TASKS} | {"a search": runs.search_run(), "begun": runs.just_started()}
KINDS |= {"failures": RUN, "measured": runs.measured(RUN), "stopped": [*runs.list_run(until=9.0), STOP]}
KINDS |= {"40": runs.list_run(40), "long": lengthen(runs.list_run(40)), "a front": runs.minimizing("energy_j")}
KINDS |= {"not combined": [event for event in RUN if event["type"] != "combined"]}
KINDS |= {"folds": [event | {"out_of_fold": True} if event["type"] == "combined" else event for event in RUN]}


@pytest.mark.parametrize("folder", ["runs/a digit", f"/{'a long folder/' * 6}run"], ids=["near", "far"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_end_of_a_run_of_any_kind_is_24_lines_of_100_columns(kind: str, folder: str) -> None:
    run = project(KINDS[kind])
    lines = [line for line, _ in summary(run, Path(folder))]
    assert (len(lines) <= 24 or kind == "long") and max(map(len, lines)) <= 100 and "\n" not in "".join(lines)
    shown, best = "\n".join(lines), run.best
    remarks = {remark for member in run.state.members.values() for remark in member.remarks}
    assert all(" ".join(remark.split()) in " ".join(shown.split()) for remark in remarks), "notices are whole"
    assert all(f"\n{label} " in shown for label in ("sharing", "cost", "more")), "whatever else leaves"
    if best is not None:
        assert best.id[:7] in shown and f"{run.best_value:.4f}" in shown
        listed = len(re.findall(r"^ *\d  member-", shown, re.MULTILINE))
        omitted = re.search(r"^and (\d+) more$", shown, re.MULTILINE)
        assert 3 <= listed <= 5 and listed + int(omitted[1] if omitted else 0) == len(run.state.members)
    metrics = (run.state.combined or NOT_COMBINED).metrics or {}
    for of, words in {"ensemble": "combined (", "best": "best member ("}.items() if metrics else ():
        value = next(iter(metrics[of].values()))
        assert re.search(f"^{re.escape(words)}.* {value:.4f}", shown, re.MULTILINE)
    assert ("\nfailed " in shown) == ("failed" in run.counts) and ("\nstopped " in shown) == (kind == "stopped")
    assert not re.search(r"conformal|uncertainty|full J|ECE|95 % interval  ", shown), "that is of --all"


def summary_text(*given: Any, width: int = 110) -> str:
    return "\n".join(line for line, _ in summary(*given, everything=True, width=width)) + "\n"


@pytest.mark.parametrize(("objective", "direction", "sign"), [("accuracy", "max", -1), ("loss", "min", 1)])
def test_members_are_ranked_by_the_objective_failed_ones_last(objective: str, direction: str, sign: int) -> None:
    events = [RUN[0] | {"objective": objective, "direction": direction}, *RUN[1:]]
    lines = [line for line in summary_text(project(events)).splitlines() if "member-" in line]
    finished = [member for member in fold(events).members.values() if member.state == "finished"]
    ranked = sorted(finished, key=lambda member: sign * member.metrics[objective])
    assert [line.split()[1] for line in lines[:8]] == [*(member.id for member in ranked), "member-6"]
    assert f"{ranked[0].metrics[objective]:.4f}" in lines[0] and "width" in lines[0]


def test_costs_name_reuse_roles_and_the_origin_of_the_energy(tmp_path: Path) -> None:
    (tmp_path / "report.html").touch()
    shown, cpu_s = summary_text(project(RUN), RunDir(tmp_path)), ledger(RUN).cpu_by_role()
    roles = ("starting up", "training", "preparing samples", "feeding", "orchestrating")
    used, alone = cpu_s["prepare"] + cpu_s["feed"], cpu_s["prepare"] * (242_100 - 4_500) / 60_000
    saved = f"64,500 samples were prepared instead of 242,100, in {used:.1f} CPU-seconds instead of"
    assert all(words in shown for words in (saved, f"of about {alone:.1f}", *roles, "report.html"))
    (energy,) = [line for line in shown.splitlines() if line.startswith("energy")]
    assert "estimated" in energy and "12 W per busy core" in energy and "measured" not in energy
    assert str(tmp_path) in shown.replace("\n", "")
    costly = [event | {"cpu_s": 1e4} if event.get("role") == "feed" else event for event in RUN]
    unwrapped = " ".join(summary_text(project(costly)).split())
    assert f"CPU-seconds, no fewer than without sharing (about {alone:.1f})" in unwrapped


def test_the_bottleneck_of_each_cohort_is_named_with_what_would_help() -> None:
    last = next(event for event in reversed(RUN) if event["type"] == "feeder")

    def name_it(events: list[Event]) -> str:
        lines = " ".join(summary_text(project(events)).split())
        return lines.partition("bottleneck ")[2].partition(" cost ")[0].strip()

    def feed(cores: int, processes: int, node: str = "node-0", **levels: float) -> list[Event]:
        head = [e | {"cpus": cores} if e["type"] == "node" else e for e in RUN if e["type"] != "feeder"]
        return [*head, last | {"node": node, "cohort": 0, "workers": processes, "fullness": levels}]

    first = "preparation in stream group 0 (a member waited 63% of the time): try prep_workers=2 "
    assert name_it(RUN) == f"{first}the members in stream group 1 (a member waited 8% of the time)"
    assert "try prep_workers=3" in name_it(feed(3, 2, waiting=0.9, workers=1.0))
    assert "2 workers on 2 cores" in name_it(feed(2, 2, waiting=0.9, workers=1.0))
    assert "try a larger capacity" in name_it(feed(2, 1, waiting=0.9, workers=0.2))
    kept = feed(2, 1, waiting=0.9, workers=1.0)
    kept[-1] |= {"cache": {"hits": 20_000}}
    line = name_it(kept)
    assert "20,000 of 30,000 samples came from the cache" in line and "try" not in line
    assert "samples were prepared and 20,000 read from the cache instead of" in summary_text(project(kept))
    fatal = {"type": "bad_record", "node": "node-0", "split": "train", "where": "a.jpg", "reason": "it ended"}
    for levels in ({"workers": 0.2}, {"workers": 1.0}):
        held = feed(8, 1, waiting=0.9, **levels)
        lost = [held[-1] | fatal | {"cohort": 0, "index": index} for index in (1, 2)]
        line = name_it([*held, *lost])
        assert "the time lost on 2 bad records" in line and "try" not in line, "workers were hung, not too few"
        assert name_it([*held, lost[0] | {"cohort": 1}]) == name_it(held), "another cohort's"
    slow = feed(2, 1, waiting=0.9, workers=0.5, link=0.9)
    line = name_it(slow)
    assert line.startswith("the links between nodes (a member waited 90% of the time, links were used 90%)")
    both = [*slow, *feed(2, 1, node="node-1", waiting=0.1, workers=0.5, link=0.1)[-1:]]
    assert "waited 50%" in name_it(both), "the mean over nodes"
    assert name_it([*slow, slow[-1] | {"fullness": {}}]) == line, "after a restart, the levels of that before"
    assert name_it([event for event in RUN if event["type"] != "feeder"]) == ""
    assert f"bottleneck: {line}" in status_notes(project(slow))


def test_wall_time_leaves_out_the_hours_between_a_kill_and_a_resume() -> None:
    killed = runs.list_run(until=9.999)
    again = RUN[0] | {"t": killed[-1]["t"] + 7200, "resumed": True}
    resumed = [*killed, again, again | {"type": "run_finished", "t": again["t"] + 5.0}]
    at_work = killed[-1]["t"] - killed[0]["t"] + 5.0
    assert fold(resumed).wall_s == pytest.approx(at_work)
    (line,) = [x for x in summary_text(project(resumed)).splitlines() if x.startswith("cost")]
    assert line.split(maxsplit=1)[1].startswith(f"{round(at_work)} s, ")


def test_samples_a_second_are_those_of_training_in_every_place() -> None:
    # Epochs of 10 s and 20 s of training, each with as long again for evaluation.
    rates = [{"samples_per_s": rate, "wall_s": 40.0} for rate in (500.0, 250.0)]
    slow = [e | rates[e["epoch"] % 2] if e["type"] == "epoch" else e for e in RUN]
    (row,) = [row for row in status_rows(project(slow)) if row["member"] == "member-0"]
    assert row["samples_per_s"] == pytest.approx(2 * 5000 / (10 + 20))
    (line,) = [x for x in summary_text(project(slow)).splitlines() if "member-0 " in x and "width" in x]
    assert " 333 " in line


WIDTHS = [(60, ""), (100, "hyperparameters; samples/s; CPU-s; full J")]
WIDTHS += [(140, "hyperparameters; loss; samples/s; CPU-s; full J; mean W")]


@pytest.mark.parametrize(("width", "shown"), WIDTHS)
def test_the_table_of_members_shows_whole_columns_as_many_as_have_room(width: int, shown: str) -> None:
    head, *lines = summary_text(project(runs.measured(RUN)), width=width).splitlines()
    names, always = re.split("  +", head.strip()), ("member", "state", "accuracy", "J (attributed)")
    assert [name for name in names if name not in always] == [name for name in shown.split("; ") if name]
    assert set(always) <= set(names)
    assert len(head) <= width and "…" not in "".join([head, *lines[:24]])


def test_members_that_do_not_differ_show_their_hyperparameters() -> None:
    for members in (1, 3):
        events = runs.list_run(members=members)
        same = [e | {"params": {"width": 8, "lr": 0.5}} if e["type"] == "member" else e for e in events]
        rows = re.findall(r"^ *\d +member-\d .*", summary_text(project(same)), re.MULTILINE)
        assert len(rows) == members and all("width 8, lr 0.5" in row for row in rows)


def test_nodes_are_left_out_where_their_names_do_not_fit_and_all_metrics_appear_where_there_is_room() -> None:
    events = [e | {"node": f"rack-17-{e['node']}.cluster"} if e.get("node") else e for e in RUN]
    narrow, wide = status_lines(project(events), 80), status_lines(project(events), 120)
    assert narrow[0].split()[:5] == ["member", "state", "epoch", "accuracy", "samples/s"] and "J (" in narrow[0]
    assert "node" in status_lines(project(runs.list_run(until=9.0)), 80)[0]
    assert "node" not in narrow[0] and len(narrow) == 9 and all(len(line.rstrip()) <= 80 for line in narrow)
    assert "node" in wide[0] and "rack-17-node-0.cluster" in wide[1]
    more = {"f1": 0.25, "评分": 0.75}
    unfinished = [e for e in RUN if e["type"] != "finished"]
    events = [e | {"metrics": e["metrics"] | more} if e["type"] == "epoch" else e for e in unfinished]
    head, line, *_ = status_lines(project(events), 200)
    assert head.split()[-4:] == ["loss", "f1", "评分", "node"] and line.split()[-3:-1] == ["0.2500", "0.7500"]
    head = status_lines(project(events), 80)[0]
    assert "f1" not in head and "node" in head
    assert status_rows(project(events))[0]["metrics"]["f1"] == 0.25


def test_at_100_columns_there_is_room_for_full_joules_and_mean_watts() -> None:
    events = runs.measured(RUN)
    head, *lines = status_lines(project(events), 100)
    names = "member; state; epoch; accuracy; samples/s; CPU-s; J (attributed); full J; mean W; node"
    assert re.split("  +", head) == names.split("; ")
    assert len(lines) == 8 and all(len(line) <= 100 for line in lines)
    used, line = ledger(events), re.split("  +", lines[0])
    full, direct = used.member("member-0", full=True), used.member("member-0")
    assert line[7:9] == [number(full.energy_j), number(direct.mean_w)]
    everything = re.split("  +", status_lines(project(events), 1000)[0])
    assert {"full CPU-s", "loss"} <= set(everything) and "GPU-s" not in everything, "there is no GPU"


@pytest.mark.parametrize("width", [80, 1000])
def test_joules_have_three_digits_and_an_origin_of_each_view_where_one_differs(width: int) -> None:
    def show_first(**changed: Any) -> dict[str, str]:
        run = project(RUN)
        for view, fields in changed.items():
            vars(run)[view] = {name: replace(used, **fields) for name, used in getattr(run, view).items()}
        return dict(zip(*[re.split("  +", text) for text in status_lines(run, width)[:2]], strict=True))

    few = show_first(own={"energy_j": 1.2345, "mean_w": 12.3456}, full={"energy_j": 0.0567})
    assert few["J (estimated)"] == "1.23" and few.get("full J", "0.0567") == "0.0567"
    assert few.get("mean W", "12.3") == "12.3"
    if width == 1000:
        both = show_first(own={"energy_j": 1.0, "origin": "attributed"})
        full_j = project(RUN).full["member-0"].energy_j
        assert (both["J"], both["full J"]) == ("1 attributed", f"{number(full_j)} estimated")


def test_failures_of_one_cause_are_one_line_and_notes_keep_to_the_width() -> None:
    events = runs.list_run(until=9.0)
    names = [e["member"] for e in events if e["type"] == "member"][:6]
    failed = {"v": 2, "t": 9.5, "type": "failed", "attempt": 1, "reason": "error", "retry": False}
    errors = ["ValueError: the labels are of another kind"] * 5 + ["KeyError: 'image'"]
    events += [failed | {"member": name, "error": error} for name, error in zip(names, errors, strict=True)]
    notes = status_notes(project(events))
    first, second = [line for line in notes if "failed (error)" in line]
    assert first == f"{', '.join(names[:4])} and 1 more: failed (error): {errors[0]}"
    assert second == f"{names[5]}: failed (error): KeyError: 'image'"
    failures = [line for line in summary_lines(project(events)) if "failed (error)" in line[1]]
    assert failures == [("failed", first), ("", second)]
    wrapped = status_notes(project(events), 60)
    assert max(map(len, wrapped)) <= 60 and " ".join(wrapped).split() == " ".join(notes).split()


def written_by(path: Path, pid: int, host: str) -> tuple[RunDir, Any]:
    events = runs.list_run(until=9.0)
    events[0] = events[0] | {"pid": pid, "host": host}
    return RunDir(runs.write_run(path, events)), fold(events)


def test_a_controller_that_died_is_told_by_the_lock_it_no_longer_holds(tmp_path: Path) -> None:
    path, pid = tmp_path / "a run", os.getpid()  # what is suggested is as a shell takes it
    run_dir, state = written_by(path, pid, socket.gethostname())  # the process lives, the run in it does not
    assert "digits · interrupted" in status_head(project(runs.list_run(until=9.0), "it is gone"))
    gone = f"the controller (process {pid}) is gone; `ensemble resume '{path}'` goes on"
    assert describe_lost_controller(run_dir, state) == gone
    log = EventLog(run_dir.events)
    assert describe_lost_controller(run_dir, state) is None, "another one goes on with it"
    log.close()


def test_a_controller_elsewhere_is_taken_for_lost_when_it_has_long_been_silent(tmp_path: Path) -> None:
    run_dir, state = written_by(tmp_path, 1, "another-host")
    assert describe_lost_controller(run_dir, state) is None, "it has written just now"
    os.utime(run_dir.events, (time.time() - 3600,) * 2)
    silent = "the controller (process 1 on another-host) has logged nothing for 1:00:0"
    assert (describe_lost_controller(run_dir, state) or "").startswith(silent)
    assert describe_lost_controller(run_dir, state, silent_s=math.inf) is None, "a request is made to it"
    log = EventLog(run_dir.events)
    assert describe_lost_controller(run_dir, state) is None, "a lock that is seen tells"
    log.close()
    assert describe_lost_controller(run_dir, fold(runs.list_run()), silent_s=0) is None, "it has ended"
