"""The process that prepares samples once for all its consumers.

`Feeder` is a thin shell around `pipelines.stream.Stream`: one thread waits on all sockets at once, tells
workers what to prepare and consumers what is there. It holds no lock in shared memory and touches no
sample: a consumer or worker that dies is an end-of-file on its socket.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import selectors
import shutil
import socket
import threading
import time
import warnings
from collections.abc import Mapping
from typing import Any, Literal

from pipelines import checks, ipc
from pipelines.cache import manager
from pipelines.feeder.buffers import Memories
from pipelines.feeder.consumers import Consumer, Consumers
from pipelines.feeder.listener import Door
from pipelines.feeder.statistics import Gauge
from pipelines.feeder.worker_pool import Crew
from pipelines.multinode.group import Measured, Peering
from pipelines.multinode.rendezvous import Peers, check_peers
from pipelines.pipeline import Pipeline
from pipelines.shm import ring
from pipelines.stream import Run, Stream, usual_block, usual_capacity

_AGAIN_S = 1.0


class Feeder:
    """Prepares a pipeline's samples once and hands them to every consumer that attaches.

    Use it as a context manager; `address` is what consumers pass to `pipelines.attach`.

    Args:
        pipeline: what is prepared.
        workers: preparation workers: processes, or
        threads: threads of one process, for decoders and stages that release the interpreter lock. Each has stages
            of its own; what they share beside (a module's globals) has to bear several threads at a time.
        capacity: samples in the ring; by default as many as 64 MiB hold, but 512 if 256 MiB hold them, and
            4096 at most: a ring that is larger than it needs to be costs the writers the processor's cache.
        expect: members (each with all its ranks) for which the first sample waits; 0 does not wait.
        gate_timeout_s: how long it waits for them.
        resident: named pipelines without randomness, prepared once and kept whole (`pipelines.loader.resident`).
        replacement: whether it takes the place of one that died. Its readers return: they hold the resident sets,
            which are prepared when somebody asks for one again, and do not wait for the feeders of other nodes.
        address: the path of the socket, in a directory that is made with mode 0700; by default in a new one.
            A feeder that takes the address of one that died finds its consumers there again.
        listener: a socket that listens at the address already, made by `wire.listen`, in place of `address`.
        block: samples that one worker prepares at a time.
        policy: what becomes of a consumer that falls behind by more than the ring, so that others wait for it:
            `"wait"`: it paces them, up to `stall_limit_s`; `"detach"`: it is sent on alone at once. It prepares
            its own batches then, the same to the last bit, and comes back when it has caught up.
        prepare_timeout_s: how long the preparation of one sample may take. A worker that is at one for longer is
            ended, and the sample tried once more by itself; if that does not end either, it is a record that
            cannot be prepared, as one that ends its worker is.
        stall_limit_s: how long a consumer may give nothing back while others wait for it.
        cache: `"memory"` or `"disk"`: samples are kept as they are before the first random stage, so that later
            epochs neither read nor decode them; see `pipelines.cache.file`. None keeps nothing.
        cache_bytes: how much may be kept, nothing is thrown out for more; by default a quarter of the free memory,
            or half of the free disk.
        cache_dir: for `"disk"`; the next feeder of a pipeline with a fingerprint finds there what this one kept.
        poison: overwrite what was given back at once, for tests: nobody may ever see it.
        peers: where to meet the feeders of other nodes, to share one stream with them; the ring then holds whole
            blocks. Without them, or while they are away, this node prepares everything itself.
        design: who prepares and who sends (`pipelines.multinode.designs`): `"node"`, `"single"`, `"multi"`,
        `"all"`, or
            `"auto"`, chosen from what is measured, and revised.
        preparers: nodes that prepare, in `"single"` and `"multi"`; one and all unless given.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        workers: int = 1,
        threads: bool = False,
        capacity: int | None = None,
        expect: int = 0,
        gate_timeout_s: float = 60.0,
        resident: Mapping[str, Pipeline] | None = None,
        replacement: bool = False,
        address: str | os.PathLike[str] | None = None,
        listener: socket.socket | None = None,
        block: int | None = None,
        policy: Literal["wait", "detach"] = "wait",
        stall_limit_s: float = 60.0,
        prepare_timeout_s: float = 300.0,
        cache: Literal["memory", "disk"] | None = None,
        cache_bytes: int | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        poison: bool = False,
        peers: Peers | None = None,
        design: str = "auto",
        preparers: int | None = None,
    ) -> None:
        checks.pipeline("a Feeder's pipeline", pipeline)
        checks.choice("policy", policy, ("wait", "detach"))
        workers, expect = checks.integer("workers", workers, 1), checks.integer("expect", expect, 0)
        gate_timeout_s = checks.seconds("gate_timeout_s", gate_timeout_s)
        stall_limit_s = checks.seconds("stall_limit_s", stall_limit_s, above=True)
        prepare_timeout_s = checks.seconds("prepare_timeout_s", prepare_timeout_s, above=True)
        checks.flag("replacement", replacement)
        checks.flag("poison", poison)
        checks.resident(resident)
        manager.check_options(cache, cache_bytes, cache_dir)
        preparers = check_peers(peers, design, preparers)
        address = None if address is None else checks.path("address", address)
        checks.threads(threads, pipeline)
        if capacity is None:
            capacity = usual_capacity(ring.sample_bytes(pipeline.fields))
        capacity = checks.integer("capacity", capacity, 2)
        if block is not None:
            block = checks.integer("block", block, 1, capacity, " (the capacity)")
        asked_block, block = block, block or usual_block(capacity)
        if peers is not None:
            capacity = max(2, -(-capacity // block)) * block
        self.pipeline = pipeline
        self.expect = expect
        self.gate_timeout_s = gate_timeout_s
        self._limit_s = stall_limit_s if policy == "wait" else 0.0
        self._stream = Stream(capacity, block, far=max(capacity, len(pipeline)))
        self._prepared = {"prepared": 0, "resident": 0}
        self._cpu_s = 0.0
        self._began = time.monotonic()
        self._gate_open = expect == 0 and peers is None
        self._peering: Peering | None = None
        self._replacement = replacement
        self._closing = False
        self._failure: str | None = None
        self._short_of_memory = False
        self._thread = threading.Thread(target=self._run, name="feeder", daemon=True)
        self._listener = listener
        self._owned = contextlib.ExitStack()
        try:
            self.address = self._listen(address)
            self._cache = (
                None
                if cache is None
                else manager.CacheManager(pipeline, cache, cache_bytes, cache_dir, self._owned)
            )
            _ = pipeline.forms  # found out here once, not by every worker
            self._memories = Memories(pipeline, self._stream, resident or {}, poison=poison)
            self._owned.callback(self._memories.close)
            self._selector = self._owned.enter_context(selectors.DefaultSelector())
            # Sockets, not a pipe's numbers: writing to one that is closed cannot reach another's file.
            self._woken, self._wake = map(self._owned.enter_context, socket.socketpair())
            self._consumers = Consumers(
                self._stream,
                self._memories.targets[self._memories.ring],
                self._memories.residents,
                self._selector,
                asked_block,
                came=self._look_at_gate,
                kept=self._memories.kept,
            )
            self._owned.callback(self._consumers.close)
            self._crew = Crew(
                self._memories.targets, self._selector, self._next_run, self._done, self._lost,
                threads=threads, kept=self._cache, timeout_s=prepare_timeout_s,
            )  # fmt: skip
            self._owned.callback(self._crew.close)
            self._gauge = Gauge(self._stream, self._consumers, self._crew)
            self._crew.start(workers)
            if peers is not None:
                self._peering = Peering(
                    peers,
                    design,
                    preparers,
                    self._memories.targets[self._memories.ring],
                    self._stream,
                    self._selector,
                    self._measure,
                    self._ready,
                    sample_bytes=ring.sample_bytes(pipeline.fields),
                    patience_s=gate_timeout_s,
                )
                self._owned.callback(self._peering.close)
        except BaseException:
            self._end()
            raise
        self._thread.start()
        atexit.register(self.close)

    def _listen(self, address: str | None) -> str:
        """Listen, if nobody does for us; where."""
        if self._listener is not None:
            return str(self._listener.getsockname())
        if address is None:
            directory = ipc.new_directory()
            self._owned.callback(shutil.rmtree, directory, ignore_errors=True)
            address = os.path.join(directory, "socket")
        self._listener = ipc.listen(address)
        return address

    def __enter__(self) -> Feeder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def capacity(self) -> int:
        """Samples in the ring."""
        return self._stream.capacity

    def stats(self) -> dict[str, Any]:
        """What it has done so far.

        Samples `prepared` and `consumed` (records left out are in neither), `resident`, `skipped`; worker
        `restarts`; consumers `detached`; `members` that read now; CPU-seconds by role; pids; `fullness`, the mean
        levels of the queues (`pipelines.feeder.queue_levels`).
        """
        crew = self._crew
        return {
            **self._prepared,
            "consumed": self._consumers.consumed,
            "detached": self._consumers.detached,
            "members": self._consumers.members,
            "skipped": crew.skipped,
            "restarts": crew.restarts,
            "cpu_s": {
                "feed": self._cpu_s + (self._peering.cpu_s if self._peering is not None else 0.0),
                "prepare": crew.cpu_s,
            },
            "capacity": self._stream.capacity,
            "fullness": self._gauge.levels.means(),
            "group": None if self._peering is None else self._peering.stats(),
            "workers": crew.pids,
            "bad": dict(crew.bad),
            "deadly": list(crew.deadly),
            "cache": None if self._cache is None else self._cache.stats(),
            "failure": self._failure,
        }

    def set_expect(self, members: int) -> None:
        """Wait at the start gate for another number of members: one has failed before it came."""
        self.expect = members
        with contextlib.suppress(OSError):
            self._wake.send(b"x")

    def close(self) -> None:
        """End the workers and the socket; consumers go on alone."""
        self._closing = True
        atexit.unregister(self.close)
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    # --- the thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        assert self._listener is not None
        self._door = Door(self._listener, self._selector, self._consumers.enter)
        self._owned.callback(self._door.close)
        self._selector.register(self._woken, selectors.EVENT_READ, self._awoken)
        try:
            while not self._closing:
                self._crew.dispatch()
                self._gauge.note(None if self._peering is None else self._peering.link_level)
                for key, _ in self._selector.select(self._due_s()):
                    key.data(key.fileobj)
                self._memories.poison_released()
                self._cpu_s = time.thread_time()
        except Exception as error:
            self._failure = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._end()

    def _due_s(self) -> float | None:
        return _soonest(self._do_what_is_due(), self._door.tick(), self._crew.tick())

    def _do_what_is_due(self) -> float | None:
        """Let happen what time has brought; returns how long nothing more can happen by itself, in seconds."""
        self._look_at_gate()
        if not self._gate_open:
            left = self._began + self.gate_timeout_s - time.monotonic()
            if left > 0:
                return left if self._peering is None else min(left, self._peering.tick())
            self._open_gate()
            self._crew.dispatch()
        others_wait = self._peering is not None and self._peering.holds_others
        late, left_s = self._consumers.stalled(self._limit_s, for_others=others_wait)
        if late:
            left_s = self._detach(late)
        if self._peering is not None:
            due_s = self._peering.tick()
            self._crew.dispatch()
            return _soonest(due_s, left_s)
        return left_s

    def _awoken(self, woken: Any) -> None:
        woken.recv(64)
        self._look_at_gate()

    def _look_at_gate(self) -> None:
        """Open the gate if all are there."""
        met = self._peering is None or self._peering.met or self._replacement
        if not self._gate_open and met and self._consumers.complete() >= self.expect:
            self._open_gate()

    def _open_gate(self) -> None:
        self._gate_open = True
        self._consumers.refuse_far()

    # --- the ring ---------------------------------------------------------------------------------------

    def _next_run(self) -> tuple[int, Run] | None:
        """What to prepare next: resident sets that are wanted first, but for what other nodes wait for."""
        if self._peering is not None and self._peering.leads:
            run = self._next_of_stream()
            if run is not None:
                return run
        for_resident = self._memories.next_resident(
            lambda key: not self._replacement or self._consumers.asked_for(key)
        )
        return for_resident or self._next_of_stream()

    def _next_of_stream(self) -> tuple[int, Run] | None:
        if not self._gate_open:
            return None
        run = self._stream.next_run() if self._peering is None else self._peering.next_run()
        return None if run is None else (self._memories.ring, run)

    def _done(self, number: int, run: Run) -> None:
        """A run of a target is prepared."""
        target = self._memories.targets.get(number)
        if target is None:  # of a ring that is no more: it is being prepared again
            return
        if number == self._memories.ring:
            self._prepared["prepared"] += self._memories.kept(*run)
            if self._peering is not None:
                self._peering.prepared(run)
            self._ready(run)
            return
        self._prepared["resident"] += run[1] - run[0]
        target.left -= 1
        if target.left == 0:
            self._consumers.give_resident(target)

    def _ready(self, run: Run) -> None:
        """A run of the ring can be read."""
        self._gauge.delivered = True
        if self._stream.done(run):
            self._consumers.tell_ready()

    def _measure(self) -> Measured:
        """What the other nodes are told about this one."""
        waiting, consume = self._gauge.demand()
        return Measured(self._gate_open, waiting, self._crew.rate, consume)

    def _lost(self, number: int, run: Run) -> None:
        """A run of a target has to be prepared again."""
        if number == self._memories.ring:
            self._stream.lost(run)
        elif number in self._memories.targets:
            self._memories.targets[number].todo.insert(0, run)

    def _detach(self, late: list[Consumer]) -> float | None:
        """Send consumers on alone, and go on in new memory: what they hold in their hands lies in the old one.

        Without room for a second ring they pace the others after all; returns when to look again, in seconds.
        """
        try:
            memory = self._memories.another_ring()
        except MemoryError as error:
            if not self._short_of_memory:
                warnings.warn(f"the others go on waiting for {late[0].name!r}: {error}", stacklevel=2)
            self._short_of_memory = True
            return _AGAIN_S
        if self._peering is not None:
            self._peering.leave()
        self._consumers.detach(late)
        before = self._memories.renew_ring(memory)
        self._crew.replace_target(before, self._memories.ring)
        self._consumers.renew_ring(memory)
        if self._peering is not None:
            self._peering.renewed(memory)
        self._crew.dispatch()
        return None

    def _end(self) -> None:
        self._closing = True
        if self._listener is not None:
            # In this order: once nobody listens, another feeder may take the address.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.address)
            self._listener.close()
        self._owned.close()


def _soonest(*seconds: float | None) -> float | None:
    """The least of these; None where all are."""
    return min((each for each in seconds if each is not None), default=None)
