"""Decides what becomes of the nodes of a run and of their agents: events in, actions out; no I/O, and no clock.

The executor tells the model what Ray and the agents say, and the time (`now_s`, a monotonic clock in seconds). The
model keeps commands for agents and reports for the controller, and returns the actions to carry out.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ensemble.events import Report
from ensemble.executors.base import make_exited
from ensemble.executors.gpu_offers import has_changed
from ensemble.executors.ray.agents import (
    Action,
    Agent,
    Answered,
    Died,
    Ended,
    KillAgent,
    News,
    StartAgent,
    describe_node,
    describe_offer,
    name_nodes,
    read_labels,
)
from ensemble.executors.ray.lease_manager import REST_S, LeaseManager
from ensemble.executors.ray.leases import IS_FULL
from ensemble.executors.ray.request import Offer
from ensemble.schedule.needs import Node
from ensemble.train.job import Job

SILENT_S = 60.0  # without an event: an agent reports each second
START_S = 300.0  # for an agent to start: a shared file system may be slow when many nodes import from it
PENDING_S = 3.0  # before it is reported that the run waits for Ray
REPLACEMENTS = 3  # of the agent of a node
SILENT = "its agent has been silent for {:g} s"
# What the system, and Ray, say where a disk is full; a node that is silent may be stopped for a while.
_PASSING = "No space left", "worker process has died", "has been silent"

log = logging.getLogger(__name__)


class ClusterModel:
    """The nodes and agents of a run on a cluster.

    Args:
        leases: None: all of the cluster is the run's.
        on_gpus: whether the run uses GPUs.

    Attributes:
        agents: by the name of the node.
        records: what Ray says of the nodes that can be used, by Ray's id.
        reports: for the controller.
        cluster: what the nodes could ever offer, also of those that are gone; None where the run holds all of it.
            While an agent of a Ray of the run's own is replaced, the run does not.
    """

    def __init__(self, leases: LeaseManager | None, *, on_gpus: bool = True) -> None:
        self.leases, self._on_gpus = leases, on_gpus
        self.agents: dict[str, Agent] = {}
        self.records: dict[str, dict[str, Any]] = {}
        self.reports: list[Report] = []
        self._known_nodes: dict[str, Node] = {}  # also those that are gone
        self._names: dict[str, str] = {}  # of nodes, by Ray's id
        self._nodes_of: dict[str, tuple[str, ...]] = {}  # on which a member was launched last
        self._pending = ""  # what Ray has not given, as it was last reported
        self._pending_since: float | None = None

    @property
    def cluster(self) -> Sequence[Node] | None:
        is_whole = self.leases is None and all(one.described is not None for one in self.agents.values())
        return None if is_whole else list(self._known_nodes.values())

    def take_reports(self) -> list[Report]:
        """Return the reports since the last call."""
        reports, self.reports = self.reports, []
        return reports

    # -- nodes ----------------------------------------------------------------------------------------------------

    def see_nodes(
        self, records: Iterable[dict[str, Any]], free: Mapping[str, Mapping[str, float]] | None = None
    ) -> None:
        """Note which nodes Ray has now, and what they have free, by Ray's id."""
        by_id = {str(record["NodeID"]): record for record in records}
        by_id = {ray_id: record for ray_id, record in by_id.items() if not self._is_drained(ray_id)}
        self.records = dict(by_id)
        self._names = name_nodes(list(by_id.values()), self._names)
        if self.leases is None:
            return
        offers = []
        for ray_id, record in by_id.items():
            name = self._names[ray_id]
            agent, before = self.agents.get(name), self._known_nodes.get(name)
            node = describe_offer(record, name, agent, on_gpus=self._on_gpus, before=before)
            offers.append(Offer(ray_id, node, (free or {}).get(ray_id, {}), read_labels(record)))
        # A node that is gone may be replaced by another like it, so members that fitted there wait for that.
        self._known_nodes |= {offer.node.name: offer.node for offer in offers}
        starting = {one.ray_id for one in self.agents.values() if one.replacements and one.described is None}
        self.leases.set_offers(offers, starting)

    def look_for_drained(self) -> None:
        """Report the nodes that Ray has begun to drain: no member is placed there any more."""
        drained = {} if self.leases is None else self.leases.look_for_drained()
        for ray_id, deadline in drained.items():
            self.records.pop(ray_id, None)
            agent = self._find_on(ray_id)
            if agent is not None and not agent.is_closing:
                log.warning("node %s is being drained: its members write checkpoints and move", agent.name)
                self.reports.append({"type": "node_draining", "node": agent.name, "deadline": deadline})

    def list_usable(self) -> list[Node]:
        """What the run holds of each node whose agent has answered."""
        return [self.describe(agent) for agent in self._list_up()]

    def open_node(self, ray_id: str, now_s: float) -> list[Action]:
        """Start the agent of a node, if it is there and can be used; else return what was leased there."""
        if ray_id in self.records and not (self.leases is not None and self.leases.is_resting(ray_id)):
            name, record = self._names[ray_id], self.records[ray_id]
            self.agents[name] = Agent(name, record, heard_at=now_s)
            return [StartAgent(name, record)]
        if self.leases is not None:
            self.leases.lose(ray_id)
        return []

    def describe(self, agent: Agent) -> Node:
        """A node with what the run holds of it."""
        if self.leases is None:
            return describe_node(agent, None, on_gpus=self._on_gpus)
        leases = self.leases.on_node(agent.ray_id)
        for lease in leases:
            lease.devices = agent.find_devices(lease.gpus)
            lease.is_unusable = agent.is_unusable(lease)
        return describe_node(agent, leases, on_gpus=self._on_gpus)

    def report_node(self, agent: Agent) -> None:
        """Report what the run holds of a node; of one that is drained or closing, only that it holds nothing."""
        if agent.described is None:
            return
        node = self.describe(agent)
        is_leaving = agent.is_closing or self._is_drained(agent.ray_id)
        if not ((node.cpus or node.gpus) and is_leaving):
            agent.reported = node
            self.reports.append({"type": "node", **node.as_event()})

    def _is_drained(self, ray_id: str) -> bool:
        return self.leases is not None and ray_id in self.leases.draining

    def _find_on(self, ray_id: str) -> Agent | None:
        return self.agents.get(self._names.get(ray_id, ""))

    # -- leases ---------------------------------------------------------------------------------------------------

    def collect(self) -> set[str]:
        """Take what has become ready; return Ray's ids of the nodes that are to be opened for it."""
        assert self.leases is not None
        ready = self.leases.collect()
        for ray_id, reason in self.leases.pop_failed():
            self._exclude(ray_id, self._names.get(ray_id, ray_id), reason, REST_S)
        new = set()
        for ray_id in ready:
            agent = self._find_on(ray_id)
            if agent is None:
                new.add(ray_id)
            elif not agent.is_closing:  # else it is started again when it has ended
                self.report_node(agent)
        return new

    def release_unused(self, now_s: float) -> None:
        """Give back what nobody uses, and nodes that are drained once their members and feeders have ended."""
        assert self.leases is not None
        for agent in self.agents.values():
            is_idle = agent.described and not agent.ranks and not agent.feeders and not agent.is_closing
            if is_idle and self._is_drained(agent.ray_id):
                self.leases.lose(agent.ray_id)
                self.report_node(agent)
                agent.retire()
        up = self._list_up()
        feeding = {agent.ray_id for agent in up if agent.feeders}
        measuring = {agent.ray_id for agent in up if agent.is_measuring}
        held = [(agent.ray_id, self.describe(agent)) for agent in up]
        for ray_id in self.leases.release_unused(held, feeding, measuring):
            agent = self.agents[self._names[ray_id]]
            self.report_node(agent)
            if not self.leases.on_node(ray_id):
                agent.retire()
        self._report_pending(now_s)

    def _list_up(self) -> list[Agent]:
        return [one for one in self.agents.values() if one.described and not self._is_drained(one.ray_id)]

    def _exclude(self, ray_id: str, name: str, reason: str, retry_s: float | None) -> None:
        """Report that nothing starts on a node, and ask nothing of it for a while; None: in this run."""
        if self.leases is not None and self.leases.is_resting(ray_id):
            return  # it was asked for several things at once
        log.warning("node %s cannot be used%s: %s", name, f" for {retry_s:g} s" if retry_s else "", reason)
        report: Report = {"type": "node_unusable", "node": name, "detail": reason}
        self.reports.append({**report, "retry_s": retry_s} if retry_s else report)
        if self.leases is not None:
            self.leases.rest(ray_id, retry_s)

    def _report_pending(self, now_s: float) -> None:
        """Report what Ray has not given for a while, and that nothing is missing any more."""
        assert self.leases is not None
        missing = self.leases.describe_pending()
        if not missing or self._pending_since is None:
            self._pending_since = now_s
        if missing and now_s - self._pending_since < PENDING_S:
            return
        if missing != self._pending:
            self._pending = missing
            self.reports.append({"type": "resources", "missing": missing})

    # -- agents ---------------------------------------------------------------------------------------------------

    def handle(self, name: str, news: News, now_s: float) -> list[Action]:
        """Handle what the agent of a node has said, or what became of it."""
        agent = self.agents.get(name)
        if agent is None:  # of a node that was found to be lost in this round
            return []
        if isinstance(news, Ended):
            return self._forget(agent, now_s)
        if isinstance(news, Died):
            return self._bury(agent, news, now_s)
        agent.heard_at = now_s
        if isinstance(news, Answered):
            agent.described, agent.directory = news
            if self.leases is None:
                agent.described["interface"] = "lo"  # a Ray that was started for this run has one node
            self.report_node(agent)
        else:
            self.keep(agent, news)
        return []

    def keep(self, agent: Agent, events: Sequence[Report]) -> None:
        """Keep an agent's events for the controller, and forget the ranks that have ended."""
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
                if agent.reported is None or has_changed(agent.reported, self.describe(agent)):
                    self.report_node(agent)
                continue
            self.reports.append(event)

    def find_silent(self, now_s: float) -> list[tuple[str, str]]:
        """The agents that have not reported for long, such as a stopped process, by node, and for how long."""
        limits = {name: START_S if one.described is None else SILENT_S for name, one in self.agents.items()}
        silent = (name for name, agent in self.agents.items() if now_s - agent.heard_at > limits[name])
        return [(name, SILENT.format(limits[name])) for name in silent]

    def end_ranks(self, agent: Agent, detail: str, **more: Any) -> None:
        """The processes of members on a node have ended, or can be reached no more."""
        self.reports += [make_exited(job, None, detail, **more) for job in agent.ranks.values()]
        agent.ranks.clear()

    def _forget(self, agent: Agent, now_s: float) -> list[Action]:
        """The agent of a node has ended as it was told to."""
        del self.agents[agent.name]
        actions: list[Action] = [KillAgent(agent.name)]
        if self.leases is not None and self.leases.on_node(agent.ray_id):  # they became ready meanwhile
            actions += self.open_node(agent.ray_id, now_s)
        return actions

    def _bury(self, agent: Agent, died: Died, now_s: float) -> list[Action]:
        """An agent has died: its node is lost, or cannot be used, or gets another agent."""
        if agent.is_closing:
            return self._forget(agent, now_s)
        is_node_lost = not died.is_node_alive or self._is_drained(agent.ray_id)  # Ray starts no other agent there
        is_last = agent.replacements == REPLACEMENTS or (self.leases is None and agent.described is None)
        if is_node_lost or (agent.replacements and is_last):
            log.warning("node %s is lost: %s", agent.name, died.reason)
            self.reports.append({"type": "node_lost", "node": agent.name, "detail": died.reason})
            self.end_ranks(agent, f"node {agent.name} is lost", node_lost=True)
        elif agent.described is not None:
            return self._replace(agent, died.reason, now_s)
        else:
            is_passing = any(text in died.reason for text in _PASSING)
            says_why = not is_passing or _PASSING[1] not in died.reason
            reason = died.reason if says_why else f"{died.reason}{IS_FULL}"
            self._exclude(agent.ray_id, agent.name, reason, REST_S if is_passing else None)
        del self.agents[agent.name]
        self.records.pop(agent.ray_id, None)
        if self.leases is not None:
            self.leases.lose(agent.ray_id)
        return [KillAgent(agent.name)]

    def _replace(self, agent: Agent, reason: str, now_s: float) -> list[Action]:
        """Start another agent on a node; the ranks and feeders of this one have ended with it, or do so now."""
        log.warning("the agent of node %s ended and is replaced: %s", agent.name, reason)
        self.reports.append({"type": "agent_replaced", "node": agent.name, "detail": reason})
        if agent.reported is not None:  # nothing is placed there before the new agent has answered
            self._known_nodes.setdefault(agent.name, agent.reported)
            nothing = dataclasses.replace(agent.reported.select_gpus(lambda i: False), cpus=0.0)
            self.reports.append({"type": "node", **nothing.as_event()})
        self.reports += [
            {"type": "feeder_exited", "node": agent.name, "cohort": cohort, "detail": "its agent ended"}
            for cohort in sorted(agent.feeders)
        ]
        self.end_ranks(agent, f"the agent of node {agent.name} ended: {reason}", agent_lost=True)
        number = agent.replacements + 1
        new = Agent(agent.name, agent.record, heard_at=now_s, replacements=number, broken=agent.broken)
        self.agents[agent.name] = new
        return [KillAgent(agent.name), StartAgent(agent.name, agent.record, agent.directory)]

    def _handle_failed_launch(self, agent: Agent, event: Report) -> None:
        """No rank of an attempt was started on a node; those on other nodes may have been."""
        who = (event["member"], event["attempt"])
        here = {key: job for key, job in agent.ranks.items() if key[:2] == who}
        agent.ranks = {key: job for key, job in agent.ranks.items() if key not in here}
        if all(len(here) == job.identity.workers for job in here.values()):
            self.reports.append(event)
        else:
            why = f"could not be started on node {agent.name}: {event['detail']}"
            self.reports += [make_exited(job, None, why) for job in here.values()]

    # -- commands -------------------------------------------------------------------------------------------------

    def launch(self, jobs: Sequence[Job], devices: Sequence[str | None]) -> None:
        by_node: dict[str, list[tuple[Job, str | None]]] = {}
        for job, device in zip(jobs, devices, strict=True):
            by_node.setdefault(job.node, []).append((job, device))
        agents = {node: self.find_agent(node) for node in by_node}
        self._nodes_of[jobs[0].identity.member] = tuple(by_node)
        for node, ranks in by_node.items():
            agent = agents[node]
            agent.ranks |= {(job.identity.member, job.attempt, job.rank): job for job, _ in ranks}
            agent.tell("launch", [job.as_json() for job, _ in ranks], [device for _, device in ranks])

    def find_agent(self, node: str) -> Agent:
        """The agent of a node, if it can be told to start something; else OSError."""
        agent = self.agents.get(node)
        if agent is None or agent.described is None or agent.is_closing:
            raise OSError(f"node {node} has no agent now")
        return agent

    def tell_ranks(self, member: str, *command: Any) -> None:
        """Tell the agents of all nodes on which a member has ranks."""
        for name in self._nodes_of.get(member, ()):
            agent = self.agents.get(name)
            if agent is not None and any(key[0] == member for key in agent.ranks):
                agent.tell(*command)
