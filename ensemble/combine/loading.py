"""`load`: a finished run as one torch module."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ensemble.combine.aligned import read_aligned
from ensemble.combine.combination import Combination, fit
from ensemble.combine.errors import CombineError
from ensemble.combine.methods import average_weights
from ensemble.combine.run import criterion
from ensemble.spec import COMBINERS, Recipe, unknown_name

if TYPE_CHECKING:
    import torch

    from ensemble.combine.model import EnsembleModel
    from ensemble.spec import Ensemble
    from ensemble.store import RunDir, RunState


def load(
    run_dir: str | os.PathLike[str], combine: str | None = None, members: Sequence[str] | None = None
) -> EnsembleModel:
    """One `torch.nn.Module` that maps a batch dict to class probabilities float32 [b, C], in eval mode.

    Example:
        model = ensemble.load("runs/digits")
        probabilities = model({"image": images})      # no label needed

    Args:
        run_dir: of a run whose members, or some of them, finished.
        combine: average, weighted, greedy or stack; None takes the run's own. The run's own weights and
            temperature come from its `combined` event; another method, a stack, or another choice of members is
            fitted again to the saved validation predictions.
        members: ids to combine; None takes all that finished. A member that has not finished counts with its last
            checkpoint, when it is asked for by name.

    Raises:
        CombineError: when the run's recipe is a train function (there is no `model=` to build members by), the
            members have one output each and no classes to compare it with (a regression), a member is unknown or
            has no checkpoint, or the predictions that the method needs are not there.
    """
    from ensemble.store import RunDir, fold, read_events

    run = RunDir(run_dir)
    ensemble = run.load_ensemble()
    recipe = ensemble.recipe
    if not isinstance(recipe, Recipe):
        raise CombineError(
            f"load() needs a Recipe with model=, but the recipe of {ensemble.name!r} is the train function "
            f"{getattr(recipe, '__name__', recipe)!r}: build its models in your own code and read their weights "
            "with ensemble.store.load_checkpoint(<run_dir>/members/<id>/checkpoint.safetensors)['model']"
        )
    method = ensemble.combine if combine is None else combine
    if method not in COMBINERS:
        raise CombineError(unknown_name("load(combine=) cannot be", method, COMBINERS))
    state = fold(read_events(run.events))
    ids = _chosen(state, members, run)
    names, combination = _as_run(state, method) if members is None else ([], None)
    if combination is None:
        names, combination = _fitted(run, ids, ensemble, method, named=members is not None)
    if combination.reason:
        warnings.warn(f"load: {combination.reason}", stacklevel=2)
    return _built(run, state, recipe, names, combination)


def _chosen(state: RunState, members: Sequence[str] | None, run: RunDir) -> list[str]:
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


def _as_run(state: RunState, method: str) -> tuple[list[str], Combination | None]:
    """What the run's own `combined` event fitted, when it is this method and is all in there (a stack is not)."""
    event: dict[str, Any] = state.combined or {}
    if event.get("method") != method or method == "stack" or not event.get("weights"):
        return [], None
    weights: dict[str, float] = event["weights"]
    return list(weights), Combination(method, np.array(list(weights.values())), event["temperature"])


def _fitted(
    run: RunDir, ids: list[str], ensemble: Ensemble, method: str, named: bool
) -> tuple[list[str], Combination]:
    """The method fitted to saved validation predictions; members without weight are dropped."""
    valid = read_aligned(run, ids, "valid")
    if valid.left_out and method == "average" and not valid.members:
        return ids, Combination("average", average_weights(len(ids)))
    if valid.left_out and (named or not valid.members):
        member, why = next(iter(valid.left_out.items()))
        raise CombineError(
            f"{member} cannot be combined by {method!r}: {why}; load(combine='average') needs none"
            if "saved no" in why
            else f"{member} cannot be combined: {why}"
        )
    # One number for each sample is saved as two classes, and may have been no class at all.
    two_columns = valid.target is None and valid.probabilities[0].shape[1] == 2
    if two_columns and isinstance(ensemble.recipe, Recipe) and ensemble.recipe.predict is None:
        raise CombineError(
            f"nothing says that the outputs of these members are classes: the field {ensemble.recipe.target!r} of "
            "the validation set holds none; load() makes classifiers, so say how with Recipe(predict=...)"
        )
    objective = criterion(ensemble.objective, ensemble.mode)
    combination = fit(method, valid.probabilities, valid.target, objective=objective, calibrate=ensemble.calibrate)
    if combination.stacker is not None:
        return valid.members, combination
    kept = combination.weights > 0
    names = [member for member, keep in zip(valid.members, kept, strict=True) if keep]
    mixture = Combination(
        combination.method, combination.weights[kept], combination.temperature, reason=combination.reason
    )
    return names, mixture


def _built(
    run: RunDir, state: RunState, recipe: Recipe, names: list[str], combination: Combination
) -> EnsembleModel:
    import torch

    from ensemble.combine.model import EnsembleModel

    # Building a model draws its initial weights, soon overwritten: the caller's generator is not to notice.
    with torch.random.fork_rng(devices=[]):
        models = {name: _member(run, state, recipe, name) for name in names}
    return EnsembleModel(recipe, models, combination)


def _member(run: RunDir, state: RunState, recipe: Recipe, name: str) -> torch.nn.Module:
    from ensemble.store import load_checkpoint

    path = run.checkpoint(name)
    if not path.exists():
        raise CombineError(
            f"{name} has no checkpoint at {path}; train it first, or leave it out: load(members=...)"
        )
    params = state.members[name].identity["params"]
    model: torch.nn.Module = recipe.model(params)
    try:
        model.load_state_dict(load_checkpoint(path)["model"])
    except RuntimeError as error:
        raise CombineError(
            f"the weights in {path} do not fit what Recipe.model builds for {params}: "
            + " ".join(str(error).split())
        ) from None
    return model
