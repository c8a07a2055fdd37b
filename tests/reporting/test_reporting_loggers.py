"""Loggers: the real libraries, written by real processes from logs of runs, read by the libraries' own readers."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from kit.event_dicts import fold, ledger, typed
from kit.leftovers import wait_until
from kit.run_events import Event, list_run
from logger_readers import (
    LIMIT,
    find_observers,
    kept,
    log_run,
    read_mlflow,
    read_session_groups,
    read_tensorboard,
    read_wandb,
    tensorboard,
    write_log,
)

from ensemble.reporting.loggers.observers import Observers
from ensemble.reporting.loggers.points import EpochEnded, PointReader, WentBack, epoch_values
from ensemble.spec import MLflow, TensorBoard, WandB, check_installed, resolve_loggers
from ensemble.spec.loggers import LOGGERS
from ensemble.store import RunDir

EVENTS = list_run(members=8, epochs=6)
EACH: list[Any] = ["tensorboard", pytest.param("wandb", marks=pytest.mark.more)]
EACH += [pytest.param("mlflow", marks=pytest.mark.slow)]
HALF = next(n for n, event in enumerate(EVENTS) if event["type"] == "failed" and event["retry"]) + 1
#: Until some members are declared, others not yet.
FEW = next(n for n, event in enumerate(EVENTS) if event["type"] == "member" and event["member"] == "member-3")


def expected(events: list[Event] = EVENTS) -> dict[str, dict[int, dict[str, float]]]:
    """The metrics of each member's final lineage, by epoch."""
    members = fold(events).members
    return {name: {epoch.epoch: epoch_values(epoch) for epoch in of.history} for name, of in members.items()}


LAST_T = EVENTS[-1]["t"]


def find(type: str, member: str) -> Event:
    return next(event for event in EVENTS if event["type"] == type and event["member"] == member)


def make_eventful() -> list[Event]:
    """member-1 is declared twice; MLflow refuses names of member-2; member-3 loses its checkpoints at last."""
    events = []
    for event in EVENTS[:-1]:
        if event.get("member") == "member-2" and event["type"] == "member":
            event = {**event, "params": {**event["params"], "layer.0/é": [1, 2], "long": "x" * 9000}}
        if event.get("member") == "member-2" and event["type"] in ("epoch", "finished"):
            event = {**event, "metrics": {**event["metrics"], "f1@5 (%)": 0.5}}
        events.append(event)
        if event is find("member", "member-1"):
            events.append({**event, "params": {**event["params"], "lr": 0.5}})
    epochs = [event for event in EVENTS if event["type"] == "epoch" and event["member"] == "member-3"][:2]
    return [
        *events,
        {**find("started", "member-3"), "t": LAST_T, "epoch": 0, "attempt": 1},
        *({**e, "t": LAST_T + 1 + e["epoch"], "train_loss": 7.0 + e["epoch"], "attempt": 1} for e in epochs),
        {**find("finished", "member-3"), "t": LAST_T + 3, "epoch": 2, "attempt": 1},
        {**EVENTS[-1], "t": LAST_T + 4},
    ]


EVENTFUL = make_eventful()


def uri_of(run_dir: RunDir) -> str:
    return f"sqlite:///{run_dir.path}/mlflow/mlflow.db"


@pytest.fixture(autouse=True)
def _no_telemetry_and_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setattr(LIMIT, 600.0)


def read_epochs(events: list[Event]) -> list[tuple[str, int]]:
    reader = PointReader()
    points = [point for event in events for point in reader.read(typed(event)) if point.member == "member-3"]
    return [(type(p).__name__, p.epoch) for p in points if isinstance(p, (WentBack, EpochEnded))]


def test_a_member_that_goes_back_logs_its_epochs_again_and_one_that_was_lost_from_the_checkpoint() -> None:
    of_member = {(e["type"], e.get("epoch")): e for e in EVENTS if e.get("member") == "member-3"}
    again, lost = of_member["started", 3], of_member["epoch", 2]
    every = [("EpochEnded", n) for n in range(6)]
    assert read_epochs(EVENTS) == every  # the epoch that it died in had not ended
    went_back = [again | {"epoch": 1} if event is again else event for event in EVENTS]
    assert read_epochs(went_back) == [*every[:3], ("WentBack", 1), *every[3:]]
    last_epoch = {name: value for name, value in lost.items() if name not in ("v", "t", "type", "member")}
    from_checkpoint = [again | {"last_epoch": last_epoch} if e is again else e for e in EVENTS if e is not lost]
    assert read_epochs(from_checkpoint) == every


