"""What `ensemble status` shows: readable at 80 columns, and true of a run that nobody runs any more."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import run_events as runs
from event_dicts import fold, ledger, project

from ensemble.reporting import (
    describe_lost_controller,
    status_head,
    status_json,
    status_lines,
    status_notes,
    status_rows,
)
from ensemble.reporting.status import status_gpus
from ensemble.reporting.text import joules, number
from ensemble.schedule import Node
from ensemble.store import EventLog, RunDir


def rows_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return status_rows(project(events))


def shown(events: list[dict[str, Any]], width: int) -> list[str]:
    return status_lines(project(events), rows_of(events), width)


@pytest.mark.parametrize("until", [9.0, 1e9])
def test_a_member_is_one_whole_line_at_80_columns(until: float) -> None:
    head, *lines = shown(runs.list_run(until=until), 80)
    assert len(lines) == 8 and all(len(line.rstrip()) <= 80 for line in lines)
    assert head.split()[:5] == ["member", "state", "epoch", "accuracy", "samples/s"]
    assert "J (estimated)" in head and "…" not in "".join([head, *lines])
    assert "node" in head


def test_nodes_are_left_out_where_their_names_do_not_fit() -> None:
    events = [e | {"node": f"rack-17-{e['node']}.cluster"} if e.get("node") else e for e in runs.list_run()]
    narrow, wide = shown(events, 80), shown(events, 120)
    assert "node" not in narrow[0] and len(narrow) == 9 and all(len(line.rstrip()) <= 80 for line in narrow)
    assert "node" in wide[0] and "rack-17-node-0.cluster" in wide[1]


def test_at_100_columns_there_is_room_for_full_joules_and_mean_watts() -> None:
    events = runs.measured(runs.list_run())
    head, *lines = shown(events, 100)
    names = "member; state; epoch; accuracy; samples/s; CPU-s; J (attributed); full J; mean W; node"
    assert re.split("  +", head) == names.split("; ")
    assert len(lines) == 8 and all(len(line) <= 100 for line in lines)
    used, line = ledger(events), re.split("  +", lines[0])
    full, direct = used.member("member-0", full=True), used.member("member-0")
    assert line[7:9] == [number(full.energy_j), number(direct.mean_w)]
    everything = re.split("  +", shown(events, 1000)[0])
    assert {"peak W", "full CPU-s", "loss"} <= set(everything) and "GPU-s" not in everything, "there is no GPU"


def test_rows_have_both_views_and_watts_beside_the_public_fields() -> None:
    events = runs.measured(runs.list_run())
    used = ledger(events)
    for row in rows_of(events):
        direct, full = used.member(row["member"]), used.member(row["member"], full=True)
        assert (row["energy_j"], row["full_energy_j"]) == (direct.energy_j, full.energy_j)
        assert (row["cpu_s"], row["full_cpu_s"]) == (direct.cpu_s, full.cpu_s)
        assert (row["mean_w"], row["peak_w"], row["gpu_s"]) == (direct.mean_w, direct.peak_w, None)
        assert row["full_energy_j"] > row["energy_j"] > 0 and row["full_cpu_s"] > row["cpu_s"] > 0


@pytest.mark.parametrize("width", [80, 1000])
def test_joules_have_three_digits_however_few_they_are(width: int) -> None:
    events = runs.list_run()
    rows = [row | {"energy_j": 1.2345, "full_energy_j": 0.0567, "peak_w": 12.3456} for row in rows_of(events)]
    head, line, *_ = [re.split("  +", each) for each in status_lines(project(events), rows, width)]
    shown = dict(zip(head, line, strict=True))
    assert shown["J (estimated)"] == "1.23" and shown.get("full J", "0.0567") == "0.0567"
    assert shown.get("peak W", "12.3") == "12.3" and ("peak W" in shown) == (width == 1000)


def test_joules_of_either_view_have_an_origin_of_their_own_where_one_differs() -> None:
    events = runs.list_run()
    rows = [row | {"energy_origin": "attributed", "energy_j": 1.0} for row in rows_of(events)]
    head, line, *_ = [re.split("  +", each) for each in status_lines(project(events), rows, 1000)]
    shown = dict(zip(head, line, strict=True))
    assert shown["J"] == "1 attributed"
    assert shown["full J"] == f"{number(rows[0]['full_energy_j'])} {rows[0]['full_energy_origin']}"
    assert rows[0]["full_energy_origin"] == "estimated"


def test_the_run_s_energy_and_its_source_stand_below_the_table() -> None:
    events = runs.measured(runs.list_run())
    used = ledger(events)
    (line,) = [line for line in status_notes(project(events)) if line.startswith("energy: ")]
    assert line.startswith(f"energy: {joules(used.run.energy_j)} attributed, of {joules(used.total.energy_j)} ")
    assert line.endswith("(source: RAPL package-0)") and "\n" not in line
    begun = runs.just_started()
    assert not [line for line in status_notes(project(begun)) if "energy" in line], "it may come yet"
    without = [event for event in runs.list_run() if event["type"] != "power"]
    (line,) = [line for line in status_notes(project(without)) if "energy" in line]
    assert line == "energy: unavailable: no node has a power source that could be read"


def test_an_attempt_after_the_first_is_marked() -> None:
    (line,) = [line for line in shown(runs.list_run(), 80) if line.startswith("member-3")]
    assert "finished (2)" in line and "6/6" in line


def test_the_head_tells_how_the_run_stands() -> None:
    events = runs.list_run(until=9.0)
    head = status_head(project(events))
    assert head == "digits · running · executor local · 0:08 · objective accuracy, max"
    assert "digits · interrupted" in status_head(project(events, "it is gone"))
    assert "digits · finished, with failures ·" in status_head(project(runs.list_run()))


def test_failures_of_one_cause_are_one_line_and_notes_keep_to_the_width() -> None:
    events = runs.list_run(until=9.0)
    names = [e["member"] for e in events if e["type"] == "member"][:6]
    failed = {"v": 2, "t": 9.5, "type": "failed", "attempt": 1, "reason": "error", "retry": False}
    events += [
        failed | {"member": name, "error": "ValueError: the labels are of another kind"} for name in names[:5]
    ]
    events.append(failed | {"member": names[5], "error": "KeyError: 'image'"})
    first, second = [line for line in status_notes(project(events)) if "failed (error)" in line]
    assert (
        first == f"{', '.join(names[:4])} and 1 more: failed (error): ValueError: the labels are of another kind"
    )
    assert second == f"{names[5]}: failed (error): KeyError: 'image'"
    wrapped = status_notes(project(events), 60)
    assert max(map(len, wrapped)) <= 60
    assert " ".join(" ".join(wrapped).split()) == " ".join(" ".join(status_notes(project(events))).split())


def test_a_node_that_cannot_be_used_is_named_until_it_can() -> None:
    why = {"detail": "No space left on device", "retry_s": 60.0}
    events = [*runs.list_run(until=9.0), {"v": 2, "t": 9.5, "type": "node_unusable", "node": "full", **why}]
    [line] = [line for line in status_gpus(fold(events)) if line.startswith("full")]
    assert line == "full: nothing can be started there: No space left on device; it is tried again after 60 s"
    usable = {"v": 2, "t": 9.9, "type": "node", **Node("full", 4.0, (), 8.0, "full").as_event()}
    assert not [line for line in status_gpus(fold([*events, usable])) if line.startswith("full")]


def written_by(path: Path, pid: int, host: str) -> tuple[RunDir, Any]:
    events = runs.list_run(until=9.0)
    events[0] = events[0] | {"pid": pid, "host": host}
    return RunDir(runs.write_run(path, events)), fold(events)


def test_a_controller_that_died_is_told_by_the_lock_it_no_longer_holds(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    path = tmp_path / "a run"  # what is suggested is as a shell takes it
    run_dir, state = written_by(path, process.pid, socket.gethostname())
    gone = f"the controller (process {process.pid}) is gone; `ensemble resume '{path}'` goes on"
    assert describe_lost_controller(run_dir, state) == gone
    log = EventLog(run_dir.events)
    assert describe_lost_controller(run_dir, state) is None, "another one goes on with it"
    log.close()
    run_dir, state = written_by(tmp_path, os.getpid(), socket.gethostname())
    assert describe_lost_controller(run_dir, state) is not None, "the process lives, the run in it does not"


def test_a_controller_elsewhere_is_taken_for_lost_when_it_has_long_been_silent(tmp_path: Path) -> None:
    run_dir, state = written_by(tmp_path, 1, "another-host")
    assert describe_lost_controller(run_dir, state, silent_s=300) is None, "it has written just now"
    an_hour_ago = time.time() - 3600
    os.utime(run_dir.events, (an_hour_ago, an_hour_ago))
    silent = "the controller (process 1 on another-host) has logged nothing for 1:00:0"
    assert (describe_lost_controller(run_dir, state, silent_s=300) or "").startswith(silent)
    assert describe_lost_controller(run_dir, state) is None, "a request is made to it all the same"
    log = EventLog(run_dir.events)
    assert describe_lost_controller(run_dir, state, silent_s=300) is None, "a lock that is seen tells"
    log.close()
    assert describe_lost_controller(run_dir, fold(runs.list_run()), silent_s=0) is None, "it has ended"


def test_all_metrics_appear_where_there_is_room() -> None:
    events = [
        e | {"metrics": {**e["metrics"], "f1": 0.25, "评分": 0.75}} if e["type"] == "epoch" else e
        for e in runs.list_run()
        if e["type"] != "finished"
    ]
    head, line, *_ = shown(events, 200)
    assert head.split()[-4:] == ["loss", "f1", "评分", "node"] and line.split()[-3:-1] == ["0.2500", "0.7500"]
    assert "f1" not in shown(events, 80)[0] and "node" in shown(events, 80)[0]
    assert rows_of(events)[0]["metrics"]["f1"] == 0.25


def test_models_a_minute_are_in_the_lines_and_the_same_in_each_row_for_programs() -> None:
    events = runs.list_run()
    rows = status_json(project(events), rows_of(events))
    [line] = [line for line in status_notes(project(events)) if line.startswith("models: ")]
    assert f"{rows[0]['models_per_minute']:.1f} a minute" in line
    assert len({(row["models_per_minute"], row["ttta_s"]) for row in rows}) == 1 and rows[0]["ttta_s"] > 0
    early = project(runs.list_run(until=2.0))
    assert not [line for line in status_notes(early) if line.startswith("models: ")] and early.state.members
    assert status_json(early, [{}]) == [{"models_per_minute": None, "ttta_s": None}]
