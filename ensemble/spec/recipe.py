"""The functions that define how a member is built, trained and evaluated, and what they can be known to report."""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ensemble.spec.objectives import ALWAYS_REPORTED, Mode, check_ranking
from ensemble.spec.validation import SpecError, check_number, option_class


@option_class
@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Plain functions that define a member; the built-in training loop calls them.

    Attributes:
        model: `model(params) -> nn.Module`.
        loss: `loss(model, batch) -> tensor [b]`, one value per sample, unreduced.
        optimizer: `optimizer(model, params) -> torch.optim.Optimizer`; unless given, `Ensemble.optimizer`, or SGD
            with `params["lr"]`.
        schedule: `schedule(optimizer, params, steps) -> LRScheduler`, stepped after each of `steps` steps.
        metrics: `metrics(outputs, batch) -> dict` of tensors [b] (averaged over samples) or scalars (averaged
            over batches by their size). `loss` is always reported, and `accuracy` where outputs [b, classes]
            meet an integer field named `target`.
        predict: `predict(model, batch) -> probabilities`; unless given, the softmax over the last axis of what
            the model returned inside `loss`.
        target: the field that holds the class, used for accuracy, selection and calibration.
        objective: the metric that ranks members; accuracy unless given.
        mode: whether the objective is maximized (`"max"`) or minimized (`"min"`); needed where its name does not
            imply it (`ensemble.spec.objectives`: accuracy, auc, f1 ... are maximized; loss, nll, error ...
            minimized).
        clip_norm: largest L2 norm of a step's gradient, which is that of the global batch's mean loss whatever the
            number of workers, of parts (`accumulate=`) and the loss scale; None for no clipping.
    """

    model: Callable[..., Any]
    loss: Callable[..., Any]
    optimizer: Callable[..., Any] | None = None
    schedule: Callable[..., Any] | None = None
    metrics: Callable[..., Any] | None = None
    predict: Callable[..., Any] | None = None
    target: str = "label"
    objective: str | None = None
    mode: Mode | None = None
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        for name in ("model", "loss", "optimizer", "schedule", "metrics", "predict"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise SpecError(f"Recipe.{name} must be a function, got {value!r}")
        check_ranking("Recipe", self)
        check_number("Recipe.clip_norm", self.clip_norm, low=0, above=True, optional=True)


def reported_metrics(recipe: Recipe) -> frozenset[str] | None:
    """The names of all metrics that a Recipe can report; None where its `metrics` function does not show them.

    They are known where each `return` of the function is a dict display with constant keys, or `dict(name=...)`.
    """
    if recipe.metrics is None:
        return frozenset(ALWAYS_REPORTED)
    names = _returned_keys(recipe.metrics)
    return None if names is None else names | frozenset(ALWAYS_REPORTED)


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
