"""The Ray executor: the controller's hands on a cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble.executors import Node, Take
from ensemble.executors.node_services import feeder_address
from ensemble.executors.ray.actors import MemberWorker, NodeAgent, import_path
from ensemble.executors.ray.feeder_starts import StartingFeeders, on_node, reason_of, surroundings
from ensemble.executors.ray.gpus import usable
from ensemble.executors.ray.idle_actors import KEPT_S, IdleActors, Share
from ensemble.executors.ray.ranks import Rank, exited, share_of, waiting
from ensemble.executors.ray.session import Session, answers
from ensemble.spec import Ensemble, SpecError
from ensemble.train.job import Job

if TYPE_CHECKING:
    from ensemble.store import RunDir
    from pipelines import Peers

_CALL_S = 60.0
_LAST_WORDS_S = 5.0
_REPLACEMENTS = 3  # of node agents, in a run

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Agent:
    """A node's agent. Until one that takes another's place is `up`, what is to be launched there is `held`."""

    node: Node
    record: dict[str, Any]
    actor: Any
    forks: str
    cohorts: set[int] = field(default_factory=set)
    up: bool = True
    held: list[tuple[Sequence[Job], Sequence[int | None]]] = field(default_factory=list)

    @property
    def ray_id(self) -> str:
        """What Ray calls its node."""
        return str(self.record["NodeID"])


class RayExecutor:
    """Runs members as Ray actors; see `ensemble.executors.Executor`."""

    name = "ray"
    in_process = False
    work_cpu_s = 0.0

    def __init__(self) -> None:
        self._session: Session | None = None
        self._agents: dict[str, _Agent] = {}
        self._ranks: list[Rank] = []  # that have not ended
        self._streams: dict[Any, Rank | _Agent] = {}  # what they say, or their place while they wait for it
        self._starting = StartingFeeders()
        self._queue: list[dict[str, Any]] = []
        self._idle = IdleActors()
        self._replaced = 0
        self._one_host = self._on_gpus = True

    def open(self, run_dir: RunDir, ensemble: Ensemble, take: Take) -> list[Node]:
        """See `Executor`; the nodes are those of the cluster that RAY_ADDRESS names, or this host."""
        self._session = session = Session()  # sets what Ray reads when it is imported
        self._run_dir, self._on_gpus = run_dir, ensemble.devices != "cpu"
        records = session.nodes()
        self._one_host = len({record["NodeManagerAddress"] for record in records}) == 1
        names: dict[str, dict[str, Any]] = {}
        for record in records:
            host = str(record["NodeManagerHostname"])
            names[f"{host}-{record['NodeID'][:6]}" if host in names else host] = record
        actors = {name: self._agent_actor(record["NodeID"], name) for name, record in names.items()}
        asked = {name: self._questions(actor, names[name]) for name, actor in actors.items()}
        for name, actor in actors.items():
            self._open_agent(names[name], name, actor, asked[name])
        nodes = [agent.node for agent in self._agents.values()]
        if not nodes:
            raise SpecError("no node of the cluster can be used")
        lent = [f"node {node.name}: {node.no_gpus}" for node in nodes if node.no_gpus]
        if lent and self._on_gpus and not any(node.gpus for node in nodes):
            raise SpecError(f"no GPU can be used ({'; '.join(lent)}); wait until it can, or say devices='cpu'")
        return nodes

    def _questions(self, actor: Any, record: dict[str, Any]) -> list[Any]:
        """What is to be known of a node, asked of its agent."""
        asked = [actor.describe.remote(), actor.fork_address.remote()]
        return asked if self._one_host else [*asked, actor.interface_of.remote(record["NodeManagerAddress"])]

    def _open_agent(self, record: dict[str, Any], name: str, actor: Any, asked: list[Any]) -> None:
        """Hear what a node offers, unless it has just gone; SpecError where it cannot take part."""
        import ray

        try:
            said: Any = ray.get(asked, timeout=_CALL_S)
        except ray.exceptions.RayError as error:
            if not answers(record):
                log.warning("node %s is lost: %s", name, reason_of(error))
                return
            raise SpecError(f"node {name} cannot be used: {reason_of(error)}") from None
        described, forks = said[0], said[1]
        offered = record["Resources"]
        # What Ray does not offer it would not give: a worker that asked for it would wait for ever.
        offers = {
            "cpus": min(described["cpus"], offered.get("CPU", 0.0)),
            "memory_gb": min(described["memory_gb"], offered.get("memory", 0.0) / 2**30),
            "interface": "lo" if self._one_host else said[2],
        }
        if self._on_gpus:
            most, offers["no_gpus"] = usable(record, len(described["gpus"]))
            offers |= {key: tuple(described[key][:most]) for key in ("gpus", "gpu_memory_gb")}
            if offers["no_gpus"]:
                log.warning("node %s: %s", name, offers["no_gpus"])
        self._listen(_Agent(Node(**{**described, **offers}), record, actor, forks))

    def _agent_actor(self, ray_id: str, name: str, takes_over: str | None = None) -> Any:
        import ray

        assert self._session is not None
        own = str(self._session.directory) if self._session.directory is not None else None
        agent_class: Any = ray.remote(NodeAgent)
        options = surroundings(sees_all=self._on_gpus)
        placed = agent_class.options(num_cpus=0, max_concurrency=8, scheduling_strategy=on_node(ray_id), **options)
        run_id = self._run_dir.info["run_id"]
        return placed.remote(name, str(self._run_dir.path), run_id, own, import_path(), takes_over)

    def _listen(self, agent: _Agent) -> None:
        self._agents[agent.node.name] = agent
        self._streams[agent.actor.events.options(num_returns="streaming").remote()] = agent

    def start_feeder(
        self, node: str, cohort: int, expect: int, capacity: int, peers: Peers | None = None, late: bool = False
    ) -> str | None:
        """See `Executor`; those of several nodes start together, and are waited for before anyone reads them."""
        from pipelines.errors import PipelineError

        agent = self._agents[node]
        if not agent.up:
            raise PipelineError(f"the agent of node {node} is being replaced")
        agent.cohorts.add(cohort)
        call = agent.actor.start_feeder.remote(cohort, expect, capacity, peers, late)
        self._starting.add(call, node, cohort)
        return str(feeder_address(Path(agent.forks).parent, cohort))

    def expect(self, node: str, cohort: int, members: int) -> None:
        """See `Executor`."""
        self._queue += self._starting.settle()
        if node in self._agents:
            self._agents[node].actor.expect.remote(cohort, members)

    def stop_feeder(self, node: str, cohort: int) -> None:
        """See `Executor`."""
        import ray

        self._queue += self._starting.settle()
        agent = self._agents.get(node)
        if agent is not None:
            agent.cohorts.discard(cohort)
            if not agent.up:  # its feeders ended with the one before it
                return
            with contextlib.suppress(ray.exceptions.RayError):  # a lost node's feeders are gone with it
                ray.get(agent.actor.stop_feeder.remote(cohort), timeout=_CALL_S)

    def launch(self, jobs: Sequence[Job], devices: Sequence[int | None]) -> None:
        """See `Executor`."""
        agent = self._agents[jobs[0].node]
        if not agent.up:
            agent.held.append((jobs, devices))
            return
        self._queue += self._starting.settle()
        gang: list[Rank] = []
        for job, device in zip(jobs, devices, strict=True):
            share = share_of(job, agent.node)
            actor = self._worker_actor(agent, share, None if device is None else job.identity.gpus_per_worker)
            rank = Rank(job, device, actor, share if device is None else None, gang)
            self._streams[actor.ready.remote()] = rank
            gang.append(rank)
        self._ranks += gang

    def _worker_actor(self, agent: _Agent, share: Share, gpus: float | None) -> Any:
        """An actor that holds what a rank takes: without a GPU one that has done its work, else a new one."""
        import ray

        options = surroundings(sees_all=gpus is not None)
        if gpus is not None:
            self._idle.end(agent.node.name)
            options["num_gpus"] = gpus
        elif (kept := self._idle.take(share)) is not None:
            return kept
        worker_class: Any = ray.remote(MemberWorker)
        return worker_class.options(
            num_cpus=share[1],
            memory=share[2],
            max_concurrency=2,
            scheduling_strategy=on_node(agent.ray_id),
            **options,
        ).remote(import_path())

    def events(self, timeout_s: float | None) -> list[dict[str, Any]]:
        """See `Executor`."""
        import ray

        if not self._streams:
            if not self._queue and timeout_s:
                time.sleep(timeout_s)
        else:
            wait_s = 0.0 if self._queue else timeout_s
            ready, _ = ray.wait(list(self._streams), num_returns=1, timeout=wait_s)
            while ready:
                for stream in ready:
                    self._take(stream)
                if not self._streams:
                    break
                ready, _ = ray.wait(list(self._streams), num_returns=len(self._streams), timeout=0)
        self._idle.end(older_than_s=KEPT_S)
        self._queue += waiting(self._ranks, time.monotonic())
        news, self._queue = self._queue, []
        return news

    def _take(self, stream: Any) -> None:
        """The next thing that a worker or agent said, or its end."""
        import ray

        source = self._streams.get(stream)
        if source is None:  # of a node that one before it in this round has shown to be lost
            return
        try:
            if isinstance(source, Rank) and not source.started:
                ray.get(stream)
                self._placed(stream, source)
                return
            said: Any = ray.get(next(stream))
        except StopIteration:
            del self._streams[stream]
            return
        except ray.exceptions.RayError as error:
            del self._streams[stream]
            self._died(source, error)
            return
        self._queue += said
        if isinstance(source, _Agent):
            if not source.up:
                self._came_up(source)
        elif said[-1]["type"] == "exited":
            self._ranks.remove(source)
            if source.share is not None and not source.killed:
                self._idle.keep(source.share, source.actor)
            else:
                ray.kill(source.actor)

    def _placed(self, asked: Any, rank: Rank) -> None:
        """Ray has given a rank its place; where it was the last of its member, they start."""
        del self._streams[asked]
        rank.placed = True
        if rank.started:
            agent = self._agents[rank.job.node]
            self._streams |= {each.start(agent.forks): each for each in rank.gang}

    def _died(self, source: Rank | _Agent, error: Exception) -> None:
        import ray

        name = _node_of(source)
        agent = self._agents.get(name)
        if agent is not None and not answers(agent.record):
            self._lost(agent, reason_of(error))
        elif isinstance(source, _Agent) and agent is not None:
            self._replace(source, reason_of(error))
        if isinstance(source, _Agent) or source not in self._ranks:
            return
        self._ranks.remove(source)
        event = exited(source.job, reason_of(error))
        if name not in self._agents:
            event["node_lost"] = True
        elif isinstance(error, ray.exceptions.OutOfMemoryError):
            event["reason"] = "oom"
        self._queue.append(event)

    def _replace(self, agent: _Agent, reason: str) -> None:
        """Start another agent where the node lives on; what the old one kept ends with it."""
        import ray

        name = agent.node.name
        ray.kill(agent.actor)  # only a thread of it may have ended
        self._replaced += 1
        if self._replaced > _REPLACEMENTS:
            self._lost(agent, reason)
            return
        log.warning("the agent of node %s ended and is replaced: %s", name, reason)
        self._queue.append({"type": "agent_replaced", "node": name, "detail": reason})
        actor = self._agent_actor(agent.ray_id, name, takes_over=agent.forks)
        self._listen(dataclasses.replace(agent, actor=actor, up=False))

    def _lost(self, agent: _Agent, reason: str) -> None:
        """A node has gone, and all that was on it: that is told before anything else is placed there.

        Its raylet is asked rather than Ray, which knows only ten seconds later.
        """
        import ray

        name = agent.node.name
        log.warning("node %s is lost: %s", name, reason)
        del self._agents[name]
        self._idle.end(name)
        self._queue.append({"type": "node_lost", "node": name, "detail": reason})
        gone = [job for jobs, _ in agent.held for job in jobs]
        for rank in [rank for rank in self._ranks if rank.job.node == name]:
            self._ranks.remove(rank)
            ray.kill(rank.actor)  # should it live after all, it is to train no further
            gone.append(rank.job)
        ray.kill(agent.actor)
        here = {stream for stream, source in self._streams.items() if _node_of(source) == name}
        self._streams = {stream: source for stream, source in self._streams.items() if stream not in here}
        self._queue += [{**exited(job, f"node {name} is lost"), "node_lost": True} for job in gone]

    def _came_up(self, agent: _Agent) -> None:
        """An agent that took another's place has begun to speak."""
        agent.up = True
        self._queue += [
            {"type": "feeder_exited", "node": agent.node.name, "cohort": cohort, "detail": "its agent ended"}
            for cohort in sorted(agent.cohorts)
        ]
        held, agent.held = agent.held, []
        for jobs, devices in held:
            self.launch(jobs, devices)

    def tell(self, member: str, command: str, **fields: Any) -> None:
        """See `Executor`."""
        self._queue += self._starting.settle()
        for rank in self._of(member):
            rank.tell(command, fields)

    def kill(self, member: str) -> None:
        """See `Executor`."""
        import ray

        for rank in self._of(member):
            ray.kill(rank.actor)
            rank.killed = True
            if not rank.started:  # nothing would tell of its end
                self._ranks.remove(rank)
                self._streams = {stream: source for stream, source in self._streams.items() if source is not rank}
                self._queue.append(exited(rank.job, "was killed before it started"))
        for agent in self._agents.values():
            for held in [held for held in agent.held if held[0][0].identity.member == member]:
                agent.held.remove(held)
                self._queue += [exited(job, "was killed before it started") for job in held[0]]

    def _of(self, member: str) -> list[Rank]:
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
        self._hear_agents_out()
        for agent in self._agents.values():
            ray.kill(agent.actor)
        self._agents.clear()
        self._streams.clear()
        self._session.close()
        self._session = None

    def _hear_agents_out(self) -> None:
        """Keep what agents that were closed said last, for the next `events`: their streams end after it."""
        import ray

        until = time.monotonic() + _LAST_WORDS_S
        agents = [(stream, source) for stream, source in self._streams.items() if isinstance(source, _Agent)]
        streams = [stream for stream, agent in agents if agent.up]
        while streams and (left_s := until - time.monotonic()) > 0:
            ready: Any = ray.wait(streams, num_returns=1, timeout=left_s)[0]
            for stream in ready:
                try:
                    said: Any = ray.get(next(stream))
                    self._queue += said
                except (StopIteration, ray.exceptions.RayError):
                    streams.remove(stream)


def _node_of(source: Rank | _Agent) -> str:
    return source.node.name if isinstance(source, _Agent) else source.job.node
