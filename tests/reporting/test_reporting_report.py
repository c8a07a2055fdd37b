"""The report holds a run's documents whole, from any state of the run, and tells a reader without JavaScript."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import run_events as runs
from event_dicts import collect_notices

from ensemble.reporting import write_report
from ensemble.reporting.report import LOG_LINES, LOGS_BYTES
from ensemble.reporting.text import clock, duration, joules
from ensemble.store import RunDir, StoreError


def read_documents(page: Path) -> dict[str, Any]:
    """The documents that lie in a report."""
    (found,) = re.findall(r'<script type="application/json" id="documents">(.*?)</script>', page.read_text())
    documents: dict[str, Any] = json.loads(found)
    return documents


def read_plain(page: Path) -> str:
    """What a reader without JavaScript sees."""
    (found,) = re.findall(r"<noscript>(.*?)</noscript>", page.read_text(), re.DOTALL)
    return str(found)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "digits"
    run_dir = RunDir(runs.write_run(path, runs.list_run(), [i for i in range(8) if i != 6]))
    run_dir.log("member-6").parent.mkdir()
    lines = [*(f"line {i}" for i in range(1000)), "\x1b[31mFloatingPointError"]
    run_dir.log("member-6").write_text("\n".join(lines) + "\n")
    return write_report(run_dir)


def test_the_main_figures_and_the_members_are_told_without_javascript(full: Path) -> None:
    plain = read_plain(full)
    assert full.name == "report.html" and "<title>digits · report</title>" in full.read_text()
    assert "7 of 8" in plain and "1 failed" in plain and "Energy (estimated)" in plain
    event = runs.combined([f"member-{i}" for i in range(8) if i != 6])["metrics"]
    assert f"{event['ensemble']['accuracy']:.4f}" in plain
    assert f"{event['ensemble']['accuracy'] - event['best']['accuracy']:+.4f} to the best member" in plain
    rows = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", plain)]
    assert [row[0] for row in rows if row] == [f"member-{i}" for i in range(8)]
    assert "loss is nan at epoch 5" in rows[7][-1] and rows[4][-2] == "2", "attempts of member-3"


def test_its_documents_are_those_of_the_live_page(full: Path) -> None:
    documents = read_documents(full)
    state, tables = documents["state"], documents["tables"]
    assert state["run"]["state"]["word"] == "finished, with failures" and state["run"]["actions"] == []
    assert len(state["members"]["rows"]) == len(documents["curves"]["members"]) == 8
    said = " ".join(notice["text"] for notice in state["notices"])
    assert "killed by signal 9 (SIGKILL); it will be tried again" in said and "loss is nan at epoch 5" in said
    facts = [fact["text"] for fact in state["run"]["facts"]]
    assert "preparation in stream group 0 (a member waited 63% of the time): try prep_workers=2" in facts
    assert set(documents["quality"]["members"]) == {f"member-{i}" for i in range(8) if i != 6}
    assert [table["id"] for table in tables["tables"]] == ["cost_of_roles", "impact"]
    of_members = [column["id"] for column in tables["columns"]]
    assert {"exchange waited, s", "cost_of_members full J"} <= set(of_members) and len(tables["members"]) == 8
    assert {len(cells) for cells in tables["members"].values()} == {len(of_members)}
    assert ["torch", "2.13.0"] in state["run"]["made_with"] and ["revision", "4f2a91c"] in state["run"][
        "made_with"
    ]


def test_it_holds_the_last_lines_of_the_logs_of_members_that_failed(full: Path) -> None:
    logs = read_documents(full)["logs"]
    assert set(logs) == {"member-6"}
    lines = logs["member-6"].splitlines()
    assert len(lines) == LOG_LINES and lines[-2:] == ["line 999", "FloatingPointError"]


def test_the_logs_of_many_failed_members_are_bounded(tmp_path: Path) -> None:
    events = [
        event for event in runs.list_run(members=120, epochs=1) if event["type"] in ("run_started", "member")
    ]
    failed = {"v": 2, "t": events[-1]["t"] + 1, "type": "failed", "attempt": 0, "error": "x", "reason": "error"}
    events += [failed | {"member": f"member-{i}", "retry": False} for i in range(120)]
    run_dir = RunDir(runs.write_run(tmp_path / "run", events))
    for i in range(120):
        run_dir.log(f"member-{i}").parent.mkdir(parents=True, exist_ok=True)
        run_dir.log(f"member-{i}").write_text("x" * 10**6)
    logs = read_documents(write_report(run_dir))["logs"]
    assert len(logs) > 50 and LOGS_BYTES / 2 < sum(map(len, logs.values())) < 1.1 * LOGS_BYTES


@pytest.mark.parametrize(
    ("events", "word", "members"),
    [
        (runs.just_started(), "running", 0),
        (runs.list_run(until=9.0), "running", 8),
        (runs.search_run(), "running", 24),
        ([], "not started", 0),
    ],
    ids=["just started", "running", "search", "empty log"],
)
def test_a_run_at_any_point_has_a_report(
    tmp_path: Path, events: list[runs.Event], word: str, members: int
) -> None:
    page = write_report(RunDir(runs.write_run(tmp_path / "run", events)))
    state = read_documents(page)["state"]
    assert state["run"]["state"]["word"] == word and len(state["members"]["rows"]) == members
    assert read_documents(page)["quality"]["missing"]


def test_a_run_whose_controller_is_gone_is_interrupted(tmp_path: Path) -> None:
    import socket
    import subprocess

    ended = subprocess.Popen(["true"])
    ended.wait()
    first, *others = runs.list_run(until=9.0)
    events = [first | {"host": socket.gethostname(), "pid": ended.pid}, *others]
    run_dir = RunDir(runs.write_run(tmp_path / "run", events))
    run = read_documents(write_report(run_dir))["state"]["run"]
    assert run["state"]["word"] == "interrupted" and "is gone" in run["driver"]


def test_a_resumed_run_has_the_curves_of_both_starts(tmp_path: Path) -> None:
    begun = runs.list_run(until=9.0)
    again = begun[0] | {"t": begun[-1]["t"] + 1000.0, "resumed": True}
    documents = read_documents(write_report(RunDir(runs.write_run(tmp_path / "run", [*begun, again]))))
    outcomes = {span[-1] for spans in documents["state"]["spans"].values() for span in spans}
    assert outcomes == {"waiting"}, "no attempt runs across the two starts"
    assert any(curve["epoch"] for curve in documents["curves"]["members"].values())


def test_where_there_is_no_run_that_is_said(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no run here"):
        write_report(RunDir(tmp_path / "nothing"))


def test_names_and_errors_from_the_run_cannot_inject_html(tmp_path: Path) -> None:
    events = runs.list_run(until=9.0)
    evil = "</noscript></script><script>alert(1)</script>\ud800<!--"
    events[0] = events[0] | {"name": evil}
    events = [e | {"params": {"tag": evil, evil: 1}} if e["type"] == "member" else e for e in events]
    events.append({"v": 2, "t": events[-1]["t"], "type": "failed", "member": "member-0", "attempt": 0})
    events[-1] |= {"error": evil, "reason": "error", "retry": False}
    page = write_report(RunDir(runs.write_run(tmp_path / "run", events)))
    text = page.read_text()
    assert "<script>alert" not in text and text.count("</script>") == 2 and text.count("</noscript>") == 1
    assert read_documents(page)["state"]["run"]["name"] == evil


def test_what_is_not_a_number_is_absent(tmp_path: Path) -> None:
    events = [dict(e) for e in runs.list_run()]
    first = next(e for e in events if e["type"] == "epoch" and e["member"] == "member-0")
    first["metrics"] = {"loss": float("nan"), "accuracy": float("inf")}
    documents = read_documents(write_report(RunDir(runs.write_run(tmp_path / "run", events))))
    assert documents["curves"]["members"]["member-0"]["values"]["accuracy"][0] is None


def test_an_unreadable_prediction_file_is_a_reason_not_a_crash(tmp_path: Path) -> None:
    run_dir = RunDir(runs.write_run(tmp_path / "run", runs.list_run(), range(2)))
    run_dir.predictions("member-0").write_bytes(b"torn")
    quality = read_documents(write_report(run_dir))["quality"]
    assert quality["missing"].startswith("The saved predictions cannot be compared")


def test_notices_tell_failures_restarts_and_skipped_records_in_order() -> None:
    told = [n.text for n in collect_notices(runs.list_run())]
    assert [n for n in told if n.startswith("member-3")] == [
        "member-3, attempt 1: failed (lost): killed by signal 9 (SIGKILL); it will be tried again",
        "member-3, attempt 2: goes on at epoch 4, step 0",
    ]
    assert sum("2 records could not be prepared" in n for n in told) == 2, "once for each cohort, not each report"
    assert collect_notices(runs.just_started()) == []
    alone = {"type": "epoch", "t": 9.0, "member": "member-1", "epoch": 1, "skipped_steps": 1, "private_skipped": 2}
    assert [n.text for n in collect_notices([alone])] == [
        "member-1, epoch 2: 1 step skipped, gradients were not finite",
        "member-1, epoch 2: 2 records could not be prepared",
    ]
    replaced = {"type": "agent_replaced", "t": 9.0, "node": "node-1", "detail": "OSError: no power to be had"}
    assert [n.text for n in collect_notices([replaced])] == [
        "node-1: its agent ended, another took its place: OSError: no power to be had"
    ]
    drained = {"type": "node_draining", "t": 9.0, "node": "node-1", "deadline": None}
    assert [n.text for n in collect_notices([drained])] == [
        "node-1: the cluster drains it: its members write checkpoints and move to other nodes"
    ]
    changed = {"type": "code_changed", "t": 9.0, "changed": ["spec.loss"], "trained": ["member-2"]}
    assert [n.text for n in collect_notices([changed])] == [
        "the code changed (spec.loss); weights of the earlier code: member-2"
    ]


def test_numbers_read_well() -> None:
    assert [duration(s) for s in (0.04, 9.94, 59.6, 185, 7620, 1e5)] == [
        "0.0 s",
        "9.9 s",
        "1 min 00 s",
        "3 min 05 s",
        "2 h 07 min",
        "1 d 3 h",
    ]
    assert [clock(s) for s in (7, 750, 3723)] == ["0:07", "12:30", "1:02:03"]
    assert [joules(j) for j in (None, 12.34, 41_300.0)] == ["–", "12.3 J", "41.3 kJ"]


def test_a_class_that_no_member_knows_is_said_in_the_report(tmp_path: Path) -> None:
    from ensemble.cli.parser import main
    from ensemble.store import save_predictions

    run_dir = RunDir(runs.write_run(tmp_path / "digits", runs.list_run(), []))
    for member in ("member-0", "member-1"):
        p, index = np.full((4, 3), 1 / 3), np.arange(4)
        for split in ("valid", "test"):
            save_predictions(run_dir.predictions(member), split, p, index, np.array([0, 1, 2, 7]))
    assert main(["report", str(run_dir.path)]) == 0
    assert "targets must be classes 0 ... 2, found 7" in read_documents(run_dir.report)["quality"]["missing"]


def test_a_part_that_fails_takes_no_other_with_it(
    full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ensemble.cli.parser import main
    from ensemble.reporting.dashboard import tables
    from ensemble.reporting.sections import impact

    def broken(*_: object) -> Any:
        raise ZeroDivisionError("no such luck")

    broken.__module__ = "ensemble.reporting.sections.impact"
    replaced = [broken if each is impact.tabulate else each for each in tables.TABLES]
    monkeypatch.setattr(tables, "TABLES", replaced)
    shutil.copytree(full.parent, tmp_path / "copy")
    assert main(["report", str(tmp_path / "copy")]) == 0
    assert "Traceback" not in capsys.readouterr().err
    documents = read_documents(tmp_path / "copy" / "report.html")
    assert documents["tables"]["missing"] == ["Impact cannot be shown: ZeroDivisionError: no such luck."]
    assert len(documents["tables"]["tables"]) == 1 and documents["tables"]["columns"]
