"""Predicts training steps from what is sent, with costs fitted to measured steps; pure.

Buckets are exchanged one after the other, each once its last gradient is computed (`exchange_end`); a step takes
at least as long as it computes.

The cost of a bucket of `size` bytes of fp32, of which each of n ranks sends `sent` and its host `wire`:

    cost = crowd · (codec · size + move · sent + message · (n - 1)) + 8 · wire / (efficiency · rate)

`codec` depends on the scheme, the others on the primitive. `crowd` is the number of ranks a core where
emulated hosts share the cores of one machine, and 1 where each host has its own.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import least_squares  # type: ignore[import-untyped]

from benchmarks.compression.cells import PREDICTED, Cell, StepRow, fastest_of, make_row
from benchmarks.compression.expected import format_bps
from benchmarks.compression.measure import PLAIN, UNLIMITED
from benchmarks.compression.published import LOSSLESS
from ensemble.bench.fabric.predict import hierarchical_rounds, rounds, wire_bytes
from ensemble.bench.launch.hosts import rate_bps
from ensemble.bench.launch.ranks import contiguous
from ensemble.bench.net_shapes import parameter_shapes, ready_times
from ensemble.bench.results import group_by
from ensemble.bench.step_model import Array, exchange_end

# A column of 1-bit SGD costs as much as so many bytes of its values.
_COLUMN_BYTES = 22
# Costs before anything was measured, and how strongly they hold where nothing says otherwise.
_USUAL = {"codec": 0.5e-9, "move": 0.5e-9, "message": 2e-4, "efficiency": 0.93}
_PRIOR = 0.02
#: From this speed-up on a scheme pays: what is below is within the errors of predictions.
PAYS = 1.05
_LEAST_BPS, _MOST_BPS = 1e6, 1e12


@dataclass(frozen=True, kw_only=True)
class PaysRow:
    """Up to which rate of the hosts' links low precision pays, with a core for each rank's exchange.

    Attributes:
        fabric: "tcp", or "direct": one that costs the processor nothing (`direct_costs`).
        kind: "below" a rate, "always", "never".  bps: that rate in bit/s, else None.
        scheme: the fastest just below it (or on the fastest link).
    """

    net: str
    device: str
    workers: int
    hosts: int
    fabric: str
    kind: str
    bps: float | None
    scheme: str

    @property
    def limit_bps(self) -> float:
        """0 for never, infinity for always."""
        return self.bps if self.bps is not None else math.inf if self.kind == "always" else 0.0

    @property
    def pays(self) -> str:
        """For people."""
        return self.kind if self.bps is None else f"{self.kind} {format_bps(self.bps)}"


@dataclass(frozen=True)
class Load:
    """The buckets of a network in a scheme, in the order of their exchange; arrays of a number for each bucket.

    Attributes:
        ready: when the last gradient is computed, as a share of the step.
        packed: bytes of fp32 that are packed; plain: that are not.
        sent: bytes of the message; a rank sends 2 (n - 1) / n of them.
        is_summed: whether ranks sum it in one collective, as plain values and PowerSGD's factors.
    """

    ready: Array
    packed: Array
    plain: Array
    sent: Array
    is_summed: Array


@dataclass(frozen=True)
class Costs:
    """What the model is made of.

    Attributes:
        codec: seconds a byte of fp32, by scheme.
        move, message: seconds a sent byte, and a message to each other rank, by primitive.
        efficiency: the share of a link's rate that is reached, by primitive.
    """

    codec: Mapping[str, float]
    move: Mapping[str, float]
    message: Mapping[str, float]
    efficiency: Mapping[str, float]


def load_of(net: str, scheme: Mapping[str, Any]) -> Load:
    """The buckets in which a member exchanges the gradients of a network."""
    return _load_of(net, tuple(scheme.items()))


@functools.cache
def _load_of(net: str, given: tuple[tuple[str, Any], ...]) -> Load:
    from ensemble.comm.buckets import assign_buckets
    from ensemble.comm.codecs import make_codec
    from ensemble.comm.gradients import BUCKET_BYTES, FIRST_BUCKET_BYTES
    from ensemble.comm.powersgd import matrix_shape

    scheme = None if dict(given)["name"] == PLAIN else dict(given)
    parameters = [torch.nn.Parameter(torch.empty(shape, device="meta")) for shape in parameter_shapes(net)]
    ready = dict(zip(map(id, parameters), ready_times(net), strict=True))
    rows = []
    for bucket in assign_buckets(parameters, scheme, FIRST_BUCKET_BYTES, BUCKET_BYTES):
        last, size, options = max(ready[id(p)] for p in bucket.parameters), 4 * bucket.size, bucket.compression
        if options is None:
            rows.append((last, 0, size, size, True))
        elif options["name"] == "powersgd":
            sent = 4 * options["rank"] * sum(sum(matrix_shape(p.shape)) for p in bucket.parameters)
            rows.append((last, size, 0, sent, True))
        else:
            columns = bucket.size / options.get("column", math.inf)
            sent = make_codec(options).wire_bytes(bucket.size)
            rows.append((last, size + _COLUMN_BYTES * columns, 0, sent, False))
    return Load(*np.array(rows, dtype=float).T)


def predict_s(cell: Cell, load: Load, costs: Costs, cores: float | None = None) -> float:
    """Seconds of a step.

    Args:
        cores: that all emulated hosts share; None where each rank has one of its own.
    """
    return _equation(cell, load, cores)(costs)


def _equation(cell: Cell, load: Load, cores: float | None) -> Callable[[Costs], float]:
    n, crowd = cell.workers, 1.0 if cores is None else max(1.0, cell.workers / cores)
    sent, ready = 2 * (n - 1) / n * load.sent, load.ready * cell.step_s
    of_sums, of_packs = _wire_shares(cell.primitive, n, cell.hosts)
    bits = 8 * np.where(load.is_summed, of_sums, of_packs) * load.sent
    bps = math.inf if cell.rate == UNLIMITED else rate_bps(cell.rate)

    def seconds(costs: Costs) -> float:
        work = costs.codec[cell.scheme] * load.packed + costs.codec[PLAIN] * load.plain
        work = work + costs.move[cell.primitive] * sent + costs.message[cell.primitive] * (n - 1)
        cost = crowd * work + bits / (costs.efficiency[cell.primitive] * bps)
        return max(cell.step_s, exchange_end(ready, cost))

    return seconds


@functools.cache
def _wire_shares(primitive: str, workers: int, hosts: int) -> tuple[float, float]:
    """Bytes that a host sends over its link for a byte of a message that is summed, and of one that is packed."""
    placement = contiguous(workers, hosts)
    groups = [[rank for rank in range(workers) if placement[rank] == host] for host in range(hosts)]
    flat = {name: rounds(name, range(workers), 1.0) for name in ("all_reduce", "all_to_all", "all_gather")}
    summed = hierarchical_rounds(groups, 1.0) if primitive == "hierarchical" else flat["all_reduce"]
    return wire_bytes(summed, placement), wire_bytes(flat["all_to_all"] + flat["all_gather"], placement)


def fit_costs(rows: Sequence[StepRow], loads: Callable[[Cell], Load], cores: float | None) -> Costs:
    """The costs with which predictions differ least, in the logarithm, from measured steps."""
    schemes = list(dict.fromkeys([PLAIN, *(row.scheme for row in rows)]))
    primitives = list(dict.fromkeys(row.primitive for row in rows))
    names = [("codec", scheme) for scheme in schemes]
    names += [(kind, primitive) for kind in ("move", "message", "efficiency") for primitive in primitives]
    usual = np.log([_USUAL[kind] for kind, _ in names])
    equations = [_equation(row, loads(row), cores) for row in rows]
    measured = np.log([row.step_ms / 1e3 for row in rows])

    def costs_of(x: Array) -> Costs:
        found: dict[str, dict[str, float]] = {kind: {} for kind in _USUAL}
        for (kind, name), value in zip(names, np.exp(x).tolist(), strict=True):
            found[kind][name] = value
        return Costs(**found)

    def residuals(x: Array) -> Array:
        costs = costs_of(x)
        return np.append(np.log([equation(costs) for equation in equations]) - measured, _PRIOR * (x - usual))

    share = np.array([kind == "efficiency" for kind, _ in names])
    least, most = np.where(share, math.log(0.3), usual - 12), np.where(share, 0.0, usual + 6)
    found = least_squares(residuals, usual, bounds=(least, most), loss="soft_l1", f_scale=0.1)
    return costs_of(found.x)


def predict_row(cell: Cell, load: Load, costs: Costs, cores: float | None = None) -> StepRow:
    """The predicted row of a cell."""
    sent = 2 * (cell.workers - 1) / cell.workers * float(load.sent.sum())
    return make_row(cell, PREDICTED, predict_s(cell, load, costs, cores), sent, len(load.sent))


def direct_costs(costs: Costs) -> Costs:
    """The costs over a fabric that reads and writes memory by itself, as RDMA and NCCL do: packing remains."""
    return dataclasses.replace(
        costs, move=dict.fromkeys(costs.move, 0.0), message=dict.fromkeys(costs.message, 0.0)
    )


def list_pays(
    cells: Iterable[Cell], loads: Callable[[Cell], Load], costs: Costs, fabric: str = "tcp"
) -> Iterator[PaysRow]:
    """Up to which rate low precision pays for each network, device and number of workers of these cells."""
    for key, own in group_by(cells, lambda cell: (cell.net, cell.device, cell.workers, cell.hosts)).items():
        same: dict[str, Any] = dict(zip(("net", "device", "workers", "hosts"), key, strict=True))
        once = [cell for cell in own if cell.rate == own[0].rate]

        def rows_at(bps: float, once: list[Cell] = once) -> tuple[StepRow, StepRow]:
            rated = (dataclasses.replace(cell, rate=f"{bps:.0f}bit") for cell in once)
            rows = [predict_row(cell, loads(cell), costs) for cell in rated]
            plain, packed = fastest_of(rows, (PLAIN,)), fastest_of(rows, LOSSLESS)
            assert plain is not None and packed is not None
            return plain, packed

        if {PLAIN} < {cell.scheme for cell in once if cell.scheme in (PLAIN, *LOSSLESS)}:
            kind, bps = crossing(lambda bps: rows_at(bps)[0].step_ms / rows_at(bps)[1].step_ms)
            scheme = rows_at(_MOST_BPS if bps is None else bps)[1].scheme
            yield PaysRow(**same, fabric=fabric, kind=kind, bps=bps, scheme=scheme)


def crossing(speedup: Callable[[float], float]) -> tuple[str, float | None]:
    """Up to which rate a speed-up is at least `PAYS`: kind and rate as of `PaysRow`, by bisection.

    Args:
        speedup: of a rate in bit/s; falls with it.
    """
    if speedup(_MOST_BPS) >= PAYS:
        return "always", None
    if speedup(_LEAST_BPS) < PAYS:
        return "never", None
    low, high = math.log(_LEAST_BPS), math.log(_MOST_BPS)
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if speedup(math.exp(middle)) >= PAYS else (low, middle)
    return "below", math.exp(low)
