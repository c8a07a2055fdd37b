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

import contextlib
import dataclasses
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCALER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState, TrainerState
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

from ensemble.integrations.accelerate import Batches
from ensemble.integrations.options import ONE_WORKER, Options
from ensemble.train.call import Call
from ensemble.train.job import TrainingError

if TYPE_CHECKING:
    from ensemble.train.member import TrainContext

_WHERE = "all members have the order of the shared pipeline"
#: Of TrainingArguments.
ARGUMENTS = Options(
    "TrainingArguments",
    same="""
    learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps optim optim_args optim_target_modules
    weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm gradient_accumulation_steps
    label_smoothing_factor label_names neftune_noise_alpha use_cache activation_checkpointing
    activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs torch_empty_cache_steps
    full_determinism tf32 debug skip_memory_metrics include_num_input_tokens_seen log_level logging_strategy
    logging_steps logging_first_step logging_nan_inf_filter report_to run_name project trackio_space_id
    trackio_bucket_id trackio_static_space_id eval_strategy eval_steps eval_delay eval_on_start
    prediction_loss_only eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics
    batch_eval_metrics save_strategy save_steps save_total_limit save_only_model load_best_model_at_end
    metric_for_best_model greater_is_better
    """,
    refused={
        "num_train_epochs": "Ensemble(epochs=), which is a whole number",
        "max_steps": "Ensemble(epochs=): a member sees each sample in each epoch",
        "per_device_train_batch_size per_device_eval_batch_size": "Ensemble(batch_size=), also of evaluations",
        "auto_find_batch_size": "Ensemble(batch_size=), or a search with 'batch_size' in its space",
        "seed": "Ensemble(seed=), from which each member has its own",
        "data_seed": "Pipeline(seed=) is that of the order and of the augmentation",
        "dataloader_drop_last": "Ensemble(drop_last=True), for training; evaluations have all samples",
        "dataloader_num_workers dataloader_persistent_workers dataloader_prefetch_factor "
        "dataloader_multiprocessing_context dataloader_in_order": "pipelines prepare: Ensemble(prep_workers=)",
        "train_sampling_strategy length_column_name": f"{_WHERE}; by length it is "
        "Pipeline(source, sampling=sampling.bucketed(field))",
        "accelerator_config": f"{_WHERE}; gradient_accumulation_steps= accumulates",
        "bf16 fp16 bf16_full_eval fp16_full_eval": "Ensemble(precision=)",
        "use_cpu": "Ensemble(devices=)",
        "torch_compile torch_compile_backend torch_compile_mode": "Ensemble(compile=...) compiles the model",
        "use_liger_kernel liger_kernel_config": "apply_liger_kernel in Recipe.model: a loaded model has it, too",
        "fsdp fsdp_config deepspeed parallelism_config ddp_backend": ONE_WORKER,
        "enable_jit_checkpoint": "a member that is stopped saves by itself",
        "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push "
        "hub_revision": "members would overwrite one another there: `ensemble export`, and upload that",
    },
    void={
        "output_dir": "files of the Trainer are in the member's directory",
        "disable_tqdm": "the run shows progress; what the Trainer logs is in the member's log",
        "remove_unused_columns": "MemberTrainer(fields=) says what the model gets",
        "dataloader_pin_memory": "batches for a GPU are always copied through pinned memory",
        "ignore_data_skip restore_callback_states_from_checkpoint resume_from_checkpoint": "a member resumes by "
        "itself where an epoch begins, with the states of its callbacks",
        "do_train do_eval do_predict": "scripts read it, a Trainer does not",
        "local_rank ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph "
        "ddp_timeout average_tokens_across_devices save_on_each_node log_on_each_node "
        "log_level_replica": ONE_WORKER,
    },
)
#: Callbacks of transformers; those of loggers do what they do in any process.
CALLBACKS = Options(
    "transformers",
    same="""
    EarlyStoppingCallback PrinterCallback ProgressCallback NotebookProgressCallback DefaultFlowCallback
    AzureMLCallback ClearMLCallback CodeCarbonCallback CometCallback DVCLiveCallback DagsHubCallback FlyteCallback
    KubeflowCallback MLflowCallback NeptuneCallback SwanLabCallback TensorBoardCallback TrackioCallback
    WandbCallback
    """,
    refused={JITCheckpointCallback.__name__: "a member that is stopped saves by itself"},
    void={},
)
_PREFIX = "eval_"
#: Arguments that change what is trained: where the member's follow from no default, the run says it.
_TOLD = ("num_train_epochs", "per_device_train_batch_size")


