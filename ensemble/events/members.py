"""Events of members and their attempts."""

from __future__ import annotations

from typing import Any

from ensemble.events.base import AttemptEvent, Json, MemberEvent, Origin


class MemberDeclared(MemberEvent, tag="member"):
    """A member is declared, or declared otherwise than before (`ensemble.spec.identity.Identity`).

    Attributes:
        optimizer, schedule, compression, communicator: `name` and its [options](options.md), defaults
            included.
        weights: `kind`; of `bootstrap` `seed`, of `fold` `k`, `held_out`, `seed` and the names of fields
            that are given.
        early_stopping: `patience`, `min_delta`.
        averaging, compile: `name` and its [options](options.md), defaults included.
        lineage: `from`, `warm`, `epoch`, `step`, `weights_sha256`, `code`, and `whole` where it goes on from the
            whole state; `declared`: number of the declared member whose callbacks it has, if `from` is another.
        population: `generation`, `place`, `first`, `size`, `generations`, `epochs`.
        selected_by: `metric`, `mode`.
        widened: `from`: its workers before, `epoch` from which on it has more.
    """

    number: int | None = None
    params: Json = {}
    seed: int | None = None
    first_epoch: int | None = None
    epochs: int | None = None
    batch_size: int | None = None
    workers: int = 1
    threads: int | None = None
    precision: str = "fp32"
    loss_scale: float | str = "dynamic"
    optimizer: Json | None = None
    schedule: Json | None = None
    accumulate: int = 1
    compression: Json | None = None
    communicator: Json | None = None
    weights: Json | None = None
    early_stopping: Json | None = None
    keep: str = "last"
    averaging: Json | None = None
    validate_every: int = 0
    compile: Json | None = None
    mixup: float = 0.0
    callbacks: list[Any] = []
    cpus_per_worker: float | None = None
    gpus_per_worker: float | None = None
    memory_gb: float | None = None
    span_nodes: bool | str | None = None
    nodes: Json | None = None
    lineage: Json | None = None
    auto: list[str] = []
    added: bool = False
    outside: str | None = None
    selected_by: Json | None = None
    epochs_before: int | None = None
    population: Json | None = None
    widened: Json | None = None
    widened_from: int | None = None


class Placed(AttemptEvent):
    """It was given a place.

    Attributes:
        device: "cpu" or the model of its GPU.
    """

    node: str
    nodes: list[str] = []
    devices: list[Any] = []
    device: str | None = None
    cohort: int | None = None
    feeder: str | None = None
    first_epoch: int | None = None


class DeviceChanged(AttemptEvent):
    """It goes on on another device than before."""

    before: str | None = None
    device: str | None = None


class Epoch(AttemptEvent):
    """An epoch has ended.

    Attributes:
        metrics: *metric*: value.
        grad_norm: of the last step, before it was clipped; None where nothing is clipped.
        validations: pairs of a step and metrics, of the evaluations within the epoch (`validate_every`).
        reports_later: whether the loop has not evaluated yet, and will.
    """

    epoch: int
    step: int | None = None
    metrics: Json = {}
    train_loss: float | None = None
    lr: float | None = None
    samples: int | None = None
    samples_per_s: float | None = None
    wall_s: float | None = None
    train_s: float | None = None
    waited_s: float | None = None
    queued_s: float | None = None
    sync_s: float | None = None
    sent_bytes: float | None = None
    shared_batches: int | None = None
    private_batches: int | None = None
    private_skipped: int | None = None
    cpus: float | None = None
    memory_gb: float | None = None
    loss_scale: float | None = None
    grad_norm: float | None = None
    skipped_steps: int | None = None
    validations: list[Any] = []
    reports_later: bool = False


class Started(AttemptEvent):
    """Its processes run.

    Attributes:
        last_epoch: the fields of the `epoch` event that it continues from.
    """

    pid: int | None = None
    epoch: int | None = None
    step: int | None = None
    first_epoch: int | None = None
    last_epoch: Json | None = None
    startup_cpu_s: float | None = None


class ExchangeMeasured(AttemptEvent, tag="plan"):
    """The exchange of gradients was measured.

    Attributes:
        tuned: `name`, `groups`, `ways`, `bucket_bytes`, `measured`: a list of `what`, `size` in bytes,
            `seconds`.
        auto: pairs: a compression, and how many buckets of gradients it has.
    """

    tuned: Json | None = None
    rates: Any = None
    auto: Any = None


