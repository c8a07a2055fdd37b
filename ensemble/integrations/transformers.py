"""Trains a member by the `Trainer` of Hugging Face (`transformers`, version 5).

    def train(member):
        trainer = MemberTrainer(member, build(member.params), args, fields=FIELDS, compute_metrics=compute_metrics)
        trainer.train()
        member.predict_all()

    Ensemble(recipe=Recipe(model=build, train=train, predict=predict, objective="eval_accuracy"), ...)

The trainer's state (optimizer, scheduler, loss scale, callbacks, history) is taken where an epoch begins, when all
of the one before is done, and is part of the member's checkpoints.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCALER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState, TrainerState

from ensemble.train.call import Call
from ensemble.train.job import TrainingError

if TYPE_CHECKING:
    from ensemble.train.member import TrainContext


class MemberTrainer(Trainer):
    """A `Trainer` that trains a member of an ensemble.

    Data come from the ensemble's pipelines; what a collator does is `Recipe(collate=)`. What `evaluate` finds
    after an epoch is reported, by its names, such as `eval_loss`. With `load_best_model_at_end` the best weights
    are the member's. Predictions are `Recipe.predict`, or follow from the model's `logits` for the fields without
    labels.

    Args:
        member: to be trained, by one worker.
        model: as in a Trainer.
        args: epochs, batch size, device, precision, seed and directory are the member's; the log says which
            others were declared.
        fields: names of the model's arguments -> fields, or the fields that are arguments by their own names; see
            `TrainContext.dataloader`.
        options: of a Trainer; datasets and data_collator are not among them.

    Raises:
        TrainingError: an option contradicts the member, or the member has several workers.
    """

    def __init__(
        self,
        member: TrainContext,
        model: torch.nn.Module,
        args: TrainingArguments | None = None,
        *,
        fields: Mapping[str, str] | Sequence[str],
        **options: Any,
    ) -> None:
        if member.world > 1:
            raise TrainingError("a Trainer of transformers trains with one worker: declare workers=1")
        data = [name for name in ("train_dataset", "eval_dataset", "data_collator") if name in options]
        if data:
            raise TrainingError(
                f"MemberTrainer(): {', '.join(data)}: data are the ensemble's; a collator is Recipe(collate=), "
                "adapted by pipelines.from_samples"
            )
        self.member = member
        self._fields = fields if isinstance(fields, Mapping) else {name: name for name in fields}
        validates = "valid" in member.splits
        super().__init__(
            model=model,
            args=_adapt(member, args or TrainingArguments()),
            eval_dataset=[] if validates else None,  # the Trainer wants one, and reads none
            **options,
        )
        self._taken: dict[str, Any] = {}
        self._shown = torch.optim.SGD(model.parameters(), lr=0.0)  # the Trainer makes the optimizer
        member.prepare(model, self._shown)
        inputs = {name: field for name, field in self._fields.items() if name not in self.label_names}
        member.observer.offered = Call(kwargs=inputs)
        member.state("transformers", self)
        self.add_callback(_EpochCallback(self))

    def get_train_dataloader(self) -> Any:
        """The batches of the ensemble's training split."""
        return self.member.dataloader("train", fields=self._fields, counts_from_0=False)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """The batches of a split: "valid" unless another is named."""
        split = eval_dataset if isinstance(eval_dataset, str) else "valid"
        return self.member.dataloader(split, fields=self._fields)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate as a Trainer does, and report what is found while the member trains."""
        found = super().evaluate(*args, **kwargs)
        if self.is_in_train:
            self.member.report(**_without_times(found))
        return found

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train the member's epochs that are left; nothing where none is.

        Raises:
            TrainingError: resume_from_checkpoint is given; a member resumes from its own.
        """
        if args or "resume_from_checkpoint" in kwargs:
            raise TrainingError(
                "MemberTrainer.train(): a member resumes by itself; leave out resume_from_checkpoint"
            )
        if self.member.is_over:
            if self._taken and self.args.load_best_model_at_end:  # it died after its last epoch
                self.state = TrainerState(**json.loads(self._taken["state"]))
                if self.state.best_model_checkpoint:
                    self._load_best_model()
                self._use_best()
            return None
        folder = self.member.directory / "resumed"
        try:
            result = super().train(resume_from_checkpoint=self._write(folder) if self._taken else None, **kwargs)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self._end_epoch()
        self._use_best()
        return result

    def _use_best(self) -> None:
        """Let the best weights, which are loaded, be the member's."""
        best = self.state.best_global_step if self.args.load_best_model_at_end else None
        if best and self.state.best_model_checkpoint:
            measured = (each for each in self.state.log_history if each["step"] == best)
            found = {name: value for each in measured for name, value in each.items() if name.startswith("eval_")}
            assert self.model is not None
            self.member.use_weights(self.model.state_dict(), _without_times(found))

    # --- the state of the trainer -----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The trainer's state where the epoch in progress began."""
        return self._taken

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self._taken = state

    def _end_epoch(self) -> None:
        """End the epoch that was trained; the state that follows is part of its checkpoint."""
        if self.optimizer is None:
            return
        if self.control.should_training_stop and self.state.global_step < self.state.max_steps:
            self.member.stop("the Trainer has stopped")
        kept = (
            each for each in [*self.callback_handler.callbacks, self.control] if isinstance(each, ExportableState)
        )
        state: Any = self.state
        state.stateful_callbacks.update({type(each).__name__: each.state() for each in kept})
        scaler = getattr(self.accelerator, "scaler", None)
        self._taken = {
            "state": json.dumps(dataclasses.asdict(state)),
            OPTIMIZER_NAME: self.optimizer.state_dict(),
            SCHEDULER_NAME: None if self.lr_scheduler is None else self.lr_scheduler.state_dict(),
            SCALER_NAME: None if scaler is None else scaler.state_dict(),
        }
        self._shown.param_groups[0]["lr"] = self.optimizer.param_groups[0]["lr"]
        self.member.end_epoch()

    def _write(self, folder: Path) -> str:
        """Write the state as the files of a Trainer's checkpoint; the model has its weights."""
        folder.mkdir(exist_ok=True)
        (folder / TRAINER_STATE_NAME).write_text(self._taken["state"], encoding="utf-8")
        for name in (OPTIMIZER_NAME, SCHEDULER_NAME, SCALER_NAME):
            if self._taken[name] is not None:
                torch.save(self._taken[name], folder / name)
        return str(folder)

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the model has its weights."""

    def _load_best_model(self) -> None:
        """Load the best weights after the last epoch has ended with its own."""
        self._end_epoch()
        super()._load_best_model()


class _EpochCallback(TrainerCallback):
    """Ends the member's epochs."""

    def __init__(self, trainer: MemberTrainer) -> None:
        self._trainer = trainer

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer._end_epoch()