class MemberTrainer(Trainer):
    """A `Trainer` that trains a member of an ensemble.

    Data come from the ensemble's pipelines; what a collator does is `Recipe(collate=)`. What `evaluate` finds
    of "valid" is reported, by its names, such as `eval_loss`; a member that was not evaluated is so after its last
    epoch. With `load_best_model_at_end` the best weights are the member's. Predictions are `Recipe.predict`, or
    follow from the model's `logits` for the fields without labels.

    Args:
        member: to be trained, by one worker.
        model: as in a Trainer; None where `model_init=` makes it.
        args: `ARGUMENTS` says what has the effect that it has in a Trainer, and what is refused. Epochs, batch
            size, seed, precision and device are the member's: they agree with it, or are left at their defaults.
        fields: names of the model's arguments -> fields, or the fields that are arguments by their own names; see
            `TrainContext.dataloader`.
        options: of a Trainer; datasets and data_collator are not among them.

    Raises:
        TrainingError: an option contradicts the member, or the member has several workers.
    """

    def __init__(
        self,
        member: TrainContext,
        model: torch.nn.Module | None = None,
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
        self._validates = "valid" in member.splits
        super().__init__(
            model=model,
            args=_adapt(member, args),
            eval_dataset=[] if self._validates else None,  # the Trainer wants one, and reads none
            **options,
        )
        self.model_init: Any = None  # it has made the model; `train` would make another
        assert self.model is not None
        self._taken: dict[str, Any] = {}
        self._shown = torch.optim.SGD(self.model.parameters(), lr=0.0)  # the Trainer makes the optimizer
        inputs = {name: field for name, field in self._fields.items() if name not in self.label_names}
        member.predict_by(Call(kwargs=inputs))
        member.prepare(self.model, self._shown)
        if self._validates:
            member.evaluate_later()
        member.state("transformers", self)
        self.add_callback(_EpochCallback(self))

    def get_train_dataloader(self) -> Any:
        """The batches of the ensemble's training split."""
        return Batches(self.member.dataloader("train", fields=self._fields, counts_from_0=False))

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """The batches of a split: "valid" unless another is named. Those of a Dataset are as in a Trainer."""
        if eval_dataset is self.eval_dataset:
            eval_dataset = None
        if eval_dataset is not None and not isinstance(eval_dataset, str):
            return super().get_eval_dataloader(eval_dataset)
        return Batches(self.member.dataloader(eval_dataset or "valid", fields=self._fields))

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """See `get_eval_dataloader`."""
        is_split = isinstance(test_dataset, str)
        return self.get_eval_dataloader(test_dataset) if is_split else super().get_test_dataloader(test_dataset)

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate a split that is named, or Datasets as a Trainer does; None: "valid", which is reported.

        In training, averages of the weights are evaluated where the member has them.
        """
        averages = self.is_in_train and self.member.has_other_weights
        with self.member.evaluating() if averages else contextlib.nullcontext():
            metrics = super().evaluate(eval_dataset, *args, **kwargs)
        if eval_dataset is None and self.is_in_train and self.state.global_step:
            self.member.report(**_without_times(metrics))
        return metrics

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train the member's epochs that are left; nothing where none is.

        Raises:
            TrainingError: resume_from_checkpoint is given; a member resumes from its own. Or a callback does not
                fit.
        """
        if args or "resume_from_checkpoint" in kwargs:
            raise TrainingError(
                "MemberTrainer.train(): a member resumes by itself; leave out resume_from_checkpoint"
            )
        self._check_callbacks()
        if self.member.is_over:
            if self._taken:  # it died after its last epoch
                self.state = TrainerState(**json.loads(self._taken["state"]))
                if self.args.load_best_model_at_end and self.state.best_model_checkpoint:
                    self._load_best_model()
                self._rank()
            return None
        folder = self.member.directory / "resumed"
        try:
            result = super().train(resume_from_checkpoint=self._write(folder) if self._taken else None, **kwargs)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self._end_epoch()
        self._rank()
        return result

    def _check_callbacks(self) -> None:
        """Refuse callbacks that would do something else than in a Trainer."""
        callbacks, args = self.callback_handler.callbacks, self.args
        CALLBACKS.check_objects(callbacks)
        updates = -(-self.member.steps_per_epoch // args.gradient_accumulation_steps)
        every = args.eval_steps or 1
        every = math.ceil(every * updates * self.member.identity.epochs) if every < 1 else every
        stops = any(isinstance(callback, EarlyStoppingCallback) for callback in callbacks)
        averages = self.member.has_other_weights
        if averages and args.load_best_model_at_end:
            raise TrainingError(
                "load_best_model_at_end=True keeps weights that averaging= has not evaluated, nor a callback with "
                "weights of its own: leave one out; "
                "Ensemble(keep='best') keeps the averages that were best"
            )
        if averages and args.eval_strategy == "steps" and every % updates:
            raise TrainingError(
                f"averaging= with eval_steps={args.eval_steps}: averages exist at the ends of epochs only"
            )
        if stops and args.eval_strategy == "steps" and every % updates:
            raise TrainingError(
                f"EarlyStoppingCallback with eval_steps={args.eval_steps} may stop within an epoch, and a member "
                f"trains whole ones, of {updates} steps: eval_strategy='epoch', or a multiple of {updates}"
            )

    def _rank(self) -> None:
        """Let the best weights, which are loaded, be the member's; evaluate a member that never was."""
        best = self.state.best_global_step if self.args.load_best_model_at_end else None
        history = [record for record in self.state.log_history if record["step"] and f"{_PREFIX}loss" in record]
        if best and self.state.best_model_checkpoint:
            measured = (record for record in self.state.log_history if record["step"] == best)
            best_metrics = {
                name: value for record in measured for name, value in record.items() if name.startswith(_PREFIX)
            }
            assert self.model is not None
            self.member.use_weights(self.model.state_dict(), _without_times(best_metrics))
        elif self._validates and not history:
            self.member.report_end(_without_times(self.evaluate()))

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
        state: Any = self.state
        state.stateful_callbacks = TrainerState(stateful_callbacks=self._list_stateful()).stateful_callbacks
        scaler = getattr(self.accelerator, "scaler", None)
        self._taken = {
            "state": json.dumps(dataclasses.asdict(state)),
            OPTIMIZER_NAME: self.optimizer.state_dict(),
            SCHEDULER_NAME: None if self.lr_scheduler is None else self.lr_scheduler.state_dict(),
            SCALER_NAME: None if scaler is None else scaler.state_dict(),
        }
        self._shown.param_groups[0]["lr"] = self.optimizer.param_groups[0]["lr"]
        self.member.end_epoch()

    def _list_stateful(self) -> list[Any]:
        parts = [*self.callback_handler.callbacks, self.control]
        return [part for part in parts if isinstance(part, ExportableState)]

    def _load_callback_state(self) -> None:
        """Give callbacks their states: the objects themselves, in their order, which a Trainer would make anew."""
        owners, saved = self._list_stateful(), cast("dict[str, Any]", self.state.stateful_callbacks)
        for name, states in saved.items():
            named = (owner for owner in owners if type(owner).__name__ == name)
            for owner, state in zip(named, states if isinstance(states, list) else [states], strict=False):
                vars(owner).update(vars(type(owner).from_state(state)))

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

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.member.end_epoch()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer._end_epoch()


def _without_times(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics in what an evaluation found."""
    times = ("_runtime", "_per_second", "_preparation_time")
    return {
        name: value
        for name, value in metrics.items()
        if isinstance(value, int | float) and name != "epoch" and not name.endswith(times)
    }


def _adapt(member: TrainContext, args: TrainingArguments | None) -> TrainingArguments:
    """The arguments, with what follows from the member.

    Raises:
        TrainingError: some of them contradict it, or would have no effect.
    """
    own = member.identity
    members = {
        "num_train_epochs": own.epochs,
        "per_device_train_batch_size": own.batch_size,
        "per_device_eval_batch_size": own.batch_size,
        "seed": own.seed % 2**32,
        "bf16": own.precision == "bf16",
        "fp16": own.precision == "fp16",
        "use_cpu": member.device.type == "cpu",
    }
    if args is not None:
        usual = vars(type(args)())
        values = {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}
        unsaid = [name for name in members if values[name] == usual[name]]  # nobody knows whether it is a wish
        ARGUMENTS.check(member.log, {n: v for n, v in values.items() if n not in unsaid}, usual, **members)
        follow = [f"{name}={members[name]}" for name in _TOLD if name in unsaid and members[name] != usual[name]]
        if follow:
            member.remark(f"TrainingArguments left at their defaults follow the Ensemble: {', '.join(follow)}")
    folder = str(member.directory / "trainer")
    fixed: dict[str, Any] = {"output_dir": folder, "disable_tqdm": True, "ignore_data_skip": True, **members}
    return TrainingArguments(**fixed) if args is None else dataclasses.replace(args, **fixed)
