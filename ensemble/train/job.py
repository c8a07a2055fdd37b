"""The input of one worker process: its `Job`, and the `Inbox` of commands that arrive while it trains.

A member of width W is trained by W workers, its *ranks*; each gets one `Job`. This module does not import
torch: the controller and the executors make jobs without it.
"""

from __future__ import annotations

import dataclasses
import json
import queue
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

from ensemble.spec import Identity

Command = Literal["continue", "prune", "stop", "cancel"]
COMMANDS: tuple[Command, ...] = ("continue", "prune", "stop", "cancel")
#: What rank 0 has all ranks do after a step: a command, or a checkpoint that is due by `checkpoint_minutes`.
StepAction = Command | Literal["checkpoint"]
STEP_ACTIONS: tuple[StepAction, ...] = (*COMMANDS, "checkpoint")
#: Commands that take effect at the end of the current epoch, with the fields of each.
DEFERRED: dict[str, frozenset[str]] = {
    "alone": frozenset(),
    "join": frozenset(("feeder", "cohort")),
    "stop_after_epoch": frozenset(),
}
_FIELDS: dict[str, frozenset[str]] = {
    **dict.fromkeys(COMMANDS, frozenset[str]()),
    **DEFERRED,
    "bad_record": frozenset(("split", "index", "code")),
}
Outcome = Literal["finished", "pruned", "stopped", "cancelled", "failed"]

#: The member's name in the events and the log of a session that profiles members.
PROFILE = "profile"
#: That of one that rehearses a member, whose files are in a folder of this name.
REHEARSAL = "rehearsal"
#: Why early stopping has ended a member.
NO_IMPROVEMENT = "its objective improved no more"


class TrainingError(RuntimeError):
    """Training cannot continue as declared; the message is one line for the user. A retry does not help."""


class LabelError(TrainingError):
    """The label of a sample is not a class of the model."""


class FieldError(TrainingError):
    """The batches lack a field that a metric of the split asks for."""


class UnusableData(TrainingError):
    """Records of a split on which members are evaluated cannot be prepared."""


class Diverged(TrainingError):
    """The loss is NaN or infinite."""


class ShapeMismatchError(TrainingError):
    """A model cannot start with the weights that were declared for it, and never will."""


class StopTraining(BaseException):
    """Leaves a training loop on a command.

    It is no Exception, so that an `except Exception` in the user's own loop does not catch it.

    Attributes:
        is_unsaved: whether a checkpoint is still to be written, once the loop has been left.
    """

    def __init__(self, outcome: Outcome, *, is_unsaved: bool = False) -> None:
        super().__init__(outcome)
        self.outcome, self.is_unsaved = outcome, is_unsaved


class SharingDiffers(StopTraining):
    """The member has learned from samples that its own pipeline does not make.

    Attributes:
        begins_anew: whether it is to begin anew, without a feeder.
    """

    def __init__(self, error: str, *, begins_anew: bool) -> None:
        super().__init__("failed")
        self.error, self.begins_anew = error, begins_anew


@dataclass(frozen=True, kw_only=True)
class ProfileRequest:
    """The members of which a session measures a few steps, one after the other, instead of training.

    Attributes:
        members: to be measured; of those with equal signatures, one.
        known: signatures that were measured before with as many workers on such a device.
        steps_s: seconds of steps to measure of each, approximately.
        evaluations: how often a batch of a split is evaluated; once suffices to measure memory.
        is_all: whether these stand for all members of the run, and nothing was measured before.
    """

    members: list[Identity]
    known: list[str]
    steps_s: float
    evaluations: int = 1
    is_all: bool = False


@dataclass(frozen=True, kw_only=True)
class RehearsalRequest:
    """A part of a rehearsal: train short epochs, or go on from the checkpoints of those in a fresh process.

    Attributes:
        members: of which the first is rehearsed; the others may have another structure.
        trained: the attempt that has trained; None: this one does.
        again: the attempt that has gone another way, which this fresh process repeats; None: it is the first.
        proves: name and digest of a checkpoint of the first member, which is in training: whether one can go on
            from it.
    """

    members: list[Identity]
    trained: int | None = None
    again: int | None = None
    proves: tuple[str, str | None] | None = None


