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
from faults_bucket import KEYS, FaultyS3, serve_bucket
from faults_cluster import CHILD_PATH, kill_all, processes_with
from kit.event_dicts import fold, read_events
from kit.finished_runs import of_kind
from kit.leftovers import wait_until

import ensemble
from ensemble.cli.parser import main
from ensemble.store import RunDir, RunState, StoreError
from ensemble.store.mirror_objects import ObjectStore
from ensemble.store.mirror_status import MirrorStatus, load_status

pytestmark = [pytest.mark.more, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

SPEC = Path(__file__).with_name("mirrored_spec.py")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    with serve_bucket("bucket") as (server, environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield server


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
        def is_so() -> bool:
            is_over = self.process.poll() is not None  # what it does last may be what is waited for
            if what():
                return True
            assert not is_over, self.said.read_text()[-3000:]
            return False

        wait_until(is_so, "what is waited for")

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


def test_a_run_goes_on_elsewhere_when_its_machine_is_lost_and_while_the_store_is_slow_fails_and_is_away(
    store: FaultyS3,
    undisturbed: RunState,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url, run, after = "s3://bucket/runs/one", tmp_path / "run", tmp_path / "after"
    settings = ("--set", f"waits={tmp_path / 'goes on'}", "--set", "step_s=0.2")
    first = Driver(tmp_path, "run", SPEC, "--executor", "local", "--run-dir", run, "--mirror", url, *settings)
    first.wait_for(lambda: run.exists() and load_status(RunDir(run)))
    store.delay_s, store.fails_every = 0.1, 2
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{store.sound_port}")  # of this process
    first.wait_for(lambda: is_copied(url))
    secret = KEYS["AWS_SECRET_ACCESS_KEY"]
    assert not any(secret in " ".join(one.cmdline()) for one in processes_with("FAULTS_NODE", first.mark))
    assert state_of(run).ended is None
    first.lose()
    shutil.rmtree(run)
    (tmp_path / "goes on").touch()
    assert main(["fetch", url, str(after)]) == 0 and state_of(after).ended is None
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{store.port}")
    second = Driver(tmp_path, "resume", after)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{store.sound_port}")
    second.wait_for(lambda: of_kind(after, "started")[3:])
    store.go_away()
    second.wait_for(lambda: status_of(after).error and state_of(after).ended and of_kind(after, "logger"))
    capsys.readouterr()
    main(["status", str(after)])
    told = capsys.readouterr().out
    assert f"mirror: {url}: " in told and " behind since " in told, told
    assert ("mirror", "failing") in [(event["logger"], event["state"]) for event in of_kind(after, "logger")]
    store.delay_s, store.fails_every = 0.0, 0
    store.come_back()
    status, said = second.wait()
    assert status == 0 and status_of(after).is_whole, said
    state = state_of(after)
    assert state.starts == 2
    for name, member in undisturbed.members.items():
        again = state.members[name]
        assert (again.weights_sha256, again.metrics) == (member.weights_sha256, member.metrics)
        assert again.attempts == 2 and [epoch.epoch for epoch in again.history] == [0, 1, 2, 3]
    assert state.combined is not None and undisturbed.combined is not None
    assert state.combined.metrics == undisturbed.combined.metrics
    mirrored = state_of(ensemble.fetch(url, tmp_path / "third"))
    assert mirrored.ended is not None and mirrored.combined == state.combined
    assert not [path for path in after.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]


def test_a_store_that_refuses_is_said_before_training_and_at_the_end(
    store: FaultyS3,
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
