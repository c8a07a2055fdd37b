"""Prepares samples once for all consumers.

`Feeder` is a thin shell around `pipelines.order.stream.Stream`: one thread waits on all sockets, assigns blocks to
workers and notifies consumers. It holds no lock in shared memory and touches no sample; the end of a consumer or
worker is an end-of-file on its socket.
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
from typing import TYPE_CHECKING, Any, Literal

from pipelines.checks import (
    check_choice,
    check_flag,
    check_integer,
    check_path,
    check_pipeline,
    check_resident,
    check_seconds,
)
from pipelines.feeder.consumers import Consumers
from pipelines.feeder.hello import Consumer
from pipelines.feeder.listener import Listener
from pipelines.feeder.statistics import FeederStatistics
from pipelines.ipc import messages
from pipelines.order.stream import Block, Stream, default_block_size
from pipelines.pipeline import Pipeline
from pipelines.providers import import_object
from pipelines.shm import ring
from pipelines.workers.buffers import Buffers, choose_capacity
from pipelines.workers.worker_pool import WorkerPool

if TYPE_CHECKING:
    from pipelines.feeder.peers import Peers

_RETRY_S = 1.0


class Feeder:
    """Prepares a pipeline's samples once and hands them to every consumer that attaches.

    Use it as a context manager; `address` is what consumers pass to `pipelines.attach`.

    Args:
        pipeline: the pipeline to prepare.
        workers: number of preparation workers.
        capacity: samples in the ring; by default as many as 64 MiB hold, or 512 if 256 MiB hold them, and 4096
            at most: a larger ring would not fit the processor's cache. Where each epoch has the same samples
            (`Pipeline.repeats`) and an eighth of the free memory holds them: all. A ring that holds all of them is
            filled once, and readers take each epoch from it, at their own pace.
        expect: how many members (each with all its ranks) to wait for before the first sample; 0 does not wait.
        gate_timeout_s: how long to wait for them.
        resident: named pipelines without randomness, prepared once and kept whole (`pipelines.loader.resident`).
        replacement: whether this feeder replaces one that died. Its readers already hold the resident sets, so a
            set is prepared only on request; and it does not wait for the feeders of other nodes.
        address: the path of the socket, in a directory that is made with mode 0700; by default in a new one.
            A feeder at the address of one that died serves the same consumers.
        listener: a listening socket (`pipelines.ipc.messages.listen`) to use instead of `address`.
        block: samples that one worker prepares at a time.
        policy: what to do with a consumer that is so far behind that others wait for it. `"wait"`: they wait, up
            to `stall_limit_s`; `"detach"`: it is detached at once. A detached consumer prepares the same batches,
            bit for bit, by itself, and attaches again when it has caught up.
        prepare_timeout_s: the longest time for one sample. A worker that takes longer is ended, and the sample is
            tried once more in a process of its own; if it hangs again, or ends that process, it counts as a record
            that cannot be prepared.
        stall_limit_s: how long a consumer may release nothing while others wait for it.
        cache: `"memory"` or `"disk"`: samples are kept as they are before the first random stage, so that later
            epochs neither read nor decode them; see `pipelines.cache.file`. None keeps nothing.
        cache_bytes: the largest size of the cache, from which nothing is evicted; by default a quarter of the free
            memory, or `cache_dir_bytes`.
        cache_dir: for `"disk"`: a directory that later feeders of the same fingerprint use again.
        cache_dir_bytes: see `pipelines.cache.folder.CacheFolder`.
        peers: where to meet the feeders of other nodes, to share one stream with them; the ring then holds whole
            blocks. While there are none this node prepares everything itself.
        design: who prepares and who sends (`pipelines.multinode.designs`): `"node"`, `"single"`, `"multi"`,
            `"all"`, or `"auto"`, which chooses from measurements.
        preparers: how many nodes prepare in `"single"` and `"multi"`; by default one and all.
        forks: whether worker processes are forked from this one, which then only feeds.

    Raises:
        PipelineError: an argument is invalid, or the pipeline cannot be prepared.
        MemoryError: the ring does not fit in memory.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        workers: int = 1,
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
        cache_dir_bytes: int | None = None,
        peers: Peers | None = None,
        design: str = "auto",
        preparers: int | None = None,
        forks: bool = False,
    ) -> None:
        check_pipeline("a Feeder's pipeline", pipeline)
        check_choice("policy", policy, ("wait", "detach"))
        workers, expect = check_integer("workers", workers, 1), check_integer("expect", expect, 0)
        gate_timeout_s = check_seconds("gate_timeout_s", gate_timeout_s)
        stall_limit_s = check_seconds("stall_limit_s", stall_limit_s, above=True)
        prepare_timeout_s = check_seconds("prepare_timeout_s", prepare_timeout_s, above=True)
        check_flag("replacement", replacement)
        check_resident(resident)
        if (peers, design, preparers) != (None, "auto", None):
            preparers = import_object("pipelines.feeder.peers:check_peers")(peers, design, preparers)
        address = None if address is None else check_path("address", address)
        repeats, n = pipeline.repeats and cache is None, len(pipeline)
        capacity = choose_capacity(pipeline, repeats=repeats) if capacity is None else capacity
        capacity = check_integer("capacity", capacity, 2)
        if block is not None:
            block = check_integer("block", block, 1, capacity, " (the capacity)")
        requested_block, block = block, block or default_block_size(capacity, pipeline.batch_unit)
        if peers is not None:
            capacity = max(2, -(-capacity // block)) * block
        self.pipeline = pipeline
        self.expect, self.gate_timeout_s = expect, gate_timeout_s
        self._stall_limit_s = stall_limit_s if policy == "wait" else 0.0
        self._stream = Stream(capacity, block, n if repeats and capacity >= n else 0, max_lead=max(capacity, n))
        self._prepared = {"prepared": 0, "resident": 0}
        self._cpu_s, self._started_at = 0.0, time.monotonic()
        self._is_gate_open = expect == 0 and peers is None
        self._group: Any = None  # `pipelines.multinode.group.NodeGroup`
        self._is_replacement = replacement
        self._is_closing = self._has_warned_memory = False
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._serve, name="feeder", daemon=True)
        self._listener, self._resources = listener, contextlib.ExitStack()
        try:
            self.address = self._open_listener(address)
            self._cache: Any = None  # `pipelines.cache.manager.CacheManager`
            if (cache_options := (cache, cache_bytes, cache_dir, cache_dir_bytes)) != (None,) * 4:
                open_cache = import_object("pipelines.cache.manager:open_cache")
                self._cache = open_cache(pipeline, *cache_options, self._resources)
            _ = pipeline.layouts  # inferred here once, not by every worker
            self._buffers = Buffers(pipeline, self._stream, resident or {})
            self._resources.callback(self._buffers.close)
            self._start(workers, requested_block, prepare_timeout_s, has_peers=peers is not None, is_forked=forks)
            if peers is not None:
                self._group = import_object("pipelines.multinode.group:NodeGroup")(
                    peers, design, preparers, self._buffers.ring_buffer, self._stream, self._selector,
                    self._measure_rates, self._on_block_ready,
                    sample_bytes=ring.sample_bytes(pipeline.fields), first_timeout_s=gate_timeout_s,
                )  # fmt: skip
                self._resources.callback(self._group.close)
        except BaseException:
            self._release_resources()
            raise
        self._thread.start()
        atexit.register(self.close)

    def _start(
        self, workers: int, block: int | None, timeout_s: float, *, has_peers: bool, is_forked: bool
    ) -> None:
        """Start the workers, and make what serves consumers."""
        self._selector = self._resources.enter_context(selectors.DefaultSelector())
        # Sockets, not a pipe's descriptors: a write after `close` cannot reach an unrelated file.
        self._wake_receiver, self._wake_sender = map(self._resources.enter_context, socket.socketpair())
        self._consumers = Consumers(
            self._stream, self._buffers, self._selector, block, self._check_gate, has_peers=has_peers
        )
        self._resources.callback(self._consumers.close)
        self._pool = WorkerPool(
            self._buffers, self._selector, self._next_block, self._on_done,
            cache=self._cache, timeout_s=timeout_s, is_forked=is_forked,
        )  # fmt: skip
        self._resources.callback(self._pool.close)
        self._statistics = FeederStatistics(self._stream, self._consumers, self._pool)
        self._pool.start(workers)

    def _open_listener(self, address: str | None) -> str:
        """Open the listening socket if none was given; returns its address."""
        if self._listener is not None:
            return str(self._listener.getsockname())
        if address is None:
            directory = messages.create_directory()
            self._resources.callback(shutil.rmtree, directory, ignore_errors=True)
            address = os.path.join(directory, "socket")
        self._listener = messages.listen(address)
        return address

    def __enter__(self) -> Feeder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def capacity(self) -> int:
        return self._stream.capacity

    def stats(self) -> dict[str, Any]:
        """Counters so far.

        Samples `prepared` and `consumed` (without skipped records), `resident`, `skipped`; worker `restarts`;
        consumers `detached`; `members` that read now; CPU-seconds by role; process ids; `fullness`, the mean
        levels of the queues (`pipelines.feeder.statistics`) over `recorded_s` seconds.
        """
        pool = self._pool
        return {
            **self._prepared,
            "consumed": self._consumers.consumed,
            "detached": self._consumers.detached,
            "members": self._consumers.members,
            "skipped": pool.skipped,
            "restarts": pool.restarts,
            "cpu_s": {"feed": self._cpu_s + (self._group.cpu_s if self._group else 0.0), **pool.cpu_by_role},
            "capacity": self._stream.capacity,
            "fullness": self._statistics.levels.means(),
            "recorded_s": self._statistics.levels.recorded_s,
            "group": None if self._group is None else self._group.stats(),
            "workers": pool.pids,
            "bad": dict(pool.bad),
            "poison": list(pool.poison),
            "cache": None if self._cache is None else self._cache.stats(),
            "cache_renewed": getattr(getattr(self._cache, "difference", None), "as_record", lambda: None)(),
            "failure": self._failure,
        }

    def set_expect(self, members: int) -> None:
        """Wait at the start gate for another number of members, after one has failed to start."""
        self.expect = members
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_sender.send(b"x")

    def close(self) -> None:
        """End the workers and close the socket; consumers continue alone."""
        self._is_closing = True
        atexit.unregister(self.close)
        self._wake()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    # --- the thread -------------------------------------------------------------------------------------

    def _serve(self) -> None:
        assert self._listener is not None
        self._connections = Listener(self._listener, self._selector, self._consumers.accept)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ, lambda woken: woken.recv(64))
        try:
            while not self._is_closing:
                self._consumers.look()
                self._pool.dispatch()
                self._consumers.publish()
                self._record_levels()
                for key, _ in self._selector.select(self._timeout_s()):
                    key.data(key.fileobj)
                self._cpu_s = time.thread_time()
        except Exception as error:
            self._failure = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._connections.close()
            self._release_resources()

    def _timeout_s(self) -> float | None:
        return _earliest(self._advance(), self._connections.tick(), self._pool.tick())

    def _advance(self) -> float | None:
        """Handle the gate, stalled consumers and the group; returns the seconds until the next call, or None."""
        self._check_gate()
        if not self._is_gate_open:
            gate_s = self._started_at + self.gate_timeout_s - time.monotonic()
            if gate_s > 0:
                return gate_s if self._group is None else min(gate_s, self._group.tick())
            self._open_gate()
            self._pool.dispatch()
        others_wait = self._group is not None and self._group.holds_others
        stalled, left_s = self._consumers.find_stalled(self._stall_limit_s, for_others=others_wait)
        if stalled:
            left_s = self._detach_consumers(stalled)
        if self._group is not None:
            due_s = self._group.tick()
            self._pool.dispatch()
            return _earliest(due_s, left_s)
        return left_s

    def _check_gate(self) -> None:
        """Open the start gate if all expected members and nodes are there."""
        met = self._group is None or self._group.has_met or self._is_replacement
        if not self._is_gate_open and met and self._consumers.count_complete_members() >= self.expect:
            self._open_gate()

    def _open_gate(self) -> None:
        self._is_gate_open = True
        self._consumers.refuse_far_ahead()

    # --- the ring ---------------------------------------------------------------------------------------

    def _next_block(self) -> tuple[int, Block] | None:
        """The next (buffer number, block) to prepare: for other nodes first, then resident sets, then the ring."""
        if self._group is not None and self._group.is_active:
            block = self._next_stream_block()
            if block is not None:
                return block
        for_resident = self._buffers.next_resident(
            lambda key: not self._is_replacement or self._consumers.is_requested(key)
        )
        return for_resident or self._next_stream_block()

    def _next_stream_block(self) -> tuple[int, Block] | None:
        if not self._is_gate_open:
            return None
        block = self._stream.next_block() if self._group is None else self._group.next_block()
        return None if block is None else (self._buffers.ring, block)

    def _on_done(self, buffer_id: int, block: Block) -> None:
        """Record that a worker has prepared a block."""
        buffer = self._buffers.buffers.get(buffer_id)
        if buffer is None:  # of a ring that was replaced: it is prepared again
            return
        if buffer_id == self._buffers.ring:
            self._prepared["prepared"] += self._buffers.count_good(*block)
            if self._group is not None:
                self._group.on_prepared(block)
            self._on_block_ready(block)
            return
        self._prepared["resident"] += block[1] - block[0]
        buffer.unfinished -= 1
        if buffer.unfinished == 0:
            self._consumers.send_resident(buffer)

    def _on_block_ready(self, block: Block) -> None:
        """Record that a block of the ring can be read, and how long its readers have waited for it."""
        self._statistics.has_delivered = True
        self._consumers.look()
        self._record_levels()
        self._stream.complete(block)

    def _record_levels(self) -> None:
        self._statistics.record(None if self._group is None else self._group.link_level)

    def _measure_rates(self) -> tuple[bool, float, float, float]:
        """Whether the gate is open; how much of the time readers wait; samples/s prepared and consumed."""
        waiting, consume = self._statistics.measure_demand()
        return self._is_gate_open, waiting, self._pool.rate, consume

    def _detach_consumers(self, stalled: list[Consumer]) -> float | None:
        """Detach consumers, and continue the ring in new memory: they still read the old one.

        If there is no memory for a second ring the others wait for them.

        Returns:
            Seconds until the next try, or None.
        """
        try:
            memory = self._buffers.create_ring()
        except MemoryError as error:
            if not self._has_warned_memory:
                warnings.warn(f"{stalled[0].name!r} keeps the other consumers waiting: {error}", stacklevel=2)
            self._has_warned_memory = True
            return _RETRY_S
        if self._group is not None:
            self._group.leave()
        self._consumers.detach(stalled)
        before = self._buffers.replace_ring(memory)
        self._pool.replace_buffer(before, self._buffers.ring)
        self._consumers.replace_ring(memory)
        if self._group is not None:
            self._group.use_ring(memory)
        self._pool.dispatch()
        return None

    def _release_resources(self) -> None:
        self._is_closing = True
        if self._listener is not None:
            with contextlib.suppress(FileNotFoundError):  # first: then another feeder may use the address
                os.unlink(self.address)
            self._listener.close()
        self._resources.close()


def _earliest(*seconds: float | None) -> float | None:
    return min((value for value in seconds if value is not None), default=None)
