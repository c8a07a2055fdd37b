"""One node of the pipelines study: `python -m ensemble.bench.pipelines.node CONFIG`.

It starts the node's feeder, where the design has one, and forks the node's members once it has imported what they
need, so that sixteen members do not cost sixteen imports. In a network namespace it is a host of its own.

A member sends "ready" when all that it needs has started, its feeder, too, where it has one of its own, and
reads when a byte comes on standard input. It sends "first" with its first batch, with its last one what it has
"taken" and "last"; then it holds that batch until standard input ends, so that its CPU clock and its memory can
be read. Where one fails the others are terminated.
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
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.util import get_temp_dir
from typing import TYPE_CHECKING, Any, NoReturn

from ensemble.bench.launch.hosts import INTERFACE
from ensemble.bench.pipelines import queues
from ensemble.bench.pipelines.baselines import BareRing, JpegImages, make_dataloader, prepare_image
from ensemble.bench.pipelines.config import ALONE, BARE, DATALOADER, LOADER, LOOPBACK, MODEL, Config, send_message
from ensemble.bench.pipelines.training import CLASSES, LEARNING_RATE, make_net
from pipelines import Peers, Pipeline, attach
from pipelines.errors import PipelineError
from pipelines.feeder.process import spawn

if TYPE_CHECKING:
    from torch import nn


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
        across = {"peers": peers, "design": config.design, "preparers": config.preparers}
    try:
        watch = FeederWatch(config, f"node-{config.node}", expect=len(config.local_members), **across)
    except PipelineError as error:
        send_message("died", f"the feeder of node {config.node}: {' '.join(str(error).split())}")
        sys.exit(1)
    try:
        _run_members(dataclasses.replace(config, address=watch.address), watch)
    finally:
        watch.stop()
        send_message("feeder", group_report(watch.reports))


class FeederWatch:
    """A feeder, of a node or of a member alone: hands its levels on to the study, and keeps its reports.

    Args:
        name: of the feeder.
        options: of `Feeder`.
    """

    def __init__(self, config: Config, name: str, **options: Any) -> None:
        options |= {"workers": config.prep_workers, "capacity": config.capacity, "every_s": queues.EVERY_S}
        self.reports: list[dict[str, Any]] = []
        self._feeder, self._name, self._is_open = spawn(config.pipeline(), **options), name, True
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
            self._add(reports or [])

    def stop(self) -> None:
        """Stop the feeder, and hand on what it says last."""
        self._add(self._feeder.stop())

    def _add(self, reports: Sequence[dict[str, Any]]) -> None:
        for report in reports:
            levels = queues.sample(report, time.perf_counter())
            send_message("levels", (self._name, dataclasses.astuple(levels)))
        self.reports += reports


def group_report(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A feeder's group, from its reports: bytes sent in all, and its last design."""
    groups = [group for report in reports if (group := report.get("group"))]
    last: dict[str, Any] = next((group for group in reversed(groups) if group["generation"] is not None), {})
    return {**last, "sent_bytes": max((group["sent_bytes"] for group in groups), default=0)}


def _run_members(config: Config, watch: FeederWatch | None = None) -> None:
    """Fork the members; they are terminated when standard input ends or one of them dies."""
    pipeline = config.pipeline()
    ring = BareRing(config, pipeline) if config.design == BARE else None
    if ring is None or config.step == MODEL:
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
    signal.signal(signal.SIGTERM, _exit_in_order)
    status = 0
    # Made before a DataLoader's workers, which use it, too: a killed worker leaves no directory of its own.
    scratch = get_temp_dir() if config.design == DATALOADER else ""
    try:
        if ring is not None and number < 0:
            prepare_image(pipeline.source[0]["image"], config)  # with all imports that this takes
            os.eventfd_read(go)
            ring.produce(~number)
            sys.stdin.read()
        else:
            _read_batches(config, pipeline, ring, number, go)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        send_message("died", f"{_describe(number)}: {reason[-2000:]}")
        status = 1
    except SystemExit:
        pass
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        os._exit(status)  # without the parent's exit handlers


def _exit_in_order(*_: object) -> NoReturn:
    """Exit in order, without another signal, while this process's children are stopped."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(0)


def _read_batches(config: Config, pipeline: Pipeline, ring: BareRing | None, number: int, go: int) -> None:
    """Take a step with each batch; then hold the last one, in the loop, which ends workers of its own."""
    step, watch, name = Step(config), None, f"member-{number}"
    with contextlib.ExitStack() as stack:
        if config.design in (LOADER, DATALOADER):
            send_message("parent", os.getpid())
        elif config.design in ALONE:
            watch = FeederWatch(config, name, expect=1)
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
            step(batch["image"])
            if watch is not None:
                watch.wait(timeout_s=0)
            if count == total:
                for part in range(0, total, 50):
                    send_message("taken", taken[part : part + 50])
                send_message("last", (step.mean_ms, step.device))
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
    if config.design in (LOADER, DATALOADER):
        pipeline = config.pipeline()  # opened anew, as by a script of its own
    if config.design == LOADER:
        return pipeline.loader(config.batch_size, epochs, workers=config.prep_workers), total
    if config.design == DATALOADER:
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


class Step:
    """A callable for each batch of images, uint8 [b, 3, size, size].

    A real step is one of SGD on a small net with arbitrary labels, on CUDA where it is available, else on one CPU
    thread.

    Attributes:
        device: of the model, "cpu" or "cuda"; else "emulated".
        mean_ms: milliseconds of the model in a call, on average; 0 without a model.
    """

    def __init__(self, config: Config) -> None:
        self.device, self.mean_ms = config.step, 0.0
        self._wait_s, self._count = config.step_ms / 1000 / config.batch_size, 0  # of a sample
        self._net: nn.Module | None = None
        if config.step == MODEL:
            import torch

            self.device = "cuda" if torch.cuda.is_available() else "cpu"
            torch.manual_seed(0)
            self._net = make_net().to(self.device)
            self._train(self._net, torch.zeros((2, 3, config.size, config.size), dtype=torch.uint8))  # warm-up

    def __call__(self, images: Any) -> None:
        """Compute on a batch, or wait for the emulated time, of an epoch's last and smaller batch its part."""
        if self._net is not None:
            start = time.perf_counter()
            self._train(self._net, images)
            self._count += 1
            self.mean_ms += (1000 * (time.perf_counter() - start) - self.mean_ms) / self._count
        elif self._wait_s:
            time.sleep(self._wait_s * len(images))

    def _train(self, net: nn.Module, images: Any) -> None:
        """Returns when the device has finished."""
        import torch

        images = torch.as_tensor(images).to(self.device, non_blocking=True).float() / 255
        labels = torch.arange(len(images), device=self.device) % CLASSES
        loss = torch.nn.functional.cross_entropy(net(images), labels)
        weights = list(net.parameters())
        with torch.no_grad():  # no torch.optim: its import takes more memory than the step
            for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
                weight.sub_(gradient, alpha=LEARNING_RATE)
        float(loss.detach())  # waits for the device


if __name__ == "__main__":
    main()
