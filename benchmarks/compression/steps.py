"""Measures training steps of emulated networks over links: networks x schemes x primitives x workers x rates."""

from __future__ import annotations

import itertools
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import IO, Any

import numpy as np

from benchmarks.compression.cells import MEASURED, PRIMITIVES, Cell, StepRow, choose_checks, list_cells, make_row
from benchmarks.compression.measure import UNLIMITED, Schemes
from benchmarks.compression.predict import (
    Load,
    direct_costs,
    fit_costs,
    list_pays,
    load_of,
    predict_row,
    predict_s,
)
from benchmarks.compression.steps_expected import CheckRow, show_steps
from benchmarks.options import check_names
from ensemble.bench.accelerators import DEVICES, step_seconds
from ensemble.bench.emulated_net import largest_parameter
from ensemble.bench.launch import hosts
from ensemble.bench.launch.backends import unavailable_reason
from ensemble.bench.launch.ranks import LOOPBACK, contiguous, run_ranks
from ensemble.bench.net_shapes import NETS
from ensemble.bench.results import Outcome, Report, group_by, slowest_quartiles
from ensemble.spec import SpecError
from pipelines.environment.machine_limits import usable_cpus

# The device of a network whose step time nobody has published: it is measured on a core of this machine.
_CORE = "core"
# Of a worker: a batch of 256 on 8 of them, as in Grubic et al.; AN4's sequences.
_IMAGES, _SEQUENCES, _FRAMES = 32, 16, 20
_RANKS, _TIMEOUT_S = "benchmarks.compression.emulated:", 3600.0
_BLOCK = 2**20  # random values, repeated: a gradient's values do not change its time
_LSTM_STEPS = 3


def study_steps(options: Namespace, schemes: Schemes, report: Report) -> Outcome:
    """Measure steps, fit the model's costs to them, predict others, and measure some of those."""
    links, reason = options.links, hosts.unavailable()
    if reason is not None:
        links = [UNLIMITED]
        report(f"steps: {reason}; only this machine's loopback")
    primitives = available_primitives(options.primitives, report)
    lstm_s = time_lstm(report) if "lstm" in options.nets else 0.0

    def load(cell: Cell) -> Load:
        return load_of(cell.net, schemes[cell.scheme])

    def combine(devices: Sequence[str], workers: Sequence[int], rates: Sequence[str]) -> list[Cell]:
        steps = list_steps(options.nets, devices, lstm_s)
        return list_cells(steps, workers, rates, primitives, schemes, options.ranks_per_host)

    cells = combine(options.devices, options.workers, links)
    measured, cores = [*measure_cells(cells, schemes, options, report)], usable_cpus()
    costs = fit_costs(measured, load, cores)
    wanted = combine(DEVICES, options.predicted_workers, options.predicted_links)
    here = {cell: predict_s(cell, load(cell), costs, cores) for cell in wanted if cell not in cells}
    drawn, limits = choose_checks(here, 0 if reason else options.check)
    report(f"steps: {limits}")
    checks = [
        CheckRow(**vars(row), predicted_ms=1e3 * here[row.cell], error=1e3 * here[row.cell] / row.step_ms - 1)
        for row in measure_cells(drawn, schemes, options, report)
    ]
    predicted = [predict_row(cell, load(cell), costs) for cell in wanted]
    pays, direct = [*list_pays(wanted, load, costs)], direct_costs(costs)
    eight = [cell for cell in wanted if cell.workers == 8]
    pays += list_pays(eight, load, direct, "direct")
    over_direct = [predict_row(cell, load(cell), direct) for cell in eight]
    return show_steps(measured, checks, limits, predicted, over_direct, pays, costs)


def check_options(options: Namespace) -> None:
    """Raises SpecError: a network, device, primitive or rate does not exist, or a number is out of range."""
    for name, given, valid in (
        ("--nets", options.nets, NETS),
        ("--devices", options.devices, DEVICES),
        ("--primitives", options.primitives, PRIMITIVES),
    ):
        check_names(name, given, valid)
    for rate in (*options.links, *options.predicted_links):
        hosts.rate_bps(rate)
    if options.check < 0:
        raise SpecError(f"--check must be 0 or more, got {options.check}")
    per_host = options.ranks_per_host
    if "hierarchical" in options.primitives and per_host == 1:
        raise SpecError("--primitives hierarchical sums inside hosts first: give --ranks-per-host 2 or more")
    for count in (*options.workers, *options.predicted_workers):
        if count < 2 * per_host or count % per_host:
            raise SpecError(f"{count} workers are not two or more hosts of --ranks-per-host {per_host}")


