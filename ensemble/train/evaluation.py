"""Evaluates a Recipe's member on the validation split: its loss, figures of its task, metrics of the split."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ensemble.spec import Recipe
from ensemble.spec.losses import NamedLoss
from ensemble.spec.positions import TAILS
from ensemble.spec.split_metrics import KNOWN, bind_fields, compute, list_asked, name_of
from ensemble.spec.task import NUMBERS, Task, find_known
from ensemble.store import PredictedRows
from ensemble.train.call import find_target, take_fields
from ensemble.train.data import as_stored_target, describe_not_finite
from ensemble.train.gather import Ratio, compute_once, gather_json, gather_predictions
from ensemble.train.job import LabelError, TrainingError
from ensemble.train.member import TrainContext
from ensemble.train.outputs import FirstCall, OutputError, compute_outputs, explain_label_error, to_scaled_values
from ensemble.train.predictions import (
    explain_labels,
    explain_layout,
    find_wrong_stored_label,
)

if TYPE_CHECKING:
    from pipelines import Batch


#: Epochs after which a member should be better than a constant guess, if it has so many.
LEAST_EPOCHS = 2


@contextlib.contextmanager
def explaining_label_errors(
    recipe: Recipe, member: TrainContext, model: nn.Module, batch: Batch, split: str
) -> Iterator[None]:
    """Raise a LabelError, which is not retried, where a loss in the block fails because a label is no class."""
    try:
        yield
    except (IndexError, RuntimeError) as error:
        describe = partial(member.describe_sample, split)
        why = explain_label_error(recipe, model, batch, lambda index: f"Ensemble.{split}: {describe(index)}")
        if why is None:
            raise
        raise LabelError(why) from error


def evaluate(recipe: Recipe, member: TrainContext) -> dict[str, float]:
    """The metrics of a member after an epoch, over all samples of the validation split; the same on all ranks.

    Raises:
        OutputError: the outputs are not those of the declared task, or those of some batches only.
        SpecError: a metric of the split has no meaning for the task, or failed.
    """

    def compute_loss(model: nn.Module, batch: Batch) -> dict[str, Any]:
        with explaining_label_errors(recipe, member, model, batch, "train"):
            return {"loss": recipe.loss(model, batch)}

    member.renew_statistics(compute_loss)
    was_settled = member.observer.is_settled
    rows = _SplitRows(recipe, member)
    figures = member.evaluate(rows.measure)
    member.observer.agree()
    figures, missing = rows.judge(figures)
    if missing and not was_settled:  # what is predicted was found out on the way
        rows = _SplitRows(recipe, member)
        figures, missing = rows.judge(member.evaluate(rows.measure))
    if missing:
        raise OutputError(f"some batches of Ensemble.valid have predictions, another has not: {missing}")
    return {**figures, **rows.split_metrics(figures)}


class _SplitRows:
    """The predictions of this rank on the validation split, kept where a metric of the whole split is wanted."""

    def __init__(self, recipe: Recipe, member: TrainContext) -> None:
        self._recipe, self._member = recipe, member
        self._rows = self._make_rows()
        self._is_measured, self._missing = False, ""  # whether some batch has predictions; why some has none
        self._shape_mismatch = ""  # why the targets of some batch are no labels
        self._names: set[str] = set()  # of the figures of the task
        self._classes = 0  # of a classification
        self._counts: list[Tensor] = []  # see `count_targets`

    def _make_rows(self) -> PredictedRows:
        rows = self._member.make_rows()
        rows.fields = {name: [] for name in list_asked(self._recipe.split_metrics)}
        return rows

    def measure(self, model: nn.Module, batch: Batch) -> dict[str, Any]:
        """Loss, figures of the task, and the recipe's own metrics of one batch: see `TrainContext.evaluate`."""
        recipe, observer = self._recipe, self._member.observer
        with (
            observer.watching(model, batch) as first,
            explaining_label_errors(recipe, self._member, model, batch, "valid"),
        ):
            if recipe.valid_loss:
                losses = recipe.loss(model, batch)
            elif recipe.predict is None or recipe.metrics is not None:
                compute_outputs(recipe, model, batch, observer.seen)  # which the hook of `first` keeps
        target = find_target(batch, recipe.target)
        figures: dict[str, Any] = {"loss": average_losses(recipe, losses, target)} if recipe.valid_loss else {}
        values, task = self._predict(model, batch, first)
        kept = None if target is None or task is None else as_stored_target(task, target)
        if values is not None and task is not None:
            self._member.note_predicted(task, values)
            why = explain_layout(task, values, kept)
            self._missing, self._is_measured = self._missing or why or "", self._is_measured or why is None
            if why is None and kept is not None:
                figures.update(self._measure_labelled(task, values, kept, batch))
        if recipe.metrics is not None:
            own = recipe.metrics(first.output(), batch)
            if not isinstance(own, Mapping):
                raise TrainingError(f"Recipe.metrics must return a dict, got {type(own).__name__}")
            self._names -= own.keys()
            figures.update(own)
        if self._wanted(figures) and values is not None:
            self._rows.tail = None if task is None else TAILS.get(task.kind)
            self._rows.add_fields(take_fields(batch, self._rows.fields))
            self._rows.add(values.float().cpu(), batch["index"].cpu(), None if kept is None else kept.cpu())
        return figures

    def _measure_labelled(self, task: Task, values: Tensor, target: Tensor, batch: Batch) -> dict[str, Any]:
        """The figures of a batch; none where its targets are no labels.

        Raises:
            LabelError: a label of several is not in 0 ... 1.
        """
        if (wrong := find_wrong_stored_label(task, target)) is not None:
            where = self._member.describe_sample("valid", int(batch["index"][wrong[0]]))
            raise LabelError(f"Ensemble.valid: {where} {wrong[1]}")
        if (why := explain_labels(task, target)) is not None:
            self._shape_mismatch = self._shape_mismatch or why
            return {}
        self._classes = values.shape[-1] if task.kind == "classification" else 0
        if self._classes or task.kind in NUMBERS:
            self._counts = [sum(self._counts, count_targets(target, self._classes))]
        figures = measure_batch(task, values, target)
        self._names |= figures.keys()
        return figures

    def _predict(self, model: nn.Module, batch: Batch, first: FirstCall) -> tuple[Tensor | None, Task | None]:
        """The predictions and the task; None where outputs say nothing, and no task is declared."""
        recipe, observer = self._recipe, self._member.observer
        try:
            if recipe.predict is not None:
                values = recipe.predict(model, batch).float()
                return values, observer.find(batch, values).task
            seen = observer.find(batch)
            if seen.task is None:
                raise OutputError(seen.reason or "no task is declared")
            return to_scaled_values(recipe, seen.task, first.output(), seen), seen.task
        except OutputError as error:
            if recipe.task is not None:
                raise
            self._missing = self._missing or str(error)
            return None, None

    def judge(self, figures: Mapping[str, float]) -> tuple[dict[str, float], str]:
        """The figures without those that would be of a part of the samples; all ranks call it together.

        - Where targets of some batch are no labels, there are none of the task.
        - Where no batch has predictions, there are none of them.

        The member's log says so.

        Returns:
            Also why some batches have no predictions, where others have.
        """
        counts = [part.tolist() for part in self._counts]
        own = [self._is_measured, self._missing, self._shape_mismatch, sorted(self._names), counts]
        shares = gather_json(self._member.comm, own)
        missing, self._shape_mismatch = (next((each[at] for each in shares if each[at]), "") for at in (1, 2))
        is_measured = any(each[0] for each in shares)
        why = self._shape_mismatch if is_measured else missing
        if why and self._member.position["epoch"] == 0:
            self._member.log(f"no figures of the predictions on 'valid': {why}")
        dropped = {name for each in shares for name in each[3]} if self._shape_mismatch else set()
        kept = {name: value for name, value in figures.items() if name not in dropped}
        self._remark(kept, list(map(sum, zip(*(part for share in shares for part in share[4]), strict=True))))
        return kept, missing if is_measured else ""

    def _remark(self, figures: Mapping[str, float], counts: list[float]) -> None:
        """Remark NaN among the samples, and a member that has learnt no more than a constant guess."""
        member, loss = self._member, figures.get("loss", 0.0)
        if loss != loss:
            describe = partial(member.describe_sample, "valid")
            causes = (describe_not_finite(batch, describe) for batch in member.batches("valid"))
            member.remark(f"the loss of Ensemble.valid is NaN{next(filter(None, causes), '')}")
        epochs, is_whole = member.position["epoch"] + 1, member.position["step"] == member.steps_per_epoch
        guess = explain_guess(figures, counts, self._classes)
        if guess is not None and is_whole and epochs >= min(LEAST_EPOCHS, member.identity.epochs):
            member.remark(
                f"after epoch {epochs - 1} it has learnt nothing: {guess}; try another learning rate, and look at "
                "the inputs and the target"
            )

    def _wanted(self, figures: Mapping[str, Any]) -> list[str | Callable[..., float]]:
        """The metrics of the split that are to be computed, beside these figures."""
        wanted = list(self._recipe.split_metrics)
        objective = self._member.objective
        if objective in KNOWN and objective not in figures and objective not in map(name_of, wanted):
            wanted.append(objective)
        return wanted

    def split_metrics(self, figures: Mapping[str, float]) -> dict[str, float]:
        """The metrics of the whole split, from the predictions of all ranks; all ranks call it together.

        Those that these predictions leave undefined are NaN.
        """
        wanted, member = self._wanted(figures), self._member
        if not wanted or "valid" not in member.splits:
            return {}
        if self._missing or self._shape_mismatch:
            raise OutputError(f"{', '.join(map(name_of, wanted))}: {self._missing or self._shape_mismatch}")
        own, self._rows = self._rows, self._make_rows()  # the member keeps `measure` until the next evaluation
        with contextlib.closing(own), contextlib.closing(member.make_rows()) as together:
            rows = gather_predictions(member.comm, own, together)

            def compute_metrics() -> dict[str, float]:
                seen = member.observer.seen
                assert seen is not None and seen.task is not None
                values, _, target = rows.arrays()
                bound = [bind_fields(metric, rows.take_fields()) for metric in wanted]
                return compute(bound, values, target, seen.task)

            found: dict[str, float] = compute_once(member.comm, compute_metrics)
        return {name: found.get(name, math.nan) for name in map(name_of, wanted)}


