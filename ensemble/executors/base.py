"""The interface of every executor: it starts workers and feeders, sends commands, and reports events."""

from __future__ import annotations

import selectors
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ensemble.events import Report

if TYPE_CHECKING:
    from ensemble.meter import CpuClock
    from ensemble.schedule.needs import Node, Placement
    from ensemble.spec import Ensemble, Identity
    from ensemble.store import RunDir
    from ensemble.train.job import Job
    from pipelines import Peers

EventHandler = Callable[[Sequence[Report]], None]
GATHER_S = 0.25  # events that are not urgent are handed on together, at most so many seconds late
LAST_S = 0.2  # of the last interval of power at least: counters of energy and of CPU time go in steps


class ClusterLostError(Exception):
    """The cluster does not answer any more. The run has ended in order; a resume continues it on another one."""


class Executor(Protocol):
    """Starts the workers of members on nodes. Called from one thread only, the controller's.

    Attributes:
        name: the name by which users choose it.
        in_process: whether members train in this process, in the thread that calls `events`.
        clock: CPU time of this process, where members train in it; else None.
        cluster: the nodes with all that they could ever offer this run, where it holds only a part of them; None
            where it holds all of its nodes.
    """

    name: str
    in_process: bool
    clock: CpuClock | None
    cluster: Sequence[Node] | None

    def open(self, run_dir: RunDir, ensemble: Ensemble, handle: EventHandler) -> list[Node]:
        """Prepare to run members, and return the nodes with what the run holds of them.

        Args:
            handle: called with the events of a member while it trains within `events`, so that the controller can
                answer between two epochs. Only an executor with `in_process` calls it.

        Raises:
            SpecError: this executor cannot run the ensemble, or no node can be used.
        """

    def start_feeder(
        self, node: str, cohort: int, expect: int, capacity: int, peers: Peers | None = None, late: bool = False
    ) -> str | None:
        """Start the feeder of a cohort on a node, without waiting until it is ready.

        A feeder that is started again for the same node and cohort has the same address, so that members which
        continued alone find it.

        Args:
            expect: members (each with all its ranks) that its start gate waits for.
            capacity: samples in its ring.
            peers: how it finds the feeders of the cohort on other nodes; None: there are none.
            late: its members come from another feeder, from which they have the resident sets.

        Returns:
            Its address, which members can use at once; None if this executor shares nothing.
        """

    def expect_readers(self, node: str, cohort: int, members: int) -> None:
        """Change the number of members that a feeder's start gate waits for: some failed before they attached."""

    def stop_feeder(self, node: str, cohort: int) -> None:
        """Stop the feeder of a cohort on a node, if there is one."""

    def request(self, waiting: Sequence[Identity], placed: Sequence[Placement]) -> None:
        """Say which members find no place in what the run holds, and where the others are.

        An executor of a cluster asks for what the waiting ones can use, and gives back what nobody uses.
        """

    def launch(self, jobs: Sequence[Job], devices: Sequence[str | None]) -> None:
        """Start all ranks of one attempt; `devices` has the id of each rank's GPU, None for the CPU."""

    def events(self, timeout_s: float | None) -> list[Report]:
        """Wait until there are events, at most `timeout_s` (None: without limit), and return them in order.

        Besides the workers' own events there are:

        - `exited` (member, attempt, rank, outcome, detail): one for every rank; outcome None: its process died. A
          known cause is added as `reason`, such as "oom".
        - `node` (`Node.as_event`): the run holds more or less of a node than before, or of a new one, or processes
          of others hold more or less of its memory or GPUs.
        - `gpu_quarantined` (node, gpu, devices, detail): a physical GPU has broken, of which these are the ids or
          those of its instances. A `node` event without it follows, then the `exited` events of the members on it,
          with `gpu_lost`, which uses up no retry. It is offered no more before the run is started again.
        - `node_unusable` (node, detail): nothing can be started there, or it is frozen; it is tried again after
          `retry_s`, if that is given.
        - `resources` (missing): what the cluster has not given yet of what was requested; empty: it has given all.
        - `feeder_exited` (node, cohort, detail): a feeder ended by itself; with `started` false: at its start.
        - `launch_failed` (member, attempt, detail): no rank of it was started.
        - `node_draining` (node, deadline): its cluster is about to end it, at that time in Unix seconds (None:
          unknown). Nothing can be placed there any more; what runs there goes on until it is told to stop.
        - `node_lost` (node): it is gone; `exited` events of its ranks follow, with `node_lost`.
        - `agent_replaced` (node, detail): what starts ranks there has ended and is started again; `exited` events
          of its ranks follow, with `agent_lost`, which uses up no retry.
        - `cluster_lost` (detail): what gives out the nodes is gone. Members that run now can still be told to end.
        - `power`, `usage`, `feeder` and `node_health`: measurements of the nodes.

        After `close` it returns at once with the last events of the nodes.
        """

    def send(self, member: str, command: str, **fields: Any) -> None:
        """Send a command to every rank of a member; nothing happens if the member has ended.

        Args:
            command, fields: as `ensemble.train.job.Inbox.put` takes them; fields are JSON values.
        """

    def kill(self, member: str) -> None:
        """Kill all ranks of a member; their `exited` events still arrive."""

    def release(self) -> None:
        """No member trains any more: give back what the run holds of a cluster that others use, too.

        The minutes of combination follow, for which others need not wait. `events` returns the last measurements
        of what was given back.
        """

    def close(self) -> None:
        """Stop everything that was started. May be called twice."""


def make_exited(job: Job, outcome: str | None, detail: str = "", **more: Any) -> Report:
    """The `exited` event of a rank; outcome None: its process died, and `detail` says how."""
    who = {"member": job.identity.member, "attempt": job.attempt, "rank": job.rank}
    return {"type": "exited", **who, "outcome": outcome, "detail": detail, **more}


def dispatch(selector: selectors.BaseSelector, timeout_s: float | None) -> None:
    """Wait until registered descriptors are ready, at most `timeout_s`, and call the function of each."""
    for key, _ in selector.select(timeout_s):
        if selector.get_map().get(key.fd) == key:  # else a function called before it has unregistered it
            key.data()
