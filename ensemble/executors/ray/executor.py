"""The Ray executor: leases resources of a cluster, and has an agent on each node start feeders and ranks there.

The controller packs members into what the run holds; what becomes ready or is given back is a `node` event. On a
Ray that was started for this run there are no leases: all of it is the run's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble.events import Report
from ensemble.executors.base import ClusterLostError, EventHandler
from ensemble.executors.native_output import NativeOutput
from ensemble.executors.node_services import make_feeder_address
from ensemble.executors.ray import _compat
from ensemble.executors.ray.agent_link import AgentLink
from ensemble.executors.ray.cluster_model import ClusterModel
from ensemble.executors.ray.demand import MOST_PENDING
from ensemble.executors.ray.lease_manager import LeaseManager
from ensemble.executors.ray.loop import POLL_S, ClusterLoop
from ensemble.executors.ray.session import RayConnection
from ensemble.interrupts import raise_if_deferred
from ensemble.schedule.explain import explain_unplaceable
from ensemble.schedule.needs import Node, Placement, compute_need
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

log = logging.getLogger(__name__)


def list_declared(ensemble: Ensemble) -> list[Identity]:
    """The members of a run, as far as they are known before it starts; of a search, trials to request."""
    if ensemble.search is not None:
        return [ensemble.identify(number, {}) for number in range(min(ensemble.search.trials, MOST_PENDING))]
    return [ensemble.identify(number) for number in range(len(ensemble.members or ()))]


class RayExecutor:
    """Runs members on the nodes of a Ray cluster; see `ensemble.executors.Executor`.

    It tells a `ClusterModel` what happens and carries out what that decides.
    """

    name = "ray"
    in_process = False
    clock = None

    def __init__(self) -> None:
        self._session: RayConnection | None = None
        self._model = ClusterModel(None)
        self._is_released = False

    @property
    def cluster(self) -> Sequence[Node] | None:
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
        on_gpus = ensemble.devices != "cpu" and ensemble.limits.get("gpus", 1) > 0
        session = self._session
        self._link = AgentLink(
            run_dir, session.directory, on_gpus=on_gpus, is_lost=lambda: session.is_lost, calling=session.calling
        )
        self._loop = ClusterLoop(self._model, self._link, self._session)  # from here on `close` has all it needs
        self._native.add_logger("ray")
        leases = None
        if self._session.directory is None:
            has_gpus = run_dir.events.exists() and RunStatus.load(run_dir).state.has_gpus
            declared, limits = list_declared(ensemble), dict(ensemble.limits)
            leases = LeaseManager(run_dir.path.name, ensemble.devices, declared, has_gpus=has_gpus, limits=limits)
        self._model = ClusterModel(leases, on_gpus=on_gpus)
        self._loop = ClusterLoop(self._model, self._link, self._session)
        return self._open(ensemble)

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
            before = self._loop.progress
            self._advance()
            if before != self._loop.progress:
                changed = time.monotonic()
            if all(agent.described is not None for agent in self._model.agents.values()):
                leases = self._model.leases
                is_complete = leases is None or not (leases.is_pending or leases.is_replan_due)
                if is_complete or time.monotonic() - changed > _SETTLE_S:
                    return

    def _advance(self) -> None:
        """Make a turn of the loop while the run is being opened."""
        raise_if_deferred()
        self._loop.advance(POLL_S)
        if self._loop.lost:
            raise ClusterLostError(self._loop.lost)

    def _await_growth(self, ensemble: Ensemble) -> bool:
        """Where no node could hold some member, wait while an autoscaler adds nodes; returns whether it waited.

        It adds nodes for what is requested. Until there is one of them, Ray does not say what they will offer.
        """
        began = grew = ask_at = time.monotonic()
        while self._model.leases is not None and (reason := self._find_unplaceable(ensemble)):
            now_s = time.monotonic()
            if now_s >= ask_at:
                ask_at = now_s + _ASK_S
                if _compat.is_autoscaler_growing():
                    if grew == began:
                        log.warning("waiting for the cluster's autoscaler: %s", reason)
                    grew = now_s
            if now_s - grew > _REACTS_S or now_s - began > _GROW_S:
                break
            self._advance()
        return time.monotonic() - began > POLL_S

    def _find_unplaceable(self, ensemble: Ensemble) -> str | None:
        """Why no node that is known could hold some member; None: each has one."""
        assert self._model.leases is not None
        different = {compute_need(identity): identity for identity in list_declared(ensemble)}
        devices = self._model.leases.devices
        reasons = (explain_unplaceable(identity, self.cluster or (), devices) for identity in different.values())
        return next((reason for reason in reasons if reason is not None), None)

    # -- commands -------------------------------------------------------------------------------------------------

    def request(self, waiting: Sequence[Identity], placed: Sequence[Placement]) -> None:
        if self._model.leases is not None:
            self._model.leases.set_demand(waiting, placed)
            self._loop.renew_at = 0.0

    def start_feeder(
        self, node: str, cohort: int, expect: int, capacity: int, peers: Peers | None = None, late: bool = False
    ) -> str | None:
        """See `Executor`; members that are launched on the node later start when the feeder listens."""
        from pipelines.errors import PipelineError

        try:
            agent = self._model.find_agent(node)
        except OSError as error:
            raise PipelineError(str(error)) from None
        agent.feeders.add(cohort)
        agent.tell("start_feeder", cohort, expect, capacity, peers, late)
        return str(make_feeder_address(Path(agent.directory), cohort))

    def expect_readers(self, node: str, cohort: int, members: int) -> None:
        if node in self._model.agents:
            self._model.agents[node].tell("expect_readers", cohort, members)

    def stop_feeder(self, node: str, cohort: int) -> None:
        agent = self._model.agents.get(node)
        if agent is not None:
            agent.feeders.discard(cohort)
            agent.tell("stop_feeder", cohort)

    def launch(self, jobs: Sequence[Job], devices: Sequence[str | None]) -> None:
        self._model.launch(jobs, devices)

    def send(self, member: str, command: str, **fields: Any) -> None:
        self._model.tell_ranks(member, "send", member, command, fields)

    def kill(self, member: str) -> None:
        self._model.tell_ranks(member, "kill", member)

    # -- events -------------------------------------------------------------------------------------------------

    def events(self, timeout_s: float | None) -> list[Report]:
        if self._session is not None and not self._is_released:
            try:
                with self._session.calling():
                    self._loop.advance(0.0 if self._model.reports else timeout_s)
            except (Exception, SystemExit):  # which Ray raises in calls of a connection that is closed
                if not self._session.is_lost:
                    raise
                self._loop.advance(0.0)
        return self._model.take_reports()

    def release(self) -> None:
        """See `Executor`; where the cluster is lost, `events` says so next."""
        if self._session is not None and self._model.leases is not None and not self._loop.lost:
            self._end_agents()
            self._is_released = True

    def close(self) -> None:
        if self._session is None:
            return
        try:
            if not self._is_released and not self._session.is_lost:
                self._end_agents()
        finally:
            self._link.end_thread()
            self._session.close()
            self._session = None
            self._native.close()

    def _end_agents(self) -> None:
        """End the agents, keep their last events, and give back everything."""
        for agent in self._model.agents.values():
            agent.tell("close")
        self._loop.send()
        is_lost, leases = bool(self._loop.lost), self._model.leases
        until = time.monotonic() + (_CLOSE_WITHOUT_HEAD_S if is_lost else _CLOSE_S)
        while (left_s := until - time.monotonic()) > 0 and self._loop.read_last(left_s):
            pass
        self._link.close(without_head=is_lost)
        self._model.agents.clear()
        if leases is not None and not is_lost:
            leases.close()
