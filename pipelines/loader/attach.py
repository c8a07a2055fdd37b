"""Makes loaders over a feeder's stream."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable

from pipelines.checks import (
    check_address,
    check_epochs,
    check_function,
    check_integer,
    check_name,
    check_pipeline,
)
from pipelines.description import PipelineDescription
from pipelines.loader.batch import ReadRange
from pipelines.loader.collate import Collate
from pipelines.loader.loader import Loader
from pipelines.verification.reader import MakeVerification, verify_here
from pipelines.weights import Weights


def attach(
    address: str | os.PathLike[str],
    pipeline: PipelineDescription,
    batch_size: int,
    epochs: range | int | None = None,
    name: str = "",
    rank: int = 0,
    world: int = 1,
    drop_last: bool = False,
    start_step: int = 0,
    copy: bool = False,
    on_wait: Callable[[], None] | None = None,
    weights: Weights | None = None,
    local_world: int | None = None,
    collate: Collate | None = None,
    verify: bool | MakeVerification = True,
) -> Loader:
    """A loader over a feeder's stream, from any process of the same user.

    Its batches are bitwise those of `pipeline.loader`; if the feeder ends, the loader prepares them itself.

    Args:
        address: the feeder's.
        pipeline: the same pipeline, built again; fingerprints are compared. If the feeder holds a prefix of it,
            the further stages are applied here.
        batch_size: the size of the global batch.
        epochs: these stream epochs, or how many from the next boundary on. By default the first pass over the
            loader is the epoch at the next boundary and each further one the epoch that follows; between two
            passes the loader is not in the stream, and others do not wait for it.
        name: the name of the consumer, at most 255 characters; all ranks of one member share it.
        rank: this data-parallel rank, from 0.
        world: the number of ranks.
        drop_last: whether an epoch's last, smaller batch is left out.
        start_step: global batches of the first epoch to leave out, for a resume.
        copy: whether batches are copies, which stay valid.
        on_wait: called every second while the loader waits for the feeder; its exceptions reach the training loop.
        weights: maps the samples' indices to their weights for this consumer (`pipelines.weights`), which are in
            each batch as `weight`, float32 [b]; samples of weight 0 are in no batch. The feeder does not see them.
        local_world: how many of the ranks read this feeder, the others those of other nodes; None: all.
        collate: `f(batch)` or `f(batch, rng)`, applied to each batch here: packs, pads or mixes samples. It
            returns a dict of what the model takes (`pipelines.loader.collate`).
        verify: whether a few samples are prepared here, too, twice, and compared: two before the first batch,
            then one an epoch, at most one in 2,000. If one of the first differs, the loader warns and prepares
            alone. It finds what differs in most samples (the environment, files, versions), not one in a thousand.

    Raises:
        PipelineError: the feeder has another pipeline, or a ring that is too small for the batch.
        SamplesDiffer: while iterating: a later sample is not what this pipeline prepares.
    """
    address = check_address(address)
    check_pipeline("the pipeline of attach()", pipeline)
    check_function("on_wait", on_wait)
    is_endless = epochs is None
    epochs = check_epochs(1 if epochs is None else epochs)
    first = range(epochs) if isinstance(epochs, int) else epochs
    reading = ReadRange(len(pipeline), batch_size, first, rank, world, drop_last, start_step)
    name = check_name("name", name) if name != "" else f"consumer-{os.getpid()}-{os.urandom(2).hex()}"
    join_next = epochs if isinstance(epochs, int) else None
    loader = Loader(
        pipeline,
        reading,
        address=address,
        name=name,
        join_next=join_next,
        copy=copy,
        on_wait=on_wait,
        weights=weights,
        is_endless=is_endless,
        local_world=None if local_world is None else check_integer("local_world", local_world, 1, world),
        collate=collate,
        verify=verify_here(pipeline, name) if verify is True else verify or None,
    )
    if loader._attach_error is not None:
        warnings.warn(f"working alone: {loader._attach_error}", stacklevel=2)
    return loader
