"""The loop between a cluster and its model, which is told what happens, and whose decisions are carried out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from ensemble.executors.ray import _compat
from ensemble.executors.ray.actions import Action, KillAgent, StartAgent
from ensemble.executors.ray.agent_link import AgentLink
from ensemble.executors.ray.cluster_model import ClusterModel
from ensemble.executors.ray.head import Head
from ensemble.executors.ray.session import is_reachable

POLL_S = 0.2  # while nothing is known of how long to wait

HEAD_LOST = "the head of the Ray cluster does not answer any more"
CONNECTION_LOST = "this program's connection to Ray was closed (ray.shutdown) while the run went on"


class ClusterLoop:
    """Turns of the loop, each of which may wait for the head of the cluster.

    Args:
        read_nodes: returns Ray's records of the nodes that are reachable.
    """

    def __init__(
        self,
        model: ClusterModel,
        link: AgentLink,
        head: Head,
        read_nodes: Callable[[], list[dict[str, Any]]],
    ) -> None:
        self._model, self._link, self._head, self._read_nodes = model, link, head, read_nodes
        self.renew_at = 0.0  # when leases are renewed next

    @property
    def progress(self) -> tuple[int, int]:
        """Changes whenever a node comes or goes, or its agent answers."""
        return len(self._model.agents), self._link.calls

    def begin(self) -> None:
        """Look at the cluster; where all of it is the run's, start the agents of all nodes."""
        self.look_at_cluster()
        if self._model.leases is None:
            for ray_id in self._model.records:
                self._carry_out(self._model.open_node(ray_id, time.monotonic()))

    def advance(self, timeout_s: float | None) -> None:
        """Wait for events; then replace silent agents, and renew leases, which may wait long for the head.

        Agents are judged when their events have just been read: nobody reads them while the head is awaited.
        """
        if self._model.leases is not None:
            poll_s = self._model.leases.poll_s
            timeout_s = poll_s if timeout_s is None else min(poll_s, timeout_s)
        self.send()
        for name, news in self._link.wait(timeout_s):
            self._carry_out(self._model.handle(name, news, time.monotonic()))
        self._carry_out(self._model.find_silent(time.monotonic()))
        self._renew_leases()

    def look_at_cluster(self) -> None:
        """Read which nodes there are, and what they have free."""
        self._model.look_for_drained()
        free = self._head.ask(_compat.list_free_resources) if self._model.leases is not None else None
        self._model.see_nodes(self._head.ask(self._read_nodes), free)

    def send(self) -> None:
        """Send agents their commands, what is for one of them in one call."""
        for name, agent in self._model.agents.items():
            if commands := agent.take_unsent():
                self._link.send(name, commands)

    def _carry_out(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, StartAgent):
                self._link.start(action)
            elif isinstance(action, KillAgent):
                self._link.kill(action.name)
            else:
                agent, is_alive = action.agent, self._is_alive(action.agent.record)
                judged = self._model.judge_death(agent, action.reason, is_alive=is_alive, now=time.monotonic())
                self._carry_out(judged)

    def _is_alive(self, record: dict[str, Any]) -> bool:
        """Whether a node accepts connections, as one does that is stopped, and Ray has not given it up."""
        return is_reachable(record) and any(
            each["NodeID"] == record["NodeID"] for each in self._head.ask(self._read_nodes)
        )

    def _renew_leases(self) -> None:
        """Take what has become ready, ask for what is missing, give back what is not used."""
        leases, now = self._model.leases, time.monotonic()
        if leases is None or now < self.renew_at:
            return
        self.renew_at = now + leases.poll_s
        self._model.look_for_drained()
        new = self._model.collect()
        if new - self._model.records.keys():  # it joined just now
            self.look_at_cluster()
        for ray_id in new:
            self._carry_out(self._model.open_node(ray_id, now))
        if leases.is_replan_due:
            self.look_at_cluster()
            self._head.ask(leases.replan)
        self._model.release_unused(now)

    # -- when the head, or the connection, is lost ----------------------------------------------------------------

    def advance_without_head(self, timeout_s: float | None, why: str, *, is_connected: bool = True) -> None:
        """Report that the head is lost, and let the members end: agents still get commands and send events.

        Without a connection there are no agents any more. The turn that was given up may go on in another thread;
        it ends when what it waits for is answered.
        """
        if not self._head.is_given_up:
            self._head.give_up()
            self._model.reports.append({"type": "cluster_lost", "detail": why})
            return
        if is_connected:
            self.send()
        if not (is_connected and self.read_last(POLL_S if timeout_s is None else timeout_s)):
            time.sleep(timeout_s or 0.0)
        for agent in self._model.agents.values():
            if not is_connected or self._head.are_nodes_ending or agent.name not in self._link.listened:
                self._model.end_ranks(agent, why, node_lost=True)

    def read_last(self, timeout_s: float) -> bool:
        """Keep the next events of agents that answer, from which nothing follows for nodes; False: none does."""
        agents = (self._model.agents[name] for name in self._link.listened & self._model.agents.keys())
        names = {agent.name for agent in agents if agent.described and agent.is_up}
        for name, events in self._link.wait_for_last(names, timeout_s) if names else ():
            self._model.keep(self._model.agents[name], events)
        return bool(names)
