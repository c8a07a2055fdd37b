"""What ranks of the compression study measure: exchanges of gradients in turn, and codecs."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from benchmarks import models
from benchmarks.compression.measure import PLAIN
from benchmarks.training import TrainingSetup, make_trainer
from ensemble.bench.timing import fitting_iterations, take_turns, time_iterations
from ensemble.comm.gradients import GradientExchange

if TYPE_CHECKING:
    from ensemble.comm import Communicator

_ITERATION_S = 0.25  # of an exchange; of one that takes longer there are fewer iterations
_MESSAGES = 16
_STEPS = 5  # of a round


def measure(comm: Communicator, options: dict[str, Any]) -> list[dict[str, dict[str, Any]]]:
    """Exchange gradients in each scheme in turn.

    Args:
        options: `schemes`, the options of each by its name; `payloads`, each either {"size": bytes}, a gradient
            of normally distributed values in one matrix, or {"setup": of a `TrainingSetup`}, the network's own
            gradient; `rounds` in which schemes take turns; `iterations` at most, in all; `interface`.

    Returns:
        for each payload, by scheme: `times` of this rank in seconds; `sent`, bytes an exchange by the
        communicator's count; `wire`, the same at the host's interface; `error` of the sum against the exact one.
    """
    return [_measure_payload(comm, what, options) for what in options["payloads"]]


def _measure_payload(
    comm: Communicator, what: dict[str, Any], options: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    gradients, exact = _gradients(comm, what)
    parameters = [Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    runs: dict[str, Callable[[], None]] = {}
    error, each, most = {}, {}, options["iterations"]
    for scheme, given in options["schemes"].items():
        compression = None if given["name"] == PLAIN else given
        runs[scheme] = _exchange_once(
            GradientExchange(parameters, comm, compression=compression), parameters, gradients
        )
        runs[scheme]()
        errors = [p.grad - whole for p, whole in zip(parameters, exact, strict=True) if p.grad is not None]
        error[scheme] = _norm(errors) / _norm(exact)
        warm = time_iterations(runs[scheme], 2, comm)
        each[scheme] = max(
            1, fitting_iterations(comm, max(warm), most * _ITERATION_S, 0, most) // options["rounds"]
        )
    found = take_turns(comm, runs, each, options["rounds"], options["interface"])
    return {scheme: {"error": error[scheme], **case} for scheme, case in found.items()}


def time_members(comm: Communicator, options: dict[str, Any]) -> dict[str, list[float]]:
    """Seconds of a member's training steps in each scheme, in turn.

    Args:
        options: `setup`, of a `TrainingSetup`; `schemes`, the options of each by its name; `rounds`; `interface`.
    """
    setup = TrainingSetup.of(options["setup"])
    batch = setup.batches(comm.rank, comm.world)[0]
    named = {name: PLAIN if given["name"] == PLAIN else given for name, given in options["schemes"].items()}
    trainers = {name: make_trainer(setup, "fp32", comm, given) for name, given in named.items()}
    runs = {name: functools.partial(trainer.step, batch) for name, trainer in trainers.items()}
    for run in runs.values():
        time_iterations(run, 1, comm)
    found = take_turns(comm, runs, dict.fromkeys(runs, _STEPS), options["rounds"], options["interface"])
    return {name: case["times"] for name, case in found.items()}


def _norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


def _exchange_once(
    exchange: GradientExchange, parameters: list[Parameter], gradients: list[Tensor]
) -> Callable[[], None]:
    def run() -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        exchange.finish()
        exchange.end_step(True)

    return run


def _gradients(comm: Communicator, what: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """This rank's gradients, and the exact sums of all ranks' in fp64."""
    if "size" in what:
        generator = torch.Generator().manual_seed(comm.rank)
        values = max(4, what["size"] // 4)
        rows = 1 << ((values.bit_length() - 1) // 2)  # as square as powers of two allow
        gradients = [torch.randn((rows, values // rows), generator=generator)]
    else:  # a network's, in its first step, of this rank's part of a global batch
        torch.manual_seed(0)
        setup = TrainingSetup.of(what["setup"])
        net, batch = models.model(setup.net.params(setup.data)), setup.batches(comm.rank, comm.world)[0]
        torch.autograd.backward(models.loss(net, batch).sum() / batch.global_size)
        gradients = [parameter.grad.contiguous() for parameter in net.parameters() if parameter.grad is not None]
    exact = [gradient.double() for gradient in gradients]
    for tensor in exact:
        comm.all_reduce_(tensor)
    return gradients, exact


# --- codecs alone --------------------------------------------------------------------------------------------


def measure_codecs(comm: Communicator, options: dict[str, Any]) -> list[dict[str, float]]:
    """Encode and decode on one core, without a network; returns each case's fields of a `CodecRow`.

    Args:
        options: `cases`: of each the codec's options and `form` (None for the usual one), `size`: bytes of fp32,
            `iterations`.
    """
    values = torch.randn(options["size"] // 4, generator=torch.Generator().manual_seed(0))

    def reach_gbs(work: Callable[[], None]) -> float:
        median_s = statistics.median(time_iterations(work, 1 + options["iterations"], comm)[1:])
        return float(options["size"] / median_s / 1e9)

    return [_measure_codec(case["options"], case["form"], values, reach_gbs) for case in options["cases"]]


def _measure_codec(
    options: dict[str, Any], form: str | None, values: Tensor, reach_gbs: Callable[[Callable[[], None]], float]
) -> dict[str, float]:
    from ensemble.comm.codecs import make_codec

    codec = make_codec(options, form)
    small, fed = values[: 2**18], values.clone()

    def pack(values: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros(codec.wire_bytes(len(values)), dtype=torch.uint8), torch.zeros_like(values)

    def mean_error(messages: int, feedback: bool) -> float:
        """Relative error of the mean of some messages of the same values."""
        wire, out = pack(small)
        residual, total = torch.zeros_like(small), torch.zeros_like(small, dtype=torch.float64)
        for key in range(messages):
            residual = residual + small if feedback else small.clone()
            codec.encode(residual, wire, key=key, error=residual)
            codec.decode(wire, out)
            total += out
        return float((total / messages - small).norm() / small.norm())

    wire, out = pack(values)
    return {
        "ratio": 4 * len(values) / len(wire),
        "encode_gbs": reach_gbs(lambda: codec.encode(values, wire, key=0)),
        "feedback_gbs": reach_gbs(lambda: codec.encode(fed, wire, key=0, error=fed)),
        "decode_gbs": reach_gbs(lambda: codec.decode(wire, out)),
        "error": mean_error(1, False),
        "mean_error": mean_error(_MESSAGES, False),
        "fed_error": mean_error(_MESSAGES, True),
    }
