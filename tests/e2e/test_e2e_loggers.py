"""A run that is logged to TensorBoard, MLflow and W&B, whose controller is killed, and which is resumed."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from logger_cases import EPOCHS

sys.path.insert(0, str(Path(__file__).parents[1] / "reporting"))
from logger_readers import kept, read_mlflow, read_session_groups, read_tensorboard, read_wandb, tensorboard

from ensemble.meter import ledger
from ensemble.reporting.loggers.points import epoch_values
from ensemble.store import RunDir, StoreError, fold, read_events

DRIVER = str(Path(__file__).with_name("logger_cases.py"))


def count_epochs(run_dir: RunDir) -> int:
    """Epochs in the log."""
    try:
        return sum(event["type"] == "epoch" for event in read_events(run_dir.events))
    except StoreError:
        return 0


def list_marked(mark: str) -> list[int]:
    """Processes that the drivers, or anything of theirs, have started and that are still there."""
    found = []
    for process in psutil.process_iter():
        try:
            environment = Path(f"/proc/{process.pid}/environ").read_bytes()
        except OSError:
            continue
        if mark.encode() in environment.split(b"\0"):
            found.append(process.pid)
    return found


@pytest.mark.slow
def test_a_run_whose_controller_was_killed_is_logged_as_if_it_had_not_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, home, temporary = RunDir(tmp_path / "run"), tmp_path / "home", tmp_path / "temporary"
    for folder in (home, temporary):
        folder.mkdir()
    mark = f"LOGGED_BY={tmp_path}"
    root = str(Path(__file__).parents[2])
    places = {"HOME": str(home), "TMPDIR": str(temporary), "PYTHONPATH": root, "LOGGED_BY": str(tmp_path)}
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"} | places

    (tmp_path / "hold").touch()
    with subprocess.Popen([sys.executable, DRIVER, str(run_dir.path), "start"], env=environment) as driver:
        while count_epochs(run_dir) < 4 or not (run_dir.loggers / "mlflow.json").exists():
            assert driver.poll() is None, "it has ended before it could be killed"
            time.sleep(0.02)
        driver.kill()
    (tmp_path / "hold").unlink()
    until = time.monotonic() + 60
    while list_marked(mark):
        assert time.monotonic() < until, "processes are left after the controller was killed"
        time.sleep(0.1)
    assert fold(read_events(run_dir.events)).ended is None and count_epochs(run_dir) < 4 * EPOCHS
    subprocess.run([sys.executable, DRIVER, str(run_dir.path), "resume"], env=environment, check=True, timeout=300)

    assert list_marked(mark) == []
    assert list(home.rglob("*")) == [] and list(temporary.rglob("*ensemble-logger*")) == []
    events = read_events(run_dir.events)
    state, used = fold(events), ledger(events)
    assert {member.state for member in state.members.values()} == {"finished"}
    expected = {m.id: {each["epoch"]: epoch_values(each) for each in m.history} for m in state.members.values()}
    assert {tuple(epochs) for epochs in expected.values()} == {tuple(range(EPOCHS))}
    for name in ("tensorboard", "mlflow", "wandb"):
        assert kept(run_dir, name)["events"] == len(events) - 1

    with tensorboard(run_dir.path / "tensorboard") as ask:
        scalars, groups = read_tensorboard(ask), read_session_groups(ask)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    runs = read_mlflow(f"sqlite:///{run_dir.path}/mlflow/mlflow.db", "logged")
    offline = read_wandb(run_dir.path)
    for member, epochs in expected.items():
        for metric in ("valid/accuracy", "train/loss", "train/samples_per_s", "train/waited_share"):
            values = {epoch: known[metric] for epoch, known in epochs.items()}
            assert scalars[member][metric] == pytest.approx(values, rel=1e-6)
            points = sorted(runs[member]["points"][metric], key=lambda point: point[2])
            assert {step: value for step, value, _ in points} == values
            assert {step: row[metric] for step, row in offline[member]["history"].items()} == values
        cpu_s = used.member(member).cpu_s
        assert runs[member]["last"]["cost/cpu_s"] == pytest.approx(cpu_s)
        assert offline[member]["summary"]["cost/cpu_s"] == pytest.approx(cpu_s)
        assert scalars[member]["cost/cpu_s"] == pytest.approx({EPOCHS: cpu_s})
        assert groups[member]["hparams"]["width"] == state.members[member].params["width"]
        assert groups[member]["sessions"][0]["status"] == "STATUS_SUCCESS"

    # What the loggers' processes used is the controller's work, and wandb's service is among them.
    orchestrated = {e["pid"]: e["cpu_s"] for e in events if e["type"] == "usage" and e["role"] == "orchestrate"}
    controllers = {event["pid"] for event in events if event["type"] == "run_started"}
    assert len(set(orchestrated) - controllers) == 6, "three loggers, twice"
    assert min(orchestrated[pid] for pid in set(orchestrated) - controllers) > 0
    assert events[-1]["loggers_cpu_s"] > 0
    assert used.by_role()["orchestrate"].cpu_s == pytest.approx(sum(orchestrated.values()))

    results = json.loads(run_dir.results.read_text())
    assert results["totals"]["cpu_s"] == used.run.cpu_s
    with run_dir.metrics_csv.open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 4 * EPOCHS
