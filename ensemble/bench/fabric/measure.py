"""What each rank does in the study of collectives: it runs them, checks them, and takes the time."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ensemble.bench.fabric.predict import bus_factor
from ensemble.bench.fabric.results import PLAIN
from ensemble.bench.launch.backends import LAYERS
from ensemble.comm import Communicator

# Values are small integers that repeat with a prime period: sums are exact, and a shift is noticed.
_PERIOD = 17
_LEAST = 3
BARRIER_S = 600.0
_CALIBRATED = 4 * 2**20


def measure(comm: Communicator, options: dict[str, Any]) -> dict[str, Any]:
    """Every collective of every size, over each layer in turn.

    Args:
        options: `collectives`, `sizes` in bytes, ascending, `layers`, `PLAIN` for the communicator itself and
            words of `LAYERS`, which have only an all-reduce of their own, `iterations` at most and `seconds` for
            those of one case, `rounds` between which the layers alternate, `placement`, `interface`, `device`.

    Returns:
        "cases": for each collective, size and layer its key, `count`, `times` of this rank in seconds, `wrong`
        elements, and `wire`, what this rank's host sent over the interface in each iteration; "moved_bps":
        bytes that all ranks together move in a second when none has to cross a link, None where all do;
        "ways": for each layer how its all-reduce goes, for `predict.layered`.
    """
    layers = {word: comm if word == PLAIN else LAYERS[word](comm) for word in options["layers"]}
    ways = {word: _way(layer) for word, layer in layers.items()}
    moved_bps = _calibrate(comm, options["placement"])
    cases = []
    for collective in options["collectives"]:
        for size in options["sizes"]:
            mine = {word: each for word, each in layers.items() if word == PLAIN or collective == "all_reduce"}
            cases += _cases(collective, size, mine, comm, options)
    return {"cases": cases, "moved_bps": moved_bps, "ways": ways}


def _way(layer: Communicator) -> dict[str, Any]:
    from ensemble.comm.hierarchical import Hierarchical, Hybrid

    if isinstance(layer, Hybrid):
        assert isinstance(layer.base, Hierarchical)
        return {"groups": layer.base.groups, "ways": layer.ways}
    return {"groups": layer.groups if isinstance(layer, Hierarchical) else (), "ways": ()}


def _cases(
    collective: str, size: int, layers: dict[str, Communicator], comm: Communicator, options: dict[str, Any]
) -> list[dict[str, Any]]:
    device = torch.device(options.get("device", "cpu"))
    count = max(1, size // 4 // comm.world) * comm.world
    found: dict[str, dict[str, Any]] = {}
    runs: dict[str, Callable[[], None]] = {}
    for word, layer in layers.items():
        wrong = check(collective, layer, count, device)
        runs[word] = _prepared(collective, layer, count, device)
        chain(runs[word], 1, comm)
        warm = max(chain(runs[word], 1, comm))
        found[word] = {"layer": word, "wrong": wrong, "times": [], "wire": 0, "each": _share(comm, warm, options)}
    for _ in range(options["rounds"]):
        for word in layers:
            before = interface_sent(options["interface"])
            found[word]["times"] += chain(runs[word], found[word]["each"], comm)
            comm.barrier(BARRIER_S)  # the other ranks of this host have sent what is theirs
            found[word]["wire"] += interface_sent(options["interface"]) - before
    for word, layer in layers.items():
        case = found[word]
        case["wrong"] += check(collective, layer, count, device)
        case["wire"] /= len(case["times"])
    return [{"collective": collective, "size": count * 4, "count": count, **case} for case in found.values()]


def _share(comm: Communicator, warm_s: float, options: dict[str, Any]) -> int:
    """Iterations of one round: as many as fit into the time, on the slowest rank."""
    slowest = torch.tensor([warm_s], dtype=torch.float64)
    comm.all_reduce_(slowest, "max")
    fit = int(options["seconds"] / max(slowest.item(), 1e-6))
    wanted: int = min(options["iterations"], max(_LEAST, fit))
    rounds: int = options["rounds"]
    return -(-wanted // rounds)


def chain(run: Callable[[], None], times: int, comm: Communicator) -> list[float]:
    """The time of each of some iterations, which follow each other as in nccl-tests."""
    comm.barrier(BARRIER_S)
    took, at = [], time.perf_counter()
    for _ in range(times):
        run()
        now = time.perf_counter()
        took.append(now - at)
        at = now
    return took


def _calibrate(comm: Communicator, placement: list[int]) -> float | None:
    """What all ranks together move in a second inside their hosts, all hosts at once."""
    groups = [[r for r, at in enumerate(placement) if at == host] for host in sorted(set(placement))]
    if min(map(len, groups)) < 2:
        return None
    (mine,) = [group for ranks in groups if (group := comm.group(ranks)) is not None]
    run = _prepared("all_reduce", mine, _CALIBRATED // 4, torch.device("cpu"))
    times = sorted([*chain(run, 1, comm), *chain(run, 6, comm)][1:])
    sent = sum(len(ranks) * bus_factor("all_reduce", len(ranks)) * _CALIBRATED for ranks in groups)
    middle = torch.tensor([times[len(times) // 2]], dtype=torch.float64)
    comm.all_reduce_(middle, "max")
    return sent / middle.item()


# --- the collectives -----------------------------------------------------------------------------------------


def _prepared(collective: str, comm: Communicator, count: int, device: torch.device) -> Callable[[], None]:
    """The collective on a buffer that is there already."""
    length = count // comm.world if collective == "all_gather" else count
    buffer = torch.empty(length, device=device).zero_()  # torch.zeros would be pages that are not there yet
    run = _RUN[collective]

    def once() -> None:
        run(comm, buffer)
        if device.type == "cuda":
            torch.cuda.synchronize()

    return once


def check(collective: str, comm: Communicator, count: int, device: torch.device) -> int:
    """Run it once on known values; how many elements of this rank's result are wrong."""
    n, rank = comm.world, comm.rank
    part = count // n
    mine = slice(rank * part, (rank + 1) * part)
    total = sum((_pattern(r, count) for r in range(1, n)), _pattern(0, count))
    given, expected = _pattern(rank, count), total
    if collective == "reduce_scatter":
        expected = total[mine]
    elif collective == "all_gather":
        given, expected = _pattern(rank, part), torch.cat([_pattern(r, part) for r in range(n)])
    elif collective == "broadcast":
        expected = _pattern(0, count)
    elif collective == "all_to_all":
        expected = torch.cat([_pattern(r, count)[mine] for r in range(n)])
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


def interface_sent(interface: str) -> int:
    """Bytes of frames that this process's host has sent through an interface (proc_pid_net(5))."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == interface:
            return int(figures.split()[8])
    return 0
