"""Trains a member by the `Trainer` of Lightning (`lightning`, or `pytorch_lightning`), version 2.6 or newer.

    def train(member):
        fit(member, Classifier(**member.params), fields=("image", "label"), callbacks=[EarlyStopping("val_loss")])

    Ensemble(recipe=Recipe(model=lambda params: Classifier(**params), train=train, objective="val_loss"), ...)

The trainer's state (loops, optimizers, schedulers, callbacks) is taken where an epoch begins, when all of the one
before is done, which Lightning can start again from. It is part of the member's checkpoints.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ensemble.integrations.options import ONE_WORKER, Options
from ensemble.train.call import Call, forward_call
from ensemble.train.job import TrainingError
from ensemble.train.own_states import to_plain

if TYPE_CHECKING:
    from ensemble.train.member import TrainContext

_PRECISIONS = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
_EACH_SAMPLE = "a member sees each training sample in each epoch; give a smaller train=, or Ensemble(epochs=)"
#: Of a Trainer.
OPTIONS = Options(
    "the Trainer",
    same="""
    accumulate_grad_batches benchmark callbacks check_val_every_n_epoch default_root_dir detect_anomaly
    deterministic enable_autolog_hparams enable_checkpointing enable_model_summary enable_progress_bar
    gradient_clip_algorithm gradient_clip_val inference_mode limit_val_batches log_every_n_steps logger min_epochs
    model_registry num_sanity_val_steps plugins profiler val_check_interval
    """,
    refused={
        "accelerator devices num_nodes strategy": "it follows from the member; leave it out: Ensemble(devices=)",
        "max_epochs": "Ensemble(epochs=) sets it; leave it out",
        "precision": "Ensemble(precision=) sets it; leave it out",
        "fast_dev_run": "`ensemble run --dry-run`, or ensemble.dry_run(...), trains a few steps",
        "overfit_batches limit_train_batches max_steps min_steps": _EACH_SAMPLE,
        "max_time": "a member trains whole epochs: callbacks=[Timer(..., interval='epoch')]",
        "limit_test_batches": "members predict all of test=",
        "limit_predict_batches": "members predict all of their splits",
        "barebones": "what self.log logs is not kept then, and ranks the members",
        "reload_dataloaders_every_n_epochs": "data are the ensemble's: a pipeline draws again in each epoch",
    },
    void={"sync_batchnorm use_distributed_sampler": ONE_WORKER},
)
#: Values of attributes of a Trainer for which nothing was set, where its signature has None.
_UNSET = {"fast_dev_run": False, "overfit_batches": 0.0, "max_steps": -1}
_UNSET |= dict.fromkeys(("limit_train_batches", "limit_test_batches", "limit_predict_batches"), 1.0)
#: Of callbacks; what is refused would have no effect, or a wrong one.
CALLBACKS = Options(
    "Lightning",
    same="""
    BackboneFinetuning BaseFinetuning Callback Checkpoint DeviceStatsMonitor EarlyStopping
    GradientAccumulationScheduler LambdaCallback LearningRateMonitor ModelCheckpoint ModelSummary
    OnExceptionCheckpoint ProgressBar RichModelSummary RichProgressBar SpikeDetection TQDMProgressBar
    ThroughputMonitor Timer
    """,
    refused={
        "StochasticWeightAveraging": "Ensemble(averaging='swa'), or Member(averaging=SWA(start=...))",
        "WeightAveraging EMAWeightAveraging": "Ensemble(averaging='ema'), or Member(averaging=EMA(decay=...))",
        "ModelPruning": "its weights do not fit what Recipe.model builds; prune in the module itself, or later",
        "BatchSizeFinder": "batches are the ensemble's: batch_size=, or a search with 'batch_size' in its space",
        "LearningRateFinder": "it trains on batches of the first epoch; a search with 'lr' in its space finds one",
        "BasePredictionWriter": "a run saves its predictions itself; `ensemble predict` makes more",
    },
    void={},
)
#: Parts of a checkpoint that are needed to build a module, not to go on: they may hold any object.
_OF_A_MODULE = ("hparams_name", "hyper_parameters", "hparams_type", "datamodule_hyper_parameters")
_WEIGHTS = "state_dict"
#: The path under which a trainer saves and loads the state in the member's checkpoint.
_OURS = "the member's checkpoint"


def fit(
    member: TrainContext,
    module: Any,
    trainer: Any = None,
    *,
    fields: Sequence[str] | Mapping[str, str] | None = None,
    **options: Any,
) -> Any:
    """Train the member's module, and save its predictions.

    Data come from the ensemble's pipelines. Each epoch that was validated is reported with what `self.log` logged.
    A member that never was is validated at the end. Callbacks and options of the Trainer are used, or refused
    before training (`CALLBACKS`, `OPTIONS`). A trainer that stops, as by `EarlyStopping`, ends the member. Where a
    `ModelCheckpoint` monitors a metric, the weights of its best are the member's. Predictions are
    `Recipe.predict`; or they follow from what the module's own `predict_step(batch, 0)` returns, probabilities of
    classes, scores or numbers; or from `module(...)` of the fields but for `Recipe.target`, or of a dict.

    Args:
        module: a LightningModule.
        trainer: a Trainer for as many epochs as the member has, on one device; None: made of `options`.
        fields: how a batch is given to the module; see `TrainContext.dataloader`.
        options: of the Trainer. Epochs, device and precision are the member's; loggers, progress bar and summary
            are off unless they are asked for.

    Returns:
        The trainer.

    Raises:
        TrainingError: an option contradicts the member, or the member has several workers.
        ImportError: Lightning is not installed.
    """
    if member.world > 1:
        raise TrainingError("a LightningModule trains with one worker: declare workers=1")
    lightning = _find_package(module)
    _check_options(lightning, member, trainer, options)
    if trainer is None:
        trainer = _make_trainer(lightning, member, options)
    elif options:
        raise TrainingError(f"fit(): {', '.join(options)} : set them on the Trainer that is given")
    if trainer.strategy.root_device.type != member.device.type:
        raise TrainingError(f"the Trainer is on {trainer.strategy.root_device}, the member on {member.device}")
    for name in ("train_dataloader", "val_dataloader"):
        if name in vars(type(module)):
            member.log(f"{type(module).__name__}.{name} is not used: data are the ensemble's")
    is_own = type(module).predict_step is not lightning.LightningModule.predict_step
    forward = Call((fields,)) if isinstance(fields, Mapping | None) else forward_call(fields, member.target)
    member.predict_by(Call((fields, 0), method="predict_step") if is_own else forward)
    state = _TrainerState(trainer)
    # Lightning makes the optimizer; this one has no state, and stands for its learning rate.
    shown = torch.optim.SGD(module.parameters(), lr=0.0)
    member.prepare(module, shown)
    member.state("lightning", state)
    valid = member.dataloader("valid", fields=fields) if "valid" in member.splits else None
    if valid is not None:
        member.evaluate_later()
    if not member.is_over:
        trainer.callbacks.insert(0, _make_callback(lightning, member, state, shown))
        trainer.strategy.checkpoint_io = _make_files(lightning, module, state, trainer.strategy.checkpoint_io)
        train = member.dataloader("train", fields=fields, counts_from_0=False)
        if member.identity.weights is not None:  # a Trainer validates after as many batches as it counts
            train.counts_next, trainer.reload_dataloaders_every_n_epochs = True, 1
        trainer.fit(module, train, valid, ckpt_path=_OURS if state.taken is not None else None)
    is_measured = state.best is not None or member.position["epoch"] - 1 in state.reported
    if valid is not None and not is_measured and (member.identity.keep != "best" or not state.reported):
        trainer.validate(module, valid, verbose=False)
        member.report_end({name: float(value) for name, value in trainer.callback_metrics.items()})
    if state.best is not None:
        kept = torch.load(state.best, map_location=member.device, weights_only=False)  # this member has written it
        member.use_weights(kept[_WEIGHTS], state.reported.get(kept["epoch"]))
    member.predict_all()
    return trainer


def _check_options(lightning: Any, member: TrainContext, trainer: Any, options: dict[str, Any]) -> None:
    """Raise TrainingError for options that are refused; of a given trainer those that its attributes show."""
    parameters = inspect.signature(lightning.Trainer.__init__).parameters
    usual = {name: parameter.default for name, parameter in parameters.items()} | _UNSET
    members = {"max_epochs": member.identity.epochs, "precision": _PRECISIONS[member.identity.precision]}
    values = options
    if trainer is not None:
        shown = (*_UNSET, *members, "min_steps", "barebones", "reload_dataloaders_every_n_epochs")
        values = {name: getattr(trainer, name, None) for name in shown}
    OPTIONS.check(member.log, {n: v for n, v in values.items() if v is not None}, usual, **members)


def _check_callbacks(trainer: Any, callbacks: Any, *, averages: bool) -> None:
    """Raise TrainingError for callbacks that would do something else than in a plain Trainer."""
    CALLBACKS.check_objects(trainer.callbacks)
    timers = [callback for callback in trainer.callbacks if isinstance(callback, callbacks.Timer)]
    if any(callback._interval == "step" and callback.time_remaining() is not None for callback in timers):
        raise TrainingError(
            "Timer(interval='step') stops within an epoch, and a member trains whole ones: Timer(interval='epoch')"
        )
    if averages and any(getattr(callback, "monitor", None) for callback in trainer.checkpoint_callbacks):
        raise TrainingError(
            "ModelCheckpoint(monitor=) keeps weights that averaging= has not evaluated, nor a callback with "
            "weights of its own: leave one out; "
            "Ensemble(keep='best') keeps the averages that were best"
        )
    within = trainer.val_check_interval not in (None, 1.0)
    if within and any(isinstance(callback, callbacks.EarlyStopping) for callback in trainer.callbacks):
        raise TrainingError(
            f"EarlyStopping with val_check_interval={trainer.val_check_interval!r} may stop within an epoch, and "
            "a member trains whole ones: leave val_check_interval out"
        )


def _find_package(module: Any) -> Any:
    """The package of which the module is: a module of one is none for the trainer of the other."""
    bases = {base.__module__.partition(".")[0] for base in type(module).__mro__}
    return importlib.import_module("pytorch_lightning" if "pytorch_lightning" in bases else "lightning.pytorch")


def _make_trainer(lightning: Any, member: TrainContext, options: dict[str, Any]) -> Any:
    """A Trainer for the member."""
    own, device = member.identity, member.device
    fixed = {
        "max_epochs": own.epochs,
        "accelerator": "gpu" if device.type == "cuda" else device.type,
        "devices": [device.index or 0] if device.type == "cuda" else 1,
        "precision": _PRECISIONS[own.precision],
    }
    callbacks = options.get("callbacks") or []
    callbacks = [callbacks] if isinstance(callbacks, lightning.Callback) else list(callbacks)
    keeps = any(isinstance(callback, lightning.callbacks.Checkpoint) for callback in callbacks)
    environments = importlib.import_module(f"{lightning.__name__}.plugins.environments")
    quiet = {
        "logger": False,
        "enable_checkpointing": keeps,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": member.directory,
        "plugins": [environments.LightningEnvironment()],  # not that of Slurm's tasks
    }
    return lightning.Trainer(**{**quiet, **options, **fixed, "callbacks": callbacks})


class _TrainerState:
    """The state of a trainer in a member's checkpoint.

    Attributes:
        taken: as Lightning saves it, without the weights, which the member saves. None: before the first epoch.
        reported: metrics by epoch.
        best: the file that a `ModelCheckpoint` keeps of its best epoch; None: none is wanted.
    """

    def __init__(self, trainer: Any) -> None:
        self.taken: dict[str, Any] | None = None
        self.reported: dict[int, dict[str, float]] = {}
        self.best: str | None = None
        self._trainer = trainer

    def keep(self, whole: dict[str, Any]) -> None:
        """Keep what the trainer saves between two epochs."""
        self.taken = {name: part for name, part in whole.items() if name not in (*_OF_A_MODULE, _WEIGHTS)}
        for name, progress in whole["loops"]["fit_loop"].items():
            _begin_anew(name, progress)
        keeps = self._trainer.checkpoint_callback
        self.best = (getattr(keeps, "best_model_path", "") if getattr(keeps, "monitor", None) else "") or None

    def state_dict(self) -> dict[str, Any]:
        """What was taken last."""
        return {"taken": self.taken, "reported": list(self.reported.items()), "best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a `state_dict`."""
        self.taken, self.reported, self.best = state["taken"], dict(state["reported"]), state["best"]


