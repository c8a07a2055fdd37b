"""How much each training sample counts for a member: a bootstrap sample of its own, or all folds but one.

Members that read one stream differ in this without a second pipeline: a sample is still prepared once, its loss
is multiplied by the member's weight for it (`pipelines.weights`). Bagging (Breiman 1996) and cross-validated
committees (Parmanto, Munro and Doyle 1996) are made of such members.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ensemble.spec.validation import SpecError, check_number, strict, unknown_name

WEIGHTINGS = ("bootstrap", "uniform")


@strict
@dataclass(frozen=True)
class Bootstrap:
    """Each member learns from a bootstrap sample of its own: Poisson(1) counts of every sample.

    Attributes:
        seed: of the bootstrap sample; None takes the ensemble's seed + the member's number.
    """

    seed: int | None = None

    def __post_init__(self) -> None:
        if self.seed is not None:
            check_number("Bootstrap.seed", self.seed, low=0, integer=True)

    def recorded(self, number: int, seed: int, samples: int) -> dict[str, Any]:
        """What the identity of member `number` says of it; JSON values."""
        return {"kind": "bootstrap", "seed": seed + number if self.seed is None else self.seed}


@strict
@dataclass(frozen=True)
class Folds:
    """Each member learns from all but one of k folds of the training samples; member i leaves out fold i mod k.

    A sample that is left out weighs 0. It still goes through the forward pass: batch normalization sees it.

    Attributes:
        k: folds.
        held_out: the fold that is left out, whatever the member's number.
        seed: of the partition, which is the same for all members; None takes the ensemble's.
    """

    k: int
    held_out: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        check_number("Folds.k", self.k, low=2, integer=True)
        if self.seed is not None:
            check_number("Folds.seed", self.seed, low=0, integer=True)
        if self.held_out is not None:
            check_number("Folds.held_out", self.held_out, low=0, integer=True)
            if self.held_out >= self.k:
                raise SpecError(f"Folds.held_out must be below k, which is {self.k}, got {self.held_out}")

    def recorded(self, number: int, seed: int, samples: int) -> dict[str, Any]:
        """What the identity of member `number` says of it; JSON values."""
        if self.k > samples:
            raise SpecError(f"Folds.k must be at most the number of training samples, {samples}, got {self.k}")
        held_out = number % self.k if self.held_out is None else self.held_out
        return {
            "kind": "fold",
            "k": self.k,
            "held_out": held_out,
            "seed": seed if self.seed is None else self.seed,
        }


Weighting = str | Bootstrap | Folds


def check_weighting(where: str, value: object) -> None:
    """Refuse what says nothing about weights."""
    if isinstance(value, str) and value not in WEIGHTINGS:
        raise SpecError(unknown_name(f"{where} cannot be", value, (*WEIGHTINGS, "Bootstrap(...)", "Folds(...)")))
    if not isinstance(value, str | Bootstrap | Folds):
        raise SpecError(f"{where} must be 'bootstrap', 'uniform', Bootstrap(...) or Folds(...), got {value!r:.60}")


def recorded(weighting: Weighting, number: int, seed: int, samples: int) -> dict[str, Any] | None:
    """What the identity of a member says of its weights; None where every sample weighs 1.

    Args:
        number: the member's.
        seed: the ensemble's.
        samples: of the training pipeline.
    """
    if weighting == "uniform":
        return None
    made = Bootstrap() if isinstance(weighting, str) else weighting
    return made.recorded(number, seed, samples)


def weights_of(record: dict[str, Any] | None, samples: int) -> Callable[[Any], Any] | None:
    """The weights that an identity speaks of, as a function of the samples' indices."""
    from pipelines import weights

    if record is None:
        return None
    if record["kind"] == "bootstrap":
        return weights.bootstrap(record["seed"])
    return weights.fold(samples, record["k"], record["held_out"], record["seed"])
