"""Starts and ends the agents of a run as Ray's actors, sends them commands, and reads their events."""

from __future__ import annotations

import functools
import math
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble.events import Report
from ensemble.executors.ray.agent import Command, NodeAgent, list_import_directories
from ensemble.executors.ray.agents import Answered, Died, Ended, News
from ensemble.store.trust import TRUST_FOLDER

if TYPE_CHECKING:
    from ensemble.store import RunDir

_ATTRIBUTE = re.compile(r"(class_name|actor_id|pid|name|namespace|ip): ")  # of an actor, in an error
_LOOK_S = 0.5  # how often a long wait looks whether there still is a connection
_ID = re.compile(r"\b\w+ (Id|Ip address): \S+ ?")


class AgentLink:
    """The agents of a run, by the names of their nodes.

    Args:
        session: the directory of a Ray that was started for this run.
        on_gpus: whether agents are to see the GPUs that their raylets see.
        is_lost: returns whether the program has closed its connection to Ray.
        calling: around each call of another thread that takes long.
    """

    def __init__(
        self,
        run_dir: RunDir,
        session: Path | None,
        *,
        on_gpus: bool,
        is_lost: Callable[[], bool] = lambda: False,
        calling: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._run_dir, self._session, self._on_gpus = run_dir, session, on_gpus
        self._is_lost, self._calling = is_lost, calling
        self._waits: queue.SimpleQueue[tuple[list[Any], float | None] | None] = queue.SimpleQueue()
        self._waited: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._actors: dict[str, Any] = {}
        self._sent: dict[str, int] = {}  # calls with commands to each actor
        self._streams: dict[Any, str] = {}  # streams of events, and unanswered calls
        self._unanswered: set[Any] = set()
        threading.Thread(target=self._make_waits, name="ray-waits", daemon=True).start()

    @property
    def listened(self) -> set[str]:
        """The nodes whose agents have been called, or are listened to."""
        return set(self._streams.values())

    @property
    def calls(self) -> int:
        """How many calls and streams there are."""
        return len(self._streams)

    def start(self, name: str, record: dict[str, Any], replaces: str = "") -> None:
        """Start the agent of a node, which is listened to when it has answered; see `start_agent`."""
        actor = start_agent(record, name, self._run_dir, self._session, on_gpus=self._on_gpus, replaces=replaces)
        self._actors[name], self._sent[name] = actor, 0
        call = actor.describe.remote(record["NodeManagerAddress"])
        self._streams[call] = name
        self._unanswered.add(call)

    def kill(self, name: str) -> None:
        """Kill an agent, and listen to it no more."""
        import ray

        self._streams = {stream: other for stream, other in self._streams.items() if other != name}
        ray.kill(self._actors.pop(name))

    def send(self, name: str, commands: Sequence[Command]) -> None:
        """Send commands to an agent; they are carried out in the order in which they were sent."""
        self._actors[name].perform.remote(self._sent[name], commands)
        self._sent[name] += 1

    def wait(self, timeout_s: float | None) -> Iterator[tuple[str, News]]:
        """Wait for news of an agent, and yield all that there are, each with the name of the node.

        What the caller does with some of them, such as `kill`, holds for those that follow.
        """
        import ray

        if not self._streams:
            time.sleep(timeout_s or 0.0)
            return
        ready = self._wait(timeout_s)
        while ready:
            for stream in ready:
                name = self._streams.get(stream)
                if name is not None:  # else it was killed in this round
                    yield name, self._read(stream, name)
            streams = list(self._streams)
            ready = ray.wait(streams, num_returns=len(streams), timeout=0)[0] if streams else []

    def _wait(self, timeout_s: float | None) -> list[Any]:
        """Wait for the first stream with news; raise ConnectionError where the program closes its connection."""
        self._waits.put((list(self._streams), timeout_s))
        while True:
            ready = None
            with suppress(queue.Empty):
                ready = self._waited.get(timeout=_LOOK_S)
            if isinstance(ready, BaseException):
                raise ready
            if not ready and self._is_lost():
                raise ConnectionError("the connection to Ray was closed")
            if ready is not None:
                return list(ready)

    def _make_waits(self) -> None:
        """Call `ray.wait` for `_wait`, for a moment each time: none may go on when the connection is closed."""
        while (wait := self._waits.get()) is not None:
            streams, timeout_s = wait
            until, ready = math.inf if timeout_s is None else time.monotonic() + timeout_s, list[Any]()
            try:
                while not ready and not self._is_lost():
                    left_s = until - time.monotonic()
                    ready = self._wait_once(streams, max(0.0, min(_LOOK_S, left_s)))
                    if left_s <= _LOOK_S:
                        break
                self._waited.put(ready)
            except BaseException as error:
                self._waited.put(error)

    def _wait_once(self, streams: list[Any], timeout_s: float) -> list[Any]:
        import ray

        with self._calling():
            return list(ray.wait(streams, num_returns=1, timeout=timeout_s)[0])

    def close(self, *, without_head: bool) -> None:
        """End all agents.

        Args:
            without_head: the head does not answer; `ray.kill` is done by the head.
        """
        import ray

        for actor in self._actors.values():
            if without_head:
                actor.__ray_terminate__.remote()
            else:
                ray.kill(actor)
        self._actors.clear()
        self._streams.clear()

    def end_thread(self) -> None:
        """End the thread that waits for agents."""
        self._waits.put(None)

    def _read(self, stream: Any, name: str) -> News:
        """Read the next events of an agent, or its answer, after which it is listened to."""
        import ray

        try:
            if stream not in self._unanswered:
                events: Sequence[Report] = ray.get(next(stream))
                return events
            self._unanswered.discard(stream)
            answer: Any = ray.get(stream)
            del self._streams[stream]
            self._streams[self._actors[name].events.options(num_returns="streaming").remote()] = name
            return Answered(*answer)
        except StopIteration:
            del self._streams[stream]
            return Ended()
        except ray.exceptions.RayError as error:
            if isinstance(error, ray.exceptions.RaySystemError) and not ray.is_initialized():
                raise  # the connection is lost, from which nothing follows for the agent
            del self._streams[stream]
            return Died(describe_error(error))


@functools.cache
def make_actor_class() -> Any:
    """Ray's class of agents' actors: one, since each takes Ray 0.04 CPU-seconds to describe."""
    import ray

    return ray.remote(NodeAgent)


def start_agent(
    record: dict[str, Any],
    name: str,
    run_dir: RunDir,
    session: Path | None,
    *,
    on_gpus: bool,
    replaces: str = "",
) -> Any:
    """Start the agent of a node as an actor.

    Its process inherits nothing of this environment, and holds no resources.

    Args:
        session: the directory of a Ray that was started for this run.
        on_gpus: whether it is to see the GPUs that its raylet sees.
        replaces: the directory of the agent that it replaces; empty: there was none.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    sees_gpus = on_gpus and record["Resources"].get("GPU", 0)
    variables = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"} if sees_gpus else {}
    variables |= {name: os.environ[name] for name in (TRUST_FOLDER,) if name in os.environ}
    run_id = run_dir.info["run_id"]
    options = {
        "name": f"{run_dir.path.name}/{name}/agent-{time.monotonic_ns():x}",
        "num_cpus": 0,
        "max_concurrency": 4,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=record["NodeID"], soft=False),
    }
    if variables:
        options["runtime_env"] = {"env_vars": variables}
    own = None if session is None else str(session)
    path = list_import_directories()
    return make_actor_class().options(**options).remote(name, str(run_dir.path), run_id, own, path, replaces)


def describe_error(error: Exception) -> str:
    """The cause of one of Ray's errors in one line; Ray's ids and codes say nothing here."""
    import ray

    if isinstance(error, ray.exceptions.ActorUnavailableError):
        return "the connection to its agent broke"
    cause = getattr(error, "cause", None) or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    lines = [_ID.sub("", line) for line in lines if not _ATTRIBUTE.match(line)]
    return lines[-1] if getattr(error, "cause", None) is None and lines else (lines[0] if lines else repr(cause))
