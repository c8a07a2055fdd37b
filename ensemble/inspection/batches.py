"""Describes the data of an ensemble: one batch that was really prepared, and what members prepare in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ensemble.spec import Ensemble, Identity, Recipe
from ensemble.spec.sample_weights import make_weight_function
from pipelines.errors import SampleError
from pipelines.loader.ragged import find_tensors
from pipelines.loader.resident import StreamedSet

if TYPE_CHECKING:
    import torch

    from pipelines import Pipeline

Table = list[dict[str, Any]]
MOST_LABELS = 1000
FIGURES = ("min", "mean", "max", "not_finite")


def describe_first_batch(ensemble: Ensemble, identity: Identity) -> tuple[Table, dict[int, int] | None]:
    """Prepare a member's first batch, as its training does.

    Returns:
        A row for each field (`name`; `shape` of a sample, None for an axis that differs between samples; `dtype`;
        `min`, `mean`, `max` of the finite values; `not_finite`, how many are NaN or infinite), and how often each
        label is there.
        Of several 0s and 1s a sample that is how many samples have each; None where the target is no integer.

    Raises:
        PipelineError: a sample cannot be prepared.
    """
    pipeline = ensemble.pipeline(identity.params)
    weights = make_weight_function(identity.weights, pipeline.source)
    loader = pipeline.loader(min(identity.batch_size, len(pipeline)), 1, weights=weights)
    try:
        batch = next(iter(loader))
        rows = [row for name, value in batch.items() if name != "index" for row in _describe_field(name, value)]
        return rows, _count_labels(batch.get(_find_target(ensemble)))
    finally:
        loader.close()


def find_bad_records(pipeline: Pipeline) -> list[SampleError]:
    """Prepare the samples of a pipeline's first epoch; returns the errors of those that cannot be prepared."""
    errors: list[SampleError] = []
    for _ in StreamedSet(pipeline).try_records(errors):
        pass
    return errors


def _find_target(ensemble: Ensemble) -> str:
    return ensemble.recipe.target if isinstance(ensemble.recipe, Recipe) else "label"


def _describe_field(name: str, value: Any) -> Table:
    """Its rows; a field of several fields has one for each of them."""
    import torch

    if isinstance(value, Mapping):
        return [row for key, each in value.items() for row in _describe_field(f"{name}.{key}", each)]
    if isinstance(value, tuple):
        return [row for number, each in enumerate(value) for row in _describe_field(f"{name}.{number}", each)]
    if isinstance(value, torch.Tensor):
        return [_describe_values(name, list(value.shape[1:]), [value])]
    tensors = find_tensors(value)
    if tensors and len(tensors) == len(value):  # an array of its own length for each sample
        shapes = [tuple(tensor.shape) for tensor in tensors]
        axes = zip(*shapes, strict=True) if len({len(shape) for shape in shapes}) == 1 else ()
        return [_describe_values(name, [axis[0] if len(set(axis)) == 1 else None for axis in axes], tensors)]
    kinds = sorted({type(each).__name__ for each in value}) if isinstance(value, list) else [type(value).__name__]
    return [{"name": name, "shape": [], "dtype": " or ".join(kinds), **dict.fromkeys(FIGURES)}]


def _describe_values(name: str, shape: list[int | None], tensors: list[torch.Tensor]) -> dict[str, Any]:
    import torch

    row: dict[str, Any] = {"name": name, "shape": shape, "dtype": str(tensors[0].dtype).removeprefix("torch.")}
    if tensors[0].is_complex():
        return row | dict.fromkeys(FIGURES)
    values = torch.cat([tensor.flatten().double() for tensor in tensors])
    finite = values[values.isfinite()]
    row |= {"not_finite": len(values) - len(finite)}
    figures = (finite.min(), finite.mean(), finite.max()) if len(finite) else (None, None, None)
    return row | {
        each: None if figure is None else float(figure)
        for each, figure in zip(("min", "mean", "max"), figures, strict=True)
    }


def _count_labels(target: Any) -> dict[int, int] | None:
    import torch

    if not isinstance(target, torch.Tensor) or target.dtype.is_floating_point or target.is_complex():
        return None
    if target.ndim == 2 and target.shape[1] > 1 and bool(((target == 0) | (target == 1)).all()):
        return dict(enumerate(target.sum(dim=0).tolist()))
    labels, counts = torch.unique(target.flatten(), return_counts=True)
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
        "cache": None if ensemble.cache is None or unshared is not None else _describe_cache(ensemble),
    }


def _describe_cache(ensemble: Ensemble) -> dict[str, Any]:
    """What the feeders' caches keep, and how many bytes that takes; some samples are prepared for it."""
    from pipelines.cache.content import count_cached_stages, estimate_bytes
    from pipelines.cache.manager import find_limit

    assert ensemble.cache is not None
    pipeline, options = ensemble.stream, (ensemble.cache_bytes, ensemble.cache_dir, ensemble.cache_dir_bytes)
    stages = count_cached_stages(pipeline, ensemble.cache_format)
    return {
        "where": ensemble.cache,
        "stages": [stage.name for stage in pipeline.stages[:stages]],
        "expected_bytes": estimate_bytes(pipeline, stages),
        "limit": find_limit(ensemble.cache, *options),
    }
