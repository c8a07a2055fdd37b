"""Evaluates a Recipe's member on the validation split: its loss, figures of its task, metrics of the split."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ensemble.spec import Recipe
from ensemble.spec.losses import NamedLoss
from ensemble.spec.positions import TAILS, count_bytes
from ensemble.spec.recipe import list_split_metrics
from ensemble.spec.split_metrics import bind_fields, list_asked, name_of
from ensemble.spec.task import Task, find_known
from ensemble.store import PredictedRows
from ensemble.train.call import find_target, take_fields
from ensemble.train.data import as_stored_target, describe_not_finite
from ensemble.train.gather import Ratio, compute_once, gather_json, gather_predictions
from ensemble.train.job import LabelError, TrainingError
from ensemble.train.member import TrainContext
from ensemble.train.outputs import (
    OutputError,
    compute_outputs,
    explain_label_error,
    explain_labels,
    explain_layout,
    find_wrong_stored_label,
    first_output,
    observe,
    take_first,
    to_scaled_values,
)
from pipelines.providers import import_object

if TYPE_CHECKING:
    from pipelines import Batch


#: Bytes of outputs from which on the figures of some batches of the validation split are computed.
_AT_ONCE = 2**18


def make_loss(recipe: Recipe, member: TrainContext, split: str) -> Callable[..., Any]:
    """The recipe's loss, which raises LabelError where it fails because a label of this split is no class."""

    def loss(model: nn.Module, batch: Mapping[str, Any], outputs: Any = None) -> Any:
        try:
            return recipe.loss(model, batch) if outputs is None else recipe.loss.compute_for(model, outputs, batch)
        except (IndexError, RuntimeError) as error:
            where = lambda index: f"Ensemble.{split}: {member.describe_sample(split, index)}"  # noqa: E731
            if (why := explain_label_error(recipe, model, batch, where, outputs)) is not None:
                raise LabelError(why) from error
            raise

    return loss


def evaluate(recipe: Recipe, member: TrainContext) -> dict[str, float]:
    """The metrics of a member after an epoch, over all samples of the validation split; the same on all ranks."""
    with contextlib.closing(_SplitRows(recipe, member)) as rows:
        figures = member._evaluator.evaluate(rows.measure, "valid", rows.measure_held)
        member._state.agree()
        figures = rows.judge(figures)
        return {**figures, **rows.split_metrics()}


