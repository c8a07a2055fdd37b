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
environment = {{name: value for name, value in os.environ.items() if name.startswith("CUDA")}}
with open(os.environ["STAND_IN_LOG"], "a") as log:
    print(json.dumps([sys.argv[1:], sys.stdin.read(), environment]), file=log)
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


def read_calls(calls: Path) -> list[list[object]]:
    return [json.loads(line) for line in calls.read_text().splitlines()]


def a_job(share: float, **needs: object) -> Job:
    identity = dataclasses.replace(an_ensemble().identify(0), gpus_per_worker=share, **needs)  # type: ignore
    return make_job(identity, "r", interface="lo", device="cuda:0")


def test_a_node_with_gpus_starts_a_daemon_of_its_own_and_ends_it_and_others_start_none(
    calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_gpu(name: str, **options: object) -> object:
        return dataclasses.replace(describe_host(name), gpus=("GPU",))

    with selectors.DefaultSelector() as selector:
        services = NodeServices("a", an_ensemble(mps=True), selector, lambda event: None)
        assert "CUDA_MPS_PIPE_DIRECTORY" not in make_worker_environment(a_job(0.5), "GPU-1", services.directory)
        services.close()
        assert not calls.exists(), "there is no GPU here"

        monkeypatch.setattr("ensemble.executors.node_services.describe_host", with_gpu)
        services = NodeServices("a", an_ensemble(mps=True), selector, lambda event: None)
        pipes = services.directory / "mps"
        assert stat.S_IMODE(pipes.stat().st_mode) == 0o700
        expected = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_MPS_PIPE_DIRECTORY": str(pipes)}
        expected["CUDA_MPS_LOG_DIRECTORY"] = str(services.directory / "mps-log")
        environment = make_worker_environment(a_job(0.301), "GPU-1", services.directory)
        assert environment.items() >= {**expected, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "31"}.items()
        assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-1"
        assert "MPS" not in "".join(make_worker_environment(a_job(1.0), None, services.directory))
        services.close()
    assert read_calls(calls) == [[["-d"], "", expected], [[], "quit\n", expected]], "it counts all devices"
    assert not pipes.exists()


def test_one_that_is_absent_or_does_not_start_is_one_line_and_one_left_behind_is_ended(
    calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert Mps(tmp_path).running  # its controller is killed
    for share, percentage in ((0.0, "100"), (1.0, "100"), (0.05, "5"), (1 / 3, "34")):
        assert make_client_environment(tmp_path, share)["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == percentage
    monkeypatch.setenv("STAND_IN_CODE", "1")
    with caplog.at_level(logging.WARNING):
        assert not Mps(tmp_path).running
        assert [call[:2] for call in read_calls(calls)] == [[["-d"], ""], [[], "quit\n"], [["-d"], ""]]
        assert make_client_environment(tmp_path, 0.5) == {}
        monkeypatch.setenv("PATH", str(tmp_path))
        absent = Mps(tmp_path)
    absent.close()
    assert not absent.running and make_client_environment(tmp_path, 0.5) == {}
    failed, missing = caplog.messages
    assert "exit code 1" in failed and missing == f"mps=True: {ABSENT}"


def test_threads_follow_the_member_and_not_its_place(tmp_path: Path) -> None:
    for cpus, memory_gb, device in ((0.05, None, None), (16.0, 3.0, "GPU-1")):
        job = a_job(0.5, threads=2, cpus_per_worker=cpus, memory_gb=memory_gb)
        environment = make_worker_environment(job, device, tmp_path)
        assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == "2"
