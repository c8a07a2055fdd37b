"""A machine that is lost with its disk, and object stores that are slow, refuse or are away."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from faults_bucket import KEYS, S3Proxy, serve_bucket
from faults_cluster import CHILD_PATH, kill_all, processes_with
from kit.event_dicts import fold, read_events
from kit.finished_runs import of_kind

import ensemble
from ensemble.cli.parser import main
from ensemble.store import RunDir, RunState, StoreError
from ensemble.store.mirror_objects import ObjectStore
from ensemble.store.mirror_status import MirrorStatus, load_status

pytestmark = [pytest.mark.more, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

SPEC = Path(__file__).with_name("mirrored_spec.py")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Proxy]:
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    with serve_bucket("bucket") as (proxy, environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield proxy


class Driver:
    def __init__(self, tmp_path: Path, *arguments: object) -> None:
        self.mark = f"{tmp_path}-{time.monotonic_ns()}"
        self.tmp = tmp_path / f"tmp-{time.monotonic_ns()}"
        self.tmp.mkdir()
        environment = {**os.environ, "PYTHONPATH": CHILD_PATH, "FAULTS_NODE": self.mark, "TMPDIR": str(self.tmp)}
        self.said = self.tmp / "said.txt"
        with open(self.said, "wb") as said:
            command = [sys.executable, "-m", "ensemble", *map(str, arguments)]
            pipes: dict[str, Any] = {"stdout": said, "stderr": subprocess.STDOUT, "start_new_session": True}
            self.process = subprocess.Popen(command, env=environment, **pipes)

    def wait(self) -> tuple[int, str]:
        return self.process.wait(timeout=600), self.said.read_text()

    def wait_for(self, what: Callable[[], object]) -> None:
        until = time.monotonic() + 300
        while not what():
            assert self.process.poll() is None, self.said.read_text()[-3000:]
            assert time.monotonic() < until, self.said.read_text()[-3000:]
            time.sleep(0.2)

    def lose(self) -> None:
        """The machine is gone: nothing that it runs ends in order."""
        self.process.send_signal(signal.SIGKILL)
        kill_all(processes_with("FAULTS_NODE", self.mark))
        self.process.wait()
        shutil.rmtree(self.tmp, ignore_errors=True)


def state_of(path: Path) -> RunState:
    return fold(read_events(RunDir(path).events)) if RunDir(path).events.exists() else RunState()


def status_of(path: Path) -> MirrorStatus:
    known = load_status(RunDir(path))
    assert known is not None
    return known


def is_copied(url: str) -> bool:
    """Whether an address has a checkpoint of each member after its first epoch."""
    try:
        manifest = ObjectStore(url).read_manifest()
    except StoreError:
        return False
    paths = [] if manifest is None else list(manifest.files)
    return all(any(path.startswith(f"members/member-{n}/checkpoint-0-") for path in paths) for n in (0, 1))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunState:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    status, said = Driver(run.parent, "run", SPEC, "--executor", "local", "--run-dir", run).wait()
    assert status == 0, said
    return state_of(run)


@pytest.mark.parametrize("kind", ["s3", "file"])
def test_a_run_whose_machine_and_disk_are_lost_goes_on_elsewhere(
    kind: str, undisturbed: RunState, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if kind == "s3":
        request.getfixturevalue("store")
    url = "s3://bucket/runs/one" if kind == "s3" else f"file://{tmp_path}/mirror"
    run, after = tmp_path / "run", tmp_path / "after"
    waits = f"waits={tmp_path / 'goes on'}"
    command = ("run", SPEC, "--executor", "local", "--run-dir", run, "--mirror", url, "--set", waits)
    first = Driver(tmp_path, *command)
    first.wait_for(lambda: is_copied(url))
    assert state_of(run).ended is None
    first.lose()
    shutil.rmtree(run)
    (tmp_path / "goes on").touch()
    assert main(["fetch", url, str(after)]) == 0 and state_of(after).ended is None
    status, printed = Driver(tmp_path, "resume", after).wait()
    assert status == 0, printed
    state = state_of(after)
    assert state.starts == 2 and status_of(after).is_whole
    for name, member in undisturbed.members.items():
        again = state.members[name]
        assert (again.weights_sha256, again.metrics) == (member.weights_sha256, member.metrics)
        assert again.attempts == 2 and [epoch.epoch for epoch in again.history] == [0, 1, 2, 3]
    assert state.combined is not None and undisturbed.combined is not None
    assert state.combined.metrics == undisturbed.combined.metrics
    mirrored = state_of(ensemble.fetch(url, tmp_path / "third"))
    assert mirrored.ended is not None and mirrored.combined == state.combined
    secret = KEYS["AWS_SECRET_ACCESS_KEY"].encode()
    assert not [path for path in after.rglob("*") if path.is_file() and secret in path.read_bytes()]


def test_training_goes_on_while_the_store_is_slow_fails_and_is_away(
    store: S3Proxy,
    undisturbed: RunState,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url, run = "s3://bucket/two", tmp_path / "run"
    command = ("run", SPEC, "--executor", "local", "--run-dir", run, "--mirror", url, "--set", "step_s=0.5")
    driver = Driver(tmp_path, *command)
    driver.wait_for(lambda: run.exists() and load_status(RunDir(run)))
    store.delay_s, store.fails_every = 0.1, 2
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://{}:{}".format(*store.upstream))  # of this process
    driver.wait_for(lambda: is_copied(url))
    for process in processes_with("FAULTS_NODE", driver.mark):
        assert KEYS["AWS_SECRET_ACCESS_KEY"] not in " ".join(process.cmdline())
    store.go_away()
    driver.wait_for(lambda: status_of(run).error and state_of(run).ended and of_kind(run, "logger"))
    main(["status", str(run)])
    told = capsys.readouterr().out
    assert f"mirror: {url}: " in told and " behind since " in told, told
    assert [(event["logger"], event["state"]) for event in of_kind(run, "logger")][:1] == [("mirror", "failing")]
    store.delay_s, store.fails_every = 0.0, 0
    store.come_back()
    status, said = driver.wait()
    assert status == 0 and status_of(run).is_whole, said
    state = state_of(ensemble.fetch(url, tmp_path / "fetched"))
    for name, member in undisturbed.members.items():
        assert state.members[name].weights_sha256 == member.weights_sha256
        assert state.members[name].attempts == 1


def test_a_store_that_refuses_is_said_before_training_and_at_the_end(
    store: S3Proxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("ensemble.controller.ending.MIRROR_END_S", 5.0)
    run = tmp_path / "run"
    given = ["run", str(SPEC), "--executor", "inline", "--run-dir", str(run), "--set", "epochs=1", "--mirror"]
    store.refuses = 403
    assert main([*given, "s3://bucket/three"]) == 2
    assert "s3://bucket/three: cannot cat_file manifest.json" in capsys.readouterr().err
    assert state_of(run).started is None
    store.refuses = 0
    assert main([*given, "s3://no-such-bucket/three"]) == 2
    assert "s3://no-such-bucket/three: cannot write manifest.json" in capsys.readouterr().err

    from ensemble.controller.controller import Controller

    opened = Controller.open

    def fill(controller: Controller) -> None:
        opened(controller)
        store.refuses = 507

    monkeypatch.setattr(Controller, "open", fill)
    assert main([*given, "s3://bucket/three"]) == 75
    assert "mirror: s3://bucket/three: " in caplog.text and "it is not complete" in caplog.text
    store.refuses = 0
    monkeypatch.setattr("ensemble.controller.ending.MIRROR_END_S", 600.0)  # all is to be written
    assert main(["resume", str(run)]) == 0 and status_of(run).is_whole
    assert "results.json" in os.listdir(ensemble.fetch("s3://bucket/three", tmp_path / "fetched"))
