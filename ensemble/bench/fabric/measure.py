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

from ensemble.bench.emulated_net import EmulatedNet, largest_parameter
from ensemble.bench.fabric.predict import bus_factor
from ensemble.bench.fabric.rows import LATENCY_BYTES, PLAIN
from ensemble.bench.launch.backends import LAYERS
from ensemble.bench.net_shapes import parameter_shapes
from ensemble.bench.timing import BARRIER_S, fitting_iterations, take_turns, time_iterations
from ensemble.comm import Communicator, SingleRank
from ensemble.comm.communicator import Completed, Op, Pending
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


class ComputedNet:
    """A small net that this processor computes: one of `rows.NETS`."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        if name == "compute-heavy":  # convolutions: much to compute and few parameters
            shape: tuple[int, ...] = (8, 3, 32, 32)
            for width in (3, *[32] * 5):
                layers += [nn.Conv2d(width, 32, 3, padding=1), nn.ReLU()]
            layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)]
        else:
            shape = (32, 1024)
            for rows, columns in itertools.pairwise((1024, 2048, 1024, 1024)):
                layers += [nn.Linear(rows, columns), nn.ReLU()]
            layers.append(nn.Linear(1024, 10))
        self._net = nn.Sequential(*layers)
        self.parameters = list(self._net.parameters())
        self._optimizer = torch.optim.SGD(self.parameters, lr=1e-3, momentum=0.9)
        self._batch, self._labels = torch.randn(shape), torch.randint(10, shape[:1])

    def step(self, exchange: GradientExchange | None = None) -> None:
        """A training step, with the exchange of its gradients if there is one."""
        self._optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(self._net(self._batch), self._labels)
        with exchange.overlap_backward() if exchange is not None else contextlib.nullcontext():
            loss.backward()  # type: ignore[no-untyped-call]
        if exchange is not None:
            exchange.finish()
        self._optimizer.step()


class SilentRanks(SingleRank):
    """Two ranks that never hear of each other: an exchange over them packs and unpacks, and sends nothing.

    Attributes:
        begun: when the all-reduce of each message was started, and its bytes.
    """

    world = 2

    def __init__(self) -> None:
        self.begun: list[tuple[float, int]] = []

    def start_all_reduce_(self, tensor: Tensor, op: Op = "sum") -> Pending:
        """Complete at once."""
        self.begun.append((time.perf_counter(), tensor.nbytes))
        return Completed()


def measure_training(comm: Communicator, options: dict[str, Any]) -> dict[str, Any]:
    """Time steps of each net without and with the exchange of gradients, in turn, on all ranks at once.

    Args:
        options: `nets`, for each of `rows.NETS` the `step_s` that is emulated, None where it is computed;
            `steps` of a round, `rounds`; `placement`.

    Returns:
        "latency_s": of an all-reduce of 4 KiB; "moved_bps", "ways": as above; "nets": for each net what
        `_train_net` returns.
    """
    small = torch.zeros(LATENCY_BYTES // 4)
    times = time_iterations(lambda: comm.all_reduce_(small), 20, comm)
    found = {name: _train_net(comm, name, step_s, options) for name, step_s in options["nets"].items()}
    moved_bps = _calibrate(comm, options["placement"])
    ways = _all_reduce_ways(comm)
    return {"latency_s": statistics.median(times), "moved_bps": moved_bps, "ways": ways, "nets": found}


def _train_net(comm: Communicator, name: str, step_s: float | None, options: dict[str, Any]) -> dict[str, Any]:
    """Train one net.

    Returns:
        `parameters` and `grad_bytes`; seconds of the steps `alone`, `packed` (gradients are packed, and not sent)
        and `together`; `sent_bytes` of a step together; of a packed step, in the median, the seconds until each
        message is `ready`, their `sizes` in bytes, and this process's `cpu_s`.
    """
    net: ComputedNet | EmulatedNet
    net = ComputedNet(name) if step_s is None else EmulatedNet(name, step_s, torch.ones(largest_parameter(name)))
    silent = SilentRanks()
    among: dict[str, Communicator | None] = {"alone": None, "packed": silent, "together": comm}
    found: dict[str, Any] = {way: [] for way in among}
    ready, cpu_s = list[list[float]](), list[float]()
    for _ in range(options["rounds"]):
        for way, ranks in among.items():
            # Made in each turn: two exchanges would listen to the same parameters, and need twice the memory.
            with _open_exchange(net, ranks) as exchange:
                net.step(exchange)
                comm.barrier(BARRIER_S)
                sent = comm.sent_bytes
                for _ in range(options["steps"]):
                    silent.begun.clear()
                    begun, cpu = time.perf_counter(), time.process_time()
                    net.step(exchange)
                    found[way].append(time.perf_counter() - begun)
                    if way == "packed":
                        cpu_s.append(time.process_time() - cpu)
                        ready.append([at - begun for at, _ in silent.begun])
                        found["sizes"] = [size for _, size in silent.begun]
                found["sent_bytes"] = (comm.sent_bytes - sent) / options["steps"]  # of the last: together
    return {
        "parameters": sum(p.numel() for p in net.parameters),
        "grad_bytes": sum(p.numel() * p.element_size() for p in net.parameters),
        **found,
        "ready": [statistics.median(each) for each in zip(*ready, strict=True)],
        "cpu_s": statistics.median(cpu_s),
    }


@contextlib.contextmanager
def _open_exchange(
    net: ComputedNet | EmulatedNet, ranks: Communicator | None
) -> Iterator[GradientExchange | None]:
    """The exchange of a net's gradients among these ranks; None for no ranks."""
    if ranks is None:
        yield None
        return
    with contextlib.closing(GradientExchange(net.parameters, ranks)) as exchange:
        yield exchange
    for parameter in net.parameters:
        parameter.grad = None  # a view of the exchange's memory


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

    parameters = [
        nn.Parameter(torch.zeros(shape)) for shape in options.get("shapes") or parameter_shapes("resnet50")
    ]
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
