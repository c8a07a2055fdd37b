"""A machine that is lost with its disk, and object stores that are slow, refuse or are away."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faults_cluster import CHILD_PATH, Driver, kill_all, processes_with
from faults_members import declared, lost_and_doubled
from kit.event_dicts import fold, read_events
from kit.finished_runs import finished_hashes, of_kind, read_state

import ensemble
from ensemble.cli.parser import main
from ensemble.store import RunDir, StoreError
from ensemble.store.mirror_objects import ObjectStore
from ensemble.store.mirror_status import MirrorStatus, load_status

pytestmark = [pytest.mark.more, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

EPOCHS, WIDTHS = 4, [1, 1]
KEYS = {"AWS_ACCESS_KEY_ID": "AKIAEXAMPLE", "AWS_SECRET_ACCESS_KEY": "told-by-the-environment"}


class FaultyS3:
    """An S3 server on the loopback interface.

    Attributes:
        delay_s: before each request is answered.
        fails_every: each so-many-th request is answered with status 503; 0: none.
        refuses: status that all requests are answered with, such as 403; 0: none.
        address, sound: where it listens; where nothing is slow or refused.
    """

    def __init__(self) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app

        self.delay_s, self.fails_every, self.refuses, self._port, self._is_away = 0.0, 0, 0, 0, False
        self._numbers, self._app = itertools.count(1), DomainDispatcherApplication(create_backend_app)
        self.sound = f"http://127.0.0.1:{self._serve(self._app, 0).port}"
        self.come_back()
        self.address = f"http://127.0.0.1:{self._port}"

    def __call__(self, environment: dict[str, Any], start: Any) -> Any:
        time.sleep(self.delay_s)
        if self._is_away:
            environment["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionAbortedError
        fails = self.fails_every and next(self._numbers) % self.fails_every == 0
        if status := self.refuses or (503 if fails else 0):
            environment["wsgi.input"].read(int(environment.get("CONTENT_LENGTH") or 0))
            start(f"{status} no", [("Content-Length", "0")])
            return [b""]
        return self._app(environment, start)

    def _serve(self, app: Any, port: int) -> Any:
        from werkzeug.serving import make_server

        server = make_server("127.0.0.1", port, app, threaded=True)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        return server

    def come_back(self) -> None:
        self._is_away = False
        self._server = self._serve(self, self._port)
        self._port = self._server.port

    def go_away(self) -> None:
        """Refuse connections from now on, and break those that there are."""
        self._is_away = True
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    """With an empty bucket, in this process's environment."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    import boto3

    made = FaultyS3()
    usual = {"AWS_DEFAULT_REGION": "us-east-1", "AWS_CONFIG_FILE": "/dev/null", **KEYS}
    for name, value in (usual | {"AWS_SHARED_CREDENTIALS_FILE": "/dev/null"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", made.address)
    boto3.client("s3", endpoint_url=made.sound).create_bucket(Bucket="bucket")
    yield made
    made.go_away()


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


def test_a_run_goes_on_elsewhere_when_its_machine_is_lost_and_while_the_store_is_slow_fails_and_is_away(
    store: FaultyS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url, run, after, go_on = "s3://bucket/runs/one", tmp_path / "run", tmp_path / "after", tmp_path / "goes on"
    waits = {"fault": "wait", "after": 1, "from_epoch": 2, "marker": str(go_on)}
    told: dict[str, Any] = {"executor": "local", "widths": WIDTHS, "epochs": EPOCHS, "hang_timeout_s": 600.0}
    told |= {"of_member": {0: waits, 1: waits}, "step_s": 0.1}
    (tmp := tmp_path / "tmp").mkdir()
    of_machine = {**os.environ, "PYTHONPATH": CHILD_PATH, "FAULTS_NODE": str(run), "TMPDIR": str(tmp)}
    first = Driver(run, of_machine, mirror=url, **told)
    first.wait_for(lambda: run.exists() and load_status(RunDir(run)))
    store.delay_s, store.fails_every = 0.1, 2
    monkeypatch.setenv("AWS_ENDPOINT_URL", store.sound)
    first.wait_for(lambda: is_copied(url))
    secret = KEYS["AWS_SECRET_ACCESS_KEY"]
    assert not any(secret in " ".join(one.cmdline()) for one in processes_with("FAULTS_NODE", str(run)))
    assert read_state(run).ended is None
    first.process.send_signal(signal.SIGKILL)  # the machine is gone: nothing that it runs ends in order
    kill_all(processes_with("FAULTS_NODE", str(run)))
    first.process.wait()
    shutil.rmtree(tmp)
    shutil.rmtree(run)
    assert main(["fetch", url, str(after)]) == 0 and read_state(after).ended is None
    second = Driver(
        after, {**os.environ, "PYTHONPATH": CHILD_PATH, "AWS_ENDPOINT_URL": store.address}, resumes=True
    )
    second.wait_for(lambda: of_kind(after, "started")[3:])
    store.go_away()
    (files := after / "members" / "member-0" / "files").mkdir(exist_ok=True)
    (files / "note").touch()  # what is to be copied now, though all else may have been
    second.wait_for(lambda: of_kind(after, "logger"))
    go_on.touch()  # when the run has ended, its log takes no more news of the mirror
    second.wait_for(lambda: status_of(after).error and read_state(after).ended)
    capsys.readouterr()
    main(["status", str(after)])
    said = capsys.readouterr().out
    assert f"mirror: {url}: " in said and " behind since " in said, said
    assert ("mirror", "failing") in [(event["logger"], event["state"]) for event in of_kind(after, "logger")]
    store.delay_s, store.fails_every = 0.0, 0
    store.come_back()
    code, err = second.end()
    assert code == 0 and status_of(after).is_whole, err
    state = read_state(after)
    ensemble.submit(declared(tmp_path / "of-alone", WIDTHS, epochs=EPOCHS), tmp_path / "alone", "inline").wait()
    undisturbed = read_state(tmp_path / "alone")
    assert state.starts == 2 and finished_hashes(after) == finished_hashes(tmp_path / "alone")
    for name, member in undisturbed.members.items():
        again = state.members[name]
        assert again.metrics == member.metrics and again.attempts == 2
        assert [epoch.epoch for epoch in again.history] == list(range(EPOCHS))
        assert lost_and_doubled(tmp_path / "account", name, 1, EPOCHS) == (0, 0)
    assert state.combined is not None and undisturbed.combined is not None
    assert state.combined.metrics == undisturbed.combined.metrics
    mirrored = fold(read_events(ensemble.fetch(url, tmp_path / "third") / "events.jsonl"))
    assert mirrored.ended is not None and mirrored.combined == state.combined
    assert not [path for path in after.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]


def test_a_store_that_refuses_is_said_before_training_and_at_the_end(
    store: FaultyS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from ensemble.controller.controller import Controller

    made, run, opened = declared(tmp_path / "account", WIDTHS, epochs=1), tmp_path / "run", Controller.open
    monkeypatch.setattr("ensemble.controller.ending.MIRROR_END_S", 5.0)
    for store.refuses, bucket, verb in ((403, "bucket", "cat_file"), (0, "no-such-bucket", "write")):
        with pytest.raises(StoreError, match=f"s3://{bucket}/three: cannot {verb} manifest.json"):
            ensemble.submit(made, run, "inline", mirror=f"s3://{bucket}/three")
        assert not of_kind(run, "run_started")

    def fill(controller: Controller) -> None:
        opened(controller)
        store.refuses = 507

    monkeypatch.setattr(Controller, "open", fill)
    ensemble.submit(made, run, "inline", mirror="s3://bucket/three").wait()
    assert "mirror: s3://bucket/three: " in caplog.text and "it is not complete" in caplog.text
    store.refuses = 0
    monkeypatch.setattr("ensemble.controller.ending.MIRROR_END_S", 600.0)  # all is to be written
    monkeypatch.setattr(Controller, "open", opened)
    ensemble.resume(run).wait()
    assert status_of(run).is_whole
    assert "results.json" in os.listdir(ensemble.fetch("s3://bucket/three", tmp_path / "fetched"))
