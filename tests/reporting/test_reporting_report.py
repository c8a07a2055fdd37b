"""The report: whole from any state of a run, self-contained, and really drawn by a browser."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import run_events as runs

from ensemble.reporting import write_report
from ensemble.reporting.sections.notices import collect_notices
from ensemble.reporting.text import clock, duration, joules
from ensemble.store import RunDir, StoreError

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def page_without_plotly(path: Path) -> str:
    from plotly.offline import get_plotlyjs

    whole = path.read_text()
    assert whole.count(get_plotlyjs()) == 1, "plotly.js is inlined once"
    return whole.replace(get_plotlyjs(), "")


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "digits"
    run_dir = RunDir(runs.write_run(path, runs.list_run(), [i for i in range(8) if i != 6]))
    return write_report(run_dir)


def test_report_states_the_main_figures_and_what_went_wrong(full: Path) -> None:
    page = page_without_plotly(full)
    assert full.name == "report.html"
    assert "7 of 8" in page and "Energy (estimated)" in page
    event = runs.combined([f"member-{i}" for i in range(8) if i != 6])["metrics"]
    assert f"{event['ensemble']['accuracy']:.4f}" in page
    assert f"{event['ensemble']['accuracy'] - event['best']['accuracy']:+.4f} to the best member" in page
    assert "killed by signal 9 (SIGKILL); it will be tried again" in page
    assert "loss is nan at epoch 5" in page
    assert ">J (estimated)</th>" in page and ">J is</th>" not in page, "as in the summary"
    assert "Preparation in cohort 0 (a member waited 63% of the time): try prep_workers=2." in page
    assert "a node&#x27;s ring holds 512 samples in 6.01 MiB of shared memory" in page
    assert "could not be prepared" in page and "left out" not in page, "a run may end at such a record"
    assert page.count('class="plot"') == 10 and 'class="absent">' not in page.split("<footer>")[0]


def test_report_needs_no_network(full: Path) -> None:
    page = page_without_plotly(full)
    assert not re.findall(r"https?://", page)
    assert not re.search(r"<link|<img|<iframe|@import|\ssrc=", page)
    assert "default-src 'none'" in page


@pytest.mark.parametrize(
    ("events", "drawn"),
    [(runs.just_started(), 0), (runs.list_run(until=9.0), 8), (runs.search_run(), 5), ([], 0)],
    ids=["just started", "running", "search", "empty log"],
)
def test_report_of_a_run_at_any_point_says_why_what_is_absent_is_absent(
    tmp_path: Path, events: list[runs.Event], drawn: int
) -> None:
    run_dir = RunDir(runs.write_run(tmp_path / "run", events))
    page = page_without_plotly(write_report(run_dir))
    assert page.count('class="plot"') == drawn
    mode = 12 if events and events[0]["mode"] == "search" else 10
    assert page.count('class="absent">') == mode - drawn + 1, "one each, and the line for browsers without scripts"


def test_report_where_there_is_no_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no run here"):
        write_report(RunDir(tmp_path / "nothing"))


def test_names_and_errors_from_the_run_cannot_inject_html(tmp_path: Path) -> None:
    events = runs.list_run(until=9.0)
    evil = "</script><script>alert(1)</script>"
    events[0] = events[0] | {"name": evil}
    events = [e | {"params": {"tag": evil}} if e["type"] == "member" else e for e in events]
    events.append({"v": 1, "t": events[-1]["t"], "type": "failed", "member": "member-0", "attempt": 0})
    events[-1] |= {"error": evil, "reason": "error", "retry": False}
    page = page_without_plotly(write_report(RunDir(runs.write_run(tmp_path / "run", events))))
    assert "<script>alert" not in page


def test_an_unreadable_prediction_file_is_a_reason_not_a_crash(tmp_path: Path) -> None:
    run_dir = RunDir(runs.write_run(tmp_path / "run", runs.list_run(), range(2)))
    for split in ("valid", "test"):
        run_dir.predictions("member-0", split).write_bytes(b"torn")
    assert "The saved predictions cannot be compared" in write_report(run_dir).read_text()


def test_notices_tell_failures_restarts_and_skipped_records_in_order() -> None:
    told = [n.text for n in collect_notices(runs.list_run())]
    assert [n for n in told if n.startswith("member-3")] == [
        "member-3, attempt 1: failed (lost): killed by signal 9 (SIGKILL); it will be tried again",
        "member-3, attempt 2: goes on at epoch 4, step 0",
    ]
    assert sum("2 records could not be prepared" in n for n in told) == 2, "once for each cohort, not each report"
    assert collect_notices(runs.just_started()) == []
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


def draw(page: Path, profile: Path) -> str:
    """The page as a browser has it after its script."""
    chromium = next(
        (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))),
        None,
    )
    if chromium is None:
        pytest.skip("no chromium or google-chrome on this machine")
    command = [chromium, *FLAGS, f"--user-data-dir={profile}", "--virtual-time-budget=15000", "--dump-dom"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.browser
def test_a_browser_draws_every_figure(full: Path, tmp_path: Path) -> None:
    dom = draw(full, tmp_path)
    assert 'data-drawn="10"' in dom, "the page's script did not come to its end"
    body = dom.split('<script type="application/json"')[0]
    plots = {}
    for card in body.split("<figure ")[1:]:
        found = re.search(r'<div class="plot[^>]* id="(\w+)"', card)
        assert found, card[:200]
        plots[found[1]] = card
    points = {id: card.count('class="point"') for id, card in plots.items()}
    lines = {id: card.count('class="js-line"') // 2 for id, card in plots.items()}  # each is in its legend, too
    shared = {"reuse", "batches", "levels"}
    assert set(plots) == {"versus", "calibration", "curves", "timeline", "cpu", "energy", "power"} | shared
    assert points["levels"] == 3 * 2, "three levels of a feeder in each of two cohorts"
    assert points["versus"] == 2 * 8, "7 members and the combined model, accuracy and NLL"
    assert points["reuse"] == 2 * 2 and points["batches"] == 3 * 8
    assert points["cpu"] == points["energy"] == 5 * (1 + 9), "5 roles: the whole run, 8 members, what is shared"
    assert points["timeline"] >= 9 + 9 + 46, "9 attempts start up and run, with a mark for each of 46 epochs"
    assert lines["curves"] >= 8 and lines["calibration"] == 3 and lines["power"] == 2
    assert points["curves"] == 2 * 46
    assert "estimated" in plots["power"] and "not evidence of a saving" in plots["energy"]
    assert not re.search(r'd="[^"]*NaN', body)


@pytest.mark.browser
def test_each_table_is_sorted_by_the_column_that_was_clicked(full: Path, tmp_path: Path) -> None:
    click = """<script>
    const members = [...document.querySelectorAll('section')].find(each => each.innerText.startsWith('Members'));
    members.querySelectorAll('th')[1].click();
    </script></body>"""
    (tmp_path / "clicked.html").write_text(full.read_text().replace("</body>", click))
    members = draw(tmp_path / "clicked.html", tmp_path).split("<h2>Members</h2>")[1].split("</section>")[0]
    assert re.findall(r">(member-\d)</td>", members) == [f"member-{number}" for number in reversed(range(8))]


def test_a_class_that_no_member_knows_is_said_in_the_report(tmp_path: Path) -> None:
    from ensemble.cli.parser import main
    from ensemble.store import save_predictions

    run_dir = RunDir(runs.write_run(tmp_path / "digits", runs.list_run(), []))
    for member in ("member-0", "member-1"):
        p, index = np.full((4, 3), 1 / 3), np.arange(4)
        for split in ("valid", "test"):
            save_predictions(run_dir.predictions(member, split), p, index, np.array([0, 1, 2, 7]))
    assert main(["report", str(run_dir.path)]) == 0
    assert "targets must be classes 0 ... 2, found 7" in page_without_plotly(run_dir.report)


def test_a_part_that_fails_takes_no_other_with_it(
    full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ensemble.cli.parser import main
    from ensemble.reporting import figures, report

    def broken(*_: object) -> str:
        raise ZeroDivisionError("no such luck")

    whole = page_without_plotly(full).count('class="plot"')
    monkeypatch.setattr(figures, "learning_curves", broken)
    sections = [(heading, broken if heading == "Members" else make) for heading, make in report.SECTIONS]
    monkeypatch.setattr(report, "SECTIONS", sections)
    shutil.copytree(full.parent, tmp_path / "copy")
    assert main(["report", str(tmp_path / "copy")]) == 0
    assert "Traceback" not in capsys.readouterr().err
    page = page_without_plotly(tmp_path / "copy" / "report.html")
    assert page.count("It cannot be shown: ZeroDivisionError: no such luck.") == 2
    assert page.count('class="plot"') == whole - 1
