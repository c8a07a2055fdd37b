"""Events of the shared streams and their samples."""

from __future__ import annotations

from ensemble.events.base import Event, Json


class Feeder(Event):
    """From time to time, of each feeder.

    Attributes:
        fullness: `ring`: share of the ring that is full, `workers`: share of the workers that are busy,
            `link`: the same of the link between nodes, `waiting`: share of the time in which
            some consumer waited, `full`: in which the ring had no room for another block. They are means.
        recorded_s: seconds over which they are.
        cache: `samples`, `bytes`, `limit`, `hits`, `wrong`, `expected_bytes` (of all samples, estimated).
        group: `generation`, `nodes`, `design`, `preparers`, `link_bps`, `sent_bytes`, `received`,
            `lost_groups`, `pid`.
    """

    node: str
    cohort: int
    pid: int | None = None
    members: int | None = None
    workers: int | None = None
    capacity: int | None = None
    ring_bytes: int | None = None
    prepared: int = 0
    consumed: int = 0
    skipped: int = 0
    detached: int = 0
    fullness: dict[str, float] = {}
    recorded_s: float | None = None
    cache: Json | None = None
    group: Json | None = None
    sent_bytes: int | None = None
    restarts: int = 0


class FeederLost(Event):
    """A feeder has ended; members prepare their own batches."""

    node: str | None = None
    cohort: int | None = None
    detail: str = ""


class FeederRestarted(Event):
    """There is a new one."""

    node: str
    cohort: int
    restarts: int = 0


class SharingEnded(Event):
    """A stream is shared no more, or cannot be."""

    node: str | None = None
    cohort: int | None = None
    detail: str = ""


class SampleDifference(Event):
    """Shared samples are not what their reader's own pipeline prepares.

    Attributes:
        member: null: of a cache, on `node` for `cohort`.
    """

    member: str | None = None
    attempt: int | None = None
    node: str | None = None
    cohort: int | None = None
    split: str
    result: str
    action: str
    epoch: int | None = None
    place: int | None = None
    index: int | None = None
    field: str | None = None
    position: list[int] = []
    size: float | None = None
    detail: str = ""


class BadRecord(Event):
    """A record crashes or hangs whoever prepares it.

    Attributes:
        member: which has found it by itself.
    """

    node: str | None = None
    cohort: int | None = None
    member: str | None = None
    attempt: int | None = None
    split: str
    index: int
    where: str = ""
    reason: str = ""
    code: int | None = None
