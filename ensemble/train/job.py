"""What one worker process is told: its `Job`, and the `Inbox` through which commands reach it while it trains.

A member of width W is trained by W workers, its *ranks*; each gets one `Job`. Nothing here imports torch: the
controller and the executors make jobs without it.
"""

from __future__ import annotations

import dataclasses
import json
import queue
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from ensemble.spec import Identity

Command = Literal["continue", "prune", "stop", "cancel"]
COMMANDS: tuple[Command, ...] = ("continue", "prune", "stop", "cancel")
#: Commands that wait for the end of the epoch in training, with the fields that each has beside its name.
LATER: dict[str, frozenset[str]] = {
    "alone": frozenset(),
    "join": frozenset(("feeder", "cohort")),
    "stop_after_epoch": frozenset(),
}
Outcome = Literal["finished", "pruned", "stopped", "cancelled", "failed"]


#: Stands for a member in what a session says that measures members, and names its log.
PROFILE = "profile"


class TrainingError(RuntimeError):
    """Training cannot go on as declared; the message is one line made for the user. Trying again is of no use."""


class LabelError(TrainingError):
    """A sample's label is no class of the model."""


class Diverged(TrainingError):
    """The loss is NaN or infinite."""


class Ended(BaseException):
    """Leaves a training loop because it was asked to end.

    It passes through the user's own loop, hence no Exception: an `except Exception` there must not hold it up.
    """

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome


@dataclass(frozen=True, kw_only=True)
class ToProfile:
    """What a session measures instead of training: a few steps of members, one after the other.

    Attributes:
        members: to be measured; those of one shape once.
        known: shapes that have been measured with so many workers on such a device.
        steps_s: seconds of steps to measure of each, roughly.
    """

    members: list[Identity]
    known: list[str]
    steps_s: float


@dataclass(frozen=True, kw_only=True)
class Job:
    """One rank of one attempt to train a member, or of a session that measures several.

    Attributes:
        run_dir: the run directory, a path that this node sees.
        identity: the member.
        attempt: counts its starts; 0 is the first.
        rank: of this worker, below `identity.workers`.
        rendezvous: where the ranks of this attempt meet, `file:///...` and used once; None for a single worker.
        interface: the network interface that collectives are bound to, "lo" on one node; None leaves it to torch.
        device: "cpu" or "cuda:<index>".
        feeder: the address of the node's feeder; None: the member prepares its own batches.
        gated: whether rank 0 waits for a verdict after every epoch (a pruner decides).
        node: the name of the node, for the events.
        timeout_s: how long a rank waits in a collective for the others before it takes one of them to be lost.
        bad: [split, index, code] of records that end or hang whoever prepares them
        (`pipelines.prepare.deadly_records`).
        checkpoint: the file to go on from, beside the member's others; None where there is none.
        profile: what to measure; `identity` is then none of a member. None: train.
    """

    run_dir: str
    identity: Identity
    attempt: int
    rank: int
    rendezvous: str | None
    interface: str | None
    device: str
    feeder: str | None
    gated: bool = False
    node: str = "local"
    timeout_s: float = 1800.0
    bad: list[list[Any]] = dataclasses.field(default_factory=list)
    checkpoint: str | None = None
    profile: ToProfile | None = None

    def as_json(self) -> str:
        """One line of JSON that `from_json` reads back to an equal Job (hyperparameters must be JSON values).

        Of members to be measured, what is the same for all of them is said once.
        """
        fields = dataclasses.asdict(self)
        if fields["profile"] is not None:
            fields["profile"]["members"] = _common(fields["profile"]["members"])
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> Job:
        """The Job that `as_json` wrote."""
        fields: dict[str, Any] = json.loads(text)
        profile: dict[str, Any] | None = fields["profile"]
        if profile is not None:
            same, own = profile["members"]
            members = [Identity(**{**same, **each}) for each in own]
            fields["profile"] = ToProfile(**{**profile, "members": members})
        return cls(**{**fields, "identity": Identity(**fields["identity"])})


def _common(rows: list[dict[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The items that all rows have in common, to the letter, and of each row the others."""
    told = [{key: json.dumps(value) for key, value in row.items()} for row in rows]
    same = {key for key in rows[0] if all(text[key] == told[0][key] for text in told)} if rows else set()
    rest = [{key: value for key, value in row.items() if key not in same} for row in rows]
    return {key: rows[0][key] for key in same}, rest


class Inbox:
    """Commands to a worker, in order; any thread may `put`, one thread reads.

    `"continue"` and `"prune"` answer a gated epoch; `"stop"` asks for a checkpoint at the next step boundary and
    a resumable end; `"cancel"` ends the member without one. What is to change between two epochs is taken apart
    from these, by `later`: `"alone"` (prepare its own batches from then on), `"join"` (read the stream of another
    feeder: its address, and its cohort for the record) and `"stop_after_epoch"`. `"bad_record"` (split, index,
    code) names one that is not to be prepared; it reaches `on_record` at once.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._later: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._records: queue.SimpleQueue[tuple[str, int, int]] = queue.SimpleQueue()
        self._on_record: Callable[[str, int, int], None] | None = None

    def put(self, command: str, **fields: Any) -> None:
        """Add a command; a ValueError names the valid ones, or the fields that it has."""
        if command in LATER:
            if set(fields) != LATER[command]:
                raise ValueError(f"{command!r} has the fields {sorted(LATER[command])}, got {sorted(fields)}")
            self._later.put({"command": command, **fields})
            return
        if command == "bad_record" and set(fields) == {"split", "index", "code"}:
            self._records.put((fields["split"], fields["index"], fields["code"]))
            self._hand_on()
            return
        for known in COMMANDS:
            if command == known and not fields:
                self._queue.put(known)
                return
        raise ValueError(f"no command {command!r} with {sorted(fields)} (valid: {', '.join([*COMMANDS, *LATER])})")

    def on_record(self, take: Callable[[str, int, int], None]) -> None:
        """Let `take` have each `"bad_record"` at once, in the thread that puts it, and those that have come."""
        self._on_record = take
        self._hand_on()

    def _hand_on(self) -> None:
        while self._on_record is not None:
            try:
                record = self._records.get_nowait()
            except queue.Empty:
                return
            self._on_record(*record)

    def poll(self) -> Command | None:
        """The next command, None when there is none now."""
        try:
            return self._queue.get_nowait()
        except queue.Empty:
            return None

    def wait(self) -> Command:
        """The next command; blocks until there is one."""
        return self._queue.get()

    def later(self) -> dict[str, Any] | None:
        """What is to change now that an epoch has ended: the last that was asked, but an end before all else."""
        asked: list[dict[str, Any]] = []
        while not self._later.empty():  # this thread alone takes from it
            asked.append(self._later.get())
        ends = [each for each in asked if each["command"] == "stop_after_epoch"]
        return ends[0] if ends else asked[-1] if asked else None
