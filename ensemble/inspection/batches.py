"""Describes the data of an ensemble: one batch that was really prepared, and what members prepare in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ensemble.spec import Ensemble, Identity, Recipe
from ensemble.spec.sample_weights import make_weight_function

Table = list[dict[str, Any]]
MOST_LABELS = 1000


def describe_first_batch(ensemble: Ensemble, identity: Identity) -> tuple[Table, dict[int, int] | None]:
    """Prepare a member's first batch, as its training does.

    Returns:
        A row for each field (`name`, `shape`, `dtype`, `min`, `mean`, `max`), and how often each label is there.
        Of several 0s and 1s a sample that is how many samples have each; None where the target is no integer.

    Raises:
        PipelineError: a sample cannot be prepared.
    """
    pipeline = ensemble.pipeline(identity.params)
    weights = make_weight_function(identity.weights, pipeline.source)
    loader = pipeline.loader(min(identity.batch_size, len(pipeline)), 1, weights=weights)
    try:
        batch = next(iter(loader))
        rows = [_describe_field(name, tensor) for name, tensor in batch.items() if name != "index"]
        return rows, _count_labels(batch.get(_find_target(ensemble)))
    finally:
        loader.close()


def _find_target(ensemble: Ensemble) -> str:
    return ensemble.recipe.target if isinstance(ensemble.recipe, Recipe) else "label"


def _describe_field(name: str, tensor: Any) -> dict[str, Any]:
    row = {"name": name, "shape": list(tensor.shape[1:]), "dtype": str(tensor.dtype).removeprefix("torch.")}
    values = tensor.double() if tensor.numel() else None
    figures = {} if values is None else {"min": values.min(), "mean": values.mean(), "max": values.max()}
    return row | {each: float(figures[each]) if each in figures else None for each in ("min", "mean", "max")}


def _count_labels(target: Any) -> dict[int, int] | None:
    if target is None or target.dtype.is_floating_point:
        return None
    if target.ndim == 2 and target.shape[1] > 1 and bool(((target == 0) | (target == 1)).all()):
        return dict(enumerate(target.sum(dim=0).tolist()))
    labels, counts = target.flatten().unique(return_counts=True)
    if len(labels) > MOST_LABELS:
        return None
    return dict(zip(map(int, labels.tolist()), counts.tolist(), strict=True))


def describe_pipelines(ensemble: Ensemble, identities: Sequence[Identity], unshared: str | None) -> dict[str, Any]:
    """What is prepared once for all members, and what each does itself.

    Args:
        unshared: why nothing is shared; None where it is.
    """
    pipelines = {identity.member: ensemble.pipeline(identity.params) for identity in identities}
    first = next(iter(pipelines.values()))
    shared = [] if unshared is not None else [stage.name for stage in ensemble.stream.stages]
    own: dict[tuple[str, ...], list[str]] = {}
    for member, pipeline in pipelines.items():
        stages = tuple(stage.name for stage in pipeline.stages[len(shared) :])
        own.setdefault(stages, []).append(member)
    return {
        "source": repr(first.source) + ("" if first.sampling is None else f", {first.sampling!r}"),
        "shared": shared,
        "unshared": unshared,
        "own": [{"members": members, "stages": list(stages)} for stages, members in own.items() if stages],
        "fingerprint": first.fingerprint if len(set(pipelines.values())) == 1 else None,
        "why_unsure": next((why for each in pipelines.values() if (why := each.why_unsure)), None),
    }
