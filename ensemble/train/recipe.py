"""Trains a member on its `TrainContext`: the built-in training loop for a `Recipe`, or the user's own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ensemble.spec import Recipe
from ensemble.train.job import LabelError
from ensemble.train.lr_schedulers import make_schedule
from ensemble.train.member import TrainContext
from ensemble.train.optimizers import make_recipe_optimizer
from ensemble.train.outputs import (
    OutputError,
    capture_output,
    compute_probabilities,
    explain_label_error,
    to_probabilities,
)

if TYPE_CHECKING:
    from pipelines import Batch


def train(recipe: Recipe, member: TrainContext) -> None:
    """Train one member by its recipe; evaluate it after each epoch, and save its predictions at the end."""
    model = recipe.model(member.params).to(member.device)
    optimizer = make_recipe_optimizer(recipe, member.identity, model, member.params)
    schedule = _make_schedule(recipe, member, optimizer)
    model, optimizer = member.prepare(model, optimizer, schedule, recipe.clip_norm)

    for epoch in member.epochs():
        model.train()
        for batch in member.batches():
            for part in member.parts(batch):
                with member.autocast(), explaining_label_errors(recipe, model, part, "train"):
                    losses = recipe.loss(model, part)
                member.backward(losses)
            member.step()
        member.report(**member.evaluate(lambda model, batch: evaluate_batch(recipe, model, batch)))
        if epoch == 0:
            member.report_unread()

    for split in member.splits:
        predict(recipe, member, split)


def run_training_loop(recipe: Recipe | Callable[[TrainContext], None], member: TrainContext) -> None:
    """Train one member by its recipe, or call its train function."""
    if isinstance(recipe, Recipe):
        train(recipe, member)
    else:
        recipe(member)
        member.report_unread()


@contextlib.contextmanager
def explaining_label_errors(recipe: Recipe, model: nn.Module, batch: Batch, split: str) -> Iterator[None]:
    """Raise a LabelError, which is not retried, where a loss in the block fails because a label is no class."""
    try:
        yield
    except (IndexError, RuntimeError) as error:
        why = explain_label_error(recipe, model, batch, split)
        if why is None:
            raise
        raise LabelError(why) from error


def _make_schedule(recipe: Recipe, member: TrainContext, optimizer: torch.optim.Optimizer) -> Any:
    """The recipe's schedule, or the declared one, or none."""
    if recipe.schedule is not None:
        return recipe.schedule(optimizer, member.params, member.steps)
    own = member.identity
    if own.schedule is None:
        return None
    return make_schedule(
        own.schedule,
        optimizer,
        member.params,
        steps=member.steps,
        steps_per_epoch=member.steps_per_epoch,
        workers=own.widened_from or own.workers,
        batch_size=own.batch_size,
    )


def evaluate_batch(recipe: Recipe, model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Loss, accuracy (for classes) and the recipe's own metrics of one batch: [b] each, or scalars."""
    with capture_output(model) as returned, explaining_label_errors(recipe, model, batch, "valid"):
        values: dict[str, Any] = {"loss": recipe.loss(model, batch)}
    target = batch.get(recipe.target)
    if target is not None and target.dim() == 1 and not target.is_floating_point():
        try:
            found = compute_probabilities(recipe, model, batch) if recipe.predict else to_probabilities(returned())
        except OutputError:
            found = None  # not a classifier, or one of unknown scores: loss and metrics remain
        if found is not None and found.dim() == 2:
            values["accuracy"] = (found.argmax(dim=1) == target).double()
    if recipe.metrics is not None:
        values.update(recipe.metrics(returned(), batch))
    return values


def predict(recipe: Recipe, member: TrainContext, split: str) -> None:
    """Save the member's probabilities for a split; where there are none, log why."""
    rows: list[Tensor] = []
    index: list[Tensor] = []
    try:
        with member.evaluating() as model:
            for batch in member.batches(split):
                target = batch.get(recipe.target)
                if recipe.predict is None and target is not None and target.is_floating_point():
                    raise OutputError(f"the target {recipe.target!r} is a number, not a class")
                with member.autocast():
                    rows.append(compute_probabilities(recipe, model, batch).cpu())
                index.append(batch["index"].cpu().clone())
    except OutputError as error:
        member.log(f"no predictions on {split!r} are saved: {error}")
        rows.clear()
    if rows and rows[0].dim() != 2:
        member.log(f"no predictions on {split!r} are saved: they are {list(rows[0].shape)}, not [b, classes]")
        rows.clear()
    member.predictions(split, torch.cat(rows) if rows else None, torch.cat(index) if rows else None)
