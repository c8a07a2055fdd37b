"""The member processes of one node of the pipelines study: `python -m ensemble.bench.pipelines.members CONFIG`.

It imports what members need once, then forks them, so that sixteen members do not cost sixteen imports. Each child
sends "first" with its first batch and "last" after its last one, and then holds that batch until standard input
ends, so that its CPU clock and its memory can be read. A child that fails sends "died" with the reason; the others
are terminated then.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import sys
from multiprocessing.util import get_temp_dir
from typing import NoReturn

from ensemble.bench.pipelines.baselines import BareRing, make_dataloader
from ensemble.bench.pipelines.config import BARE, DATALOADER, MODEL, Config, send_message
from ensemble.bench.pipelines.step import Step
from pipelines import Feeder, Pipeline, attach


def _read_feeder(config: Config, pipeline: Pipeline, number: int) -> None:
    """One member that reads a feeder: the node's, or its stack."""
    step = Step(config)
    with contextlib.ExitStack() as stack:
        address = config.address
        if address is None:
            feeder = Feeder(pipeline, workers=config.prep_workers, capacity=config.capacity())
            address = stack.enter_context(feeder).address
            stack.callback(signal.signal, signal.SIGTERM, signal.SIG_IGN)  # while the feeder is stopped
        loader = attach(address, pipeline, config.batch_size, config.epochs(pipeline), f"member-{number}")
        total = len(loader.reading.epochs) * loader.steps_per_epoch
        for count, batch in enumerate(loader, start=1):
            if count == 1:
                send_message("first", number)
            step(batch["image"])
            if count == total:
                if loader.stats()["private_batches"]:
                    raise RuntimeError(
                        "the member lost its feeder and prepared batches itself: this run does not measure sharing"
                    )
                _hold_last_batch(number, step)


def _read_dataloader(config: Config, pipeline: Pipeline, number: int) -> None:
    """One member with a DataLoader of its stack."""
    step, loader = Step(config), make_dataloader(config, pipeline, number)
    epochs = config.epochs(pipeline)
    for epoch in epochs:
        for count, images in enumerate(loader, start=1):
            if epoch == 0 and count == 1:
                send_message("first", number)
            step(images)
            if epoch == epochs[-1] and count == len(loader):
                _hold_last_batch(number, step)  # in the loop, which ends its workers


def _hold_last_batch(number: int, step: Step) -> None:
    """Report the last batch and wait, so that the process's clock and memory can be read."""
    send_message("last", number, f"{step.mean_ms} {step.device}")
    sys.stdin.read()
    _exit_in_order()


def _exit_in_order(*_: object) -> NoReturn:
    """Exit in order, without another signal, while this process's children are stopped."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(0)


def main() -> None:
    """Fork the members and wait until standard input ends or one of them dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles it
    config = Config(**json.loads(sys.argv[1]))
    pipeline = config.pipeline()
    ring = BareRing(config) if config.design == BARE else None
    if ring is None or config.step == MODEL:
        import torch

        torch.set_num_threads(1)
    if ring is None:
        # Prepares a sample, with all imports that this takes: a signal that interrupts one may be lost in it.
        _ = pipeline.fields
    producers = range(-ring.producers if ring else 0, 0)
    children = {}  # pidfd -> number and process id
    for number in (*producers, *config.local_members):
        pid = os.fork()
        if not pid:
            _run_child(config, pipeline, ring, number)
        if number < 0:
            send_message("producer", pid)
        children[os.pidfd_open(pid)] = (number, pid)
    select.select([sys.stdin, *children], [], [])
    for number, pid in children.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status < 0:
            send_message("died", -1, f"{_describe(number)}: killed by signal {-status}")


def _describe(number: int) -> str:
    return f"member {number}" if number >= 0 else "the producer"


def _run_child(config: Config, pipeline: Pipeline, ring: BareRing | None, number: int) -> NoReturn:
    """Run a forked process to its end: member `number`, or the bare ring's producer ~number."""
    signal.signal(signal.SIGTERM, _exit_in_order)
    status = 0
    try:
        if ring is not None and number < 0:
            ring.produce(config, pipeline, ~number)
            sys.stdin.read()
        elif ring is not None:
            _hold_last_batch(number, ring.consume(config, pipeline, number))
        elif config.design == DATALOADER:
            # Made before the workers, which use it, too: a killed worker leaves no directory of its own.
            scratch = get_temp_dir()
            try:
                _read_dataloader(config, pipeline, number)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
        else:
            _read_feeder(config, pipeline, number)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        send_message("died", -1, f"{_describe(number)}: {reason[-2000:]}")
        status = 1
    except SystemExit:
        pass
    finally:
        os._exit(status)  # without the parent's exit handlers


if __name__ == "__main__":
    main()
