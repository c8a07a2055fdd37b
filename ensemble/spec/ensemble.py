"""What a user declares: `Ensemble`, `Member`, `Recipe`, `Search`, `Resources`.

Everything here is a frozen dataclass that checks itself when it is made. A mistake is a `SpecError` of one
line that says what was given, where, and what would be valid. Nothing here imports torch, Ray or Optuna.

A **member** is one model of the ensemble. What makes it that model and no other, its *identity*, is fixed
before its first step: hyperparameters, seed, width (its number of data-parallel workers), threads per
worker, precision, epochs, batch size, its weights of the training samples. `Ensemble.identify` computes it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ensemble.spec.identity import PRECISIONS, Identity, Precision
from ensemble.spec.member_pipelines import MemberPipelines
from ensemble.spec.objectives import ALWAYS_REPORTED, Implied, Mode, check_ranking, not_reported, settle
from ensemble.spec.options import Word
from ensemble.spec.sample_weights import Bootstrap, Folds, Weighting, check_weighting, recorded
from ensemble.spec.search_space import Dimension, Search, choice, integer, loguniform, uniform
from ensemble.spec.training_options import WORDS, check_space, check_words, resolved
from ensemble.spec.validation import SpecError, check_choice, check_number, json_value, strict, unknown_name

if TYPE_CHECKING:
    from pipelines import Pipeline

__all__ = [
    "Bootstrap",
    "Dimension",
    "Ensemble",
    "Folds",
    "Identity",
    "Member",
    "Recipe",
    "Resources",
    "Search",
    "SpecError",
    "choice",
    "integer",
    "loguniform",
    "uniform",
    "unknown_name",
]

CACHES = ("memory", "disk")
SHARING = ("auto", "node", "single", "multi", "all", "independent")
DEVICES = ("auto", "cpu", "cuda")
STALL_POLICIES = ("wait", "detach")
COMBINERS = ("average", "weighted", "greedy", "stack")


@strict
@dataclass(frozen=True, kw_only=True)
class Resources:
    """What one member asks of a node. What is left None is measured before members are packed.

    Attributes:
        workers: data-parallel workers (the member's width); "auto": measured, and chosen so that members which
            share a stream train at like rates.
        cpus_per_worker: cores, may be a fraction; what the scheduler packs by.
        gpus_per_worker: GPUs, may be a fraction; counts only on nodes that have GPUs.
        threads: torch threads of each worker. Part of the identity: it changes the last bits of results.
        memory_gb: host memory of each worker in GiB.
    """

    workers: int | Literal["auto"] = 1
    cpus_per_worker: float | None = None
    gpus_per_worker: float | None = None
    threads: int = 1
    memory_gb: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.workers, str):
            check_choice("Resources.workers", self.workers, ("auto",))
        else:
            check_number("Resources.workers", self.workers, low=1, integer=True)
        if self.cpus_per_worker is not None:
            check_number("Resources.cpus_per_worker", self.cpus_per_worker, low=0, above=True)
        if self.gpus_per_worker is not None:
            check_number("Resources.gpus_per_worker", self.gpus_per_worker, low=0)
        if self.gpus_per_worker is not None and self.gpus_per_worker > 1:
            raise SpecError(
                f"Resources.gpus_per_worker must be at most 1, got {self.gpus_per_worker!r}: "
                "a worker trains on one device; ask for more workers instead"
            )
        check_number("Resources.threads", self.threads, low=1, integer=True)
        if self.memory_gb is not None:
            check_number("Resources.memory_gb", self.memory_gb, low=0, above=True)


@strict
@dataclass(frozen=True)
class Member:
    """One model: its hyperparameters, and where it departs from the ensemble's defaults (None: it does not).

    `params` are JSON values: finite numbers, str, bool, None, and lists and dicts (with str keys) of them.
    Tuples become lists and numpy's scalars Python's when the member is made.
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
    optimizer: Word | None = None
    schedule: Word | None = None
    compression: Word | None = None
    communicator: Word | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.params, Mapping):
            raise SpecError(f"Member.params must be a dict of hyperparameters, got {self.params!r}")
        object.__setattr__(self, "params", json_value("params", self.params))
        if self.precision is not None:
            check_choice("Member.precision", self.precision, PRECISIONS)
        for name in ("epochs", "batch_size"):
            if getattr(self, name) is not None:
                check_number(f"Member.{name}", getattr(self, name), low=1, integer=True)
        check_words("Member", self)
        if self.seed is not None:
            check_number("Member.seed", self.seed, low=0, integer=True)
        if self.weights is not None:
            check_weighting("Member.weights", self.weights)


