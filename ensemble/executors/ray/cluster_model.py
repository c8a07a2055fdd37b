"""Decides what becomes of the nodes of a run and of their agents: events in, actions out; no I/O, and no clock.

The executor tells the model what Ray says of the cluster, what agents say, and what time it is (`now`, a monotonic
clock in seconds). The model keeps the commands for agents and the reports for the controller, and returns the
actions that the executor carries out, in their order. Leases are asked for and given back by the `LeaseManager`
that the model is given; None on a Ray that was started for this run, all of which is the run's.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from ensemble.events import Report
from ensemble.executors.base import make_exited
from ensemble.executors.gpu_offers import has_changed
from ensemble.executors.ray.actions import (
    Action,
    Answered,
    Died,
    Ended,
    Examine,
    KillAgent,
    News,
    StartAgent,
)
from ensemble.executors.ray.agents import Agent, describe_node, describe_offer, name_nodes, read_labels
from ensemble.executors.ray.lease_manager import LeaseManager
from ensemble.executors.ray.leases import IS_FULL
from ensemble.executors.ray.request import Offer
from ensemble.schedule import Node
from ensemble.train.job import Job

SILENT_S = 60.0  # without an event: an agent reports each second
START_S = 300.0  # for an agent to start: a shared file system may be slow when many nodes import from it
PENDING_S = 3.0  # before it is reported that the run waits for Ray
REPLACEMENTS = 3  # of the agent of a node
_PASSING = "No space left", "worker process has died"  # as the system, and Ray, say where a disk is full

Result = TypeVar("Result")

log = logging.getLogger(__name__)


def _call(function: Callable[..., Result], *arguments: Any) -> Result:
    return function(*arguments)


class ClusterModel:
    """The nodes and agents of a run on a cluster.

    Args:
        leases: None: all of the cluster is the run's.
        on_gpus: whether the run uses GPUs.
        ask: makes a call of `leases` that may wait for the head, and raises where the turn was given up meanwhile.

    Attributes:
        agents: by the name of the node.
        records: what Ray says of the nodes that can be used, by Ray's id.
        reports: for the controller.
        cluster: what the nodes could ever offer, also of those that are gone; None where the run holds all of it.
    """

    def __init__(
        self, leases: LeaseManager | None, *, on_gpus: bool = True, ask: Callable[..., Any] = _call
    ) -> None:
        self.leases, self._on_gpus, self._ask = leases, on_gpus, ask
        self.agents: dict[str, Agent] = {}
        self.records: dict[str, dict[str, Any]] = {}
        self.reports: list[Report] = []
        self._unusable: set[str] = set()  # Ray's ids of nodes
        self._known_nodes: dict[str, Node] = {}  # also those that are gone
        self._names: dict[str, str] = {}  # of nodes, by Ray's id
        self._nodes_of: dict[str, tuple[str, ...]] = {}  # on which a member was launched last
        self._pending = ""  # what Ray has not given, as it was last reported
        self._pending_since: float | None = None

    @property
    def cluster(self) -> Sequence[Node] | None:
        """See the class."""
        return None if self.leases is None else list(self._known_nodes.values())

    def take_reports(self) -> list[Report]:
        """The reports since the last call."""
        reports, self.reports = self.reports, []
        return reports

    # -- nodes ----------------------------------------------------------------------------------------------------

    def see_nodes(
        self, records: Iterable[dict[str, Any]], free: Mapping[str, Mapping[str, float]] | None = None
    ) -> None:
        """Which nodes Ray has now, and what they have free, by Ray's id."""
        found = {str(record["NodeID"]): record for record in records}
        self.records = {
            ray_id: record
            for ray_id, record in found.items()
            if ray_id not in self._unusable and not self._is_drained(ray_id)
        }
        self._names = name_nodes(list(found.values()), self._names)
        if self.leases is None:
            return
        offers = []
        for ray_id, record in found.items():
            if self._is_drained(ray_id):
                continue
            name = self._names[ray_id]
            agent, before = self.agents.get(name), self._known_nodes.get(name)
            node = describe_offer(record, name, agent, on_gpus=self._on_gpus, before=before)
            offers.append(Offer(ray_id, node, (free or {}).get(ray_id, {}), read_labels(record)))
        # A node that is gone may be replaced by another like it, so members that fitted there wait for that.
        self._known_nodes |= {offer.node.name: offer.node for offer in offers}
        frozen = {agent.ray_id for agent in self.agents.values() if agent.is_frozen}
        self.leases.set_offers(offers, frozen | self._unusable)

    def look_for_drained(self) -> None:
        """Report the nodes that Ray has begun to drain: no member is placed there any more."""
        drained = {} if self.leases is None else self._ask(self.leases.look_for_drained)
        for ray_id, deadline in drained.items():
            self.records.pop(ray_id, None)
            agent = self._find_on(ray_id)
            if agent is not None and not agent.is_closing:
                log.warning("node %s is being drained: its members write checkpoints and move", agent.name)
                self.reports.append({"type": "node_draining", "node": agent.name, "deadline": deadline})

    def list_usable(self) -> list[Node]:
        """What the run holds of each node whose agent has answered."""
        return [
            self.describe(agent)
            for agent in self.agents.values()
            if agent.described and not self._is_drained(agent.ray_id)
        ]

    def open_node(self, ray_id: str, now: float) -> list[Action]:
        """Start the agent of a node, if it is there and can be used; else return what was leased there."""
        if ray_id in self.records:
            name, record = self._names[ray_id], self.records[ray_id]
            self.agents[name] = Agent(name, record, heard_at=now)
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
        node = self.describe(agent) if agent.described is not None else None
        if agent.is_frozen:
            return
        is_leaving = agent.is_closing or self._is_drained(agent.ray_id)
        if node is not None and not ((node.cpus or node.gpus) and is_leaving):
            agent.reported = node
            self.reports.append({"type": "node", **node.as_event()})

    def _is_drained(self, ray_id: str) -> bool:
        return self.leases is not None and ray_id in self.leases.draining

    def _find_on(self, ray_id: str) -> Agent | None:
        return self.agents.get(self._names.get(ray_id, ""))

    # -- leases ---------------------------------------------------------------------------------------------------

    def collect(self) -> set[str]:
        """Takes what has become ready; returns Ray's ids of the nodes that are to be opened for it."""
        assert self.leases is not None
        ready = self._ask(self.leases.collect)
        for ray_id, reason in self.leases.pop_failed():
            self._rest(ray_id, self._names.get(ray_id, ray_id), reason)
        new = set()
        for ray_id in ready:
            agent = self._find_on(ray_id)
            if agent is None:
                new.add(ray_id)
            elif not agent.is_closing:  # else it is started again when it has ended
                self.report_node(agent)
        return new

    def release_unused(self, now: float) -> None:
        """Give back what nobody uses, and nodes that are drained once their members and feeders have ended."""
        assert self.leases is not None
        for agent in self.agents.values():
            is_left = agent.described and not agent.ranks and not agent.feeders and not agent.is_closing
            if is_left and self._is_drained(agent.ray_id):
                self.leases.lose(agent.ray_id)
                self.report_node(agent)
                self._retire(agent)
        up = self._list_up()
        feeding = {agent.ray_id for agent in up if agent.feeders}
        measuring = {agent.ray_id for agent in up if agent.is_measuring}
        held = [(agent.ray_id, self.describe(agent)) for agent in up]
        for ray_id in self._ask(self.leases.release_unused, held, feeding, measuring):
            agent = self.agents[self._names[ray_id]]
            self.report_node(agent)
            if not self.leases.on_node(ray_id):
                self._retire(agent)
        self._report_pending(now)

    def _list_up(self) -> list[Agent]:
        return [
            agent
            for agent in self.agents.values()
            if agent.described and not agent.is_frozen and not self._is_drained(agent.ray_id)
        ]

    def _retire(self, agent: Agent) -> None:
        """End the agent of a node of which the run holds nothing any more."""
        agent.tell("close")
        agent.is_closing = True

    def _rest(self, ray_id: str, name: str, reason: str) -> None:
        """Report that nothing starts on a node now; it is tried again later."""
        assert self.leases is not None
        is_resting, pause_s = self.leases.is_resting(ray_id), self.leases.rest(ray_id)
        if is_resting:
            return
        log.warning("node %s cannot be used now, and is tried again in %g s: %s", name, pause_s, reason)
        self.reports.append({"type": "node_unusable", "node": name, "detail": reason, "retry_s": pause_s})

    def _report_pending(self, now: float) -> None:
        """Report what Ray has not given for a while, and that nothing is missing any more."""
        assert self.leases is not None
        missing = self.leases.describe_pending()
        if not missing or self._pending_since is None:
            self._pending_since = now
        if missing and now - self._pending_since < PENDING_S:
            return
        if missing != self._pending:
            self._pending = missing
            self.reports.append({"type": "resources", "missing": missing})

    # -- agents ---------------------------------------------------------------------------------------------------

    def handle(self, name: str, news: News, now: float) -> list[Action]:
        """What the agent of a node has said, or what became of it."""
        agent = self.agents.get(name)
        if agent is None:  # of a node that was found to be lost in this round
            return []
        if isinstance(news, Answered):
            self._open(agent, news, now)
        elif isinstance(news, Ended):
            return self._forget(agent, now)
        elif isinstance(news, Died):
            return self._bury(agent, news.reason, now)
        else:
            agent.heard_at = now
            if not agent.is_up:
                self._mark_up(agent)
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

    def find_silent(self, now: float) -> list[Action]:
        """Give up agents that have not reported for long, such as a stopped process."""
        actions: list[Action] = []
        for agent in list(self.agents.values()):
            limit_s = SILENT_S if agent.described is not None and agent.is_up else START_S
            if now - agent.heard_at > limit_s:
                self._freeze(agent, limit_s)
                actions += self._bury(agent, f"its agent has been silent for {limit_s:g} s", now)
        return actions

    def judge_death(self, agent: Agent, reason: str, *, is_alive: bool, now: float) -> list[Action]:
        """The agent of a node that lives, or does not, has died."""
        if not is_alive:
            return self._lose_node(agent, reason)
        if agent.described is not None:
            return self._replace(agent, reason, now)
        if self.leases is not None and any(text in reason for text in _PASSING):
            self._rest(agent.ray_id, agent.name, reason if _PASSING[0] in reason else f"{reason}{IS_FULL}")
        else:
            log.warning("node %s cannot be used: %s", agent.name, reason)
            self.reports.append({"type": "node_unusable", "node": agent.name, "detail": reason})
            self._unusable.add(agent.ray_id)
        self.end_ranks(agent, f"node {agent.name} cannot be used", node_lost=True)
        return self._drop(agent)

    def end_ranks(self, agent: Agent, detail: str, **more: Any) -> None:
        """The processes of members on a node have ended, or can be reached no more."""
        self.reports += [make_exited(job, None, detail, **more) for job in agent.ranks.values()]
        agent.ranks.clear()

    def _open(self, agent: Agent, answer: Answered, now: float) -> None:
        """The agent of a node has started."""
        agent.described, agent.directory, agent.heard_at = answer.described, answer.directory, now
        if self.leases is None:
            answer.described["interface"] = "lo"  # a Ray that was started for this run has one node
        else:
            self.leases.end_rest(agent.ray_id)
        self.report_node(agent)

    def _forget(self, agent: Agent, now: float) -> list[Action]:
        """The agent of a node has ended as it was told to."""
        del self.agents[agent.name]
        actions: list[Action] = [KillAgent(agent.name)]
        if self.leases is not None and self.leases.on_node(agent.ray_id):  # they became ready meanwhile
            actions += self.open_node(agent.ray_id, now)
        return actions

    def _bury(self, agent: Agent, reason: str, now: float) -> list[Action]:
        if agent.is_closing:
            return self._forget(agent, now)
        if self._is_drained(agent.ray_id):  # Ray starts no other agent there
            return self._lose_node(agent, reason)
        return [Examine(agent, reason)]

    def _replace(self, agent: Agent, reason: str, now: float) -> list[Action]:
        """Start another agent on a node; the ranks and feeders of this one have ended with it, or are ended."""
        agent.replacements += 1
        if agent.replacements > REPLACEMENTS:
            return self._lose_node(agent, reason)
        log.warning("the agent of node %s ended and is replaced: %s", agent.name, reason)
        self.reports.append({"type": "agent_replaced", "node": agent.name, "detail": reason})
        self.end_ranks(agent, f"the agent of node {agent.name} ended: {reason}", agent_lost=True)
        agent.await_replacement(now)
        return [KillAgent(agent.name), StartAgent(agent.name, agent.record, agent.directory)]

    def _freeze(self, agent: Agent, limit_s: float) -> None:
        """Have no member placed on a node that is silent until it has answered: perhaps all of it is stopped."""
        if agent.reported is None or agent.is_frozen or agent.is_closing:
            return
        agent.is_frozen = True
        agent.feeders.clear()  # nobody is to read them any more
        detail = f"it has been silent for {limit_s:g} s, and is used again when it answers"
        self.reports.append({"type": "node_unusable", "node": agent.name, "detail": detail})
        nothing = dataclasses.replace(agent.reported.select_gpus(lambda i: False), cpus=0.0)
        self.reports.append({"type": "node", **nothing.as_event()})

    def _mark_up(self, agent: Agent) -> None:
        """An agent that replaces another has sent its first events: the feeders of the other are gone."""
        agent.is_up = True
        if agent.is_frozen:
            agent.is_frozen = False
            self.report_node(agent)
        self.reports += [
            {"type": "feeder_exited", "node": agent.name, "cohort": cohort, "detail": "its agent ended"}
            for cohort in sorted(agent.feeders)
        ]

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

    def _lose_node(self, agent: Agent, reason: str) -> list[Action]:
        """Report the loss of a node and of its ranks."""
        log.warning("node %s is lost: %s", agent.name, reason)
        self.reports.append({"type": "node_lost", "node": agent.name, "detail": reason})
        self.end_ranks(agent, f"node {agent.name} is lost", node_lost=True)
        return self._drop(agent)

    def _drop(self, agent: Agent) -> list[Action]:
        del self.agents[agent.name]
        self.records.pop(agent.ray_id, None)
        if self.leases is not None:
            self.leases.lose(agent.ray_id)
        return [KillAgent(agent.name)]

    # -- commands -------------------------------------------------------------------------------------------------

    def launch(self, jobs: Sequence[Job], devices: Sequence[str | None]) -> None:
        """See `Executor`."""
        by_node: dict[str, list[tuple[Job, str | None]]] = {}
        for job, device in zip(jobs, devices, strict=True):
            by_node.setdefault(job.node, []).append((job, device))
        for node in by_node:
            if node not in self.agents or self.agents[node].is_closing:
                raise OSError(f"node {node} has no agent")
        self._nodes_of[jobs[0].identity.member] = tuple(by_node)
        for node, ranks in by_node.items():
            agent = self.agents[node]
            agent.ranks |= {(job.identity.member, job.attempt, job.rank): job for job, _ in ranks}
            agent.tell("launch", [job.as_json() for job, _ in ranks], [device for _, device in ranks])

    def tell_ranks(self, member: str, *command: Any) -> None:
        """Tell the agents of all nodes on which a member has ranks."""
        for name in self._nodes_of.get(member, ()):
            agent = self.agents.get(name)
            if agent is not None and any(key[0] == member for key in agent.ranks):
                agent.tell(*command)
