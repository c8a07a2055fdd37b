"""Runs loggers over logs of runs that never were, and reads what they wrote by the libraries' own readers."""

from __future__ import annotations

import contextlib
import json
import re
import struct
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from kit.event_dicts import typed
from kit.run_events import Event, write_run

from ensemble.reporting.loggers.observers import Observers
from ensemble.spec import resolve_loggers
from ensemble.store import RunDir

#: Of the time in which a logger must have ended, however busy the machine is, for each member.
LIMIT = "ensemble.reporting.loggers.observers.END_S"

Scalars = dict[str, dict[str, dict[int, float]]]


def write_log(run_dir: Path, events: Sequence[Event]) -> RunDir:
    return RunDir(write_run(run_dir, list(events)))


def log_run(run_dir: Path, events: Sequence[Event], *loggers: Any) -> RunDir:
    """Log a whole run by processes of loggers; the last event is not in its log yet, as at the end of a run."""
    processes = Observers(write_log(run_dir, events[:-1]), resolve_loggers(loggers))
    processes.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LIMIT, 600.0)
        assert processes.end_loggers(typed(events[-1]), members=8) == []
    return write_log(run_dir, events)


def find_observers() -> psutil.Process | None:
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if "observer_main" in str(process.cmdline()):
                return process
    return None


def kept(run_dir: RunDir, name: str) -> dict[str, Any]:
    return dict(json.loads((run_dir.loggers / f"{name}.json").read_text()))


@contextmanager
def tensorboard(folder: Path) -> Iterator[Any]:
    """Serves a folder by TensorBoard on loopback, read in Rust; yields what asks its HTTP API."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--host", "127.0.0.1"]
    command += ["--port", "0", "--reload_interval", "1", "--load_fast", "true"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        address = next(found[0] for line in server.stderr if (found := re.search(r"http://\S+:\d+", line)))

        def ask(path: str, body: Any = None) -> Any:
            data = None if body is None else json.dumps(body).encode()
            request = urllib.request.Request(f"{address}/data/{path}", data, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=300) as answer:
                return json.load(answer)

        runs = {str(path.parent.relative_to(folder)) for path in folder.rglob("events.out.tfevents.*")}
        while set(ask("runs")) != runs:  # until it has loaded every run
            pass
        yield ask
    finally:
        server.terminate()
        server.communicate()


def read_tensorboard(folder: Path) -> Scalars:
    """All scalars of members, as TensorBoard's own reader gives them: each step once, else this fails."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: Scalars = {}
    for member in {str(path.parent.relative_to(folder)) for path in folder.rglob("events.out.tfevents.*")}:
        reader = EventAccumulator(str(folder / member), {"scalars": 0}).Reload()
        for tag in reader.Tags()["scalars"]:
            points = {point.step: point.value for point in reader.Scalars(tag)}
            assert [point.step for point in reader.Scalars(tag)] == sorted(points), (member, tag)
            found.setdefault(member, {})[tag] = points
    return found


def read_session_groups(ask: Any) -> dict[str, dict[str, Any]]:
    statuses = [f"STATUS_{status}" for status in ("SUCCESS", "FAILURE", "RUNNING", "UNKNOWN")]
    body = {"experimentName": "", "allowedStatuses": statuses, "colParams": [], "startIndex": 0, "sliceSize": 100}
    groups = ask("plugin/hparams/session_groups", body)["sessionGroups"]
    return {group["name"].split("/")[-1]: group for group in groups}


def read_mlflow(uri: str, experiment: str) -> dict[str, dict[str, Any]]:
    """Each run by its name: status, params, tags, parent, and `points`: each metric's (step, value, timestamp)."""
    from mlflow.tracking import MlflowClient

    client, found = MlflowClient(tracking_uri=uri), dict[str, dict[str, Any]]()
    for run in client.search_runs([client.get_experiment_by_name(experiment).experiment_id], max_results=1000):
        info, data = run.info, run.data
        assert info.run_name not in found
        found[info.run_name] = {"id": info.run_id, "status": info.status, "params": data.params, "tags": data.tags}
        found[info.run_name] |= {"parent": data.tags.get("mlflow.parentRunId"), "last": data.metrics, "points": {}}
        for name in data.metrics:
            history = client.get_metric_history(info.run_id, name)
            found[info.run_name]["points"][name] = [(m.step, m.value, m.timestamp) for m in history]
    return found


def read_wandb(run_dir: Path) -> dict[str, dict[str, Any]]:
    from wandb.proto.wandb_internal_pb2 import Record

    found: dict[str, dict[str, Any]] = {}
    for file in sorted(run_dir.glob("wandb/wandb/offline-run-*/*.wandb")):
        run: dict[str, Any] = {"history": {}, "summary": {}, "config": {}, "exit": None}
        for data in _read_leveldb(file.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                run |= {"name": record.run.display_name, "group": record.run.run_group}
                run |= {"project": record.run.project, "id": record.run.run_id}
                run["config"] |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            elif kind == "history":
                assert record.history.step.num not in run["history"], file
                items = record.history.item
                row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in items}
                run["history"][record.history.step.num] = row
            elif kind == "summary":
                items = record.summary.update
                run["summary"] |= {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}
            elif kind == "exit":
                run["exit"] = record.exit.exit_code
        assert run["name"] not in found
        found[run["name"]] = run
    return found


def _read_leveldb(data: bytes, block: int = 2**15) -> Iterator[bytes]:
    """The records of a file in LevelDB's log format, after wandb's header of seven bytes."""
    assert data[:4] == b":W&B"
    at, parts = 7, b""
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""
