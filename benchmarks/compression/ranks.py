"""What ranks of the compression study measure: exchanges of gradients in turn, and codecs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from benchmarks import models
from benchmarks.compression.schemes import PLAIN
from benchmarks.training import TrainingSetup
from ensemble.bench.timing import BARRIER_S, fitting_iterations, interface_sent, time_iterations
from ensemble.comm.gradients import GradientExchange

if TYPE_CHECKING:
    from ensemble.comm import Communicator

_ITERATION_S = 0.25  # of an exchange; of one that takes longer there are fewer iterations
_MESSAGES = 16


def _message_shape(size: int) -> tuple[int, int]:
    """The shape of a matrix of about `size` bytes, as square as powers of two allow."""
    values = max(4, size // 4)
    rows = 1 << ((values.bit_length() - 1) // 2)
    return rows, values // rows


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
    exact_norm = _norm(exact)
    found: dict[str, dict[str, Any]] = {}
    runs: dict[str, Callable[[], None]] = {}
    for scheme, given in options["schemes"].items():
        compression = None if given["name"] == PLAIN else given
        exchange = GradientExchange(parameters, comm, compression=compression)
        runs[scheme] = _exchange_once(exchange, parameters, gradients)
        runs[scheme]()
        errors = [p.grad - whole for p, whole in zip(parameters, exact, strict=True) if p.grad is not None]
        warm = time_iterations(runs[scheme], 2, comm)
        found[scheme] = {"error": _norm(errors) / exact_norm, "times": [], "sent": 0.0, "wire": 0}
        most = options["iterations"]
        fitting = fitting_iterations(comm, max(warm), most * _ITERATION_S, 0, most)
        found[scheme]["each"] = max(1, fitting // options["rounds"])
    for _ in range(options["rounds"]):
        for scheme, case in found.items():
            sent, wire = comm.sent_bytes, interface_sent(options["interface"])
            case["times"] += time_iterations(runs[scheme], case["each"], comm)
            case["sent"] += comm.sent_bytes - sent
            comm.barrier(BARRIER_S)  # the host's other ranks have sent theirs, too
            case["wire"] += interface_sent(options["interface"]) - wire
    for case in found.values():
        case["sent"] /= len(case["times"])
        case["wire"] /= len(case["times"])
    return found


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
        gradients = [torch.randn(_message_shape(what["size"]), generator=generator)]
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


def measure_codecs(comm: Communicator, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Encode and decode on one core, without a network.

    Args:
        options: `cases`: of each the codec's options and `form` (None for the usual one), `size`: bytes of fp32,
            `iterations`.

    Returns:
        for each case the codec's `wire` bytes; `encode_s`, `feedback_s` (with the error in place) and `decode_s`,
        medians; `error`, relative, of one message; `mean_error` and `fed_error`, of the mean of 16 messages of
        the same values, without and with error feedback.
    """
    values = torch.randn(options["size"] // 4, generator=torch.Generator().manual_seed(0))

    def median_s(work: Callable[[], None]) -> float:
        return statistics.median(time_iterations(work, 1 + options["iterations"], comm)[1:])

    return [_measure_codec(case["options"], case["form"], values, median_s) for case in options["cases"]]


def _measure_codec(
    options: dict[str, Any], form: str | None, values: Tensor, median_s: Callable[[Callable[[], None]], float]
) -> dict[str, Any]:
    from ensemble.comm.codecs import make_codec

    exchange = ("error_feedback", "min_size")
    codec = make_codec({name: value for name, value in options.items() if name not in exchange}, form)
    wire, out = torch.zeros(codec.wire_bytes(len(values)), dtype=torch.uint8), torch.zeros_like(values)
    small = values[: min(len(values), 2**18)]
    spent = values.clone()
    return {
        "wire": codec.wire_bytes(len(values)),
        "encode_s": median_s(lambda: codec.encode(values, wire, key=0)),
        "feedback_s": median_s(lambda: codec.encode(spent, wire, key=0, error=spent)),
        "decode_s": median_s(lambda: codec.decode(wire, out)),
        "error": _mean_error(codec, small, 1, False),
        "mean_error": _mean_error(codec, small, _MESSAGES, False),
        "fed_error": _mean_error(codec, small, _MESSAGES, True),
    }


def _mean_error(codec: Any, values: Tensor, messages: int, feedback: bool) -> float:
    """Relative error of the mean of some messages of the same values."""
    wire, out = torch.zeros(codec.wire_bytes(len(values)), dtype=torch.uint8), torch.zeros_like(values)
    residual, total = torch.zeros_like(values), torch.zeros_like(values, dtype=torch.float64)
    for key in range(messages):
        residual = residual + values if feedback else values.clone()
        codec.encode(residual, wire, key=key, error=residual)
        codec.decode(wire, out)
        total += out
    return float((total / messages - values).norm() / values.norm())
