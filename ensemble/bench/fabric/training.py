"""What each rank does in the end-to-end part: it trains nets data-parallel, with and without the exchange."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

from ensemble.bench.fabric.measure import BARRIER_S, chain
from ensemble.bench.fabric.shapes import NETS
from ensemble.comm import Communicator
from ensemble.comm.gradients import GradientExchange

_SMALL = 1024


def compute_heavy() -> tuple[nn.Module, tuple[int, ...]]:
    """Convolutions: much to compute with few parameters; the net, and the shape of its batch."""
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU()]
    for _ in range(5):
        layers += [nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)), (8, 3, 32, 32)


def parameter_heavy() -> tuple[nn.Module, tuple[int, ...]]:
    """Large layers, fully connected: many parameters with little to compute; the net, and its batch."""
    sizes = (1024, 2048, 1024, 1024)
    layers: list[nn.Module] = []
    for rows, columns in itertools.pairwise(sizes):
        layers += [nn.Linear(rows, columns), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], 10)), (32, 1024)


_MADE = dict(zip(NETS, (compute_heavy, parameter_heavy), strict=True))


def measure(comm: Communicator, options: dict[str, Any]) -> dict[str, Any]:
    """Steps of each net, alone on every rank at once and with the exchange of gradients, in turn.

    Args:
        options: `nets`, of `shapes.NETS`; `steps` of a round, `rounds`.

    Returns:
        "latency_s": of an all-reduce of 4 KiB. "nets": for each net `parameters`, `grad_bytes`, `messages` and
        `sent_bytes` of a step, `batch`, seconds of the steps `alone` and `together`, and of an alone step's
        backward pass, `backward_s`.
    """
    small = torch.zeros(_SMALL)
    times = chain(lambda: comm.all_reduce_(small), 20, comm)
    found = {name: _train(comm, name, options) for name in options["nets"]}
    return {"latency_s": statistics.median(times), "nets": found}


def _train(comm: Communicator, name: str, options: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    net, shape = _MADE[name]()
    parameters = list(net.parameters())
    optimizer = torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)
    exchange = GradientExchange(parameters, comm)
    batch, labels = torch.randn(shape), torch.randint(10, shape[:1])
    backward: list[float] = []
    alone: list[float] = []
    together: list[float] = []
    try:
        _step(net, optimizer, batch, labels, exchange)
        sent = comm.sent_bytes
        _step(net, optimizer, batch, labels, exchange)
        sent = comm.sent_bytes - sent
        for _ in range(options["rounds"]):
            for times, used in ((alone, None), (together, exchange)):
                comm.barrier(BARRIER_S)
                for _ in range(options["steps"]):
                    began = time.perf_counter()
                    backward_s = _step(net, optimizer, batch, labels, used)
                    times.append(time.perf_counter() - began)
                    if used is None:
                        backward.append(backward_s)
    finally:
        exchange.close()
    return {
        "parameters": sum(p.numel() for p in parameters),
        "grad_bytes": sum(p.numel() * p.element_size() for p in parameters),
        "messages": len(exchange),
        "sent_bytes": sent,
        "batch": shape[0],
        "alone": alone,
        "together": together,
        "backward_s": statistics.median(backward),
    }


def _step(
    net: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor, labels: Tensor, used: GradientExchange | None
) -> float:
    """A step of training; the seconds of its backward pass, in which the exchange takes place as well."""
    optimizer.zero_grad(set_to_none=True)
    loss = nn.functional.cross_entropy(net(batch), labels)
    began = time.perf_counter()
    with used.overlap_backward() if used is not None else contextlib.nullcontext():
        loss.backward()  # type: ignore[no-untyped-call]
    took = time.perf_counter() - began
    if used is not None:
        used.finish()
    optimizer.step()
    return took
