"""Plans a member's gradient exchange from its declaration; what the declaration leaves open is measured.

What is measured decides in which order values are added or how they are rounded, hence the last bits of the
weights. So an `ExchangePlan` is made once, before the first step, and stays in the member's checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from ensemble.comm.communicator import Communicator
from ensemble.comm.gradients import BUCKET_BYTES, GradientExchange
from ensemble.comm.hosts import Groups, gather_host_keys, group_by_host, split_groups
from ensemble.spec.options import COMMUNICATORS, resolve
from pipelines.providers import import_object

Name = Literal["flat", "hierarchical", "hybrid"]
Way = Literal["flat", "hierarchical"]
#: Pairs (largest message in bytes, way), ascending; the last way also holds for all larger messages.
Ways = tuple[tuple[int, Way], ...]
#: Time for all measurements at a member's start, seconds.
BUDGET_S = 2.0


@dataclass(frozen=True)
class Timing:
    """One measurement.

    Attributes:
        what: "flat" or "hierarchical".
        size: of the message, bytes.
        seconds: that it took.
    """

    what: str
    size: int
    seconds: float


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
    """The communicator and the bucket size of a member.

    Attributes:
        name: "flat", "hierarchical" or "hybrid".
        groups: of the hierarchical all-reduce; empty for "flat".
        ways: of "hybrid", see `hierarchical.choose_way`; empty otherwise.
        bucket_bytes: of gradients in one message.
        measured: the times that `ways` are based on.
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
        opened: Communicator = import_object("ensemble.comm.hierarchical:Hierarchical")(
            base, self.groups, self.ways
        )
        return opened


@dataclass(frozen=True)
class ExchangePlan:
    """All that was chosen by measurement for a member's exchange; `dataclasses.asdict` makes JSON values of it.

    Attributes:
        tuned: communicator and bucket size.
    """

    tuned: CommunicatorPlan = field(default_factory=CommunicatorPlan)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ExchangePlan:
        """The inverse of `dataclasses.asdict`, also after a passage through JSON."""
        tuned = _lists_to_tuples(values["tuned"])
        tuned["measured"] = tuple(Timing(**timing) for timing in tuned["measured"])
        return cls(CommunicatorPlan(**tuned))


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
    rows = {id(parameter) for parameter in sparse}
    opened, tuned = open_communicator(
        comm,
        options.communicator or resolve("communicator", "torch", COMMUNICATORS),
        4 * sum(parameter.numel() for parameter in parameters if id(parameter) not in rows),
        known=known.tuned if known else None,
        device=parameters[0].device,
    )
    exchange = GradientExchange(
        parameters,
        opened,
        compression=options.compression,
        seed=options.seed,
        revertible=revertible,
        sparse=sparse,
        bucket_bytes=tuned.bucket_bytes,
    )
    return exchange, ExchangePlan(tuned)


def open_communicator(
    base: Communicator,
    options: Mapping[str, Any],
    largest: int,
    *,
    known: CommunicatorPlan | None = None,
    device: torch.device | str = "cpu",
    budget_s: float = BUDGET_S,
) -> tuple[Communicator, CommunicatorPlan]:
    """Open the communicator for a member's gradients and return it with the plan; all ranks call it.

    Args:
        base: all ranks, by the declared backend.
        options: "name" and "bucket_bytes", and for "hierarchical" and "hybrid" "group_size": ranks of a group at
            most, None for all of a host (`ensemble.spec.options.COMMUNICATORS`). Groups never span two hosts.
        largest: the largest message of interest to a hybrid, bytes.
        known: the earlier choice, when a member is resumed: nothing is measured, and the sums have the same bits
            on whatever hosts the ranks are now.
        device: of the gradients.
        budget_s: time for the measurements, seconds, about.
    """
    if known is not None:
        return known.open(base), known
    plan, name = CommunicatorPlan(bucket_bytes=options["bucket_bytes"]), options["name"]
    if base.world == 1 or name not in ("hierarchical", "hybrid"):
        return base, plan
    groups = split_groups(group_by_host(gather_host_keys(base)), options.get("group_size"))
    comm = import_object("ensemble.comm.hierarchical:Hierarchical")(base, groups)
    if name == "hierarchical":
        return comm, replace(plan, name=name, groups=groups)
    measure_ways = import_object("ensemble.comm.hybrid:measure_ways")
    timings = measure_ways(base, [("flat", base), ("hierarchical", comm)], largest, device, budget_s)
    flat_s = {timing.size: timing.seconds for timing in timings if timing.what == "flat"}
    hierarchical_s = {timing.size: timing.seconds for timing in timings if timing.what != "flat"}
    comm.ways = import_object("ensemble.comm.hybrid:choose_ways")(flat_s, hierarchical_s)
    return comm, replace(plan, name=name, groups=groups, ways=comm.ways, measured=tuple(timings))


def _lists_to_tuples(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _lists_to_tuples(item) for key, item in value.items()}
    return tuple(map(_lists_to_tuples, value)) if isinstance(value, list | tuple) else value
