"""The runs of one Ray cluster know each other by a small actor, which holds a row of each.

The actor is created by whichever run finds none, under a name, and is not detached: it ends with the run that
created it, and the others create it again at their next beat. So nothing outlives the last run. It holds rows as
bytes and knows nothing of them; a row of another `VERSION` is left out. Each run sends its row about once a second
and is answered with the rows of all runs that did so lately; no call waits for the actor.

`read_rows` reads them from outside a run, and creates nothing.
"""

from __future__ import annotations

import functools
import getpass
import logging
import math
import os
import secrets
import socket
import time
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from ensemble.schedule.fairness import RunClaim

VERSION = 1
NAMESPACE, NAME = "ray-ensemble", "ray-ensemble-runs"
BEAT_S = 1.0
STALE_S = 30.0  # after which a row that was not sent again is left out: a busy machine sends late
_ANSWER_S = 5.0  # for the actor to answer; a new one is looked for then
_GRACE_S = 5.0  # for other runs to send their rows to a new actor, too

log = logging.getLogger(__name__)


class RunRow(Struct, kw_only=True):
    """What a run says of itself.

    Attributes:
        version: of this form.
        run_id: of the run, as in its log.
        name: of its directory.
        user, host, pid: of the process that drives it.
        directory: of the run.
        started: of this start, in Unix seconds.
        claim: what it holds and what it waits for, by Ray's ids of nodes; its priority, weight and limits. Its
            `run` is of this start: a copy of the run's directory has the same `run_id`.
        running, waiting: how many members have a place, and how many wait for one.
        giving_back: to whom it gives something back as soon as it can, in words; empty: to nobody.
        age_s: seconds since the row was sent, as its reader is told.
    """

    version: int = VERSION
    run_id: str
    name: str
    user: str
    host: str
    pid: int
    directory: str
    started: float
    claim: RunClaim
    running: int = 0
    waiting: int = 0
    giving_back: str = ""
    age_s: float = 0.0

    def describe(self) -> str:
        """The run, for users of others."""
        return f"run {self.name} of user {self.user}"


_encode, _decoder = msgspec.json.encode, msgspec.json.Decoder(RunRow)


class _Version(Struct):
    version: int = 0


@functools.cache
def _make_actor_class() -> Any:
    import ray

    class RunRows:  # pickled by value: its node need not find this module
        def __init__(self, stale_s: float) -> None:
            self._rows: dict[str, tuple[float, bytes]] = {}
            self._stale_s = stale_s

        def beat(self, run: str, row: bytes | None) -> list[tuple[float, bytes]]:
            """Take a run's row, or its end (None); returns all rows with their ages in seconds."""
            import time

            if row is None:
                self._rows.pop(run, None)
            else:
                self._rows[run] = time.monotonic(), row
            return self.list()

        def list(self) -> list[tuple[float, bytes]]:
            import time

            now = time.monotonic()
            self._rows = {key: each for key, each in self._rows.items() if now - each[0] < self._stale_s}
            return [(now - at, row) for at, row in self._rows.values()]

    return ray.remote(num_cpus=0, max_restarts=0)(RunRows)


