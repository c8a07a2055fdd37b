"""The Ray executor: leases resources of a cluster, and has an agent on each node start feeders and ranks there.

Ray gives out whole GPUs, cores and memory (`ensemble.executors.ray.leases`), and the controller packs members into
what the run holds. What becomes ready is a `node` event, also of a node that joined later, and so is what is given
back. On a Ray that was started for this run nobody else takes anything: there are no leases, all of it is the
run's.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble.events import Report
from ensemble.executors.base import ClusterLostError, EventHandler, make_exited
from ensemble.executors.gpu_offers import has_changed
from ensemble.executors.native_output import NativeOutput
from ensemble.executors.node_services import make_feeder_address
from ensemble.executors.ray import _compat
from ensemble.executors.ray.agents import (
    Agent,
    describe_error,
    describe_node,
    describe_offer,
    name_nodes,
    start_agent,
)
from ensemble.executors.ray.head import Head, HeadLostError
from ensemble.executors.ray.lease_manager import LeaseManager
from ensemble.executors.ray.leases import IS_FULL
from ensemble.executors.ray.metrics import RayMetrics, find_dashboards
from ensemble.executors.ray.queued_demand import MOST_PENDING
from ensemble.executors.ray.request import Offer
from ensemble.executors.ray.session import RAY_DASHBOARD, RayConnection, is_reachable
from ensemble.interrupts import raise_if_deferred
from ensemble.schedule import Node, Placement, explain_unplaceable
from ensemble.schedule.needs import compute_need
from ensemble.spec import Ensemble, Identity, SpecError
from ensemble.store import RunStatus
from ensemble.train.job import Job

if TYPE_CHECKING:
    from ensemble.executors.metrics import MetricSample
    from ensemble.store import RunDir
    from pipelines import Peers

_SILENT_S = 60.0  # without an event: an agent reports each second
_START_S = 300.0  # for an agent to start: a shared file system may be slow when many nodes import from it
_CLOSE_S = 60.0  # time limit for the agents' last events
_CLOSE_WITHOUT_HEAD_S = 10.0
_SETTLE_S = 2.0  # after the last resource that became ready: what is not ready then is used when it is
_POLL_S = 0.2  # while nodes are opened
_ASK_S = 1.0  # how often an autoscaler is asked
_REACTS_S = 15.0  # time limit for an autoscaler to react to a request: it looks every five seconds
_GROW_S = 1200.0  # time limit for the nodes that it adds to join
_PENDING_S = 3.0  # before it is reported that the run waits for Ray
_REPLACEMENTS = 3  # of the agent of a node
_PASSING = "No space left", "worker process has died"  # as the system, and Ray, say where a disk is full

HEAD_LOST = "the head of the Ray cluster does not answer any more"

log = logging.getLogger(__name__)


class RayExecutor:
    """Runs members on the nodes of a Ray cluster; see `ensemble.executors.Executor`."""

    name = "ray"
    in_process = False
    clock = None

    def __init__(self) -> None:
        self.exports_metrics = False
        self._metrics: RayMetrics | None = None
        self.cluster: Sequence[Node] | None = None
        self._session: RayConnection | None = None
        self._head: Head | None = None
        self._is_head_lost = False
        self._leases: LeaseManager | None = None
        self._agents: dict[str, Agent] = {}  # by the name of the node
        self._streams: dict[Any, Agent] = {}  # streams of events, and unanswered calls of `describe`
        self._records: dict[str, dict[str, Any]] = {}  # by Ray's id of the node
        self._unusable: set[str] = set()  # Ray's ids of nodes
        self._known_nodes: dict[str, Node] = {}  # of the cluster, also those that are gone
        self._names: dict[str, str] = {}  # of nodes, by Ray's id
        self._queue: list[Report] = []
        self._on_gpus = True
        self._renew_at = 0.0
        self._pending = ""  # what Ray has not given, as it was last reported
        self._pending_since = time.monotonic()

    # -- nodes --------------------------------------------------------------------------------------------------

    def open(self, run_dir: RunDir, ensemble: Ensemble, handle: EventHandler) -> list[Node]:
        """See `Executor`; the nodes are those of the cluster that RAY_ADDRESS names, or this host."""
        self._native = NativeOutput(run_dir.path / "ray.log")
        try:
            self._session = RayConnection()  # sets what Ray reads when it is imported
        except BaseException:
            self._native.close()
            raise
        self._native.add_logger("ray")
        self._open_dashboard(self._session)
        self._head = Head()
        try:
            return self._head.call(self._open, run_dir, ensemble)
        except HeadLostError:
            self._is_head_lost = True
            raise ClusterLostError(HEAD_LOST) from None

    def _open_dashboard(self, session: RayConnection) -> None:
        """Say where Ray's dashboard is, if it was asked for; report metrics to a Ray that somebody looks at."""
        asked = os.environ.get(RAY_DASHBOARD) == "1"
        if session.directory is not None and not asked:
            return
        self._metrics = RayMetrics(
            find_dashboards(session.ray_directory) if session.directory is not None else None
        )
        self.exports_metrics = True
        if asked:
            log.warning("%s", session.describe_dashboard())

    def export_metrics(self, samples: Iterable[MetricSample]) -> None:
        """See `MetricsExporter`."""
        if self._metrics is not None:
            self._metrics.report(samples)

    def export_dashboard(self, dashboard: str) -> None:
        """See `MetricsExporter`."""
        if self._metrics is not None:
            self._metrics.dashboard = dashboard

    def _open(self, run_dir: RunDir, ensemble: Ensemble) -> list[Node]:
        assert self._session is not None
        self._run_dir, self._on_gpus = run_dir, ensemble.devices != "cpu"
        if self._session.directory is None:
            has_gpus = run_dir.events.exists() and RunStatus.load(run_dir).state.has_gpus
            self._leases = LeaseManager(
                run_dir.path.name, ensemble.devices, _list_declared(ensemble), has_gpus=has_gpus
            )
        self._look_at_cluster()
        if self._leases is None:
            for ray_id in self._records:
                self._start_agent(ray_id)
        self._settle()
        if self._await_growth(ensemble):
            self._settle()
        usable = [
            agent for agent in self._agents.values() if agent.described and not self._is_drained(agent.ray_id)
        ]
        for event in self._queue:
            if event["type"] == "node_unusable" and not (usable and "retry_s" in event):
                raise SpecError(f"node {event['node']} cannot be used: {event['detail']}")
        self._queue = [event for event in self._queue if event["type"] != "node"]
        nodes = [self._describe(agent) for agent in usable]
        self._look_at_cluster()
        if not nodes and not self.cluster:
            raise SpecError("no node of the cluster can be used")
        return nodes

    def _settle(self) -> None:
        """Wait until all agents that were started have answered and, for a while, until all requests are met."""
        changed = time.monotonic()
        while self._session is not None:
            raise_if_deferred()
            before = len(self._agents), len(self._streams)
            self._advance(_POLL_S)
            if before != (len(self._agents), len(self._streams)):
                changed = time.monotonic()
            if all(agent.described is not None for agent in self._agents.values()):
                is_complete = self._leases is None or not self._leases.is_pending
                if is_complete or time.monotonic() - changed > _SETTLE_S:
                    return

    def _await_growth(self, ensemble: Ensemble) -> bool:
        """Where no node could hold some member, wait while an autoscaler adds nodes; returns whether it waited.

        It adds nodes for what is requested. Until there is one of them, Ray does not say what they will offer.
        """
        began = grew = ask_at = time.monotonic()
        while self._leases is not None and (reason := self._find_unplaceable(ensemble)):
            raise_if_deferred()
            now = time.monotonic()
            if now >= ask_at:
                ask_at = now + _ASK_S
                if _compat.is_cluster_growing():
                    if grew == began:
                        log.warning("waiting for the cluster's autoscaler: %s", reason)
                    grew = now
            if now - grew > _REACTS_S or now - began > _GROW_S:
                break
            self._advance(_POLL_S)
        return time.monotonic() - began > _POLL_S

    def _find_unplaceable(self, ensemble: Ensemble) -> str | None:
        """Why no node that is known could hold some member; None: each has one."""
        assert self._leases is not None
        different = {compute_need(identity): identity for identity in _list_declared(ensemble)}
        devices = self._leases.devices
        reasons = (explain_unplaceable(each, self.cluster or (), devices) for each in different.values())
        return next((reason for reason in reasons if reason is not None), None)

    def _look_at_cluster(self) -> None:
        """Read which nodes there are, and what they have free."""
        assert self._session is not None
        self._look_for_drained()
        found = {str(record["NodeID"]): record for record in self._session.nodes()}
        free = _compat.list_free_resources() if self._leases is not None else {}
        self._abandon_if_lost()
        self._records = {
            ray_id: record
            for ray_id, record in found.items()
            if ray_id not in self._unusable and not self._is_drained(ray_id)
        }
        self._names = name_nodes(list(self._records.values()), self._names)
        offers = []
        for ray_id, record in self._records.items():
            name = self._names[ray_id]
            node = describe_offer(record, name, self._agents.get(name), on_gpus=self._on_gpus)
            offers.append(Offer(ray_id, node, free.get(ray_id, {})))
        if self._leases is not None:
            # A node that is gone may be replaced by another like it, so members that fitted there wait for that.
            self._known_nodes |= {offer.node.name: offer.node for offer in offers}
            self.cluster = list(self._known_nodes.values())
            frozen = {agent.ray_id for agent in self._agents.values() if agent.is_frozen}
            self._leases.set_offers(offers, frozen)

    def _look_for_drained(self) -> None:
        """Report the nodes that Ray has begun to drain: no member is placed there any more."""
        drained = {} if self._leases is None else self._leases.look_for_drained()
        self._abandon_if_lost()
        for ray_id, deadline in drained.items():
            self._records.pop(ray_id, None)
            agent = self._agents.get(self._names.get(ray_id, ""))
            if agent is not None and not agent.is_closing:
                log.warning("node %s is being drained: its members write checkpoints and move", agent.name)
                self._queue.append({"type": "node_draining", "node": agent.name, "deadline": deadline})

    def _is_drained(self, ray_id: str) -> bool:
        return self._leases is not None and ray_id in self._leases.draining

    def _leave_drained(self) -> None:
        """Give back nodes that are being drained, once their members and feeders have ended."""
        assert self._leases is not None
        for agent in self._agents.values():
            is_left = agent.described and not agent.ranks and not agent.feeders and not agent.is_closing
            if is_left and self._is_drained(agent.ray_id):
                self._leases.lose(agent.ray_id)
                self._report_node(agent)
                self._retire(agent)

    def _open_node(self, ray_id: str) -> None:
        """Start the agent of a node, if it is there and can be used; else return what was leased there."""
        assert self._leases is not None
        if ray_id in self._records:
            self._start_agent(ray_id)
        else:
            self._leases.lose(ray_id)

    def _start_agent(self, ray_id: str) -> None:
        name, record = self._names[ray_id], self._records[ray_id]
        agent = self._agents[name] = Agent(name, record, self._start_actor(record, name))
        self._streams[agent.actor.describe.remote(record["NodeManagerAddress"])] = agent

    def _start_actor(self, record: dict[str, Any], name: str, takes_over: str | None = None) -> Any:
        assert self._session is not None
        directory = self._session.directory
        actor = start_agent(record, name, self._run_dir, directory, on_gpus=self._on_gpus, takes_over=takes_over)
        self._abandon_if_lost()
        return actor

    def _listen(self, agent: Agent) -> None:
        self._streams[agent.actor.events.options(num_returns="streaming").remote()] = agent

    def _stop_listening(self, agent: Agent) -> None:
        self._streams = {stream: other for stream, other in self._streams.items() if other is not agent}

    def _describe(self, agent: Agent) -> Node:
        """A node with what the run holds of it."""
        leases = None if self._leases is None else self._leases.on_node(agent.ray_id)
        for lease in leases or ():
            lease.devices = agent.find_devices(lease.gpus)
            lease.is_unusable = agent.is_unusable(lease)
        return describe_node(agent, leases, on_gpus=self._on_gpus)

    def _report_node(self, agent: Agent) -> None:
        """Report what the run holds of a node; of one that is drained or closing, only that it holds nothing."""
        node = self._describe(agent) if agent.described is not None else None
        if agent.is_frozen:
            return
        is_leaving = agent.is_closing or self._is_drained(agent.ray_id)
        if node is not None and not ((node.cpus or node.gpus) and is_leaving):
            agent.reported = node
            self._queue.append({"type": "node", **node.as_event()})

    def request(self, waiting: Sequence[Identity], placed: Sequence[Placement]) -> None:
        """See `Executor`."""
        if self._leases is not None:
            self._leases.set_demand(waiting, placed)
            self._renew_at = 0.0

    def _renew_leases(self) -> None:
        """Take what has become ready, ask for what is missing, give back what is not used."""
        now = time.monotonic()
        if self._leases is None or now < self._renew_at:
            return
        self._renew_at = now + self._leases.poll_s
        self._look_for_drained()
        ready = self._leases.collect()
        for ray_id, reason in self._leases.pop_failed():
            self._rest(ray_id, self._names.get(ray_id, ray_id), reason)
        self._abandon_if_lost()
        for ray_id in ready:
            agent = self._agents.get(self._names.get(ray_id, ""))
            if agent is not None:
                if not agent.is_closing:  # else it is started again when it has ended
                    self._report_node(agent)
                continue
            if ray_id not in self._records:  # it joined just now
                self._look_at_cluster()
            self._open_node(ray_id)
        if self._leases.is_replan_due:
            self._look_at_cluster()
            self._leases.replan()
            self._abandon_if_lost()
        self._leave_drained()
        up = [
            agent
            for agent in self._agents.values()
            if agent.described and not agent.is_frozen and not self._is_drained(agent.ray_id)
        ]
        feeding = {agent.ray_id for agent in up if agent.feeders}
        measuring = {agent.ray_id for agent in up if agent.is_measuring}
        held = [(agent.ray_id, self._describe(agent)) for agent in up]
        unused = self._leases.release_unused(held, feeding, measuring)
        self._abandon_if_lost()
        for ray_id in unused:
            agent = self._agents[self._names[ray_id]]
            self._report_node(agent)
            if not self._leases.on_node(ray_id):
                self._retire(agent)
        self._report_pending()

    def _rest(self, ray_id: str, name: str, reason: str) -> None:
        """Report that nothing starts on a node now; it is tried again later."""
        assert self._leases is not None
        is_resting, pause_s = self._leases.is_resting(ray_id), self._leases.rest(ray_id)
        if is_resting:
            return
        log.warning("node %s cannot be used now, and is tried again in %g s: %s", name, pause_s, reason)
        self._queue.append({"type": "node_unusable", "node": name, "detail": reason, "retry_s": pause_s})

    def _retire(self, agent: Agent) -> None:
        """End the agent of a node of which the run holds nothing any more."""
        self._perform(agent, "close")
        agent.is_closing = True

    def _report_pending(self) -> None:
        """Report what Ray has not given for a while, and that nothing is missing any more."""
        assert self._leases is not None
        now, missing = time.monotonic(), self._leases.describe_pending()
        if not missing:
            self._pending_since = now
        elif now - self._pending_since < _PENDING_S:
            return
        if missing != self._pending:
            self._pending = missing
            self._queue.append({"type": "resources", "missing": missing})

    # -- commands -----------------------------------------------------------------------------------------------

    def start_feeder(
        self, node: str, cohort: int, expect: int, capacity: int, peers: Peers | None = None, late: bool = False
    ) -> str | None:
        """See `Executor`; members that are launched on the node later start when the feeder listens."""
        from pipelines.errors import PipelineError

        agent = self._agents.get(node)
        if agent is None or not agent.up or agent.is_closing:
            raise PipelineError(f"node {node} has no agent now")
        agent.feeders.add(cohort)
        self._perform(agent, "start_feeder", cohort, expect, capacity, peers, late)
        return str(make_feeder_address(Path(agent.directory), cohort))

    def expect_readers(self, node: str, cohort: int, members: int) -> None:
        """See `Executor`."""
        if node in self._agents:
            self._perform(self._agents[node], "expect_readers", cohort, members)

    def stop_feeder(self, node: str, cohort: int) -> None:
        """See `Executor`."""
        agent = self._agents.get(node)
        if agent is not None:
            agent.feeders.discard(cohort)
            if agent.up:  # else its feeders ended with the agent before it
                self._perform(agent, "stop_feeder", cohort)

    def launch(self, jobs: Sequence[Job], devices: Sequence[str | None]) -> None:
        """See `Executor`."""
        by_node: dict[str, list[tuple[Job, str | None]]] = {}
        for job, device in zip(jobs, devices, strict=True):
            by_node.setdefault(job.node, []).append((job, device))
        for node in by_node:
            if node not in self._agents or self._agents[node].is_closing:
                raise OSError(f"node {node} has no agent")
        for node, ranks in by_node.items():
            agent = self._agents[node]
            agent.ranks |= {_rank_key(job): job for job, _ in ranks}
            self._perform(agent, "launch", [job.as_json() for job, _ in ranks], [device for _, device in ranks])

    def send(self, member: str, command: str, **fields: Any) -> None:
        """See `Executor`."""
        for agent in self._find(member):
            self._perform(agent, "send", member, command, fields)

    def kill(self, member: str) -> None:
        """See `Executor`."""
        for agent in self._find(member):
            self._perform(agent, "kill", member)

    def _find(self, member: str) -> list[Agent]:
        return [agent for agent in self._agents.values() if any(key[0] == member for key in agent.ranks)]

    def _perform(self, agent: Agent, *command: Any) -> None:
        if not agent.is_closing:
            agent.unsent.append(command)

    # -- events -------------------------------------------------------------------------------------------------

    def events(self, timeout_s: float | None) -> list[Report]:
        """See `Executor`."""
        if self._session is not None:
            assert self._head is not None
            try:
                if self._head.is_lost or self._is_head_lost:
                    raise HeadLostError
                self._head.call(self._turn, timeout_s)
            except HeadLostError:
                self._receive_without_head(timeout_s)
        events, self._queue = self._queue, []
        return events

    def _turn(self, timeout_s: float | None) -> None:
        """Wait for events, and do what is due."""
        if self._leases is not None:
            poll_s = self._leases.poll_s
            timeout_s = poll_s if timeout_s is None else min(poll_s, timeout_s)
        self._advance(0.0 if self._queue else timeout_s)

    def _advance(self, timeout_s: float | None) -> None:
        """Wait for events; then replace silent agents, and renew leases, which may wait long for the head.

        Agents are judged when their events have just been read: nobody reads them while the head is awaited.
        """
        self._receive(timeout_s)
        self._end_silent()
        self._renew_leases()

    def _abandon_if_lost(self) -> None:
        """After a call that may have waited for the head: end a turn that was given up meanwhile.

        `_receive_without_head` runs in another thread then, with the same agents and events.

        Raises:
            HeadLostError: the turn was given up.
        """
        if self._is_head_lost:
            raise HeadLostError

    def _receive_without_head(self, timeout_s: float | None) -> None:
        """Report that the head is lost, and let the members end: agents still get commands and send events."""
        assert self._head is not None
        if not self._is_head_lost:
            self._is_head_lost = True
            self._queue.append({"type": "cluster_lost", "detail": HEAD_LOST})
            return
        for agent in self._agents.values():
            agent.send()
        streams = self._list_streams()
        if streams:
            self._read_last(streams, _POLL_S if timeout_s is None else timeout_s)
        else:
            time.sleep(timeout_s or 0.0)
        listened = {agent.name for agent in self._streams.values()}
        for agent in self._agents.values():
            if self._head.are_nodes_ending or agent.name not in listened:
                self._end_ranks(agent, HEAD_LOST, node_lost=True)

    def _receive(self, timeout_s: float | None) -> None:
        """Send all commands; wait for events and answers, and handle them."""
        import ray

        for agent in self._agents.values():
            agent.send()
        if not self._streams:
            time.sleep(timeout_s or 0.0)
            return
        ready, _ = ray.wait(list(self._streams), num_returns=1, timeout=timeout_s)
        while ready:
            for stream in ready:
                self._read(stream)
            streams = list(self._streams)
            ready = ray.wait(streams, num_returns=len(streams), timeout=0)[0] if streams else []

    def _read(self, stream: Any) -> None:
        """Read the next events of an agent, or its answer."""
        import ray

        agent = self._streams.get(stream)
        if agent is None:  # of a node that was found to be lost in this round
            return
        try:
            if agent.described is None:
                answer: Any = ray.get(stream)
                del self._streams[stream]
                self._handle_answer(agent, *answer)
                return
            events: Any = ray.get(next(stream))
        except StopIteration:
            del self._streams[stream]
            self._forget(agent)
            return
        except ray.exceptions.RayError as error:
            del self._streams[stream]
            self._handle_death(agent, describe_error(error))
            return
        agent.heard_at = time.monotonic()
        if not agent.up:
            self._mark_up(agent)
        self._keep_events(agent, events)

    def _keep_events(self, agent: Agent, events: Sequence[Report]) -> None:
        """Keep an agent's events for the next `events`, and forget the ranks that have ended."""
        for event in events:
            if event["type"] == "exited":
                agent.ranks.pop((event["member"], event["attempt"], event["rank"]), None)
            elif event["type"] == "launch_failed":
                self._handle_failed_launch(agent, event)
                continue
            elif event["type"] == "gpu_quarantined":
                agent.quarantine(event["devices"])
            elif event["type"] == "node":
                agent.update(event)
                if agent.reported is None or has_changed(agent.reported, self._describe(agent)):
                    self._report_node(agent)
                continue
            self._queue.append(event)

    def _handle_failed_launch(self, agent: Agent, event: Report) -> None:
        """No rank of an attempt was started on a node; those on other nodes may have been."""
        who = (event["member"], event["attempt"])
        here = {key: job for key, job in agent.ranks.items() if key[:2] == who}
        agent.ranks = {key: job for key, job in agent.ranks.items() if key not in here}
        if all(len(here) == job.identity.workers for job in here.values()):
            self._queue.append(event)
        else:
            why = f"could not be started on node {agent.name}: {event['detail']}"
            self._queue += [make_exited(job, None, why) for job in here.values()]

    def _handle_answer(self, agent: Agent, described: dict[str, Any], directory: str) -> None:
        """The agent of a node has started."""
        agent.described, agent.directory, agent.heard_at = described, directory, time.monotonic()
        if self._leases is None:
            described["interface"] = "lo"  # a Ray that was started for this run has one node
        else:
            self._leases.end_rest(agent.ray_id)
        self._listen(agent)
        self._report_node(agent)

    def _forget(self, agent: Agent) -> None:
        """The agent of a node has ended as it was told to."""
        import ray

        ray.kill(agent.actor)
        self._abandon_if_lost()
        del self._agents[agent.name]
        if self._leases is not None and self._leases.on_node(agent.ray_id):  # they became ready meanwhile
            self._open_node(agent.ray_id)

    def _handle_death(self, agent: Agent, reason: str) -> None:
        if agent.is_closing:
            self._forget(agent)
        elif self._is_drained(agent.ray_id) or not self._is_alive(agent):
            self._lose_node(agent, reason)  # on a node that is being drained Ray starts no other agent
        elif agent.described is None:
            if self._leases is not None and any(text in reason for text in _PASSING):
                self._rest(agent.ray_id, agent.name, reason if _PASSING[0] in reason else f"{reason}{IS_FULL}")
            else:
                log.warning("node %s cannot be used: %s", agent.name, reason)
                self._queue.append({"type": "node_unusable", "node": agent.name, "detail": reason})
                self._unusable.add(agent.ray_id)
            self._end_ranks(agent, f"node {agent.name} cannot be used", node_lost=True)
            self._drop(agent)
        else:
            self._replace(agent, reason)

    def _end_silent(self) -> None:
        """Replace agents that have not reported for long, such as a stopped process."""
        now = time.monotonic()  # the replacement of one may wait for the head, while nobody listens to the others
        for agent in list(self._agents.values()):
            limit_s = _SILENT_S if agent.described is not None and agent.up else _START_S
            if now - agent.heard_at > limit_s:
                self._stop_listening(agent)
                self._freeze(agent, limit_s)
                self._handle_death(agent, f"its agent has been silent for {limit_s:g} s")

    def _freeze(self, agent: Agent, limit_s: float) -> None:
        """Have no member placed on a node that is silent until it has answered: perhaps all of it is stopped."""
        if agent.reported is None or agent.is_frozen or agent.is_closing:
            return
        agent.is_frozen = True
        agent.feeders.clear()  # nobody is to read them any more
        detail = f"it has been silent for {limit_s:g} s, and is used again when it answers"
        self._queue.append({"type": "node_unusable", "node": agent.name, "detail": detail})
        nothing = dataclasses.replace(agent.reported.select_gpus(lambda i: False), cpus=0.0)
        self._queue.append({"type": "node", **nothing.as_event()})

    def _is_alive(self, agent: Agent) -> bool:
        """Whether a node accepts connections, as one does that is stopped, and Ray has not given it up."""
        assert self._session is not None
        return is_reachable(agent.record) and agent.ray_id in {str(r["NodeID"]) for r in self._session.nodes()}

    def _replace(self, agent: Agent, reason: str) -> None:
        """Start another agent on a node; the ranks and feeders of this one have ended with it, or are ended."""
        import ray

        ray.kill(agent.actor)  # perhaps only a thread of it has ended
        self._abandon_if_lost()
        agent.replacements += 1
        if agent.replacements > _REPLACEMENTS:
            self._lose_node(agent, reason)
            return
        log.warning("the agent of node %s ended and is replaced: %s", agent.name, reason)
        self._queue.append({"type": "agent_replaced", "node": agent.name, "detail": reason})
        self._end_ranks(agent, f"the agent of node {agent.name} ended: {reason}", agent_lost=True)
        agent.replace(self._start_actor(agent.record, agent.name, agent.directory))
        self._listen(agent)

    def _mark_up(self, agent: Agent) -> None:
        """An agent that replaces another has sent its first events: the feeders of the other are gone."""
        agent.up = True
        if agent.is_frozen:
            agent.is_frozen = False
            self._report_node(agent)
        self._queue += [
            {"type": "feeder_exited", "node": agent.name, "cohort": cohort, "detail": "its agent ended"}
            for cohort in sorted(agent.feeders)
        ]

    def _lose_node(self, agent: Agent, reason: str) -> None:
        """Report the loss of a node and of its ranks."""
        log.warning("node %s is lost: %s", agent.name, reason)
        self._queue.append({"type": "node_lost", "node": agent.name, "detail": reason})
        self._end_ranks(agent, f"node {agent.name} is lost", node_lost=True)
        self._drop(agent)

    def _end_ranks(self, agent: Agent, detail: str, **more: Any) -> None:
        self._queue += [make_exited(job, None, detail, **more) for job in agent.ranks.values()]
        agent.ranks.clear()

    def _drop(self, agent: Agent) -> None:
        import ray

        ray.kill(agent.actor)
        self._abandon_if_lost()
        del self._agents[agent.name]
        self._stop_listening(agent)
        self._records.pop(agent.ray_id, None)
        if self._leases is not None:
            self._leases.lose(agent.ray_id)

    def close(self) -> None:
        """See `Executor`."""
        import ray

        if self._session is None:
            return
        for agent in self._agents.values():
            self._perform(agent, "close")
            agent.send()
        until = time.monotonic() + (_CLOSE_S if not self._is_head_lost else _CLOSE_WITHOUT_HEAD_S)
        while (streams := self._list_streams()) and (left_s := until - time.monotonic()) > 0:
            self._read_last(streams, left_s)
        for agent in self._agents.values():
            if self._is_head_lost:
                agent.actor.__ray_terminate__.remote()  # `ray.kill` is done by the head
            else:
                ray.kill(agent.actor)
        self._agents.clear()
        self._streams.clear()
        try:
            if self._leases is not None and not self._is_head_lost:
                self._leases.close()
        finally:
            if self._head is not None:
                self._head.close()
            self._session.close()
            self._session = None
            self._native.close()

    def _list_streams(self) -> list[Any]:
        """The streams of events of the agents that answer."""
        return [stream for stream, agent in self._streams.items() if agent.described and agent.up]

    def _read_last(self, streams: Sequence[Any], timeout_s: float) -> None:
        """Keep the next events of agents for the next `events`; nothing follows from them for nodes."""
        import ray

        ready: Any = ray.wait(list(streams), num_returns=1, timeout=timeout_s)[0]
        for stream in ready:
            try:
                events: Any = ray.get(next(stream))
                self._keep_events(self._streams[stream], events)
            except (StopIteration, ray.exceptions.RayError):
                del self._streams[stream]


def _list_declared(ensemble: Ensemble) -> list[Identity]:
    """The members of a run, as far as they are known before it starts."""
    if ensemble.search is not None:
        return [ensemble.identify(number, {}) for number in range(min(ensemble.search.trials, MOST_PENDING))]
    return [ensemble.identify(number) for number in range(len(ensemble.members or ()))]


def _rank_key(job: Job) -> tuple[str, int, int]:
    return job.identity.member, job.attempt, job.rank
