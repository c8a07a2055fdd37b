"""Loads a finished run as one torch module."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ensemble.combine.combination import (
    FUNCTION,
    Combination,
    Combine,
    fit_declared,
    read_calibration,
)
from ensemble.combine.member_models import load_member, load_recipe, read_observation, strip
from ensemble.combine.methods import average_weights
from ensemble.combine.metrics import CombineError
from ensemble.combine.prediction_matrix import describe_task, read_prediction_matrix
from ensemble.combine.tasks.free import NO_MIX
from ensemble.events import NOT_COMBINED, Combined
from ensemble.spec import COMBINERS, Recipe, unknown_name
from ensemble.spec.task import Task
from ensemble.user_code.fingerprint import fingerprint_function
from pipelines.environment.library_settings import keep_settings, keeps_settings
from pipelines.providers import import_object

if TYPE_CHECKING:
    from ensemble.combine.model import EnsembleModel
    from ensemble.spec import Ensemble
    from ensemble.store import RunDir, RunState
    from ensemble.train.call import Observation

log = logging.getLogger(__name__)

#: Loaded where members stand on a base.
SHARE_PREFIX, COMPUTE_ONCE = "ensemble.base.prefix:share_prefix", "ensemble.base.prefix:compute_once"


@keeps_settings
def load(
    run_dir: str | os.PathLike[str],
    combine: str | Combine | None = None,
    members: Sequence[str] | None = None,
    uncertainty: bool = False,
) -> EnsembleModel:
    """One `torch.nn.Module` that maps a batch dict to values float32 [b, ...] of the run's task, in eval mode.

    Examples:
        model = ensemble.load("runs/digits")
        probabilities = model({"image": images})      # no label needed

    Args:
        run_dir: the directory of a run with finished members.
        combine: average, weighted, greedy or stack, or a function `combine(values [m, b, ...]) -> [b, ...]` of
            tensors; None takes the run's own. The run's own weights and calibration come from its `combined`
            event; another method or another choice of members is fitted again to the saved validation predictions,
            and a stack, which the event does not hold, to those of the members that it was fitted to.
        members: ids to combine; None takes all that finished. A member that has not finished counts with its last
            checkpoint, if it is named here.
        uncertainty: whether the model returns a dict: `values`, and of each sample, [b] each, those of `total`,
            `aleatoric`, `epistemic` and `disagreement` that have a meaning for the task.

    Returns:
        The module, on the CPU; `.to(device)` moves it. With `Ensemble.thresholds` it returns a dict, too:
        `values`, and `decision`, the classes int64 [b, ...] or labels bool [b, L] that are predicted.

    Raises:
        CombineError: the run's recipe is a train function (there is no `model=` to build members by), nothing
            says what the members predict, a member is unknown or has no checkpoint, the predictions that the
            method needs are not there, or the task knows no uncertainty; or code that a member was trained with
            could not be kept in the run, and is another now.
    """
    from ensemble.store import RunDir, read_state

    run = RunDir(run_dir)
    state = read_state(run.events).as_finished()
    # of the last start: a declaration that came after it, and did not start, trained nobody
    ensemble = run.load_ensemble(state.header.code, takes_settings=True)
    recipe = ensemble.recipe
    if not isinstance(recipe, Recipe):
        raise CombineError(
            f"load() needs a Recipe with model=, but the recipe of {ensemble.name!r} is the train function "
            f"{getattr(recipe, '__name__', recipe)!r}: declare Recipe(model=..., train=...) of it, or build its "
            "models in your own code and read their weights with "
            "ensemble.store.load_checkpoint(<run_dir>/members/<id>/checkpoint-<attempt>-<epoch>-<step>.safetensors)['model']"
        )
    method = ensemble.combine if combine is None else combine
    if not callable(method) and method not in COMBINERS:
        raise CombineError(unknown_name("load(combine=) cannot be", method, COMBINERS))
    ids = _select_members(state, members, run)
    is_own = members is None and not callable(combine)
    event = _read_event(state, method) if is_own else None
    if event is not None and event.method not in (None, "stack"):
        names, combination = list(event.weights), _read_combination(event, method)
    else:
        ids = _find_candidates(state, method, ids) if is_own else ids
        names, combination = _fit_combination(run, state, ids, ensemble, method, named=members is not None)
    if (why := explain_unloadable(run, state, recipe, names)) is not None:
        raise CombineError(f"the run cannot be loaded: {why}")
    seen = {name: read_observation(run, state.members[name]) for name in names}
    task = _find_task(run, state, ensemble, seen)
    if uncertainty and task.kind == "free":
        raise CombineError("load(uncertainty=True): outputs of the task free have no declared meaning")
    if task.kind == "free" and combination.function is None:
        raise CombineError(NO_MIX)
    if combination.reason:
        warnings.warn(f"load: {combination.reason}", stacklevel=2)
    return _build_models(run, state, ensemble, seen, replace(combination, task=task), uncertainty)


def explain_unloadable(run: RunDir, state: RunState, recipe: Any, members: Sequence[str]) -> str | None:
    """Why no model of these members that predicts can be loaded, and what to declare; None where one can."""
    if not isinstance(recipe, Recipe):
        return "its recipe is a train function alone: declare Recipe(model=..., train=..., predict=...)"
    for name in members if recipe.predict is None and recipe.loss is None else ():
        seen = read_observation(run, state.members[name])
        if seen is None or seen.call is None:
            return f"nothing says how the train function's model of {name} predicts: declare Recipe.predict"
    return None


def _find_task(
    run: RunDir, state: RunState, ensemble: Ensemble, observed: Mapping[str, Observation | None]
) -> Task:
    """What the members predict: as their first batches showed, as declared, or as saved with their predictions."""
    tasks: dict[str, Task] = {}
    for name, seen in observed.items():
        if seen is not None and seen.task is not None:
            tasks[name] = seen.task
    if not tasks:
        assert isinstance(ensemble.recipe, Recipe)
        return ensemble.recipe.known_task or read_prediction_matrix(run, state, list(observed), "valid").task
    (first, task), *others = tasks.items()
    for name, other in others:
        if other != task:
            raise CombineError(
                f"{first} predicts {describe_task(task)}, {name} {describe_task(other)}: leave one out with "
                "load(members=...)"
            )
    return task


def _select_members(state: RunState, members: Sequence[str] | None, run: RunDir) -> list[str]:
    if members is None:
        finished = [m.id for m in state.members.values() if m.state == "finished"]
        if not finished:
            raise CombineError(
                f"no member of {run.path} finished; "
                "name those to take from their last checkpoint: load(members=...)"
            )
        return finished
    if isinstance(members, str) or not members:
        raise CombineError(f"load(members=) must be a list of member ids, got {members!r}")
    for member in members:
        if member not in state.members:
            raise CombineError(unknown_name(f"{run.path} has no member", member, list(state.members)))
    return list(dict.fromkeys(members))


def _read_event(state: RunState, method: str | Combine) -> Combined | None:
    """The run's `combined` event, where it is of this method; None where members were combined by another one, or
    by a function that has been changed since.
    """
    event = state.combined or NOT_COMBINED
    if event.declared != (FUNCTION if callable(method) else method) or not event.weights:
        return None
    if callable(method) and event.code != fingerprint_function(method):
        warnings.warn(
            "load: Ensemble.combine has changed since the run was combined: its calibration is fitted again, and "
            "the figures of the run are those of the earlier function",
            stacklevel=4,
        )
        return None
    return event


def _read_combination(event: Combined, method: str | Combine) -> Combination:
    """What the run's `combined` event recorded; it is complete unless it is of a stack."""
    thresholds = (event.decision or {}).get("thresholds")
    return Combination(
        str(event.method),
        np.array(list(event.weights.values())),
        *read_calibration(event.calibration),
        reason=event.reason,
        function=method if callable(method) else None,
        thresholds=None if thresholds is None else np.array(thresholds),
    )


