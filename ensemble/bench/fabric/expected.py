"""What papers claim about networks, beside the training that was measured here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from ensemble.bench.fabric import predict
from ensemble.bench.fabric.links import Link
from ensemble.bench.fabric.rows import NETS, TrainingRow
from ensemble.bench.net_shapes import parameter_shapes, ready_times
from ensemble.bench.results import Claim, group_by
from ensemble.bench.step_model import exchange_end

# Horovod's README, 2017: 128 servers of four Pascal GPUs, 25 Gbit/s RoCE; efficiency by net.
_HOROVOD = Link(hosts=128, ranks=4, rate="25gbit")
_HOROVOD_FUSION = 64 * 2**20
_HOROVOD_EFFICIENCY = {"inception": 0.90, "vgg16": 0.68}
# A share of the speed over an unlimited link, from which on a link has no significant effect.
_NO_EFFECT = 0.9
_NAMES = {"resnet50": "ResNet-50", "inception": "Inception V3", "vgg16": "VGG-16"}


def training_claims(rows: Sequence[TrainingRow]) -> Iterator[Claim]:
    """Samsi et al.'s claim for each net on an emulated accelerator, and Horovod's table by the model."""
    emulated = [row for row in rows if row.compute == "emulated" and row.hosts > 1]
    for own in group_by(emulated, lambda row: (row.net, row.link.partition(", ")[2], row.delayed_by)).values():
        best = [min(same, key=lambda row: row.step_ms) for same in group_by(own, lambda row: row.link).values()]
        free = next((row for row in best if row.rate is None and not row.delay_ms), None)
        shaped = [(row, free.step_ms / row.step_ms) for row in best if free is not None and row is not free]
        if free is None or not shaped:
            continue
        slow = [row.link for row, share in shaped if share < _NO_EFFECT]
        yield Claim(
            paper="Samsi et al. 2020",
            claim="A slower network (Ethernet) has no significant effect on common networks against a faster one"
            f" (OmniPath; here a shaped link against an unlimited one): {_NAMES[own[0].net]}, a P100 emulated",
            published="no significant effect",
            measured="; ".join(f"{row.link}: {share:.0%} of the speed, {row.backend}" for row, share in shaped),
            spread="quartiles of steps, ms: "
            + "; ".join(
                f"{row.link}: {row.low_ms:.0f} to {row.high_ms:.0f}" for row in (free, *(r for r, _ in shaped))
            ),
            loses=f"below {_NO_EFFECT:.0%} on {'; '.join(slow)}" if slow else "",
        )
    for net in (net for net in _HOROVOD_EFFICIENCY if any(row.net == net for row in rows)):
        published, predicted = _HOROVOD_EFFICIENCY[net], predicted_efficiency(net, _HOROVOD, _HOROVOD_FUSION)
        yield Claim(
            paper="Horovod's README, 2017",
            claim=f"{_NAMES[net]} on 512 Pascal GPUs, 128 servers, 25 Gbit/s RoCE",
            published=f"efficiency {published:.0%}",
            measured=f"{predicted:.0%} predicted: a ring at the link's rate without latency, an upper bound",
        )


def predicted_efficiency(net: str, link: Link, bucket_bytes: int) -> float:
    """The efficiency of a net on accelerators, whose exchange costs the link's time alone.

    Args:
        bucket_bytes: gradients are exchanged when there are as many.
    """
    step_s = NETS[net][1]
    assert step_s is not None
    begun, costs, size, shapes = list[float](), list[float](), 0, parameter_shapes(net)
    for number, (ready, shape) in reversed(list(enumerate(zip(ready_times(net), shapes, strict=True)))):
        size += 4 * math.prod(shape)
        if size >= bucket_bytes or number == 0:
            model = predict.rounds("all_reduce", range(len(link.placement)), size)
            begun.append(ready * step_s)
            costs.append(predict.seconds(model, link.placement, link.payload_bps))
            size = 0
    return step_s / exchange_end(np.array(begun), np.array(costs))