def _without_times(found: Mapping[str, Any]) -> dict[str, float]:
    """The metrics in what an evaluation found."""
    times = ("_runtime", "_per_second", "_preparation_time")
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, int | float) and name != "epoch" and not name.endswith(times)
    }


def _adapt(member: TrainContext, args: TrainingArguments) -> TrainingArguments:
    """The arguments with what follows from the member; the log says what was declared otherwise."""
    own = member.identity
    follows = {
        "num_train_epochs": own.epochs,
        "max_steps": -1,
        "per_device_train_batch_size": own.batch_size,
        "per_device_eval_batch_size": own.batch_size,
        "seed": own.seed % 2**32,
        "bf16": own.precision == "bf16",
        "fp16": own.precision == "fp16",
        "use_cpu": member.device.type == "cpu",
        "output_dir": str(member.directory / "trainer"),
    }
    fixed = {"ignore_data_skip": True, "disable_tqdm": True, "auto_find_batch_size": False}
    told: dict[str, Any] = {**follows, **fixed}
    defaults = {each.name: each.default for each in dataclasses.fields(args)}
    wrong = [
        f"{name}={getattr(args, name)!r} (it is {value!r})"
        for name, value in follows.items()
        if getattr(args, name) not in (value, defaults[name]) and name != "output_dir"
    ]
    if args.train_sampling_strategy != "random":
        raise TrainingError(
            f"TrainingArguments.train_sampling_strategy={args.train_sampling_strategy!r}: the order is that of "
            "the shared pipeline, independent of members and batch sizes; by length it is "
            "Pipeline(source, sampling=sampling.bucketed(field))"
        )
    if wrong:
        member.log(f"TrainingArguments: not used, as the member says it: {', '.join(wrong)}")
    return dataclasses.replace(args, **told)
