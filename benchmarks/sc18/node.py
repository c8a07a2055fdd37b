"""One node of the study: `python -m benchmarks.sc18.node CONFIG` starts the node's feeder and forks the members.

A member sends "ready", reads when a byte comes on standard input, and sends "first", "taken" and "last". Then it
holds its last batch until standard input ends, so that its CPU clock and its memory can be read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from multiprocessing.util import get_temp_dir
from typing import Any, NoReturn

from benchmarks.launch.hosts import INTERFACE
from benchmarks.sc18.baselines import BareRing, JpegImages, make_dataloader, prepare_image
from benchmarks.sc18.config import ALONE, BARE, DATALOADER, LOOPBACK, Config, send_message
from pipelines import Peers, Pipeline, attach
from pipelines.errors import PipelineError
from pipelines.feeder.process import spawn


def main() -> None:
    """Run the node's processes until standard input ends or a member dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles it
    config = Config(**json.loads(sys.argv[1]))
    if config.design == BARE or config.design in ALONE:
        _run_members(config)
        return
    across: dict[str, Any] = {}
    if config.meeting is not None:
        interface = "lo" if config.link == LOOPBACK else INTERFACE
        peers = Peers(config.meeting, config.node, config.nodes, interface=interface)
        across = {"peers": peers, "design": config.design}
    try:
        watch = FeederWatch(config, expect=len(config.local_members), **across)
    except PipelineError as error:
        send_message("died", f"the feeder of node {config.node}: {' '.join(str(error).split())}")
        sys.exit(1)
    try:
        _run_members(dataclasses.replace(config, address=watch.address), watch)
    finally:
        watch.stop()


class FeederWatch:
    """A feeder, of a node or of a member alone: reads its reports, so that it never waits for a reader.

    Args:
        options: of `Feeder`.
    """

    def __init__(self, config: Config, **options: Any) -> None:
        pipeline = config.pipeline()
        # Photographs that a ring does not hold: one that holds all has them prepared once, not in each epoch.
        options |= {"workers": config.prep_workers, "capacity": min(config.capacity, len(pipeline) - 1)}
        self._feeder, self._is_open = spawn(pipeline, **options), True
        self.address = self._feeder.address
        send_message("parent", self._feeder.pid)

    def wait(self, *ends: Any, timeout_s: float | None = None) -> list[Any]:
        """Wait until some of these descriptors can be read, and return them; none after that time."""
        while True:
            own = [self._feeder.stdout] * self._is_open
            ready = select.select([*ends, *own], [], [], timeout_s)[0]
            if ready != own or not own:
                return ready
            reports = self._feeder.read()
            self._is_open = reports is not None

    def stop(self) -> None:
        """Stop the feeder."""
        self._feeder.stop()


def _run_members(config: Config, watch: FeederWatch | None = None) -> None:
    """Fork the members; they are terminated when standard input ends or one of them dies."""
    pipeline = config.pipeline()
    ring = BareRing(config, pipeline) if config.design == BARE else None
    if ring is None:
        import torch

        torch.set_num_threads(1)
    if ring is None:
        # Prepares a sample, with all imports that this takes: a signal that interrupts one may be lost in it.
        _ = pipeline.fields
    producers, go = range(-ring.producers if ring else 0, 0), os.eventfd(0, os.EFD_SEMAPHORE)
    children = {}  # pidfd -> number and process id
    for number in (*producers, *config.local_members):
        pid = os.fork()
        if pid == 0:
            _run_child(config, pipeline, ring, number, go)
        if number < 0:
            send_message("producer", pid)
        children[os.pidfd_open(pid)] = (number, pid)
    ends = [sys.stdin, *children]
    while sys.stdin in (watch.wait(*ends) if watch else select.select(ends, [], [])[0]):
        if not os.read(sys.stdin.fileno(), 1):
            break
        os.eventfd_write(go, len(children))
    for number, pid in children.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status < 0:
            send_message("died", f"{_describe(number)}: killed by signal {-status}")