def list_steps(nets: Sequence[str], devices: Sequence[str], lstm_s: float) -> list[dict[str, Any]]:
    """Network, device, batch and seconds of a step without an exchange; `lstm_s`: of the LSTM's on a core."""
    found = []
    for net, device in itertools.product(nets, devices):
        step_s = step_seconds(device, net, _IMAGES)
        if step_s is not None:
            found.append({"net": net, "device": device, "step_s": step_s, "batch": _IMAGES})
    own = {"net": "lstm", "device": _CORE, "step_s": lstm_s, "batch": _SEQUENCES}
    return [*found, own] if "lstm" in nets else found


def time_lstm(report: Report) -> float:
    """Seconds of the LSTM's step, computed on one core of this machine."""
    report("steps: the LSTM's step on one core")
    given = {"sequences": _SEQUENCES, "frames": _FRAMES, "steps": _LSTM_STEPS}
    (step_s,) = run_ranks(_RANKS + "time_lstm", given, placement=[0], timeout_s=_TIMEOUT_S)
    return float(step_s)


def available_primitives(names: Sequence[str], report: Report) -> list[str]:
    """Those that this machine has; says which it lacks, and why."""
    reasons = {name: unavailable_reason(PRIMITIVES[name].backend) for name in names}
    for name, reason in reasons.items():
        if reason is not None:
            report(f"steps: the primitive {name} is left out: {reason}")
    return [name for name in names if reasons[name] is None]


def measure_cells(
    cells: Sequence[Cell], schemes: Schemes, options: Namespace, report: Report
) -> Iterator[StepRow]:
    """Measure cells; those that one start of ranks can measure take turns.

    Raises:
        RanksError: a rank failed.
    """
    reason = hosts.unavailable()
    with tempfile.NamedTemporaryFile(prefix="bench-") as values:
        _write_values(values, max((largest_parameter(cell.net) for cell in cells), default=0))
        for (backend, count, number, rate), own in group_by(cells, _start).items():
            report(f"steps: {count} workers on {number} hosts, {rate}, {backend}: {len(own)} cells")
            cases = list(group_by(own, lambda cell: (cell.net, cell.device)).values())
            given = {
                "cases": [
                    {
                        "net": case[0].net,
                        "step_s": case[0].step_s,
                        "schemes": {cell.scheme: schemes[cell.scheme] for cell in case},
                    }
                    for case in cases
                ],
                "values": values.name,
                "steps": options.steps,
                "interface": LOOPBACK if reason else hosts.INTERFACE,
            }
            ranks: dict[str, Any] = {"placement": contiguous(count, number), "backend": backend}
            with hosts.make_hosts(0 if reason else number, None if rate == UNLIMITED else rate) as made:
                found = run_ranks(_RANKS + "measure_steps", given, hosts=made, timeout_s=_TIMEOUT_S, **ranks)
            for case, by_rank in zip(cases, zip(*found, strict=True), strict=True):
                yield from (step_row(cell, [rank[cell.scheme] for rank in by_rank]) for cell in case)


def step_row(cell: Cell, by_rank: Sequence[dict[str, Any]]) -> StepRow:
    """The row of what each rank measured of a cell."""
    step_s, *ends_s = slowest_quartiles(rank["times"] for rank in by_rank)
    sent = max(rank["sent"] for rank in by_rank)
    return make_row(cell, MEASURED, step_s, sent, by_rank[0]["messages"], (ends_s[0], ends_s[1]))


def _start(cell: Cell) -> tuple[str, int, int, str]:
    """What has to be the same for cells that are measured in turn."""
    return PRIMITIVES[cell.primitive].backend, cell.workers, cell.hosts, cell.rate


def _write_values(file: IO[bytes], count: int) -> None:
    block = np.random.default_rng(0).standard_normal(min(count, _BLOCK)).astype(np.float32)
    for _ in range(-(-count // _BLOCK)):
        file.write(block.tobytes())
    file.flush()
