"""Arguments that cannot be meant are refused where they come in, by one line: what, the value, what is valid."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_pipes import LIMIT_S, data, leaves_nothing, pipe  # noqa: F401

from pipelines import Feeder, Peers, PipelineError, attach, find_shared_stages, resident
from pipelines.feeder.process import spawn


def refused(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(PipelineError) as caught:
        call()
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            {"pipeline": "data/train"},
            "pipeline must be a Pipeline, got 'data/train', a path: make one of a source",
        ),
        ({"pipeline": data()}, "a source: make one of it, Pipeline(source)"),
        ({"pipeline": None}, "must be a Pipeline, got None"),
        ({"workers": 0}, "workers must be at least 1, got 0"),
        ({"workers": True}, "workers must be an integer, at least 1, got True"),
        ({"workers": 1.5}, "workers must be an integer, at least 1, got 1.5"),
        ({"capacity": 1}, "capacity must be at least 2, got 1"),
        ({"capacity": "64"}, "capacity must be an integer, at least 2, got '64'"),
        ({"block": 0}, "block must be in 1.."),
        ({"block": 9, "capacity": 8}, "block must be in 1..8 (the capacity), got 9"),
        ({"expect": -1}, "expect must be at least 0, got -1"),
        ({"expect": None}, "expect must be an integer, at least 0, got None"),
        ({"gate_timeout_s": -1}, "gate_timeout_s must be at least 0 and at most 1000000 (seconds), got -1"),
        ({"gate_timeout_s": "5"}, "gate_timeout_s must be at least 0 and at most 1000000 (seconds), got '5'"),
        ({"gate_timeout_s": float("inf")}, "at most 1000000 (seconds), got inf"),
        ({"stall_limit_s": 0}, "stall_limit_s must be above 0 and at most 1000000 (seconds), got 0"),
        ({"stall_limit_s": float("nan")}, "got nan"),
        ({"threads": 2}, "threads must be True or False, got 2"),
        ({"replacement": "no"}, "replacement must be True or False, got 'no'"),
        ({"overwrite_released": None}, "overwrite_released must be True or False, got None"),
        ({"policy": ["wait"]}, "policy must be 'wait' or 'detach', got ['wait']"),
        ({"preparers": 2}, "preparers=2 is for several nodes: give peers= too"),
        ({"preparers": 0, "peers": Peers("p", 0, 2)}, "preparers must be at least 1, got 0"),
        ({"design": "ring"}, "no design 'ring'; the designs are node, single, multi, all and auto"),
        ({"peers": "p"}, "peers must be a pipelines.Peers or None, got 'p'"),
        ({"peers": Peers("p", 0, 2, "nowhere7")}, "Peers.interface must be one of this host's, which are "),
        ({"resident": pipe("still")}, "resident must be a mapping of names to Pipelines, got Pipeline("),
        ({"resident": {1: pipe("still")}}, "resident must have str for names, got 1"),
        ({"resident": {"valid": "data"}}, "resident['valid'] must be a Pipeline, got 'data'"),
        ({"address": 7}, "address must be a path (str or os.PathLike), got 7"),
        ({"cache_bytes": 1 << 20}, "cache_bytes= is for a feeder that keeps samples: give cache="),
        ({"cache_dir": "kept"}, "cache_dir= is for a feeder that keeps samples: give cache="),
        ({"cache": "disk", "cache_dir": 7}, "cache_dir must be a path (str or os.PathLike), got 7"),
    ],
    ids=str,
)
def test_an_impossible_feeder_is_refused_where_it_is_made(wrong: dict[str, Any], said: str) -> None:
    refused(lambda: Feeder(**{"pipeline": pipe("plain"), **wrong}), said)


def test_what_is_no_mapping_of_resident_sets_is_refused_before_a_process_starts() -> None:
    refused(lambda: spawn(pipe("plain"), resident=["valid"]), "resident must be a mapping")  # type: ignore[arg-type]


class _Listens:
    address = "/tmp/x/socket"

    def __str__(self) -> str:
        return "one that listens"


EPOCHS = "epochs must be a number of at least 1 or range(first, last), got "
RANGE = "epochs must be range(first, last) with 0 <= first < last and step 1, got "


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"epochs": 0}, EPOCHS + "0"),
        ({"epochs": True}, EPOCHS + "True"),
        ({"epochs": 1.5}, EPOCHS + "1.5"),
        ({"epochs": [0, 1]}, EPOCHS + "[0, 1]"),
        ({"epochs": range(0, 4, 2)}, RANGE + "range(0, 4, 2)"),
        ({"epochs": range(-1, 2)}, RANGE + "range(-1, 2)"),
        ({"epochs": range(3, 3)}, RANGE + "range(3, 3)"),
        ({"epochs": range(4, 0, -1)}, RANGE + "range(4, 0, -1)"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"batch_size": "8"}, "batch_size must be an integer, at least 1, got '8'"),
        ({"world": 0}, "world must be at least 1, got 0"),
        ({"rank": 2, "world": 2}, "rank must be in 0..1 of world 2, got 2"),
        ({"start_step": -1}, "start_step must be at least 0, got -1"),
        ({"weights": [1.0]}, "weights must be a function or None, got [1.0]"),
    ],
    ids=str,
)
def test_what_cannot_be_read_is_refused_alone_and_shared_alike(wrong: dict[str, Any], said: str) -> None:
    arguments = {"batch_size": 8, **wrong}
    refused(lambda: pipe("plain").loader(**arguments), said)
    refused(lambda: attach("/nowhere/socket", pipe("plain"), **arguments), said)


@pytest.mark.parametrize(
    ("address", "pipeline", "options", "said"),
    [
        (_Listens(), pipe("plain"), {}, "got the _Listens: pass feeder.address"),
        (7, pipe("plain"), {}, "address must be a path (str or os.PathLike), got 7"),
        ("/nowhere/socket", "data", {}, "the pipeline of attach() must be a Pipeline, got 'data', a path"),
        ("/nowhere/socket", pipe("plain"), {"on_wait": 5}, "on_wait must be a function or None, got 5"),
    ],
    ids=str,
)
def test_what_cannot_be_attached_is_refused(
    address: Any, pipeline: Any, options: dict[str, Any], said: str
) -> None:
    refused(lambda: attach(address, pipeline, 8, **options), said)
    if "on_wait" not in options and pipeline != "data":
        refused(lambda: resident(address, "valid", pipeline), said)


def test_numpy_integers_and_paths_are_taken_for_what_they_are(tmp_path: Path) -> None:
    loader = pipe("plain").loader(np.int64(8), np.int64(2), rank=np.int32(0))  # type: ignore[arg-type]
    assert loader.reading.epochs == range(2) and type(loader.reading.batch_size) is int
    peers = Peers(tmp_path, np.int64(0), np.int64(2))  # type: ignore[arg-type]
    assert (peers.directory, type(peers.node), type(peers.nodes)) == (str(tmp_path), int, int)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"node": 2}, "Peers.node must be in 0..1, got 2"),
        ({"node": "0"}, "Peers.node must be an integer, in 0..1, got '0'"),
        ({"nodes": 0}, "Peers.nodes must be at least 1, got 0"),
        ({"nodes": None}, "Peers.nodes must be an integer, at least 1, got None"),
        ({"directory": 3}, "Peers.directory must be a path (str or os.PathLike), got 3"),
        ({"timeout_s": 0}, "Peers.timeout_s must be above 0"),
        (
            {"transport": "mpi"},
            "Peers.transport must be 'gloo', 'nccl', 'horovod' or 'module:function', got 'mpi'",
        ),
        ({"transport": "a:b:c"}, "or 'module:function', got 'a:b:c'"),
        ({"interface": None}, "Peers.interface must be a name such as 'eth0', got None"),
    ],
    ids=str,
)
def test_peers_that_cannot_meet_are_refused(wrong: dict[str, Any], said: str) -> None:
    refused(lambda: Peers(**{"directory": "d", "node": 0, "nodes": 2, **wrong}), said)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (5, "find_shared_stages() takes several Pipelines, got 5"),
        (pipe("plain"), "find_shared_stages() takes several Pipelines, got Pipeline("),
        (["data"], "pipeline 0 of find_shared_stages() must be a Pipeline, got 'data', a path"),
        ([], "find_shared_stages() takes at least one pipeline"),
    ],
    ids=str,
)
def test_what_has_no_prefix_is_refused(given: Any, said: str) -> None:
    refused(lambda: find_shared_stages(given), said)


def test_pipelines_of_any_iterable_have_a_shared_part() -> None:
    assert len(find_shared_stages(pipe("plain") for _ in range(2))) == len(pipe("plain"))


@pytest.mark.parametrize("below", ["", "kept"])
def test_a_cache_directory_that_cannot_be_is_refused_in_a_line(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    stage = pipe("plain").map(dict)
    where = tmp_path / "file" / below
    refused(lambda: Feeder(stage, cache="disk", cache_dir=where), f"may make and write to, got {where}")


def test_where_temporary_files_lie_too_deep_for_a_socket_it_lies_in_tmp_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with Feeder(pipe("plain")) as feeder:
        assert len(list(attach(feeder.address, pipe("plain"), 8))) > 0
    assert not list(deep.iterdir()) and not Path(feeder.address).parent.exists()
    assert len([line for line in caplog.messages if str(deep) in line]) == 1


def test_what_a_killed_feeder_left_is_cleared_away_and_nothing_else() -> None:
    def aged(directory: Path) -> Path:
        os.utime(directory, (time.time() - 120,) * 2)
        return directory

    killed, fresh, alive = (spawn(pipe("plain")) for _ in range(3))
    other = Path(tempfile.gettempdir()) / "feeder-notes"
    other.mkdir()
    (other / "socket").touch()
    try:
        for process in (killed, fresh):
            process.kill()
            process._process.wait(LIMIT_S)
        left, kept = (aged(Path(each.address).parent) for each in (killed, alive))
        aged(other)
        with Feeder(pipe("plain")):
            assert not left.exists()
            assert kept.exists() and other.exists() and Path(fresh.address).exists()
        assert len(list(attach(alive.address, pipe("plain"), 8))) > 0
    finally:
        for process in (killed, fresh, alive):
            process.stop()
        (other / "socket").unlink()
        other.rmdir()
