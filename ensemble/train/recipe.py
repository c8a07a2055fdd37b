"""Trains a member on its `TrainContext`: the built-in training loop for a `Recipe`, or the user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ensemble.spec import Recipe, SpecError
from ensemble.spec.functions import takes_steps_per_epoch
from ensemble.spec.losses import remember_class_axis
from ensemble.spec.recipe import apply_recipe_options
from ensemble.train.evaluation import evaluate, make_loss
from ensemble.train.job import TrainingError
from ensemble.train.lr_schedulers import make_schedule
from ensemble.train.member import TrainContext
from ensemble.train.node_checks import first_on_node
from ensemble.train.optimizers import make_recipe_optimizer
from ensemble.train.own_tensors import call_model


def train(recipe: Recipe, member: TrainContext) -> None:
    """Train one member by its recipe; evaluate it after each epoch, and save its predictions at the end."""
    recipe = apply_recipe_options(recipe, member.params)
    model = build_model(recipe, member).to(member.device)
    parameters = list(model.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        why = "requires_grad is False for all of them" if parameters else "modules in a list are none of its parts"
        raise TrainingError(f"none of the model's {len(parameters)} parameters is trained: {why}")
    optimizer = make_recipe_optimizer(recipe, member.identity, model, member.params)
    schedule = _make_schedule(recipe, member, optimizer)
    model.train()
    model, optimizer = member.prepare(model, optimizer, schedule, recipe.clip_norm)
    seen = member._state.seen
    remember_class_axis(model, None if seen is None else seen.class_axis)
    member.validate_by(lambda: evaluate(recipe, member))
    unwrapped = make_loss(recipe, member, "train")
    member._state.forward = lambda model, batch: {"loss": unwrapped(model, batch)}
    loss = member.wrap_loss(unwrapped)
    is_trained = False
    for _ in member.epochs():
        is_trained = True
        for batch in member.batches():
            for part in member.parts(batch):
                with member.autocast():
                    losses = loss(model, part)
                member.backward(losses)
            member.step()
        member._life.save_before_evaluation()
        member.report(**evaluate(recipe, member))

    if not is_trained:  # it had ended: what it is evaluated on may have changed since
        member.report_end(evaluate(recipe, member))
    member.predict_all()


def build_model(recipe: Recipe, member: TrainContext) -> nn.Module:
    """The model of a member, built the first time on a node alone: what it downloads is there for the others.

    Where that fails the others are to fail at once, not one after the other.
    """
    with first_on_node("model-called", counts_failure=True):
        model = call_model(recipe, member.params)
    if not isinstance(model, nn.Module):
        raise SpecError(f"Recipe.model must return a torch.nn.Module, and returned {model!r:.60}")
    return model


def run_training_loop(recipe: Recipe | Callable[[TrainContext], None], member: TrainContext) -> None:
    """Train one member by its recipe, or call its train function."""
    if isinstance(recipe, Recipe) and recipe.train is None:
        train(recipe, member)
    else:
        loop = recipe.train if isinstance(recipe, Recipe) else recipe
        assert loop is not None
        (loop if member.program is None else member.program.run)(member)
    member.report_unused()


def _make_schedule(recipe: Recipe, member: TrainContext, optimizer: torch.optim.Optimizer) -> Any:
    """The recipe's schedule, or the declared one, or none."""
    if recipe.schedule is not None:
        named = {"steps_per_epoch": member.steps_per_epoch} if takes_steps_per_epoch(recipe.schedule) else {}
        return recipe.schedule(optimizer, member.params, member.steps, **named)
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