def average_losses(recipe: Recipe, losses: Any, target: Tensor | None) -> Any:
    """The losses of a batch, [b]; those of a loss by name averaged over the samples that take part."""
    if not isinstance(recipe.loss, NamedLoss) or target is None:
        return losses
    known = recipe.loss.find_samples(target)
    return Ratio(torch.where(known, losses.double(), 0.0).sum(), known.sum())


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
    known = find_known(target)
    if task.kind == "classification":
        return {"accuracy": _mean_where(known, values.argmax(dim=-1) == target)}
    if task.kind == "multilabel":
        right = (values >= 0.5) == (target == 1)
        complete = (right | ~known).flatten(1).all(dim=1)
        return {
            "hamming_accuracy": _mean_where(known, right),
            "subset_accuracy": _mean_where(known.flatten(1).any(dim=1), complete),
        }
    error = (task.take_point(values).double() - target).abs()
    return {"mae": _mean_where(known, error), "rmse": _mean_where(known, error.square(), is_root=True)}


def count_targets(target: Tensor, classes: int) -> Tensor:
    """How many known targets are of each class, [classes]; with 0 classes their number, sum and sum of squares."""
    counted = find_known(target)
    if not classes:
        numbers = torch.where(counted, target.double(), 0.0)
        return torch.stack([counted.sum().double(), numbers.sum(), numbers.square().sum()])
    counted &= (target >= 0) & (target < classes)
    labels = torch.where(counted, target, classes).flatten()  # one more class: no label
    counts = torch.zeros(classes + 1, dtype=torch.float64, device=labels.device)
    return counts.scatter_add_(0, labels, torch.ones_like(labels, dtype=torch.float64))[:-1]


def explain_guess(figures: Mapping[str, float], counts: list[float], classes: int) -> str | None:
    """The figures of the best constant guess, by `count_targets`, where those of a member are no better."""
    total = sum(counts[: classes or 1])
    if not total:
        return None
    if not classes:
        spread = math.sqrt(max(0.0, counts[2] / total - (counts[1] / total) ** 2))
        is_guess = 0.999 * spread < figures.get("rmse", 0.0) < 1.01 * spread
        return f"the mean of the target for each sample has the rmse {spread:.3g}" if is_guess else None
    shares = [count / total for count in counts if count]
    loss, accuracy = -sum(share * math.log(share) for share in shares), max(shares)
    is_guess = 0.99 * loss < figures.get("loss", 0.0) < 1.02 * loss
    is_guess = is_guess and figures.get("accuracy", 1.0) <= accuracy + 0.1 * (1 - accuracy)
    guess = f"the shares of the classes for each sample have the loss {loss:.3g} and the accuracy {accuracy:.3g}"
    return guess if is_guess else None


def _mean_where(known: Tensor, values: Tensor, is_root: bool = False) -> Ratio:
    chosen = torch.where(known, values.double(), 0.0)
    return Ratio(chosen.sum(), known.sum(), is_root)
