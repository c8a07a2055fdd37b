"""What members read to train: one pipeline for all, or one for each that differs at the end.

With `train=` a function of the hyperparameters, augmentation is one of them. What all the pipelines have in common
is prepared once, by the feeders; the rest runs in the members (`pipelines.common_prefix`).
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

#: Proposals of a search that stand for all of them.
DRAWS = 8


def pipeline_of(train: Pipeline | Callable[[dict[str, Any]], Pipeline], params: Mapping[str, Any]) -> Pipeline:
    """The training pipeline of a member with these hyperparameters.

    Raises:
        SpecError: the function fails, or returns something else.
    """
    if not callable(train):
        return train
    try:
        made = train(dict(params))
    except Exception as error:
        raise SpecError(f"Ensemble.train({dict(params)!r}) raised {type(error).__name__}: {error}") from error
    if not hasattr(made, "loader"):
        given = " ".join(repr(made).split())[:60]
        raise SpecError(f"Ensemble.train({dict(params)!r}) must return a pipelines.Pipeline, got {given}")
    return made


class MemberPipelines:
    """What an `Ensemble` says of the pipelines that its members read to train."""

    train: Pipeline | Callable[[dict[str, Any]], Pipeline]
    search: Search | None
    members: Sequence[Any] | None
    seed: int

    @functools.cached_property
    def samples(self) -> int:
        """Training samples of an epoch, the same for all members.

        Raises:
            SpecError: the members' pipelines cannot be made, or differ in it.
        """
        lengths = sorted({len(pipeline) for pipeline in self._trains()})
        if len(lengths) > 1:
            raise SpecError(f"Ensemble.train(params) must have as many samples for every member, has {lengths}")
        return lengths[0]

    @functools.cached_property
    def stream(self) -> Pipeline:
        """What the feeders prepare: the training pipeline, or what is common to the members'.

        Raises:
            PipelineError: they have nothing in common that can be shared.
        """
        from pipelines import common_prefix

        return common_prefix(self._trains())

    def pipeline(self, params: Mapping[str, Any]) -> Pipeline:
        """The training pipeline of a member with these hyperparameters."""
        return pipeline_of(self.train, params)

    def _trains(self) -> list[Pipeline]:
        """The members' different pipelines; of a search, those of some proposals."""
        if not callable(self.train):
            return [self.train]
        proposals = draws(self.search, self.seed) if self.search else (one.params for one in self.members or ())
        distinct = {json.dumps(params, sort_keys=True): params for params in proposals}
        return [self.pipeline(params) for params in distinct.values()]


def draws(search: Search, seed: int) -> Iterator[dict[str, Any]]:
    """Some hyperparameters out of a search's space, for what has to be known of all of them beforehand."""
    rng = random.Random(seed)
    for _ in range(DRAWS):
        yield {name: _drawn(axis, rng) for name, axis in search.space.items()}


def _drawn(axis: Any, rng: random.Random) -> Any:
    if not isinstance(axis, Dimension):
        return axis
    if axis.kind == "choice":
        return rng.choice(axis.values)
    low, high = axis.values
    if axis.kind == "integer":
        return rng.randint(low, high)
    if axis.kind == "loguniform":
        return min(high, max(low, math.exp(rng.uniform(math.log(low), math.log(high)))))
    return rng.uniform(low, high)