def _describe(number: int) -> str:
    return f"member {number}" if number >= 0 else "the producer"


def _run_child(config: Config, pipeline: Pipeline, ring: BareRing | None, number: int, go: int) -> NoReturn:
    """Run a forked process to its end: member `number`, or the bare ring's producer ~number.

    Args:
        go: an eventfd, from which each reads once before it begins.
    """
    status, scratch = 0, ""
    try:
        try:
            signal.signal(signal.SIGTERM, _exit_in_order)
            if config.design == DATALOADER:
                # Made before the workers of a DataLoader, which use it: a killed one leaves no directory behind.
                scratch = get_temp_dir()
            if ring is not None and number < 0:
                prepare_image(pipeline.source[0]["image"], config)  # with all imports that this takes
                os.eventfd_read(go)
                ring.produce(~number)
                sys.stdin.read()
            else:
                _read_batches(config, pipeline, ring, number, go)
        except Exception as error:
            status = 1
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            send_message("died", f"{_describe(number)}: {reason[-2000:]}")
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    finally:  # also of a SIGTERM that comes while the lines above end: nothing of the parent runs here
        os._exit(status)


def _exit_in_order(*_: object) -> NoReturn:
    """Exit in order, without another signal, while this process's children are stopped."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(0)


def _read_batches(config: Config, pipeline: Pipeline, ring: BareRing | None, number: int, go: int) -> None:
    """Take a step with each batch; then hold the last one, in the loop, which ends workers of its own."""
    watch, name = None, f"member-{number}"
    wait_s = config.step_ms / 1000 / config.batch_size  # of a sample: of a smaller batch its part
    with contextlib.ExitStack() as stack:
        if config.design == DATALOADER:
            send_message("parent", os.getpid())
        elif config.design in ALONE:
            watch = FeederWatch(config, expect=1)
            config = dataclasses.replace(config, address=watch.address)
            stack.callback(watch.stop)
            stack.callback(signal.signal, signal.SIGTERM, signal.SIG_IGN)  # meanwhile
        send_message("ready", number)
        os.eventfd_read(go)
        began, taken = time.perf_counter(), []
        batches, total = _open_batches(config, pipeline, ring, number, name)
        for count, batch in enumerate(batches, start=1):
            taken.append((time.perf_counter(), len(batch["image"])))
            if count == 1:
                send_message("first", 1000 * (taken[0][0] - began))
            if wait_s:
                time.sleep(wait_s * len(batch["image"]))
            if watch is not None:
                watch.wait(timeout_s=0)
            if count == total:
                for part in range(0, total, 50):
                    send_message("taken", taken[part : part + 50])
                send_message("last", number)
                sys.stdin.read()
                _exit_in_order()


def _open_batches(
    config: Config, pipeline: Pipeline, ring: BareRing | None, number: int, name: str
) -> tuple[Iterable[Any], int]:
    """A member's batches over all epochs, and how many they are."""
    if ring is not None:
        return ring.read(number), -(-ring.total // config.batch_size)
    epochs = config.epochs(pipeline)
    total = len(epochs) * -(-len(pipeline) // config.batch_size)
    if config.design == DATALOADER:
        pipeline = config.pipeline()  # opened anew, as by a script of its own
        loader = make_dataloader(JpegImages(pipeline.source, config), config.batch_size, config.prep_workers)
        return itertools.chain.from_iterable(itertools.repeat(loader, len(epochs))), total
    assert config.address is not None
    attached = attach(config.address, pipeline, config.batch_size, epochs, name)

    def read() -> Iterator[Any]:
        for count, batch in enumerate(attached, start=1):
            if count == total and attached.stats()["private_batches"]:
                raise RuntimeError("the member lost its feeder and prepared batches itself: nothing was shared")
            yield batch

    return read(), total


if __name__ == "__main__":
    main()
