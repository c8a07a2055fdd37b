"""What a run is: its members or its search, the data they read, how they train, what they may use.

A **member** is one model of the ensemble. Its *identity* is everything that determines its weights, fixed before
its first step: hyperparameters, seed, width (its number of data-parallel workers), threads per worker, precision,
epochs, batch size, its weights of the training samples. `Ensemble.identify` computes it.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ensemble.spec.callbacks import MemberCallback, as_callbacks, describe_callback
from ensemble.spec.energy import Energy
from ensemble.spec.ensemble_checks import PREDICTED_SPLITS as PREDICTED_SPLITS
from ensemble.spec.ensemble_checks import check_pipelines, check_types, check_values, explain_no_batches
from ensemble.spec.identity import Identity, Precision, find_declared, make_lineage
from ensemble.spec.loggers import LoggerOptions, resolve_loggers
from ensemble.spec.loops import (
    LOOP_OPTIONS,
    Averaging,
    Compile,
    EarlyStop,
    Keep,
    explain_no_averages,
    resolve_loop_options,
)
from ensemble.spec.member import Member, Resources, apply_hyperparameters, as_member
from ensemble.spec.member_pipelines import MemberPipelines
from ensemble.spec.nodes import check_selection, merge_selections
from ensemble.spec.objectives import Implied, Mode, check_direction, check_ranking, resolve_ranking
from ensemble.spec.options import (
    TRAINING_OPTIONS,
    NamedOptions,
    resolve_training_options,
)
from ensemble.spec.out_of_fold import check_folds, check_same_records, make_evaluated, mark_out_of_fold
from ensemble.spec.recipe import (
    Recipe,
    apply_recipe_options,
    check_objective,
    has_own_loop,
    list_member_options,
)
from ensemble.spec.sample_weights import Folds, Weighting, as_record
from ensemble.spec.splits import check_weights, find_raw_name
from ensemble.spec.validation import SpecError, as_json_value, option_class

if TYPE_CHECKING:
    from ensemble.spec.search import Search
    from pipelines import Pipeline

# What a node is asked for until it is measured.
_UNMEASURED = {"workers": 1, "cpus_per_worker": 1.0, "gpus_per_worker": 1.0, "memory_gb": None}
_ENERGY = Energy()


@option_class
@dataclass(frozen=True, kw_only=True)
class Ensemble(MemberPipelines):
    """One run: what its members are, what they read, how they train, what they may use.

    Attributes:
        name: the run's name; a file name.
        recipe: a `Recipe`, or a function `train(member)` with a training loop of its own.
        members: the members, each a dict of hyperparameters or a `Member`; or
        search: a `Search` that proposes them.
        train: the pipeline of the training data, or a function `train(params) -> Pipeline`, which makes
            augmentation a hyperparameter. The stages that all members' pipelines start with run once, in the
            feeder; the others run in each member. None: a train function reads its own data, or needs none.
        valid: the pipeline of the validation data, by which members are ranked, selected and calibrated.
        test: the pipeline of the test data, used only for the final figures.
        out_of_fold: cross-validation: with `Folds`, each member is evaluated on the training samples of the fold
            that it leaves out, and predicts them. `valid` is then a pipeline of the source of `train` without
            random stages; None takes `train` itself. Selection and calibration see each sample as those members
            predict it that have not learnt from it.
        epochs: the epochs of each member.
        batch_size: samples of a *global* batch.
        seed: member i has seed + i unless it has its own.
        precision: fp32, bf16 or fp16 (with loss scaling); weights and optimizer state are always fp32.
        loss_scale: with fp16, "dynamic" or a constant number; with bf16, optionally a number. A step whose
            gradients overflow is skipped on all workers of the member.
        optimizer: for a Recipe without a function for it; a name, or a dict of a name and options, as in
            `ensemble.spec.options`. A hyperparameter with the name of an option (`lr`, `momentum` ...) overrides
            it.
        schedule: the schedule of the learning rate, likewise.
        accumulate: number of parts in which a worker trains its share of each batch, with one step for all: less
            memory and the same gradient (but batch normalization normalizes each part by itself).
        compression: format of the gradients that a member's workers exchange: "none", "fp16", "bf16", "qsgd2",
            "qsgd4", "qsgd8", "qsgd16", "onebit", "powersgd", or "auto" (measured at the start).
        communicator: what they are exchanged over: "torch" (gloo, or NCCL), "horovod", "hierarchical" (within
            hosts, then between them) or "hybrid" (hierarchical or flat by size, as measured at the start).
        weights: the weight of each training sample for a member: "uniform" (1), "bootstrap" or `Bootstrap(...)`
            (each member has a bootstrap sample of its own), `Folds(k)` (each member leaves out one of k folds),
            "balanced" or `ClassWeights(...)` (by class).
        resources: defaults for each member.
        energy: how energy is measured, and what it emits and costs.
        loggers: what else the run is logged to, by name ("tensorboard", "mlflow", "wandb") or with options, such
            as `MLflow(uri=...)`; one of another distribution as `{"name": "theirs", "option": 1}`. No part of
            what is trained: a resume may have other ones.
        devices: auto (CUDA where a node has it), cpu, cuda (an error on nodes without it, except for members
            with `gpus_per_worker=0`).
        sharing: which nodes prepare samples for which members. "independent": each member prepares its own. In the
            other designs the members on a node share one pipeline, and for members on several nodes: "node" has
            one pipeline on each node; "single" prepares on one node for all; "multi" and "all" prepare a part on
            every node (`pipelines.multinode.designs`); "auto" takes the fastest as measured.
        verify_sharing: what happens to a member that has learned from samples which its own pipeline does not
            make: "alone" (it begins again and prepares its own batches), "fail", or False: no comparison. A few
            samples are compared of all that another declaration's pipeline has prepared; where the first ones
            differ, before the first step, the member prepares its own batches from the start.
        prep_workers: preparation processes of a node's feeder.
        capacity: samples in the feeder's ring; None chooses: all, where no stage is random and memory holds them.
        cache: "memory" or "disk": the feeders keep samples as they are before the first random stage, so that
            later epochs do not decode; None keeps nothing.
        cache_bytes: largest size of a feeder's cache; None is a quarter of the free memory, or `cache_dir_bytes`.
        cache_dir: with cache="disk", a local directory; a later run reuses its content.
        cache_dir_bytes: largest size of all caches in it: the least recently used that no process has open are
            removed. None is half of what is free.
        gate_timeout_s: how long the feeder waits for the members that it expects.
        stall_policy: what happens to a member that falls behind by more than the ring, so that others wait for it:
            "wait" (they wait, up to `stall_limit_s`) or "detach" (it continues alone at once).
        stall_limit_s: how long a member may keep others waiting without taking a batch. After that it prepares its
            own batches, equal to the last bit, and returns to the shared stream when it has caught up. Keep it
            below `hang_timeout_s`, so that a hanging member is detached before it is killed.
        prepare_timeout_s: how long a feeder may take to prepare one sample. After that the preparation process is
            killed and the sample is tried once more, alone; if that also times out, the sample counts as one that
            cannot be prepared. (A member that prepares its own batches is subject to `hang_timeout_s` instead.)
        hang_timeout_s: a member that has sent no message for so long is killed and tried again. It sends one at
            each step, in evaluation, and while it waits for the feeder. A worker that keeps the other workers of
            its member waiting for 0.7 of it, also by writing a checkpoint, counts as hanging.
        retries: restarts of a member after a failure, from its last checkpoint.
        elastic: whether the scheduler may give more workers to a member that keeps others waiting, from one of its
            checkpoints on. Its weights then depend on when that happened; it is recorded.
        mps: whether members on one NVIDIA GPU share it through the Multi-Process Service.
        combine: how the members are combined into the final model: average, weighted, greedy, stack, or a function
            `combine(values [m, n, ...]) -> [n, ...]` of torch tensors, which a free task needs.
        calibrate: whether it is calibrated on `valid`: probabilities by temperature scaling, a Gaussian's variance
            by a factor; or the name of a calibrator (`ensemble.combine.calibrators`).
        thresholds: the metric for which decision thresholds of classes or labels are fitted on `valid`: "f1" (with
            two classes that of the second), "f1_macro" or "balanced_accuracy"; None predicts what is most
            probable.
        coverage: the probability with which conformal sets and intervals are to hold the true value, in (0, 1).
        rehearsal: what is done where the rehearsal of a member, before the first epoch, shows that a resume would
            not go on as the member did, that predictions of a sample vary, or that a later batch fails: "refuse"
            to start, or "say" it; None: no rehearsal. It is no part of what is trained.
        objective: the metric that ranks members; None takes the Recipe's, or accuracy (the loss of a Recipe whose
            `task=` has no classes).
        mode: whether it is maximized ("max") or minimized ("min"); None takes what the metric's name implies, and
            the opposite of that is refused.
        early_stopping: `EarlyStopping(patience, min_delta)` ends a member whose objective improves no more, at the
            end of an epoch; "none" trains all epochs.
        keep: "best": a member's weights are those after which its objective was best on `valid`; "last": those
            with which it ended. Its predictions, the combined model and `load` use them.
        averaging: "ema" or `EMA(decay)`, "swa" or `SWA(start, ...)`: what is evaluated and kept are averages of
            the weights; "none": the weights themselves.
        validate_every: steps between evaluations within an epoch; 0: only at its end.
        compile: True, or a mode of torch.compile ("default", "reduce-overhead", "max-autotune"), or a dict of the
            mode and `backend`: compile the model.
        mixup: the parameter alpha of mixup (Zhang et al. 2018): samples are mixed in pairs, by a share drawn from
            Beta(alpha, alpha); 0: none. The model must be called with floats.
        callbacks: objects of subclasses of `MemberCallback`: hooks around the training of each member.
        allow_overlap: whether `test` may have samples of `train` or `valid`, windows of `valid` steps of `train`,
            and stages be fitted to samples of either. A warning names other samples of `train` in `valid`.
        drop_last: whether the last partial batch of an epoch is left out.
        checkpoint_every: epochs between checkpoints; None: after epochs that end 5 s or more after the last one.
        checkpoint_minutes: minutes after which a member writes a checkpoint within an epoch, too; None: only
            after epochs.
        keep_checkpoints: what is kept of members that have ended. "all": checkpoints from which those that
            finished can be given more epochs; "weights": without the state of the optimizer, often two thirds of
            the size; "selected": the weights of those that finished, after the run's end of those alone that its
            combination has selected and of the best, and nothing of those that were pruned or cancelled.
        keep_predictions_gb: the most that the saved predictions of a member may take, in GB (1e9 bytes), of all
            splits together. Of larger ones a part of the positions (pixels, steps) of each sample is kept, drawn
            by lot and the same for all members; the combination and its figures are of these. Where samples have
            no such positions, or `combine` is a function, none are kept: members are ranked, but not combined.
        limits: the most of its nodes that the members have together: `{"gpus": 4, "cpus": 64}`, or one of these.
            They are no part of what is trained: a later start may have others.
    """

    name: str
    recipe: Recipe | Callable[..., Any]
    train: Pipeline | Callable[[dict[str, Any]], Pipeline] | None = None
    members: Sequence[Member | Mapping[str, Any]] | None = None
    search: Search | None = None
    valid: Pipeline | None = None
    test: Pipeline | None = None
    out_of_fold: bool = False
    epochs: int = 1
    batch_size: int = 32
    seed: int = 0
    precision: Precision = "fp32"
    loss_scale: float | Literal["dynamic"] = "dynamic"
    optimizer: NamedOptions | None = None
    schedule: NamedOptions | None = None
    accumulate: int = 1
    compression: NamedOptions = "none"
    communicator: NamedOptions = "torch"
    weights: Weighting = "uniform"
    resources: Resources = field(default_factory=Resources)
    energy: Energy = _ENERGY
    loggers: Sequence[str | Mapping[str, Any] | LoggerOptions] = ()
    devices: Literal["auto", "cpu", "cuda"] = "auto"
    sharing: str = "auto"
    verify_sharing: Literal["alone", "fail", False] = "alone"
    prep_workers: int = 1
    capacity: int | None = None
    cache: Literal["memory", "disk"] | None = None
    cache_bytes: int | None = None
    cache_dir: str | None = None
    cache_dir_bytes: int | None = None
    gate_timeout_s: float = 120.0
    stall_policy: Literal["wait", "detach"] = "wait"
    stall_limit_s: float = 60.0
    prepare_timeout_s: float = 300.0
    hang_timeout_s: float = 600.0
    retries: int = 2
    elastic: bool = False
    mps: bool = False
    combine: str | Callable[..., Any] = "greedy"
    calibrate: bool | str = True
    thresholds: Literal["f1", "f1_macro", "balanced_accuracy"] | None = None
    coverage: float = 0.9
    early_stopping: EarlyStop = "none"
    keep: Keep = "last"
    averaging: Averaging = "none"
    validate_every: int = 0
    compile: Compile = False
    mixup: float = 0.0
    callbacks: Sequence[MemberCallback] = ()
    drop_last: bool = False
    allow_overlap: bool = False
    checkpoint_every: int | None = None
    checkpoint_minutes: float | None = 30.0
    keep_checkpoints: Literal["all", "weights", "selected"] = "all"
    keep_predictions_gb: float = 1.0
    limits: Mapping[str, float] = field(default_factory=dict)
    rehearsal: Literal["refuse", "say"] | None = "refuse"
    objective: str | None = None
    mode: Mode | None = None

    def __post_init__(self) -> None:
        check_types(self)
        if self.out_of_fold:
            object.__setattr__(self, "valid", make_evaluated(self.train, self.valid, self.search))
        check_pipelines(self)
        check_values(self)
        object.__setattr__(self, "callbacks", as_callbacks("Ensemble.callbacks", self.callbacks))
        object.__setattr__(self, "loggers", resolve_loggers(self.loggers))
        check_ranking("Ensemble", self)
        for name, value in zip(("objective", "mode"), resolve_ranking(self, self.recipe), strict=True):
            object.__setattr__(self, name, value)
        if self.valid is not None and isinstance(self.recipe, Recipe):
            check_objective(self.recipe, str(self.objective), is_declared=self.has_declared_objective)
        check_direction(str(self.objective), str(self.mode))
        if self.members is not None:
            object.__setattr__(self, "members", tuple(as_member(i, m) for i, m in enumerate(self.members)))
            if not self.members:
                raise SpecError("Ensemble.members is empty: give at least one dict of hyperparameters")
            self._compare_splits()
            identities = [self.identify(number) for number in range(len(self.members))]
            for number, identity in enumerate(identities):
                self.check_identity(number, identity)
            if self.out_of_fold:
                check_folds(identities, [getattr(one, "weights", None) or self.weights for one in self.members])
                check_same_records(self._distinct_pipelines(), self.valid)
        else:
            from ensemble.spec.search_probes import check_search

            self._compare_splits()
            check_search(self, self._probes)
            identities = self._probes
        check_weights(identities, self._distinct_pipelines(), may_overlap=self.allow_overlap)
        batch_size = max(identity.batch_size for identity in identities)
        if not callable(self.train) and 0 < self.samples < batch_size:
            warnings.warn(
                f"batch_size is {batch_size}, more than the {self.samples} training samples: an epoch is one "
                "step; take a smaller batch_size if that is not meant",
                stacklevel=1,  # one place, so that it is shown once, also where the declaration is copied
            )

    @functools.cached_property
    def _probes(self) -> list[Identity]:
        """Trials that stand for all of a search's."""
        from ensemble.spec.search_probes import identify_probes

        return identify_probes(self)

    def find_own_callbacks(
        self, number: int, lineage: Mapping[str, Any] | None
    ) -> Sequence[MemberCallback] | None:
        """The callbacks of the declared member that a member is or descends from; None: the ensemble's."""
        members = self.members or ()
        number = number if number < len(members) else find_declared(number, lineage)
        return getattr(members[number], "callbacks", None) if number < len(members) else None

    def largest(self, option: Literal["epochs", "batch_size"]) -> int:
        """The largest value of an option that a member may have, of those that are known before a search."""
        return max(int(getattr(declared, option)) for declared in (self._probes if self.search else [self]))

    @property
    def has_declared_objective(self) -> bool:
        """Whether the ensemble or its Recipe names the metric by which members are ranked."""
        return not isinstance(self.objective, Implied) or getattr(self.recipe, "objective", None) is not None

    def check_identity(self, number: int, identity: Identity) -> None:
        """Raise SpecError for a member that trains no step, or averages no weights."""
        why = explain_no_averages(identity.averaging, identity.epochs)
        if self.train is None:
            why = why or explain_no_batches(identity)
        if self.drop_last and identity.batch_size > self.samples:
            why = (
                f"an epoch of {self.samples} samples has no whole batch of {identity.batch_size}: take a smaller "
                "batch_size or drop_last=False"
            )
        if why is not None:
            raise SpecError(f"members[{number}]: {why}")

    def identify(self, number: int, params: Member | Mapping[str, Any] | None = None) -> Identity:
        """The identity of a member.

        Args:
            number: the member's number.
            params: a search's proposal for it, or a Member that was added to the run; None takes
                `members[number]`.

        Raises:
            SpecError: no such member can be trained; the message names `members[number]`.
        """
        if params is None:
            assert self.members is not None
            params = self.members[number]
        member = as_member(number, params)
        options, own = list_member_options(self.recipe), has_own_loop(self.recipe)
        try:
            member = apply_hyperparameters(member, options, searches=self.search is not None, has_own_loop=own)
        except SpecError as error:
            raise SpecError(f"members[{number}]: {error}") from None

        def value_of(name: str, default: Any) -> Any:
            value = getattr(member, name)
            return default if value is None else value

        needs = {f.name: value_of(f.name, getattr(self.resources, f.name)) for f in dataclasses.fields(Resources)}
        needs["nodes"] = merge_selections(self.resources.nodes, member.nodes)
        auto = [name for name in _UNMEASURED if needs[name] in (None, "auto")]
        names = ("precision", "epochs", "batch_size", "loss_scale", "accumulate", *TRAINING_OPTIONS)
        training = {name: value_of(name, getattr(self, name)) for name in names}
        callbacks, functions = value_of("callbacks", self.callbacks), None
        if isinstance(self.recipe, Recipe) and self.recipe.train is None:
            functions = {name: getattr(self.recipe, name) for name in ("optimizer", "schedule")}
        try:
            if isinstance(self.recipe, Recipe) and functions is not None:
                apply_recipe_options(self.recipe, member.params)
            Resources(**needs)
            check_selection("nodes", needs["nodes"], 0.0 if self.devices == "cpu" else None)
            weighting = value_of("weights", self.weights)
            weights = as_record(weighting, number, self.seed, self.records)
            if weights is not None and weights["kind"] == "classes" and weights["field"] is None:
                weights["field"] = find_raw_name(self.first_pipeline(), self.target)
            if isinstance(weighting, Folds) and weighting.named_fields:
                weighting.check_fields(self.record_fields)
            if self.out_of_fold:
                weights = mark_out_of_fold(weights)
            training |= resolve_training_options(
                training, functions, member.params, partial=self.search is not None
            )
            looped = {name: value_of(name, getattr(self, name)) for name in LOOP_OPTIONS}
            validates = self.valid is not None or has_own_loop(self.recipe)
            training |= resolve_loop_options(looped, str(self.objective), str(self.mode), validates=validates)
        except SpecError as error:
            raise SpecError(f"members[{number}]: {error}") from None
        return Identity(
            member=f"member-{number}",
            number=number,
            params=as_json_value("params", member.params),
            seed=value_of("seed", self.seed + number),
            weights=weights,
            auto=auto,
            lineage=None if member.start is None else make_lineage(os.fspath(member.start), warm=True),
            callbacks=[record for one in callbacks if (record := describe_callback("callbacks", one)) is not None],
            **training,
            **needs | {name: _UNMEASURED[name] for name in auto},
        )
