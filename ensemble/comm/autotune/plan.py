"""How a member's gradients travel: what is declared, what is measured at the start, and the exchange made of both.

What is measured decides in which order values are added up or how they are rounded, hence the last bits of the
weights: a `Plan` is made once, before the first step, and goes on in the member's checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ensemble.comm.autotune.communicator import open_communicator
from ensemble.comm.autotune.measure import Make, Tuned
from ensemble.comm.communicator import Communicator
from ensemble.comm.gradients import GradientExchange
from ensemble.spec.options import COMMUNICATORS, resolve

if TYPE_CHECKING:
    from ensemble.comm.autotune.codec import Rates

Parameters = Sequence[torch.nn.Parameter]


@dataclass(frozen=True)
class Declared:
    """What a declaration says of the exchange.

    Attributes:
        compression, communicator: as `ensemble.spec.options.resolve` makes them; None for what is usual.
        seed: of what is drawn at random in encoding.
    """

    compression: Mapping[str, Any] | None = None
    communicator: Mapping[str, Any] | None = None
    seed: int = 0


@dataclass(frozen=True)
class Plan:
    """What was measured.

    Attributes:
        tuned: groups, ways and the size of buckets.
        rates: of the link and the codecs, for the compression "auto"; else None.
    """

    tuned: Tuned = field(default_factory=Tuned)
    rates: Rates | None = None

    def as_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {"tuned": self.tuned.as_dict(), "rates": None if self.rates is None else self.rates.as_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Plan:
        """What `as_dict` gave."""
        from ensemble.comm.autotune.codec import Rates

        rates = values["rates"]
        return cls(Tuned.from_dict(values["tuned"]), None if rates is None else Rates.from_dict(rates))


def planned_exchange(
    comm: Communicator,
    parameters: Parameters,
    declared: Declared,
    *,
    revertible: bool,
    known: Plan | None = None,
) -> tuple[GradientExchange, Plan]:
    """The exchange as declared, with what the declaration leaves to measurement; all ranks call it together.

    Args:
        comm: all ranks, by the backend that was asked for.
        parameters, revertible: as of `GradientExchange`.
        known: what was measured before, where the member goes on.
    """
    if comm.world == 1 or not parameters:
        return GradientExchange(parameters, comm), known or Plan()
    device, compression = parameters[0].device, declared.compression
    rates = None if known is None else known.rates

    def over(comm: Communicator) -> Make:
        nonlocal rates
        choose = None
        if compression is not None and compression["name"] == "auto":
            from ensemble.comm.autotune.codec import chooser, measured

            rates = rates or measured(comm, device)
            choose = chooser(rates, comm.world, compression["min_size"])

        def make(parameters: Parameters, bucket_bytes: int) -> GradientExchange:
            return GradientExchange(
                parameters,
                comm,
                compression=compression,
                choose=choose,
                seed=declared.seed,
                revertible=revertible,
                bucket_bytes=bucket_bytes,
            )

        return make

    communicator = declared.communicator or resolve("communicator", "torch", COMMUNICATORS)
    sizes = [parameter.numel() for parameter in parameters]
    before = None if known is None else known.tuned
    way, tuned = open_communicator(comm, communicator, sizes, make=over, tuned=before, device=device)
    exchange = over(way)(parameters, tuned.bucket_bytes)
    return exchange, Plan(tuned, rates)
