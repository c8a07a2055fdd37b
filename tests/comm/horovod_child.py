"""The two ranks of `test_comm_horovod`, forked once torch is imported: `python horovod_child.py FOLDER`."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import torch
from kit import train_child as cases
from torch import nn

from ensemble.comm import CommunicatorError
from ensemble.comm.horovod import HorovodCommunicator, connect
from ensemble.spec import Recipe
from ensemble.store import weights_sha256
from ensemble.train import Inbox, work

GROUPED = {"name": "hierarchical", "backend": "horovod", "group_size": 2}
COMMUNICATORS = {"torch": "torch", "horovod": "horovod", "hierarchical": GROUPED}


def trained(name: str, rank: int, folder: Path) -> dict[str, Any]:
    models: list[nn.Module] = []

    def keeping(params: dict[str, Any]) -> nn.Module:
        models.append(cases.noisy(params))
        return models[0]

    recipe = Recipe(model=keeping, loss=cases.loss, task="classification", optimizer=cases.optimizer)
    ensemble = cases.declare(recipe, 2, communicator=COMMUNICATORS[name])
    events: list[dict[str, Any]] = []
    job = cases.make_job(folder / name, ensemble, rank=rank, rendezvous=(folder / f"meet-{name}").as_uri())
    outcome = work(job, ensemble, events.append, Inbox())
    failures = [event for event in events if event["type"] == "failed"]
    return {"outcome": outcome, "failures": failures, "weights": weights_sha256(models[0].state_dict())}


def check_types(comm: HorovodCommunicator) -> None:
    """Types that Horovod does not know, tensors that are not contiguous, that are empty, that are scalars."""
    for dtype in (torch.bfloat16, torch.float16, torch.uint8, torch.int16, torch.int64, torch.float64):
        values = torch.tensor([1, 2, 3], dtype=dtype) * (comm.rank + 1)
        comm.all_reduce_(values)
        scattered = comm.reduce_scatter(torch.tensor([[1, 2], [3, 4]], dtype=dtype))
        gathered = comm.all_gather(torch.full((comm.rank + 1,), comm.rank, dtype=dtype))
        assert {values.dtype, scattered.dtype, gathered[1].dtype} == {dtype}
        assert values.tolist() == [3, 6, 9] and scattered.tolist() == [[[2, 4]], [[6, 8]]][comm.rank]
        assert [each.tolist() for each in gathered] == [[0], [1, 1]]
    grid = torch.arange(6.0).reshape(2, 3).t() * (comm.rank + 1)
    flag, scalar = torch.tensor([comm.rank == 1]), torch.tensor(float(comm.rank))
    comm.broadcast_(grid, root=1)
    comm.all_reduce_(grid)
    comm.broadcast_(flag, root=1)
    comm.all_reduce_(scalar)
    comm.all_reduce_(torch.empty(0))
    assert [len(each) for each in comm.all_gather(torch.empty(0, 2))] == [0, 0]
    assert grid.tolist() == [[0.0, 12.0], [4.0, 16.0], [8.0, 20.0]] and flag.tolist() == [True]
    assert scalar.item() == 1.0


def asked(path: str) -> int:
    place = os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"].partition("/")[0]
    try:
        with urllib.request.urlopen(f"http://{place}{path}", timeout=300) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def run(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    said: dict[str, Any] = {name: trained(name, rank, folder) for name in COMMUNICATORS}
    where: dict[str, Any] = {"rank": rank, "world": 2, "device": torch.device("cpu"), "interface": "lo"}
    comm = connect((folder / "meet").as_uri(), timeout_s=600.0, **where)
    connections = psutil.Process().net_connections(kind="inet")
    said["listeners"] = sorted({c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN})
    check_types(comm)
    secret = os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"].partition("/")[2]
    port = os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]
    said["request"] = [asked(f"/{key}:{port}/global/0") for key in (secret, "0" * len(secret))]
    comm.barrier(600.0)
    comm.close()
    comm.close()

    comm = connect((folder / "again").as_uri(), timeout_s=1.5, grace_s=0.5, **where)
    comm.all_reduce_(torch.ones(1))
    (mine, theirs) = (folder / f"hung-{rank}", folder / f"hung-{1 - rank}")
    if rank == 0:
        began = time.monotonic()
        try:
            comm.all_reduce_(torch.ones(1))
        except CommunicatorError as error:
            said["hung"] = {"error": str(error), "lost": error.lost_ranks, "took_s": time.monotonic() - began}
        mine.touch()
    else:
        while not theirs.exists():  # lives, and does not call: its background thread answers the others
            time.sleep(0.05)
    comm.close()
    (folder / f"{rank}.json").write_text(json.dumps({**said, "host": socket.gethostname()}))


def main() -> None:
    pids = []
    for rank in range(2):
        pids.append(os.fork())
        if pids[-1] == 0:
            run(Path(sys.argv[1]), rank)
            os._exit(0)
    failed = [status for pid in pids if (status := os.waitpid(pid, 0)[1])]
    sys.exit(len(failed))


if __name__ == "__main__":
    main()
