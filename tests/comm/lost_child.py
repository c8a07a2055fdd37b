"""One rank of `test_roll_call`: loses one peer after the other. `python lost_child.py RENDEZVOUS RANK OUT`."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from ensemble.comm import Communicator, CommunicatorError
from ensemble.comm.torch_dist import connect

TIMEOUT_S = 1.5


def until_it_fails(comm: Communicator) -> dict[str, Any]:
    began = time.monotonic()
    try:
        while True:
            comm.all_reduce_(torch.ones(1000))
    except CommunicatorError as error:
        return {"error": str(error), "lost": error.lost, "took_s": time.monotonic() - began}


def main() -> None:
    rendezvous, rank, out = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    said: dict[str, Any] = {"pid": os.getpid()}
    out.write_text(json.dumps(said))
    for world, what in ((4, "killed"), (3, "stopped"), (2, "left")):
        timeout_s = TIMEOUT_S if what == "stopped" else 60.0
        comm = connect(
            f"{rendezvous}-{world}",
            rank=rank,
            world=world,
            device=torch.device("cpu"),
            interface="lo",
            rendezvous_timeout_s=60.0,
            timeout_s=timeout_s,
        )
        comm.all_reduce_(torch.ones(1))
        if rank == world - 1:
            if what == "left":
                comm.close()
                return
            os.kill(os.getpid(), signal.SIGKILL if what == "killed" else signal.SIGSTOP)
        said[what] = until_it_fails(comm)
        comm.close()
        out.write_text(json.dumps(said))


if __name__ == "__main__":
    main()