def _find_candidates(state: RunState, method: str | Combine, finished: list[str]) -> list[str]:
    """The members that the run's own combination by this method was fitted to; else all that finished."""
    event = state.combined or NOT_COMBINED
    of_event = event.candidates if event.declared == (FUNCTION if callable(method) else method) else None
    return [member for member in of_event or finished if member in finished]


def _fit_combination(
    run: RunDir, state: RunState, ids: list[str], ensemble: Ensemble, method: str | Combine, named: bool
) -> tuple[list[str], Combination]:
    """Fits the method to the saved validation predictions; members without weight are dropped."""
    valid = read_prediction_matrix(run, state, ids, "valid")
    if valid.left_out and not valid.members and valid.unsaved and (method == "average" or callable(method)):
        equal = average_weights(len(ids))
        if callable(method):
            return ids, Combination(FUNCTION, equal, function=method)
        return ids, Combination("average", equal)
    if valid.left_out and (named or not valid.members):
        member, why = next(iter(valid.left_out.items()))
        raise CombineError(
            f"{member} cannot be combined by {method!r}: {why}; load(combine='average') needs none"
            if valid.unsaved
            else f"{member} cannot be combined: {why}"
        )
    valid = valid if callable(method) else valid.thin()  # as in the run
    combination, _ = fit_declared(ensemble, valid, method)
    stack = combination.stack
    if stack is not None and stack.needs_all:
        return valid.members, combination
    kept = combination.weights > 0
    names = [member for member, keep in zip(valid.members, kept, strict=True) if keep]
    stack = None if stack is None else stack.select(kept)
    return names, replace(combination, weights=combination.weights[kept], stack=stack)


