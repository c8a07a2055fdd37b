"""What the part 'exchange' of the scaling study measures: fused and hierarchical exchange inside training.

Members on several hosts train by the code that every member has, with each communicator that an Ensemble may
declare. What is compared is a step of training, and of a step that computes nothing the exchange alone.
"""

from __future__ import annotations

import itertools
import os
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.models import Net
from benchmarks.scaling.workers import REAL, check_batch, time_steps
from benchmarks.training import TrainingSetup
from ensemble.bench.launch import hosts
from ensemble.bench.launch.ranks import contiguous, interleaved, run_ranks
from ensemble.bench.results import Report
from ensemble.spec.options import NamedOptions

if TYPE_CHECKING:
    from ensemble.comm import Communicator

UNFUSED, FUSED = "unfused", "fused"
#: Values of `Ensemble.communicator` by name. "auto" measures the size of fused messages when training starts.
COMMUNICATORS: dict[str, NamedOptions] = {
    UNFUSED: {"name": "torch", "bucket_bytes": 1},  # each tensor is a message
    FUSED: {"name": "torch", "bucket_bytes": "auto"},
    "hierarchical-unfused": {"name": "hierarchical", "bucket_bytes": 1},
    "hierarchical": {"name": "hierarchical", "bucket_bytes": "auto"},
    "hybrid": {"name": "hybrid", "bucket_bytes": "auto"},
}
#: Of neighbouring ranks: on one host, or on different ones.
PLACEMENTS = {"contiguous": contiguous, "interleaved": interleaved}


@dataclass(frozen=True, kw_only=True)
class ExchangeRow:
    """One member with one communicator.

    Attributes:
        model, compute: as of `WorkerRow`; fp32, a batch of the same size for each worker.
        workers, hosts: how many.  link: the rate of the hosts' links; None for unlimited.
        placement: a name of `PLACEMENTS`; None on one host.
        communicator: a name of `COMMUNICATORS`.
        messages: all-reduces of gradients in a step.  sent_mb: that a worker sends in it, 10^6 bytes.
        step_ms: of the slowest worker.
        exchange_ms: as `WorkerRow.communication_ms`.
        step_ratio, exchange_ratio: times as fast as each tensor by itself; None where that was not measured.
        efficiency: examples/s against so many times those of one worker; None where workers share cores.
    """

    model: str
    compute: str
    workers: int
    hosts: int
    link: str | None
    placement: str | None
    communicator: str
    messages: int
    sent_mb: float
    step_ms: float
    exchange_ms: float
    step_ratio: float | None
    exchange_ratio: float | None
    efficiency: float | None


def study_exchange(nets: Sequence[Net], options: Namespace, report: Report) -> list[ExchangeRow]:
    """Train a few steps of each network with each communicator and placement, all by the same processes.

    On one host only flat communicators are compared.

    Raises:
        SpecError: a network's data have fewer samples than a batch of all workers.
        RanksError: a worker failed.
    """
    names, placements = list(dict.fromkeys(options.communicators)), list[str | None](options.placements)
    for net in nets:
        check_batch(net, options.data, options.worker_batch * options.exchange_workers)
    if options.hosts == 1:
        placements, names = [None], [name for name in names if name in (UNFUSED, FUSED)]
        report("exchange: on one host, without hierarchical communicators; --hosts 2 (as root) compares them, too")
    rows: list[ExchangeRow] = []
    with hosts.make_hosts(options.hosts if options.hosts > 1 else 0, options.link) as made:

        def run(net: Net, wait_ms: float, where: Sequence[int], names: Sequence[str]) -> list[dict[str, float]]:
            """The times of the slowest rank, for each communicator."""
            setup = TrainingSetup(net=net, data=options.data, batch_size=options.worker_batch * len(where))
            given = {"setup": asdict(setup), "steps": options.steps, "compression": options.compression}
            given |= {"step_s": wait_ms / 1000 * len(where) if wait_ms else None, "communicators": list(names)}
            ranks = run_ranks(f"{__name__}:time_exchanges", given, placement=where, hosts=made)
            return [{key: max(rank[key] for rank in own) for key in own[0]} for own in zip(*ranks, strict=True)]

        for net, wait_ms in itertools.product(nets, options.step_ms):
            [one] = run(net, wait_ms, [0], [FUSED])
            for placement in placements:
                report(f"exchange: {net.name}, compute {wait_ms:g} ms, {placement or 'one host'}")
                place = PLACEMENTS[placement or "contiguous"]
                found = run(net, wait_ms, place(options.exchange_workers, options.hosts), names)
                rows += make_rows(net.name, wait_ms, placement, one, dict(zip(names, found, strict=True)), options)
    return rows


def make_rows(
    model: str,
    wait_ms: float,
    placement: str | None,
    one: dict[str, float],
    found: dict[str, dict[str, float]],
    options: Namespace,
) -> list[ExchangeRow]:
    """Rows of what was measured.

    Args:
        one: of one worker, as of `benchmarks.scaling.workers.time_steps`.  found: by communicator.
    """
    workers = options.exchange_workers
    exchange_s = {name: max(times["exchange_s"] - one["exchange_s"], 0.0) for name, times in found.items()}
    unfused_s = exchange_s.get(UNFUSED, 0.0)
    share_cores = not wait_ms and workers > len(os.sched_getaffinity(0))
    return [
        ExchangeRow(
            model=model,
            compute=f"{wait_ms:g} ms" if wait_ms else REAL,
            workers=workers,
            hosts=options.hosts,
            link=options.link,
            placement=placement,
            communicator=name,
            messages=int(times["messages"]),
            sent_mb=times["sent_bytes"] / 1e6,
            step_ms=1000 * times["step_s"],
            exchange_ms=1000 * exchange_s[name],
            step_ratio=found[UNFUSED]["step_s"] / times["step_s"] if UNFUSED in found else None,
            exchange_ratio=unfused_s / exchange_s[name] if min(unfused_s, exchange_s[name]) > 0 else None,
            efficiency=None if share_cores else one["step_s"] / times["step_s"],
        )
        for name, times in found.items()
    ]


def time_exchanges(comm: Communicator, options: dict[str, Any]) -> list[dict[str, float]]:
    """What `time_steps` measures, with each of the `communicators`, one after the other."""
    return [
        time_steps(comm, {**options, "communicator": COMMUNICATORS[name]}) for name in options["communicators"]
    ]
