"""Loads a finished run as one torch module."""

from __future__ import annotations

import copy
import logging
import os
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ensemble.combine.classes import explain_missing_classes, read_fields
from ensemble.combine.combination import FUNCTION, Combination, Combine, fingerprint_function, fit_held_out
from ensemble.combine.methods import average_weights
from ensemble.combine.metrics import CombineError
from ensemble.combine.prediction_matrix import describe_task, read_prediction_matrix
from ensemble.combine.tasks import find_math
from ensemble.combine.tasks.free import NO_MIX
from ensemble.combine.tasks.stacks import PointStacker
from ensemble.combine.thresholds import with_thresholds
from ensemble.events import NOT_COMBINED, Combined
from ensemble.spec import COMBINERS, Recipe, unknown_name
from ensemble.spec.task import CLASSIFICATION, Task, as_task
from ensemble.store.member import OTHERWISE
from ensemble.user_code.fingerprint import code_of
from pipelines.environment.library_settings import keep_settings, keeps_settings

if TYPE_CHECKING:
    import torch

    from ensemble.combine.member_calls import MemberCall
    from ensemble.combine.model import EnsembleModel
    from ensemble.spec import Ensemble
    from ensemble.store import MemberState, RunDir, RunState
    from ensemble.train.call import Observation

log = logging.getLogger(__name__)


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
        run_dir: of a run whose members, or some of them, finished.
        combine: average, weighted, greedy or stack, or a function `combine(values [m, b, ...]) -> [b, ...]` of
            tensors; None takes the run's own. The run's own weights and calibration come from its `combined`
            event; another method or another choice of members is fitted again to the saved validation predictions,
            and a stack, which the event does not hold, to those of the members that it was fitted to.
        members: ids to combine; None takes all that finished. A member that has not finished counts with its last
            checkpoint, when it is asked for by name.
        uncertainty: whether the model returns a dict: `values`, and of each sample, [b] each, those of `total`,
            `aleatoric`, `epistemic` and `disagreement` that have a meaning for the task.

    Returns:
        The module, on the CPU; `.to(device)` moves it. Of a run with `Ensemble.thresholds` it returns a dict, too:
        `values`, and `decision`, the classes int64 [b, ...] or labels bool [b, L] that are predicted.

    Raises:
        CombineError: the run's recipe is a train function (there is no `model=` to build members by), nothing
            says what the members predict, a member is unknown or has no checkpoint, the predictions that the
            method needs are not there, or the task knows no uncertainty; or code that a member was trained with
            could not be kept in the run, and is another now.
    """
    from ensemble.store import RunDir, read_state

    run = RunDir(run_dir)
    state = read_state(run.events)
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
    names, combination = _read_combination(state, method) if is_own else ([], None)
    if combination is None:
        ids = _find_candidates(state, method, ids) if is_own else ids
        names, combination = _fit_combination(run, state, ids, ensemble, method, named=members is not None)
    seen = {name: _read_observation(run, state.members[name]) for name in names}
    task = _find_task(run, state, ensemble, seen)
    if uncertainty and task.kind == "free":
        raise CombineError("load(uncertainty=True): nothing says what outputs of the task free mean")
    if task.kind == "free" and combination.function is None:
        raise CombineError(NO_MIX)
    if combination.reason:
        warnings.warn(f"load: {combination.reason}", stacklevel=2)
    return _build_models(run, state, ensemble, seen, replace(combination, task=task), uncertainty)


def explain_unloadable(run: RunDir, state: RunState, recipe: Any, members: Sequence[str]) -> str | None:
    """Why no model of these members that predicts can be loaded, and what to declare; None where one can."""
    if not isinstance(recipe, Recipe):
        return "its recipe is a train function alone: declare Recipe(model=..., train=..., predict=...)"
    for name in members:
        otherwise = next((text for text in state.members[name].remarks if text.startswith(OTHERWISE)), None)
        if otherwise is not None:
            return f"{name}: {otherwise}"
    for name in members if recipe.predict is None and recipe.loss is None else ():
        seen = _read_observation(run, state.members[name])
        if seen is None or seen.call is None:
            return f"it is not known how the train function calls the model of {name}: declare Recipe.predict"
    return None


def _find_task(
    run: RunDir, state: RunState, ensemble: Ensemble, observed: Mapping[str, Observation | None]
) -> Task:
    """What the members predict: as their first training batches showed, as declared, or as saved with their
    predictions.
    """
    tasks: dict[str, Task] = {}
    for name, seen in observed.items():
        if seen is not None and seen.task is not None:
            tasks[name] = seen.task
        elif seen is not None and seen.reason is not None:
            raise CombineError(f"{name} cannot be loaded: {seen.reason}")
    if not tasks:
        return _find_task_without_calls(run, state, ensemble, list(observed))
    (first, task), *others = tasks.items()
    for name, other in others:
        if other != task:
            raise CombineError(
                f"{first} predicts {describe_task(task)}, {name} {describe_task(other)}: leave one out with "
                "load(members=...)"
            )
    return task


def _find_task_without_calls(run: RunDir, state: RunState, ensemble: Ensemble, ids: Sequence[str]) -> Task:
    assert isinstance(ensemble.recipe, Recipe)
    declared = as_task("Recipe.task", ensemble.recipe.task)
    if declared is not None:
        return declared
    saved = read_prediction_matrix(run, state, ids, "valid").task
    why = explain_missing_classes(ensemble, run, state, ids) if saved == CLASSIFICATION else None
    if why is not None:
        raise CombineError(f"the members of {run.path} cannot be loaded as one model: {why}")
    return saved


def _read_observation(run: RunDir, member: MemberState) -> Observation | None:
    """What the first training batch showed of a member; None where it has no checkpoint, or none had shown it."""
    from ensemble.train.call import Observation

    if member.checkpoint is None:
        return None
    return Observation.from_checkpoint(_read_last(run, member, ("call", "outputs")))


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


def _read_combination(state: RunState, method: str | Combine) -> tuple[list[str], Combination | None]:
    """Returns what the run's own `combined` event recorded, where it is of this method, or of what took its place,
    and complete (a stack is not).
    """
    event = _read_event(state, method)
    if event is None or event.method in (None, "stack"):
        return [], None
    calibration: float | None = (event.calibration or {})["value"]
    thresholds = (event.decision or {}).get("thresholds")
    return list(event.weights), Combination(
        event.method,
        np.array(list(event.weights.values())),
        1.0 if calibration is None else calibration,
        reason=event.reason,
        function=method if callable(method) else None,
        thresholds=None if thresholds is None else np.array(thresholds),
    )


def _read_event(state: RunState, method: str | Combine) -> Combined | None:
    """The run's `combined` event, where it is of this method; None where members were combined by another one, or
    by a function that has been changed since.
    """
    event = state.combined or NOT_COMBINED
    name = FUNCTION if callable(method) else method
    if event.declared != name or not event.weights:
        return None
    if callable(method) and event.code != fingerprint_function(method):
        warnings.warn(
            "load: Ensemble.combine has changed since the run was combined: its calibration is fitted anew, and "
            "the figures of the run are of the earlier function",
            stacklevel=4,
        )
        return None
    return event


def _find_candidates(state: RunState, method: str | Combine, finished: list[str]) -> list[str]:
    """The members that the run's own combination by this method was fitted to; else all that finished."""
    event = state.combined or NOT_COMBINED
    name = FUNCTION if callable(method) else method
    of_event = event.candidates if event.declared == name else None
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
        seen = _read_observation(run, state.members[member])
        if seen is not None and seen.task is None and seen.reason is not None:
            raise CombineError(f"{member} cannot be combined: {why}, as {seen.reason}")
        raise CombineError(
            f"{member} cannot be combined by {method!r}: {why}; load(combine='average') needs none"
            if valid.unsaved
            else f"{member} cannot be combined: {why}"
        )
    valid = valid if callable(method) else valid.thin()  # as in the run
    math = find_math(valid.task)
    objective = math.choose_criterion(ensemble.objective, ensemble.mode) if math.criteria else None
    combination, held_out = fit_held_out(
        method,
        valid.values,
        valid.target,
        task=valid.task,
        objective=objective,
        calibrate=ensemble.calibrate,
        groups=valid.groups,
    )
    combination = with_thresholds(combination, held_out, valid.target, ensemble.thresholds)
    stacker = combination.stacker
    if stacker is not None and not isinstance(stacker, PointStacker):
        return valid.members, combination
    kept = combination.weights > 0
    names = [member for member, keep in zip(valid.members, kept, strict=True) if keep]
    if stacker is not None:
        stacker = replace(stacker, coefficients=stacker.coefficients[kept])
    return names, replace(combination, weights=combination.weights[kept], stacker=stacker)


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

    known: dict[str | None, list[str]] = {}
    for name in seen:
        known.setdefault(state.members[name].code, []).append(name)
    models, calls, unknown = {}, {}, Observation(task=combination.task)
    mapped = _exceeds_memory(run, state, list(seen))
    for code, names in known.items():
        with keep_settings():  # which are part of the code
            recipe = _load_recipe(run, state, ensemble, code, names[0])
            for name in names:
                params = ensemble.as_declared(state.members[name].identity["params"])
                call = MemberCall(_strip(recipe), seen[name] or unknown, torch.get_default_dtype())
                models[name] = _load_member(run, state, recipe, name, params, call, mapped=mapped)
                calls[name] = call
    shapes = _find_shapes(ensemble, state, next(iter(seen)))
    models = {name: models[name] for name in seen}
    classes = (state.combined or NOT_COMBINED).classes
    return EnsembleModel(models, calls, combination, shapes, uncertainty=uncertainty, classes=classes)


