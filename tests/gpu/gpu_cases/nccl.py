"""A communicator of `ensemble.comm.torch_dist` with one rank: NCCL on the GPU, gloo in a rehearsal.

NCCL refuses two ranks on one GPU. With one it shows that the library loads, that every collective of the
protocol runs on it and leaves the values as they are, what a call costs, and that a training step over it gives
the weights of a step without it. It says nothing about a network.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ensemble.bench import models
from ensemble.bench.training import RecipeTrainer
from ensemble.comm import Communicator, SingleRank
from ensemble.comm.torch_dist import connect
from gpu_cases.common import Row, Setting, attempt, check, row, time_calls
from gpu_cases.networks import MADE_UP, text_batch


def run(setting: Setting) -> Iterator[Row]:
    """See the module's text."""
    device = torch.device(setting.choose("cuda:0", "cpu"))
    with tempfile.TemporaryDirectory() as folder:
        comm = connect(
            (Path(folder) / "meet").as_uri(), rank=0, world=1, device=device, interface="lo", timeout_s=30.0
        )
        try:
            yield from _check_collectives(comm, device)
            for size in setting.choose((2**10, 2**16, 2**20, 2**24), (2**10,)):
                yield attempt(f"all-reduce of {4 * size} bytes", functools.partial(_time, setting, comm, size))
            for compression in ("none", "qsgd4"):
                what = f"a step over it, compression {compression}"
                yield attempt(what, functools.partial(_compare_step, setting, comm, what, compression))
        finally:
            comm.close()


def _check_collectives(comm: Communicator, device: torch.device) -> Iterator[Row]:
    calls: dict[str, Callable[[torch.Tensor], Any]] = {
        "all_reduce_": comm.all_reduce_,
        "start_all_reduce_": lambda tensor: comm.start_all_reduce_(tensor).wait(),
        "reduce_": comm.reduce_,
        "reduce_scatter": comm.reduce_scatter,
        "broadcast_": comm.broadcast_,
        "all_gather": lambda tensor: comm.all_gather(tensor)[0],
        "all_to_all": comm.all_to_all,
    }
    for where in dict.fromkeys((device, torch.device("cpu"))):
        for name, call in calls.items():
            what = f"{name} on {where.type}"
            yield attempt(what, functools.partial(_check_collective, what, call, where))
    comm.barrier(30.0)
    group = comm.group([0])
    yield check("a group of the rank", group is not None and group.world == 1)


def _check_collective(what: str, call: Callable[[torch.Tensor], Any], where: torch.device) -> Row:
    """With one rank every collective gives back the rank's own values."""
    wanted = torch.arange(1000, dtype=torch.float32, device=where)
    tensor = wanted.clone()
    returned = call(tensor)
    return check(what, torch.equal(tensor if returned is None else returned, wanted))


def _time(setting: Setting, comm: Communicator, size: int) -> Row:
    tensor = torch.ones(size, device=setting.device)
    timed = time_calls(setting, lambda: comm.all_reduce_(tensor), setting.budget_s / 20)
    return row(f"all-reduce of {4 * size} bytes", us=1e6 * timed.each_s, algbw_gb_s=4 * size / timed.each_s / 1e9)


def _compare_step(setting: Setting, comm: Communicator, what: str, compression: str) -> Row:
    """Three steps; with a world of one nothing is exchanged, so a compression must change nothing either."""
    net = models.net_of("lstm", words=50, embed=16, hidden=16, length=8)
    batch, weights = text_batch(net, 8, setting.device), []
    for each in (comm, SingleRank()):
        trainer = RecipeTrainer(
            models.recipe(net),
            net.params(MADE_UP),
            models.OPTIMIZERS[net.kind],
            "fp32",
            setting.device,
            each,
            compression,
        )
        for _ in range(3):
            trainer.step(batch)
        weights.append(torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()]))
    return check(what, torch.equal(*weights), largest_difference=float((weights[0] - weights[1]).abs().max()))
