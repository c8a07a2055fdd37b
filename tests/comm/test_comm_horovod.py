"""What is Horovod's own; what all communicators have in common is tested in test_comm_torch and test_roll_call."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ensemble.comm.horovod import _Call  # noqa: E402
from pipelines import Peers, PipelineError  # noqa: E402
from pipelines.multinode.horovod_start import Watchdog, build_environment, interface_address  # noqa: E402
from pipelines.multinode.rendezvous import check_peers  # noqa: E402

CHILD = Path(__file__).with_name("horovod_child.py")
ROOT = Path(__file__).resolve().parents[2]
needs_horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="Horovod is not installed (make horovod builds it)"
)


def test_a_completed_call_keeps_none_of_its_tensors() -> None:
    into, hvd = torch.zeros(3), SimpleNamespace(synchronize=lambda handle: handle + 1)
    peers: Any = SimpleNamespace(started=SimpleNamespace(hvd=hvd), attribute_failure=lambda *_: nullcontext())
    lent = torch.ones(3)
    gone, call = weakref.ref(lent), _Call(peers, "all-reduce", lambda hvd: 1, lent, into)
    del lent
    assert gone() is not None
    assert call.wait() == 2 and into.tolist() == [1, 1, 1]
    assert gone() is None and call.wait() is None


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks said."""
    folder = tmp_path_factory.mktemp("two")
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "train")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(CHILD), str(folder)]
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.more
@needs_horovod
def test_a_member_learns_the_same_bits_over_horovod_as_over_torch(two: list[dict[str, Any]]) -> None:
    """The sum of two numbers is the same in any order."""
    for said in two:
        ended = [(said[name]["outcome"], said[name]["failures"]) for name in ("torch", "horovod", "hierarchical")]
        assert ended == [("finished", [])] * 3
        assert said["horovod"]["weights"] == said["hierarchical"]["weights"] == said["torch"]["weights"]


@pytest.mark.more
@needs_horovod
def test_types_and_layouts_that_horovod_does_not_know_are_carried(two: list[dict[str, Any]]) -> None:
    for rank, said in enumerate(two):
        for name in ("bfloat16", "float16", "uint8", "int16", "int64", "float64"):
            assert said["types"][f"torch.{name}"] == [[3, 6, 9], [[2, 4], [6, 8]][rank : rank + 1], [[0], [1, 1]]]
        assert said["types"]["strided"] == [[0.0, 12.0], [4.0, 16.0], [8.0, 20.0]]
        assert said["types"]["flag"] == [True] and said["types"]["scalar"] == 1.0


@pytest.mark.more
@needs_horovod
def test_many_messages_of_one_kind_may_be_under_way(two: list[dict[str, Any]]) -> None:
    assert all(said["under way"] == [2.0 * i for i in range(40)] for said in two)


@pytest.mark.more
@needs_horovod
def test_everything_listens_on_the_chosen_interface_and_the_server_answers_only_who_knows_the_secret(
    two: list[dict[str, Any]],
) -> None:
    assert all(set(said["listeners"]) <= {"127.0.0.1"} for said in two)
    assert [said["request"] for said in two] == [[200, 404]] * 2


@pytest.mark.more
@needs_horovod
def test_a_rank_that_lives_and_does_not_call_is_named(two: list[dict[str, Any]]) -> None:
    said = two[0]["hung"]
    assert said["lost"] == [1] and said["took_s"] > 1.4
    assert "all-reduce failed" in said["error"] and "rank 1" in said["error"]
    assert "took longer than 1.5 s" in said["error"]


def test_horovod_is_told_where_the_others_are_and_nothing_that_makes_sums_differ() -> None:
    said = build_environment("10.0.0.7:4711/secret", 2, 5, "eth7", 2.5)
    assert said["HOROVOD_GLOO_RENDEZVOUS_PORT"] == "4711"
    assert (said["HOROVOD_RANK"], said["HOROVOD_SIZE"], said["HOROVOD_GLOO_IFACE"]) == ("2", "5", "eth7")
    assert said["HOROVOD_GLOO_TIMEOUT_SECONDS"] == "3", "whole seconds, and not fewer"
    assert said["HOROVOD_FUSION_THRESHOLD"] == "0"
    assert "HOROVOD_GLOO_IFACE" not in build_environment("10.0.0.7:4711/secret", 2, 5, None, 2.5)


def test_an_interface_without_an_address_is_named() -> None:
    assert interface_address("lo") == "127.0.0.1"
    with pytest.raises(PipelineError, match="'nowhere' has none"):
        interface_address("nowhere")


def test_a_watch_tells_once_when_something_takes_too_long_whatever_else_goes_on() -> None:
    told = threading.Event()
    watch = Watchdog(told.set)
    for _ in range(3):
        with watch.limit(2.0):
            pass
    assert not told.wait(2.5) and not watch.fired, "what was done in time is forgotten"
    with watch.limit(1800.0), watch.limit(0.1):
        assert told.wait(600.0)
    assert watch.fired


def test_where_horovod_is_absent_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "horovod" else found(name))
    with pytest.raises(PipelineError, match="make horovod"):
        check_peers(Peers("/tmp/peers", 0, 2, transport="horovod"), "all", None)
