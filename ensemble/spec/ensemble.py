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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ensemble.spec.energy import Energy
from ensemble.spec.fields import ENSEMBLE_FIELDS, STACKED_ROWS
from ensemble.spec.functions import CALLS, check_function
from ensemble.spec.identity import Identity, Precision, make_lineage
from ensemble.spec.limits import check_limits
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
    check_fields,
    check_hyperparameters,
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
from ensemble.spec.search import Search, check_population
from ensemble.spec.splits import LABELLED, check_fold_windows, describe_overlap, find_leak, find_raw_name
from ensemble.spec.task import LABELS, as_task
from ensemble.spec.validation import SpecError, as_json_value, option_class

if TYPE_CHECKING:
    from pipelines import Pipeline

#: The splits on which every member predicts; a run has those that are declared.
PREDICTED_SPLITS = ("valid", "test", "shifted")

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
            feeder; the others run in each member.
        valid: the pipeline of the validation data, by which members are ranked, selected and calibrated.
        test: the pipeline of the test data, which give the final figures and take no part in anything.
        shifted: a pipeline of samples of another kind: how well the model tells them apart is measured, and with
            targets how good it is on them.
        out_of_fold: cross-validation: with `Folds`, each member is evaluated on the training samples of the fold
            that it leaves out, and predicts them. `valid` is then a pipeline of the source of `train` without
            random stages; None takes `train` itself. Selection and calibration see each sample as those members
            predict it that have not learnt from it.
        epochs: of each member.
        batch_size: samples of a *global* batch.
        seed: member i has seed + i unless it has its own.
        precision: fp32, bf16 or fp16 (with loss scaling); weights and optimizer state are always fp32.
        loss_scale: with fp16, "dynamic" or a constant number; with bf16, optionally a number. A step whose
            gradients overflow is skipped on all workers of the member.
        optimizer: for a Recipe without a function for it; a name, or a dict of a name and options, as in
            `ensemble.spec.options`. A hyperparameter with the name of an option (`lr`, `momentum` ...) overrides
            it.
        schedule: of the learning rate, likewise.
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
            as `MLflow(uri=...)`. No part of what is trained: a resume may have other ones.
        devices: auto (CUDA where a node has it), cpu, cuda (an error on nodes without it, but for members with
            `gpus_per_worker=0`).
        sharing: which nodes prepare samples for which members. "independent": each member prepares its own. In the
            other designs the members on a node share one pipeline, and for members on several nodes: "node" has
            one pipeline on each node; "single" prepares on one node for all; "multi" and "all" prepare a part on
            every node (`pipelines.multinode.designs`); "auto" takes the fastest as measured.
        verify_sharing: what happens to a member that has learned from samples which its own pipeline does not
            make: "alone" (it begins anew and prepares its own batches), "fail", or False: no comparison. A few
            samples are compared of all that another declaration's pipeline has prepared; where the first ones
            differ, before the first step, the member prepares its own batches from the start.
        prep_workers: preparation processes of a node's feeder.
        capacity: samples in the feeder's ring; None chooses.
        cache: "memory" or "disk": the feeders keep samples as they are before the first random stage, so that
            later epochs do not decode; None keeps nothing.
        cache_size: pixels to which the shorter side of training images is reduced before they are kept; smaller
            ones stay as they are. The samples are other ones then, whoever prepares them: `train` gets a stage
            `shrink_jpeg` before that which decodes.
        cache_format: what is kept of images with `cache_size`: "jpeg" (of quality 90, decoded each epoch), or
            "raw", which takes less CPU time and about nine times the space. The samples are the same.
        cache_bytes: largest size of a feeder's cache; None is a quarter of the free memory, or `cache_dir_bytes`.
        cache_dir: with cache="disk", a local directory; a later run reuses its content.
        cache_dir_bytes: largest size of all caches in it: the least recently used that no process has open are
            removed. None is the environment variable ENSEMBLE_CACHE_DIR_BYTES (50G), or half of what is free.
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
            by a factor.
        thresholds: the metric for which decision thresholds of classes or labels are fitted on `valid`: "f1" (with
            two classes that of the second), "f1_macro" or "balanced_accuracy"; None predicts what is most
            probable.
        coverage: the probability with which conformal sets and intervals are to hold the true value, in (0, 1).
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
        allow_overlap: whether `test` may have samples of `train` or `valid`, windows of `valid` steps of `train`,
            and stages be fitted to samples of either. Other samples of `train` in `valid` are said.
        drop_last: whether the last partial batch of an epoch is left out.
        checkpoint_every: epochs between checkpoints.
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
        keep_data: whether the run directory keeps the arrays of `sources.arrays`. If not, they are in the memory
            of the machine while the run lasts (not with Ray), and what was stopped is continued by its spec.
        private_modules: names of modules of yours that the run directory does not keep, neither as text nor in the
            declaration: all processes import them, and find what is edited meanwhile.
        limits: the most of its nodes that the members have together: `{"gpus": 4, "cpus": 64}`, or one of these.
            They are no part of what is trained: a later start may have others.
    """

    name: str
    recipe: Recipe | Callable[..., Any]
    train: Pipeline | Callable[[dict[str, Any]], Pipeline]
    members: Sequence[Member | Mapping[str, Any]] | None = None
    search: Search | None = None
    valid: Pipeline | None = None
    test: Pipeline | None = None
    shifted: Pipeline | None = None
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
    loggers: Sequence[str | LoggerOptions] = ()
    devices: Literal["auto", "cpu", "cuda"] = "auto"
    sharing: str = "auto"
    verify_sharing: Literal["alone", "fail", False] = "alone"
    prep_workers: int = 1
    capacity: int | None = None
    cache: Literal["memory", "disk"] | None = None
    cache_size: int | None = None
    cache_format: Literal["jpeg", "raw"] | None = None
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
    calibrate: bool = True
    thresholds: Literal["f1", "f1_macro", "balanced_accuracy"] | None = None
    coverage: float = 0.9
    early_stopping: EarlyStop = "none"
    keep: Keep = "last"
    averaging: Averaging = "none"
    validate_every: int = 0
    compile: Compile = False
    mixup: float = 0.0
    drop_last: bool = False
    allow_overlap: bool = False
    checkpoint_every: int = 1
    checkpoint_minutes: float | None = 30.0
    keep_checkpoints: Literal["all", "weights", "selected"] = "all"
    keep_predictions_gb: float = 1.0
    keep_data: bool = True
    private_modules: Sequence[str] = ()
    limits: Mapping[str, float] = field(default_factory=dict)
    objective: str | None = None
    mode: Mode | None = None

    def __post_init__(self) -> None:
        self._check_types()
        if self.out_of_fold:
            object.__setattr__(self, "valid", make_evaluated(self.train, self.valid, self.search))
        self._check_pipelines()
        self._check_values()
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
                self._check_identity(number, identity)
            if self.out_of_fold:
                check_folds(identities, [getattr(one, "weights", None) or self.weights for one in self.members])
                check_same_records(self._distinct_pipelines(), self.valid)
        else:
            self._compare_splits()
            self._check_search()
            identities = self._probes
        batch_size = max(identity.batch_size for identity in identities)
        if hasattr(self.train, "__len__") and batch_size > len(self.train):
            warnings.warn(
                f"batch_size is {batch_size}, more than the {len(self.train)} training samples: an epoch is one "
                "step; take a smaller batch_size if that is not meant",
                stacklevel=1,  # one place, so that it is shown once, also where the declaration is copied
            )

    def _compare_splits(self) -> None:
        self._number_classes()
        if not callable(self.train):
            object.__setattr__(self, "train", self._shrink(self.train))
        if self.allow_overlap:
            return
        for row in self.list_overlaps() if self.test is not None else ():
            if row["split"] == "test":
                said = describe_overlap(row)
                raise SpecError(f"Ensemble.{said}; give a test= of other samples, or allow_overlap=True")
        for split in LABELLED[self.out_of_fold :]:
            pipeline = getattr(self, split)
            if hasattr(pipeline, "source") and (leak := find_leak(split, pipeline, self._distinct_pipelines())):
                raise SpecError(f"Ensemble.{leak}. With allow_overlap=True it is taken as it is")

    def _check_types(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip() or "/" in self.name or self.name[0] == ".":
            raise SpecError(f"Ensemble.name must be a plain file name, got {self.name!r}")
        if not callable(self.recipe) and not isinstance(self.recipe, Recipe):
            raise SpecError(f"Ensemble.recipe must be a Recipe or a function train(member), got {self.recipe!r}")
        if not isinstance(self.recipe, Recipe):
            check_function("Ensemble.recipe", self.recipe, CALLS["train"])
        if self.search is not None and not isinstance(self.search, Search):
            raise SpecError(f"Ensemble.search must be Search({{...}}, trials=...), got {self.search!r:.60}")
        if self.members is not None and (
            isinstance(self.members, str | Mapping) or not isinstance(self.members, Iterable)
        ):
            raise SpecError(f"Ensemble.members must be a list of dicts or Members, got {self.members!r:.60}")
        if isinstance(self.private_modules, str) or not all(isinstance(n, str) for n in self.private_modules):
            raise SpecError(f"Ensemble.private_modules must be names of modules, got {self.private_modules!r}")
        if (self.members is None) == (self.search is None):
            raise SpecError("Ensemble needs exactly one of members= and search=")
        if not isinstance(self.resources, Resources):
            raise SpecError(f"Ensemble.resources must be Resources(...), got {self.resources!r}")
        if not isinstance(self.energy, Energy):
            raise SpecError(f"Ensemble.energy must be Energy(...), got {self.energy!r}")

    def _check_pipelines(self) -> None:
        for name in ("train", *PREDICTED_SPLITS):
            value = getattr(self, name)
            stage = getattr(value, "random_stage", None)
            if name != "train" and stage is not None:
                raise SpecError(
                    f"Ensemble.{name} draws random numbers in its stage {stage.name}, but it is prepared once "
                    "for all members and epochs: use random stages only in train="
                )
            if name != "train" and (order := getattr(value, "sampling", None)) is not None:
                raise SpecError(
                    f"Ensemble.{name} draws its records by {order!r}, but must have each once: use sampling= only "
                    "in train="
                )
            if not hasattr(value, "loader") and not (value is None if name != "train" else callable(value)):
                function = " or a function train(params) of one" if name == "train" else ""
                hint = ", a source: write Pipeline(source)" if hasattr(value, "where") else ""
                raise SpecError(f"Ensemble.{name} must be a pipelines.Pipeline{function}, got {value!r}{hint}")

    def _check_values(self) -> None:
        check_fields(self, ENSEMBLE_FIELDS)
        check_limits("Ensemble.limits", self.limits)
        task = as_task("Recipe.task", getattr(self.recipe, "task", None))
        if self.thresholds is not None and task is not None and task.kind not in LABELS:
            raise SpecError(f"Ensemble.thresholds are of classes and labels; the task is {task.kind}")
        for name in ("cache_bytes", "cache_size"):
            if getattr(self, name) is not None and self.cache is None:
                raise SpecError(f"Ensemble.{name} is given without a cache: give cache='memory' or 'disk' too")
        if self.cache_size is not None and self.sharing == "independent":
            raise SpecError(
                "Ensemble.cache_size is for shared pipelines: with sharing='independent' nothing is kept"
            )
        if self.cache_size is not None and self.out_of_fold:
            raise SpecError(
                "Ensemble.cache_size with out_of_fold: members would be evaluated on other images than they learn "
                "from; put stages.shrink_jpeg into train= instead"
            )
        if self.cache_format is not None and self.cache_size is None:
            raise SpecError("Ensemble.cache_format is of images that cache_size= makes smaller: give that too")
        if (self.cache == "disk") != (self.cache_dir is not None):
            raise SpecError("Ensemble.cache_dir is needed with cache='disk', and only with that")
        if self.cache_dir_bytes is not None and self.cache_dir is None:
            raise SpecError("Ensemble.cache_dir_bytes is given without cache_dir")
        if self.verify_sharing is not False and self.verify_sharing not in ("alone", "fail"):
            raise SpecError(
                f"Ensemble.verify_sharing must be 'alone', 'fail' or False, got {self.verify_sharing!r}"
            )

    def _check_search(self) -> None:
        assert self.search is not None
        self._check_identity(0, self.identify(0, {}))
        for trial in self._probes:
            self.search.check_epochs(trial.epochs)
        if any(each.name == self.objective for each in self.search.objectives):
            raise SpecError(
                f"Search.further_objectives has {self.objective!r}, which ranks the members already (objective=)"
            )
        if self.search.gain and self.valid is None:
            raise SpecError("Search.objective='gain' is measured on Ensemble.valid: give valid=")

    @functools.cached_property
    def _probes(self) -> list[Identity]:
        """Trials that stand for all of a search's, see `Search.probes`.

        Raises:
            SpecError: one cannot be trained.
        """
        assert self.search is not None
        parts, points = self.search.probes
        probes = []
        try:
            check_population(self.search, list_member_options(self.recipe), points)
            for params in parts:
                try:
                    probes.append(self.identify(0, params))
                except SpecError:  # it may need another option that the space has
                    probes.append(self.identify(0, {**points[0], **params}))
            for params in points:
                probes.append(trial := self.identify(0, params))
                check_hyperparameters(trial.optimizer, trial.schedule, params, partial=False)
            for trial in probes:
                self._check_identity(0, trial)
        except SpecError as error:
            raise SpecError(f"Search.space: {str(error).removeprefix('members[0]: ')}") from None
        return probes

    def largest(self, option: Literal["epochs", "batch_size"]) -> int:
        """The largest value of an option that a member may have, of those that are known before a search."""
        return max(int(getattr(each, option)) for each in (self._probes if self.search else [self]))

    def list_notices(self) -> list[str]:
        """What a user should know of the splits before training, one sentence each."""
        notices = [describe_overlap(row) for row in self.list_overlaps()]
        if self.valid is None and not has_own_loop(self.recipe):
            notices.append(
                "there is no valid=: members are not ranked, and no combined model is selected or calibrated"
            )
        if self.combine == "stack" and self.valid is not None and len(self.valid) < STACKED_ROWS:
            notices.append(
                f"combine='stack' needs {STACKED_ROWS} validation samples, and valid= has {len(self.valid)}: "
                "members will be averaged"
            )
        return notices

    @property
    def has_declared_objective(self) -> bool:
        """Whether the ensemble or its Recipe names the metric by which members are ranked."""
        return not isinstance(self.objective, Implied) or getattr(self.recipe, "objective", None) is not None

    def _check_identity(self, number: int, identity: Identity) -> None:
        """Raise SpecError for a member that trains no step, or averages no weights."""
        why = explain_no_averages(identity.averaging, identity.epochs)
        if self.drop_last and identity.batch_size > self.samples:
            why = (
                f"an epoch of {self.samples} samples has no whole batch of {identity.batch_size}: take a smaller "
                "batch_size or drop_last=False"
            )
        if why is not None:
            raise SpecError(f"members[{number}]: {why}")
        if not self.allow_overlap:
            check_fold_windows(identity.weights, self._distinct_pipelines())

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
        functions = None
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
            if isinstance(weighting, Folds) and (weighting.stratify or weighting.group or weighting.by):
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
            lineage=None
            if member.start is None
            else make_lineage(os.fspath(member.start), warm=True, parts=member.start_parts),
            **training,
            **needs | {name: _UNMEASURED[name] for name in auto},
        )


def check_ensemble(where: str, given: object) -> None:
    """Raise SpecError for what is no `Ensemble`, such as the function that makes one, and for a default device."""
    if not isinstance(given, Ensemble):
        call = ": call it, and give what it returns" if callable(given) else ""
        raise SpecError(f"{where}() takes an Ensemble, got {type(given).__name__}{call}")
    if given.search is not None and given.valid is None and not has_own_loop(given.recipe):
        raise SpecError(f"{where}(): trials are ranked on the validation split: give Ensemble(valid=...)")
    from pipelines.environment.library_settings import check_default_device
    from pipelines.errors import PipelineError

    try:
        check_default_device()
    except PipelineError as error:
        raise SpecError(str(error)) from None
