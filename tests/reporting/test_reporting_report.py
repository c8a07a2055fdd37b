"""The report holds a run's documents whole, from any state of the run, and tells a reader without JavaScript."""

from __future__ import annotations

import json
import re
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from kit import run_events as runs

from ensemble.reporting import write_report
from ensemble.reporting.report import LOG_LINES, LOGS_BYTES
from ensemble.store import RunDir


def read_documents(page: Path) -> dict[str, Any]:
    (found,) = re.findall(r'<script type="application/json" id="documents">(.*?)</script>', page.read_text())
    return dict(json.loads(found))


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "digits"
    run_dir = RunDir(runs.write_run(path, runs.list_run(), [i for i in range(8) if i != 6]))
    run_dir.log("member-6").parent.mkdir()
    lines = [*(f"line {i}" for i in range(1000)), "\x1b[31mFloatingPointError"]
    run_dir.log("member-6").write_text("\n".join(lines) + "\n")
    return write_report(run_dir)


def test_its_documents_are_those_of_the_live_page(full: Path) -> None:
    documents = read_documents(full)
    state, tables = documents["state"], documents["tables"]
    assert state["run"]["state"]["word"] == "finished, with failures" and state["run"]["actions"] == []
    assert len(state["members"]["rows"]) == len(documents["curves"]["members"]) == 8
    said = " ".join(notice["text"] for notice in state["notices"])
    assert "killed by signal 9 (SIGKILL); it will be tried again" in said and "loss is nan at epoch 5" in said
    facts = [fact["text"] for fact in state["run"]["facts"]]
    assert "preparation in stream group 0 (a member waited 63% of the time): try prep_workers=2" in facts
    models = {row[0].removesuffix(" (best)") for row in documents["quality"]["tables"][0]["rows"]}
    assert models == {"combined", *(f"member-{i}" for i in range(8) if i != 6)}
    assert [table["id"] for table in tables["tables"]] == ["cost_of_roles", "impact"]
    of_members = [column["id"] for column in tables["columns"]]
    assert {"exchange waited, s", "cost_of_members full J"} <= set(of_members) and len(tables["members"]) == 8
    assert {len(cells) for cells in tables["members"].values()} == {len(of_members)}
    made_with = state["run"]["configuration"]
    assert ["torch", "2.13.0"] in made_with and ["git commit", "4f2a91c"] in made_with
    assert {"epochs", "batch size", "seed"} <= {label for label, _ in made_with}
    (best, *_) = [series["label"] for series in state["run"]["curves"]["series"]]
    assert best == state["run"]["best"]["member"]


def test_it_holds_the_last_lines_of_the_logs_of_members_that_failed(full: Path, tmp_path: Path) -> None:
    logs = read_documents(full)["logs"]
    lines = logs["member-6"].splitlines()
    assert set(logs) == {"member-6"} and len(lines) == LOG_LINES
    assert lines[-2:] == ["line 999", "FloatingPointError"]
    events = [e for e in runs.list_run(members=120, epochs=1) if e["type"] in ("run_started", "member")]
    failed = {"v": 2, "t": events[-1]["t"] + 1, "type": "failed", "attempt": 0, "error": "x", "reason": "error"}
    events += [failed | {"member": f"member-{i}", "retry": False} for i in range(120)]
    run_dir = RunDir(runs.write_run(tmp_path / "run", events))
    for i in range(120):
        run_dir.log(f"member-{i}").parent.mkdir(parents=True, exist_ok=True)
        run_dir.log(f"member-{i}").write_text("x" * 10**6)
    logs = read_documents(write_report(run_dir))["logs"]  # those of many are bounded
    assert len(logs) > 50 and LOGS_BYTES / 2 < sum(map(len, logs.values())) < 1.1 * LOGS_BYTES


BEGIN, *BEGUN = runs.list_run(until=9.0)
INTERRUPTED = [BEGIN | {"host": socket.gethostname(), "pid": 2**22 + 1}, *BEGUN]  # no process has such a number
AT_ANY_TIME = {"just started": (runs.just_started(), "running", 0), "running": ([BEGIN, *BEGUN], "running", 8)}
AT_ANY_TIME |= {"search": (runs.search_run(), "running", 24), "interrupted": (INTERRUPTED, "interrupted", 8)}
AT_ANY_TIME |= {"empty log": ([], "not started", 0)}


@pytest.mark.parametrize("when", AT_ANY_TIME)
def test_a_run_at_any_time_has_a_report(tmp_path: Path, when: str) -> None:
    events, word, members = AT_ANY_TIME[when]
    documents = read_documents(write_report(RunDir(runs.write_run(tmp_path / "run", events))))
    state = documents["state"]
    assert state["run"]["state"]["word"] == word and len(state["members"]["rows"]) == members
    assert documents["quality"]["missing"]
    assert (state["run"]["driver"] is not None) == (word == "interrupted")


def test_a_resumed_run_has_the_curves_of_both_starts(tmp_path: Path) -> None:
    again = BEGIN | {"t": BEGUN[-1]["t"] + 1000.0, "resumed": True}
    documents = read_documents(write_report(RunDir(runs.write_run(tmp_path / "run", [BEGIN, *BEGUN, again]))))
    outcomes = {span[-1] for spans in documents["state"]["spans"].values() for span in spans}
    assert outcomes == {"waiting"}, "no attempt runs across the two starts"
    assert any(curve["epoch"] for curve in documents["curves"]["members"].values())


def test_names_and_errors_from_the_run_cannot_inject_html(tmp_path: Path) -> None:
    evil = "</noscript></script><script>alert(1)</script>\ud800<!--"
    failed = {"v": 2, "t": BEGUN[-1]["t"], "type": "failed", "member": "member-0", "attempt": 0}
    events = [e | {"params": {"tag": evil, evil: 1}} if e["type"] == "member" else e for e in BEGUN]
    events = [BEGIN | {"name": evil}, *events, failed | {"error": evil, "reason": "error", "retry": False}]
    page = write_report(RunDir(runs.write_run(tmp_path / "run", events)))
    text = page.read_text()
    assert "<script>alert" not in text and text.count("</script>") == 2 and text.count("</noscript>") == 1
    assert read_documents(page)["state"]["run"]["name"] == evil


def test_a_part_that_fails_takes_no_other_with_it(
    full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ensemble.cli.parser import main
    from ensemble.reporting.dashboard import run_section
    from ensemble.reporting.sections import cost

    def broken(*_: object) -> Any:
        raise ZeroDivisionError("no such luck")

    replaced = [broken if maker is cost.tabulate_impact else maker for maker in run_section.TABLES["tables"]]
    monkeypatch.setitem(run_section.TABLES, "tables", replaced)
    shutil.copytree(full.parent, tmp_path / "copy")
    assert main(["report", str(tmp_path / "copy")]) == 0
    assert "Traceback" not in capsys.readouterr().err
    documents = read_documents(tmp_path / "copy" / "report.html")
    assert documents["tables"]["missing"] == ["A table of costs cannot be shown: ZeroDivisionError: no such luck."]
    assert len(documents["tables"]["tables"]) == 1 and documents["tables"]["columns"]
