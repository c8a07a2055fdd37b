"""A member that keeps a core busy: `python -m benchmarks.energy.busy CONFIG`, of which CONFIG is JSON.

It works for its share of the time, or rests, as its standard input says with a line for each change: `work` or
`rest`. Each second, and at each change, it reports its CPU time as a member of a run does, in a `usage` event as
one line of JSON; after a change, and once it has started, the line `ok` follows. It ends when its input ends.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

_EVERY_S = 1.0
_NAP_S = 0.004


@dataclass(frozen=True, kw_only=True)
class Config:
    """What such a process is told.

    Attributes:
        name, node: of the member, in its events.
        duty: share of the time in which it works; of a GPU, or of a core.
        core: on which it stays.
        gpu_s: seconds for which it reports a GPU as busy, for each CPU-second of its work.
    """

    name: str
    node: str
    duty: float
    core: int
    gpu_s: float | None = None

    def to_json(self) -> str:
        """As a command's argument."""
        return json.dumps(asdict(self))


def main() -> int:
    """Runs until the input ends."""
    config = Config(**json.loads(sys.argv[1]))
    per_cpu_s = config.gpu_s
    busy_s = None if per_cpu_s is None else lambda: per_cpu_s * time.process_time()
    return serve(config, time.process_time, lambda: None, busy_s)


def serve(
    config: Config, clock: Callable[[], float], work: Callable[[], None], gpu_busy_s: Callable[[], float] | None
) -> int:
    """Works and rests as the input says, until it ends; returns the exit status.

    Args:
        clock: seconds for which it has worked so far: it works while it is behind its share of the time.
        work: does a little work.
        gpu_busy_s: seconds for which it has kept a GPU busy so far.
    """
    os.sched_setaffinity(0, {config.core})
    startup_s = time.process_time()

    def report(role: str, cpu_s: float) -> None:
        who = {"node": config.node, "role": role, "member": config.name, "rank": 0, "pid": os.getpid()}
        gpu = {} if gpu_busy_s is None else {"gpu_busy_s": gpu_busy_s()}
        _send(json.dumps({"type": "usage", **who, "cpu_s": cpu_s, "origin": "measured", **gpu}))

    report("startup", startup_s)
    _send("ok")
    working, began, began_s = False, 0.0, 0.0
    next_report = time.monotonic() + _EVERY_S
    while True:
        # behind its share of the time (others had its core), it works until it has made that good
        behind = working and clock() - began_s < config.duty * (time.monotonic() - began)
        if behind:
            work()
            wait_s = 0.0
        else:
            wait_s = _NAP_S if working else max(0.0, next_report - time.monotonic())
        if select.select([0], [], [], wait_s)[0]:
            line = os.read(0, 1024).decode()
            if not line:
                return 0
            working, began, began_s = line.split()[-1] == "work", time.monotonic(), clock()
            report("train", time.process_time() - startup_s)
            _send("ok")
        if time.monotonic() >= next_report:
            report("train", time.process_time() - startup_s)
            next_report += _EVERY_S


def _send(line: str) -> None:
    try:
        os.write(1, f"{line}\n".encode())
    except BrokenPipeError:  # the study has ended
        sys.exit(0)


if __name__ == "__main__":
    sys.exit(main())
