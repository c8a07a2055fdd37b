"""The Ray executor: the controller's hands on a cluster."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ensemble.cluster.actors import MemberWorker, NodeAgent, import_path
from ensemble.cluster.idle import KEPT_S, IdleActors, Share
from ensemble.cluster.session import Session, answers
from ensemble.execute import Node, Take
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
class _Worker:
    job: Job
    actor: Any
    share: Share | None  # by which it may be kept for another
    exited: bool = False


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
    """Runs members as Ray actors; see `ensemble.execute.Executor`."""

    name = "ray"
    in_process = False
    work_cpu_s = 0.0

    def __init__(self) -> None:
        self._session: Session | None = None
        self._agents: dict[str, _Agent] = {}
        self._streams: dict[Any, _Worker | _Agent] = {}
        self._queue: list[dict[str, Any]] = []
        self._idle = IdleActors()
        self._replaced = 0
        self._one_host = True

    def open(self, run_dir: RunDir, ensemble: Ensemble, take: Take) -> list[Node]:
        """See `Executor`; the nodes are those of the cluster that RAY_ADDRESS names, or this host."""
        self._session = session = Session(run_dir.path)  # sets what Ray reads when it is imported
        self._run_dir = run_dir
        records = session.nodes()
        self._one_host = len({record["NodeManagerAddress"] for record in records}) == 1
        for record in records:
            self._start_agent(record, self._name_of(record))
        if not self._agents:
            raise SpecError("no node of the cluster can be used")
        return [agent.node for agent in self._agents.values()]

    def _start_agent(self, record: dict[str, Any], name: str) -> None:
        """Start the agent of a node, unless it has just gone; SpecError where that cannot take part."""
        import ray

        actor = self._agent_actor(record["NodeID"], name)
        try:
            described: Any = ray.get(actor.describe.remote(), timeout=_CALL_S)
            forks: Any = ray.get(actor.fork_address.remote(), timeout=_CALL_S)
            reached: Any = "lo"
            if not self._one_host:
                reached = ray.get(actor.interface_of.remote(record["NodeManagerAddress"]), timeout=_CALL_S)
        except ray.exceptions.RayError as error:
            if not answers(record):
                log.warning("node %s is lost: %s", name, _reason(error))
                return
            raise SpecError(f"node {name} cannot be used: {_reason(error)}") from None
        offered = record["Resources"]
        # What Ray does not offer it would not give: a worker that asked for it would wait for ever.
        cpus = min(described["cpus"], offered.get("CPU", 0.0))
        memory_gb = min(described["memory_gb"], offered.get("memory", 0.0) / 2**30)
        node = Node(**{**described, "cpus": cpus, "memory_gb": memory_gb, "interface": reached})
        self._listen(_Agent(node, record, actor, forks))

    def _agent_actor(self, ray_id: str, name: str) -> Any:
        import ray

        assert self._session is not None
        own = str(self._session.directory) if self._session.directory is not None else None
        agent_class: Any = ray.remote(NodeAgent)
        return agent_class.options(num_cpus=0, max_concurrency=8, scheduling_strategy=_on(ray_id)).remote(
            name, str(self._run_dir.path), self._run_dir.info["run_id"], own, import_path()
        )

    def _listen(self, agent: _Agent) -> None:
        self._agents[agent.node.name] = agent
        self._streams[agent.actor.events.options(num_returns="streaming").remote()] = agent

    def _name_of(self, record: dict[str, Any]) -> str:
        host = str(record["NodeManagerHostname"])
        return f"{host}-{record['NodeID'][:6]}" if host in self._agents else host

    def start_feeder(
        self, node: str, cohort: int, expect: int, capacity: int, peers: Peers | None = None, late: bool = False
    ) -> str | None:
        """See `Executor`."""
        import ray

        from pipelines.errors import PipelineError

        if not self._agents[node].up:
            raise PipelineError(f"the agent of node {node} is being replaced")
        try:
            self._agents[node].cohorts.add(cohort)
            call = self._agents[node].actor.start_feeder.remote(cohort, expect, capacity, peers, late)
            return str(ray.get(call, timeout=_CALL_S))
        except ray.exceptions.RayError as error:
            raise PipelineError(_reason(error)) from None

    def expect(self, node: str, cohort: int, members: int) -> None:
        """See `Executor`."""
        if node in self._agents:
            self._agents[node].actor.expect.remote(cohort, members)

    def stop_feeder(self, node: str, cohort: int) -> None:
        """See `Executor`."""
        import ray

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
        for job, device in zip(jobs, devices, strict=True):
            share = _share(job, agent.node)
            actor = self._worker_actor(agent, share, None if device is None else job.identity.gpus_per_worker)
            run = actor.run.options(num_returns="streaming").remote(job.as_json(), device, agent.forks)
            self._streams[run] = _Worker(job, actor, share if device is None else None)

    def _worker_actor(self, agent: _Agent, share: Share, gpus: float | None) -> Any:
        """An actor that holds what a rank takes: without a GPU one that has done its work, else a new one."""
        import ray

        if gpus is not None:
            self._idle.end(agent.node.name)
        elif (kept := self._idle.take(share)) is not None:
            return kept
        worker_class: Any = ray.remote(MemberWorker)
        return worker_class.options(
            num_cpus=share[1],
            num_gpus=gpus or 0,
            memory=share[2],
            max_concurrency=2,
            scheduling_strategy=_on(agent.ray_id),
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
        news, self._queue = self._queue, []
        return news

    def _take(self, stream: Any) -> None:
        """The next thing that a worker or agent said, or its end."""
        import ray

        source = self._streams.get(stream)
        if source is None:  # of a node that one before it in this round has shown to be lost
            return
        try:
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
            source.exited = True
            if source.share is not None:
                self._idle.keep(source.share, source.actor)
            else:
                ray.kill(source.actor)

    def _died(self, source: _Worker | _Agent, error: Exception) -> None:
        import ray

        name = source.node.name if isinstance(source, _Agent) else source.job.node
        agent = self._agents.get(name)
        if agent is not None and not answers(agent.record):
            self._lost(agent, _reason(error))
        elif isinstance(source, _Agent) and agent is not None:
            self._replace(source, _reason(error))
        if isinstance(source, _Agent) or source.exited:
            return
        event = _exited(source.job, _reason(error))
        if name not in self._agents:
            event["node_lost"] = True
        elif isinstance(error, ray.exceptions.OutOfMemoryError):
            event["reason"] = "oom"
        self._queue.append(event)

    def _replace(self, agent: _Agent, reason: str) -> None:
        """Start another agent where the node lives on; what the old one kept has ended with it."""
        assert self._session is not None
        name = agent.node.name
        self._replaced += 1
        if self._replaced > _REPLACEMENTS:
            self._lost(agent, reason)
            return
        log.warning("the agent of node %s ended and is replaced: %s", name, reason)
        actor = self._agent_actor(agent.ray_id, name)
        self._listen(_Agent(agent.node, agent.record, actor, agent.forks, agent.cohorts, False, agent.held))

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
        for stream, source in list(self._streams.items()):
            if (source.node.name if isinstance(source, _Agent) else source.job.node) == name:
                del self._streams[stream]
                ray.kill(source.actor)  # should it live after all, it is to train no further
                if isinstance(source, _Worker) and not source.exited:
                    gone.append(source.job)
        self._queue += [{**_exited(job, f"node {name} is lost"), "node_lost": True} for job in gone]

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
        for worker in self._of(member):
            worker.actor.tell.remote(command, fields)

    def kill(self, member: str) -> None:
        """See `Executor`."""
        import ray

        for worker in self._of(member):
            ray.kill(worker.actor)
        for agent in self._agents.values():
            for held in [held for held in agent.held if held[0][0].identity.member == member]:
                agent.held.remove(held)
                self._queue += [_exited(job, "was killed before it started") for job in held[0]]

    def _of(self, member: str) -> list[_Worker]:
        workers = [source for source in self._streams.values() if isinstance(source, _Worker)]
        return [worker for worker in workers if worker.job.identity.member == member and not worker.exited]

    def close(self) -> None:
        """See `Executor`."""
        import ray

        if self._session is None:
            return
        self._idle.end()
        for source in self._streams.values():
            if isinstance(source, _Worker):
                ray.kill(source.actor)
        for agent in self._agents.values():
            if agent.up:
                with contextlib.suppress(ray.exceptions.RayError):
                    ray.get(agent.actor.close.remote(), timeout=_CALL_S)
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


def _share(job: Job, node: Node) -> Share:
    """What the actor of a rank holds beside a GPU."""
    wanted = job.identity
    # a guess of cores may be more than there are (`ensemble.schedule.needs`)
    cpus = min(wanted.cpus_per_worker, node.cpus / wanted.workers)
    memory = None if wanted.memory_gb is None else int(wanted.memory_gb * 2**30)
    return node.name, cpus, memory


def _exited(job: Job, detail: str) -> dict[str, Any]:
    who = {"member": job.identity.member, "attempt": job.attempt, "rank": job.rank}
    return {"type": "exited", **who, "outcome": None, "detail": detail}


def _on(ray_id: str) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node_id=ray_id, soft=False)


def _reason(error: Exception) -> str:
    """The cause of one of Ray's errors in one line."""
    cause = getattr(error, "cause", None) or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return lines[-1] if getattr(error, "cause", None) is None and lines else (lines[0] if lines else repr(cause))