class Registry:
    """The row of one run, and those of the others. No method waits for the actor; `beat` may wait for the head.

    Args:
        run_id, directory: of the run that this process drives.

    Attributes:
        start: by which other runs know this start of the run.
    """

    def __init__(self, run_id: str, directory: Path) -> None:
        self.start = f"{run_id}/{secrets.token_hex(6)}"
        self._row = RunRow(
            run_id=run_id,
            name=directory.name,
            user=_find_user(),
            host=socket.gethostname(),
            pid=os.getpid(),
            directory=str(directory),
            started=time.time(),
            claim=RunClaim(run=self.start),
        )
        self._actor: Any = None
        self._answer: Any = None  # to come
        self._asked_at = self._heard_at = self._grace_until = float("-inf")
        self._blind_until = time.monotonic() + _ANSWER_S
        self._is_new = True  # the actor has not answered yet
        self._rows: dict[str, RunRow] = {}

    @property
    def is_due(self) -> bool:
        """Whether it is time to send the row again, or to look for the first answer."""
        is_first = self._answer is not None and self.is_blind
        return is_first or time.monotonic() - self._asked_at >= BEAT_S

    @property
    def is_blind(self) -> bool:
        """Whether it is not known yet which other runs there are; after some seconds they count as none."""
        return math.isinf(self._heard_at) and time.monotonic() < self._blind_until

    def beat(self, claim: RunClaim, running: int = 0, waiting: int = 0, giving_back: str = "") -> None:
        """Take the answer to the last row, if it has come, and send another one; never raises for the actor."""
        import ray

        now = time.monotonic()
        try:
            if self._answer is not None:
                if not ray.wait([self._answer], timeout=0)[0]:
                    if now - self._asked_at > _ANSWER_S:
                        self._actor = self._answer = None
                    return
                answer: Any = ray.get(self._answer)
                self._hear(decode_rows(answer), now)
                self._answer = None
            if self._actor is None:
                self._actor, self._is_new = _find_or_create(), True
            self._asked_at = now
            self._row.claim, self._row.running, self._row.waiting = claim, running, waiting
            self._row.giving_back = giving_back
            self._answer = self._actor.beat.remote(self.start, _encode(self._row))
        except (ray.exceptions.RayError, ValueError) as error:  # it ended with its run: it is created again
            log.debug("the registry of runs does not answer: %s", error)
            self._actor = self._answer = None
            self._asked_at = now

    def _hear(self, rows: list[RunRow], now: float) -> None:
        """Take an answer: a row that a new actor does not have yet is that of before."""
        if self._is_new:
            self._is_new, self._grace_until = False, now + _GRACE_S
        found, before = {row.claim.run: row for row in rows}, now - self._heard_at
        for run, row in self._rows.items() if now < self._grace_until else ():
            if run not in found:
                row.age_s += before
                found[run] = row
        self._rows, self._heard_at = dict(sorted(found.items())), now

    def list_others(self) -> list[RunRow]:
        """The rows of the other runs; none where the actor has not answered for long."""
        if time.monotonic() - self._heard_at > STALE_S:
            return []
        return [row for run, row in self._rows.items() if run != self.start]

    def close(self) -> None:
        """Say that the run has ended. If it created the actor, that ends with it."""
        if self._actor is not None:
            self._actor.beat.remote(self.start, None)
            self._actor = self._answer = None


def _find_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without a name for its user
        return str(os.getuid())


def _find_or_create() -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = ray.get_runtime_context().get_node_id()  # an actor keeps its node from being taken by an autoscaler
    return (
        _make_actor_class()
        .options(
            name=NAME,
            namespace=NAMESPACE,
            get_if_exists=True,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=here, soft=True),
        )
        .remote(STALE_S)
    )


def decode_rows(answer: list[tuple[float, bytes]]) -> list[RunRow]:
    """The rows of this `VERSION` whose amounts are such as can be, in a fixed order, each with its age."""
    rows = []
    for age_s, text in answer:
        try:
            if msgspec.json.decode(text, type=_Version).version != VERSION:
                continue
            row = _decoder.decode(text)
        except msgspec.MsgspecError as error:
            log.debug("a row of another run cannot be read: %s", error)
            continue
        row.age_s = age_s
        rows.append(row)
    return sorted(rows, key=lambda row: row.claim.run)


def read_rows(timeout_s: float = _ANSWER_S) -> list[tuple[float, bytes]]:
    """The rows of the cluster to which this process is connected, as they are, each with its age; creates nothing.

    Raises:
        ray.exceptions.RayError: the actor does not answer.
    """
    import ray

    find: Any = ray.get_actor
    try:
        answer: Any = ray.get(find(NAME, NAMESPACE).list.remote(), timeout=timeout_s)
    except (ValueError, ray.exceptions.RayActorError):  # no run, or the one that kept them has ended just now
        return []
    return list(answer)
