"""The functions that define how a member is built, trained and evaluated, and what they can be known to report."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ensemble.spec.fields import MEMBER_FIELDS
from ensemble.spec.functions import CALLS, check_function
from ensemble.spec.losses import as_loss, implied_task
from ensemble.spec.objectives import REPORTED, Mode, check_ranking, describe_missing_objective
from ensemble.spec.split_metrics import KNOWN, SplitMetricLike, check_split_metrics, name_of
from ensemble.spec.task import NUMBERS, Task, as_task
from ensemble.spec.validation import SpecError, check_number, option_class


@option_class
@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Plain functions that define a member; the built-in training loop calls them.

    Attributes:
        model: `model(params) -> nn.Module`.
        loss: `loss(model, batch) -> tensor [b]`, one value per sample, unreduced; or a name: "cross_entropy",
            "binary_cross_entropy", "focal", "binary_focal", "mse", "huber", "gaussian_nll", "pinball"
            (`ensemble.spec.losses`), or a dict of a name and options: `{"name": "focal", "gamma": 1.0}`.
        optimizer: `optimizer(model, params) -> torch.optim.Optimizer`; unless given, `Ensemble.optimizer`, or SGD
            with `params["lr"]`.
        schedule: `schedule(optimizer, params, steps) -> LRScheduler`, stepped after each of `steps` steps. An
            argument `steps_per_epoch` gets the steps of an epoch.
        task: what members predict: a name of `ensemble.spec.task.KINDS`, or `quantiles(0.1, 0.5, 0.9)`; None
            infers it from the target and the outputs.
        metrics: `metrics(outputs, batch) -> dict` of tensors [b] (averaged over samples) or scalars (averaged
            over batches by their size). `loss` is always reported, and `accuracy` of a classification.
        split_metrics: metrics that are no means over samples, computed after each epoch from the predictions on
            the whole validation split: names of `ensemble.spec.split_metrics.KNOWN` ("roc_auc", "f1_macro",
            "r2" ...), or functions `f(values [n, ...], target [n, ...]) -> float` of numpy arrays, which report
            under their own name; targets are as they are saved: int64 of classes and labels, else float64. What
            is undefined for some predictions is NaN. An `objective` that is such a name need not be repeated here.
            Further arguments of a function without a default are fields of the batch: `recall(values, target,
            user)`; the combined model is not measured by such a one.
        valid_loss: False: no loss on the validation split, where one of negatives within a batch means nothing.
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
        label_smoothing: of "cross_entropy" in training: the share of the target that goes to all classes alike.
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

    def __post_init__(self) -> None:
        self._resolve_loss()
        given: Any = self.split_metrics
        object.__setattr__(
            self, "split_metrics", (given,) if isinstance(given, str) or callable(given) else tuple(given)
        )
        check_split_metrics("Recipe.split_metrics", self.split_metrics, self.task)  # type: ignore[arg-type]
        for name in (*CALLS, "collate"):
            if (value := getattr(self, name)) is not None:
                check_function(f"Recipe.{name}", value, CALLS.get(name))
        check_ranking("Recipe", self)
        check_number("Recipe.clip_norm", self.clip_norm, low=0, above=True, optional=True)
        if self.train is None and self.loss is None:
            raise SpecError("Recipe needs loss=, or train= with a training loop of its own")
        for name in ("optimizer", "schedule", "metrics", "clip_norm"):
            if self.train is not None and getattr(self, name) is not None:
                raise SpecError(f"Recipe.{name} is for the built-in training loop; Recipe.train does that itself")

    def _resolve_loss(self) -> None:
        inputs = (self.inputs,) if isinstance(self.inputs, str) else tuple(self.inputs)
        check_number("Recipe.label_smoothing", self.label_smoothing, low=0, optional=True)
        if (self.label_smoothing or 0.0) >= 1:
            raise SpecError(f"Recipe.label_smoothing must be below 1, got {self.label_smoothing!r}")
        task = as_task("Recipe.task", self.task)
        scale = self._check_scale(task)
        loss = as_loss(self.loss, self.target, inputs, float(self.label_smoothing or 0.0), task, scale)
        object.__setattr__(self, "target_scale", scale)
        object.__setattr__(self, "inputs", inputs)
        object.__setattr__(self, "loss", loss)
        object.__setattr__(self, "task", task or implied_task(loss))

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
    """The names of all metrics that a Recipe can report; None where its `metrics` function does not show them.

    They are known where each `return` of the function is a dict display with constant keys, or `dict(name=...)`.
    """
    task = as_task("Recipe.task", recipe.task)
    figures = REPORTED["classification" if task is None else task.kind]
    always = frozenset((*(["loss"] if recipe.valid_loss else []), *figures, *map(name_of, recipe.split_metrics)))
    if recipe.metrics is None:
        return always
    names = _returned_keys(recipe.metrics)
    return None if names is None else names | always


def check_objective(recipe: Recipe, objective: str, *, is_declared: bool = True) -> None:
    """Raise SpecError for a metric that is to rank members, and that the built-in loop cannot report."""
    reported = None if has_own_loop(recipe) else reported_metrics(recipe)
    if reported is None or objective in reported or not (is_declared or objective == "loss"):
        return
    if objective in KNOWN:  # then it is computed
        check_split_metrics("Ensemble.objective", [objective], recipe.task)  # type: ignore[arg-type]
    else:
        function = "a Recipe without metrics=" if recipe.metrics is None else "Recipe.metrics"
        raise SpecError(describe_missing_objective(objective, reported, by=function))


def _returned_keys(function: Callable[..., Any]) -> frozenset[str] | None:
    """The keys of the dicts that a function returns; None where its source does not show them."""
    if not isinstance(function, types.FunctionType) or hasattr(function, "__wrapped__"):
        return None  # a decorator may add keys
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None
    first = tree.body[0] if len(tree.body) == 1 else None
    if not isinstance(first, ast.FunctionDef) or first.name != function.__name__:
        return None
    returned = [_constant_keys(value) for value in _returns(first)]
    if not returned or None in returned:
        return None
    keys = frozenset(key for names in returned for key in names or ())
    return keys if keys <= _constants(function.__code__) else None  # the file was edited after it was imported


def _returns(node: ast.AST) -> Iterator[ast.expr | None]:
    """The values that a function returns, without the functions inside it; a `yield` counts as unknown."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Return):
            yield child.value
        elif isinstance(child, ast.Yield | ast.YieldFrom):
            yield None
        elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from _returns(child)


def _constant_keys(value: ast.expr | None) -> frozenset[str] | None:
    """The keys of a dict display or of `dict(name=...)`; None where one is computed."""
    if isinstance(value, ast.Dict):
        keys = [key.value if isinstance(key, ast.Constant) else None for key in value.keys]
    elif isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "dict":
        keys = [*[each.arg for each in value.keywords], *[None] * len(value.args)]
    else:
        return None
    return frozenset(map(str, keys)) if all(isinstance(key, str) for key in keys) else None


def _constants(code: types.CodeType) -> set[str]:
    """The texts among a function's constants, those in tuples (keys of a dict, names of arguments) included."""
    found: set[str] = set()
    for constant in code.co_consts:
        found |= {
            each for each in (constant if isinstance(constant, tuple) else (constant,)) if isinstance(each, str)
        }
    return found
