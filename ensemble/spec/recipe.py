"""The functions that define how a member is built, trained and evaluated, and what they can be known to report."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ensemble.spec.fields import MEMBER_FIELDS
from ensemble.spec.functions import CALLS, check_function
from ensemble.spec.losses import as_loss, implied_task
from ensemble.spec.objectives import REPORTED, Mode, check_ranking, describe_missing_objective
from ensemble.spec.split_metrics import KNOWN, SplitMetricLike, check_split_metrics, name_of
from ensemble.spec.task import CLASSIFICATION, KINDS, NUMBERS, Task, as_task
from ensemble.spec.validation import SpecError, check_number, option_class


@option_class
@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Plain functions that define a member; the built-in training loop calls them.

    Attributes:
        model: `model(params) -> nn.Module`; with `base`, `model(params, base)`.
        base: a frozen network that all members share: `base() -> nn.Module`, or the path of a Transformers folder,
            which `AutoModel.from_pretrained` reads. It is made once a run; members map one copy of it, train what
            they build around it, and save nothing of it.
        loss: `loss(model, batch) -> tensor [b]`, one value per sample, unreduced; or a name: "cross_entropy",
            "binary_cross_entropy", "mse", "huber", "gaussian_nll", "pinball" (`ensemble.spec.losses`).
        optimizer: `optimizer(model, params) -> torch.optim.Optimizer`; unless given, `Ensemble.optimizer`, or SGD
            with `params["lr"]`.
        schedule: `schedule(optimizer, params, steps) -> LRScheduler`, stepped after each of `steps` steps. An
            argument `steps_per_epoch` gets the steps of an epoch.
        task: what members predict: a name of `ensemble.spec.task.KINDS`, or `quantiles(0.1, 0.5, 0.9)`; None takes
            the one that the loss is for: of a loss by name, or of a function whose losses of torch are of one
            kind. Where that says none, it has to be declared. A train function predicts classes where nothing is.
        metrics: `metrics(outputs, batch) -> dict` of tensors [b] (averaged over samples) or scalars (averaged
            over batches by their size). `loss` is always reported, and `accuracy` of a classification.
        split_metrics: metrics that are no means over samples, computed after each epoch from the predictions on
            the whole validation split: names of `ensemble.spec.split_metrics.KNOWN` ("roc_auc", "f1_macro",
            "r2" ...), or functions `f(values [n, ...], target [n, ...]) -> float` of numpy arrays, which report
            under their own name; targets are as they are saved: int64 of classes and labels, else float64. What
            is undefined for some predictions is NaN. An `objective` that is such a name need not be repeated here:
            it is computed so of members and of the combined model, also where `metrics` reports one of that name.
            Further arguments of a function without a default are fields of the batch: `recall(values, target,
            user)`; the combined model is not measured by such a one.
        valid_loss: False: none of the validation split, as of in-batch negatives. `predict` says how to predict.
        predict: `predict(model, batch) -> values`, laid out by the task (`ensemble.spec.task`); unless given, they
            follow from what the model returned inside `loss`: for a classification, by the softmax.
        target: the field that holds what is to be predicted, used for metrics, selection and calibration.
        objective: the metric that ranks members; unless given, accuracy, or for a `task=` without classes the
            loss.
        mode: whether the objective is maximized (`"max"`) or minimized (`"min"`); needed where its name does not
            imply it (`ensemble.spec.objectives`: accuracy, auc, f1 ... are maximized; loss, nll, error ...
            minimized).
        train: `train(member)`, a training loop of its own instead of the built-in one
            (`ensemble.train.member.TrainContext`). `model` then builds the models that a run is loaded as.
        inputs: with a word for the loss: the fields that the model is called with, in this order; unless given,
            the only field beside the target.
        label_smoothing: for "cross_entropy" in training, the share of the target that goes to all classes alike.
        target_scale: mean and standard deviation of a target of numbers (`pipelines.stages.mean_std`): losses by
            name compare the outputs with (target - mean) / std, and predictions are outputs * std + mean, so that
            they and all figures but the loss are in the target's own unit. A loss function of yours does the first
            itself; `predict` gives the own unit.
        collate: `collate(batch)` or `collate(batch, rng)`, applied to each batch of a rank before a model gets it:
            it packs, pads, tokenizes or mixes samples, and returns a dict (`pipelines.loader.collate`). `rng` is a
            numpy Generator, in evaluation and prediction None. The batch keeps its `index`, one of each sample,
            and the loss returns one value for each of them.
        clip_norm: largest L2 norm of a step's gradient, which is that of the global batch's mean loss whatever the
            number of workers, of parts (`accumulate=`) and the loss scale; None for no clipping. A hyperparameter
            `clip_norm` or `label_smoothing` sets it for its member.
    """

    model: Callable[..., Any]
    loss: Any = None  # a function: a name is replaced by that of it
    optimizer: Callable[..., Any] | None = None
    schedule: Callable[..., Any] | None = None
    metrics: Callable[..., Any] | None = None
    predict: Callable[..., Any] | None = None
    target: str = "label"
    objective: str | None = None
    mode: Mode | None = None
    clip_norm: float | None = None
    task: str | Task | None = None
    split_metrics: Sequence[SplitMetricLike] = ()
    train: Callable[..., Any] | None = None
    inputs: Sequence[str] = ()
    label_smoothing: float | None = None
    target_scale: tuple[float, float] | None = None
    collate: Callable[..., Any] | None = None
    valid_loss: bool = True
    base: Callable[[], Any] | str | None = None

    def __post_init__(self) -> None:
        self._resolve_loss()
        metrics: Any = self.split_metrics
        object.__setattr__(
            self, "split_metrics", (metrics,) if isinstance(metrics, str) or callable(metrics) else tuple(metrics)
        )
        check_split_metrics("Recipe.split_metrics", self.split_metrics, self.known_task)
        calls = CALLS if self.base is None else {**CALLS, "model": "model(params, base)"}
        for name in (*calls, "collate"):
            if (value := getattr(self, name)) is not None:
                check_function(f"Recipe.{name}", value, calls.get(name))
        if self.base is not None:
            self._check_base()
        check_ranking("Recipe", self)
        check_number("Recipe.clip_norm", self.clip_norm, low=0, above=True, optional=True)
        if self.train is None and self.loss is None:
            raise SpecError("Recipe needs loss=, or train= with a training loop of its own")
        if self.train is None and self.known_task is None:
            raise SpecError(
                "Recipe.loss does not say what members predict: declare Recipe(task=...), one of "
                f"{', '.join(KINDS[:-2])}, quantiles(0.1, 0.5, 0.9), or {KINDS[-1]} for anything else"
            )
        for name in ("optimizer", "schedule", "metrics", "clip_norm", "base"):
            if self.train is not None and getattr(self, name) is not None:
                raise SpecError(f"Recipe.{name} is for the built-in training loop; Recipe.train does that itself")

    def _check_base(self) -> None:
        if not isinstance(self.base, str):
            check_function("Recipe.base", self.base, "base()")
        elif not os.path.isdir(self.base):
            raise SpecError(
                f"Recipe.base must be a function, or a Transformers folder that is there: {self.base!r}"
            )

    def _resolve_loss(self) -> None:
        inputs = (self.inputs,) if isinstance(self.inputs, str) else tuple(self.inputs)
        check_number("Recipe.label_smoothing", self.label_smoothing, low=0, below=1, optional=True)
        task = as_task("Recipe.task", self.task)
        scale = self._check_scale(task)
        loss = as_loss(self.loss, self.target, inputs, float(self.label_smoothing or 0.0), task, scale)
        for name, value in (("target_scale", scale), ("inputs", inputs), ("loss", loss), ("task", task)):
            object.__setattr__(self, name, value)

    @functools.cached_property
    def known_task(self) -> Task | None:
        """What members predict, as it is declared, or else by the loss; None: neither says it."""
        return as_task("Recipe.task", self.task) or implied_task(self.loss)

    def find_task(self) -> Task:
        """What members predict: classes where nothing says it."""
        return self.known_task or CLASSIFICATION

    def _check_scale(self, task: Task | None) -> tuple[float, float] | None:
        if self.target_scale is None:
            return None
        if not isinstance(self.target_scale, Sequence) or len(self.target_scale) != 2:
            raise SpecError(
                f"Recipe.target_scale must be (mean, standard deviation), got {self.target_scale!r:.60}"
            )
        if task is not None and task.kind not in NUMBERS:
            raise SpecError(f"Recipe.target_scale is for numbers, not for the task {task.kind}")
        mean, std = self.target_scale
        check_number("Recipe.target_scale: the mean", mean, low=-math.inf)
        check_number("Recipe.target_scale: the standard deviation", std, low=0, above=True)
        return float(mean), float(std)


