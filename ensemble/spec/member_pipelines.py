"""The members' training pipelines: one for all, or one for each member with stages of its own at the end.

Where `train=` is a function of the hyperparameters, each member has its own pipeline. The stages that all
pipelines start with run once, in the feeders; the others run in the members (`pipelines.common_prefix`).
"""

from __future__ import annotations

import functools
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ensemble.spec.search_space import Dimension, Search
from ensemble.spec.validation import SpecError

if TYPE_CHECKING:
    from pipelines import Pipeline

#: Number of random points of a search space whose pipelines are compared, in place of those of all points.
SAMPLE_COUNT = 8


def make_pipeline(train: Pipeline | Callable[[dict[str, Any]], Pipeline], params: Mapping[str, Any]) -> Pipeline:
    """The training pipeline of a member with these hyperparameters.

    Raises:
        SpecError: the function `train` fails, or does not return a pipeline.
    """
    if not callable(train):
        return train
    try:
        pipeline = train(dict(params))
    except Exception as error:
        raise SpecError(f"Ensemble.train({dict(params)!r}) raised {type(error).__name__}: {error}") from error
    if not hasattr(pipeline, "loader"):
        given = " ".join(repr(pipeline).split())[:60]
        raise SpecError(f"Ensemble.train({dict(params)!r}) must return a pipelines.Pipeline, got {given}")
    return pipeline


class MemberPipelines:
    """The part of an `Ensemble` that knows its members' training pipelines."""

    train: Pipeline | Callable[[dict[str, Any]], Pipeline]
    search: Search | None
    members: Sequence[Any] | None
    seed: int

    @functools.cached_property
    def records(self) -> int:
        """Number of training records, which with `Pipeline(sampling=)` is not that of the samples of an epoch.

        Raises:
            SpecError: the members' pipelines cannot be made, or differ in it.
        """
        pipelines = self._distinct_pipelines()
        if all(getattr(pipeline, "sampling", None) is None for pipeline in pipelines):
            return self.samples
        counts = sorted({len(pipeline.source) for pipeline in pipelines})
        if len(counts) > 1:
            raise SpecError(f"Ensemble.train(params) must have as many records for every member, has {counts}")
        return counts[0]

    @functools.cached_property
    def record_fields(self) -> tuple[str, ...]:
        """Fields of the first training record, as its source gives it."""
        return tuple(self._distinct_pipelines()[0].source[0])

    @functools.cached_property
    def samples(self) -> int:
        """Number of training samples of an epoch, the same for all members.

        Raises:
            SpecError: the members' pipelines cannot be made, or differ in length.
        """
        lengths = sorted({len(pipeline) for pipeline in self._distinct_pipelines()})
        if len(lengths) > 1:
            raise SpecError(f"Ensemble.train(params) must have as many samples for every member, has {lengths}")
        return lengths[0]

    @functools.cached_property
    def stream(self) -> Pipeline:
        """What the feeders prepare: the training pipeline, or the common beginning of the members' pipelines.

        Raises:
            PipelineError: the members' pipelines have no common beginning.
        """
        from pipelines import common_prefix

        return common_prefix(self._distinct_pipelines())

    def pipeline(self, params: Mapping[str, Any]) -> Pipeline:
        """The training pipeline of a member with these hyperparameters."""
        return make_pipeline(self.train, params)

    def _distinct_pipelines(self) -> list[Pipeline]:
        """The members' pipelines without repetitions; of a search, those of a few points of its space."""
        if not callable(self.train):
            return [self.train]
        proposals = (
            sample_space(self.search, self.seed) if self.search else (one.params for one in self.members or ())
        )
        distinct = {json.dumps(params, sort_keys=True): params for params in proposals}
        return [self.pipeline(params) for params in distinct.values()]


def sample_space(search: Search, seed: int) -> Iterator[dict[str, Any]]:
    """`SAMPLE_COUNT` random points of a search's space."""
    rng = random.Random(seed)
    for _ in range(SAMPLE_COUNT):
        yield {name: _sample_dimension(dimension, rng) for name, dimension in search.space.items()}


def _sample_dimension(dimension: Any, rng: random.Random) -> Any:
    if not isinstance(dimension, Dimension):
        return dimension
    if dimension.kind == "choice":
        return rng.choice(dimension.values)
    low, high = dimension.values
    if dimension.kind == "integer":
        return rng.randint(low, high)
    if dimension.kind == "loguniform":
        return min(high, max(low, math.exp(rng.uniform(math.log(low), math.log(high)))))
    return rng.uniform(low, high)
