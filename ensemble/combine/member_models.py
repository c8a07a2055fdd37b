"""Builds members' models as they were for training, with the weights of their last checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from ensemble.combine.metrics import CombineError
from ensemble.spec import Recipe
from ensemble.user_code.fingerprint import code_of

if TYPE_CHECKING:
    import torch

    from ensemble.combine.member_calls import MemberCall
    from ensemble.spec import Ensemble
    from ensemble.store import MemberState, RunDir, RunState
    from ensemble.train.call import Observation


def read_observation(run: RunDir, member: MemberState) -> Observation | None:
    """What the first training batch showed of a member; None where it has no checkpoint, or none had shown it."""
    from ensemble.train.call import Observation

    if member.checkpoint is None:
        return None
    return Observation.from_checkpoint(_read_last(run, member, ("call", "outputs")))


def strip(recipe: Recipe) -> Recipe:
    """The recipe without what only training calls: a model that is pickled takes none of it along."""
    stripped = copy.copy(recipe)
    for name in ("optimizer", "schedule", "metrics", "train"):
        object.__setattr__(stripped, name, None)
    object.__setattr__(stripped, "split_metrics", ())
    return stripped


def load_recipe(run: RunDir, state: RunState, ensemble: Ensemble, code: str | None, member: str) -> Recipe:
    """The recipe with the code, and from here on the library settings, that a member was trained with.

    Raises:
        CombineError: it uses modules that are imported, not saved with the run, and differ now.
    """
    from ensemble.store import load_code

    if code not in (None, state.header.code):
        ensemble = run.load_ensemble(code, takes_settings=True)
    assert isinstance(ensemble.recipe, Recipe)
    current = code_of(ensemble)
    if code is None or current.fingerprint == code:
        return ensemble.recipe
    kept = load_code(run.code(code))
    if kept is None:
        raise CombineError(f"the code that {member} was trained with is not in {run.code(code)} any more")
    changed = current.changed(kept) if kept.python == current.python else []
    if changed:
        raise CombineError(
            f"{member} was trained with other code: {', '.join(changed)} changed since; to use the earlier code, "
            f"put {run.code(code)} first on PYTHONPATH"
        )
    return ensemble.recipe


def load_member(
    run: RunDir,
    state: RunState,
    recipe: Recipe,
    name: str,
    params: dict[str, Any],
    call: MemberCall,
) -> torch.nn.Module:
    """A member's model, built as it was for training, with the weights, and all else, of its last checkpoint.

    Raises:
        CombineError: it does not predict what it predicted when the checkpoint was written.
    """
    import torch
    from torch.nn.parameter import is_lazy

    from ensemble.train.loose_tensors import set_loose
    from ensemble.train.own_tensors import LOADED, call_model, check_same_base, load_own
    from ensemble.train.seeding import seeded
    from ensemble.train.structure import set_numbers

    member = state.members[name]
    with seeded(member.identity["seed"]):
        model: torch.nn.Module = call_model(recipe, params)
    saved = _read_last(run, member, ("model", "structure", "base", "loose", "answers"))
    weights = saved["model"]
    shared = [(part, own) for part, own in model.named_parameters() if own in LOADED and part in weights]
    if any(is_lazy(own) or not torch.equal(own, weights[part]) for part, own in shared):
        model = copy.deepcopy(model)  # the weights of another member are not to change
    LOADED.update(dict.fromkeys(model.parameters()))
    try:
        check_same_base(model, saved)
        set_numbers(model, saved.get("structure", {}).get("numbers", {}))
        load_own(model, weights)
    except RuntimeError as error:
        raise CombineError(
            f"the weights in {run.valid_checkpoint(state.members[name])} do not fit what Recipe.model builds for "
            f"{params}: " + " ".join(str(error).split())
        ) from None
    set_loose(model, saved.get("loose", {}))
    answers = saved.get("answers")
    if answers is not None and member.code in (None, answers["code"]):
        _check_answers(name, model.eval(), call, answers)
    return model


def _check_answers(name: str, model: torch.nn.Module, call: MemberCall, answers: Mapping[str, Any]) -> None:
    import torch

    from ensemble.train.same_model import explain_other_answers
    from ensemble.train.seeding import seeded

    def compute(batch: Any, seed: int) -> torch.Tensor:
        with seeded(seed), torch.no_grad():
            return call.compute_values(model, batch)

    if (why := explain_other_answers(answers, model, torch.device("cpu"), compute)) is not None:
        raise CombineError(f"{name} cannot be loaded as it was trained: {why}")


def _read_last(run: RunDir, member: MemberState, parts: Collection[str]) -> dict[str, Any]:
    """Parts of the last checkpoint of a member."""
    from ensemble.store import DamagedError, read_checkpoint, read_state

    if member.checkpoint is None:
        raise CombineError(
            f"{member.id}: {member.explain_no_checkpoint()}; train it first, or leave it out: load(members=...)"
        )
    try:
        return read_checkpoint(run, member, parts)
    except DamagedError:
        newer = read_state(run.events).as_finished().members[member.id]
        if newer.checkpoint == member.checkpoint:
            raise
        return read_checkpoint(run, newer, parts)  # one that still trains has saved others since
