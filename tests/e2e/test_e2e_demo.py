"""The demo as a stranger runs it: on Ray, through the command, its report in a real browser."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ensemble.store import read_events

pytestmark = pytest.mark.ray

QUIET = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
FLAGS = [*QUIET.split(), "--disable-component-update", "--disable-sync", "--virtual-time-budget=15000"]
CHARTS = {"versus", "calibration", "curves", "timeline", "reuse", "batches", "levels", "cpu", "power"}


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    """The demo's temporary directory, with a path short enough for Ray's sockets."""
    path = Path("/tmp") / f"t{secrets.token_hex(4)}"
    path.mkdir(mode=0o700)
    yield path
    shutil.rmtree(path)


class Demo:
    """What a run of the demo left to look at."""

    def __init__(self, run_dir: Path, scratch: Path) -> None:
        self.run_dir = run_dir
        self.shared_memory = set(os.listdir("/dev/shm"))
        command = [sys.executable, "-m", "ensemble.cli", "demo", "--run-dir", str(run_dir)]
        command += ["--json", str(run_dir) + ".json"]
        began = time.monotonic()
        environment = {**os.environ, "TMPDIR": str(scratch)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
        self.wall_s = time.monotonic() - began
        assert done.returncode == 0, done.stderr
        self.said, self.progress = done.stdout, done.stderr
        self.rows = json.loads(Path(str(run_dir) + ".json").read_text())


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory, scratch: Path) -> Demo:
    return Demo(tmp_path_factory.mktemp("demo") / "run", scratch)


def test_eight_members_train_and_their_sum_is_better(demo: Demo) -> None:
    assert [row["state"] for row in demo.rows] == ["finished"] * 8
    assert {row["energy_origin"] for row in demo.rows} <= {"estimated", "attributed"}
    assert all(row["cpu_s"] > 0 for row in demo.rows)
    (combined,) = [e for e in read_events(demo.run_dir / "events.jsonl") if e["type"] == "combined"]
    metrics = combined["metrics"]
    assert metrics["ensemble"]["accuracy"] > metrics["mean"]["accuracy"] + 0.01
    assert metrics["ensemble"]["nll"] < min(metrics["best"]["nll"], metrics["mean"]["nll"])
    assert demo.wall_s < 120, "a minute on two cores that have nothing else to do"


def test_one_pipeline_fed_them_all(demo: Demo) -> None:
    ledger = json.loads((demo.run_dir / "ledger.json").read_text())
    assert ledger["reuse"]["factor"] == pytest.approx(8.0)
    placed = [e for e in read_events(demo.run_dir / "events.jsonl") if e["type"] == "placed"]
    assert len(placed) == 8 and len({e["cohort"] for e in placed}) == 1
    assert sorted(len(e["devices"]) for e in placed) == [1] * 6 + [2] * 2
    epochs = [e for e in read_events(demo.run_dir / "events.jsonl") if e["type"] == "epoch"]
    assert all(e["private_batches"] == 0 for e in epochs)


def test_a_person_is_told_what_matters(demo: Demo) -> None:
    for words in ("combined", "best member", "mean of the members", "accuracy", "NLL", "ECE"):
        assert words in demo.said
    assert re.search(r"[\d,]+ prepared, [\d,]+ consumed: each was used 8\.00 times", demo.said)
    for role in ("starting up", "preparing samples", "training", "orchestrating", "Ray"):
        assert role in demo.said
    assert "estimated" in demo.said and str(demo.run_dir / "report.html") in demo.said
    assert "left" in demo.progress and "8/8 finished" in demo.progress


def test_nothing_is_left(demo: Demo, scratch: Path) -> None:
    # torch makes the directory of its compiler's cache, which is meant to stay
    assert [path.name for path in scratch.iterdir() if not path.name.startswith("torchinductor")] == []
    assert set(os.listdir("/dev/shm")) <= demo.shared_memory
    for process in psutil.process_iter(["cmdline"]):
        assert not any(str(scratch) in word for word in process.info["cmdline"] or [])


@pytest.mark.browser
def test_the_report_draws_in_a_browser_without_a_network(demo: Demo, tmp_path: Path) -> None:
    names = ("chromium", "chromium-browser", "google-chrome")
    chromium = next((found for name in names if (found := shutil.which(name))), None)
    if chromium is None:
        pytest.skip("no chromium or google-chrome on this machine")
    page = (demo.run_dir / "report.html").as_uri()
    command = [chromium, *FLAGS, f"--user-data-dir={tmp_path}", "--host-resolver-rules=MAP * ~NOTFOUND"]
    dom = subprocess.run([*command, "--dump-dom", page], capture_output=True, text=True, timeout=120).stdout
    assert f'data-drawn="{len(CHARTS)}"' in dom
    cards = dom.split('<script type="application/json"')[0].split("<figure ")[1:]
    marks = {re.findall(r'<div class="plot[^>]* id="(\w+)"', card)[0]: card for card in cards}
    assert set(marks) == CHARTS
    for name, card in marks.items():
        assert card.count('class="point"') + card.count('class="js-line"') > 0, f"{name} has drawn nothing"
    assert marks["timeline"].count('class="point"') >= 8 + 8
    assert "estimated" in marks["power"]
