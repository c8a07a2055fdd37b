"""Trains a member by a loop that is written for `Accelerator` (`accelerate`), as it was.

    def train(member):
        model = build(member.params)
        optimizer = torch.optim.AdamW(model.parameters(), lr=member.params["lr"])
        accelerator, model, optimizer, batches, validation = prepare(member, model, optimizer)
        for epoch in range(member.identity.epochs):
            for batch in batches:
                ...
                accelerator.backward(loss)
                optimizer.step()
            member.report(accuracy=...)
        member.predict_all()

`accelerator.accumulate` takes no notice of the end of an epoch, as the batches are of no DataLoader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator

from ensemble.train.call import Call
from ensemble.train.job import TrainingError

if TYPE_CHECKING:
    from ensemble.train.member import TrainContext

_PRECISIONS = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}


def prepare(
    member: TrainContext,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *others: Any,
    fields: Sequence[str] | Mapping[str, str] | None = None,
    **options: Any,
) -> tuple[Any, ...]:
    """Prepare what a loop trains with, in place of `accelerator.prepare`.

    Args:
        others: learning-rate schedules and whatever else has a state; it is part of the member's checkpoints.
        fields: how a batch is given; see `TrainContext.dataloader`.
        options: of the Accelerator; precision and device are the member's.

    Returns:
        The accelerator, the model, the optimizer, the batches of "train" and of "valid" (None where there is
        none), and the others.

    Raises:
        TrainingError: an option contradicts the member, or the member has several workers.
    """
    if member.world > 1:
        raise TrainingError("a loop over member.dataloader() by accelerate has one worker: declare workers=1")
    if wrong := [name for name in ("mixed_precision", "cpu") if name in options]:
        raise TrainingError(f"prepare(): {', '.join(wrong)} follow from the member; leave them out")
    precision = _PRECISIONS[member.identity.precision]
    accelerator = Accelerator(mixed_precision=precision, cpu=member.device.type == "cpu", **options)
    member.prepare(model, optimizer)
    model, optimizer, *prepared = accelerator.prepare(model, optimizer, *others)
    for number, other in enumerate(prepared):
        member.state(f"accelerate-{number}", other)
    if accelerator.scaler is not None:
        member.state("accelerate-scaler", accelerator.scaler)
    if isinstance(fields, Mapping):
        member.observer.offered = Call(kwargs=fields)
    batches = member.dataloader("train", fields=fields)
    validation = member.dataloader("valid", fields=fields) if "valid" in member.splits else None
    return accelerator, model, optimizer, batches, validation, *prepared
