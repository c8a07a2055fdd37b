"""The built-in training loop: a `Recipe` of plain functions, trained on `Training`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ensemble.spec import Recipe
from ensemble.train.errors import TrainingError
from ensemble.train.member import Training
from ensemble.train.outputs import OutputError, captured, probabilities_of, to_probabilities

if TYPE_CHECKING:
    from pipelines import Batch


def train(recipe: Recipe, member: Training) -> None:
    """Train one member as its recipe says, evaluate it after each epoch, predict with it at the end."""
    model = recipe.model(member.params).to(member.device)
    optimizer = make_optimizer(recipe, model, member.params)
    schedule = recipe.schedule(optimizer, member.params, member.steps) if recipe.schedule else None
    model, optimizer = member.prepare(model, optimizer, schedule, recipe.clip_norm)

    for _ in member.epochs():
        model.train()
        for batch in member.batches():
            with member.autocast():
                losses = recipe.loss(model, batch)
            member.backward(losses)
            member.step()
        member.report(**member.evaluate(lambda model, batch: measure(recipe, model, batch)))

    for split in member.splits:
        predict(recipe, member, split)


def make_optimizer(recipe: Recipe, model: nn.Module, params: dict[str, Any]) -> torch.optim.Optimizer:
    """The recipe's optimizer, or SGD with the hyperparameter `lr`.

    Raises:
        TrainingError: there is neither.
    """
    if recipe.optimizer is not None:
        made: torch.optim.Optimizer = recipe.optimizer(model, params)
        return made
    if "lr" not in params:
        raise TrainingError(
            "without Recipe.optimizer a member is trained by SGD, which needs the hyperparameter 'lr'"
        )
    return torch.optim.SGD(model.parameters(), lr=params["lr"])


def measure(recipe: Recipe, model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Loss, accuracy where there are classes, and the recipe's own metrics, of one batch: [b] each, or scalars."""
    with captured(model) as returned:
        values: dict[str, Any] = {"loss": recipe.loss(model, batch)}
    target = batch.get(recipe.target)
    if target is not None and target.dim() == 1 and not target.is_floating_point():
        try:
            found = probabilities_of(recipe, model, batch) if recipe.predict else to_probabilities(returned())
        except OutputError:
            found = None  # not a classifier, or one whose scores are its own secret: loss and metrics tell
        if found is not None and found.dim() == 2:
            values["accuracy"] = (found.argmax(dim=1) == target).double()
    if recipe.metrics is not None:
        values.update(recipe.metrics(returned(), batch))
    return values


def predict(recipe: Recipe, member: Training, split: str) -> None:
    """Save the member's probabilities for a split; what gives none is said in the log."""
    rows: list[Tensor] = []
    index: list[Tensor] = []
    try:
        with member.evaluating() as model:
            for batch in member.batches(split):
                target = batch.get(recipe.target)
                if recipe.predict is None and target is not None and target.is_floating_point():
                    raise OutputError(f"the target {recipe.target!r} is a number, not a class")
                with member.autocast():
                    rows.append(probabilities_of(recipe, model, batch).cpu())
                index.append(batch["index"].cpu().clone())
    except OutputError as error:
        member.log(f"no predictions on {split!r} are saved: {error}")
        rows.clear()
    if rows and rows[0].dim() != 2:
        member.log(f"no predictions on {split!r} are saved: they are {list(rows[0].shape)}, not [b, classes]")
        rows.clear()
    member.predictions(split, torch.cat(rows) if rows else None, torch.cat(index) if rows else None)