@strict
@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Plain functions that say what a member is; they run in the built-in training loop.

    Attributes:
        model: `model(params) -> nn.Module`.
        loss: `loss(model, batch) -> tensor [b]`, one value per sample, unreduced.
        optimizer: `optimizer(model, params) -> torch.optim.Optimizer`; unless given, `Ensemble.optimizer`, or SGD
            with `params["lr"]`.
        schedule: `schedule(optimizer, params, steps) -> LRScheduler`, stepped after each of `steps` steps.
        metrics: `metrics(outputs, batch) -> dict` of tensors [b] (averaged over samples) or scalars (averaged
            over batches by their size). `loss` is always reported, and `accuracy` where outputs [b, classes]
            meet an integer field named `target`.
        predict: `predict(model, batch) -> probabilities`; unless given, the softmax over the last axis of what
            the model returned inside `loss`.
        target: the field that holds the class, used for accuracy, selection and calibration.
        objective: the metric that ranks members; accuracy unless given.
        mode: whether the objective is to be `"max"` or `"min"`; needed where its name does not say it
            (`ensemble.spec.objectives`: accuracy, auc, f1 ... are to be large; loss, nll, error, mse ... small).
        clip_norm: largest L2 norm of a step's gradient, that of the global batch's mean loss, whatever the number
            of workers, of parts (`accumulate=`) and the loss scale; None for no clipping.
    """

    model: Callable[..., Any]
    loss: Callable[..., Any]
    optimizer: Callable[..., Any] | None = None
    schedule: Callable[..., Any] | None = None
    metrics: Callable[..., Any] | None = None
    predict: Callable[..., Any] | None = None
    target: str = "label"
    objective: str | None = None
    mode: Mode | None = None
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        for name in ("model", "loss", "optimizer", "schedule", "metrics", "predict"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise SpecError(f"Recipe.{name} must be a function, got {value!r}")
        check_ranking("Recipe", self)
        if self.clip_norm is not None:
            check_number("Recipe.clip_norm", self.clip_norm, low=0, above=True)


@strict
@dataclass(frozen=True, kw_only=True)
class Ensemble(MemberPipelines):
    """Everything about one run: what its members are, what they read, what they may use.

    Attributes:
        name: of the run; a file name.
        recipe: a `Recipe`, or a function `train(member)` that keeps its own loop.
        members: a dict of hyperparameters or a `Member` each; or
        search: a `Search` that proposes them.
        train, valid, test: pipelines. `valid` selects and calibrates, `test` gives the final figures. `train` may
            be a function `train(params) -> Pipeline`: augmentation as a hyperparameter. What the members'
            pipelines have in common is prepared once, the rest in the member.
        epochs: of each member.  batch_size: samples of a *global* batch.
        seed: member i has seed + i unless it names its own.
        precision: fp32, bf16 or fp16 (with loss scaling); weights and optimizer state are fp32 always.
        loss_scale: of fp16: "dynamic", or a number that is never changed; bf16 takes a number too. Where gradients
            overflow the step is skipped, on all workers of the member.
        optimizer, schedule: for a Recipe that has no functions for them; names and options as in
            `ensemble.spec.options`. A hyperparameter named like an option (`lr`, `momentum` ...) takes its place.
        accumulate: a worker's part of each batch is trained in so many parts, one step for all: less memory, and
            the same gradient (but batch normalization normalizes each part by itself).
        compression: what gradients travel as between a member's workers: "none", "fp16", "bf16", "qsgd2",
            "qsgd4", "qsgd8", "onebit", "powersgd", or "auto" (measured at the start).
        communicator: what they travel over: "torch" (gloo, or NCCL), "horovod", "hierarchical" (within hosts,
            then between them) or "hybrid" (that or flat, by size, as measured at the start).
        weights: what each training sample counts for a member: "uniform" (1), "bootstrap" or `Bootstrap(...)`
            (each member a bootstrap sample of its own), `Folds(k)` (each member without one of k folds).
        resources: defaults for each member.
        devices: auto (CUDA where a node has it), cpu, cuda (refused where there is none).
        sharing: who prepares for whom. "independent": each member for itself. Else members on one node share one
            pipeline, and where they are on several nodes "node" has one on each; "single" has one node prepare for
            all, "multi" and "all" every node its part (`pipelines.multinode.designs`); "auto" takes what measures
            best.
        prep_workers: preparation processes of a node's feeder.
        capacity: samples in the feeder's ring; None chooses.
        cache: "memory" or "disk": the feeders keep samples as they are before the first random stage, so that
            later epochs do not decode; None keeps nothing.
        cache_bytes: how much each feeder may keep; None is a quarter of the free memory, or half of the free disk.
        cache_dir: for "disk"; a local directory, found again by the next run.
        gate_timeout_s: how long the feeder waits for the members it expects.
        stall_policy: what becomes of a member that falls behind by more than the ring, so that others wait for it:
            "wait" (it paces them, up to `stall_limit_s`) or "detach" (it goes on alone at once).
        stall_limit_s: how long a member may keep others waiting without taking a batch. Past it nothing ends: it
            prepares its own batches, the same to the last bit, and comes back when it has caught up. Shorter than
            `hang_timeout_s`, so that a member which hangs is worked round long before it is given up.
        prepare_timeout_s: how long a feeder may take to prepare one sample. After that the worker is ended and the
            sample tried once more by itself; if that does not end either, it is a record that cannot be prepared,
            as one is that ends whoever prepares it. (A member that works alone is subject to `hang_timeout_s`.)
        hang_timeout_s: a member of which nothing is heard for so long is killed and tried again; it is heard at
            every step, in evaluation, and while it waits for the feeder. A worker that keeps the others of its
            member waiting for 0.7 of it, also by writing a checkpoint, is taken to hang.
        retries: restarts of a member after a failure, from its last checkpoint.
        elastic: whether the scheduler may widen a member that keeps others waiting, from one of its checkpoints
            on. Its weights then depend on when that was; it is recorded.
        mps: on nodes with NVIDIA GPUs, whether members on one GPU share it through the Multi-Process Service.
        combine, calibrate: how the final model is made.
        objective, mode: the metric that ranks members, and whether it is to be max or min; None takes the
            Recipe's, or accuracy, and the mode that the metric's name says.
        drop_last: whether the last partial batch of an epoch is left out.
        checkpoint_every: epochs between checkpoints.
    """

    name: str
    recipe: Recipe | Callable[..., Any]
    train: Pipeline | Callable[[dict[str, Any]], Pipeline]
    members: Sequence[Member | Mapping[str, Any]] | None = None
    search: Search | None = None
    valid: Pipeline | None = None
    test: Pipeline | None = None
    epochs: int = 1
    batch_size: int = 32
    seed: int = 0
    precision: Precision = "fp32"
    loss_scale: float | Literal["dynamic"] = "dynamic"
    optimizer: Word | None = None
    schedule: Word | None = None
    accumulate: int = 1
    compression: Word = "none"
    communicator: Word = "torch"
    weights: Weighting = "uniform"
    resources: Resources = field(default_factory=Resources)
    devices: Literal["auto", "cpu", "cuda"] = "auto"
    sharing: str = "auto"
    prep_workers: int = 1
    capacity: int | None = None
    cache: Literal["memory", "disk"] | None = None
    cache_bytes: int | None = None
    cache_dir: str | None = None
    gate_timeout_s: float = 120.0
    stall_policy: Literal["wait", "detach"] = "wait"
    stall_limit_s: float = 60.0
    prepare_timeout_s: float = 300.0
    hang_timeout_s: float = 600.0
    retries: int = 2
    elastic: bool = False
    mps: bool = False
    combine: str = "greedy"
    calibrate: bool = True
    drop_last: bool = False
    checkpoint_every: int = 1
    objective: str | None = None
    mode: Mode | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip() or "/" in self.name or self.name[0] == ".":
            raise SpecError(f"Ensemble.name must be a plain file name, got {self.name!r}")
        if not callable(self.recipe) and not isinstance(self.recipe, Recipe):
            raise SpecError(f"Ensemble.recipe must be a Recipe or a function train(member), got {self.recipe!r}")
        if self.search is not None and not isinstance(self.search, Search):
            raise SpecError(f"Ensemble.search must be Search({{...}}, trials=...), got {self.search!r:.60}")
        if self.members is not None and (
            isinstance(self.members, str | Mapping) or not isinstance(self.members, Iterable)
        ):
            raise SpecError(f"Ensemble.members must be a list of dicts or Members, got {self.members!r:.60}")
        for name in ("calibrate", "drop_last", "elastic", "mps"):
            if not isinstance(getattr(self, name), bool):
                raise SpecError(f"Ensemble.{name} must be True or False, got {getattr(self, name)!r}")
        if (self.members is None) == (self.search is None):
            raise SpecError("Ensemble needs exactly one of members= and search=")
        for name in ("train", "valid", "test"):
            value = getattr(self, name)
            stage = getattr(value, "random_stage", None)
            if name != "train" and stage is not None:
                raise SpecError(
                    f"Ensemble.{name} draws random numbers in its stage {stage.name}: it is prepared once, "
                    "for all members and epochs; leave augmentation to train="
                )
            if not hasattr(value, "loader") and not (value is None if name != "train" else callable(value)):
                function = " or a function train(params) of one" if name == "train" else ""
                raise SpecError(f"Ensemble.{name} must be a pipelines.Pipeline{function}, got {value!r}")
        for name in ("epochs", "batch_size", "prep_workers", "checkpoint_every"):
            check_number(f"Ensemble.{name}", getattr(self, name), low=1, integer=True)
        for name in ("seed", "retries"):
            check_number(f"Ensemble.{name}", getattr(self, name), low=0, integer=True)
        if self.capacity is not None:
            check_number("Ensemble.capacity", self.capacity, low=1, integer=True)
        if self.cache is not None:
            check_choice("Ensemble.cache", self.cache, CACHES)
        if self.cache_bytes is not None:
            check_number("Ensemble.cache_bytes", self.cache_bytes, low=1, integer=True)
            if self.cache is None:
                raise SpecError("Ensemble.cache_bytes is for a cache: give cache='memory' or cache='disk' too")
        if (self.cache == "disk") != (self.cache_dir is not None):
            raise SpecError("Ensemble.cache_dir is needed with cache='disk', and is for that only")
        check_number("Ensemble.gate_timeout_s", self.gate_timeout_s, low=0)
        for name in ("stall_limit_s", "prepare_timeout_s", "hang_timeout_s"):
            check_number(f"Ensemble.{name}", getattr(self, name), low=0, above=True)
        check_choice("Ensemble.stall_policy", self.stall_policy, STALL_POLICIES)
        check_choice("Ensemble.precision", self.precision, PRECISIONS)
        check_words("Ensemble", self)
        check_choice("Ensemble.devices", self.devices, DEVICES)
        check_choice("Ensemble.sharing", self.sharing, SHARING)
        check_choice("Ensemble.combine", self.combine, COMBINERS)
        check_weighting("Ensemble.weights", self.weights)
        if not isinstance(self.resources, Resources):
            raise SpecError(f"Ensemble.resources must be Resources(...), got {self.resources!r}")
        check_ranking("Ensemble", self)
        for name, settled in zip(("objective", "mode"), settle(self, self.recipe), strict=True):
            object.__setattr__(self, name, settled)
        plain = isinstance(self.recipe, Recipe) and self.recipe.metrics is None and self.valid is not None
        if plain and self.ranks and self.objective not in ALWAYS_REPORTED:
            raise SpecError(not_reported(str(self.objective), ALWAYS_REPORTED, by="a Recipe without metrics="))
        if self.members is not None:
            object.__setattr__(self, "members", tuple(_as_member(i, m) for i, m in enumerate(self.members)))
            if not self.members:
                raise SpecError("Ensemble.members is empty")
            for number in range(len(self.members)):
                self._check_steps(number, self.identify(number).batch_size)
        else:
            assert self.search is not None
            trial = self.identify(0, {})
            self._check_steps(0, trial.batch_size)
            check_space(trial.as_dict(), self.search.space)
            self.search.check_epochs(self.epochs)
            if self.search.gain and self.valid is None:
                raise SpecError("Search.objective='gain' is measured on Ensemble.valid: declare it")

    @property
    def ranks(self) -> bool:
        """Whether somebody said by which metric members are ranked."""
        return not isinstance(self.objective, Implied) or getattr(self.recipe, "objective", None) is not None

    def _check_steps(self, number: int, batch_size: int) -> None:
        if self.drop_last and batch_size > self.samples:
            raise SpecError(
                f"members[{number}]: an epoch of {self.samples} samples has no whole batch of {batch_size}: "
                "take a smaller batch_size or drop_last=False"
            )

    def identify(self, number: int, params: Member | Mapping[str, Any] | None = None) -> Identity:
        """The identity of member `number`; `params` are a search's proposal for it, or a Member that was added."""
        member = self._member(number) if params is None else _as_member(number, params)

        def own(name: str, default: Any) -> Any:
            value = getattr(member, name)
            return default if value is None else value

        asked = {f.name: own(f.name, getattr(self.resources, f.name)) for f in dataclasses.fields(Resources)}
        guesses = {"workers": 1, "cpus_per_worker": 1.0, "gpus_per_worker": 1.0, "memory_gb": None}
        auto = [name for name in guesses if asked[name] in (None, "auto")]
        plain = ("precision", "epochs", "batch_size", "loss_scale", "accumulate", *WORDS)
        training = {name: own(name, getattr(self, name)) for name in plain}
        try:
            Resources(**asked)
            weights = recorded(own("weights", self.weights), number, self.seed, self.samples)
            training |= resolved(training, self._functions(), member.params, proposed=self.search is not None)
        except SpecError as error:
            raise SpecError(f"members[{number}]: {error}") from None
        return Identity(
            member=f"member-{number}",
            number=number,
            params=dict(member.params),
            seed=own("seed", self.seed + number),
            weights=weights,
            auto=auto,
            **training,
            **asked | {name: guesses[name] for name in auto},
        )

    def _functions(self) -> Mapping[str, Any] | None:
        """What the Recipe has functions for; None for a train function."""
        if not isinstance(self.recipe, Recipe):
            return None
        return {name: getattr(self.recipe, name) for name in ("optimizer", "schedule")}

    def _member(self, number: int) -> Member:
        assert self.members is not None
        member = self.members[number]
        assert isinstance(member, Member)
        return member


def _as_member(number: int, given: Member | Mapping[str, Any]) -> Member:
    if isinstance(given, Member):
        return given
    if isinstance(given, Mapping):
        try:
            return Member(given)
        except SpecError as error:
            raise SpecError(f"members[{number}]: {error}") from None
    raise SpecError(f"members[{number}] must be a dict of hyperparameters or a Member, got {given!r}")