class _SplitRows:
    """The predictions of this rank on the validation split, kept where a metric of the whole split is wanted."""

    def __init__(self, recipe: Recipe, member: TrainContext) -> None:
        self._recipe, self._member, self._task = recipe, member, recipe.find_task()
        self._wanted = list_split_metrics(recipe, member.objective, self._task)
        self._rows: PredictedRows | None = None
        if self._wanted:
            self._rows = member.make_rows()
            self._rows.fields = {name: [] for name in list_asked(recipe.split_metrics)}
        self._shape_mismatch = ""  # why the targets of some batch are no labels
        self._names: set[str] = set()  # of the figures of the task
        has_own = recipe.predict is not None or recipe.metrics is not None or list_asked(recipe.split_metrics)
        is_plain = recipe.valid_loss and not has_own
        self._loss = make_loss(recipe, member, "valid")
        self._plain_loss = recipe.loss if is_plain and isinstance(recipe.loss, NamedLoss) else None
        self._held: list[tuple[Tensor, Tensor, Tensor]] = []  # outputs, targets and indices of small batches
        self._held_bytes = self._classes = 0

    def close(self) -> None:
        if self._rows is not None:
            self._rows.close()

    def measure(self, model: nn.Module, batch: Batch) -> dict[str, Any]:
        """Loss, figures of the task, and the recipe's own metrics: see `TrainContext.evaluate`.

        Those of a small batch may follow later, with those of the next ones (`measure_held`).
        """
        recipe, state, losses = self._recipe, self._member._state, None
        if self._plain_loss is not None:
            outputs = model(*(batch[name] for name in self._plain_loss.find_inputs(batch)))
            state.seen = state.seen or observe(recipe, model, batch, outputs)
            if self._hold(outputs, batch):
                return self.measure_held(model) if self._held_bytes >= _AT_ONCE else {}
            return self._measure_plain(model, batch, outputs)
        with first_output(model) as returned:
            if recipe.valid_loss:
                losses = self._loss(model, batch)
            elif recipe.predict is None or recipe.metrics is not None:
                compute_outputs(recipe, model, batch, state.seen)  # which `returned` gets
        figures = self._measure_values(model, batch, losses, returned)
        if recipe.metrics is not None:
            own = recipe.metrics(take_first(returned), batch)
            if not isinstance(own, Mapping):
                raise TrainingError(f"Recipe.metrics must return a dict, got {type(own).__name__}")
            for name in sorted(own.keys() & set(map(name_of, self._wanted))):
                self._member.remark(
                    f"the figure {name!r} of Recipe.metrics is not used: a metric of the whole split, which is "
                    "computed from the predictions, has this name; give yours another name, and mode="
                )
            self._names -= own.keys()
            figures.update(own)
        return figures

    def _hold(self, outputs: Any, batch: Batch) -> bool:
        """Keep outputs and target of a small batch for `measure_held`; returns whether they are kept."""
        target = find_target(batch, self._recipe.target)
        if type(outputs) is not Tensor or target is None or outputs.nbytes + target.nbytes > _AT_ONCE // 2:
            return False
        if outputs.shape[:1] != target.shape[:1] or target.shape[:1] != batch["index"].shape:
            return False  # as where a model squeezes the outputs of a batch of one
        if self._held and any(
            (tensor.dtype, tensor.shape[1:]) != (first.dtype, first.shape[1:])
            for tensor, first in zip((outputs, target), self._held[0], strict=False)
        ):
            return False
        self._held.append((outputs.clone(), target.clone(), batch["index"].clone()))  # they may be views of input
        self._held_bytes += outputs.nbytes + target.nbytes
        return True

    def measure_held(self, model: nn.Module) -> dict[str, Any]:
        """The figures of the batches that were held back: once for all, as many small operations cost more."""
        if not self._held:
            return {}
        outputs, target, index = map(torch.cat, zip(*self._held, strict=True))
        self._held, self._held_bytes = [], 0
        return self._measure_plain(model, {self._recipe.target: target, "index": index}, outputs)

    def _measure_plain(self, model: nn.Module, batch: Mapping[str, Any], outputs: Any) -> dict[str, Any]:
        losses = self._loss(model, batch, outputs)
        return self._measure_values(model, batch, losses, [outputs])

    def _measure_values(
        self, model: nn.Module, batch: Mapping[str, Any], losses: Any, returned: list[Any]
    ) -> dict[str, Any]:
        recipe = self._recipe
        target = find_target(batch, recipe.target)
        figures: dict[str, Any] = {"loss": average_losses(recipe, losses, target)} if recipe.valid_loss else {}
        values, stored = self._predict(model, batch, returned), as_stored_target(self._task, target)
        if values is not None:
            state = self._member._state
            state.predictions_bytes = count_bytes(state.ensemble, self._task, values.shape[1:])
            why = explain_layout(self._task, values, stored)
            self._shape_mismatch = self._shape_mismatch or why or ""
            if why is None and stored is not None:
                figures.update(self._measure_labelled(values, stored, batch))
        if self._rows is not None and values is not None:
            self._rows.tail = TAILS.get(self._task.kind)
            self._rows.add_fields(take_fields(batch, self._rows.fields))
            self._rows.add(values.float().cpu(), batch["index"].cpu(), None if stored is None else stored.cpu())
        return figures

    def _measure_labelled(self, values: Tensor, target: Tensor, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The figures of a batch; none where its targets are no labels."""
        if (wrong := find_wrong_stored_label(self._task, target)) is not None:
            where = self._member.describe_sample("valid", int(batch["index"][wrong[0]]))
            raise LabelError(f"Ensemble.valid: {where} {wrong[1]}")
        if (why := explain_labels(self._task, target)) is not None:
            self._shape_mismatch = self._shape_mismatch or why
            return {}
        figures = measure_batch(self._task, values, target)
        is_in_unit = self._task.kind == "regression" and self._recipe.target_scale is None
        if is_in_unit and (coarse := self._member._state.precision.describe_coarse(values, target)) is not None:
            self._member.remark(coarse)
        self._names |= figures.keys()
        self._classes = values.shape[-1] if self._task.kind == "classification" else 0
        return figures

    def _predict(self, model: nn.Module, batch: Mapping[str, Any], returned: list[Any]) -> Tensor | None:
        """The predictions; None where those of a free task do not follow from the outputs."""
        recipe, state = self._recipe, self._member._state
        if recipe.predict is not None:
            values: Tensor = recipe.predict(model, batch).float()
            return values
        try:
            outputs = take_first(returned)
            state.seen = state.seen or observe(recipe, model, batch, outputs)
            return to_scaled_values(recipe, self._task, outputs, state.seen)
        except OutputError:
            if self._task.kind != "free":
                raise
            return None

    def judge(self, figures: Mapping[str, float]) -> dict[str, float]:
        """The figures, without those of the task where targets of some batch do not fit it, which is logged.

        All ranks call it together.
        """
        shares = gather_json(self._member.comm, [self._shape_mismatch, sorted(self._names)])
        self._shape_mismatch = next((share[0] for share in shares if share[0]), "")
        if self._shape_mismatch and self._member.position["epoch"] == 0:
            self._member.log(f"no figures of the predictions on 'valid': {self._shape_mismatch}")
        dropped = {name for share in shares for name in share[1]} if self._shape_mismatch else set()
        loss, member = figures.get("loss", 0.0), self._member
        if not math.isfinite(loss):
            describe = partial(member.describe_sample, "valid")
            most, state = member._state.precision.largest, member._state
            causes = (describe_not_finite(batch, describe, most) for batch in member.batches("valid"))
            state.not_finite = next(filter(None, causes), "")
            member.remark(
                f"the loss of Ensemble.valid is {'NaN' if loss != loss else 'infinite'}{state.not_finite}"
            )
        accuracy, classes = figures.get("accuracy", 1.0), self._classes
        is_named = isinstance(self._recipe.loss, NamedLoss) and self._recipe.loss.name == "cross_entropy"
        is_chance = classes and is_named and loss >= 0.999 * math.log(classes) and accuracy < 1 / classes + 0.05
        is_warm = member.position["epoch"] >= max(2, member.identity.epochs // 10)
        chance = f"a constant guess of {classes} classes, {math.log(classes):.4g}" if is_chance else ""
        member._state.note_chance(chance, is_warm=is_warm)
        return {name: value for name, value in figures.items() if name not in dropped}

    def split_metrics(self) -> dict[str, float]:
        """The metrics of the whole split, from the predictions of all ranks; all ranks call it together.

        Those that these predictions leave undefined are NaN.
        """
        wanted, member, own = self._wanted, self._member, self._rows
        if own is None or "valid" not in member.splits:
            return {}
        if self._shape_mismatch:
            raise OutputError(f"{', '.join(map(name_of, wanted))}: {self._shape_mismatch}")
        with contextlib.closing(member.make_rows()) as together:
            rows = gather_predictions(member.comm, own, together)

            def compute_metrics() -> dict[str, float]:
                values, _, target = rows.arrays()
                compute = import_object("ensemble.combine.split_metrics:compute")
                bound = [bind_fields(metric, rows.take_fields()) for metric in wanted]
                computed: dict[str, float] = compute(bound, values, target, self._task)
                return computed

            metrics: dict[str, float] = compute_once(member.comm, compute_metrics)
        return {name: metrics.get(name, math.nan) for name in map(name_of, wanted)}


def average_losses(recipe: Recipe, losses: Any, target: Tensor | None) -> Any:
    """The losses of a batch, [b]; those of a loss by name averaged over the samples that take part."""
    if not isinstance(recipe.loss, NamedLoss) or target is None:
        return losses
    takes_part = recipe.loss.find_samples(target)
    return Ratio(torch.where(takes_part, losses.double(), 0.0).sum(), takes_part.sum())


def measure_batch(task: Task, values: Tensor, target: Tensor) -> dict[str, Any]:
    """The figures of a task that are means: over the positions of samples that take part.

    - classification: `accuracy`; multilabel: `hamming_accuracy` (of labels), `subset_accuracy` (of samples, all
      labels right); numbers: `mae` and `rmse`.

    Args:
        values: [b, ...], laid out by the task.
        target: [b, ...], as it is stored (`as_stored_target`).
    """
    if task.kind == "free":
        return {}
    takes_part = find_known(target)
    if task.kind == "classification":
        return {"accuracy": _mean_where(takes_part, values.argmax(dim=-1) == target)}
    if task.kind == "multilabel":
        right = (values >= 0.5) == (target == 1)
        complete = (right | ~takes_part).flatten(1).all(dim=1)
        return {
            "hamming_accuracy": _mean_where(takes_part, right),
            "subset_accuracy": _mean_where(takes_part.flatten(1).any(dim=1), complete),
        }
    error = (task.take_point(values).double() - target).abs()
    return {"mae": _mean_where(takes_part, error), "rmse": _mean_where(takes_part, error.square(), is_root=True)}


def _mean_where(takes_part: Tensor, values: Tensor, is_root: bool = False) -> Ratio:
    chosen = torch.where(takes_part, values.double(), 0.0)
    return Ratio(chosen.sum(), takes_part.sum(), is_root)
