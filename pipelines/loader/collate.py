"""Functions that a reader applies to each of its batches: packing, padding, mixing of samples.

A collate function computes in the reader, after the batch has arrived: what it returns is never shared. It is
`f(batch)` or `f(batch, rng)`, and returns a dict of whatever the model takes. `rng` is keyed by the pipeline's
seed, the stream epoch, the step and the rank, so that a batch is the same after a resume, shared or alone; outside
training it is None. The number of samples of a batch is that of its `index`, whatever the function returns.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pipelines.checks import check_function
from pipelines.errors import FieldError, ForeignRandomness, PipelineError
from pipelines.fingerprint import known_as
from pipelines.loader.batch import Batch
from pipelines.loader.ragged import take_sample
from pipelines.order.epoch_order import Generators
from pipelines.prepare.generators import (
    SEEDED,
    find_changes,
    find_draws,
    find_generators,
    find_global,
    lock_generators,
    preserve_seeded,
    read_marks,
    seed_for_sample,
)
from pipelines.samples.fields import INDEX
from pipelines.stage import has_generator_parameter

if TYPE_CHECKING:
    import torch

#: `f(batch)` or `f(batch, rng)`.
Collate = Callable[..., Any]

_WEIGHT = "weight"
# Stands where a stage's number does in the key of its generator: no pipeline has so many stages.
_PLACE = 1 << 20


class Collator:
    """Applies a collate function to the batches of one reader.

    Args:
        function: `f(batch)` or `f(batch, rng)`.
        seed: of the pipeline.
        rank: of the reader.
        weighted: whether batches have the field "weight" of a reader's sample weights, which the result keeps.

    Raises:
        PipelineError: it is no function.
    """

    def __init__(self, function: Collate, seed: int, rank: int = 0, *, weighted: bool = False) -> None:
        check_function("collate", function)
        self._function = function
        self._generators = Generators(seed)
        self._rank = rank
        self._weighted = weighted
        self._is_random = has_generator_parameter(function)
        self._own = self._find_own()
        self._has_begun = False
        self._seeded: set[str] = set()  # generators that it draws from, but seeds itself

    def __call__(self, batch: Batch, *, is_training: bool = True) -> Batch:
        """The batch that the function makes of a batch; that of a rank without samples stays as it is.

        Raises:
            PipelineError: the function fails, or returns no dict, or other samples than it got.
            ForeignRandomness: it draws from a generator that is not seeded, nor by the function itself in each
                call; of a global one, this is noticed in the main thread only.
        """
        if not len(batch[INDEX]):
            return batch
        kept = {name: batch[name].clone() for name in (INDEX, *((_WEIGHT,) if self._weighted else ()))}
        made = self._call(batch, is_training)
        if not isinstance(made, Mapping):
            raise PipelineError(
                f"{self._name} returned {type(made).__name__}, not a dict: name what it returns, "
                'such as {"image": ..., "target": ...}'
            )
        result = Batch(
            {str(name): value for name, value in made.items()},
            epoch=batch.epoch,
            step=batch.step,
            global_size=batch.global_size,
        )
        result._staging = batch._staging
        self._keep_samples(kept, result)
        return result

    def _call(self, batch: Batch, is_training: bool) -> Any:
        # Beside a main thread that trains, and draws, a change of a global generator says nothing (`DrawWatch`).
        names = SEEDED["global"] if threading.current_thread() is threading.main_thread() else ()
        if self._has_begun and not names and not self._own:
            return self._apply(batch, is_training)
        original = copy.copy(batch)
        with lock_generators():
            before = read_marks(find_global(names) | self._own)
            made = self._apply(batch, is_training)
            if not self._has_begun:  # some make their generator when they are called first
                self._own, self._has_begun = self._find_own(), True
            changed = find_changes(before, read_marks(find_global(names) | self._own)) - self._seeded
        if changed:
            self._check_draws(original, is_training, names)
            self._seeded |= changed
        return made

    def _check_draws(self, batch: Batch, is_training: bool, names: Collection[str]) -> None:
        """Call the function twice with a copy of a batch, to see from which generators it draws."""
        if drawn := find_draws(lambda: self._apply(batch.clone(), is_training), self._find_own, names):
            raise ForeignRandomness(
                f"{self._name} draws from {' and '.join(sorted(drawn))}: its batches would differ from run to run "
                "or after a resume; draw from the generator of f(batch, rng), or leave out its own seed= and use "
                'pipelines.from_samples(f, random="torch") for a function that draws from torch'
            )

    def _find_own(self) -> dict[str, Any]:
        return find_generators(self._function)

    def _apply(self, batch: Batch, is_training: bool) -> Any:
        try:
            if not self._is_random:
                return self._function(batch)
            rng = self._generators.at(batch.epoch, batch.step, _PLACE + self._rank) if is_training else None
            return self._function(batch, rng)
        except (PipelineError, KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            if isinstance(error, PipelineError) and not isinstance(error, FieldError):
                raise
            hint = (
                f"Each sample that it is given has the fields {', '.join(self._function.choose_fields(batch))}"
                if isinstance(self._function, FromSamples)
                else "It is given a Batch, a dict of tensors [b, ...]; a collate_fn for torch's DataLoader, which "
                "takes a list of samples, is collate=pipelines.from_samples(collate_fn)"
            )
            raise PipelineError(f"{self._name} failed: {type(error).__name__}: {error}. {hint}") from error

    @property
    def _name(self) -> str:
        function = getattr(self._function, "function", self._function)
        name = getattr(function, "__qualname__", None) or type(function).__qualname__
        return f"collate={name}"

    def _keep_samples(self, kept: dict[str, torch.Tensor], result: Batch) -> None:
        """Let the result have the index of the samples, and their weights in its order.

        Args:
            kept: what the batch had.
        """
        import torch

        own = kept[INDEX]
        index = result.setdefault(INDEX, own)
        is_index = isinstance(index, torch.Tensor) and index.dtype == own.dtype and index.shape == own.shape
        if not is_index or not torch.equal(index.cpu().sort().values, own.sort().values):
            raise PipelineError(
                f"{self._name} changed 'index', which must name each sample of the batch once: do not return it, "
                "and put row numbers into a field of another name"
            )
        if self._weighted:
            weight = kept[_WEIGHT].clone()
            weight[index.cpu().sort().indices] = kept[_WEIGHT][own.sort().indices]
            weights = result.setdefault(_WEIGHT, weight)
            if not isinstance(weights, torch.Tensor) or not torch.equal(weights.cpu(), weight):
                raise PipelineError(
                    f"{self._name} changed 'weight', which holds the weights= of the samples: do not return it, "
                    "and put what you compute into a field of another name"
                )


@known_as("pipelines.from_samples")
@dataclass(frozen=True)
class FromSamples:
    """See `from_samples`."""

    function: Callable[[list[Any]], Any]
    fields: tuple[str, ...] | None
    names: tuple[str, ...] | None
    random: Literal["torch", "python", "global"] | None

    def __call__(self, batch: Batch, rng: np.random.Generator | None = None) -> Any:
        """What the function returns for the samples of a batch, as a dict."""
        with preserve_seeded(SEEDED.get(self.random, frozenset())):
            if self.random is not None:
                seed_for_sample(self.random, rng or np.random.default_rng([1, *batch[INDEX].tolist()]))
            made = self.function(self._split(batch))
        if self.names is None or isinstance(made, Mapping):
            if isinstance(made, tuple | list):
                raise PipelineError(
                    f"the collate_fn returned a {type(made).__name__} of {len(made)}: name its values, "
                    'from_samples(collate_fn, names=("image", "label"))'
                )
            return made
        values = made if isinstance(made, tuple | list) else (made,)
        if len(values) != len(self.names):
            raise PipelineError(f"the collate_fn returned {len(values)} values for names={self.names!r}")
        return dict(zip(self.names, values, strict=True))

    def choose_fields(self, batch: Batch) -> Sequence[str]:
        return [name for name in batch if name not in (INDEX, _WEIGHT)] if self.fields is None else self.fields

    def _split(self, batch: Batch) -> list[Any]:
        taken = self.choose_fields(batch)
        missing = next((name for name in taken if name not in batch), None)
        if missing is not None:
            raise PipelineError(f"from_samples: the batch has no field {missing!r} (it has {', '.join(batch)})")
        rows = range(len(batch[INDEX]))
        if self.fields is not None:
            return [tuple(take_sample(batch[name], row) for name in taken) for row in rows]
        return [{name: take_sample(batch[name], row) for name in taken} for row in rows]


def from_samples(
    collate_fn: Callable[[list[Any]], Any],
    *,
    fields: Sequence[str] | None = None,
    names: Sequence[str] | None = None,
    random: Literal["torch", "python", "global"] | None = None,
) -> FromSamples:
    """Adapts a `collate_fn` of torch's DataLoader, which takes a list of samples, as a `collate=` function.

    Each sample is a dict: tensors without the batch axis, texts as str, nested fields as they are, ragged ones as
    one tensor each. `index` and sample weights are not among them.

    Args:
        collate_fn: returns a dict, as `transformers.DataCollatorWithPadding` and `default_collate` of dicts do.
        fields: hand each sample as a tuple of these fields instead, as a torch Dataset of tuples gives it.
        names: the names of the values, if the function returns a tuple.
        random: "torch" if it draws from torch's global generator (`DataCollatorForLanguageModeling`), "python" if
            from Python's or numpy's, "global" if from any of them: they are then seeded for each batch, and
            restored. Outside training, the samples of a batch are the seed.

    Returns:
        A function for `collate=` of loaders and of a `Recipe`.

    Raises:
        PipelineError: an argument is invalid.

    Example:
        >>> collate = from_samples(lambda samples: {"text": [each["text"] for each in samples]})
    """
    check_function("from_samples: collate_fn", collate_fn)
    if collate_fn is None:
        raise PipelineError("from_samples takes a function of a list of samples, got None")
    if random is not None and random not in SEEDED:
        raise PipelineError(
            f"from_samples: random must be {', '.join(map(repr, SEEDED))} or left out, got {random!r}"
        )
    tuples = [
        None if names_of is None else (names_of,) if isinstance(names_of, str) else tuple(names_of)
        for names_of in (fields, names)
    ]
    return FromSamples(collate_fn, tuples[0], tuples[1], random)
