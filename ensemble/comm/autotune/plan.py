"""Plans a member's gradient exchange from its declaration; what the declaration leaves open is measured.

What is measured decides in which order values are added or how they are rounded, hence the last bits of the
weights. So an `ExchangePlan` is made once, before the first step, and stays in the member's checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch

from ensemble.comm.autotune.decide import (
    Rates,
    Timing,
    choose_bucket_bytes,
    choose_compression,
    choose_groups,
    choose_ways,
    select_timings,
)
from ensemble.comm.autotune.measure import (
    BUDGET_S,
    Clock,
    MakeExchange,
    measure_buckets,
    measure_rates,
    measure_ways,
)
from ensemble.comm.communicator import Communicator
from ensemble.comm.gradients import BUCKET_BYTES, GradientExchange
from ensemble.comm.hierarchical import Hierarchical, Ways
from ensemble.comm.hosts import Groups, candidate_group_sizes, gather_host_keys, group_by_host, split_groups
from ensemble.spec.options import COMMUNICATORS, resolve

Name = Literal["flat", "hierarchical", "hybrid"]


@dataclass(frozen=True)
class ExchangeOptions:
    """What a declaration says of the exchange.

    Attributes:
        compression, communicator: as `ensemble.spec.options.resolve` returns them; None for the default.
        seed: of the random numbers in encoding.
    """

    compression: Mapping[str, Any] | None = None
    communicator: Mapping[str, Any] | None = None
    seed: int = 0


@dataclass(frozen=True)
class CommunicatorPlan:
    """The communicator and the bucket size that were chosen for a member.

    Attributes:
        name: "flat", "hierarchical" or "hybrid".
        groups: of the hierarchical all-reduce; empty for "flat".
        ways: of "hybrid", see `hierarchical.choose_way`; empty otherwise.
        bucket_bytes: of gradients in one message.
        measured: the times that the choice is based on; empty where all was declared.
    """

    name: Name = "flat"
    groups: Groups = ()
    ways: Ways = ()
    bucket_bytes: int = BUCKET_BYTES
    measured: tuple[Timing, ...] = ()

    def open(self, base: Communicator) -> Communicator:
        """Make the communicator over all ranks; every rank calls it."""
        return base if self.name == "flat" else Hierarchical(base, self.groups, self.ways)


@dataclass(frozen=True)
class ExchangePlan:
    """All that was chosen by measurement for a member's exchange; `dataclasses.asdict` makes JSON values of it.

    Attributes:
        tuned: communicator and bucket size.
        rates: of the link and the codecs, for the compression "auto"; else None.
    """

    tuned: CommunicatorPlan = field(default_factory=CommunicatorPlan)
    rates: Rates | None = None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ExchangePlan:
        """The inverse of `dataclasses.asdict`, also after a passage through JSON."""
        tuned, rates = (_lists_to_tuples(values[name]) for name in ("tuned", "rates"))
        tuned["measured"] = tuple(Timing(**each) for each in tuned["measured"])
        return cls(CommunicatorPlan(**tuned), None if rates is None else Rates(**rates))


def plan_exchange(
    comm: Communicator,
    parameters: Sequence[torch.nn.Parameter],
    options: ExchangeOptions,
    *,
    revertible: bool,
    sparse: Sequence[torch.nn.Parameter] = (),
    known: ExchangePlan | None = None,
) -> tuple[GradientExchange, ExchangePlan]:
    """Make the declared exchange and measure what the declaration leaves open; all ranks call it together.

    Args:
        comm: all ranks, by the declared backend.
        parameters, revertible, sparse: as of `GradientExchange`.
        known: the plan of the member's checkpoint; nothing that it holds is measured again.
    """
    if comm.world == 1 or not parameters:
        return GradientExchange(parameters, comm), known or ExchangePlan()
    device, compression, rates = parameters[0].device, options.compression, known.rates if known else None

    def make_over(comm: Communicator) -> MakeExchange:
        nonlocal rates
        choose = None
        if compression is not None and compression["name"] == "auto":
            rates = rates or measure_rates(comm, device)
            choose = partial(choose_compression, world=comm.world, rates=rates, min_size=compression["min_size"])
        return partial(
            GradientExchange,
            comm=comm,
            compression=compression,
            choose=choose,
            seed=options.seed,
            revertible=revertible,
        )

    rows = {id(parameter) for parameter in sparse}
    opened, tuned = open_communicator(
        comm,
        options.communicator or resolve("communicator", "torch", COMMUNICATORS),
        [parameter.numel() for parameter in parameters if id(parameter) not in rows],
        make_over=make_over,
        known=known.tuned if known else None,
        device=device,
    )
    exchange = make_over(opened)(parameters, sparse=sparse, bucket_bytes=tuned.bucket_bytes)
    return exchange, ExchangePlan(tuned, rates)


def open_communicator(
    base: Communicator,
    options: Mapping[str, Any],
    sizes: Sequence[int],
    *,
    make_over: Callable[[Communicator], MakeExchange] = lambda comm: partial(GradientExchange, comm=comm),
    known: CommunicatorPlan | None = None,
    device: torch.device | str = "cpu",
    budget_s: float = BUDGET_S,
) -> tuple[Communicator, CommunicatorPlan]:
    """Open the communicator for a member's gradients and return it with the plan; all ranks call it.

    Args:
        base: all ranks, by the declared backend.
        options: "name" and "bucket_bytes", and for "hierarchical" and "hybrid" "group_size": ranks of a group,
            None to measure what is best (`ensemble.spec.options.COMMUNICATORS`). Groups never span two hosts.
        sizes: values of each of the model's parameters, in its order.
        make_over: how gradients are exchanged over a communicator.
        known: the earlier choice, when a member is resumed: nothing is measured, and the sums have the same bits
            on whatever hosts the ranks are now.
        device: of the gradients.
        budget_s: time for the measurements, seconds, about.
    """
    if known is not None:
        return known.open(base), known
    is_auto = options["bucket_bytes"] == "auto"
    plan = CommunicatorPlan(bucket_bytes=BUCKET_BYTES if is_auto else options["bucket_bytes"])
    if base.world == 1:
        return base, plan
    comm = base
    if options["name"] in ("hierarchical", "hybrid"):
        budget_s = budget_s / 2 if is_auto else budget_s
        start_clock = partial(Clock, base, device, budget_s)
        plan, comm = _plan_groups(plan, base, options, 4 * sum(sizes), start_clock)
    if is_auto:
        make = make_over(comm)  # may measure: its time does not count
        buckets = measure_buckets(Clock(comm, device, budget_s), sizes, make)
        bucket_bytes = choose_bucket_bytes({each.size: each.seconds for each in buckets}, BUCKET_BYTES)
        plan = replace(plan, bucket_bytes=bucket_bytes, measured=(*plan.measured, *buckets))
    return comm, plan


def _plan_groups(
    plan: CommunicatorPlan,
    base: Communicator,
    options: Mapping[str, Any],
    largest: int,
    start_clock: Callable[[], Clock],
) -> tuple[CommunicatorPlan, Hierarchical]:
    """Add the best groups to a plan, for "hybrid" also the way for each message size, up to `largest` bytes."""
    name, group_size = options["name"], options.get("group_size")
    hosts = group_by_host(gather_host_keys(base))
    group_sizes = candidate_group_sizes(hosts) if group_size is None else [group_size]
    candidates = [Hierarchical(base, split_groups(hosts, size)) for size in group_sizes]
    if name == "hierarchical" and len(candidates) == 1:
        return replace(plan, name=name, groups=candidates[0].groups), candidates[0]
    names = ["flat", *(f"groups of {size}" for size in group_sizes)]
    timings = measure_ways(start_clock(), list(zip(names, [base, *candidates], strict=True)), largest)
    flat_s, *others_s = select_timings(timings, names)
    best = choose_groups(flat_s, others_s, name == "hybrid")
    for candidate in candidates:
        if candidate is not candidates[best]:
            candidate.stop_thread()
    chosen = candidates[best]
    chosen.ways = choose_ways(flat_s, others_s[best]) if name == "hybrid" else ()
    plan = replace(plan, name=name, groups=chosen.groups, ways=chosen.ways, measured=tuple(timings))
    return plan, chosen


def _lists_to_tuples(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _lists_to_tuples(each) for key, each in value.items()}
    return tuple(map(_lists_to_tuples, value)) if isinstance(value, list | tuple) else value