def log_apart(folder: Path, events: list[Event], *loggers: Any) -> tuple[RunDir, list[str]]:
    """Log a run with a home and a network of its own; the run directory, and what was asked, written or left."""
    mark = f"MARK={folder}".encode()
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.MonkeyPatch.context() as patch:
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "WANDB_BASE_URL"):
            patch.setenv(name, f"http://127.0.0.1:{server.getsockname()[1]}")
        for name in ("NO_PROXY", "no_proxy", "MLFLOW_DISABLE_TELEMETRY", "PYTEST_CURRENT_TEST", "CI"):
            patch.delenv(name, raising=False)
        patch.delenv("XDG_CONFIG_HOME", raising=False)
        for name in ("HOME", "TMPDIR"):
            (folder / name).mkdir()
            patch.setenv(name, str(folder / name))
        patch.setenv("WANDB_API_KEY", "0" * 40)
        patch.setenv("MARK", str(folder))
        run_dir = log_run(folder / "run", events, *loggers)
        server.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            return run_dir, [f"it asked from {server.accept()[1]}"]
    alive = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):
            environment = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
            alive += [str(process)] if mark in environment and process.pid != os.getpid() else []
    written = [str(path) for path in folder.rglob("*") if (folder / "run") not in (path, *path.parents)]
    return run_dir, [*alive, *{*written} - {str(folder / name) for name in ("HOME", "TMPDIR")}]


def test_a_run_is_logged_with_nothing_sent_written_elsewhere_or_left_running(tmp_path: Path) -> None:
    run_dir, traces = log_apart(tmp_path, EVENTS, "tensorboard")
    assert traces == []
    losses = {step: values["train/loss"] for step, values in expected()["member-1"].items()}
    written = read_tensorboard(run_dir.path / "tensorboard")["member-1"]
    assert written["train/loss"] == pytest.approx(losses, rel=1e-6)


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, list[str]]:
    folder = tmp_path_factory.mktemp("logged")
    return log_apart(folder, EVENTFUL, "tensorboard", "mlflow", WandB(project="theses"))


@pytest.mark.more
def test_no_logger_sends_writes_elsewhere_or_leaves_anything(logged: tuple[RunDir, list[str]]) -> None:
    assert logged[1] == []


@pytest.mark.more
def test_tensorboard_shows_curves_and_the_hparams_view(logged: tuple[RunDir, list[str]]) -> None:
    used, scalars = ledger(EVENTFUL), read_tensorboard(logged[0].path / "tensorboard")
    with tensorboard(logged[0].path / "tensorboard") as ask:
        groups, losses = read_session_groups(ask), ask("plugin/scalars/scalars?run=member-3&tag=train%2Floss")
        experiment = ask("plugin/hparams/experiment", {"experimentName": ""})
    assert expected(EVENTFUL)["member-3"][1]["train/loss"] == 8.0
    assert {step: value for _, step, value in losses} == scalars["member-3"]["train/loss"] and len(losses) == 2
    for member, epochs in expected(EVENTFUL).items():
        for epoch, values in epochs.items():
            assert {tag: scalars[member][tag][epoch] for tag in values} == pytest.approx(values, rel=1e-6)
        assert set(scalars[member]["valid/accuracy"]) == set(epochs)
        assert scalars[member]["cost/cpu_s"] == pytest.approx({len(epochs): used.member(member).cpu_s})
    assert scalars["."]["cost/cpu_s"][0] == pytest.approx(used.run.cpu_s)
    assert "ensemble/accuracy" in scalars["."]
    varied = {info["name"] for info in experiment["hparamInfos"] if info["differs"]}
    assert {"width", "lr", "optimizer"} <= varied and set(groups) == set(expected())
    assert groups["member-1"]["hparams"].items() >= {"width": 32, "lr": 0.5, "optimizer": "adam"}.items()
    values = {value["name"]["tag"]: value["value"] for value in groups["member-1"]["metricValues"]}
    assert values["valid/accuracy"] == pytest.approx(expected()["member-1"][5]["valid/accuracy"])
    assert values["cost/energy_j"] == pytest.approx(used.member("member-1").energy_j)
    words = {"finished": "STATUS_SUCCESS", "failed": "STATUS_FAILURE"}
    states = {member.id: words[member.state] for member in fold(EVENTFUL).members.values()}
    assert {name: group["sessions"][0]["status"] for name, group in groups.items()} == states


