"""The Ray executor: leases resources of a cluster, and has an agent on each node start feeders and ranks there.

Ray gives out whole GPUs, cores and memory (`ensemble.executors.ray.leases`), and the controller packs members into
what the run holds. What becomes ready is a `node` event, also of a node that joined later, and so is what is given
back. On a Ray that was started for this run nobody else takes anything: there are no leases, all of it is the
run's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ensemble.events import Report
from ensemble.executors.base import ClusterLostError, EventHandler
from ensemble.executors.native_output import NativeOutput
from ensemble.executors.node_services import make_feeder_address
from ensemble.executors.ray import _compat
from ensemble.executors.ray.agent_link import AgentLink
from ensemble.executors.ray.cluster_model import ClusterModel
from ensemble.executors.ray.head import Head, HeadLostError
from ensemble.executors.ray.lease_manager import LeaseManager
from ensemble.executors.ray.loop import CONNECTION_LOST, HEAD_LOST, POLL_S, ClusterLoop
from ensemble.executors.ray.metrics import RayMetrics, find_dashboards
from ensemble.executors.ray.queued_demand import list_declared
from ensemble.executors.ray.session import RAY_DASHBOARD, RayConnection
from ensemble.interrupts import raise_if_deferred
from ensemble.schedule import Node, Placement, explain_unplaceable
from ensemble.schedule.needs import compute_need
from ensemble.spec import Ensemble, Identity, SpecError
from ensemble.store import RunStatus
from ensemble.train.job import Job

if TYPE_CHECKING:
    from ensemble.store import RunDir
    from pipelines import Peers

_CLOSE_S = 60.0  # time limit for the agents' last events
_CLOSE_WITHOUT_HEAD_S = 10.0
_SETTLE_S = 2.0  # after the last resource that became ready: what is not ready then is used when it is
_ASK_S = 1.0  # how often an autoscaler is asked
_REACTS_S = 15.0  # time limit for an autoscaler to react to a request: it looks every five seconds
_GROW_S = 1200.0  # time limit for the nodes that it adds to join

BLIND = (
    "the cluster's autoscaler is of version 1, which does not know labels: it may add other nodes than those that "
    "members select; start the head with RAY_enable_autoscaler_v2=1"
)

Value = TypeVar("Value")

log = logging.getLogger(__name__)


class RayExecutor:
    """Runs members on the nodes of a Ray cluster; see `ensemble.executors.Executor`.

    It tells a `ClusterModel` what happens and carries out what that decides.
    """

    name = "ray"
    in_process = False
    clock = None

    def __init__(self) -> None:
        self.metrics: RayMetrics | None = None
        self._session: RayConnection | None = None
        self._model = ClusterModel(None)
        self._is_released = False

    @property
    def cluster(self) -> Sequence[Node] | None:
        """See `Executor`."""
        return self._model.cluster

    # -- opening --------------------------------------------------------------------------------------------------

    def open(self, run_dir: RunDir, ensemble: Ensemble, handle: EventHandler) -> list[Node]:
        """See `Executor`; the nodes are those of the cluster that RAY_ADDRESS names, or this host."""
        self._native = NativeOutput(run_dir.path / "ray.log")
        try:
            self._session = RayConnection()  # sets what Ray reads when it is imported
        except BaseException:
            self._native.close()
            raise
        self._head = Head()
        on_gpus = ensemble.devices != "cpu" and ensemble.limits.get("gpus", 1) > 0
        self._link = AgentLink(run_dir, self._session.directory, on_gpus=on_gpus, ask=self._head.ask)
        self._follow(
            ClusterModel(None, on_gpus=on_gpus, ask=self._head.ask)
        )  # from here on `close` has all it needs
        self._native.add_logger("ray")
        self._open_dashboard(self._session)
        if self._session.directory is None:
            has_gpus = run_dir.events.exists() and RunStatus.load(run_dir).state.has_gpus
            declared, limits = list_declared(ensemble), dict(ensemble.limits)
            leases = LeaseManager(run_dir.path.name, ensemble.devices, declared, has_gpus=has_gpus, limits=limits)
            self._follow(ClusterModel(leases, on_gpus=on_gpus, ask=self._head.ask))
        try:
            return self._call(self._open, ensemble)
        except ClusterLostError:
            self._head.give_up()
            raise

    def _call(self, function: Callable[..., Value], *arguments: Any) -> Value:
        """Make a call that needs the head; where that, or the connection, is lost it raises ClusterLostError."""
        assert self._session is not None
        try:
            if self._session.is_lost or self._head.is_lost or self._head.is_given_up:
                raise HeadLostError
            return self._head.call(function, *arguments)
        except (Exception, SystemExit) as error:  # which Ray raises in calls of a connection that is closed
            if self._session.is_lost:
                raise ClusterLostError(CONNECTION_LOST) from None
            if isinstance(error, HeadLostError):
                raise ClusterLostError(HEAD_LOST) from None
            raise

    def _follow(self, model: ClusterModel) -> None:
        assert self._session is not None
        self._model = model
        self._loop = ClusterLoop(model, self._link, self._head, self._session.nodes)

    def _open_dashboard(self, session: RayConnection) -> None:
        """Say where Ray's dashboard is, if it was asked for; report metrics to a Ray that somebody looks at."""
        asked = os.environ.get(RAY_DASHBOARD) == "1"
        if session.directory is not None and not asked:
            return
        is_own = session.directory is not None
        self.metrics = RayMetrics(find_dashboards(session.ray_directory) if is_own else None)
        if asked:
            log.warning("%s", session.connection.describe_dashboard())

    def _open(self, ensemble: Ensemble) -> list[Node]:
        self._loop.begin()
        self._settle()
        if self._await_growth(ensemble):
            self._settle()
        nodes = self._model.list_usable()
        for event in self._model.reports:
            if event["type"] == "node_unusable" and not (nodes and "retry_s" in event):
                raise SpecError(f"node {event['node']} cannot be used: {event['detail']}")
        self._model.reports = [event for event in self._model.reports if event["type"] != "node"]
        self._loop.look_at_cluster()
        if not nodes and not self.cluster:
            raise SpecError("no node of the cluster can be used")
        return nodes

    def _settle(self) -> None:
        """Wait until all agents that were started have answered and, for a while, until all requests are met."""
        changed = time.monotonic()
        while True:
            raise_if_deferred()
            before = self._loop.progress
            self._loop.advance(POLL_S)
            if before != self._loop.progress:
                changed = time.monotonic()
            if all(agent.described is not None for agent in self._model.agents.values()):
                leases = self._model.leases
                is_complete = leases is None or not (leases.is_pending or leases.is_replan_due)
                if is_complete or time.monotonic() - changed > _SETTLE_S:
                    return

    def _await_growth(self, ensemble: Ensemble) -> bool:
        """Where no node could hold some member, wait while an autoscaler adds nodes; returns whether it waited.

        It adds nodes for what is requested. Until there is one of them, Ray does not say what they will offer.
        """
        began = grew = ask_at = time.monotonic()
        while self._model.leases is not None and (reason := self._find_unplaceable(ensemble)):
            raise_if_deferred()
            now = time.monotonic()
            if now >= ask_at:
                ask_at = now + _ASK_S
                if version := _compat.find_growing_autoscaler():
                    if grew == began:
                        log.warning("waiting for the cluster's autoscaler: %s", reason)
                        if version == 1 and any(each.nodes for each in list_declared(ensemble)):
                            log.warning("%s", BLIND)
                    grew = now
            if now - grew > _REACTS_S or now - began > _GROW_S:
                break
            self._loop.advance(POLL_S)
        return time.monotonic() - began > POLL_S

    def _find_unplaceable(self, ensemble: Ensemble) -> str | None:
        """Why no node that is known could hold some member; None: each has one."""
        assert self._model.leases is not None
        different = {compute_need(identity): identity for identity in list_declared(ensemble)}
        devices = self._model.leases.devices
        reasons = (explain_unplaceable(each, self.cluster or (), devices) for each in different.values())
        return next((reason for reason in reasons if reason is not None), None)

    # -- commands -------------------------------------------------------------------------------------------------

    def request(self, waiting: Sequence[Identity], placed: Sequence[Placement]) -> None:
        """See `Executor`."""
        if self._model.leases is not None:
            self._model.leases.set_demand(waiting, placed)
            self._loop.renew_at = 0.0

    def start_feeder(
        self, node: str, cohort: int, expect: int, capacity: int, peers: Peers | None = None, late: bool = False
    ) -> str | None:
        """See `Executor`; members that are launched on the node later start when the feeder listens."""
        from pipelines.errors import PipelineError

        agent = self._model.agents.get(node)
        if agent is None or not agent.is_up or agent.is_closing:
            raise PipelineError(f"node {node} has no agent now")
        agent.feeders.add(cohort)
        agent.tell("start_feeder", cohort, expect, capacity, peers, late)
        return str(make_feeder_address(Path(agent.directory), cohort))

    def expect_readers(self, node: str, cohort: int, members: int) -> None:
        """See `Executor`."""
        if node in self._model.agents:
            self._model.agents[node].tell("expect_readers", cohort, members)

    def stop_feeder(self, node: str, cohort: int) -> None:
        """See `Executor`."""
        agent = self._model.agents.get(node)
        if agent is not None:
            agent.feeders.discard(cohort)
            if agent.is_up:  # else its feeders ended with the agent before it
                agent.tell("stop_feeder", cohort)

    def launch(self, jobs: Sequence[Job], devices: Sequence[str | None]) -> None:
        """See `Executor`."""
        self._model.launch(jobs, devices)

    def send(self, member: str, command: str, **fields: Any) -> None:
        """See `Executor`."""
        self._model.tell_ranks(member, "send", member, command, fields)

    def kill(self, member: str) -> None:
        """See `Executor`."""
        self._model.tell_ranks(member, "kill", member)

    # -- events -------------------------------------------------------------------------------------------------

    def events(self, timeout_s: float | None) -> list[Report]:
        """See `Executor`."""
        if self._session is not None and not self._is_released:
            try:
                self._call(self._loop.advance, 0.0 if self._model.reports else timeout_s)
            except ClusterLostError as error:
                is_connected = not self._session.is_lost
                self._loop.advance_without_head(timeout_s, str(error), is_connected=is_connected)
        return self._model.take_reports()

    def release(self) -> None:
        """See `Executor`; where the head is lost, `events` says so next."""
        is_lent = self._session is not None and self._model.leases is not None
        if is_lent and not self._head.is_given_up:
            with contextlib.suppress(ClusterLostError):
                self._call(self._end_agents)
                self._is_released = True

    def close(self) -> None:
        """See `Executor`."""
        if self._session is None:
            return
        try:
            if not self._is_released and not self._session.is_lost:
                with _compat.start_no_ray():
                    self._end_agents()
        finally:
            self._head.close()
            self._session.close()
            self._session = None
            self._native.close()

    def _end_agents(self) -> None:
        """End the agents, keep their last events, and give back everything."""
        for agent in self._model.agents.values():
            agent.tell("close")
        self._loop.send()
        is_lost, leases = self._head.is_given_up, self._model.leases
        until = time.monotonic() + (_CLOSE_WITHOUT_HEAD_S if is_lost else _CLOSE_S)
        while (left_s := until - time.monotonic()) > 0 and self._loop.read_last(left_s):
            pass
        self._link.close(without_head=is_lost)
        self._model.agents.clear()
        if leases is not None and not is_lost:
            leases.close()
