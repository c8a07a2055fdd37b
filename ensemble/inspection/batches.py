"""Describes the data of an ensemble: one batch that was really prepared, and what members prepare in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ensemble.spec import Ensemble, Identity
from ensemble.spec.sample_weights import make_weight_function
from pipelines.errors import SampleError
from pipelines.loader.resident import StreamedSet

if TYPE_CHECKING:
    from pipelines import Pipeline

Table = list[dict[str, Any]]
FIGURES = ("min", "mean", "max")


def describe_first_batch(ensemble: Ensemble, identity: Identity) -> Table:
    """Prepare a member's first batch, as its training does.

    Returns:
        A row for each field (`name`; `shape` of a sample; `dtype`; `min`, `mean`, `max` of the finite values).

    Raises:
        PipelineError: a sample cannot be prepared.
    """
    pipeline = ensemble.pipeline(identity.params)
    weights = make_weight_function(identity.weights, pipeline.source)
    loader = pipeline.loader(min(identity.batch_size, len(pipeline)), 1, weights=weights)
    try:
        batch = next(iter(loader))
        return [row for name, value in batch.items() if name != "index" for row in _describe_field(name, value)]
    finally:
        loader.close()


def find_bad_records(pipeline: Pipeline) -> list[SampleError]:
    """Prepare the samples of a pipeline's first epoch; returns the errors of those that cannot be prepared."""
    errors: list[SampleError] = []
    for _ in StreamedSet(pipeline).try_records(errors):
        pass
    return errors


def _describe_field(name: str, value: Any) -> Table:
    """Its rows; a field of several fields has one for each of them."""
    import torch

    if isinstance(value, Mapping | tuple):
        parts = value.items() if isinstance(value, Mapping) else enumerate(value)
        return [row for key, part in parts for row in _describe_field(f"{name}.{key}", part)]
    if isinstance(value, torch.Tensor):
        row = {"name": name, "shape": list(value.shape[1:]), "dtype": str(value.dtype).removeprefix("torch.")}
        finite = value.flatten()[value.flatten().isfinite()]
        if value.is_complex() or not len(finite):
            return [row | dict.fromkeys(FIGURES)]
        low, high = finite.aminmax()
        return [row | {"min": float(low), "mean": float(finite.double().mean()), "max": float(high)}]
    kinds = sorted({type(one).__name__ for one in value}) if isinstance(value, list) else [type(value).__name__]
    return [{"name": name, "shape": [None], "dtype": " or ".join(kinds), **dict.fromkeys(FIGURES)}]


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
        names = tuple(stage.name for stage in pipeline.stages[len(shared) :])
        own.setdefault(names, []).append(member)
    return {
        "source": repr(first.source) + ("" if first.sampling is None else f", {first.sampling!r}"),
        "shared": shared,
        "unshared": unshared,
        "own": [{"members": members, "stages": list(stages)} for stages, members in own.items() if stages],
        "fingerprint": first.fingerprint if len(set(pipelines.values())) == 1 else None,
        "why_unsure": next((why for pipe in pipelines.values() if (why := pipe.why_unsure)), None),
    }
