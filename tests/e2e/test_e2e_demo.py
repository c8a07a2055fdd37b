"""The demo as a stranger runs it: on Ray, through the command, its report in a real browser."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from event_dicts import read_events
from leftovers import named_memory, new_named_memory

# A run that shares on Ray is in the first tier: tests/executors/ray/test_ray_runs.py.
pytestmark = [pytest.mark.ray, pytest.mark.more]

ACCOUNT = Path(__file__).parents[1] / "meter" / "account.py"
QUIET = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
FLAGS = [*QUIET.split(), "--disable-component-update", "--disable-sync", "--virtual-time-budget=15000"]


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
        self.shared_memory = named_memory()
        account = Path(str(run_dir) + "-account.json")
        command = [sys.executable, str(ACCOUNT), str(account), sys.executable, "-m", "ensemble.cli", "demo"]
        command += ["--run-dir", str(run_dir), "--json", str(run_dir) + ".json"]
        self.home = run_dir.with_name("home")
        self.home.mkdir()
        environment = {**os.environ, "TMPDIR": str(scratch), "HOME": str(self.home)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        self.said, self.progress = done.stdout, done.stderr
        self.used_s = json.loads(account.read_text())["cpu_s"]
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
    assert demo.used_s < 120, "about a minute on two cores that have nothing else to do"


def test_one_pipeline_fed_them_all(demo: Demo) -> None:
    ledger = json.loads((demo.run_dir / "ledger.json").read_text())
    assert ledger["reuse"]["factor"] == pytest.approx(8.0)
    placed = [e for e in read_events(demo.run_dir / "events.jsonl") if e["type"] == "placed"]
    assert len(placed) == 8 and len({e["cohort"] for e in placed}) == 1
    assert sorted(len(e["devices"]) for e in placed) == [1] * 6 + [2] * 2
    epochs = [e for e in read_events(demo.run_dir / "events.jsonl") if e["type"] == "epoch"]
    assert all(e["private_batches"] == 0 for e in epochs)


def test_the_ledger_has_all_that_the_process_tree_used(demo: Demo) -> None:
    kept = json.loads((demo.run_dir / "ledger.json").read_text())
    events = read_events(demo.run_dir / "events.jsonl")
    assert kept["run"]["cpu_s"] + events[-1]["report_cpu_s"] == pytest.approx(demo.used_s, rel=0.03)
    assert kept["run"]["cpu_s"] == sum(row["cpu_s"] for row in kept["rows"])


def test_a_person_is_told_what_matters(demo: Demo) -> None:
    ranks = re.findall(r"^ ?(\d+) +member-(\d)", demo.said, re.MULTILINE)
    metrics = {row["member"]: row["metric"] for row in demo.rows}
    assert [int(rank) for rank, _ in ranks] == list(range(1, 9))
    in_order = [metrics[f"member-{number}"] for _, number in ranks]
    assert in_order == sorted(in_order, reverse=True)
    assert re.search(r"accuracy ↑ +NLL ↓ +ECE ↓", demo.said)
    for model in (r"combined \(greedy, \d members\)", r"best member \(member-\d\)", "mean of the members"):
        assert re.search(model + r" +0\.\d{4} +\d+\.\d{4} +0\.\d{4}", demo.said), model
    counts = re.search(r"([\d,]+) prepared, ([\d,]+) consumed: each was used 8\.00 times", demo.said)
    assert counts is not None
    prepared, consumed = (int(count.replace(",", "")) for count in counts.groups())
    assert consumed == 8 * prepared
    assert re.search(
        r"^bottleneck +(the members|preparation) \(a member waited \d+% of the", demo.said, re.MULTILINE
    )
    for role in ("starting up", "preparing samples", "training", "orchestrating", "Ray"):
        assert role in demo.said
    assert "estimated" in demo.said and str(demo.run_dir / "report.html") in demo.said
    assert "left" in demo.progress and "8/8 finished" in demo.progress


def test_nothing_is_left(demo: Demo, scratch: Path) -> None:
    assert list(scratch.iterdir()) == [] and list(demo.home.iterdir()) == []
    assert new_named_memory(demo.shared_memory) == set()
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
    drawn, dom = r'<section data-view="overview" data-drawn="[1-9]', ""
    for _ in range(5):  # on a loaded machine the browser may print the page before its first frame
        dom = subprocess.run([*command, "--dump-dom", page], capture_output=True, text=True).stdout
        if re.search(drawn, dom):
            break
    assert re.search(drawn, dom)
    assert "8 of 8" in dom and "Energy (estimated)" in dom
    documents = json.loads(dom.split('id="documents">')[1].split("</script>")[0])
    curves = documents["curves"]["members"]
    assert len(curves) == 8 and all(len(curve["epoch"]) > 1 for curve in curves.values())
    assert documents["quality"]["combined"]
