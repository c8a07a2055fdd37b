"""What precision does to the metric: one Ensemble, its members precisions x seeds, on one shared pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from ensemble.bench import models
from ensemble.bench.members import shares
from ensemble.bench.models import Net
from ensemble.spec import Ensemble, Member

# Of all epochs.
WARM_UP = 0.1


def ensemble_of(
    net: Net,
    data: str | None,
    precisions: Sequence[str],
    *,
    seeds: int,
    epochs: int,
    samples: int,
    held_out: int,
    batch_size: int,
) -> Ensemble:
    """The run: for each seed a member in each precision, which differ in nothing else.

    All read the same batches in the same order (the pipeline's seed is not the members'): seeds draw weights.
    They are measured on the test split; nothing is chosen by it.

    Args:
        seeds: how many.  samples, held_out: to learn from and to measure by.
    """
    splits = models.splits(net, data, samples, held_out)
    members = [
        Member(net.params(data), seed=seed, precision=precision)  # type: ignore[arg-type]
        for seed in range(seeds)
        for precision in precisions
    ]
    return Ensemble(
        name=f"precision-{net.name}",
        recipe=models.recipe(net),
        members=members,
        train=splits.train,
        valid=splits.test,
        epochs=epochs,
        batch_size=batch_size,
        optimizer=models.OPTIMIZERS[net.kind],
        schedule={"name": "cosine", "warmup_epochs": WARM_UP * epochs},
        resources=shares(len(members)),
        checkpoint_every=epochs,
        combine="average",
        calibrate=False,
        retries=0,
    )
