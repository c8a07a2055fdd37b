"""Weights of the training samples for each member: a bootstrap sample of its own, all folds but one, or by class.

Members with different weights still read one stream: a sample is prepared once, and each member leaves those of
weight 0 out of its batches, and multiplies losses of others by its own weights (`pipelines.weights`). This makes
bagging (Breiman 1996) and cross-validated committees (Parmanto, Munro and Doyle 1996).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ensemble.spec.validation import SpecError, check_choice, check_number, option_class, unknown_name

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from pipelines.sources import Source

#: Of `Folds`, what names a field of the records.
FOLD_FIELDS = ("stratify", "group", "assigned", "by")
WEIGHTINGS = ("balanced", "bootstrap", "uniform")


@option_class
@dataclass(frozen=True)
class Bootstrap:
    """Each member learns from a bootstrap sample of its own: Poisson(1) counts of every sample.

    Attributes:
        seed: the seed of the bootstrap sample; None takes the ensemble's seed + the member's number.
    """

    seed: int | None = None

    def __post_init__(self) -> None:
        check_number("Bootstrap.seed", self.seed, low=0, integer=True, optional=True)

    def as_record(self, number: int, seed: int, samples: int) -> dict[str, Any]:
        """What the identity of a member records, as JSON values; see the function `as_record`."""
        return {"kind": "bootstrap", "seed": seed + number if self.seed is None else self.seed}


@option_class
@dataclass(frozen=True)
class Folds:
    """Each member learns from all but one of k folds of the training samples; member i leaves out fold i mod k.

    A sample that is left out is in none of the member's batches, so that any training loop learns from the others.

    Attributes:
        k: number of folds, at least 2.
        held_out: the fold that is left out; None takes the member's number mod k.
        seed: the seed of the partition into folds, the same for all members; None takes the ensemble's.
        stratify: a field of the training records: each fold has its share of every class in it.
        group: a field of the training records: those with equal values (a patient's) are in one fold.
        assigned: a field of the training records with the fold of each, such as a column of a file of splits. It
            must have k different values; fold j is the j-th of them in sorted order.
        by: a field of the training records, times: fold j is the j-th of k equal blocks in their order, and a
            member learns only from what is before its block, as in scikit-learn's `TimeSeriesSplit`.
        gap: with `by`: how many samples directly before the block are left out, too.
        repeats: number of partitions, each with the next seed: members 0 ... k - 1 leave out the folds of the
            first, the next k those of the second.
    """

    k: int
    held_out: int | None = None
    seed: int | None = None
    stratify: str | None = None
    group: str | None = None
    assigned: str | None = None
    by: str | None = None
    gap: int = 0
    repeats: int = 1

    def __post_init__(self) -> None:
        check_number("Folds.k", self.k, low=2, integer=True)
        check_number("Folds.seed", self.seed, low=0, integer=True, optional=True)
        check_number("Folds.held_out", self.held_out, low=0, integer=True, optional=True)
        if self.held_out is not None and self.held_out >= self.k:
            raise SpecError(f"Folds.held_out must be below k, which is {self.k}, got {self.held_out}")
        check_number("Folds.gap", self.gap, low=0, integer=True)
        check_number("Folds.repeats", self.repeats, low=1, integer=True)
        if self.by is None and self.gap:
            raise SpecError("Folds.gap is between blocks in time: give by=, the field of the times")
        if self.by is not None and (self.stratify is not None or self.group is not None or self.repeats > 1):
            raise SpecError("Folds.by= has one partition, by time alone: leave stratify=, group= and repeats= out")
        if self.held_out is not None and self.repeats > 1:
            raise SpecError("Folds.held_out names a fold of one partition: leave repeats= out, and give its seed=")
        if self.assigned is not None and (self.repeats > 1 or len(self.named_fields) > 1 or self.seed is not None):
            raise SpecError(
                "Folds.assigned= is the partition: leave stratify=, group=, by=, seed= and repeats= out"
            )
        for name, value in self.named_fields.items():
            if not isinstance(value, str):
                raise SpecError(f"Folds.{name} must be the name of a field of the records, got {value!r:.60}")

    def as_record(self, number: int, seed: int, samples: int) -> dict[str, Any]:
        """What the identity of a member records, as JSON values; see the function `as_record`."""
        if self.k > samples:
            raise SpecError(f"Folds.k must be at most the number of training samples, {samples}, got {self.k}")
        if self.by is not None and samples - samples // (self.k + 1) * self.k <= self.gap:
            raise SpecError(f"Folds: {samples} samples leave none before the first of {self.k} blocks and its gap")
        held_out = number % self.k if self.held_out is None else self.held_out
        repeat = number // self.k % self.repeats
        return {
            "kind": "fold",
            "k": self.k,
            "held_out": held_out,
            "seed": (seed if self.seed is None else self.seed) + repeat,
            **self.named_fields,
            **({"gap": self.gap} if self.gap else {}),
        }

    @property
    def members(self) -> int:
        """Number of members that leave out each fold of each partition once."""
        return self.k * self.repeats

    def check_fields(self, fields: Sequence[str]) -> None:
        """Raise SpecError for a field that the training records do not have."""
        for name, field in self.named_fields.items():
            if field not in fields:
                raise SpecError(unknown_name(f"Folds.{name}: no field of the training records is", field, fields))

    @property
    def named_fields(self) -> dict[str, str]:
        """Which field of the training records each argument names that is given."""
        return {name: value for name in FOLD_FIELDS if (value := getattr(self, name)) is not None}


@option_class
@dataclass(frozen=True)
class ClassWeights:
    """Each sample counts by its class, so that rare ones are not lost among frequent ones.

    Attributes:
        of: "balanced": all classes have the same sum of weights; or class -> weight, by its name or its label; the
            ratios count, as weights are scaled to a mean of 1.
        field: a field of the training records with one class in each; None: that of the target.
    """

    of: str | Mapping[Any, float] = "balanced"
    field: str | None = None

    def __post_init__(self) -> None:
        if not (self.of == "balanced" or (isinstance(self.of, Mapping) and self.of)):
            raise SpecError(f"ClassWeights.of must be 'balanced' or class -> weight, got {self.of!r:.60}")
        for name, weight in self.of.items() if isinstance(self.of, Mapping) else ():
            if not isinstance(name, str | int):
                raise SpecError(f"ClassWeights.of: classes are texts or integers, got {name!r:.60}")
            check_number(f"ClassWeights.of[{name!r}]", weight, low=0)
        if not isinstance(self.field, str | None):
            raise SpecError(f"ClassWeights.field must be the name of a field, got {self.field!r:.60}")

    def as_record(self, number: int, seed: int, samples: int) -> dict[str, Any]:
        """What the identity of a member records, as JSON values; see the function `as_record`."""
        of = self.of if isinstance(self.of, str) else [[name, float(weight)] for name, weight in self.of.items()]
        return {"kind": "classes", "of": of, "field": self.field}


Weighting = str | Bootstrap | Folds | ClassWeights
_BY_NAME: Mapping[str, Bootstrap | ClassWeights] = {"bootstrap": Bootstrap(), "balanced": ClassWeights()}


def check_weighting(where: str, value: object) -> None:
    """Raise SpecError for a value that is no weighting."""
    if isinstance(value, str):
        check_choice(where, value, WEIGHTINGS)
    elif not isinstance(value, Bootstrap | Folds | ClassWeights):
        names = ", ".join(map(repr, WEIGHTINGS))
        raise SpecError(
            f"{where} must be {names}, Bootstrap(...), Folds(...) or ClassWeights(...), got {value!r:.60}"
        )


def as_record(weighting: Weighting, number: int, seed: int, samples: int) -> dict[str, Any] | None:
    """What the identity of a member records of its weights; None where every sample has weight 1.

    Args:
        weighting: as declared.
        number: the member's number.
        seed: the ensemble's seed.
        samples: number of training samples.

    Raises:
        SpecError: there are more folds than samples.
    """
    if weighting == "uniform":
        return None
    weighting = _BY_NAME[weighting] if isinstance(weighting, str) else weighting
    return weighting.as_record(number, seed, samples)


def needs_weighing(record: Mapping[str, Any] | None) -> bool:
    """Whether losses have to be multiplied by weights; folds only choose samples."""
    return record is not None and record["kind"] != "fold"


def from_record(record: Mapping[str, Any] | None) -> Weighting:
    """The weighting that gives any member this record (see `as_record`), whatever its number."""
    if record is None:
        return "uniform"
    if record["kind"] == "bootstrap":
        return Bootstrap(seed=record["seed"])
    if record["kind"] == "classes":
        of = record["of"]
        return ClassWeights(of if isinstance(of, str) else dict(of), record["field"])
    return Folds(**{name: value for name, value in record.items() if name not in ("kind", "out_of_fold")})


def make_weight_function(record: dict[str, Any] | None, source: Source) -> Any:
    """The weights of an identity's record as a function: indices [b] -> weights [b]; None where all are 1.

    Args:
        record: what `as_record` returned.
        source: of the training records; a field that the weights depend on is read from it.

    Returns:
        The function; with folds it has a method `is_held_out(indices) -> bool [b]`.
    """
    from pipelines import weights

    if record is None:
        return None
    if record["kind"] == "bootstrap":
        return weights.bootstrap(record["seed"])
    if record["kind"] == "classes":
        of: Any = record["of"]
        return weights.assigned(source.weigh_classes(record["field"], of if isinstance(of, str) else dict(of)))
    if "by" in record:
        places = source.rank(record["by"])
        return weights.expanding_window(places, record["k"], record["held_out"], record.get("gap", 0))
    if fields := list_fold_fields(record):
        folds = source.number_folds(record["k"], record["seed"], **fields)
        return weights.assigned_fold(folds, record["held_out"])
    return weights.fold(len(source), record["k"], record["held_out"], record["seed"])


def list_fold_fields(record: Mapping[str, Any]) -> dict[str, str]:
    """The arguments of `Source.number_folds` in the identity's record of a member with folds."""
    return {name: record[name] for name in ("stratify", "group", "assigned") if name in record}


def list_held_out(record: dict[str, Any] | None, source: Source) -> npt.NDArray[np.bool_]:
    """Whether each record of the training source is of the fold that a member with folds leaves out, bool [n]."""
    import numpy as np

    held_out: npt.NDArray[np.bool_] = make_weight_function(record, source).is_held_out(np.arange(len(source)))
    return held_out
