"""More epochs for the members of a run that has ended: who gets them, and what that means for their schedules.

A schedule that depends on the number of steps keeps the declared number: one that ends above 0 stays there, which
is said; one that ends with 0, and a function of the user's that reads the number of steps, is refused.
"""

from __future__ import annotations

import dataclasses
import dis
import types
from collections.abc import Callable, Mapping
from typing import Any

from ensemble.events import MoreEpochs
from ensemble.spec import Ensemble, Recipe
from ensemble.spec.member import as_member
from ensemble.spec.options import SCHEDULES, resolve_with_hyperparameters
from ensemble.store import MemberState, RunDir, RunState, StoreError
from ensemble.store.regular_files import measure

#: Schedules that come to an end with the declared number of steps.
ENDING = ("cosine", "polynomial")
_INSTEAD = "`ensemble add --from MEMBER --warm` trains a clone with a schedule of its own"


def plan_more_epochs(run_dir: RunDir, state: RunState, ensemble: Ensemble, epochs: int) -> MoreEpochs | None:
    """Plan to train the members of a run for `epochs` epochs each; None where a resume is all that it takes.

    Members that were pruned or cancelled, stopped early, or failed for good stay as they are, and so do those that
    were declared with as many epochs or more.

    Raises:
        StoreError: no member can be trained further, has fewer epochs, or would be trained as it was declared.
    """
    code = state.header.code
    able = [m for m in state.members.values() if m.state in ("finished", "waiting") or m.is_resumable(code)]
    if not able:
        raise StoreError(f"{run_dir.path}: no member finished or can go on, so none can have more epochs")
    if any(member.identity.get("population") for member in able):
        raise StoreError(f"{run_dir.path}: the generations of a population have fixed epochs; {_INSTEAD}")
    able = [member for member in able if member.early_stopping is None]
    if not able:
        raise StoreError(f"{run_dir.path}: its members stopped early, and would do so again")
    present = {member.id: int(member.identity["epochs"]) for member in able}
    shorter = [member for member in able if present[member.id] < epochs]
    if ensemble.search is not None and any("epochs" in member.params for member in shorter):
        raise StoreError(f"{run_dir.path}: the search chooses the epochs of its trials; {_INSTEAD}")
    most = max(present.values())
    if not shorter:
        if most == epochs and any(member.state != "finished" for member in able):
            return None
        raise StoreError(
            f"{run_dir.path}: its members train for {most} epochs already; give more than that, not {epochs}"
        )
    for member in shorter:
        if member.has_weights_only or member.is_checkpoint_removed:
            raise StoreError(
                f"{member.id} cannot be trained further: the state of its optimizer was not kept "
                f"(Ensemble.keep_checkpoints={ensemble.keep_checkpoints!r}); {_INSTEAD}"
            )
        if member.checkpoint is not None and measure(run_dir.valid_checkpoint(member)) is None:
            raise StoreError(
                f"{run_dir.valid_checkpoint(member)}, the checkpoint from which {member.id} would go on, "
                "is not there any more"
            )
    _refuse_functions(ensemble)
    notes = dict.fromkeys(note for m in shorter for note in (_check_schedule(m), _explain_average(m)) if note)
    before = {member.id: present[member.id] for member in shorter}
    return MoreEpochs(epochs=epochs, members=before, notes=list(notes), keeps_results=True)


def apply_more_epochs(ensemble: Ensemble, epochs: int) -> Ensemble:
    """The declaration with at least so many epochs for the ensemble and for each member; 0 changes nothing."""
    if not epochs:
        return ensemble
    members = ensemble.members
    if members is not None:
        declared = [as_member(number, listed) for number, listed in enumerate(members)]
        members = [
            dataclasses.replace(m, epochs=epochs) if 0 < (m.epochs or m.params.get("epochs") or 0) < epochs else m
            for m in declared
        ]
    return dataclasses.replace(ensemble, epochs=max(ensemble.epochs, epochs), members=members)


def find_more_epochs(state: RunState) -> int:
    """The number of epochs to which members of a run were extended; 0 where none was."""
    extended = [m.identity["epochs"] for m in state.members.values() if m.identity.get("epochs_before")]
    return max(extended, default=0)


def _check_schedule(member: MemberState) -> str | None:
    """What a longer training means for the member's schedule, if it is a named one that ends."""
    declared: Mapping[str, Any] | None = member.identity.get("schedule")
    if declared is None or declared["name"] not in ENDING:
        return None
    options = resolve_with_hyperparameters("schedule", declared, SCHEDULES, member.params)
    name, before = declared["name"], member.identity.get("epochs_before") or member.identity["epochs"]
    if not options["end"]:
        raise StoreError(
            f"the schedule {name!r} of {member.id} ends with the learning rate 0 after its {before} epochs: "
            f"further epochs would change nothing; {_INSTEAD}"
        )
    return (
        f"the schedule {name!r} has ended after {before} epochs: the learning rate stays at {options['end']:g} of "
        "the declared one, unlike in a training declared with all epochs"
    )


def _explain_average(member: MemberState) -> str | None:
    """What a longer training means for averaged weights that begin with a part of all epochs."""
    averaging, before = member.identity.get("averaging"), member.identity.get("epochs_before")
    if not averaging or averaging["name"] != "swa" or averaging["start"] >= 1:
        return None
    return (
        f"SWA goes on with the average that began after {averaging['start']:g} of the declared "
        f"{before or member.identity['epochs']} epochs"
    )


def _refuse_functions(ensemble: Ensemble) -> None:
    """Refuse functions of the user that compute a schedule from the number of all steps."""
    recipe = ensemble.recipe
    loop = recipe.train if isinstance(recipe, Recipe) else recipe
    if isinstance(recipe, Recipe) and loop is None:
        if recipe.schedule is not None and reads_parameter(recipe.schedule, 2):
            raise StoreError(
                "Recipe.schedule reads the number of all steps, which a longer training changes: the rate would "
                f"jump, or the schedule has ended; {_INSTEAD}"
            )
    elif loop is not None and reads_attribute(loop, "steps"):
        raise StoreError(
            "the train function reads `member.steps`, the number of all steps, which a longer training changes: "
            f"what it computed from that is over; {_INSTEAD}"
        )


def reads_parameter(function: Callable[..., Any], position: int) -> bool:
    """Whether a function reads its parameter at a position; True where that cannot be seen."""
    if not isinstance(function, types.FunctionType) or hasattr(function, "__wrapped__"):
        return True
    code = function.__code__
    if position >= code.co_argcount:
        return True
    name = code.co_varnames[position]
    return any(
        name in (instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,))
        for instruction in dis.get_instructions(code)
        if instruction.opname.startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_CLOSURE"))
    )


def reads_attribute(function: Callable[..., Any], name: str) -> bool:
    """Whether a function, or one that is defined in it, reads an attribute or a global of this name."""
    codes = [function.__code__] if isinstance(function, types.FunctionType) else []
    for code in codes:
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return any(name in code.co_names for code in codes)
