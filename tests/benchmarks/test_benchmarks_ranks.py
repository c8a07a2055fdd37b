"""A function on several ranks: results by rank, failures in a line, and nothing left however it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.launch.backends import unavailable_reason
from benchmarks.launch.hosts import Hosts, unavailable
from benchmarks.launch.ranks import RanksError, contiguous, run_ranks
from ensemble.comm import Communicator
from ensemble.spec import SpecError

REASON = unavailable()
HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]


# --- what ranks do here --------------------------------------------------------------------------------------


def summed(comm: Communicator, options: dict[str, Any]) -> dict[str, Any]:
    import torch

    tensor = torch.full((4,), comm.rank + options["more"])
    comm.all_reduce_(tensor)
    print("what a rank prints is not in the way")
    return {"rank": comm.rank, "sum": tensor.tolist(), "threads": torch.get_num_threads()}


def interfaces(comm: Communicator, options: dict[str, Any]) -> list[str]:
    return sorted(psutil.net_if_addrs())


def fails(comm: Communicator, options: dict[str, Any]) -> None:
    import torch

    if comm.rank == 1:
        if options["how"] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("the second of two")
    comm.all_reduce_(torch.ones(1))


def waits(comm: Communicator, options: dict[str, Any]) -> None:
    Path(options["there"], f"{comm.rank}").write_text(str(os.getpid()))
    if comm.rank == 0:
        signal.pause()


# --- tests ---------------------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 8))
def test_placements_use_all_hosts_alike(ranks: int, hosts: int) -> None:
    placement = contiguous(ranks, hosts)
    counts = [placement.count(host) for host in range(hosts)]
    assert sum(counts) == ranks and max(counts) - min(counts) <= 1 and placement == sorted(placement)
    assert contiguous(8, 2) == [0] * 4 + [1] * 4


@pytest.mark.more
def test_each_rank_returns_its_own_result_on_the_loopback() -> None:
    got = run_ranks("test_benchmarks_ranks:summed", {"more": 1.0}, placement=contiguous(3, 1))
    assert got == [{"rank": rank, "sum": [6.0] * 4, "threads": 1} for rank in range(3)]


@pytest.mark.more
@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_ranks_are_on_the_hosts_where_they_are_placed() -> None:
    with Hosts(2) as hosts:
        got = run_ranks("test_benchmarks_ranks:interfaces", {}, placement=[0, 1, 0], hosts=hosts)
        assert got == [["eth0", "lo"]] * 3, "a namespace's own interfaces, not the machine's"


@pytest.mark.more
def test_ranks_sum_over_horovod_between_hosts() -> None:
    if (reason := unavailable_reason("horovod")) is not None:
        pytest.skip(reason)
    with contextlib.nullcontext() if REASON else Hosts(2) as hosts:
        name, placed = "test_benchmarks_ranks:summed", {"placement": [0, 1], "hosts": hosts}
        got = run_ranks(name, {"more": 1.0}, backend="horovod", **placed)
        assert [said["sum"] for said in got] == [[3.0] * 4] * 2


@pytest.mark.parametrize(
    ("how", "says"),
    [pytest.param("raises", "ValueError: the second of two", marks=pytest.mark.more), ("killed", "SIGKILL")],
)
def test_a_rank_that_fails_ends_all_and_is_named(how: str, says: str) -> None:
    with pytest.raises(RanksError) as caught:
        run_ranks("test_benchmarks_ranks:fails", {"how": how}, placement=[0, 0, 0])
    said = str(caught.value)
    assert "rank 1 of 3 failed" in said and says in said and "\n" not in said
    _nobody_left()


def test_what_cannot_be_imported_and_an_unknown_backend_are_said_in_a_line() -> None:
    with pytest.raises(RanksError, match="No module named 'nowhere'"):
        run_ranks("nowhere:at_all", {}, placement=[0])
    with pytest.raises(SpecError, match=r"there is no backend 'glue' \(valid: gloo"):
        run_ranks("test_benchmarks_ranks:interfaces", {}, placement=[0], backend="glue")
    with pytest.raises(SpecError, match="horovod-mpi is for ranks of this machine"):
        run_ranks("test_benchmarks_ranks:interfaces", {}, placement=[0], hosts=Hosts(1), backend="horovod-mpi")


@pytest.mark.more
def test_ranks_that_are_not_done_in_time_are_named_and_ended(tmp_path: Path) -> None:
    with pytest.raises(RanksError, match=r"more than 3 s; ranks that were not done: 0, 1"):
        run_ranks("test_benchmarks_ranks:waits", {"there": str(tmp_path)}, placement=[0, 0], timeout_s=3.0)
    _nobody_left()


@pytest.mark.parametrize("fatal", [pytest.param(signal.SIGINT, marks=pytest.mark.more), signal.SIGKILL])
def test_nothing_is_left_when_the_one_that_asked_is_interrupted_or_killed(fatal: int, tmp_path: Path) -> None:
    there, temporary = tmp_path / "there", tmp_path / "temporary"
    there.mkdir()
    temporary.mkdir()
    code = "import sys; from benchmarks.launch.ranks import run_ranks; "
    code += "run_ranks('test_benchmarks_ranks:waits', {'there': sys.argv[1]}, placement=[0, 0])"
    path = os.pathsep.join([str(ROOT), str(HERE)])
    environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(temporary)}
    command = [sys.executable, "-c", code, str(there)]
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as asking:
        _until(lambda: len([path for path in there.iterdir() if path.read_text()]) == 2)
        pids = [int(path.read_text()) for path in there.iterdir()]
        asking.send_signal(fatal)
    _until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    if fatal == signal.SIGINT:
        assert list(temporary.iterdir()) == []


def _nobody_left() -> None:
    assert [child for child in psutil.Process().children(recursive=True) if child.is_running()] == []


def _until(there: Callable[[], bool]) -> None:
    end = time.monotonic() + 300
    while not there():
        assert time.monotonic() < end
        time.sleep(0.02)