@pytest.mark.more
def test_mlflow_has_a_run_with_one_nested_in_it_for_each_member(logged: tuple[RunDir, list[str]]) -> None:
    runs, used, state = read_mlflow(uri_of(logged[0]), "digits"), ledger(EVENTFUL), fold(EVENTFUL)
    parent = runs.pop("digits")
    assert {run["parent"] for run in runs.values()} == {parent["id"]} and parent["parent"] is None
    assert parent["status"] == "FINISHED" and parent["last"]["cost/energy_j"] == pytest.approx(used.run.energy_j)
    for id, epochs in expected(EVENTFUL).items():
        run, member = runs[id], state.members[id]
        for name in ("valid/accuracy", "train/loss", "train/lr", "train/samples_per_s", "train/waited_share"):
            by_time = sorted(run["points"][name], key=lambda point: point[2])
            points = {step: value for step, value, _ in by_time}
            wanted = {epoch: values[name] for epoch, values in epochs.items()}
            assert points.items() >= wanted.items() and (id == "member-3" or points == wanted)
        assert run["last"]["cost/cpu_s"] == used.member(id).cpu_s
        tags = {"energy_origin": used.member(id).origin, "state": member.state, "attempts": str(member.attempts)}
        assert run["tags"].items() >= {f"ensemble.{name}": value for name, value in tags.items()}.items()
        assert run["params"]["optimizer"] == member.params["optimizer"]
    assert len(runs["member-3"]["points"]["train/loss"]) == 8, "what it had before is in its history"
    assert runs["member-1"]["params"]["lr"] == "0.5"
    assert runs["member-2"]["last"]["valid/f1_5 ___"] == 0.5
    assert runs["member-2"]["params"]["layer.0/_"] == "[1, 2]" and len(runs["member-2"]["params"]["long"]) == 6000
    failed = [name for name, run in runs.items() if run["status"] == "FAILED"]
    assert failed == [member.id for member in state.members.values() if member.state == "failed"] != []
    assert runs[failed[0]]["tags"]["ensemble.error"].startswith("nan: loss is nan")


@pytest.mark.more
def test_wandb_has_a_run_for_each_member_in_one_group(logged: tuple[RunDir, list[str]]) -> None:
    runs, used, state = read_wandb(logged[0].path), ledger(EVENTFUL), fold(EVENTFUL)
    assert runs.pop("digits")["summary"]["cost/cpu_s"] == pytest.approx(used.run.cpu_s)
    assert len({run["group"] for run in runs.values()}) == 1
    assert {run["project"] for run in runs.values()} == {"theses"}
    for id, epochs in expected(EVENTFUL).items():
        run, member = runs[id], state.members[id]
        rows = run["history"].items()
        assert {step: {k: v for k, v in row.items() if "/" in k} for step, row in rows} == epochs
        times = {epoch.epoch: epoch.t for epoch in member.history}
        assert {step: row["_timestamp"] for step, row in rows} == pytest.approx(times)
        assert run["config"].items() >= member.params.items() and run["summary"]["state"] == member.state
        assert run["summary"]["cost/energy_j"] == pytest.approx(used.member(id).energy_j)
        assert run["exit"] == (member.state == "failed")


Whole = Callable[[str], Any]


@pytest.fixture(scope="module")
def log_whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("whole")
    return functools.cache(lambda name: content_of(name, log_run(folder / name, EVENTS, name)))


def run_until(processes: Observers, run_dir: RunDir, name: str) -> psutil.Process:
    """Starts it, and waits until the logger has written something."""
    before = set(psutil.Process().children())
    processes.start()

    def has_written() -> bool:
        assert [event for event in processes.read() if event["state"] != "works"] == []
        return (run_dir.loggers / f"{name}.json").exists() and kept(run_dir, name)["events"] > 0

    wait_until(has_written, "nothing is written")
    [process] = set(psutil.Process().children()) - before
    return process


