"""A member's `Identity`: everything that determines its weights, recorded before its first step.

Its *cost key* is a digest of everything that the cost of its steps can depend on. It is computed from the identity
alone, without building the network. The log calls it `outline`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ensemble.spec.nodes import Selection, as_items, selects_gpus
from ensemble.spec.options import OPTIMIZERS, SCHEDULES, TRAINING_OPTIONS, resolve
from ensemble.spec.sample_weights import needs_weighing

Precision = Literal["fp32", "bf16", "fp16"]
PRECISIONS = ("fp32", "bf16", "fp16")
_OPTIONS = frozenset(name for table in (OPTIMIZERS, SCHEDULES) for known in table.values() for name in known)


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Everything that determines a member's weights, and what it needs of a node.

    Attributes:
        member: its name, `member-<number>`.
        first_epoch: the stream's epoch in which it trains its first epoch; None until it is known: a member that
            joins a running stream gets it when it starts.
        weights: its sample weights as `ensemble.spec.sample_weights.as_record` returns them; None: all are 1.
        optimizer, schedule, compression, communicator: as `ensemble.spec.options.resolve` returns them; None: the
            Recipe's own or none, no compression, torch.distributed.
        early_stopping, keep, averaging, validate_every, compile, mixup: as `ensemble.spec.loops` resolves them;
            None or 0: not used.
        callbacks: class and identity of each declared callback that determines weights.
        selected_by: the metric and the mode by which early stopping and `keep="best"` decide; None without them.
        auto: which of `workers`, `cpus_per_worker`, `gpus_per_worker` and `memory_gb` are to be measured. Until
            then these fields hold a safe guess: one worker, a whole core, a whole GPU, unknown.
        added: whether it was added to the run in progress, beyond what the ensemble declares.
        outside: why a search does not learn from it; None where it does.
        widened_from: its number of workers before it was given more; None where it was not. Learning-rate rules
            that count workers use it, because the global batch has not grown with the workers.
        epochs_before: its number of epochs as it was declared, if it was given more after it had ended; None where
            it was not. Learning-rate schedules go by the declared number.
        population: of a member of a population its `generation`, its `place`, the number of the `first` member in
            that, the `size`, the number of `generations`, and the `epochs` of the whole training, by which its
            schedules go while it ends with its generation; else None.
        span_nodes: see `ensemble.spec.member.Resources`; "spread" where two nodes were measured to be faster.
        nodes: on which nodes it may be, as `ensemble.spec.nodes.as_selection` returns it; None: on all.
        lineage: of a clone: the member that it is cloned `from`, and whether it is `warm`, so that it starts with
            the weights that this one had at the end of `step` steps of its own `epoch` (`weights_sha256`; None
            where it is not warm). `code`: fingerprint of other code that they were trained with, or None. Of a
            member with `Member.start` the same, `from` being what was declared; the digest is None until the run
            has its copy, and `epoch` and `step` are None for a plain file of weights. `whole`: whether it goes on
            from the whole state, own epochs included, as a member of a population does; `digest`: of that file.
            `declared`: the number of the declared member whose callbacks a clone has, where `from` is another.
    """

    member: str
    number: int
    params: dict[str, Any]
    seed: int
    workers: int
    threads: int
    precision: Precision
    epochs: int
    batch_size: int
    cpus_per_worker: float
    gpus_per_worker: float
    memory_gb: float | None
    first_epoch: int | None = 0
    weights: dict[str, Any] | None = None
    loss_scale: float | Literal["dynamic"] = "dynamic"
    accumulate: int = 1
    optimizer: dict[str, Any] | None = None
    schedule: dict[str, Any] | None = None
    compression: dict[str, Any] | None = None
    communicator: dict[str, Any] | None = None
    early_stopping: dict[str, Any] | None = None
    keep: Literal["last", "best"] = "last"
    averaging: dict[str, Any] | None = None
    validate_every: int = 0
    compile: dict[str, Any] | None = None
    mixup: float = 0.0
    callbacks: list[Any] = field(default_factory=list)
    selected_by: dict[str, Any] | None = None
    auto: list[str] = field(default_factory=list)
    added: bool = False
    outside: str | None = None
    widened_from: int | None = None
    span_nodes: bool | Literal["auto", "spread"] = True
    lineage: dict[str, Any] | None = None
    epochs_before: int | None = None
    population: dict[str, Any] | None = None
    nodes: dict[str, Any] | None = None

    @property
    def scheduled_epochs(self) -> int:
        """The number of epochs by which what depends on the length of a training goes."""
        return int(self.population["epochs"]) if self.population else self.epochs_before or self.epochs

    def list_step_options(self) -> list[str]:
        """Names of its options that `member.step` executes, which a loop with steps of its own does not call."""
        declared = {
            "accumulate": self.accumulate != 1,
            "compression": self.compression is not None,
            "mixup": bool(self.mixup),
            "validate_every": bool(self.validate_every),
            "weights": needs_weighing(self.weights),
            "loss_scale": self.loss_scale != "dynamic",
        }
        return [name for name, is_declared in declared.items() if is_declared]

    def as_dict(self) -> dict[str, Any]:
        """The identity as plain JSON values."""
        return dataclasses.asdict(self)

    def compared_fields(self) -> dict[str, Any]:
        """The fields that determine the weights, except `first_epoch`; `lineage` only of a warm clone."""
        ignored = {"cpus_per_worker", "gpus_per_worker", "memory_gb", "first_epoch", "auto", "added", "outside"}
        ignored |= {"widened_from", "epochs_before", "span_nodes", "nodes"}  # width and epochs are compared
        if "workers" in self.auto:
            ignored.add("workers")
        fields = {name: value for name, value in self.as_dict().items() if name not in ignored}
        return fields | {"lineage": select_warm(self.lineage)}

    def list_differences(self, record: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
        """(field, before, now) of the `compared_fields` in which a recorded identity differs.

        Fields that it lacks are not compared. Options that its optimizer, for example, lacks are newer than the
        record and had their defaults, unless a hyperparameter of the same name takes their place now.
        """
        recorded = {**record, "lineage": select_warm(record.get("lineage"))}
        for name, table in TRAINING_OPTIONS.items():
            if before := recorded.get(name):
                filled = resolve(name, before, table)
                if not (filled.keys() - before.keys()) & recorded["params"].keys():
                    recorded[name] = filled
        return [
            (name, recorded[name], value)
            for name, value in self.compared_fields().items()
            if name in recorded
            and recorded[name] != value
            and not (name == "lineage" and is_same_start(value, recorded[name]))
        ]


def make_lineage(
    source: str,
    *,
    warm: bool = False,
    code: str | None = None,
    whole: bool = False,
) -> dict[str, Any]:
    """The `Identity.lineage` of a clone, or of a member with a `start`; a warm one's weights are not known yet.

    Args:
        source: the member that is cloned, or a `Member.start`.
        whole: whether a warm one goes on from the whole state of that member.
    """
    made = {"from": source, "epoch": None, "step": None, "warm": warm, "weights_sha256": None, "code": code}
    return made | ({"whole": True, "digest": None} if whole else {})


def find_declared(number: int, lineage: Mapping[str, Any] | None) -> int:
    """The number of the declared member from which a clone descends; of another member its own."""
    if lineage is None:
        return number
    source = str(lineage["from"])
    copied = int(source.removeprefix("member-")) if re.fullmatch(r"member-\d+", source) else number
    return int(lineage.get("declared", copied))


def is_same_start(lineage: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> bool:
    """Whether two members start with the same weights; where a digest is not known yet, if of the same name."""
    one, two = (select_warm(None if lineage_of is None else dict(lineage_of)) for lineage_of in (lineage, other))
    if one is None or two is None or None not in (one["weights_sha256"], two["weights_sha256"]):
        return one == two
    return bool(one["from"] == two["from"])


def select_warm(lineage: dict[str, Any] | None) -> dict[str, Any] | None:
    """The lineage of a warm clone; None for another member's, which does not determine its weights."""
    return lineage if lineage is not None and lineage["warm"] else None


def find_first_own_epoch(lineage: Mapping[str, Any] | None) -> int:
    """The own epoch with which a member begins: 0, but where it goes on from the whole state of another."""
    return int(lineage["epoch"] or 0) if lineage is not None and lineage.get("whole") else 0


def field_defaults() -> dict[str, Any]:
    """The default values of the identity's optional fields."""
    return {
        one.name: one.default if one.default_factory is dataclasses.MISSING else one.default_factory()
        for one in dataclasses.fields(Identity)
        if (one.default, one.default_factory) != (dataclasses.MISSING, dataclasses.MISSING)
    }


def compute_cost_key(identity: Identity) -> str:
    """The cost key of a member: members with equal keys have equal costs."""
    width = None if "workers" in identity.auto else identity.workers
    gpus = select_gpu_part(identity)
    return hash_json([select_hyperparameters(identity), cost_options(identity), width, *([gpus] if gpus else [])])


def select_gpu_part(identity: Identity) -> Selection:
    """The part of a member's selection of nodes that is of GPUs: members with another one train on others."""
    return tuple(item for item in as_items(identity.nodes) if selects_gpus((item,)))


def select_hyperparameters(identity: Identity) -> dict[str, Any]:
    """Hyperparameters that may affect the cost; options of an optimizer or a schedule (`lr`) are masked."""
    return {name: mask_magnitude(value) if name in _OPTIONS else value for name, value in identity.params.items()}


def cost_options(identity: Identity) -> dict[str, Any]:
    """Options of a member, besides hyperparameters and workers, that affect the cost."""
    named = ("batch_size", "precision", "accumulate", "threads")
    chosen = {name: getattr(identity, name) for name in named}
    chosen["weighted"] = identity.weights is not None
    chosen["optimizer"] = {name: mask_magnitude(value) for name, value in (identity.optimizer or {}).items()}
    chosen |= {name: value for name in ("averaging", "compile") if (value := getattr(identity, name)) is not None}
    chosen |= {"keep": "best"} if identity.keep == "best" else {}
    chosen |= {"mixup": True} if identity.mixup else {}
    chosen |= {"callbacks": identity.callbacks} if identity.callbacks else {}
    chosen |= {"gpus": 0} if not (identity.gpus_per_worker or "gpus_per_worker" in identity.auto) else {}
    if identity.workers > 1 or "workers" in identity.auto:
        chosen |= {"compression": identity.compression, "communicator": identity.communicator}
    return chosen


def mask_magnitude(value: Any) -> Any:
    """The value with each number replaced by whether it is 0: its magnitude does not affect the cost."""
    if isinstance(value, tuple | list):
        return [mask_magnitude(item) for item in value]
    return value == 0 if isinstance(value, int | float) and not isinstance(value, bool) else value


def hash_json(value: Any) -> str:
    """The first 16 hex digits of the SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
