"""What the fields of an `Ensemble` may be, alone and beside each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ensemble.spec.energy import Energy
from ensemble.spec.fields import ENSEMBLE_FIELDS
from ensemble.spec.functions import CALLS, check_function
from ensemble.spec.limits import check_limits
from ensemble.spec.member import Resources
from ensemble.spec.options import check_fields
from ensemble.spec.recipe import Recipe, has_own_loop
from ensemble.spec.task import LABELS
from ensemble.spec.validation import SpecError

if TYPE_CHECKING:
    from ensemble.spec.ensemble import Ensemble
    from ensemble.spec.identity import Identity

#: The splits on which every member predicts; a run has those that are declared.
PREDICTED_SPLITS = ("valid", "test")


def check_types(ensemble: Ensemble) -> None:
    """Raise SpecError for a field of a wrong type."""
    name, recipe, members, search = ensemble.name, ensemble.recipe, ensemble.members, ensemble.search
    if not isinstance(name, str) or not name.strip() or "/" in name or name[0] == ".":
        raise SpecError(f"Ensemble.name must be a plain file name, got {name!r}")
    if not callable(recipe) and not isinstance(recipe, Recipe):
        raise SpecError(f"Ensemble.recipe must be a Recipe or a function train(member), got {recipe!r}")
    if not isinstance(recipe, Recipe):
        check_function("Ensemble.recipe", recipe, CALLS["train"])
    if members is not None and (isinstance(members, str | Mapping) or not isinstance(members, Iterable)):
        raise SpecError(f"Ensemble.members must be a list of dicts or Members, got {members!r:.60}")
    if (members is None) == (search is None):
        raise SpecError("Ensemble needs exactly one of members= and search=")
    if ensemble.train is None:
        _check_without_train(ensemble)
    kinds: dict[str, type] = {"resources": Resources, "energy": Energy}
    if search is not None:
        from ensemble.spec.search import Search

        kinds["search"] = Search
    for option, kind in kinds.items():
        if not isinstance(value := getattr(ensemble, option), kind):
            raise SpecError(f"Ensemble.{option} must be {kind.__name__}(...), got {value!r:.60}")


def _check_without_train(ensemble: Ensemble) -> None:
    if not has_own_loop(ensemble.recipe):
        raise SpecError(
            "Ensemble.train is missing: a Recipe trains on batches of a pipeline: give train=Pipeline(source). "
            "Only a train function, recipe=train or Recipe(train=train), may read its own data"
        )
    declared = {
        name: getattr(ensemble, name) for name in ("out_of_fold", "drop_last", "elastic", "cache", "capacity")
    }
    weights = [getattr(one, "weights", None) for one in (ensemble, *(ensemble.members or ()))]
    for name, is_declared in {**declared, "weights": any(one not in (None, "uniform") for one in weights)}.items():
        if is_declared:
            raise SpecError(
                f"Ensemble.{name} is of members that train on a pipeline: give train=, or leave it out"
            )


def explain_no_batches(own: Identity) -> str | None:
    """Which options of a member need `Ensemble.train`; None where none does."""
    needs = own.list_step_options() + ["workers"] * (own.workers > 1 or "workers" in own.auto)
    needs += ["averaging"] * (own.averaging is not None)  # of weights after steps, which the run does not see
    options = ", ".join(f"{name}=" for name in needs)
    return f"{options}: only with a pipeline to train on (Ensemble.train); leave it out" if needs else None


def check_pipelines(ensemble: Ensemble) -> None:
    """Raise SpecError for a split that is no pipeline, or draws where it must not."""
    for name in ("train", *PREDICTED_SPLITS):
        value = getattr(ensemble, name)
        stage = getattr(value, "random_stage", None)
        if name != "train" and stage is not None:
            raise SpecError(
                f"Ensemble.{name} draws random numbers in its stage {stage.name}, but it is prepared once "
                "for all members and epochs: use random stages only in train="
            )
        if name != "train" and (order := getattr(value, "sampling", None)) is not None:
            raise SpecError(
                f"Ensemble.{name} draws its records by {order!r}, but must have each once: use sampling= only "
                "in train="
            )
        if value is not None and not hasattr(value, "loader") and not (name == "train" and callable(value)):
            function = " or a function train(params) of one" if name == "train" else ""
            hint = ", a source: write Pipeline(source)" if hasattr(value, "where") else ""
            raise SpecError(f"Ensemble.{name} must be a pipelines.Pipeline{function}, got {value!r}{hint}")


def check_values(ensemble: Ensemble) -> None:
    """Raise SpecError for a value that is invalid by itself, or beside another."""
    check_fields(ensemble, ENSEMBLE_FIELDS)
    check_limits("Ensemble.limits", ensemble.limits)
    task = getattr(ensemble.recipe, "known_task", None)
    if ensemble.thresholds is not None and task is not None and task.kind not in LABELS:
        raise SpecError(f"Ensemble.thresholds are for classes and labels, not for the task {task.kind}")
    if ensemble.cache_bytes is not None and ensemble.cache is None:
        raise SpecError("Ensemble.cache_bytes is given without a cache: give cache='memory' or 'disk' too")
    if (ensemble.cache == "disk") != (ensemble.cache_dir is not None):
        raise SpecError("Ensemble.cache_dir is needed with cache='disk', and only with that")
    if ensemble.cache_dir_bytes is not None and ensemble.cache_dir is None:
        raise SpecError("Ensemble.cache_dir_bytes is given without cache_dir")
    if ensemble.verify_sharing is not False and ensemble.verify_sharing not in ("alone", "fail"):
        raise SpecError(
            f"Ensemble.verify_sharing must be 'alone', 'fail' or False, got {ensemble.verify_sharing!r}"
        )


def check_ensemble(where: str, declared: object) -> None:
    """Raise SpecError for what is no `Ensemble`, such as the function that makes one, and for a default device."""
    from ensemble.spec.ensemble import Ensemble
    from pipelines.environment.library_settings import check_default_device
    from pipelines.errors import PipelineError

    if not isinstance(declared, Ensemble):
        call = ": call it, and give what it returns" if callable(declared) else ""
        raise SpecError(f"{where}() takes an Ensemble, got {type(declared).__name__}{call}")
    if declared.search is not None and declared.valid is None and not has_own_loop(declared.recipe):
        raise SpecError(f"{where}(): trials are ranked on the validation split: give Ensemble(valid=...)")
    try:
        check_default_device()
    except PipelineError as error:
        raise SpecError(str(error)) from None
