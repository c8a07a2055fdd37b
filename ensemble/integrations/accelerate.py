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

The batches tell accelerate which one is the last, as those of a DataLoader do.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.state import GradientState
from accelerate.utils import find_batch_size

from ensemble.integrations.options import ONE_WORKER, Options
from ensemble.train.call import forward_call
from ensemble.train.job import TrainingError
from pipelines.loader.ragged import Ragged

if TYPE_CHECKING:
    from ensemble.train.foreign_loop import EpochLoader
    from ensemble.train.member import TrainContext

_PRECISIONS = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}


#: Of an Accelerator.
OPTIONS = Options(
    "the Accelerator",
    same="""
    gradient_accumulation_steps gradient_accumulation_plugin step_scheduler_with_optimizer kwargs_handlers log_with
    project_dir project_config
    """,
    refused={
        "mixed_precision": "it follows from the member; leave it out: Ensemble(precision=)",
        "cpu device_placement": "it follows from the member; leave it out: Ensemble(devices=)",
        "split_batches dataloader_config": "batches are the ensemble's: Ensemble(batch_size=, drop_last=)",
        "dynamo_backend dynamo_plugin": "Ensemble(compile=...) compiles the model",
        "deepspeed_plugin deepspeed_plugins fsdp_plugin torch_tp_plugin megatron_lm_plugin "
        "parallelism_config": ONE_WORKER,
    },
    void={"rng_types": "generators are aligned between workers, and there is one; steps are seeded by the member"},
)


class Batches(DataLoaderStateMixin):  # type: ignore[misc]
    """The batches of a member, as accelerate follows a DataLoader: it knows the last one, and how many that holds.

    So `accumulate` steps at the end of an epoch, and `gather_for_metrics` weighs samples.
    """

    def __init__(self, loader: EpochLoader) -> None:
        self._loader, self.batch_size = loader, loader.batch_size
        self.gradient_state = GradientState()

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        self.begin()
        try:
            count = self._loader.count_batches()
            for number, batch in enumerate(self._loader, 1):
                _refuse_ragged(batch)
                if number == count:
                    self.end_of_dataloader, self.remainder = True, find_batch_size(batch) or 0
                yield batch
        finally:
            self.end()


def _refuse_ragged(batch: Any) -> None:
    """Raise TrainingError for samples of unlike length, which models of these frameworks cannot take."""
    named = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
    if wrong := [str(name) for name, value in named if isinstance(value, Ragged)]:
        raise TrainingError(
            f"samples are of unlike length in {', '.join(wrong)}: declare what pads them, "
            "Recipe(collate=pipelines.from_samples(data_collator))"
        )


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
        options: of the Accelerator; `OPTIONS` says which are used, and which are refused.

    Returns:
        The accelerator, the model, the optimizer, the batches of "train" and of "valid" (None where there is
        none), and the others.

    Raises:
        TrainingError: an option is refused (`OPTIONS`), or the member has several workers.
    """
    if member.world > 1:
        raise TrainingError("a loop over member.dataloader() by accelerate has one worker: declare workers=1")
    usual = {name: parameter.default for name, parameter in inspect.signature(Accelerator).parameters.items()}
    OPTIONS.check(member.log, options, usual)
    precision = _PRECISIONS[member.identity.precision]
    accelerator = Accelerator(mixed_precision=precision, cpu=member.device.type == "cpu", **options)
    if fields is not None:
        member.predict_by(forward_call(fields, member.target))
    member.prepare(model, optimizer)
    model, optimizer, *prepared = accelerator.prepare(model, optimizer, *others)
    for number, other in enumerate(prepared):
        member.state(f"accelerate-{number}", other)
    if accelerator.scaler is not None:
        member.state("accelerate-scaler", accelerator.scaler)
    batches = Batches(member.dataloader("train", fields=fields))
    validation = Batches(member.dataloader("valid", fields=fields)) if "valid" in member.splits else None
    return accelerator, model, optimizer, batches, validation, *prepared
