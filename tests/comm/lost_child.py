"""The ranks of `test_peer_failure_detector`, which lose one peer after the other: `lost_child.py BACKEND FOLDER`.

They are forked once torch is imported, which takes longer than all they do.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from ensemble.comm import Communicator, CommunicatorError
from ensemble.comm.hierarchical import Hierarchical

TIMEOUT_S = 5.0


def until_it_fails(comm: Communicator) -> dict[str, Any]:
    began = time.monotonic()
    try:
        while True:
            comm.all_reduce_(torch.ones(1000))
    except CommunicatorError as error:
        return {"error": str(error), "lost": error.lost_ranks, "took_s": time.monotonic() - began}


def train(backend: str, rank: int, where: Path) -> None:
    connect = importlib.import_module(f"ensemble.comm.{backend}").connect
    torch.set_num_threads(1)
    said: dict[str, Any] = {"pid": os.getpid()}
    out = where / f"{rank}.json"
    out.write_text(json.dumps(said))
    for world, what in ((4, "killed"), (3, "stopped"), (2, "left")):
        limits = {"rendezvous_timeout_s": 600.0, "timeout_s": TIMEOUT_S if what == "stopped" else 1800.0}
        place = {"rank": rank, "world": world, "device": torch.device("cpu"), "interface": "lo"}
        comm: Communicator = connect((where / f"meet-{world}").as_uri(), **place, **limits)
        if what == "stopped":  # rank 0 shares no group with the one that is stopped
            comm = Hierarchical(comm, ((0,), (1, 2)))
        comm.all_reduce_(torch.ones(1))
        if rank == world - 1:
            if what == "left":
                comm.close()
                return
            os.kill(os.getpid(), signal.SIGKILL if what == "killed" else signal.SIGSTOP)
        said[what] = until_it_fails(comm)
        comm.close()
        out.write_text(json.dumps(said))


def main() -> None:
    pids = []
    for rank in range(4):
        pids.append(os.fork())
        if pids[-1] == 0:
            train(sys.argv[1], rank, Path(sys.argv[2]))
            os._exit(0)
    for rank in (0, 1):
        os.waitpid(pids[rank], 0)
    os.kill(pids[2], signal.SIGKILL)


if __name__ == "__main__":
    main()
