"""The member processes of one node of the pipelines study: `python -m ensemble.bench.pipelines.members CONFIG`.

It imports what members need once, then forks them, so that a run of sixteen members does not spend its time
on sixteen imports. Each child says "first" when it holds its first batch and "last" after its last one, and
then stays, still holding that, until standard input ends, so that its CPU clock and its memory can be
read. One that fails says "died", and why; the others are ended then.
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

from ensemble.bench.pipelines import peers
from ensemble.bench.pipelines.bare_ring import BareRing
from ensemble.bench.pipelines.config import BARE, DATALOADER, MODEL, Config, say
from ensemble.bench.pipelines.step import Step
from pipelines import Feeder, Pipeline, attach


def take(config: Config, pipeline: Pipeline, number: int) -> None:
    """One member that reads a feeder: the node's, or its own."""
    step = Step(config)
    with contextlib.ExitStack() as own:
        address = config.address
        if address is None:
            feeder = Feeder(pipeline, workers=config.prep_workers, capacity=config.capacity())
            address = own.enter_context(feeder).address
            own.callback(signal.signal, signal.SIGTERM, signal.SIG_IGN)  # while the feeder is put away
        loader = attach(address, pipeline, config.batch_size, config.epochs(pipeline), f"member-{number}")
        total = len(loader.reading.epochs) * loader.steps_per_epoch
        for count, batch in enumerate(loader, start=1):
            if count == 1:
                say("first", number)
            step(batch["image"])
            if count == total:
                if loader.stats()["private_batches"]:
                    raise RuntimeError("it lost its feeder, so that this would be no figure of sharing")
                until_the_end(number, step)


def take_alone(config: Config, pipeline: Pipeline, number: int) -> None:
    """One member with a DataLoader of its own."""
    step, loader = Step(config), peers.dataloader(config, pipeline, number)
    epochs = config.epochs(pipeline)
    for epoch in epochs:
        for count, images in enumerate(loader, start=1):
            if epoch == 0 and count == 1:
                say("first", number)
            step(images)
            if epoch == epochs[-1] and count == len(loader):
                until_the_end(number, step)  # here: its workers end with the loop


def until_the_end(number: int, step: Step) -> None:
    """Say that the last batch was taken, and stay, so that the process's clock can still be read."""
    say("last", number, f"{step.mean_ms} {step.where}")
    sys.stdin.read()
    _leave()


def _leave(*_: object) -> NoReturn:
    """End in order, and undisturbed: what this process has started is put away meanwhile."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(0)


def main() -> None:
    """Fork the members and stay until standard input ends, or one of them dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when we end
    config = Config(**json.loads(sys.argv[1]))
    pipeline = config.pipeline()
    ring = BareRing(config) if config.design == BARE else None
    if ring is None or config.step == MODEL:
        import torch

        torch.set_num_threads(1)
    producers = range(-ring.producers if ring else 0, 0)
    children = {}  # a descriptor that is readable once the process has ended -> its number, its id
    for number in (*producers, *config.here):
        pid = os.fork()
        if not pid:
            _be(config, pipeline, ring, number)
        if number < 0:
            say("producer", pid)
        children[os.pidfd_open(pid)] = (number, pid)
    select.select([sys.stdin, *children], [], [])
    for number, pid in children.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status < 0:
            say("died", -1, f"{_name(number)}: killed by signal {-status}")


def _name(number: int) -> str:
    return f"member {number}" if number >= 0 else "the producer"


def _be(config: Config, pipeline: Pipeline, ring: BareRing | None, number: int) -> NoReturn:
    """What a forked process does until it ends: member `number`, or the bare ring's producer ~number."""
    signal.signal(signal.SIGTERM, _leave)
    status = 0
    try:
        if ring is not None and number < 0:
            ring.produce(config, pipeline, ~number)
            sys.stdin.read()
        elif ring is not None:
            until_the_end(number, ring.consume(config, pipeline, number))
        elif config.design == DATALOADER:
            # made before its workers, which then use it too: one that is killed cannot leave one of its own behind
            scratch = get_temp_dir()
            try:
                take_alone(config, pipeline, number)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
        else:
            take(config, pipeline, number)
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        say("died", -1, f"{_name(number)}: {said[-2000:]}")
        status = 1
    except SystemExit:
        pass
    finally:
        os._exit(status)  # what the parent process has set up to happen at its end is not ours


if __name__ == "__main__":
    main()