def _build_models(
    run: RunDir,
    state: RunState,
    ensemble: Ensemble,
    seen: Mapping[str, Observation | None],
    combination: Combination,
    uncertainty: bool,
) -> EnsembleModel:
    import torch

    from ensemble.combine.member_calls import MemberCall
    from ensemble.combine.model import EnsembleModel
    from ensemble.train.call import Observation
    from ensemble.train.own_tensors import use_base

    of_code: dict[str | None, list[str]] = {}
    for name in seen:
        of_code.setdefault(state.members[name].code, []).append(name)
    models, calls, unknown = {}, {}, Observation(task=combination.task)
    for code, names in of_code.items():
        with keep_settings(), contextlib.ExitStack() as opened:  # settings are part of the code
            recipe = load_recipe(run, state, ensemble, code, names[0])
            base = opened.enter_context(use_base(run.path, recipe))
            for name in names:
                params = ensemble.as_declared(state.members[name].identity["params"])
                call = MemberCall(strip(recipe), seen[name] or unknown, torch.get_default_dtype())
                models[name] = load_member(run, state, recipe, name, params, call)
                calls[name] = call
    shapes = _find_shapes(ensemble, state, next(iter(seen)))
    models = {name: models[name] for name in seen}
    is_prefix = base is not None and import_object(SHARE_PREFIX)(models.values(), base)
    classes = (state.combined or NOT_COMBINED).classes
    combined = EnsembleModel(models, calls, combination, shapes, uncertainty=uncertainty, classes=classes)
    combined.once = import_object(COMPUTE_ONCE) if is_prefix else combined.once
    return combined


def _find_shapes(ensemble: Ensemble, state: RunState, name: str) -> dict[str, tuple[int, ...]]:
    """The shape that each field of a sample had in training; empty where that cannot be found out."""
    try:
        pipeline = ensemble.valid if ensemble.valid is not None else ensemble.pipeline(state.members[name].params)
        return {field: tuple(layout.shape) for field, layout in pipeline.fields.items()}
    except Exception as error:  # the data may be elsewhere
        log.info("the shape of a batch is not known: %s", error)
        return {}
