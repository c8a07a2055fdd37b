"""Prepares the rows of a batch in the member: all stages, or those that its feeder has not applied."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipelines.loader.batch import Good, empty_batch, find_good
from pipelines.prepare.preparer import Preparer
from pipelines.samples.fields import FAILED, GOOD, OK, Columns
from pipelines.weights import Weights, weigh

if TYPE_CHECKING:
    import torch

    from pipelines.loader.stream_client import StreamClient

    Rows = tuple[dict[str, torch.Tensor], Good]


def prepare_rows(
    preparer: Preparer, epoch: int, whole: tuple[int, int], own: tuple[int, int], weights: Weights | None
) -> Rows:
    """As `complete_rows`, of samples of which nothing is prepared; those of weight 0 may be left out."""
    skipping = preparer.pipeline.on_error == "skip"
    # The size of the global batch is known only after trying all its samples, also those of weight 0.
    low, high = whole if skipping else own
    places, indices = np.arange(low, high), preparer.indices(epoch, low, high)
    if weights is not None and not skipping:
        is_read = weigh(weights, indices).numpy() != 0
        places, indices = places[is_read], indices[is_read]
    tensors = empty_batch(preparer.pipeline.fields, len(indices))
    columns: Columns = {name: tensor.numpy() for name, tensor in tensors.items()}
    if not skipping:
        preparer.prepare(columns, 0, epoch, places.tolist(), indices)
        return tensors, None
    ok = columns[OK] = np.ones(high - low, np.uint8)
    preparer.prepare(columns, 0, epoch, places.tolist(), indices)
    kept = np.flatnonzero(ok[own[0] - low : own[1] - low] & GOOD) + (own[0] - low)
    if len(kept) < high - low:
        tensors = {name: tensor[kept] for name, tensor in tensors.items()}
    return tensors, find_good(ok.tobytes())


def complete_rows(
    ring: StreamClient, preparer: Preparer, ok: bytes, epoch: int, whole: tuple[int, int], own: tuple[int, int]
) -> Rows | None:
    """The rows of one rank after all stages, in tensors of their own, and which of the global batch are prepared.

    With `on_error="skip"` every rank prepares the whole global batch, as without a feeder, to count its samples.

    Args:
        ring: holds the samples after the first `ring.stages` stages.
        preparer: of the whole pipeline.
        ok: the status of each sample of the global batch (`StreamClient.read_status`).
        whole, own: places [start, stop) in the epoch of the global batch, and of the rank's part of it.

    Returns:
        None if the feeder could not prepare a sample and `on_error` is "raise".

    Raises:
        SampleError: a stage fails here and `on_error` is "raise".
    """
    pipeline = preparer.pipeline
    skipping = pipeline.on_error == "skip"
    if not skipping and FAILED in ok:
        return None
    base = epoch * len(pipeline)
    places = [place for place in range(*(whole if skipping else own)) if ok[place - whole[0]] != FAILED]
    shared_parts = ((place, *ring.read_shared_part(base + place)) for place in places)
    tensors = empty_batch(pipeline.fields, len(places))
    columns: Columns = {name: tensor.numpy() for name, tensor in tensors.items()}
    if not skipping:
        preparer.complete(columns, epoch, shared_parts, ring.stages)
        return tensors, None
    good = columns[OK] = np.zeros(len(places), np.uint8)
    preparer.complete(columns, epoch, shared_parts, ring.stages)
    good &= GOOD
    mine = [row for row, place in enumerate(places) if good[row] and own[0] <= place < own[1]]
    if len(mine) < len(places):
        tensors = {name: tensor[mine] for name, tensor in tensors.items()}
    prepared = np.zeros(whole[1] - whole[0], bool)
    prepared[[place - whole[0] for place in places]] = good != 0
    return tensors, None if prepared.all() else prepared
