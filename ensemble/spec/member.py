"""One model of an ensemble, and what it needs of a node, as a user declares them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ensemble.spec.callbacks import MemberCallback, as_callbacks
from ensemble.spec.fields import MEMBER_FIELDS, NEEDS
from ensemble.spec.identity import Precision
from ensemble.spec.loops import Averaging, Compile, EarlyStop, Keep
from ensemble.spec.nodes import as_selection, check_selection
from ensemble.spec.options import NamedOptions, check_fields
from ensemble.spec.sample_weights import Weighting
from ensemble.spec.validation import SpecError, as_json_value, check_choice, check_number, option_class


@option_class
@dataclass(frozen=True, kw_only=True)
class Resources:
    """What one member needs of a node. Fields that are None are measured before members are packed.

    Attributes:
        workers: data-parallel workers (the member's width); "auto" measures several widths and chooses them so
            that members which share a stream train at similar rates.
        cpus_per_worker: cores, may be a fraction; used for packing.
        gpus_per_worker: GPUs, from 0 to 1, may be a fraction. 0 is the CPU, 1 a GPU alone; a share above 0 waits
            for a GPU, unless no node has had any (then it does not count). None: GPUs where a node has them.
        threads: torch threads of each worker. Part of the identity: it changes the last bits of results.
        memory_gb: host memory of each worker in GiB.
        span_nodes: whether the workers of a member may be on several nodes. True: where no single node has room
            for all of them, and `workers` is a number; "auto": also where that is measured to be faster; False:
            never.
        nodes: on which nodes its workers may be: a dict of `gpu_type`, `gpu_memory_gb`, `spot` and labels of nodes
            (`ensemble.spec.nodes`), such as `{"gpu_type": "in(H100,H200)", "spot": False, "team": "vision"}`. One
            that selects GPUs by type or memory trains on GPUs alone.
    """

    workers: int | Literal["auto"] = 1
    cpus_per_worker: float | None = None
    gpus_per_worker: float | None = None
    threads: int = 1
    memory_gb: float | None = None
    span_nodes: bool | Literal["auto"] = True
    nodes: Mapping[str, Any] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        if self.nodes is not None:
            object.__setattr__(self, "nodes", as_selection("Resources.nodes", self.nodes))
            check_selection("Resources.nodes", self.nodes, self.gpus_per_worker)
        if self.span_nodes not in (True, False, "auto"):
            raise SpecError(f"Resources.span_nodes must be True, False or 'auto', got {self.span_nodes!r}")
        if isinstance(self.workers, str):
            check_choice("Resources.workers", self.workers, ("auto",))
        else:
            check_number("Resources.workers", self.workers, low=1, integer=True)
        check_fields(self, NEEDS)
        if (self.gpus_per_worker or 0) > 1:
            raise SpecError(
                f"Resources.gpus_per_worker must be at most 1, got {self.gpus_per_worker!r}: "
                "a worker trains on one device; ask for more workers instead"
            )


@option_class
@dataclass(frozen=True)
class Member:
    """One model: its hyperparameters, and its own values of the ensemble's options (None: the ensemble's value).

    Attributes:
        params: hyperparameters, as JSON values: finite numbers, str, bool, None, and lists and dicts (with str
            keys) of them. Tuples are lists in the records, and numpy scalars Python scalars. A hyperparameter with
            the name of an option below, from `seed` to `mixup`, sets that option; with a train function only where
            it is a valid value of the option, and else it is the function's own.
        workers: number of data-parallel workers, as in `Resources`.
        cpus_per_worker: as in `Resources`.
        gpus_per_worker: as in `Resources`.
        threads: as in `Resources`.
        memory_gb: as in `Resources`.
        span_nodes: as in `Resources`.
        nodes: as in `Resources`, beside what the ensemble's say; for each label its own value counts, and None
            leaves out the ensemble's.
        seed: the ensemble's seed + the member's number unless given.
        precision: as in `Ensemble`, like all that follow but `start`.
        epochs: as in `Ensemble`.
        batch_size: as in `Ensemble`.
        weights: as in `Ensemble`.
        loss_scale: as in `Ensemble`.
        accumulate: as in `Ensemble`.
        optimizer: as in `Ensemble`.
        schedule: as in `Ensemble`.
        compression: as in `Ensemble`.
        communicator: as in `Ensemble`.
        early_stopping: as in `Ensemble`.
        keep: as in `Ensemble`.
        averaging: as in `Ensemble`.
        validate_every: as in `Ensemble`.
        compile: as in `Ensemble`.
        mixup: as in `Ensemble`.
        callbacks: as in `Ensemble`, in place of the ensemble's.
        start: weights and buffers to start with instead of those that the recipe makes: a safetensors file of a
            state dict, or a member of another run, `RUN_DIR/MEMBER`. The run keeps a copy; their digest is part of
            the member's identity. Optimizer and schedule begin as usual.
    """

    params: Mapping[str, Any] = field(default_factory=dict)
    workers: int | Literal["auto"] | None = None
    cpus_per_worker: float | None = None
    gpus_per_worker: float | None = None
    threads: int | None = None
    memory_gb: float | None = None
    span_nodes: bool | Literal["auto"] | None = None
    nodes: Mapping[str, Any] | None = None
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
    early_stopping: EarlyStop | None = None
    keep: Keep | None = None
    averaging: Averaging | None = None
    validate_every: int | None = None
    compile: Compile | None = None
    mixup: float | None = None
    callbacks: Sequence[MemberCallback] | None = None
    start: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.params, Mapping):
            raise SpecError(f"Member.params must be a dict of hyperparameters, got {self.params!r}")
        object.__setattr__(self, "params", as_json_value("params", self.params, tuples=True))
        check_fields(self, MEMBER_FIELDS)
        if self.callbacks is not None:
            object.__setattr__(self, "callbacks", as_callbacks("Member.callbacks", self.callbacks))
        if self.nodes is not None:
            object.__setattr__(self, "nodes", as_selection("Member.nodes", self.nodes))
        if self.start is not None:
            if not isinstance(self.start, str | os.PathLike) or not os.fspath(self.start):
                raise SpecError(f"Member.start must be a file of weights or RUN_DIR/MEMBER, got {self.start!r}")
            object.__setattr__(self, "start", os.fspath(self.start))

    def __getstate__(self) -> dict[str, Any]:
        """What it has of its own: each worker unpickles all members, which may be thousands."""
        is_ours = type(self) is Member  # what None means in a class of the user's is not known
        return {name: value for name, value in vars(self).items() if value is not None or not is_ours}


def seeds(n: int, params: Mapping[str, Any] | None = None, start: int = 0, **member_options: Any) -> list[Member]:
    """Members that differ in their seed only: a deep ensemble of one architecture.

    The seed of member i is `start + i`, whatever the ensemble's seed and the member's place in the list are. It is
    declared with each member, and so it is in its identity, in the log and in the results.

    Args:
        n: how many.
        params: hyperparameters of all of them.
        start: the first seed.
        member_options: options of all of them, such as `workers=2`; see `Member`.

    Returns:
        The members, for `Ensemble.members`.

    Raises:
        SpecError: `n` is no integer of at least 1, `start` none of at least 0, or an option is unknown.

    Example:
        >>> [member.seed for member in seeds(3, {"width": 64}, start=10)]
        [10, 11, 12]
    """
    check_number("seeds(n=)", n, low=1, integer=True)
    check_number("seeds(start=)", start, low=0, integer=True)
    if "seed" in member_options:
        raise SpecError("seeds() gives each member a seed of its own: say with start= which is the first")
    return [Member({} if params is None else params, seed=start + i, **member_options) for i in range(n)]


#: Fields of a Member that decide where it trains, or what it starts with: no hyperparameter sets them.
_PLACED = (*(field.name for field in dataclasses.fields(Resources)), "start")


def apply_hyperparameters(
    member: Member, names: Collection[str], *, searches: bool, has_own_loop: bool = False
) -> Member:
    """The member with the options that hyperparameters of the same name set.

    Args:
        names: the options that they may set.
        searches: whether a search proposes hyperparameters.
        has_own_loop: whether a train function has the hyperparameters: what is no value of the option is its own.

    Raises:
        SpecError: a value is invalid, another one is given by `Member(...)`, or no hyperparameter can set it.
    """
    params, own = member.params, dict[str, Any]()
    for name in sorted(params.keys() & {*names, *_PLACED}):
        if name in _PLACED:
            is_other = name in ("nodes", "start") and not isinstance(params[name], Mapping | str)
            if has_own_loop or is_other:
                continue  # the nodes of a layer, say
            line = f"resources=Resources({name}=...)" if searches else f"Member({{...}}, {name}={params[name]!r})"
            is_start = name == "start"
            what = "weights to start with" if is_start else "a need of a node"
            none = ", which a search does not choose" if searches and is_start else f": give it as {line}"
            raise SpecError(f"{name!r} is not a hyperparameter but {what}{none}")
        value, set_here = params[name], getattr(member, name)
        if has_own_loop and not _is_valid(name, value):
            continue
        is_longer = name == "epochs" and None not in (value, set_here) and set_here > value  # it was given more
        if set_here is None:
            own[name] = value
        elif set_here != value and not is_longer:
            raise SpecError(
                f"{name} is given twice: {value!r} as a hyperparameter and Member({name}={set_here!r})"
            )
    try:
        return dataclasses.replace(member, **own) if own else member
    except SpecError as error:
        hint = f"the hyperparameter {', '.join(map(repr, own))} sets that option; give one of yours another name"
        raise SpecError(f"{error} ({hint})") from None


def _is_valid(name: str, value: Any) -> bool:
    """Whether an option of a Member may have a value."""
    try:
        Member(**{name: value})
    except SpecError:
        return False
    return True


def change_member(member: Member, params: Mapping[str, Any], **fields: Any) -> Member:
    """The member with other hyperparameters and options; an option that a hyperparameter sets is changed there."""
    made = {**member.params, **params}
    made |= {name: fields.pop(name) for name in [*fields] if name in made and name in MEMBER_FIELDS}
    return dataclasses.replace(
        member, params=made, **fields, **{name: None for name in made if name in MEMBER_FIELDS}
    )


def as_member(number: int, entry: Member | Mapping[str, Any]) -> Member:
    """Member `number` of a list whose entries are Members or dicts of hyperparameters.

    Raises:
        SpecError: it is neither, or a hyperparameter is no JSON value; the message names the entry.
    """
    if isinstance(entry, Member):
        return entry
    if isinstance(entry, Mapping):
        try:
            return Member(entry)
        except SpecError as error:
            raise SpecError(f"members[{number}]: {error}") from None
    raise SpecError(f"members[{number}] must be a dict of hyperparameters or a Member, got {entry!r}")
