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
from ensemble.bench.fabric.rows import NETS, PLAIN
from ensemble.bench.launch.backends import LAYERS
from ensemble.bench.timing import BARRIER_S, fitting_iterations, interface_sent, time_iterations
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
    from ensemble.comm.hierarchical import Hierarchical, Hybrid

    if isinstance(layer, Hybrid):
        assert isinstance(layer.base, Hierarchical)
        return {"groups": layer.base.groups, "ways": layer.ways}
    return {"groups": layer.groups if isinstance(layer, Hierarchical) else (), "ways": ()}


def _measure_cases(
    collective: str, size: int, layers: dict[str, Communicator], comm: Communicator, options: dict[str, Any]
) -> list[dict[str, Any]]:
    device = torch.device(options.get("device", "cpu"))
    count = max(1, size // 4 // comm.world) * comm.world
    found: dict[str, dict[str, Any]] = {}
    runs: dict[str, Callable[[], None]] = {}
    for name, layer in layers.items():
        wrong = count_wrong(collective, layer, count, device)
        runs[name] = _prepare(collective, layer, count, device)
        time_iterations(runs[name], 1, comm)
        warm = max(time_iterations(runs[name], 1, comm))
        fit = fitting_iterations(comm, warm, options["seconds"], _LEAST_ITERATIONS, options["iterations"])
        found[name] = {"layer": name, "wrong": wrong, "times": [], "wire": 0, "each": -(-fit // options["rounds"])}
    for _ in range(options["rounds"]):
        for name in layers:
            before = interface_sent(options["interface"])
            found[name]["times"] += time_iterations(runs[name], found[name]["each"], comm)
            comm.barrier(BARRIER_S)  # the host's other ranks have sent theirs, too
            found[name]["wire"] += interface_sent(options["interface"]) - before
    for name, layer in layers.items():
        case = found[name]
        case["wrong"] += count_wrong(collective, layer, count, device)
        case["wire"] /= len(case["times"])
    return [{"collective": collective, "size": count * 4, "count": count, **case} for case in found.values()]


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
    result = _RUN[collective](comm, given.to(device))
    if collective == "reduce" and rank != 0:
        return 0  # undefined
    whole = result if isinstance(result, Tensor) else torch.cat(result)
    return int((whole.cpu() != expected).sum().item())


def _pattern(rank: int, count: int) -> Tensor:
    period = (torch.arange(_PERIOD) * 7 + rank * 13) % _PERIOD
    return period.float().repeat(-(-count // _PERIOD))[:count]


def _in_place(run: Callable[[Communicator, Tensor], None]) -> Callable[[Communicator, Tensor], Tensor]:
    def result(comm: Communicator, tensor: Tensor) -> Tensor:
        run(comm, tensor)
        return tensor

    return result


_RUN: dict[str, Callable[[Communicator, Tensor], Tensor | list[Tensor]]] = {
    "all_reduce": _in_place(lambda comm, tensor: comm.all_reduce_(tensor)),
    "reduce_scatter": lambda comm, tensor: comm.reduce_scatter(tensor),
    "all_gather": lambda comm, tensor: comm.all_gather(tensor, equal=True),
    "broadcast": _in_place(lambda comm, tensor: comm.broadcast_(tensor)),
    "reduce": _in_place(lambda comm, tensor: comm.reduce_(tensor)),
    "all_to_all": lambda comm, tensor: comm.all_to_all(tensor),
}


# --- training -----------------------------------------------------------------------------------------------


_LATENCY_VALUES = 1024


def make_compute_heavy() -> tuple[nn.Module, tuple[int, ...]]:
    """A net of convolutions, with much to compute and few parameters, and the shape of its batch."""
    layers = [each for width in (3, *[32] * 5) for each in (nn.Conv2d(width, 32, 3, padding=1), nn.ReLU())]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)), (8, 3, 32, 32)


def make_parameter_heavy() -> tuple[nn.Module, tuple[int, ...]]:
    """A net of large linear layers, with many parameters and little to compute, and the shape of its batch."""
    sizes = itertools.pairwise((1024, 2048, 1024, 1024))
    layers = [each for rows, columns in sizes for each in (nn.Linear(rows, columns), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(1024, 10)), (32, 1024)


_MAKE_NET = dict(zip(NETS, (make_compute_heavy, make_parameter_heavy), strict=True))


def measure_training(comm: Communicator, options: dict[str, Any]) -> dict[str, Any]:
    """Time steps of each net without and with the exchange of gradients, in turn, on all ranks at once.

    Args:
        options: `nets`, of `rows.NETS`; `steps` of a round, `rounds`.

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
    net, shape = _MAKE_NET[name]()
    parameters = list(net.parameters())
    optimizer = torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)
    exchange = GradientExchange(parameters, comm)
    batch, labels = torch.randn(shape), torch.randint(10, shape[:1])
    backward: list[float] = []
    alone: list[float] = []
    together: list[float] = []
    try:
        _time_step(net, optimizer, batch, labels, exchange)
        sent = comm.sent_bytes
        _time_step(net, optimizer, batch, labels, exchange)
        sent = comm.sent_bytes - sent
        for _ in range(options["rounds"]):
            for times, used in ((alone, None), (together, exchange)):
                comm.barrier(BARRIER_S)
                for _ in range(options["steps"]):
                    start = time.perf_counter()
                    backward_s = _time_step(net, optimizer, batch, labels, used)
                    times.append(time.perf_counter() - start)
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


def _time_step(
    net: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor, labels: Tensor, used: GradientExchange | None
) -> float:
    """Train one step; returns the seconds of its backward pass, which overlaps with the exchange."""
    optimizer.zero_grad(set_to_none=True)
    loss = nn.functional.cross_entropy(net(batch), labels)
    start = time.perf_counter()
    with used.overlap_backward() if used is not None else contextlib.nullcontext():
        loss.backward()  # type: ignore[no-untyped-call]
    seconds = time.perf_counter() - start
    if used is not None:
        used.finish()
    optimizer.step()
    return seconds


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
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in options.get("shapes") or resnet50_shapes()]
    grads = [torch.ones_like(p) for p in parameters]
    tuned = _tuned_threshold(comm, parameters) if options["tune"] else None
    thresholds = sorted({*options["thresholds"], *([tuned] if tuned is not None else [])})
    found: list[dict[str, Any]] = [{"threshold": t, "chosen": t == tuned, "times": []} for t in thresholds]
    for _ in range(options["rounds"]):
        for case in found:
            # Buckets that are full at one byte: every tensor is sent by itself.
            size = case["threshold"] or 1
            exchange = GradientExchange(parameters, comm, bucket_bytes=size, first_bucket_bytes=size)
            case["messages"] = len(exchange)
            times = [_time_exchange(exchange, parameters, grads, comm) for _ in range(options["steps"] + 1)]
            case["times"] += times[1:]  # the first one touches its memory for the first time
            exchange.close()
    return found


def _tuned_threshold(comm: Communicator, parameters: list[nn.Parameter]) -> int:
    """The size of buckets that a member with these parameters chooses when it starts."""
    from ensemble.comm.autotune.plan import open_communicator

    options = {"name": "torch", "bucket_bytes": "auto"}
    return open_communicator(comm, options, [p.numel() for p in parameters])[1].bucket_bytes


def _time_exchange(
    exchange: GradientExchange, parameters: list[nn.Parameter], grads: list[torch.Tensor], comm: Communicator
) -> float:
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad
    comm.barrier(BARRIER_S)
    start = time.perf_counter()
    exchange.finish()
    return time.perf_counter() - start


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