def _strip(recipe: Recipe) -> Recipe:
    """The recipe without what only training calls: a model that is pickled takes none of it along."""
    stripped = copy.copy(recipe)
    for name in ("optimizer", "schedule", "metrics", "train"):
        object.__setattr__(stripped, name, None)
    object.__setattr__(stripped, "split_metrics", ())
    return stripped


def _load_recipe(run: RunDir, state: RunState, ensemble: Ensemble, code: str | None, member: str) -> Recipe:
    """The recipe with the code, and from here on the library settings, that a member was trained with."""
    is_latest = code in (None, state.header.code)
    kept = ensemble if is_latest else run.load_ensemble(code, takes_settings=True)
    _check_code(run, kept, code, member)
    assert isinstance(kept.recipe, Recipe)
    return kept.recipe


def _check_code(run: RunDir, ensemble: Ensemble, code: str | None, member: str) -> None:
    """Raises for code that differs from what a member was trained with: of modules that are imported, not saved
    with the run.
    """
    from ensemble.store import load_code

    now = code_of(ensemble)
    if code is None or now.fingerprint == code:
        return
    kept = load_code(run.code(code))
    if kept is None:
        raise CombineError(f"the code that {member} was trained with is not in {run.code(code)} any more")
    changed = now.changed(kept) if kept.python == now.python else []
    if changed:
        raise CombineError(
            f"{member} was trained with other code: {', '.join(changed)} changed since; "
            f"what it was is in {run.code(code)}, which PYTHONPATH may name first"
        )


