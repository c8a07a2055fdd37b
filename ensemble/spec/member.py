"""One model of an ensemble, as a user declares it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ensemble.spec.identity import PRECISIONS, Precision
from ensemble.spec.options import NamedOptions, check_training_options
from ensemble.spec.sample_weights import Weighting, check_weighting
from ensemble.spec.validation import SpecError, as_json_value, check_choice, check_number, option_class


@option_class
@dataclass(frozen=True)
class Member:
    """One model: its hyperparameters, and its own values of the ensemble's options (None: the ensemble's value).

    Attributes:
        params: hyperparameters, as JSON values: finite numbers, str, bool, None, and lists and dicts (with str
            keys) of them. Tuples become lists and numpy scalars Python scalars.
        workers, cpus_per_worker, gpus_per_worker, threads, memory_gb: see `Resources`.
        seed: the ensemble's seed + the member's number unless given.
    """

    params: Mapping[str, Any] = field(default_factory=dict)
    workers: int | Literal["auto"] | None = None
    cpus_per_worker: float | None = None
    gpus_per_worker: float | None = None
    threads: int | None = None
    memory_gb: float | None = None
    seed: int | None = None
    precision: Precision | None = None
    epochs: int | None = None
    batch_size: int | None = None
    weights: Weighting | None = None
    loss_scale: float | Literal["dynamic"] | None = None
    accumulate: int | None = None
    optimizer: NamedOptions | None = None
    schedule: NamedOptions | None = None
    compression: NamedOptions | None = None
    communicator: NamedOptions | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.params, Mapping):
            raise SpecError(f"Member.params must be a dict of hyperparameters, got {self.params!r}")
        object.__setattr__(self, "params", as_json_value("params", self.params))
        if self.precision is not None:
            check_choice("Member.precision", self.precision, PRECISIONS)
        for name in ("epochs", "batch_size"):
            if getattr(self, name) is not None:
                check_number(f"Member.{name}", getattr(self, name), low=1, integer=True)
        check_training_options("Member", self)
        if self.seed is not None:
            check_number("Member.seed", self.seed, low=0, integer=True)
        if self.weights is not None:
            check_weighting("Member.weights", self.weights)


def as_member(number: int, given: Member | Mapping[str, Any]) -> Member:
    """Member `number` of a list whose entries are Members or dicts of hyperparameters.

    Raises:
        SpecError: it is neither, or a hyperparameter is no JSON value; the message names the entry.
    """
    if isinstance(given, Member):
        return given
    if isinstance(given, Mapping):
        try:
            return Member(given)
        except SpecError as error:
            raise SpecError(f"members[{number}]: {error}") from None
    raise SpecError(f"members[{number}] must be a dict of hyperparameters or a Member, got {given!r}")