@pytest.mark.parametrize("name", EACH)
def test_after_a_kill_no_points_are_there_twice_or_missing(name: str, tmp_path: Path, log_whole: Whole) -> None:
    run_dir = write_log(tmp_path / "run", EVENTS[:-1] if name == "wandb" else EVENTS[:HALF])
    processes = Observers(run_dir, resolve_loggers([name]))
    if name == "wandb":  # it writes at the end: the kill comes while it does
        processes.start()
        while (observer := find_observers()) is None:  # what has just been started may have no command line yet
            pass
        ender = threading.Thread(target=processes.end_loggers, args=[typed(EVENTS[-1]), 8])
        ender.start()
        while len(list(run_dir.path.glob("wandb/wandb/offline-run-*/*.wandb"))) < 3:
            time.sleep(0.001)
        observer.kill()
        ender.join()  # the process was started again, and has written the rest
    else:
        process = run_until(processes, run_dir, name)
        assert kept(run_dir, name)["events"] <= HALF
        [before] = processes.make_usage("here")
        assert before["pid"] == process.pid and before["cpu_s"] > 0.1 and before["role"] == "orchestrate"
        process.kill()
        process.wait()
        write_log(run_dir.path, EVENTS[:-1])
        assert processes.end_loggers(typed(EVENTS[-1]), members=8) == []
        after = {event["pid"]: event["cpu_s"] for event in processes.make_usage("here")}
        assert len(after) == 2 and after[process.pid] >= before["cpu_s"]
    assert content_of(name, run_dir) == log_whole(name)


def content_of(name: str, run_dir: RunDir) -> Any:
    if name == "tensorboard":
        root = run_dir.path / name
        return {path.relative_to(root): path.read_bytes() for path in root.rglob("events.out.*")}
    if name == "mlflow":
        runs = read_mlflow(uri_of(run_dir), "digits")
        return {name: [run["points"], run["params"], run["status"]] for name, run in runs.items()}
    runs = read_wandb(run_dir.path)
    return {name: [run["history"].keys(), run["config"].get("width"), run["exit"]] for name, run in runs.items()}


