"""A feeder as a process of its own: `spawn` starts it, `python -m pipelines.feed` is it.

The parent hands it the pipelines through anonymous memory and reads one JSON line a report from its
standard output. It ends when its standard input does, so it never outlives its parent.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, Literal, TypedDict, Unpack

from pipelines import _payload, checks, wire
from pipelines.crew import child_environment
from pipelines.errors import PipelineError
from pipelines.feeder import Feeder
from pipelines.pipeline import Pipeline
from pipelines.rendezvous import Peers

VERSION = 1


class FeederProcess:
    """A running feeder process.

    Attributes:
        address: for `pipelines.attach`.
        pid: of the process.
        stdout: a descriptor to select on; `read` takes what is there.
    """

    def __init__(self, process: subprocess.Popen[bytes], *, own_directory: bool = False) -> None:
        assert process.stdout is not None
        self._process = process
        self._own_directory = own_directory
        self._buffer = b""
        self.pid = process.pid
        self.stdout = process.stdout.fileno()
        first = json.loads(process.stdout.readline() or b'{"type": "failed", "error": "it died at once"}')
        if first["type"] != "ready":
            process.communicate()
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

    def expect(self, members: int) -> None:
        """Wait at the start gate for another number of members (`Feeder.set_expect`)."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):  # it has died, or was stopped
            self._process.stdin.write(json.dumps({"expect": members}).encode() + b"\n")
            self._process.stdin.flush()

    def stop(self) -> list[dict[str, Any]]:
        """End it; consumers that still read go on alone. Returns its last reports."""
        assert self._process.stdout is not None
        if self._process.stdout.closed:
            return []
        try:
            rest, _ = self._process.communicate(timeout=10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            rest, _ = self._process.communicate()
        if self._process.returncode:
            self._clear_away()
        return [json.loads(line) for line in (self._buffer + rest).split(b"\n") if line.endswith(b"}")]

    def _clear_away(self) -> None:
        """Remove what a feeder that was killed could not remove itself."""
        if self._own_directory:
            shutil.rmtree(os.path.dirname(self.address), ignore_errors=True)
        elif not wire.listening(self.address):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.address)

    def kill(self) -> None:
        """End it at once, as a fault would."""
        self._process.send_signal(signal.SIGKILL)


class Options(TypedDict, total=False):
    """The arguments of `Feeder`, which says what they are."""

    workers: int
    threads: bool
    capacity: int | None
    expect: int
    gate_timeout_s: float
    resident: Mapping[str, Pipeline] | None
    replacement: bool
    address: str | os.PathLike[str] | None
    block: int | None
    policy: Literal["wait", "detach"]
    stall_limit_s: float
    cache: Literal["memory", "disk"] | None
    cache_bytes: int | None
    cache_dir: str | os.PathLike[str] | None
    poison: bool
    peers: Peers | None
    design: str
    preparers: int | None


def spawn(pipeline: Pipeline, *, every_s: float = 1.0, **options: Unpack[Options]) -> FeederProcess:
    """Start a feeder process and wait until it listens.

    Args:
        every_s: seconds between its reports.
        options: `Feeder`'s.

    Raises:
        TypeError: `Feeder` has no such option.
        PipelineError: the pipeline cannot be prepared; says why.
    """
    inspect.signature(Feeder).bind(pipeline, **options)
    checks.resident(options.get("resident"))
    if (resident := options.get("resident")) is not None:
        options["resident"] = dict(resident)  # whatever mapping it is
    payload = _payload.dump((pipeline, options, every_s))
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pipelines.feed", "--payload", str(payload)],
            pass_fds=(payload,),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=child_environment(),
        )
    finally:
        os.close(payload)
    return FeederProcess(process, own_directory=options.get("address") is None)


class _Reports:
    """This process's standard output, kept for reports: what users' code prints goes to standard error."""

    def __init__(self) -> None:
        self._fd = os.dup(1)
        os.dup2(2, 1)

    def say(self, kind: str, **said: Any) -> None:
        """One report."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._fd, json.dumps({"v": VERSION, "type": kind, **said}).encode() + b"\n")

    def state(self, feeder: Feeder) -> None:
        """What a feeder has done so far."""
        stats = feeder.stats()
        pids = {"feed": os.getpid(), "prepare": stats.pop("workers")}
        self.say("feeder", pids=pids, cpu=stats.pop("cpu_s"), **stats)


def main(arguments: list[str]) -> int:
    """The feeder process."""
    payload = int(arguments[arguments.index("--payload") + 1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when we end
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    reports = _Reports()
    pipeline, options, every_s = _payload.load(payload)
    os.close(payload)
    try:
        feeder = Feeder(pipeline, **options)
    except Exception as error:
        reports.say("failed", error=f"{type(error).__name__}: {error}")
        return 1
    with feeder:
        reports.say("ready", address=feeder.address)
        while True:
            if select.select([0], [], [], every_s)[0]:
                said = os.read(0, 1 << 16)
                if not said:
                    break
                feeder.set_expect(json.loads(said.splitlines()[-1])["expect"])
            reports.state(feeder)
            if feeder.stats()["failure"] is not None:
                return 1
        reports.state(feeder)
    reports.state(feeder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
