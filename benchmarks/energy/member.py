"""A member's process: `python -m benchmarks.energy.member MEMBER CORE`, of which MEMBER is JSON.

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
from dataclasses import asdict, dataclass

NODE = "node-0"
_EVERY_S = 1.0
_NAP_S = 0.004
_LAYERS = 4


@dataclass(frozen=True, kw_only=True)
class Member:
    """One member of a study.

    Attributes:
        name: in events and rows.
        duty: share of the time in which it keeps a core, or its GPU, busy while it works.
        intensity: power of its work over that of usual work, where power is synthetic.
        cpus: cores that it reserves.
        gpu: id of its GPU.  gpu_share: how much of it the member reserves.
        gpu_s: seconds for which it reports a GPU as busy, for each CPU-second of its work; None: it does not.
        trains: on its GPU; else it keeps a core busy.
    """

    name: str
    duty: float
    intensity: float = 1.0
    cpus: float = 1.0
    gpu: str | None = None
    gpu_share: float = 0.0
    gpu_s: float | None = None
    trains: bool = False

    def command(self, core: int) -> list[str]:
        """Of its process, which stays on that core."""
        return [sys.executable, "-P", "-m", "benchmarks.energy.member", json.dumps(asdict(self)), str(core)]


class Spinning:
    """Work that keeps a core busy."""

    def __init__(self, gpu_s: float | None) -> None:
        self._gpu_s = gpu_s

    def step(self) -> None:
        """Nothing: the loop around it is the work."""

    def worked_s(self) -> float:
        """Seconds for which it has worked so far."""
        return time.process_time()

    def gpu_busy_s(self) -> float | None:
        """Seconds for which it has kept a GPU busy so far."""
        return None if self._gpu_s is None else self._gpu_s * time.process_time()


class Training:
    """Steps of a network of linear layers on a GPU; without one of a small network, so that it can be tried."""

    def __init__(self) -> None:
        import torch
        from torch import nn

        from ensemble.train.gpu_busy import open_gpu_busy

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        width, batch = (4096, 2048) if device.type == "cuda" else (64, 64)
        layers = [part for _ in range(_LAYERS) for part in (nn.Linear(width, width), nn.ReLU())]
        self._model = nn.Sequential(*layers).to(device)
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        self._inputs, self._targets = (torch.randn(batch, width, device=device) for _ in range(2))
        self._gpu_busy = open_gpu_busy(device)
        self._worked_s = 0.0
        self.step()  # so that what a first step prepares is not part of a window

    def step(self) -> None:
        """One step; the device has done it when this returns."""
        began = time.monotonic()
        if self._gpu_busy is not None:
            self._gpu_busy.begin()
        self._optimizer.zero_grad()
        loss = (self._model(self._inputs) - self._targets).square().mean()
        loss.backward()
        self._optimizer.step()
        if self._gpu_busy is not None:
            self._gpu_busy.end()
        loss.item()  # waits for it
        self._worked_s += time.monotonic() - began

    def worked_s(self) -> float:
        """See `Spinning`."""
        return self._worked_s

    def gpu_busy_s(self) -> float | None:
        """See `Spinning`."""
        return None if self._gpu_busy is None else self._gpu_busy.read()


def main() -> int:
    """Works and rests as the input says, until it ends."""
    member = Member(**json.loads(sys.argv[1]))
    work = Training() if member.trains else Spinning(member.gpu_s)
    os.sched_setaffinity(0, {int(sys.argv[2])})
    startup_s = time.process_time()

    def report(role: str, cpu_s: float) -> None:
        who = {"node": NODE, "role": role, "member": member.name, "rank": 0, "pid": os.getpid()}
        busy_s = work.gpu_busy_s()
        gpu = {} if busy_s is None else {"gpu_busy_s": busy_s}
        _send(json.dumps({"type": "usage", **who, "cpu_s": cpu_s, "origin": "measured", **gpu}))

    report("startup", startup_s)
    _send("ok")
    working, began, began_s = False, 0.0, 0.0
    next_report = time.monotonic() + _EVERY_S
    while True:
        # behind its share of the time (others had its core), it works until it has made that good
        if working and work.worked_s() - began_s < member.duty * (time.monotonic() - began):
            work.step()
            wait_s = 0.0
        else:
            wait_s = _NAP_S if working else max(0.0, next_report - time.monotonic())
        if select.select([0], [], [], wait_s)[0]:
            line = os.read(0, 1024).decode()
            if not line:
                return 0
            working, began, began_s = line.split()[-1] == "work", time.monotonic(), work.worked_s()
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
