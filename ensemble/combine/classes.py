"""Finds out whether a run's members are classifiers: only class probabilities can be combined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ensemble.spec import Recipe

if TYPE_CHECKING:
    from ensemble.spec import Ensemble
    from ensemble.store import RunDir, RunState

HINT = "declare Recipe(target=...), or Recipe(predict=...) that gives probabilities [b, classes]"


def explain_missing_classes(
    ensemble: Ensemble, run: RunDir, state: RunState, members: Sequence[str]
) -> str | None:
    """Returns why the outputs of these members do not count as class scores; None where they do.

    What says so: `Recipe.predict` (it gives probabilities, by its declaration), the classes that were saved with
    their predictions, or the data, where the target is one integer a sample.
    """
    from ensemble.store import read_predictions
    from ensemble.store.predictions import list_splits

    recipe = ensemble.recipe
    if not isinstance(recipe, Recipe) or recipe.predict is not None:
        return None
    for split in ("valid", "test"):
        for member in members:
            is_saved = split in list_splits(run.predictions(member))
            if is_saved and read_predictions(run, state.members[member], split).target is not None:
                return None
    try:
        fields = read_fields(ensemble, state.members[members[0]].params)
    except Exception as error:  # whatever a user's source or stage raises
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return f"nothing says that their outputs are classes, and the data cannot be looked at ({reason}); {HINT}"
    return explain_missing_class(recipe.target, fields)


def explain_missing_class(target: str, fields: Mapping[str, Any]) -> str | None:
    """Returns why this field does not hold one class for each sample; None where it does."""
    field = fields.get(target)
    if field is None:
        has = f"the data have no field {target!r} (they have {', '.join(sorted(fields))})"
        return f"nothing says that their outputs are classes: {has}; {HINT}"
    if field.shape == () and field.dtype.startswith(("int", "uint", "bool")):
        return None
    what = f"a {field.dtype}" if field.shape == () else f"{list(field.shape)} values ({field.dtype})"
    return f"they are no classifiers: the target {target!r} is {what} a sample, not one class; {HINT}"


def read_fields(ensemble: Ensemble, params: Mapping[str, Any]) -> Mapping[str, Any]:
    """Shapes and dtypes of the fields that models see, of the validation set where there is one.

    Raises:
        Exception: whatever preparing a sample may raise; the data may be elsewhere.
    """
    pipeline = ensemble.valid if ensemble.valid is not None else ensemble.pipeline(params)
    return pipeline.fields
