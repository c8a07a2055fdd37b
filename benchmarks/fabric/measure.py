"""What the ranks of the fabric study measure: collectives, and data-parallel training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.emulated_net import EmulatedNet, largest_parameter
from benchmarks.launch.backends import LAYERS
from benchmarks.timing import fitting_iterations, take_turns, time_iterations
from ensemble.comm import Communicator
from ensemble.comm.gradients import GradientExchange

# Values are small integers that repeat with a prime period: sums are exact, and a shift is noticed.
_PERIOD = 17
_LEAST_ITERATIONS = 3
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all")
PLAIN = "plain"  # the layer that is the communicator itself


def measure_collectives(comm: Communicator, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Time every collective in every size, over each layer in turn.

    Args:
        options: `collectives`; `sizes` in bytes, ascending; `layers`: `PLAIN` for the communicator itself, and
            names of `LAYERS`, which have only an all-reduce of their own; `iterations` at most and `seconds` for
            those of one case; `rounds`, between which the layers alternate; `device`.

    Returns:
        For each collective, size and layer its key, `count`, `times` of this rank in seconds, `wrong` elements.
    """
    layers = {name: comm if name == PLAIN else LAYERS[name](comm) for name in options["layers"]}
    cases = []
    for collective in options["collectives"]:
        for size in options["sizes"]:
            able = {name: layer for name, layer in layers.items() if name == PLAIN or collective == "all_reduce"}
            cases += _measure_cases(collective, size, able, comm, options)
    return cases


def _measure_cases(
    collective: str, size: int, layers: dict[str, Communicator], comm: Communicator, options: dict[str, Any]
) -> list[dict[str, Any]]:
    device = torch.device(options.get("device", "cpu"))
    count = max(1, size // 4 // comm.world) * comm.world
    wrong = {name: count_wrong(collective, layer, count, device) for name, layer in layers.items()}
    runs = {name: _prepare(collective, layer, count, device) for name, layer in layers.items()}
    repeats = {}
    for name, run in runs.items():
        time_iterations(run, 1, comm)
        warm = max(time_iterations(run, 1, comm))
        fit = fitting_iterations(comm, warm, options["seconds"], _LEAST_ITERATIONS, options["iterations"])
        repeats[name] = -(-fit // options["rounds"])
    timed = take_turns(comm, runs, repeats, options["rounds"])
    same = {"collective": collective, "size": count * 4, "count": count}
    for name, layer in layers.items():
        wrong[name] += count_wrong(collective, layer, count, device)
    return [{**same, "layer": name, "wrong": wrong[name], **case} for name, case in timed.items()]


# --- the collectives -----------------------------------------------------------------------------------------


def _prepare(collective: str, comm: Communicator, count: int, device: torch.device) -> Callable[[], None]:
    """The collective on an allocated buffer."""
    length = count // comm.world if collective == "all_gather" else count
    buffer = torch.empty(length, device=device).zero_()  # torch.zeros would leave its pages unallocated
    run = _RUN[collective]

    def once() -> None:
        run(comm, buffer)
        if device.type == "cuda":
            torch.cuda.synchronize()

    return once


def count_wrong(collective: str, comm: Communicator, count: int, device: torch.device) -> int:
    """Run a collective on known values; returns how many elements of this rank's result are wrong."""
    n, rank = comm.world, comm.rank
    part = count // n
    own = slice(rank * part, (rank + 1) * part)
    total = sum((_pattern(r, count) for r in range(1, n)), _pattern(0, count))
    sent, expected = _pattern(rank, count), total
    if collective == "reduce_scatter":
        expected = total[own]
    elif collective == "all_gather":
        sent, expected = _pattern(rank, part), torch.cat([_pattern(r, part) for r in range(n)])
    elif collective == "broadcast":
        expected = _pattern(0, count)
    elif collective == "all_to_all":
        expected = torch.cat([_pattern(r, count)[own] for r in range(n)])
    result: Any = sent.to(device)
    returned = _RUN[collective](comm, result)
    if collective == "reduce" and rank != 0:
        return 0  # undefined
    result = result if returned is None else returned
    whole = torch.cat(result) if isinstance(result, list) else result
    return int((whole.cpu() != expected).sum().item())


def _pattern(rank: int, count: int) -> Tensor:
    period = (torch.arange(_PERIOD) * 7 + rank * 13) % _PERIOD
    return period.float().repeat(-(-count // _PERIOD))[:count]


# Those that work in place return nothing.
_RUN: dict[str, Callable[[Communicator, Tensor], Tensor | list[Tensor] | None]] = {
    "all_reduce": lambda comm, tensor: comm.all_reduce_(tensor),
    "reduce_scatter": lambda comm, tensor: comm.reduce_scatter(tensor),
    "all_gather": lambda comm, tensor: comm.all_gather(tensor, equal=True),
    "broadcast": lambda comm, tensor: comm.broadcast_(tensor),
    "reduce": lambda comm, tensor: comm.reduce_(tensor),
    "all_to_all": lambda comm, tensor: comm.all_to_all(tensor),
}


# --- training -----------------------------------------------------------------------------------------------


def measure_training(comm: Communicator, options: dict[str, Any]) -> dict[str, Any]:
    """Time steps of each net without and with the exchange of gradients, in turn, on all ranks at once.

    Args:
        options: `nets`, and for each the `step_s` that is emulated; `steps`, after one that is not counted.

    Returns:
        For each net `parameters`, and seconds of the steps `alone` and `together`.
    """
    return {name: _train_net(comm, name, step_s, options["steps"]) for name, step_s in options["nets"].items()}


def _train_net(comm: Communicator, name: str, step_s: float, steps: int) -> dict[str, Any]:
    net = EmulatedNet(name, step_s, torch.ones(largest_parameter(name)))
    time_iterations(net.step, 1, comm)
    alone = time_iterations(net.step, steps, comm)
    with contextlib.closing(GradientExchange(net.parameters, comm)) as exchange:
        time_iterations(lambda: net.step(exchange), 1, comm)
        together = time_iterations(lambda: net.step(exchange), steps, comm)
    return {"parameters": sum(p.numel() for p in net.parameters), "alone": alone, "together": together}
