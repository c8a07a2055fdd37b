"""What the ranks of the fabric study measure: collectives, data-parallel training, and the fusion of gradients."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ensemble.bench.fabric.predict import bus_factor
from ensemble.bench.fabric.study import PLAIN
from ensemble.bench.launch.backends import LAYERS
from ensemble.bench.timing import BARRIER_S, fitting_iterations, take_turns, time_iterations
from ensemble.comm import Communicator
from ensemble.comm.gradients import GradientExchange

# Values are small integers that repeat with a prime period: sums are exact, and a shift is noticed.
_PERIOD = 17
_LEAST_ITERATIONS = 3
_CALIBRATION_BYTES = 4 * 2**20


def measure_collectives(comm: Communicator, options: dict[str, Any]) -> dict[str, Any]:
    """Time every collective in every size, over each layer in turn.

    Args:
        options: `collectives`; `sizes` in bytes, ascending; `layers`: `PLAIN` for the communicator itself, and
            names of `LAYERS`, which have only an all-reduce of their own; `iterations` at most and `seconds` for
            those of one case; `rounds`, between which the layers alternate; `placement`, `interface`, `device`.

    Returns:
        "cases": for each collective, size and layer its key, `count`, `times` of this rank in seconds, `wrong`
        elements, and `wire`, bytes that this rank's host sent over the interface in each iteration; "moved_bps":
        bytes/s that all ranks together move inside their hosts, None where a host has one rank;
        "ways": for each layer the groups and sizes of its all-reduce, for `predict.layered_rounds`.
    """
    layers = {name: comm if name == PLAIN else LAYERS[name](comm) for name in options["layers"]}
    ways = {name: _all_reduce_ways(layer) for name, layer in layers.items()}
    moved_bps = _calibrate(comm, options["placement"])
    cases = []
    for collective in options["collectives"]:
        for size in options["sizes"]:
            able = {name: each for name, each in layers.items() if name == PLAIN or collective == "all_reduce"}
            cases += _measure_cases(collective, size, able, comm, options)
    return {"cases": cases, "moved_bps": moved_bps, "ways": ways}


def _all_reduce_ways(layer: Communicator) -> dict[str, Any]:
    return {"groups": getattr(layer, "groups", ()), "ways": getattr(layer, "ways", ())}


def _measure_cases(
    collective: str, size: int, layers: dict[str, Communicator], comm: Communicator, options: dict[str, Any]
) -> list[dict[str, Any]]:
    device = torch.device(options.get("device", "cpu"))
    count = max(1, size // 4 // comm.world) * comm.world
    wrong = {name: count_wrong(collective, layer, count, device) for name, layer in layers.items()}
    runs = {name: _prepare(collective, layer, count, device) for name, layer in layers.items()}
    each = {}
    for name, run in runs.items():
        time_iterations(run, 1, comm)
        warm = max(time_iterations(run, 1, comm))
        fit = fitting_iterations(comm, warm, options["seconds"], _LEAST_ITERATIONS, options["iterations"])
        each[name] = -(-fit // options["rounds"])
    found = take_turns(comm, runs, each, options["rounds"], options["interface"])
    same = {"collective": collective, "size": count * 4, "count": count}
    for name, layer in layers.items():
        wrong[name] += count_wrong(collective, layer, count, device)
    return [{**same, "layer": name, "wrong": wrong[name], **case} for name, case in found.items()]


def _calibrate(comm: Communicator, placement: list[int]) -> float | None:
    """Bytes/s that all ranks together move inside their hosts, all hosts at once."""
    groups = [[r for r, at in enumerate(placement) if at == host] for host in sorted(set(placement))]
    if min(map(len, groups)) < 2:
        return None
    (own,) = [group for ranks in groups if (group := comm.group(ranks)) is not None]
    run = _prepare("all_reduce", own, _CALIBRATION_BYTES // 4, torch.device("cpu"))
    times = sorted([*time_iterations(run, 1, comm), *time_iterations(run, 6, comm)][1:])
    sent = sum(len(ranks) * bus_factor("all_reduce", len(ranks)) * _CALIBRATION_BYTES for ranks in groups)
    middle = torch.tensor([times[len(times) // 2]], dtype=torch.float64)
    comm.all_reduce_(middle, "max")
    return sent / middle.item()


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
    given, expected = _pattern(rank, count), total
    if collective == "reduce_scatter":
        expected = total[own]
    elif collective == "all_gather":
        given, expected = _pattern(rank, part), torch.cat([_pattern(r, part) for r in range(n)])
    elif collective == "broadcast":
        expected = _pattern(0, count)
    elif collective == "all_to_all":
        expected = torch.cat([_pattern(r, count)[own] for r in range(n)])
    result: Any = given.to(device)
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


_LATENCY_VALUES = 1024


def make_net(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    """A net of `study.NETS`, and the shape of its batch."""
    layers: list[nn.Module] = []
    if name == "compute-heavy":  # convolutions: much to compute and few parameters
        for width in (3, *[32] * 5):
            layers += [nn.Conv2d(width, 32, 3, padding=1), nn.ReLU()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)), (8, 3, 32, 32)
    for rows, columns in itertools.pairwise((1024, 2048, 1024, 1024)):
        layers += [nn.Linear(rows, columns), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(1024, 10)), (32, 1024)


def measure_training(comm: Communicator, options: dict[str, Any]) -> dict[str, Any]:
    """Time steps of each net without and with the exchange of gradients, in turn, on all ranks at once.

    Args:
        options: `nets`, of `study.NETS`; `steps` of a round, `rounds`.

    Returns:
        "latency_s": of an all-reduce of 4 KiB; "ways": as above; "nets": for each net `parameters`, `grad_bytes`,
        `messages` and `sent_bytes` of a step, `batch`, seconds of the steps `alone` and `together`, and of a step
        alone its backward pass, `backward_s`.
    """
    small = torch.zeros(_LATENCY_VALUES)
    times = time_iterations(lambda: comm.all_reduce_(small), 20, comm)
    found = {name: _train_net(comm, name, options) for name in options["nets"]}
    return {"latency_s": statistics.median(times), "ways": _all_reduce_ways(comm), "nets": found}


def _train_net(comm: Communicator, name: str, options: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    net, shape = make_net(name)
    parameters = list(net.parameters())
    optimizer = torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)
    batch, labels = torch.randn(shape), torch.randint(10, shape[:1])
    # (seconds of a step, of them of its backward pass)
    alone: list[tuple[float, float]] = []
    together: list[tuple[float, float]] = []
    with contextlib.closing(GradientExchange(parameters, comm)) as exchange:
        _time_step(net, optimizer, batch, labels, exchange)
        sent = comm.sent_bytes
        _time_step(net, optimizer, batch, labels, exchange)
        sent = comm.sent_bytes - sent
        for _ in range(options["rounds"]):
            for times, used in ((alone, None), (together, exchange)):
                comm.barrier(BARRIER_S)
                times += [_time_step(net, optimizer, batch, labels, used) for _ in range(options["steps"])]
        messages = len(exchange)
    return {
        "parameters": sum(p.numel() for p in parameters),
        "grad_bytes": sum(p.numel() * p.element_size() for p in parameters),
        "messages": messages,
        "sent_bytes": sent,
        "batch": shape[0],
        "alone": [step_s for step_s, _ in alone],
        "together": [step_s for step_s, _ in together],
        "backward_s": statistics.median(backward_s for _, backward_s in alone),
    }


def _time_step(
    net: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor, labels: Tensor, used: GradientExchange | None
) -> tuple[float, float]:
    """Train one step; returns its seconds, and those of its backward pass, which overlaps with the exchange."""
    start = time.perf_counter()
    optimizer.zero_grad(set_to_none=True)
    loss = nn.functional.cross_entropy(net(batch), labels)
    forward_s = time.perf_counter() - start
    with used.overlap_backward() if used is not None else contextlib.nullcontext():
        loss.backward()  # type: ignore[no-untyped-call]
    backward_s = time.perf_counter() - start - forward_s
    if used is not None:
        used.finish()
    optimizer.step()
    return time.perf_counter() - start, backward_s


# --- fusion -------------------------------------------------------------------------------------------------


def measure_fusion(comm: Communicator, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Time the exchange of a ResNet-50's gradients, without a backward pass, at each threshold in turn.

    Args:
        options: `shapes` of the gradients, a ResNet-50's unless given; `thresholds` in bytes, 0 for no fusion;
            `rounds`, between which they alternate; `steps` of each; `tune`: whether to add the
            threshold that a member would choose.

    Returns:
        For each threshold its `messages`, this rank's seconds `times`, and whether a member chooses it, `chosen`.
    """
    from ensemble.comm.autotune.plan import open_communicator

    parameters = [nn.Parameter(torch.zeros(shape)) for shape in options.get("shapes") or resnet50_shapes()]
    tuned = None
    if options["tune"]:
        sizes = [parameter.numel() for parameter in parameters]
        tuned = open_communicator(comm, {"name": "torch", "bucket_bytes": "auto"}, sizes)[1].bucket_bytes
    gradients = [torch.ones_like(parameter) for parameter in parameters]

    def exchange_once() -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        exchange.finish()

    thresholds = sorted({*options["thresholds"], *([tuned] if tuned is not None else [])})
    found: list[dict[str, Any]] = [{"threshold": t, "chosen": t == tuned, "times": []} for t in thresholds]
    for _ in range(options["rounds"]):
        for case in found:
            # Buckets that are full at one byte: every tensor is sent by itself.
            size = case["threshold"] or 1
            exchange = GradientExchange(parameters, comm, bucket_bytes=size, first_bucket_bytes=size)
            with contextlib.closing(exchange):
                case["messages"] = len(exchange)
                times = [time_iterations(exchange_once, 1, comm)[0] for _ in range(options["steps"] + 1)]
            case["times"] += times[1:]  # the first one touches its memory for the first time
    return found


def resnet50_shapes() -> Iterator[tuple[int, ...]]:
    """The shapes of a ResNet-50's 161 parameters (He et al. 2016), in the order of the forward pass."""
    yield from ((64, 3, 7, 7), (64,), (64,))
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            yield from ((width, inputs, 1, 1), (width,), (width,))
            yield from ((width, width, 3, 3), (width,), (width,))
            yield from ((4 * width, width, 1, 1), (4 * width,), (4 * width,))
            if block == 0:
                yield from ((4 * width, inputs, 1, 1), (4 * width,), (4 * width,))
            inputs = 4 * width
    yield from ((1000, inputs), (1000,))
