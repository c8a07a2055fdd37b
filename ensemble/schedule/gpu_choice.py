"""Chooses the GPUs of one node that members get: the emptiest first, one rank of a member on each physical GPU."""

from __future__ import annotations

from collections.abc import Sequence

from ensemble.schedule.needs import SLACK, Need, Node

_ROUND = 1000  # units: GPUs whose free shares differ by less are equally free


def choose_gpus(
    node: Node, need: Need, count: int, shares: list[int], tenants: list[int], most: Sequence[int]
) -> list[tuple[str | None, ...]]:
    """Choose the GPUs of up to `count` members, for each its ranks' GPUs.

    Args:
        shares: what is left of each GPU, in `UNITS`; what the members take is subtracted.
        tenants: members on each GPU; those that get a place are added.
        most: members on each GPU at one time.
    """
    ids, parents, devices = node.gpu_ids, node.gpu_parents, range(len(node.gpus))
    chosen: list[tuple[str | None, ...]] = []
    while len(chosen) < count:
        open_gpus = [d for d in devices if shares[d] + SLACK >= need.share and tenants[d] < most[d]]
        open_gpus.sort(key=lambda d: (-((shares[d] + _ROUND // 2) // _ROUND), tenants[d], d))
        first = {parents[d]: d for d in reversed(open_gpus)}  # the emptiest of each physical GPU
        if len(first) < need.workers:
            break
        taken = [d for d in open_gpus if first[parents[d]] == d][: need.workers]
        for device in taken:
            shares[device] -= need.share
            tenants[device] += 1
        chosen.append(tuple(ids[device] for device in taken))
    return chosen
