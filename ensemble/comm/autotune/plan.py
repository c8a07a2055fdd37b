"""Plans a member's gradient exchange from its declaration; what the declaration leaves open is measured.

What is measured decides in which order values are added or how they are rounded, hence the last bits of the
weights. So an `ExchangePlan` is made once, before the first step, and stays in the member's checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, cast

import torch

from ensemble.comm.autotune.decide import (
    Rates,
    Timing,
    Ways,
    choose_bucket_bytes,
    choose_codec,
    choose_groups,
    choose_ways,
    codec_options,
    select_timings,
)
from ensemble.comm.autotune.measure import BUDGET_S, MakeExchange, measure_buckets, measure_rates, measure_ways
from ensemble.comm.buckets import ChooseCompression
from ensemble.comm.communicator import Communicator
from ensemble.comm.gradients import BUCKET_BYTES, GradientExchange
from ensemble.comm.hierarchical import Hierarchical, Hybrid
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
        ways: of "hybrid", see `decide.choose_way`; empty otherwise.
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
        if self.name == "flat":
            return base
        hierarchical = Hierarchical(base, self.groups)
        return hierarchical if self.name == "hierarchical" else Hybrid(hierarchical, self.ways)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CommunicatorPlan:
        """The inverse of `dataclasses.asdict`, also after a passage through JSON."""
        return cls(
            name=values["name"],
            groups=tuple(tuple(group) for group in values["groups"]),
            ways=tuple((limit, way) for limit, way in values["ways"]),
            bucket_bytes=values["bucket_bytes"],
            measured=tuple(Timing(**each) for each in values["measured"]),
        )


@dataclass(frozen=True)
class ExchangePlan:
    """All that was chosen by measurement for a member's exchange.

    Attributes:
        tuned: communicator and bucket size.
        rates: of the link and the codecs, for the compression "auto"; else None.
    """

    tuned: CommunicatorPlan = field(default_factory=CommunicatorPlan)
    rates: Rates | None = None

    def as_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {"tuned": asdict(self.tuned), "rates": None if self.rates is None else self.rates.as_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ExchangePlan:
        """The inverse of `as_dict`."""
        rates = values["rates"]
        return cls(CommunicatorPlan.from_dict(values["tuned"]), None if rates is None else Rates.from_dict(rates))


def plan_exchange(
    comm: Communicator,
    parameters: Sequence[torch.nn.Parameter],
    options: ExchangeOptions,
    *,
    revertible: bool,
    known: ExchangePlan | None = None,
) -> tuple[GradientExchange, ExchangePlan]:
    """Make the declared exchange and measure what the declaration leaves open; all ranks call it together.

    Args:
        comm: all ranks, by the declared backend.
        parameters, revertible: as of `GradientExchange`.
        known: the plan of the member's checkpoint; nothing that it holds is measured again.
    """
    if comm.world == 1 or not parameters:
        return GradientExchange(parameters, comm), known or ExchangePlan()
    device, compression = parameters[0].device, options.compression
    rates = None if known is None else known.rates

    def make_over(comm: Communicator) -> MakeExchange:
        nonlocal rates
        choose = None
        if compression is not None and compression["name"] == "auto":
            rates = rates or measure_rates(comm, device)
            choose = _compression_chooser(rates, comm.world, compression["min_size"])

        def make(parameters: Sequence[torch.nn.Parameter], bucket_bytes: int) -> GradientExchange:
            return GradientExchange(
                parameters,
                comm,
                compression=compression,
                choose=choose,
                seed=options.seed,
                revertible=revertible,
                bucket_bytes=bucket_bytes,
            )

        return make

    communicator = options.communicator or resolve("communicator", "torch", COMMUNICATORS)
    sizes = [parameter.numel() for parameter in parameters]
    tuned = None if known is None else known.tuned
    opened, tuned = open_communicator(comm, communicator, sizes, make_over=make_over, known=tuned, device=device)
    return make_over(opened)(parameters, tuned.bucket_bytes), ExchangePlan(tuned, rates)


def _compression_chooser(rates: Rates, world: int, min_size: int) -> ChooseCompression:
    def choose(n: int) -> dict[str, Any] | None:
        name = choose_codec(n, world, rates)
        return None if name == "none" else codec_options(name, min_size=min_size)

    return choose


def _make_uncompressed(comm: Communicator) -> MakeExchange:
    return lambda parameters, bucket_bytes: GradientExchange(parameters, comm, bucket_bytes=bucket_bytes)


def open_communicator(
    base: Communicator,
    options: Mapping[str, Any],
    sizes: Sequence[int],
    *,
    make_over: Callable[[Communicator], MakeExchange] = _make_uncompressed,
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
    bucket_bytes, is_auto = options["bucket_bytes"], options["bucket_bytes"] == "auto"
    if base.world == 1:
        return base, CommunicatorPlan(bucket_bytes=BUCKET_BYTES if is_auto else bucket_bytes)
    name: Name = options["name"] if options["name"] in ("hierarchical", "hybrid") else "flat"
    share_s = budget_s / 2 if is_auto and name != "flat" else budget_s
    comm, groups, ways, timings = base, cast(Groups, ()), cast(Ways, ()), cast(list[Timing], [])
    if name != "flat":
        size = options.get("group_size")
        hierarchical, ways, timings = _open_hierarchical(base, name, size, sizes, device, share_s)
        comm, groups = Hybrid(hierarchical, ways) if name == "hybrid" else hierarchical, hierarchical.groups
    if is_auto:
        buckets = measure_buckets(comm, sizes, make_over(comm), budget_s=share_s, device=device)
        timings = timings + buckets
        bucket_bytes = choose_bucket_bytes({each.size: each.seconds for each in buckets}, BUCKET_BYTES)
    return comm, CommunicatorPlan(name, groups, ways, bucket_bytes, tuple(timings))


def _open_hierarchical(
    base: Communicator,
    name: Name,
    group_size: int | None,
    sizes: Sequence[int],
    device: torch.device | str,
    budget_s: float,
) -> tuple[Hierarchical, Ways, list[Timing]]:
    """Open the best hierarchical communicator; for "hybrid" also choose the way for each message size."""
    hosts = group_by_host(gather_host_keys(base))
    group_sizes = candidate_group_sizes(hosts) if group_size is None else [group_size]
    candidates = [Hierarchical(base, split_groups(hosts, size)) for size in group_sizes]
    if name == "hierarchical" and len(candidates) == 1:
        return candidates[0], (), []
    names = ["flat", *(f"groups of {size}" for size in group_sizes)]
    comms = list(zip(names, [base, *candidates], strict=True))
    timings = measure_ways(base, comms, largest=4 * sum(sizes), budget_s=budget_s, device=device)
    flat_s, *others_s = select_timings(timings, names)
    best = choose_groups(flat_s, others_s, name == "hybrid")
    for candidate in candidates:
        if candidate is not candidates[best]:
            candidate.stop_thread()
    return candidates[best], choose_ways(flat_s, others_s[best]) if name == "hybrid" else (), timings
