"""A member's communicator from the word in its declaration: what is not given there is measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch

from ensemble.comm.autotune.decide import Timed, Ways, by_size, choose_bucket, choose_groups, choose_ways
from ensemble.comm.autotune.measure import BUDGET_S, Make, Name, Tuned, measure_buckets, measure_ways, plain
from ensemble.comm.communicator import Communicator
from ensemble.comm.gradients import BUCKET_BYTES
from ensemble.comm.hierarchical import Hierarchical, Hybrid
from ensemble.comm.hosts import Groups, by_host, group_sizes, hosts_of, split


def open_communicator(
    base: Communicator,
    options: Mapping[str, Any],
    sizes: Sequence[int],
    *,
    make: Callable[[Communicator], Make] = plain,
    tuned: Tuned | None = None,
    device: torch.device | str = "cpu",
    budget_s: float = BUDGET_S,
) -> tuple[Communicator, Tuned]:
    """The communicator that a member's gradients go by, and what was chosen for it; all ranks call it.

    Args:
        base: all ranks, by the backend that was asked for.
        options: resolved, as `ensemble.spec.options.COMMUNICATORS` says: "name" and "bucket_bytes", and for
            "hierarchical" and "hybrid" "group_size": ranks of a group, None to measure what is best. Groups never
            span two hosts.
        sizes: values of each of the model's parameters, in its order.
        make: how gradients are exchanged over a communicator, for the size of buckets.
        tuned: what was chosen before, when the member is resumed: nothing is measured then, and the sums have the
            same bits, on whatever hosts the ranks are now.
        device: of the gradients.
        budget_s: how long the measurement is to take, about.
    """
    if tuned is None:
        tuned, comm = _tune(base, options, sizes, make, device, budget_s)
        return comm, tuned
    return tuned.open(base), tuned


def _tune(
    base: Communicator,
    options: Mapping[str, Any],
    sizes: Sequence[int],
    make: Callable[[Communicator], Make],
    device: torch.device | str,
    budget_s: float,
) -> tuple[Tuned, Communicator]:
    bucket_bytes = options["bucket_bytes"]
    name: Name = options["name"] if options["name"] in ("hierarchical", "hybrid") else "flat"
    if base.world == 1:
        return Tuned(bucket_bytes=BUCKET_BYTES if bucket_bytes == "auto" else bucket_bytes), base
    comm, groups, ways, timed = base, cast(Groups, ()), cast(Ways, ()), cast(list[Timed], [])
    if name != "flat":
        share_s = budget_s / 2 if bucket_bytes == "auto" else budget_s
        hierarchical, ways, timed = _topology(base, name, options.get("group_size"), sizes, device, share_s)
        groups = hierarchical.groups
        comm = Hybrid(hierarchical, ways) if name == "hybrid" else hierarchical
    if bucket_bytes == "auto":
        share_s = budget_s if name == "flat" else budget_s / 2
        buckets = measure_buckets(comm, sizes, make=make(comm), budget_s=share_s, device=device)
        timed += buckets
        bucket_bytes = choose_bucket({each.size: each.seconds for each in buckets}, BUCKET_BYTES)
    return Tuned(name, groups, ways, bucket_bytes, tuple(timed)), comm


def _topology(
    base: Communicator,
    name: Name,
    group_size: int | None,
    sizes: Sequence[int],
    device: torch.device | str,
    budget_s: float,
) -> tuple[Hierarchical, Ways, list[Timed]]:
    """The groups, and for "hybrid" the ways by size."""
    hosts = by_host(hosts_of(base))
    tried = group_sizes(hosts) if group_size is None else [group_size]
    candidates = [Hierarchical(base, split(hosts, size)) for size in tried]
    if name == "hierarchical" and len(candidates) == 1:
        return candidates[0], (), []
    named = [("flat", base), *((f"groups of {size}", c) for size, c in zip(tried, candidates, strict=True))]
    timed = measure_ways(base, named, largest=4 * sum(sizes), budget_s=budget_s, device=device)
    flat_s, *others_s = by_size(timed, [what for what, _ in named])
    best = choose_groups(flat_s, others_s, name == "hybrid")
    for candidate in candidates:
        if candidate is not candidates[best]:
            candidate.end()
    return candidates[best], choose_ways(flat_s, others_s[best]) if name == "hybrid" else (), timed
