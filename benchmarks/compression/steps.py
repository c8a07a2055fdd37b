"""Measures training steps of emulated networks over links: networks x schemes x workers x rates.

A packed exchange is an all-to-all and an all-gather of stripes; plain fp32 and PowerSGD's factors are summed in a
ring. Accelerators are timed waits of published length.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from benchmarks.compression.accuracy import PLAIN, Schemes
from benchmarks.emulated_net import EmulatedNet, largest_parameter
from benchmarks.launch import hosts
from benchmarks.launch.ranks import run_ranks
from benchmarks.net_shapes import step_seconds
from benchmarks.results import Report, slowest_quartiles
from benchmarks.timing import take_turns, time_iterations

if TYPE_CHECKING:
    from torch import Tensor

    from ensemble.comm import Communicator

UNLIMITED = "unlimited"
_BATCH = 32  # of a worker: a batch of 256 on 8 of them, as in Grubic et al.
_TIMEOUT_S = 3600.0
_BLOCK = 2**20  # random values, repeated: a gradient's values do not change its time


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """One combination's step.

    Attributes:
        net, device: of `net_shapes.NETS`, on an emulated accelerator.
        alone_ms: of a step without an exchange.
        workers: ranks, each on a host.  rate: of the hosts' links.
        scheme: what gradients travel as.
        step_ms: a step, the median of the slowest rank; low_ms, high_ms: its quartiles.
        samples_per_s: of all workers.
        sent_mb: 10^6 bytes a rank sends in a step, by the communicator's count.
        messages: of a step.
    """

    net: str
    device: str
    alone_ms: float
    workers: int
    rate: str
    scheme: str
    step_ms: float
    low_ms: float
    high_ms: float
    samples_per_s: float
    sent_mb: float
    messages: int


def study_steps(options: Namespace, schemes: Schemes, report: Report) -> Iterator[StepRow]:
    """Measure all combinations; schemes of one network, device and link take turns.

    Raises:
        RanksError: a rank failed.
    """
    rates, reason = options.links, hosts.unavailable()
    if reason is not None:
        rates = [UNLIMITED]
        report(f"steps: {reason}; only this machine's loopback")
    cases = [
        {"net": net, "device": device, "step_s": step_s, "schemes": schemes}
        for net, device in itertools.product(options.nets, options.devices)
        if (step_s := step_seconds(device, net, _BATCH)) is not None
    ]
    with tempfile.NamedTemporaryFile(prefix="bench-") as values:
        _write_values(values, max((largest_parameter(case["net"]) for case in cases), default=0))
        arguments = {"cases": cases, "values": values.name, "steps": options.steps}
        for workers, rate in itertools.product(options.workers, rates):
            report(f"steps: {workers} workers, {rate}: {len(cases) * len(schemes)} cases")
            with hosts.make_hosts(0 if reason else workers, None if rate == UNLIMITED else rate) as made:
                by_rank = run_ranks(
                    f"{__name__}:measure_steps",
                    arguments,
                    placement=range(workers),
                    hosts=made,
                    timeout_s=_TIMEOUT_S,
                )
            for case, measured in zip(cases, zip(*by_rank, strict=True), strict=True):
                yield from step_rows(case, workers, rate, measured)


def step_rows(
    case: dict[str, Any], workers: int, rate: str, by_rank: Sequence[dict[str, dict[str, Any]]]
) -> Iterator[StepRow]:
    """The rows of what each rank measured of a network on a device."""
    for scheme, first in by_rank[0].items():
        step_s, low_s, high_s = slowest_quartiles(rank[scheme]["times"] for rank in by_rank)
        yield StepRow(
            net=case["net"],
            device=case["device"],
            alone_ms=1e3 * case["step_s"],
            workers=workers,
            rate=rate,
            scheme=scheme,
            step_ms=1e3 * step_s,
            low_ms=1e3 * low_s,
            high_ms=1e3 * high_s,
            samples_per_s=_BATCH * workers / step_s,
            sent_mb=max(rank[scheme]["sent"] for rank in by_rank) / 1e6,
            messages=first["messages"],
        )


def _write_values(file: IO[bytes], count: int) -> None:
    block = np.random.default_rng(0).standard_normal(min(count, _BLOCK)).astype(np.float32)
    for _ in range(-(-count // _BLOCK)):
        file.write(block.tobytes())
    file.flush()


# --- what ranks measure --------------------------------------------------------------------------------------


def measure_steps(comm: Communicator, options: dict[str, Any]) -> list[dict[str, dict[str, Any]]]:
    """Time steps of emulated networks in each scheme.

    Args:
        options: `cases`, each with `net`, its `step_s` and `schemes`, the options of each by its name; `values`: a
            file of fp32 numbers; `steps`, after one that is not counted.

    Returns:
        for each case, by scheme: `times` of this rank in seconds; of a step `messages`, and `sent`, bytes by the
        communicator's count.
    """
    import torch

    length = max(largest_parameter(case["net"]) for case in options["cases"])
    values = torch.from_file(options["values"], shared=True, size=length, dtype=torch.float32)
    return [_measure_case(comm, case, values, options) for case in options["cases"]]


def _measure_case(
    comm: Communicator, case: dict[str, Any], values: Tensor, options: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    from ensemble.comm.gradients import GradientExchange

    net = EmulatedNet(case["net"], case["step_s"], values)
    measured: dict[str, dict[str, Any]] = {}
    for scheme, scheme_options in case["schemes"].items():
        compression = None if scheme_options["name"] == PLAIN else scheme_options
        # Made anew for each: the buffers of all schemes at once would not fit into memory.
        with contextlib.closing(GradientExchange(net.parameters, comm, compression=compression)) as exchange:
            run = {scheme: lambda exchange=exchange: net.step(exchange)}
            time_iterations(run[scheme], 1, comm)
            taken = take_turns(comm, run, {scheme: options["steps"]}, 1)[scheme]
            measured[scheme] = {**taken, "messages": len(exchange)}
        for parameter in net.parameters:
            parameter.grad = None  # a view of the exchange's buffers
    return measured
