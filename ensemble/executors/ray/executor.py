"""The Ray executor: starts members, feeders and node agents on a cluster, and collects their events."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble.executors.base import Event, EventHandler, make_exited
from ensemble.executors.node_services import make_feeder_address
from ensemble.executors.ray.actors import KEPT_S, IdleActors, list_import_directories
from ensemble.executors.ray.placement import (
    FEEDERS,
    WAITING_EVERY_S,
    Agent,
    FeederStart,
    Rank,
    compute_share,
    describe_error,
    make_agent,
    make_node,
    make_waiting_events,
    make_worker,
)
from ensemble.executors.ray.session import Session, is_reachable
from ensemble.schedule import Node
from ensemble.spec import Ensemble, SpecError
from ensemble.train.job import Job

if TYPE_CHECKING:
    from ensemble.store import RunDir
    from pipelines import Peers

_CALL_S = 60.0  # time limit for the answer of a node's agent
_DRAIN_S = 5.0  # time limit for the last events of the nodes' agents
_REPLACEMENTS = 3  # of node agents, in a run
_KILLED = "was killed before it started"

log = logging.getLogger(__name__)


class RayExecutor:
    """Runs members as Ray actors; see `ensemble.executors.Executor`."""

    name = "ray"
    in_process = False
    work_cpu_s = 0.0

    def __init__(self) -> None:
        self._session: Session | None = None
        self._agents: dict[str, Agent] = {}
        self._ranks: list[Rank] = []  # that have not ended
        self._streams: dict[Any, Rank | Agent | FeederStart] = {}  # streams of events, and unanswered calls
        self._queue: list[Event] = []
        self._idle = IdleActors()
        self._replaced = 0
        self._one_host = self._on_gpus = True

    def open(self, run_dir: RunDir, ensemble: Ensemble, handle: EventHandler) -> list[Node]:
        """See `Executor`; the nodes are those of the cluster that RAY_ADDRESS names, or this host."""
        self._session = session = Session()  # sets what Ray reads when it is imported
        self._run_dir, self._on_gpus = run_dir, ensemble.devices != "cpu"
        records = session.nodes()
        self._one_host = len({record["NodeManagerAddress"] for record in records}) == 1
        names: dict[str, dict[str, Any]] = {}
        for record in records:
            host = str(record["NodeManagerHostname"])
            names[f"{host}-{record['NodeID'][:6]}" if host in names else host] = record
        actors = {name: self._start_agent(record["NodeID"], name) for name, record in names.items()}
        calls = {name: actor.describe.remote(names[name]["NodeManagerAddress"]) for name, actor in actors.items()}
        for name, actor in actors.items():
            self._open_agent(names[name], name, actor, calls[name])
        nodes = [agent.node for agent in self._agents.values()]
        if not nodes:
            raise SpecError("no node of the cluster can be used")
        reasons = [f"node {node.name}: {node.no_gpus}" for node in nodes if node.no_gpus]
        if reasons and self._on_gpus and not any(node.gpus for node in nodes):
            raise SpecError(f"no GPU can be used ({'; '.join(reasons)}); wait until it can, or say devices='cpu'")
        return nodes

    def _open_agent(self, record: dict[str, Any], name: str, actor: Any, call: Any) -> None:
        """Receive what a node offers, unless it has just been lost; SpecError if it cannot be used."""
        import ray

        try:
            described, forks = ray.get(call, timeout=_CALL_S)
        except ray.exceptions.RayError as error:
            if not is_reachable(record):
                log.warning("node %s is lost: %s", name, describe_error(error))
                return
            raise SpecError(f"node {name} cannot be used: {describe_error(error)}") from None
        interface = "lo" if self._one_host else described["interface"]
        node = make_node({**described, "interface": interface}, record, on_gpus=self._on_gpus)
        if node.no_gpus:
            log.warning("node %s: %s", name, node.no_gpus)
        self._listen(Agent(node, record, actor, forks))

    def _start_agent(self, ray_id: str, name: str, takes_over: str | None = None) -> Any:
        assert self._session is not None
        own = None if self._session.directory is None else str(self._session.directory)
        run_dir = str(self._run_dir.path), self._run_dir.info["run_id"]
        return make_agent(
            ray_id, (name, *run_dir, own, list_import_directories(), takes_over), sees_all=self._on_gpus
        )

    def _listen(self, agent: Agent) -> None:
        self._agents[agent.node_name] = agent
        self._streams[agent.actor.events.options(num_returns="streaming").remote()] = agent

    def start_feeder(
        self, node: str, cohort: int, expect: int, capacity: int, peers: Peers | None = None, late: bool = False
    ) -> str | None:
        """See `Executor`; members on the node start when the feeder listens."""
        from pipelines.errors import PipelineError

        agent = self._agents[node]
        if not agent.up:
            raise PipelineError(f"the agent of node {node} is being replaced")
        agent.cohorts.add(cohort)
        start = agent.actor.start_feeder.options(concurrency_group=FEEDERS)
        call = start.remote(cohort, expect, capacity, peers, late)
        agent.starting.add(call)
        self._streams[call] = FeederStart(node, cohort, time.monotonic())
        return str(make_feeder_address(Path(agent.forks).parent, cohort))

    def expect_readers(self, node: str, cohort: int, members: int) -> None:
        """See `Executor`."""
        if node in self._agents:
            self._agents[node].actor.expect_readers.options(concurrency_group=FEEDERS).remote(cohort, members)

    def stop_feeder(self, node: str, cohort: int) -> None:
        """See `Executor`; the agent is not waited for: it stops the feeder before it starts another."""
        agent = self._agents.get(node)
        if agent is not None:
            agent.cohorts.discard(cohort)
            if agent.up:  # else its feeders ended with the agent before it
                agent.actor.stop_feeder.options(concurrency_group=FEEDERS).remote(cohort)

    def _end_start(self, call: Any, start: FeederStart, failure: str | None = None) -> None:
        """Start the members after a feeder has started, or after its start has failed for a reason."""
        import ray

        del self._streams[call]
        agent = self._agents[start.node_name]
        agent.starting.discard(call)
        try:
            if failure is None:
                ray.get(call)
        except ray.exceptions.RayActorError:  # its agent died: members start when another has replaced it
            return
        except ray.exceptions.RayError as error:
            failure = describe_error(error)
        if failure is not None:
            exited = {"type": "feeder_exited", "node": start.node_name, "cohort": start.cohort}
            self._queue.append({**exited, "started": False, "detail": failure})
        self._start_ready(agent)

    def _stop_waiting(self, now: float) -> None:
        """Stop waiting for feeders that start too late, which are stopped then, and for silent actors."""
        for call, start in list(self._streams.items()):
            if isinstance(start, FeederStart) and now - start.since >= _CALL_S:
                self.stop_feeder(start.node_name, start.cohort)
                self._end_start(call, start, f"node {start.node_name} did not answer within {_CALL_S:g} s")
        for rank in self._ranks:
            if rank.is_reused and now - rank.asked_at >= WAITING_EVERY_S:
                self._replace_actor(rank)

    def _start_ready(self, agent: Agent) -> None:
        """Start the members on a node that have their resources, once all feeders there listen."""
        for rank in self._ranks if agent.is_ready else ():
            if rank.node_name == agent.node_name and rank.is_gang_placed:
                if rank.is_running:
                    rank.send()
                else:
                    self._streams[rank.start(agent.forks)] = rank

    def launch(self, jobs: Sequence[Job], devices: Sequence[int | None]) -> None:
        """See `Executor`."""
        agent = self._agents[jobs[0].node]
        if not agent.up:
            agent.held.append((jobs, devices))
            return
        gang: list[Rank] = []
        for job, device in zip(jobs, devices, strict=True):
            share = compute_share(job, agent.node)
            gpus = None if device is None else job.identity.gpus_per_worker
            kept = self._idle.pop(share, on_gpu=gpus is not None)
            actor = kept or make_worker(agent.ray_id, share, gpus)
            rank = Rank(job, device, actor, share if device is None else None, gang, is_reused=kept is not None)
            self._streams[actor.ready.remote()] = rank
            gang.append(rank)
        self._ranks += gang

    def _replace_actor(self, rank: Rank) -> None:
        """Give a rank a new actor in place of a kept one that has died, or does not answer."""
        import ray

        assert rank.share is not None
        ray.kill(rank.actor)
        self._drop_streams(rank)
        rank.actor = make_worker(self._agents[rank.node_name].ray_id, rank.share, None)
        rank.is_reused = False
        self._streams[rank.actor.ready.remote()] = rank

    def events(self, timeout_s: float | None) -> list[Event]:
        """See `Executor`."""
        import ray

        if self._streams:
            ready, _ = ray.wait(list(self._streams), num_returns=1, timeout=0.0 if self._queue else timeout_s)
            while ready:
                for stream in ready:
                    self._receive(stream)
                streams = list(self._streams)
                ready = ray.wait(streams, num_returns=len(streams), timeout=0)[0] if streams else []
        elif not self._queue and timeout_s:
            time.sleep(timeout_s)
        self._idle.end(older_than_s=KEPT_S)
        now = time.monotonic()
        self._stop_waiting(now)
        self._queue += make_waiting_events(self._ranks, now)
        events, self._queue = self._queue, []
        return events

    def _receive(self, stream: Any) -> None:
        """Receive the next events of a worker or agent, its end, or the answer to a call."""
        import ray

        source = self._streams.get(stream)
        if source is None:  # of a node that was found to be lost in this round
            return
        if isinstance(source, FeederStart):
            self._end_start(stream, source)
            return
        try:
            if isinstance(source, Rank) and not source.is_running:
                ray.get(stream)
                del self._streams[stream]
                source.is_placed, source.is_reused = True, False
                self._start_ready(self._agents[source.node_name])
                return
            events: Any = ray.get(next(stream))
        except StopIteration:
            del self._streams[stream]
            return
        except ray.exceptions.RayError as error:
            del self._streams[stream]
            self._handle_death(source, error)
            return
        self._queue += events
        if isinstance(source, Agent):
            if not source.up:
                self._mark_up(source)
        elif events[-1]["type"] == "exited":
            self._ranks.remove(source)
            if source.share is not None and not source.is_killed:
                self._idle.keep(source.share, source.actor)
            else:
                ray.kill(source.actor)

    def _handle_death(self, source: Rank | Agent, error: Exception) -> None:
        import ray

        name = source.node_name
        agent = self._agents.get(name)
        if agent is not None and not is_reachable(agent.record):
            self._lose_node(agent, describe_error(error))
        elif isinstance(source, Agent) and agent is not None:
            self._replace(source, describe_error(error))
        if isinstance(source, Agent) or source not in self._ranks:
            return
        if source.is_reused:
            self._replace_actor(source)
            return
        self._ranks.remove(source)
        more: dict[str, Any] = {}
        if name not in self._agents:
            more["node_lost"] = True
        elif isinstance(error, ray.exceptions.OutOfMemoryError):
            more["reason"] = "oom"
        self._queue.append(make_exited(source.job, None, describe_error(error), **more))

    def _replace(self, agent: Agent, reason: str) -> None:
        """Start another agent on a node that is reachable; the feeders of the old agent have ended with it."""
        import ray

        name = agent.node_name
        ray.kill(agent.actor)  # perhaps only a thread of it has ended
        self._replaced += 1
        if self._replaced > _REPLACEMENTS:
            self._lose_node(agent, reason)
            return
        log.warning("the agent of node %s ended and is replaced: %s", name, reason)
        self._queue.append({"type": "agent_replaced", "node": name, "detail": reason})
        actor = self._start_agent(agent.ray_id, name, takes_over=agent.forks)
        self._listen(dataclasses.replace(agent, actor=actor, up=False, starting=set()))

    def _lose_node(self, agent: Agent, reason: str) -> None:
        """Report the loss of a node and of its ranks."""
        import ray

        name = agent.node_name
        log.warning("node %s is lost: %s", name, reason)
        del self._agents[name]
        self._idle.end(name)
        self._queue.append({"type": "node_lost", "node": name, "detail": reason})
        lost = [job for jobs, _ in agent.held for job in jobs]
        for rank in [rank for rank in self._ranks if rank.node_name == name]:
            self._ranks.remove(rank)
            ray.kill(rank.actor)  # in case it lives after all
            lost.append(rank.job)
        ray.kill(agent.actor)
        self._streams = {stream: source for stream, source in self._streams.items() if source.node_name != name}
        self._queue += [make_exited(job, None, f"node {name} is lost", node_lost=True) for job in lost]

    def _mark_up(self, agent: Agent) -> None:
        """Launch the waiting attempts: an agent that replaces another has sent its first events."""
        agent.up = True
        self._queue += [
            {"type": "feeder_exited", "node": agent.node_name, "cohort": cohort, "detail": "its agent ended"}
            for cohort in sorted(agent.cohorts)
        ]
        held, agent.held = agent.held, []
        for jobs, devices in held:
            self.launch(jobs, devices)
        self._start_ready(agent)

    def send(self, member: str, command: str, **fields: Any) -> None:
        """See `Executor`."""
        for rank in self._find(member):
            rank.unsent.append((command, fields))
            if rank.is_running and self._agents[rank.node_name].is_ready:
                rank.send()

    def kill(self, member: str) -> None:
        """See `Executor`."""
        import ray

        for rank in self._find(member):
            ray.kill(rank.actor)
            rank.is_killed = True
            if not rank.is_running:  # no stream reports its end
                self._ranks.remove(rank)
                self._drop_streams(rank)
                self._queue.append(make_exited(rank.job, None, _KILLED))
        for agent in self._agents.values():
            for held in [held for held in agent.held if held[0][0].identity.member == member]:
                agent.held.remove(held)
                self._queue += [make_exited(job, None, _KILLED) for job in held[0]]

    def _drop_streams(self, rank: Rank) -> None:
        self._streams = {stream: source for stream, source in self._streams.items() if source is not rank}

    def _find(self, member: str) -> list[Rank]:
        return [rank for rank in self._ranks if rank.job.identity.member == member]

    def close(self) -> None:
        """See `Executor`."""
        import ray

        if self._session is None:
            return
        self._idle.end()
        for rank in self._ranks:
            ray.kill(rank.actor)
        self._ranks.clear()
        closing = [agent.actor.close.remote() for agent in self._agents.values() if agent.up]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=_CALL_S)
        self._drain_agents()
        for agent in self._agents.values():
            ray.kill(agent.actor)
        self._agents.clear()
        self._streams.clear()
        self._session.close()
        self._session = None

    def _drain_agents(self) -> None:
        """Keep the last events of agents that were closed for the next `events`; their streams end after these."""
        import ray

        until = time.monotonic() + _DRAIN_S
        streams = [stream for stream, source in self._streams.items() if isinstance(source, Agent) and source.up]
        while streams and (left_s := until - time.monotonic()) > 0:
            ready: Any = ray.wait(streams, num_returns=1, timeout=left_s)[0]
            for stream in ready:
                try:
                    events: Any = ray.get(next(stream))
                    self._queue += events
                except (StopIteration, ray.exceptions.RayError):
                    streams.remove(stream)
