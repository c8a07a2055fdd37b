"""Accuracy against bits: one Ensemble of two-worker members, which differ in what their gradients travel as."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from ensemble.bench import models
from ensemble.bench.compression.rows import AccuracyRow
from ensemble.bench.compression.schemes import PLAIN, Scheme
from ensemble.bench.intervals import interval, paired
from ensemble.bench.members import Came, shares
from ensemble.bench.models import Net
from ensemble.spec import Ensemble, Member

WORKERS = 2
# Of all epochs.
_WARM_UP = 0.1
# The digits are few: as many more epochs.
_DIGITS_TIMES = 4


@dataclass(frozen=True, kw_only=True)
class Extent:
    """How much is trained.

    Attributes:
        seeds: members in each scheme.  epochs: of each member, None for what is usual of its kind and data.
        samples, held_out: to learn from and to measure by.
    """

    seeds: int
    epochs: int | None
    samples: int
    held_out: int


def ensemble_of(net: Net, data: str | None, schemes: Sequence[Scheme], extent: Extent) -> Ensemble:
    """The run: for each seed a member in each scheme, which differ in nothing else.

    All read the same batches in the same order: seeds draw weights and the codecs' random numbers. They are
    measured on the test split; nothing is chosen by it.
    """
    splits = models.splits(net, data, extent.samples, extent.held_out)
    epochs = extent.epochs or models.EPOCHS[net.kind] * (_DIGITS_TIMES if data is None else 1)
    members = [
        Member(net.params(data), seed=seed, workers=WORKERS, compression=scheme.options)
        for seed in range(extent.seeds)
        for scheme in schemes
    ]
    return Ensemble(
        name=f"compression-{net.name}",
        recipe=models.recipe(net),
        members=members,
        train=splits.train,
        valid=splits.test,
        epochs=epochs,
        batch_size=models.BATCH_SIZES[net.kind],
        optimizer=models.OPTIMIZERS[net.kind],
        schedule={"name": "cosine", "warmup_epochs": _WARM_UP * epochs},
        resources=dataclasses.replace(shares(WORKERS * len(members)), workers=WORKERS),
        checkpoint_every=epochs,
        combine="average",
        calibrate=False,
        retries=0,
    )


def rows_of(net: Net, data: str | None, schemes: Sequence[Scheme], came: Sequence[Came]) -> list[AccuracyRow]:
    """What became of the members, as `ensemble_of` numbers them: seeds, and in each the schemes."""
    import torch

    with torch.device("meta"):
        shapes = [tuple(p.shape) for p in models.model(net.params(data)).parameters()]
    by = {scheme.word: came[place :: len(schemes)] for place, scheme in enumerate(schemes)}
    rows = []
    for scheme in schemes:
        each = by[scheme.word]
        done = [member.percent for member in each if member.percent is not None]
        both = [(a.percent, b.percent) for a, b in zip(each, by.get(PLAIN, ()), strict=False)]
        whole = [(a, b) for a, b in both if a is not None and b is not None]
        failed = [member.why for member in each if member.percent is None]
        rows.append(
            AccuracyRow(
                model=net.name,
                data=net.data(data),
                scheme=scheme.word,
                feedback=scheme.feedback,
                bits=scheme.bits(shapes),
                accuracy=interval(done) if done else None,
                difference=paired([a for a, _ in whole], [b for _, b in whole]) if whole else None,
                note=f"{len(failed)} of {len(each)} seeds failed: {failed[0]}" if failed else None,
            )
        )
    return rows
