"""What each rank does in the study of fusion: a ResNet-50's gradients in messages of various sizes."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from ensemble.bench.fabric.measure import BARRIER_S
from ensemble.comm import Communicator
from ensemble.comm.gradients import GradientExchange


def measure(comm: Communicator, options: dict[str, Any]) -> list[dict[str, Any]]:
    """The exchange of all gradients, without a backward pass to hide behind, at each threshold in turn.

    Args:
        options: `shapes` of the tensors; `thresholds` in bytes, 0 for no fusion; `rounds`, between which they
            alternate; `steps` of each; `tune`: whether to add the threshold that a member would take.

    Returns:
        For each threshold whether that is it, `chosen`, its `messages` and this rank's seconds, `times`.
    """
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in options["shapes"]]
    grads = [torch.ones_like(p) for p in parameters]
    tuned = _tuned(comm, parameters) if options["tune"] else None
    thresholds = sorted({*options["thresholds"], *([tuned] if tuned is not None else [])})
    found: list[dict[str, Any]] = [{"threshold": t, "chosen": t == tuned, "times": []} for t in thresholds]
    for _ in range(options["rounds"]):
        for case in found:
            # A bucket is full at one byte: every tensor travels by itself.
            size = case["threshold"] or 1
            exchange = GradientExchange(parameters, comm, bucket_bytes=size, first_bucket_bytes=size)
            case["messages"] = len(exchange)
            times = [_exchanged(exchange, parameters, grads, comm) for _ in range(options["steps"] + 1)]
            case["times"] += times[1:]  # the first one finds memory that was never touched
            exchange.close()
    return found


def _tuned(comm: Communicator, parameters: list[nn.Parameter]) -> int:
    """The size of buckets that a member with these parameters finds out when it starts."""
    from ensemble.comm.autotune.plan import open_communicator

    options = {"name": "torch", "bucket_bytes": "auto"}
    return open_communicator(comm, options, [p.numel() for p in parameters])[1].bucket_bytes


def _exchanged(
    exchange: GradientExchange, parameters: list[nn.Parameter], grads: list[torch.Tensor], comm: Communicator
) -> float:
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad
    comm.barrier(BARRIER_S)
    began = time.perf_counter()
    exchange.finish()
    return time.perf_counter() - began