#: Options of a Recipe that a hyperparameter of the same name sets.
RECIPE_OPTIONS = ("clip_norm", "label_smoothing")


def apply_recipe_options(recipe: Recipe, params: Mapping[str, Any]) -> Recipe:
    """The recipe with the options that hyperparameters set.

    Raises:
        SpecError: a value is invalid, or the loss has no such option.
    """
    own = {name: params[name] for name in RECIPE_OPTIONS if name in params}
    return dataclasses.replace(recipe, **own) if own else recipe


def list_member_options(recipe: Any) -> frozenset[str]:
    """The options of a Member that hyperparameters set: all but those for which the user has functions."""
    own = has_own_loop(recipe)
    functions = {name for name in ("optimizer", "schedule") if own or getattr(recipe, name) is not None}
    return frozenset(MEMBER_FIELDS) - functions


def has_own_loop(recipe: Any) -> bool:
    """Whether members are trained by a train function, alone or within a Recipe."""
    return not isinstance(recipe, Recipe) or recipe.train is not None


def reported_metrics(recipe: Recipe) -> frozenset[str] | None:
    """The names of all metrics that a Recipe can report; None where it has a `metrics` function."""
    figures = REPORTED[recipe.find_task().kind]
    always = frozenset((*(["loss"] if recipe.valid_loss else []), *figures, *map(name_of, recipe.split_metrics)))
    return always if recipe.metrics is None else None


def list_split_metrics(recipe: Recipe, objective: str, task: Task) -> list[SplitMetricLike]:
    """The metrics of the whole split by which members and the combined model are measured: those of the recipe,
    and the objective where it is the name of one.
    """
    own, metric = list(recipe.split_metrics), KNOWN.get(objective)
    is_measured = objective in (*REPORTED[task.kind], *map(name_of, own))
    return own if metric is None or task.kind not in metric.kinds or is_measured else [*own, objective]


def check_objective(recipe: Recipe, objective: str, *, is_declared: bool = True) -> None:
    """Raise SpecError for a metric that is to rank members, and that the built-in loop cannot report."""
    reported = None if has_own_loop(recipe) else reported_metrics(recipe)
    if reported is None or objective in reported or not (is_declared or objective == "loss"):
        return
    if objective in KNOWN:  # then it is computed
        check_split_metrics("Ensemble.objective", [objective], recipe.known_task)
    else:
        raise SpecError(describe_missing_objective(objective, reported, by="a Recipe without metrics="))
