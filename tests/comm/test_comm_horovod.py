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
import torch

from ensemble.comm.horovod import _Call
from ensemble.comm.horovod_start import Watchdog, build_environment, import_horovod, interface_address
from pipelines import PipelineError

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


@pytest.mark.more
@needs_horovod
def test_a_member_learns_the_same_bits_over_horovod_as_over_torch_and_a_rank_that_does_not_call_is_named(
    tmp_path: Path,
) -> None:
    """The sum of two numbers is the same in any order."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support"), str(ROOT / "tests" / "train")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(CHILD), str(tmp_path)]
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    two = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for said in two:
        ended = [(said[name]["outcome"], said[name]["failures"]) for name in ("torch", "horovod", "hierarchical")]
        assert ended == [("finished", [])] * 3
        assert said["horovod"]["weights"] == said["hierarchical"]["weights"] == said["torch"]["weights"]
        assert set(said["listeners"]) <= {"127.0.0.1"}, "on the chosen interface"
        assert said["request"] == [200, 404], "the server answers only who knows the secret"
    hung = two[0]["hung"]
    assert hung["lost"] == [1] and hung["took_s"] > 1.4 and "took longer than 1.5 s" in hung["error"]
    assert "all-reduce failed" in hung["error"] and "rank 1" in hung["error"]


def test_horovod_is_told_where_the_others_are_and_a_watch_tells_when_something_takes_too_long() -> None:
    said = build_environment("10.0.0.7:4711/secret", 2, 5, "eth7", 2.5)
    assert said["HOROVOD_GLOO_RENDEZVOUS_PORT"] == "4711"
    assert (said["HOROVOD_RANK"], said["HOROVOD_SIZE"], said["HOROVOD_GLOO_IFACE"]) == ("2", "5", "eth7")
    assert said["HOROVOD_GLOO_TIMEOUT_SECONDS"] == "3", "whole seconds, and not fewer"
    assert said["HOROVOD_FUSION_THRESHOLD"] == "0"
    assert "HOROVOD_GLOO_IFACE" not in build_environment("10.0.0.7:4711/secret", 2, 5, None, 2.5)
    assert interface_address("lo") == "127.0.0.1"
    with pytest.raises(PipelineError, match="'nowhere' has none"):
        interface_address("nowhere")
    told = threading.Event()
    watch = Watchdog(told.set)
    for _ in range(3):
        with watch.limit(2.0):
            pass
    assert not told.wait(2.5) and not watch.fired, "what was done in time is forgotten"
    with watch.limit(1800.0), watch.limit(0.1):
        assert told.wait(600.0), "whatever else goes on"
    assert watch.fired


def test_where_horovod_is_absent_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where Horovod is installed: no package of that name is found."""

    class Hidden:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
            if name.split(".")[0] == "horovod":
                raise ModuleNotFoundError(f"No module named {name!r}", name="horovod")

    for name in [name for name in sys.modules if name.split(".")[0] == "horovod"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Hidden(), *sys.meta_path])
    with pytest.raises(PipelineError, match="make horovod"):
        import_horovod()
