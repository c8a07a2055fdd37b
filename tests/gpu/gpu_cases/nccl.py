"""A communicator of `ensemble.comm.torch_dist` with one rank: NCCL on the GPU, gloo in a rehearsal.

NCCL refuses two ranks on one GPU. With one it shows that the library loads, that every collective of the
protocol runs on it and leaves the values as they are, what a call costs, and that gradients are exchanged over it,
plain and compressed. It says nothing about a network.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ensemble.comm import Communicator
from ensemble.comm.codecs import make_codec
from ensemble.comm.compressed_all_reduce import CompressedAllReduce
from ensemble.comm.powersgd import PowerSGD
from ensemble.comm.reductions import ExchangeStep, PlainAllReduce, Reduction
from ensemble.comm.torch_dist import connect
from ensemble.comm.worker_thread import WorkerThread
from ensemble.spec.options import COMPRESSIONS, resolve
from gpu_cases.common import Row, Setting, attempt, check, row, time_calls

#: Compressions, and the largest relative error of normally distributed values: none, of a few levels, of signs,
#: and of a matrix without structure.
_EXCHANGES = {"none": 0.0, "bf16": 0.01, "qsgd8": 0.05, "qsgd4": 0.3, "onebit": 0.7, "powersgd": 1.01}


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
            for compression, most in _EXCHANGES.items():
                what = f"an exchange of gradients, compression {compression}"
                yield attempt(what, functools.partial(_reduce, setting, comm, what, compression, most))
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


def _reduce(setting: Setting, comm: Communicator, what: str, compression: str, most: float) -> Row:
    """Exchange a gradient: with one rank its sum is the gradient itself, but for the compression's error.

    Args:
        most: of the error's norm, in parts of the gradient's.
    """
    shape = setting.choose((4096, 1024), (64, 32))
    thread = None if setting.on_gpu else WorkerThread(1)
    reduction, gradient = _make_reduction(comm, thread, shape, compression, setting), torch.randn(shape).flatten()
    gradient = gradient.to(setting.device)

    def exchange() -> None:
        reduction.values.copy_(gradient)
        reduction.present.fill_(1)
        reduction.start(ExchangeStep(1, 1.0, ())).wait()
        reduction.end_step(False)  # keeps no residual, so that every exchange is the same

    try:
        timed = time_calls(setting, exchange, setting.budget_s / 20)
    finally:
        if thread is not None:
            thread.close()
    error = float((reduction.values - gradient).norm() / gradient.norm())
    size = 4 * len(gradient) / 1e6
    return {
        **check(what, error <= most),
        **row(what, relative_error=error, ms=1000 * timed.each_s, fp32_mb=size, gb_s=size / 1e3 / timed.each_s),
    }


def _make_reduction(
    comm: Communicator, thread: WorkerThread | None, shape: tuple[int, int], compression: str, setting: Setting
) -> Reduction:
    """As in `ensemble.comm.gradients`: on CUDA a compressed exchange runs in the calling thread."""
    device, n = torch.device(setting.device), shape[0] * shape[1]
    if compression == "none":
        return PlainAllReduce(comm, n, 1, torch.float32, device)
    options = resolve("compression", compression, COMPRESSIONS)
    shared: dict[str, Any] = {"number": 0, "error_feedback": True, "revertible": True, "device": device}
    if compression == "powersgd":
        return PowerSGD(comm, thread, [shape], rank=options["rank"], seed=0, **shared)
    return CompressedAllReduce(comm, thread, make_codec(options), [n], **shared)
