"""The Multi-Process Service: how its control daemon is called, and what workers are told; by a stand-in for it."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import selectors
import stat
import sys
from pathlib import Path

import pytest
from kit.execute_members import an_ensemble, make_job

from ensemble.executors.host import describe_host
from ensemble.executors.mps import ABSENT, BINARY, Mps, make_client_environment
from ensemble.executors.node_services import NodeServices
from ensemble.executors.spawn import make_worker_environment
from ensemble.train.job import Job

STAND_IN = f"""#!{sys.executable}
import json, os, sys
told = {{name: value for name, value in os.environ.items() if name.startswith("CUDA")}}
with open(os.environ["STAND_IN_LOG"], "a") as log:
    print(json.dumps([sys.argv[1:], sys.stdin.read(), told]), file=log)
sys.exit(int(os.environ.get("STAND_IN_CODE", 0)))
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    binary = tmp_path / "bin" / BINARY
    binary.parent.mkdir()
    binary.write_text(STAND_IN)
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", str(binary.parent), prepend=os.pathsep)
    monkeypatch.setenv("STAND_IN_LOG", str(tmp_path / "calls"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    return tmp_path / "calls"


def said(calls: Path) -> list[list[object]]:
    return [json.loads(line) for line in calls.read_text().splitlines()]


def a_job(share: float) -> Job:
    identity = dataclasses.replace(an_ensemble().identify(0), gpus_per_worker=share)
    return make_job(identity, "r", interface="lo", device="cuda:0")


def test_a_node_with_gpus_starts_a_daemon_of_its_own_and_ends_it(
    calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_gpu(name: str, **options: object) -> object:
        return dataclasses.replace(describe_host(name), gpus=("GPU",))

    monkeypatch.setattr("ensemble.executors.node_services.describe_host", with_gpu)
    with selectors.DefaultSelector() as selector:
        services = NodeServices("a", an_ensemble(mps=True), selector, lambda event: None)
        pipes = services.directory / "mps"
        assert stat.S_IMODE(pipes.stat().st_mode) == 0o700
        told = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_MPS_PIPE_DIRECTORY": str(pipes)}
        told["CUDA_MPS_LOG_DIRECTORY"] = str(services.directory / "mps-log")
        environment = make_worker_environment(a_job(0.301), "GPU-1", services.directory)
        assert environment.items() >= {**told, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "31"}.items()
        assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-1"
        assert "MPS" not in "".join(make_worker_environment(a_job(1.0), None, services.directory))
        services.close()
    assert said(calls) == [[["-d"], "", told], [[], "quit\n", told]], "it counts all devices, not some"
    assert not pipes.exists()


def test_nobody_is_told_where_it_was_not_asked_for_and_its_absence_is_one_line(
    calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with selectors.DefaultSelector() as selector:
        services = NodeServices("a", an_ensemble(mps=True), selector, lambda event: None)
        assert "CUDA_MPS_PIPE_DIRECTORY" not in make_worker_environment(a_job(0.5), "GPU-1", services.directory)
        services.close()
    assert not calls.exists(), "there is no GPU here"
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        mps = Mps(tmp_path)
    mps.close()
    assert not mps.running and caplog.messages == [f"mps=True: {ABSENT}"]
    assert make_client_environment(tmp_path, 0.5) == {}


def test_one_that_does_not_start_is_said_and_one_left_behind_is_ended(
    calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left_behind = Mps(tmp_path)  # its controller is killed
    assert left_behind.running
    monkeypatch.setenv("STAND_IN_CODE", "1")
    with caplog.at_level(logging.WARNING):
        assert not Mps(tmp_path).running
    assert [call[:2] for call in said(calls)] == [[["-d"], ""], [[], "quit\n"], [["-d"], ""]]
    assert len(caplog.messages) == 1 and "exit code 1" in caplog.messages[0]
    assert make_client_environment(tmp_path, 0.5) == {}


@pytest.mark.parametrize(("share", "percentage"), [(0.0, "100"), (1.0, "100"), (0.05, "5"), (1 / 3, "34")])
def test_a_share_bounds_the_part_of_the_gpu(calls: Path, tmp_path: Path, share: float, percentage: str) -> None:
    Mps(tmp_path)
    assert make_client_environment(tmp_path, share)["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == percentage


def test_threads_follow_the_member_and_not_its_place(tmp_path: Path) -> None:
    for cpus, memory_gb, device in ((0.05, None, None), (16.0, 3.0, "GPU-1")):
        needs = {"threads": 2, "cpus_per_worker": cpus, "memory_gb": memory_gb}
        identity = dataclasses.replace(an_ensemble().identify(0), **needs)
        environment = make_worker_environment(dataclasses.replace(a_job(0.5), identity=identity), device, tmp_path)
        assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == "2"
