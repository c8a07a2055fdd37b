"""Declares clones: members like an earlier one of the run, with changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from ensemble.spec import Ensemble, Member, Recipe, SpecError, unknown_name
from ensemble.spec.identity import field_defaults, select_warm
from ensemble.spec.member import change_member
from ensemble.spec.nodes import merge_selections
from ensemble.spec.options import OPTIMIZERS, SCHEDULES
from ensemble.spec.recipe import has_own_loop, list_member_options
from ensemble.spec.sample_weights import from_record
from ensemble.store import MemberState

#: Fields of an identity that are declared as they are recorded.
_KEPT = (
    "threads",
    "seed",
    "precision",
    "batch_size",
    "loss_scale",
    "accumulate",
    "optimizer",
    "schedule",
    "keep",
    "validate_every",
    "mixup",
    "nodes",
)


def describe_lineage(lineage: Mapping[str, Any] | None) -> str:
    """What the answer to a request says of the weights with which a clone starts; empty for its own."""
    if lineage is None or not lineage["warm"]:
        return ""
    if lineage["epoch"] is None:
        return f"; it starts with the weights of {lineage['from']}"
    from ensemble.reporting.text import count

    epochs = count(lineage["epoch"], "epoch")
    steps = f" and {count(lineage['step'], 'step')}" if lineage["step"] else ""
    other = ", trained with other code than the run has now" if lineage["code"] else ""
    return f"; it starts with the weights of {lineage['from']} after {epochs}{steps}{other}"


def declare_clone(
    parent: MemberState,
    changes: Mapping[str, Any],
    ensemble: Ensemble,
    *,
    warm: bool,
    names: Iterable[str],
) -> Member:
    """The declaration of a member with changes.

    Args:
        changes: fields of a `Member`; `params` has only the hyperparameters that change.
        warm: whether it starts with the parent's weights.
        names: hyperparameters of the run's other members, and of its search.

    Raises:
        SpecError: a hyperparameter is known nowhere in the run and is no option of the parent's optimizer or
            schedule; a number became text; or nothing has changed, so that the clone would be the same model.
    """
    base, changed = recover_declaration(parent, ensemble), Member(**changes)
    options = [*_list_options(base, ensemble), *sorted(list_member_options(ensemble.recipe))]
    valid = list(dict.fromkeys([*base.params, *names, *options]))
    for name, value in changed.params.items():
        if name not in valid:
            raise SpecError(unknown_name(f"{parent.id} has no hyperparameter", name, valid))
        if isinstance(value, str) and type(before := base.params.get(name)) in (int, float):
            raise SpecError(f"{name}={value} is not a number; {parent.id} has {name}={before!r}")
    fields = {field.name: getattr(changed, field.name) for field in dataclasses.fields(Member)}
    fields = {name: value for name, value in fields.items() if name != "params" and value is not None}
    if changed.nodes is not None:
        fields["nodes"] = merge_selections(base.nodes, changed.nodes)
    made = change_member(base, changed.params, **fields)
    # A parent that began warm has other weights than its declaration gives.
    began_warm = select_warm(parent.identity.get("lineage")) is not None
    same = (ensemble.identify(parent.number, declaration).compared_fields() for declaration in (base, made))
    if not warm and not began_warm and next(same) == next(same):
        raise SpecError(
            f"nothing that decides its weights has changed, so it would repeat {parent.id}: change a "
            "hyperparameter or an option, give it another seed, or start it warm"
        )
    return made


def recover_declaration(member: MemberState, ensemble: Ensemble) -> Member:
    """A declaration that gives any member of the run the identity of this one, but for its name and number.

    What was left to measurement is measured again, but the number of workers stays once the member was placed: its
    weights depend on it. A member that was given more workers while it trained is declared with its first number.
    """
    record = field_defaults() | member.identity
    auto = record["auto"]
    needs = {
        name: None if name in auto else record[name]
        for name in ("cpus_per_worker", "gpus_per_worker", "memory_gb")
    }
    is_open = "workers" in auto and not member.attempts
    made = Member(
        {},
        workers="auto" if is_open else record["widened_from"] or record["workers"],
        span_nodes="auto" if record["span_nodes"] == "spread" else record["span_nodes"],
        weights=from_record(record["weights"]),
        compression=record["compression"] or "none",
        communicator=record["communicator"] or "torch",
        early_stopping=record["early_stopping"] or "none",
        averaging=record["averaging"] or "none",
        compile=record["compile"] or "none",
        callbacks=ensemble.find_own_callbacks(record["number"], record["lineage"]),
        **needs,
        **{name: record[name] for name in _KEPT},
    )
    return dataclasses.replace(
        change_member(made, member.params), epochs=(record["population"] or record)["epochs"]
    )


def _list_options(member: Member, ensemble: Ensemble) -> list[str]:
    """The options of a member's optimizer and schedule, which a hyperparameter of the same name overrides."""
    options: list[str] = []
    for option, table in ((member.optimizer, OPTIMIZERS), (member.schedule, SCHEDULES)):
        if isinstance(option, Mapping):
            options += table[option["name"]]
    recipe = ensemble.recipe
    has_default = isinstance(recipe, Recipe) and not has_own_loop(recipe) and recipe.optimizer is None
    if member.optimizer is None and has_default:
        options += OPTIMIZERS["sgd"]  # the default
    return options
