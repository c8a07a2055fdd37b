"""Nodes with several GPUs under Ray: logical ones, and a stand-in for NVIDIA's library that names four."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpus_child import NVML, WORKER
from one_head import start_head

from ensemble.executors.ray.placement import count_usable_gpus
from ensemble.store import RunDir, fold, read_events

pytestmark = pytest.mark.ray

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def with_gpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment with four GPUs."""
    folder = tmp_path_factory.mktemp("nvml")
    (folder / "nvml.c").write_text(NVML)
    command = ["cc", "-shared", "-fPIC", "-o", str(folder / "libnvidia-ml.so.1"), str(folder / "nvml.c")]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no C compiler to build the stand-in for NVIDIA's driver: {error}")
    (folder / "sitecustomize.py").write_text(WORKER)
    usual = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    paths = [str(folder), str(HERE.parents[2]), str(HERE), str(HERE.parent)]
    return {**usual, "LD_LIBRARY_PATH": str(folder), "PYTHONPATH": os.pathsep.join(paths)}


def drive(mode: str, run_dir: Path, environment: dict[str, str]) -> dict[str, str]:
    """What the driver says, by the first word of each line."""
    command = [sys.executable, str(HERE / "gpus_child.py"), mode, str(run_dir)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())


def given(run_dir: Path, node_sees: list[str]) -> dict[str, list[str]]:
    """The GPUs that the workers of each member were shown; those that they were placed on, no attempt in vain."""
    events = read_events(run_dir / "events.jsonl")
    placed: dict[str, Any] = {event["member"]: event for event in events if event["type"] == "placed"}
    shown = {}
    for member in fold(events).members.values():
        assert (member.state, member.attempts) == ("finished", 1), member.error
        said = re.findall(r"^GPU (\S*) (\S+)$", RunDir(run_dir).log(member.id).read_text(), re.M)
        assert {order for _, order in said} == {"PCI_BUS_ID"}, "CUDA counts as NVML does"
        shown[member.id] = sorted(number for number, _ in said)
        assert shown[member.id] == sorted(node_sees[device] for device in placed[member.id]["devices"])
    return shown


def test_every_gpu_of_a_node_is_used_and_each_rank_has_one_of_its_own(
    tmp_path: Path, with_gpus: dict[str, str]
) -> None:
    assert drive("own", tmp_path, with_gpus) == {"whole": str(["finished"] * 5)}
    shown = given(tmp_path / "whole", ["0", "1", "2", "3"])
    assert len(set(shown["member-4"])) == 2, "a member of two ranks has two"
    assert {number for numbers in shown.values() for number in numbers} == {"0", "1", "2", "3"}


@pytest.fixture(scope="module")
def cluster(with_gpus: dict[str, str]) -> Iterator[dict[str, str]]:
    """A cluster of one node that lends the GPUs 2 and 3."""
    with start_head({**with_gpus, "CUDA_VISIBLE_DEVICES": "2,3"}, ["--num-cpus", "2"]) as head:
        yield {**with_gpus, **head}


def test_gpus_that_ray_does_not_offer_or_has_given_to_others_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"GPU": 4.0}
    monkeypatch.setattr("ensemble.executors.ray._compat.list_free_resources", lambda: {"a": free})
    monkeypatch.setattr("ensemble.executors.ray.placement._RELEASE_S", 0.0)
    record = {"NodeID": "a", "Resources": {"GPU": 4.0}}
    assert count_usable_gpus(record, 4) == (4, "")
    assert count_usable_gpus(record, 6) == (4, ""), "Ray was told of the first four"
    assert count_usable_gpus(record, 0) == (0, "")
    assert count_usable_gpus({"NodeID": "a", "Resources": {}}, 4) == (0, "Ray offers none of its GPUs")
    free["GPU"] = 2.5
    most, why = count_usable_gpus(record, 4)
    assert most == 0 and "given 1.5 of its 4 GPUs to others" in why


@pytest.mark.slow  # a head, four runs and who takes a GPU from them; each part of it is shown elsewhere, too
def test_a_node_lends_the_gpus_that_its_raylet_sees_and_those_of_others_are_left_to_them(
    tmp_path: Path, cluster: dict[str, str]
) -> None:
    said = drive("shared", tmp_path, cluster)
    assert "given 1 of its 2 GPUs to others" in said["refused"]
    assert not [e for e in read_events(tmp_path / "refused" / "events.jsonl") if e["type"] == "placed"]

    assert said["waited"] == str(["finished"] * 2), "another took one when the run had begun, and gave it back"
    assert sorted(given(tmp_path / "waited", ["2", "3"]).values()) == [["2"], ["3"]]
    events = read_events(tmp_path / "waited" / "events.jsonl")
    [waits] = [event for event in events if event["type"] == "waiting"]
    assert "no place" in waits["detail"] and "1 GPU" in waits["detail"]

    assert said["halves"] == str(["finished"] * 8)
    assert {number for [number] in given(tmp_path / "halves", ["2", "3"]).values()} == {"2", "3"}
    [node] = [event for event in read_events(tmp_path / "halves" / "events.jsonl") if event["type"] == "node"]
    assert node["gpus"] == ["GPU 2", "GPU 3"]