def _find_shapes(ensemble: Ensemble, state: RunState, name: str) -> dict[str, tuple[int, ...]]:
    """The shape that each field of a sample had in training; empty where that cannot be found out."""
    try:
        fields = read_fields(ensemble, state.members[name].params)
    except Exception as error:  # the data may be elsewhere
        log.info("the shape of a batch is not known: %s", error)
        return {}
    return {field: tuple(known.shape) for field, known in fields.items()}


def _exceeds_memory(run: RunDir, state: RunState, names: Sequence[str]) -> bool:
    """Whether memory does not hold the weights of all members, which is said."""
    from ensemble.store.checkpoint import count_bytes
    from ensemble.store.regular_files import measure
    from pipelines.environment.machine_limits import fits_in_memory

    files = [run.valid_checkpoint(state.members[name]) for name in names if state.members[name].checkpoint]
    size = sum(count_bytes(file, "model") for file in files if measure(file) is not None)
    if len(files) < 2 or fits_in_memory(size):
        return False
    warnings.warn(
        f"load: the weights of {len(files)} members are {size / 2**30:.3g} GiB, more than half of the memory "
        "that is free: they stay in the checkpoints, and are read from there at each call",
        stacklevel=4,
    )
    return True


def _load_member(
    run: RunDir,
    state: RunState,
    recipe: Recipe,
    name: str,
    params: dict[str, Any],
    call: MemberCall,
    *,
    mapped: bool = False,
) -> torch.nn.Module:
    """A member's model, built as it was for training, with the weights, and all else, of its last checkpoint.

    Raises:
        CombineError: it does not predict what it predicted when the checkpoint was written.
    """
    import torch
    from torch.nn.parameter import is_lazy

    from ensemble.combine.mapped_weights import map_weights
    from ensemble.train.loose_tensors import set_loose
    from ensemble.train.own_parameters import LOADED
    from ensemble.train.seeding import seeded

    member = state.members[name]
    try:
        with seeded(member.identity["seed"]):
            model: torch.nn.Module = recipe.model(params)
    except Exception as error:  # a file of pretrained weights is gone, say
        model = _restore_network(run, member, error)
    saved = _read_last(run, member, ("model", "loose", "answers"), mapped=mapped)
    weights = saved["model"]
    shared = [(name, each) for name, each in model.named_parameters() if each in LOADED and name in weights]
    if any(is_lazy(each) or not torch.equal(each, weights[name]) for name, each in shared):
        model = copy.deepcopy(model)  # the weights of another member are not to change
    LOADED.update(dict.fromkeys(model.parameters()))
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise CombineError(
            f"the weights in {run.valid_checkpoint(state.members[name])} do not fit what Recipe.model builds for "
            f"{params}: " + " ".join(str(error).split())
        ) from None
    set_loose(model, saved.get("loose", {}))
    if mapped:
        map_weights(model, weights)
    answers = saved.get("answers")
    if answers is not None and not mapped and member.code in (None, answers["code"]):
        _check_answers(name, model.eval(), call, answers)
    return model


