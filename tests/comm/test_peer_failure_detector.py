from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ensemble.comm import CommunicatorError
from ensemble.comm.peer_failure_detector import (
    MissingPeer,
    PeerFailureDetector,
    current_location,
    lost_ranks,
    peer_status,
)

CHILD = Path(__file__).with_name("lost_child.py")
ROOT = Path(__file__).resolve().parents[2]


needs_horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="Horovod is not installed (make horovod builds it)"
)


@pytest.mark.parametrize(
    "backend", ["torch_dist", pytest.param("horovod", marks=[needs_horovod, pytest.mark.more])]
)
def test_a_killed_a_stopped_and_a_leaving_rank_are_named_by_all_who_are_there(
    backend: str, tmp_path: Path
) -> None:
    """Killed: at once, long before the time limit, which would end the test. Stopped: once that is over."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(CHILD), backend, str(tmp_path)]
    child = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        assert child.wait(timeout=600) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    ranks: list[Any] = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    host = os.uname().nodename
    for rank in (0, 1, 2):
        killed = ranks[rank]["killed"]
        assert killed["lost"] == [3] and "another worker of this member is lost" in killed["error"]
        assert f"rank 3 (pid {ranks[3]['pid']} on {host}) has ended" in killed["error"]
    for rank in (0, 1):
        stopped = ranks[rank]["stopped"]
        assert stopped["lost"] == [2] and stopped["took_s"] > 4.9
        assert f"rank 2 (pid {ranks[2]['pid']} on {host}) is stopped" in stopped["error"]
    left = ranks[0]["left"]
    assert left["lost"] == [1] and ("has left" in left["error"] or "has ended" in left["error"])


def ask_all(rolls: list[PeerFailureDetector]) -> list[CommunicatorError]:
    with ThreadPoolExecutor(len(rolls)) as pool:
        return list(pool.map(lambda roll: roll.make_error("all-reduce", "broken\nmore"), rolls))


def test_who_cannot_be_seen_and_does_not_sign_in_time_is_named_and_else_it_is_the_network() -> None:
    store = torch.distributed.HashStore()
    rolls = [PeerFailureDetector(store, rank, 4, grace_s=5.0) for rank in range(3)]
    elsewhere = replace(current_location(), host="far", pid=7, machine="another")
    store.set("here/3", json.dumps(asdict(elsewhere)))
    for roll in rolls:
        threading.Thread(target=roll.meet, args=(300.0,)).start()
    rolls[0].meet(300.0)
    for error in ask_all(rolls):
        assert error.lost_ranks == (3,)
        assert "rank 3 (pid 7 on far) does not answer" in str(error) and str(error).endswith("(broken)")
    store = torch.distributed.HashStore()
    for error in ask_all([PeerFailureDetector(store, rank, 3, grace_s=300) for rank in range(3)]):
        assert error.lost_ranks == () and "all 3 workers of this member answer" in str(error)
    with pytest.raises(CommunicatorError, match="missing ranks: 1, 2") as raised:
        PeerFailureDetector(torch.distributed.HashStore(), 0, 3).meet(0.1)
    assert raised.value.lost_ranks == (1, 2), "who never came"


def test_who_is_only_busy_is_not_blamed_and_a_process_is_told_from_a_later_one_of_its_number() -> None:
    gone, busy = MissingPeer(2, "ended", current_location()), MissingPeer(1, "silent", current_location())
    assert (lost_ranks([busy, gone]), lost_ranks([busy]), lost_ranks([])) == ((2,), (1,), ())
    own = current_location()
    assert peer_status(own, own) == "silent", "it runs"
    assert peer_status(replace(own, started="1"), own) == "ended"
    assert peer_status(replace(own, machine="another", started="1"), own) == "silent", "not to be seen from here"
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    zombie = replace(own, pid=child.pid, started=Path(f"/proc/{child.pid}/stat").read_text().split()[21])
    assert peer_status(zombie, own) == "ended"
    child.wait()
