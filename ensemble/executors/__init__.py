"""Executors: where the workers of members run. One face, three ways: `inline`, `local`, `ray`.

An executor is a thin shell. It starts, tells, kills and reports; *what* to start and when is decided by the
controller from the pure functions in `ensemble.schedule`. A **worker** is one data-parallel rank of one
member; an **attempt** is one start of all ranks of a member; a **feeder** is the process that prepares the
shared pipeline of one cohort on one node.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ensemble.schedule import Node
from ensemble.spec import SpecError, unknown_name

if TYPE_CHECKING:
    from ensemble.spec import Ensemble
    from ensemble.store import RunDir
    from ensemble.train.job import Job
    from pipelines import Peers

__all__ = ["EXECUTORS", "Executor", "Node", "Take", "make_executor"]

Take = Callable[[Sequence[dict[str, Any]]], None]


class Executor(Protocol):
    """The face of every executor. Called from one thread only, the controller's.

    Attributes:
        name: what users call it.
        in_process: whether members train in this process, in the thread that calls `events`.
        work_cpu_s: CPU-seconds of this process that were spent on members; 0 unless they train in it.
    """

    name: str
    in_process: bool
    work_cpu_s: float

    def open(self, run_dir: RunDir, ensemble: Ensemble, take: Take) -> list[Node]:
        """Make ready and say what nodes there are; SpecError for what this executor cannot run.

        Args:
            take: gets what members emit while they train within `events`, that it may be answered between two
                epochs; only an executor with `in_process` calls it.
        """

    def start_feeder(
        self, node: str, cohort: int, expect: int, capacity: int, peers: Peers | None = None, late: bool = False
    ) -> str | None:
        """Start a cohort's feeder on a node and return its address; None where nothing is shared.

        Nobody waits for it to begin: members may be told the address at once, and wait for its first answer.

        Args:
            expect: members (each with all its ranks) that its start gate waits for.
            capacity: samples in its ring.
            peers: where it meets the feeders of the cohort's other nodes; None: it is the only one.
            late: its members come from another feeder, and have the resident sets from there.

        A feeder started again for the same node and cohort has the same address, so that members which
        went on alone find it.
        """

    def expect(self, node: str, cohort: int, members: int) -> None:
        """Let a feeder's start gate wait for that many members, some having failed before they came."""

    def stop_feeder(self, node: str, cohort: int) -> None:
        """End that feeder; nothing happens where there is none."""

    def launch(self, jobs: Sequence[Job], devices: Sequence[int | None]) -> None:
        """Start all ranks of one attempt; `devices` is the GPU of each rank, None for the CPU."""

    def events(self, timeout_s: float | None) -> list[dict[str, Any]]:
        """Wait until something came, at most `timeout_s` (None: without limit), and return it in order.

        Besides the workers' own events there are `{"type": "exited", member, attempt, rank, outcome, detail}`,
        one for every rank (outcome None: it died), `{"type": "feeder_exited", node, cohort, detail}` for a
        feeder that ended unasked, with `started` false where it never could begin, and the `power`, `usage` and
        `feeder` events of the nodes.
        `{"type": "node_lost", node}` says that nothing can be placed there any more; the ranks that were on it
        exit as dead ones. `{"type": "waiting", member, attempt, rank, detail}` comes every few seconds for a rank
        that has no place from the cluster yet: it neither hangs nor has
        it begun. An exited rank of a cause that the executor knows adds `reason`, such as "oom".
        After `close` it returns at once what the nodes said last.
        """

    def tell(self, member: str, command: str, **fields: Any) -> None:
        """Put a command into the inbox of every rank of a member; nothing happens when it has ended.

        Args:
            command, fields: as `ensemble.train.job.Inbox.put` takes them; fields are JSON values.
        """

    def kill(self, member: str) -> None:
        """End all ranks of a member at once; their `exited` events still come."""

    def close(self) -> None:
        """End everything that was started; nothing is left. May be called twice."""


EXECUTORS: dict[str, str] = {
    "inline": "ensemble.executors.inline:InlineExecutor",
    "local": "ensemble.executors.local:LocalExecutor",
    "ray": "ensemble.executors.ray:RayExecutor",
}


def make_executor(name: str) -> Executor:
    """The executor of that name, imported only now; SpecError with the valid names for another."""
    if name not in EXECUTORS:
        raise SpecError(unknown_name("there is no executor", name, list(EXECUTORS)))
    module, attribute = EXECUTORS[name].split(":")
    made: Callable[[], Executor] = getattr(importlib.import_module(module), attribute)
    return made()