def _check_answers(name: str, model: torch.nn.Module, call: MemberCall, answers: Mapping[str, Any]) -> None:
    import torch

    from ensemble.combine.mapped_weights import aligned
    from ensemble.train.same_model import explain_other_answers
    from ensemble.train.seeding import seeded

    def compute(batch: Any, seed: int) -> torch.Tensor:
        with seeded(seed), torch.no_grad(), aligned(model):
            return call.compute_values(model, batch)

    if (why := explain_other_answers(answers, model, torch.device("cpu"), compute)) is not None:
        raise CombineError(f"{name} cannot be loaded as it was trained: {why}")


def _restore_network(run: RunDir, member: MemberState, error: Exception) -> torch.nn.Module:
    """The member's model from its checkpoint alone; raises Recipe.model's error where that has no network."""
    from ensemble.train.kept_network import NotKept, unpack_network

    state = _read_last(run, member, ("network", "model"))
    try:
        model = unpack_network(run, run.valid_checkpoint(member), state)
    except NotKept as absent:
        error.add_note(f"No network takes its place: {absent}")
        raise error from None
    warnings.warn(
        f"load: Recipe.model raised {type(error).__name__}: {error}; the network in the checkpoint of {member.id} "
        "takes its place",
        stacklevel=5,
    )
    return model


def _read_last(
    run: RunDir, member: MemberState, parts: Collection[str], *, mapped: bool = False
) -> dict[str, Any]:
    """Parts of the last checkpoint of a member."""
    from ensemble.store import DamagedError, read_checkpoint, read_state

    if member.checkpoint is None:
        raise CombineError(
            f"{member.id}: {member.explain_no_checkpoint()}; train it first, or leave it out: load(members=...)"
        )
    try:
        return read_checkpoint(run, member, parts, mapped=mapped)
    except DamagedError:
        now = read_state(run.events).members[member.id]
        if now.checkpoint == member.checkpoint:
            raise
        return read_checkpoint(run, now, parts, mapped=mapped)  # one that still trains has saved others since
