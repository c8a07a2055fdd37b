"""A feeder as a process of its own: `spawn` starts it, `python -m pipelines.feed` is it.

The parent hands it the pipelines through anonymous memory and reads one JSON line a report from its
standard output. It ends when its standard input does, so it never outlives its parent.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from pipelines import _payload
from pipelines.errors import PipelineError
from pipelines.feeder import Feeder, child_environment
from pipelines.pipeline import Pipeline

VERSION = 1


class FeederProcess:
    """A running feeder process.

    Attributes:
        address: for `pipelines.attach`.
        pid: of the process.
        stdout: a descriptor to select on; `read` takes what is there.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self._process = process
        self._buffer = b""
        self.pid = process.pid
        self.stdout = process.stdout.fileno()
        first = json.loads(process.stdout.readline() or b'{"type": "failed", "error": "it died at once"}')
        if first["type"] != "ready":
            process.wait()
            raise PipelineError(f"the feeder did not start: {first['error']}")
        self.address: str = first["address"]
        os.set_blocking(self.stdout, False)

    def read(self) -> list[dict[str, Any]] | None:
        """The reports that have come since the last call; None when the process is gone."""
        try:
            got = os.read(self.stdout, 1 << 16)
        except BlockingIOError:
            return []
        if not got:
            return None
        *lines, self._buffer = (self._buffer + got).split(b"\n")
        return [json.loads(line) for line in lines]

    def stop(self) -> list[dict[str, Any]]:
        """End it; consumers that still read go on alone. Returns its last reports."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        os.set_blocking(self.stdout, True)
        try:
            rest = self._buffer + self._process.stdout.read()
            self._process.wait(timeout=10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        return [json.loads(line) for line in rest.split(b"\n") if line.endswith(b"}")]

    def kill(self) -> None:
        """End it at once, as a fault would."""
        self._process.send_signal(signal.SIGKILL)


def spawn(
    pipeline: Pipeline,
    *,
    resident: Mapping[str, Pipeline] | None = None,
    expect: int = 0,
    capacity: int | None = None,
    workers: int = 1,
    gate_timeout_s: float = 60.0,
    address: str | os.PathLike[str] | None = None,
    every_s: float = 1.0,
) -> FeederProcess:
    """Start a feeder process and wait until it listens; the arguments are `Feeder`'s.

    Args:
        every_s: seconds between its reports.

    Raises:
        PipelineError: the pipeline cannot be prepared; says why.
    """
    options = {
        "resident": dict(resident or {}),
        "expect": expect,
        "capacity": capacity,
        "workers": workers,
        "gate_timeout_s": gate_timeout_s,
        "address": None if address is None else os.fspath(address),
    }
    payload = _payload.dump((pipeline, options, every_s))
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "pipelines.feed", "--payload", str(payload)],
            pass_fds=(payload,),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=child_environment(),
        )
    finally:
        os.close(payload)
    return FeederProcess(process)


def _say(kind: str, **said: Any) -> None:
    sys.stdout.write(json.dumps({"v": VERSION, "type": kind, **said}) + "\n")
    sys.stdout.flush()


def main(arguments: list[str]) -> int:
    """The feeder process."""
    payload = int(arguments[arguments.index("--payload") + 1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when we end
    pipeline, options, every_s = _payload.load(payload)
    os.close(payload)
    try:
        feeder = Feeder(pipeline, **options)
    except Exception as error:
        _say("failed", error=f"{type(error).__name__}: {error}")
        return 1
    with feeder:
        _say("ready", address=feeder.address)
        while not select.select([sys.stdin], [], [], every_s)[0]:
            _report(feeder)
            if feeder.stats()["failure"] is not None:
                return 1
        _report(feeder)
    _report(feeder)
    return 0


def _report(feeder: Feeder) -> None:
    stats = feeder.stats()
    pids = {"feed": os.getpid(), "prepare": stats.pop("workers")}
    with contextlib.suppress(BrokenPipeError):
        _say("feeder", pids=pids, cpu=stats.pop("cpu_s"), **stats)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
