"""Cross-validation: which members leave out what, and which of them are one configuration.

A **configuration** is what is cross-validated: hyperparameters and training options. Members with equal ones, but
another seed or another fold, are of one configuration.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from ensemble.spec.identity import Identity
from ensemble.spec.member import Member, as_member
from ensemble.spec.sample_weights import Folds, Weighting
from ensemble.spec.validation import SpecError

if TYPE_CHECKING:
    from ensemble.spec.ensemble import Ensemble
    from pipelines import Pipeline

#: Fields of an identity by which members of one configuration may differ.
_OWN = {"member", "number", "seed", "weights", "lineage", "first_epoch", "auto", "added", "outside"}
_OWN |= {"workers", "threads", "cpus_per_worker", "gpus_per_worker", "memory_gb", "widened_from", "span_nodes"}
_OWN |= {"nodes"}


def cross_validated(members: Sequence[Member | Mapping[str, Any]], folds: Folds) -> list[Member]:
    """The members that cross-validate configurations: for each as many as there are folds, one configuration
    after another.

    Args:
        members: the configurations, each a dict of hyperparameters or a `Member`.
        folds: what they leave out; without `held_out`.

    Returns:
        `len(members) * folds.members` members, for `Ensemble(members=..., out_of_fold=True)`.

    Raises:
        SpecError: `folds` names one fold, or a configuration is neither a dict nor a `Member`.

    Example:
        >>> len(cross_validated([{"lr": 0.1}, {"lr": 0.01}], Folds(5, repeats=2)))
        20
    """
    if not isinstance(folds, Folds) or folds.held_out is not None:
        raise SpecError(f"cross_validated() needs Folds(k) without held_out=, got {folds!r:.80}")
    configurations = [as_member(number, member) for number, member in enumerate(members)]
    return [replace(member, weights=folds) for member in configurations for _ in range(folds.members)]


def find_configuration(identity: Mapping[str, Any]) -> str:
    """What members of one configuration have in common, as text; `identity`: its fields."""
    return json.dumps({name: value for name, value in identity.items() if name not in _OWN}, sort_keys=True)


def find_partition(weights: Mapping[str, Any]) -> str:
    """The partition into folds of which a member leaves one out, as text; `weights`: of its identity."""
    return json.dumps({name: value for name, value in weights.items() if name != "held_out"}, sort_keys=True)


def is_out_of_fold(weights: Mapping[str, Any] | None) -> bool:
    """Whether the member of an identity with these `weights` is evaluated on what it has not learnt from."""
    return bool((weights or {}).get("out_of_fold"))


def mark_out_of_fold(weights: dict[str, Any] | None) -> dict[str, Any]:
    """The `weights` of the identity of a member that is evaluated on the fold that it leaves out.

    Raises:
        SpecError: it leaves out none.
    """
    if weights is None or weights["kind"] != "fold":
        raise SpecError(
            "Ensemble.out_of_fold evaluates members on the fold that they leave out: give weights=Folds(k)"
        )
    return {**weights, "out_of_fold": True}


def list_fold_notices(ensemble: Ensemble) -> list[str]:
    """Say how many samples of a batch are left for members that leave out a fold, a sentence for each size."""
    sizes = set[tuple[int, int]]()
    for member in ensemble.members or ():
        weights = getattr(member, "weights", None) or ensemble.weights
        if isinstance(weights, Folds):
            sizes.add((weights.k, getattr(member, "batch_size", None) or ensemble.batch_size))
    return [
        f"Folds({k}): of a batch of {size} a member trains on {size * (k - 1) / k:g} samples on average, the "
        "others are of the fold that it leaves out"
        for k, size in sorted(sizes)
    ]


def make_evaluated(train: Any, valid: Pipeline | None, search: Any) -> Pipeline:
    """The pipeline `valid` of an ensemble with `out_of_fold`.

    Raises:
        SpecError: it must be declared, or a search proposes the members.
    """
    if search is not None:
        raise SpecError(
            "Ensemble.out_of_fold needs members=: the trials of a search each leave out another fold, and their "
            "scores would be of different samples"
        )
    if valid is not None:
        return valid
    why = None
    if callable(train) or not hasattr(train, "without_randomness"):
        why = "is not a single pipeline"
    elif (stage := train.random_stage) is not None:
        why = f"draws random numbers in its stage {stage.name}"
    elif train.sampling is not None:
        why = f"draws its records by {train.sampling!r}"
    if why is not None:
        raise SpecError(
            "Ensemble.out_of_fold needs valid=, a pipeline of the source of train= without random stages or "
            f"sampling=: train= {why}"
        )
    evaluated: Pipeline = train.without_randomness()
    return evaluated


def check_folds(identities: Sequence[Identity], weightings: Sequence[Weighting]) -> None:
    """Raise SpecError where the members of a configuration leave some fold unpredicted."""
    left_out: dict[str, dict[str, set[int]]] = {}  # configuration -> partition -> folds
    for one in identities:
        assert one.weights is not None
        partitions = left_out.setdefault(find_configuration(asdict(one)), {})
        partitions.setdefault(find_partition(one.weights), set()).add(one.weights["held_out"])
    for one, weighting in zip(identities, weightings, strict=True):
        assert one.weights is not None and isinstance(weighting, Folds)
        partitions = left_out[find_configuration(asdict(one))]
        missing = sorted(set(range(weighting.k)) - partitions[find_partition(one.weights)])
        why = f"fold {missing[0]} of {weighting.k} is left out by" if missing else None
        if len(partitions) < weighting.repeats:
            why = f"the folds of partition {len(partitions) + 1} of {weighting.repeats} are left out by"
        if why is not None:
            raise SpecError(
                f"Ensemble.out_of_fold: {why} no member with the options of members[{one.number}], and would not "
                "be predicted: cross_validated(configurations, Folds(k)) lists the members that are needed"
            )


def check_same_records(train: Sequence[Pipeline], valid: Pipeline | None) -> None:
    """Raise SpecError unless `valid` is known to have the records of the training pipelines, in their order."""
    from pipelines.sources._origin import is_same_records

    if not all(is_same_records(pipeline.source, getattr(valid, "source", None)) for pipeline in train):
        raise SpecError(
            "Ensemble.out_of_fold: valid= must have the records of train= in their order, and its source is not "
            "known to have: make both pipelines of the same source object"
        )