class StepsDone(AttemptEvent, tag="progress"):
    """From time to time within an epoch, and after each evaluation in it (`validate_every`).

    Attributes:
        metrics: of an evaluation after `step` of `steps` steps: *metric*: value.
        saves_bytes: where it begins to write a checkpoint of 1 GiB or more.
    """

    epoch: int
    step: int
    steps: int | None = None
    samples_per_s: float | None = None
    metrics: Json = {}
    saves_bytes: int | None = None


class Checkpoint(AttemptEvent):
    """A checkpoint was written.

    Attributes:
        write_s: seconds that it took.
        changed: whether parameters, their `requires_grad` or groups are others than at the last one.
    """

    epoch: int
    step: int
    path: str
    digest: str | None = None
    weights_sha256: str | None = None
    write_s: float | None = None
    changed: bool = False
    has_weights_only: bool = False


class CheckpointReduced(AttemptEvent):
    """It has ended, and of its checkpoint the weights alone are kept, or nothing
    ([`keep_checkpoints`](../concepts/run-directory.md#what-is-kept-of-checkpoints)); what was there before is
    removed after this.

    Attributes:
        removed: the name of the file.
        path: of what is kept.
    """

    removed: str
    path: str | None = None
    digest: str | None = None
    freed_bytes: int | None = None


class Damaged(AttemptEvent):
    """A file of it is not what was written, or is gone, and is not used."""

    file: str
    error: str = ""
    code: str | None = None


class Moved(AttemptEvent):
    """It reads another stream now."""

    cohort: int | None = None
    feeder: str | None = None
    epoch: int | None = None
    step: int | None = None
    shared: bool | None = None


class Paused(AttemptEvent):
    """A user has paused it, or it leaves its place for a time."""

    epoch: int | None = None
    step: int | None = None


class Resumed(AttemptEvent):
    """A user lets it go on."""


class Finished(AttemptEvent):
    """It was trained to its end.

    Attributes:
        metrics: *metric*: value.
        kept: `metric`, `mode`, `epoch`, `step`, `value`; or `by`: "use_weights", of weights that a train
            function has handed over.
        early_stopping: `patience`, `min_delta`, `epochs` that were declared, `best` with the keys of
            `kept`; or `reason` and `epochs`, where its train function has ended it.
        predictions: digests by split.
        files: digests of what its train function has saved in `member.folder`, by path.
        checkpoint: the last.
        constraints: of a trial whose search has some: *name*: by how much it is violated, at most 0 where not.
        outdated: the error for which it could not be evaluated again: what it had finished with still holds.
    """

    epoch: int | None = None
    step: int | None = None
    metrics: Json | None = None
    constraints: dict[str, float] | None = None
    weights_sha256: str | None = None
    kept: Json | None = None
    early_stopping: Json | None = None
    predictions: dict[str, str] | None = None
    files: dict[str, str] | None = None
    checkpoint: Checkpoint | None = None
    outdated: str | None = None


class Pruned(AttemptEvent):
    """A pruner ended the trial."""

    epoch: int | None = None


class Stopped(AttemptEvent):
    """It wrote a checkpoint and ended, because the run stops or it changes its place."""

    epoch: int | None = None
    step: int | None = None
    metrics: Json | None = None


class Cancelled(AttemptEvent):
    """A user has ended it."""

    epoch: int | None = None
    step: int | None = None
    metrics: Json | None = None


class Failed(AttemptEvent):
    """An attempt failed.

    Attributes:
        retry: whether it is tried again.
        node: of the rank that failed.
    """

    error: str = ""
    reason: str | None = None
    retry: bool = False
    node: str | None = None


class Cost(AttemptEvent):
    """The account of a trial is known (`further_objectives=`)."""

    cpu_s: float | None = None
    energy_j: float | None = None
    energy_origin: Origin = "unavailable"


class Remark(AttemptEvent):
    """The member has found what its user should know: why it will not be combined, what may not be meant.

    Attributes:
        text: a sentence.
    """

    text: str


class UnusedHyperparameters(AttemptEvent):
    """The recipe never read these hyperparameters.

    Attributes:
        meant: of a misspelt one, the name that was looked for.
    """

    params: list[str]
    meant: dict[str, str] = {}
