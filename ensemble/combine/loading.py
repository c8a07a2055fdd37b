"""Loads a finished run as one torch module."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ensemble.combine.aligned import read_aligned
from ensemble.combine.classes import explain_missing_classes, read_fields
from ensemble.combine.combination import Combination, fit
from ensemble.combine.methods import average_weights
from ensemble.combine.metrics import CombineError
from ensemble.combine.run import choose_criterion
from ensemble.spec import COMBINERS, Recipe, unknown_name
from ensemble.user_code.fingerprint import code_of

if TYPE_CHECKING:
    import torch

    from ensemble.combine.model import EnsembleModel
    from ensemble.spec import Ensemble
    from ensemble.store import MemberState, RunDir, RunState

log = logging.getLogger(__name__)


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
        CombineError: when the run's recipe is a train function (there is no `model=` to build members by), nothing
            says that the members are classifiers (a regression, several labels a sample), a member is unknown or
            has no checkpoint, or the predictions that the method needs are not there; or code that a member was
            trained with could not be kept in the run, and is another now.
    """
    from ensemble.store import RunDir, fold, read_events

    run = RunDir(run_dir)
    state = fold(read_events(run.events))
    # of the last start: a declaration that came after it, and did not start, trained nobody
    ensemble = run.load_ensemble(state.header.get("code"))
    recipe = ensemble.recipe
    if not isinstance(recipe, Recipe):
        raise CombineError(
            f"load() needs a Recipe with model=, but the recipe of {ensemble.name!r} is the train function "
            f"{getattr(recipe, '__name__', recipe)!r}: build its models in your own code and read their weights "
            "with ensemble.store.load_checkpoint(<run_dir>/members/<id>/checkpoint-<attempt>.safetensors)['model']"
        )
    method = ensemble.combine if combine is None else combine
    if method not in COMBINERS:
        raise CombineError(unknown_name("load(combine=) cannot be", method, COMBINERS))
    ids = _select_members(state, members, run)
    why = explain_missing_classes(ensemble, run, state, ids)
    if why is not None:
        raise CombineError(f"the members of {run.path} cannot be loaded as one model: {why}")
    names, combination = _read_combination(state, method) if members is None else ([], None)
    if combination is None:
        names, combination = _fit_combination(run, ids, ensemble, method, named=members is not None)
    if combination.reason:
        warnings.warn(f"load: {combination.reason}", stacklevel=2)
    return _build_models(run, state, ensemble, names, combination)


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


def _read_combination(state: RunState, method: str) -> tuple[list[str], Combination | None]:
    """Returns what the run's own `combined` event recorded, where it is of this method and complete (a stack is
    not).
    """
    event: dict[str, Any] = state.combined or {}
    if event.get("method") != method or method == "stack" or not event.get("weights"):
        return [], None
    weights: dict[str, float] = event["weights"]
    return list(weights), Combination(method, np.array(list(weights.values())), event["temperature"])


def _fit_combination(
    run: RunDir, ids: list[str], ensemble: Ensemble, method: str, named: bool
) -> tuple[list[str], Combination]:
    """Fits the method to the saved validation predictions; members without weight are dropped."""
    valid = read_aligned(run, ids, "valid")
    if valid.left_out and method == "average" and not valid.members and valid.unsaved:
        return ids, Combination("average", average_weights(len(ids)))
    if valid.left_out and (named or not valid.members):
        member, why = next(iter(valid.left_out.items()))
        raise CombineError(
            f"{member} cannot be combined by {method!r}: {why}; load(combine='average') needs none"
            if valid.unsaved
            else f"{member} cannot be combined: {why}"
        )
    objective = choose_criterion(ensemble.objective, ensemble.mode)
    combination = fit(method, valid.probabilities, valid.target, objective=objective, calibrate=ensemble.calibrate)
    if combination.stacker is not None:
        return valid.members, combination
    kept = combination.weights > 0
    names = [member for member, keep in zip(valid.members, kept, strict=True) if keep]
    mixture = Combination(
        combination.method, combination.weights[kept], combination.temperature, reason=combination.reason
    )
    return names, mixture


def _build_models(
    run: RunDir, state: RunState, ensemble: Ensemble, names: list[str], combination: Combination
) -> EnsembleModel:
    import torch

    from ensemble.combine.model import EnsembleModel

    recipes = _load_recipes(run, state, ensemble, names)
    # Building a model draws its initial weights, soon overwritten: the caller's generator is not to notice.
    with torch.random.fork_rng(devices=[]):
        models = {name: _load_member(run, state, recipes[name], name) for name in names}
        axes = _count_axes(ensemble, state, names[0])
    return EnsembleModel(recipes, models, combination, axes)


def _load_recipes(run: RunDir, state: RunState, ensemble: Ensemble, names: Sequence[str]) -> dict[str, Recipe]:
    """The recipe of each member, with the code that it was trained with."""
    known: dict[str | None, Recipe] = {}
    for name in names:
        code = state.members[name].code
        if code not in known:
            kept = ensemble if code in (None, state.header.get("code")) else run.load_ensemble(code)
            _check_code(run, kept, code, name)
            assert isinstance(kept.recipe, Recipe)
            known[code] = kept.recipe
    return {name: known[state.members[name].code] for name in names}


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


def _count_axes(ensemble: Ensemble, state: RunState, name: str) -> dict[str, int]:
    """How many axes each field of a batch has; empty where that cannot be found out."""
    try:
        fields = read_fields(ensemble, state.members[name].params)
    except Exception as error:  # the data may be elsewhere
        log.info("the shape of a batch is not known: %s", error)
        return {}
    return {field: 1 + len(known.shape) for field, known in fields.items()}


def _load_member(run: RunDir, state: RunState, recipe: Recipe, name: str) -> torch.nn.Module:
    from ensemble.store import load_checkpoint

    path = run.valid_checkpoint(state.members[name])
    if not path.exists():
        raise CombineError(
            f"{name} has no checkpoint at {path}; train it first, or leave it out: load(members=...)"
        )
    params = state.members[name].identity["params"]
    model: torch.nn.Module = recipe.model(params)
    weights = load_checkpoint(path)["model"]
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise CombineError(
            f"the weights in {path} do not fit what Recipe.model builds for {params}: "
            + " ".join(str(error).split())
        ) from None
    _check_weights(run, state.members[name], weights, path)
    return model


def _check_weights(run: RunDir, member: MemberState, weights: Mapping[str, torch.Tensor], path: Path) -> None:
    """Raises for weights whose digest differs from the one in the log."""
    from ensemble.store import fold, read_events, weights_sha256

    found = weights_sha256(weights)
    if not _read_digest(member) or _read_digest(member) == found:
        return
    now = fold(read_events(run.events)).members[member.id]  # one that still trains may have saved others since
    if _read_digest(now) != found:
        raise CombineError(
            f"{path} holds other weights than the log says of {member.id} (sha256 {found[:12]}, not "
            f"{str(_read_digest(now))[:12]}): put back the file that it wrote, or leave it out "
            "with load(members=...)"
        )


def _read_digest(member: MemberState) -> str | None:
    """The digest of a member's last weights."""
    saved = member.checkpoint or {}
    return member.weights_sha256 if member.state == "finished" else saved.get("weights_sha256")