def _begin_anew(name: str, progress: Any) -> None:
    """Let the counters of a loop be those before an epoch: of epochs as many as are completed, of batches none."""
    if not isinstance(progress, dict):
        return
    for part in progress.values():
        _begin_anew(name, part)
    if (current := progress.get("current")) is None:
        return
    if name == "epoch_progress":
        for counters in (progress["total"], current):
            counters.update(dict.fromkeys(counters, counters["completed"]))
    else:
        current.update(dict.fromkeys(current, 0))
    if "is_last_batch" in progress:
        progress["is_last_batch"] = False


def _make_files(lightning: Any, module: Any, state: _TrainerState, usual: Any) -> Any:
    """What a trainer saves and loads checkpoints with: that of the member by its state, all others as usual."""

    class Files(lightning.plugins.CheckpointIO):  # type: ignore[misc]
        def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, *args: Any, **kwargs: Any) -> None:
            if path == _OURS:
                state.keep(checkpoint)
            else:
                usual.save_checkpoint(checkpoint, path, *args, **kwargs)

        def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
            if path == _OURS:
                assert state.taken is not None
                return {**state.taken, _WEIGHTS: module.state_dict()}
            checkpoint: dict[str, Any] = usual.load_checkpoint(path, *args, **kwargs)
            return checkpoint

        def remove_checkpoint(self, path: Any) -> None:
            usual.remove_checkpoint(path)

    return Files()


