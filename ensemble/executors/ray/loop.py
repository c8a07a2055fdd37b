"""The loop between a cluster and its model, which is told what happens, and whose decisions are carried out."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

from ensemble.executors.ray import _compat
from ensemble.executors.ray.agent_link import AgentLink
from ensemble.executors.ray.agents import Action, Died, News, StartAgent
from ensemble.executors.ray.cluster_model import ClusterModel
from ensemble.executors.ray.session import RayConnection, is_reachable

POLL_S = 0.2  # while nothing is known of how long to wait
HEAD_LOST = "the head of the Ray cluster does not answer any more"
CONNECTION_LOST = "this program's connection to Ray was closed (ray.shutdown) while the run went on"
_ASK_S = 1.0  # how often the head is asked whether it is there
_ANSWER_S = 2.0
_PATIENCE = "RAY_gcs_rpc_server_reconnect_timeout_s"  # of Ray; operators raise it


def read_patience() -> float:
    """Seconds for which Ray waits for a head that does not answer, before it ends the processes."""
    try:
        return max(1.0, float(os.environ[_PATIENCE]))
    except (KeyError, ValueError):
        return 60.0


class ClusterLoop:
    """Turns of the loop. Calls to the head (Ray's GCS), which have no time limit, are made only while it answers.

    Attributes:
        renew_at: when leases are renewed next (monotonic clock).
        lost: why the cluster is taken for lost: the head, for a third of Ray's patience, or the connection. What
            agents send and are sent needs no head, so members write checkpoints meanwhile. Empty: it is not.
    """

    def __init__(self, model: ClusterModel, link: AgentLink, session: RayConnection) -> None:
        self._model, self._link, self._session = model, link, session
        self.renew_at = 0.0
        self.lost = ""
        self._patience_s = read_patience()
        self._answered_at, self._ask_at, self._is_head_there = time.monotonic(), 0.0, True
        self._died: list[tuple[str, Died]] = []  # agents, about which the head is to be asked

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
        """Wait for events; then replace silent agents, and renew leases."""
        if self.lost or self._session.is_lost or not self._look_for_head():
            self._advance_without_head(timeout_s)
            return
        if self._model.leases is not None:
            poll_s = self._model.leases.poll_s
            timeout_s = poll_s if timeout_s is None else min(poll_s, timeout_s)
        self.send()
        died, self._died = self._died, []
        for name, news in (*died, *self._link.wait(timeout_s)):
            self._handle(name, news)
        for name, reason in self._model.find_silent(time.monotonic()):
            self._handle(name, Died(reason))
        if self._is_head_there:
            self._renew_leases()

    def look_at_cluster(self) -> None:
        """Read which nodes there are, and what they have free."""
        self._model.look_for_drained()
        free = _compat.list_free_resources() if self._model.leases is not None else None
        self._model.see_nodes(self._session.nodes(), free)

    def send(self) -> None:
        """Send agents their commands, what is for one of them in one call."""
        for name, agent in self._model.agents.items():
            if commands := agent.take_unsent():
                self._link.send(name, commands)

    def _handle(self, name: str, news: News) -> None:
        agent = self._model.agents.get(name)
        if isinstance(news, Died) and agent is not None:
            if not self._look_for_head(at_once=True):  # perhaps it died with its head
                self._died.append((name, news))
                return
            news = Died(news.reason, is_reachable(agent.record))
        self._carry_out(self._model.handle(name, news, time.monotonic()))

    def _carry_out(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, StartAgent):
                self._link.start(action.name, action.record, action.replaces)
            else:
                self._link.kill(action.name)

    def _renew_leases(self) -> None:
        """Take what has become ready, ask for what is missing, give back what is not used."""
        leases, now_s = self._model.leases, time.monotonic()
        if leases is None or now_s < self.renew_at:
            return
        self.renew_at = now_s + leases.poll_s
        self._model.look_for_drained()
        new = self._model.collect()
        if new - self._model.records.keys():  # it joined just now
            self.look_at_cluster()
        for ray_id in new:
            self._carry_out(self._model.open_node(ray_id, now_s))
        if leases.is_replan_due:
            self.look_at_cluster()
            leases.replan()
        self._model.release_unused(now_s)

    # -- when the head, or the connection, is lost ----------------------------------------------------------------

    def _look_for_head(self, *, at_once: bool = False) -> bool:
        """Ask the head, each second or at once, whether it answers; return False if it has not for too long."""
        now_s = time.monotonic()
        if at_once or now_s >= self._ask_at:
            self._is_head_there = _compat.is_head_answering(_ANSWER_S)
            self._ask_at = time.monotonic() + _ASK_S
            if self._is_head_there:
                self._answered_at = time.monotonic()
        return self._is_head_there if at_once else now_s - self._answered_at <= self._patience_s / 3

    def _advance_without_head(self, timeout_s: float | None) -> None:
        """Report that the cluster is lost, and let the members end; without a connection there are no agents."""
        is_connected = not self._session.is_lost
        if not self.lost:
            self.lost = HEAD_LOST if is_connected else CONNECTION_LOST
            self._model.reports.append({"type": "cluster_lost", "detail": self.lost})
            return
        if is_connected:
            self.send()
        if not (is_connected and self.read_last(POLL_S if timeout_s is None else timeout_s)):
            time.sleep(timeout_s or 0.0)
        # Ray ends the nodes when they have missed the head for long enough.
        are_nodes_ending = time.monotonic() - self._answered_at > self._patience_s * 3 / 4
        for agent in self._model.agents.values():
            if not is_connected or are_nodes_ending or agent.name not in self._link.listened:
                self._model.end_ranks(agent, self.lost, node_lost=True)

    def read_last(self, timeout_s: float) -> bool:
        """Keep the next events of agents that answer, from which nothing follows for nodes; False: none does."""
        listened = self._link.listened
        if not any(agent.described for name, agent in self._model.agents.items() if name in listened):
            return False
        for name, news in self._link.wait(timeout_s):
            if isinstance(news, list) and name in self._model.agents:
                self._model.keep(self._model.agents[name], news)
        return True