@dataclass(frozen=True, kw_only=True)
class Job:
    """One rank of one attempt to train a member, or of a session that profiles or rehearses some.

    Attributes:
        run_dir: the run directory, as a path on this node.
        attempt: the number of this start of the member; the first is 0.
        rank: of this worker, below `identity.workers`.
        rendezvous: `file:///...`, by which the ranks of this attempt meet, used once; None for a single worker.
        interface: the network interface that collectives are bound to, "lo" on one node; None leaves it to torch.
        local_world: how many of the member's ranks are on this node; None: all.
        gpu: the id of its GPU (`ensemble.schedule.needs.Node.gpu_ids`); None on the CPU.
        feeder: the address of the node's feeder; None: the member prepares its own batches.
        awaits_pruner: whether rank 0 waits for a decision after every epoch (a pruner decides).
        timeout_s: how long a rank waits in a collective before it takes another rank to be lost.
        bad: [split, index, code] of records that kill or hang the process that prepares them
            (`pipelines.samples.poison_records`).
        checkpoints: [name, digest] of the files to resume from, in the member's directory: the first that is
            whole; where none is, the member begins anew. A digest is None where the log has none.
        exchange_plan: what an earlier attempt has planned for the exchange of gradients, for one without a
            checkpoint (`ensemble.comm.exchange_plan.ExchangePlan` as a dict): it has the same sums, on whatever
            hosts.
        profile: what to measure; `identity` is then no member's. None: train.
        rehearsal: what to rehearse; `identity` is then that of the member, with another name. None: train.
        accepts_data: whether its checkpoint may be of other training data.
        files: what the declaration and the code of the run are (`ensemble.store.RunState.files`), so that not each
            worker reads the whole log for it. None: it does.
    """

    run_dir: str
    identity: Identity
    attempt: int
    rank: int
    rendezvous: str | None
    interface: str | None
    device: str
    feeder: str | None
    awaits_pruner: bool = False
    node: str = "local"
    timeout_s: float = 1800.0
    bad: list[list[Any]] = dataclasses.field(default_factory=list)
    checkpoints: list[tuple[str, str | None]] = dataclasses.field(default_factory=list)
    profile: ProfileRequest | None = None
    rehearsal: RehearsalRequest | None = None
    gpu: str | None = None
    local_world: int | None = None
    exchange_plan: dict[str, Any] | None = None
    files: dict[str, list[str]] | None = None
    accepts_data: bool = False

    @property
    def is_of_member(self) -> bool:
        """Whether it trains a member, whose resources it uses."""
        return self.profile is None and self.rehearsal is None

    def as_json(self) -> str:
        """One line of JSON that `from_json` reads back to an equal Job (hyperparameters must be JSON values)."""
        fields = {**vars(self), "identity": vars(self.identity)}  # dataclasses.asdict copies each value
        for name in ("profile", "rehearsal"):
            if (request := getattr(self, name)) is not None:
                fields[name] = {**vars(request), "members": [vars(identity) for identity in request.members]}
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> Job:
        """The Job that `as_json` wrote."""
        fields: dict[str, Any] = json.loads(text)
        for name, kind in (("profile", ProfileRequest), ("rehearsal", RehearsalRequest)):
            if (request := fields[name]) is not None:
                members = [Identity(**identity) for identity in request["members"]]
                fields[name] = kind(**{**request, "members": members})
        fields["checkpoints"] = [(name, digest) for name, digest in fields["checkpoints"]]
        return cls(**{**fields, "identity": Identity(**fields["identity"])})


class Inbox:
    """Commands to a worker, in order; any thread may `put`, one thread reads.

    `"continue"` and `"prune"` answer an epoch of a member that awaits the pruner; `"stop"` asks for a checkpoint
    at the next step boundary and a resumable end; `"cancel"` ends the member without one. Commands that take
    effect between two epochs are read separately, by `pop_deferred`: `"alone"` (prepare its own batches from then
    on), `"join"` (read the stream of another feeder: its address, and its cohort for the record) and
    `"stop_after_epoch"`. `"bad_record"` (split,
    index, code) names a record that is not to be prepared; `on_record` receives it at once.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._deferred: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._records: queue.SimpleQueue[tuple[str, int, int]] = queue.SimpleQueue()
        self._on_record: Callable[[str, int, int], None] | None = None

    def put(self, command: str, **fields: Any) -> None:
        """Add a command."""
        expected = _FIELDS.get(command)
        if expected is None or set(fields) != expected:
            raise ValueError(f"no command {command!r} with {sorted(fields)} (valid: {', '.join(_FIELDS)})")
        if command in DEFERRED:
            self._deferred.put({"command": command, **fields})
        elif command == "bad_record":
            self._records.put((fields["split"], fields["index"], fields["code"]))
            self._deliver()
        else:
            self._queue.put(cast(Command, command))

    def on_record(self, add: Callable[[str, int, int], None]) -> None:
        """Call `add` with each `"bad_record"` so far, and with later ones in the thread that puts them."""
        self._on_record = add
        self._deliver()

    def _deliver(self) -> None:
        while self._on_record is not None:
            try:
                record = self._records.get_nowait()
            except queue.Empty:
                return
            self._on_record(*record)

    def poll(self) -> Command | None:
        """The next command; None if there is none now."""
        return None if self._queue.empty() else self._queue.get()

    def wait(self) -> Command:
        """Block until there is a command, and return it."""
        return self._queue.get()

    def pop_deferred(self) -> dict[str, Any] | None:
        """The deferred command to execute now that an epoch has ended: a stop if there is one, else the last."""
        commands: list[dict[str, Any]] = []
        while not self._deferred.empty():
            commands.append(self._deferred.get())
        stops = [command for command in commands if command["command"] == "stop_after_epoch"]
        return next(iter(stops), commands[-1] if commands else None)