def _make_callback(
    lightning: Any, member: TrainContext, state: _TrainerState, shown: torch.optim.Optimizer
) -> Any:
    """What tells the member of the trainer's epochs."""

    class LifecycleCallback(lightning.Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.is_trained = self.is_validated = self.has_loss = self.is_tried = False
            self.evaluating = contextlib.ExitStack()

        def setup(self, trainer: Any, module: Any, stage: str) -> None:
            """Those of `configure_callbacks` are there now; nothing has been trained."""
            _check_callbacks(trainer, lightning.callbacks, averages=member.has_other_weights)

        def on_validation_start(self, trainer: Any, module: Any) -> None:
            if not trainer.sanity_checking and member.has_other_weights:
                self.evaluating.enter_context(member.evaluating())

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            self.evaluating.close()
            self.is_validated = self.is_validated or not trainer.sanity_checking

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, number: int) -> None:
            """What hooks add to a checkpoint is tried before anything is trained, when all is set up."""
            if state.taken is None and not self.is_tried:
                self.is_tried = True
                with contextlib.suppress(Exception):  # a hook may need what an epoch has made
                    trainer.save_checkpoint(_OURS, weights_only=False)
                taken, state.taken = state.taken, None
                to_plain(taken, "lightning")

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, number: int) -> None:
            self.has_loss = self.has_loss or bool(outputs) or not module.automatic_optimization

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            if not self.has_loss:
                raise TrainingError("training_step returned no loss in a whole epoch, so nothing was trained")
            self.is_trained = True
            shown.param_groups[0]["lr"] = trainer.optimizers[0].param_groups[0]["lr"]

        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            self.end_epoch(trainer)
            member.end_epoch()

        def on_train_end(self, trainer: Any, module: Any) -> None:
            if trainer.should_stop:
                member.stop("the Trainer has stopped")
            self.end_epoch(trainer)

        def end_epoch(self, trainer: Any) -> None:
            """Report the epoch before, all of which is done, and take the state that follows."""
            if not self.is_trained:
                return
            if self.is_validated or not trainer.enable_validation:
                metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
                member.report(**metrics)
                state.reported[member.position["epoch"]] = metrics
            trainer.save_checkpoint(_OURS, weights_only=False)
            self.is_trained = self.is_validated = False

    return LifecycleCallback()
