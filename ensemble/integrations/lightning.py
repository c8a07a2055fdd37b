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
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ensemble.train.call import Call
from ensemble.train.job import TrainingError

if TYPE_CHECKING:
    from ensemble.train.member import TrainContext

_PRECISIONS = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
#: Callbacks that would have no effect, or a wrong one, and what to do instead. All others are used.
REFUSED_CALLBACKS = {
    "StochasticWeightAveraging": "Ensemble(averaging='swa'), or Member(averaging=SWA(start=...))",
    "WeightAveraging": "Ensemble(averaging='ema'), or Member(averaging=EMA(decay=...))",
    "ModelPruning": "its weights do not fit what Recipe.model builds; prune in the module itself, or afterwards",
    "BatchSizeFinder": "batches are the ensemble's: batch_size=, or a search with 'batch_size' in its space",
    "LearningRateFinder": "it trains on batches of the first epoch; a search with 'lr' in its space finds one",
    "BasePredictionWriter": "a run saves its predictions itself; `ensemble predict` makes more",
}
_EACH_SAMPLE = "a member sees each training sample in each epoch; give a smaller train=, or Ensemble(epochs=)"
#: Options of a Trainer that would have no effect, or a wrong one: the value that is none, and what to do instead.
REFUSED_OPTIONS: dict[str, tuple[Any, str]] = {
    "fast_dev_run": (False, "`ensemble run --dry-run`, or ensemble.dry_run(...), trains a few steps"),
    "overfit_batches": (0.0, _EACH_SAMPLE),
    "limit_train_batches": (1.0, _EACH_SAMPLE),
    "max_steps": (-1, _EACH_SAMPLE),
    "min_steps": (None, _EACH_SAMPLE),
    "limit_test_batches": (1.0, "members predict all of test="),
    "limit_predict_batches": (1.0, "members predict all of their splits"),
    "barebones": (False, "what self.log logs is not kept then, and ranks the members"),
    "reload_dataloaders_every_n_epochs": (0, "data are the ensemble's: a pipeline draws anew in each epoch"),
}
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
    Callbacks and options of the Trainer are used, or refused before training (`REFUSED_CALLBACKS`,
    `REFUSED_OPTIONS`). A trainer that stops, as by `EarlyStopping`, ends the member. Where a `ModelCheckpoint`
    monitors a metric, the weights of its best are the member's. Predictions are `Recipe.predict`; or they follow
    from what the module's own `predict_step(batch, 0)` returns, if those are probabilities of classes, scores or
    numbers; or from what `module(...)` returned in training.

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
    for name, (usual, why) in REFUSED_OPTIONS.items():
        value = options.get(name, usual) if trainer is None else getattr(trainer, name, usual)
        is_count = type(usual) is float and type(value) is int and value > 0  # 1 is one batch, 1.0 are all
        if value is not None and (value != usual or is_count):
            raise TrainingError(f"the Trainer has {name}={value!r}: {why}")
    if trainer is None:
        trainer = _make_trainer(lightning, member, options)
    elif options:
        raise TrainingError(f"fit(): {', '.join(options)} are options of a new Trainer, and one is given")
    if trainer.max_epochs != member.identity.epochs:
        raise TrainingError(
            f"the Trainer has max_epochs={trainer.max_epochs}, the member {member.identity.epochs} epochs: leave "
            "max_epochs out, Ensemble(epochs=) says it"
        )
    if (precision := _PRECISIONS[member.identity.precision]) != trainer.precision:
        raise TrainingError(
            f"the Trainer has precision={trainer.precision!r}, the member {precision!r}: leave it out"
        )
    if trainer.strategy.root_device.type != member.device.type:
        raise TrainingError(f"the Trainer is on {trainer.strategy.root_device}, the member on {member.device}")
    for name in ("train_dataloader", "val_dataloader"):
        if name in vars(type(module)):
            member.log(f"{type(module).__name__}.{name} is not used: data are the ensemble's")
    is_own = type(module).predict_step is not lightning.LightningModule.predict_step
    member.observer.offered = Call((fields, 0), method="predict_step") if is_own else Call((fields,))
    member.observer.is_relied_on = True
    state = _TrainerState(trainer)
    # Lightning makes the optimizer; this one has no state, and stands for its learning rate.
    shown = torch.optim.SGD(module.parameters(), lr=0.0)
    member.prepare(module, shown)
    member.state("lightning", state)
    if not member.is_over:
        trainer.callbacks.insert(0, _make_callback(lightning, member, state, shown))
        trainer.strategy.checkpoint_io = _make_files(lightning, module, state, trainer.strategy.checkpoint_io)
        valid = member.dataloader("valid", fields=fields) if "valid" in member.splits else None
        train = member.dataloader("train", fields=fields, counts_from_0=False)
        if member.identity.weights is not None:  # a Trainer validates after as many batches as it counts
            train.counts_next, trainer.reload_dataloaders_every_n_epochs = True, 1
        trainer.fit(module, train, valid, ckpt_path=_OURS if state.taken is not None else None)
    if state.best is not None:
        kept = torch.load(state.best, map_location=member.device, weights_only=False)  # this member has written it
        member.use_weights(kept[_WEIGHTS], state.reported.get(kept["epoch"]))
    member.predict_all()
    return trainer


def _check_callbacks(lightning: Any, callbacks: Sequence[Any]) -> None:
    """Raise TrainingError for a callback of Lightning's that would have no effect, or a wrong one."""
    for name, why in REFUSED_CALLBACKS.items():
        kind = getattr(lightning.callbacks, name, None)
        if kind is not None and any(isinstance(each, kind) for each in callbacks):
            raise TrainingError(f"Lightning's {name} does not work with a member's loop: {why}")


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
    if wrong := [name for name in (*fixed, "num_nodes", "strategy") if name in options]:
        raise TrainingError(f"fit(): {', '.join(wrong)} follow from the member; leave them out")
    callbacks = options.get("callbacks") or []
    callbacks = [callbacks] if isinstance(callbacks, lightning.Callback) else list(callbacks)
    keeps = any(isinstance(each, lightning.callbacks.Checkpoint) for each in callbacks)
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
            found: dict[str, Any] = usual.load_checkpoint(path, *args, **kwargs)
            return found

        def remove_checkpoint(self, path: Any) -> None:
            usual.remove_checkpoint(path)

    return Files()


def _make_callback(
    lightning: Any, member: TrainContext, state: _TrainerState, shown: torch.optim.Optimizer
) -> Any:
    """What tells the member of the trainer's epochs."""

    class MemberCallback(lightning.Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.is_trained = self.is_validated = False
            self.evaluating = contextlib.ExitStack()

        def setup(self, trainer: Any, module: Any, stage: str) -> None:
            """Those of `configure_callbacks` are there now; nothing has been trained."""
            _check_callbacks(lightning, trainer.callbacks)

        def on_validation_start(self, trainer: Any, module: Any) -> None:
            if not trainer.sanity_checking and member.identity.averaging is not None:
                self.evaluating.enter_context(member.evaluating())

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            self.evaluating.close()
            self.is_validated = self.is_validated or not trainer.sanity_checking

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
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
                found = {name: float(value) for name, value in trainer.callback_metrics.items()}
                member.report(**found)
                state.reported[member.position["epoch"]] = found
            trainer.save_checkpoint(_OURS)
            self.is_trained = self.is_validated = False

    return MemberCallback()