@pytest.mark.more
def test_a_run_that_was_deleted_from_mlflow_is_written_again_and_one_declared_anew_kept(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    run_dir = log_run(tmp_path / "run", EVENTS[:-1], "mlflow")
    before = read_mlflow(uri_of(run_dir), "digits")
    MlflowClient(tracking_uri=uri_of(run_dir)).delete_run(before["member-1"]["id"])
    fewer = {**find("member", "member-0"), "params": {"width": 16}, "t": LAST_T}
    log_run(run_dir.path, [*EVENTS[:-1], fewer, EVENTS[-1]], "mlflow")
    after = read_mlflow(uri_of(run_dir), "digits")
    for member in ("member-0", "member-1"):
        assert after[member]["points"]["train/loss"] == before[member]["points"]["train/loss"]
    assert after["member-0"]["id"] == before["member-0"]["id"]


@pytest.mark.more
@pytest.mark.parametrize(
    ("name", "counted"), [("tensorboard", HALF), pytest.param("mlflow", FEW, marks=pytest.mark.slow), ("wandb", 0)]
)
def test_nothing_beyond_the_file_is_there_twice(name: str, counted: int, tmp_path: Path, log_whole: Whole) -> None:
    run_dir = write_log(tmp_path / "run", EVENTS[:counted])
    processes = Observers(run_dir, resolve_loggers([name]))
    if counted:
        run_until(processes, run_dir, name)
    processes.close()
    file = run_dir.loggers / f"{name}.json"
    before = file.read_bytes() if counted else None
    log_run(run_dir.path, EVENTS, name)
    file.unlink()  # as if it had been killed before it could replace the file
    if before is not None:
        file.write_bytes(before)
    log_run(run_dir.path, EVENTS, name)
    assert content_of(name, run_dir) == log_whole(name)


@pytest.mark.more
@pytest.mark.parametrize("name", EACH)
def test_a_run_that_was_stopped_and_resumed_is_logged_as_one(name: str, tmp_path: Path) -> None:
    t = EVENTS[HALF - 1]["t"]
    stopped = {"v": 2, "t": t, "type": "run_stopped", "reason": "request"}
    # What a resume places and starts again is in the log already; members lose no epoch.
    events = [*EVENTS[:HALF], stopped, {**EVENTS[0], "t": t + 0.001, "resumed": True}, *EVENTS[HALF:]]
    run_dir = log_run(tmp_path / "run", [*EVENTS[:HALF], stopped], name)
    log_run(run_dir.path, events, name)
    whole = log_run(tmp_path / "whole", events, name)
    if name == "tensorboard":
        assert read_tensorboard(run_dir.path / name) == read_tensorboard(whole.path / name)
        with tensorboard(run_dir.path / name) as ask:
            status = {group: each["sessions"][0]["status"] for group, each in read_session_groups(ask).items()}
        assert (status["member-0"], status["member-6"]) == ("STATUS_SUCCESS", "STATUS_FAILURE")
    elif name == "mlflow":
        logged, of_whole = (read_mlflow(uri_of(run), "digits") for run in (run_dir, whole))
        for member, run in logged.items():
            assert (run["last"], run["status"]) == (of_whole[member]["last"], of_whole[member]["status"])
            if member != "digits":
                assert run["points"]["valid/accuracy"] == of_whole[member]["points"]["valid/accuracy"]
    else:
        assert content_of(name, run_dir) == content_of(name, whole)


@pytest.mark.more
def test_event_files_that_are_gone_are_written_again_and_elsewhere_anew(tmp_path: Path, log_whole: Whole) -> None:
    run_dir, whole = log_run(tmp_path / "run", EVENTS[:-1], "tensorboard"), log_whole("tensorboard")
    gone, torn, *_ = sorted((run_dir.path / "tensorboard").rglob("events.out.*"))
    gone.unlink()
    os.truncate(torn, 10)
    log_run(run_dir.path, EVENTS, "tensorboard")
    assert content_of("tensorboard", run_dir) == whole
    log_run(run_dir.path, EVENTS, TensorBoard(dir=str(tmp_path / "elsewhere")))
    place = f"digits-{EVENTS[0]['run_id'][:8]}"  # so that another run in this directory is apart
    assert all((tmp_path / "elsewhere" / place / path).read_bytes() == data for path, data in whole.items())


@pytest.mark.more
def test_a_server_that_is_gone_is_reported_once_and_what_is_missing_at_the_end(tmp_path: Path) -> None:
    run_dir = write_log(tmp_path / "run", EVENTS[:-1])
    nobody = "http://127.0.0.1:9"  # the port `discard`
    processes = Observers(run_dir, resolve_loggers([MLflow(uri=nobody), "tensorboard"]))
    processes.start()
    [event] = wait_until(processes.read, "nothing is said")
    assert (event["logger"], event["state"]) == ("mlflow", "failing") and "it is tried again" in event["detail"]
    [missing] = processes.end_loggers(typed(EVENTS[-1]), members=8)
    assert missing.startswith("mlflow: ") and missing.endswith("46 of 46 epochs and the final figures are missing")
    assert kept(run_dir, "tensorboard")["events"] == len(EVENTS) - 1


def test_a_logger_that_hangs_does_not_hold_the_end_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir, why = write_log(tmp_path / "run", EVENTS[:-1]), "has not ended within 1 s"
    processes = Observers(run_dir, resolve_loggers(["tensorboard"]))
    process = run_until(processes, run_dir, "tensorboard")
    process.suspend()
    monkeypatch.setattr(LIMIT, 0.1)
    assert processes.end_loggers(typed(EVENTS[-1]), members=1) == [f"tensorboard: {why}; the log's end is missing"]
    assert not process.is_running()


OF_A_STRANGER = """
from ensemble.extend import Logger
class Lines(Logger):
    def open(self, state, ids):
        self.count = ids.get("count", 0)
    def write(self, points):
        self.count += len(points)
        return {"count": self.count}
    def end(self, end, state):
        with open(self.options["file"], "a") as file:
            print(state.name, self.count, file=file)
        return {"count": self.count}
"""


def test_a_logger_of_another_package_is_used_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    LOGGERS.names()  # without it, to be set back
    info = tmp_path / "other" / "other-2.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 2.0\n")
    (info / "entry_points.txt").write_text("[ray_ensemble.loggers]\nlines = their_lines:Lines\n")
    (tmp_path / "other" / "their_lines.py").write_text(OF_A_STRANGER)
    monkeypatch.syspath_prepend(str(tmp_path / "other"))
    monkeypatch.delitem(vars(LOGGERS), "_foreign")
    declared = [{"name": "lines", "file": str(tmp_path / "lines")}]
    check_installed(declared)
    run_dir = log_run(tmp_path / "run", EVENTS, *declared)
    reader = PointReader()
    points = sum(len(reader.read(typed(event))) for event in EVENTS[:-1])
    assert (tmp_path / "lines").read_text().split()[-1] == str(points)
    assert kept(run_dir, "lines")["ids"] == {"count": points}
