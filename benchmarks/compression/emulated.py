"""What ranks of the part `steps` measure: steps of emulated networks, and of an LSTM on this processor."""

from __future__ import annotations

import contextlib
import statistics
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.compression.measure import PLAIN
from ensemble.bench.emulated_net import EmulatedNet, largest_parameter
from ensemble.bench.timing import take_turns, time_iterations
from ensemble.comm.gradients import GradientExchange

if TYPE_CHECKING:
    from ensemble.comm import Communicator


def measure_steps(comm: Communicator, options: dict[str, Any]) -> list[dict[str, dict[str, Any]]]:
    """Time steps of emulated networks in each scheme.

    Args:
        options: `cases`, each with `net`, its `step_s` and `schemes`, the options of each by its name; `values`: a
            file of fp32 numbers; `steps`, after one that is not counted; `interface`.

    Returns:
        for each case, by scheme: `times` of this rank in seconds; of a step `messages`, `sent`, bytes by the
        communicator's count, and `wire`, bytes at the host's interface.
    """
    length = max(largest_parameter(case["net"]) for case in options["cases"])
    values = torch.from_file(options["values"], shared=True, size=length, dtype=torch.float32)
    return [_measure_case(comm, case, values, options) for case in options["cases"]]


def _measure_case(
    comm: Communicator, case: dict[str, Any], values: Tensor, options: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    net = EmulatedNet(case["net"], case["step_s"], values)
    found: dict[str, dict[str, Any]] = {}
    for scheme, given in case["schemes"].items():
        compression = None if given["name"] == PLAIN else given
        # Made anew for each: the buffers of all schemes at once would not fit into memory.
        with contextlib.closing(GradientExchange(net.parameters, comm, compression=compression)) as exchange:
            run = {scheme: lambda exchange=exchange: net.step(exchange)}
            time_iterations(run[scheme], 1, comm)
            taken = take_turns(comm, run, {scheme: options["steps"]}, 1, options["interface"])[scheme]
            found[scheme] = {**taken, "messages": len(exchange)}
        for parameter in net.parameters:
            parameter.grad = None  # a view of the exchange's buffers
    return found


def time_lstm(comm: Communicator, options: dict[str, Any]) -> float:
    """Seconds of a step of `net_shapes.lstm_an4`, computed on this processor.

    Args:
        options: `sequences` and `frames` of a batch, `steps`.
    """
    lstm = torch.nn.LSTM(363, 1024, 3, proj_size=512, batch_first=True)  # torch's has no peepholes
    out = torch.nn.Linear(512, 132)
    frames = torch.randn(options["sequences"], options["frames"], 363)
    labels = torch.randint(132, (options["sequences"] * options["frames"],))

    def step() -> None:
        lstm.zero_grad()
        scores = out(lstm(frames)[0]).flatten(0, 1)
        torch.autograd.backward(torch.nn.functional.cross_entropy(scores, labels))

    return statistics.median(time_iterations(step, 1 + options["steps"], comm)[1:])
