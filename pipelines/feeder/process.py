"""A feeder as a process of its own: `spawn` starts it, `python -m pipelines.feeder.process` is it.

The parent hands it the pipelines through anonymous memory and reads one JSON line a report from its
standard output. It ends when its standard input does, so it never outlives its parent.

The parent makes the listening socket and hands it on. So the address is there before the process has imported
anything: consumers may come at once and wait for its first answer, and a parent need not wait. Where it ends
before it has answered, they learn that by the end of their connections.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, Literal, TypedDict, Unpack

from pipelines import checks, ipc, memory_pickle
from pipelines.child_processes import child_environment, end_with_parent
from pipelines.errors import PipelineError
from pipelines.feeder.server import Feeder
from pipelines.multinode.rendezvous import Peers
from pipelines.pipeline import Pipeline

VERSION = 1
START_S = 300.0  # what a feeder needs beside its imports is one sample of each pipeline


class FeederProcess:
    """A feeder process, from its start on.

    Attributes:
        address: for `pipelines.attach`; somebody listens there at once.
        pid: of the process.
        stdout: a descriptor to select on; `read` takes what is there.
        ready: whether it has begun: its pipeline can be prepared, and consumers get answers.
        failure: why it could not begin; None where it did not say.
        cpu_s: what it has used, its workers included, once it has ended by itself; None where that is not known.
    """

    def __init__(self, process: subprocess.Popen[bytes], address: str, *, own_directory: bool = False) -> None:
        assert process.stdout is not None
        self._process = process
        self._own_directory = own_directory
        self._buffer = b""
        self._reports: list[dict[str, Any]] = []
        self.address = address
        self.pid = process.pid
        self.stdout = process.stdout.fileno()
        self.ready = False
        self.failure: str | None = None
        self.cpu_s: float | None = None
        os.set_blocking(self.stdout, False)

    def read(self) -> list[dict[str, Any]] | None:
        """The reports that have come since the last call; None when the process is gone."""
        try:
            got = os.read(self.stdout, 1 << 16)
        except BlockingIOError:
            return self._taken()
        if not got:
            return self._taken() or None
        *lines, self._buffer = (self._buffer + got).split(b"\n")
        for line in lines:
            self._take(line)
        return self._taken()

    def _take(self, line: bytes) -> None:
        report = json.loads(line)
        if report["type"] == "ready":
            self.ready = True
        elif report["type"] == "failed":
            self.failure = report["error"]
        else:
            self._reports.append(report)

    def _taken(self) -> list[dict[str, Any]]:
        taken, self._reports = self._reports, []
        return taken

    def wait(self, timeout_s: float) -> None:
        """Return when it is ready.

        Raises:
            PipelineError: it is not by then, or never will be; the process has ended.
        """
        until, said = time.monotonic() + timeout_s, select.poll()
        said.register(self.stdout, select.POLLIN)
        earlier: list[dict[str, Any]] = []
        while not self.ready:
            left_s = max(0.0, until - time.monotonic())
            came = said.poll(1000 * left_s)
            reports = self.read() if came else None
            if reports is None and not self.ready:
                why = self.failure or ("it died at once" if came else f"it was not ready after {timeout_s:g} s")
                self.stop()
                raise PipelineError(f"the feeder did not start: {why}")
            earlier += reports or []
        self._reports = earlier

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
        if not self.ready:  # whatever it is busy with, nobody has been given anything yet
            self._process.kill()
        self._say_goodbye()
        if (rest := self._rest(10.0)) is None:
            self._process.kill()
            rest = self._rest(None) or b""
        self._wait()
        self._process.stdout.close()
        if self._process.returncode:
            self._clear_away()
        for line in (self._buffer + rest).split(b"\n"):
            if line.endswith(b"}"):
                self._take(line)
        return self._taken()

    def _say_goodbye(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # what was still to be said to one that has gone
            self._process.stdin.close()

    def _rest(self, timeout_s: float | None) -> bytes | None:
        """What it says until it ends; None where it does not."""
        said, until = b"", None if timeout_s is None else time.monotonic() + timeout_s
        speaks = select.poll()
        speaks.register(self.stdout, select.POLLIN)
        while speaks.poll(None if until is None else max(0.0, 1e3 * (until - time.monotonic()))):
            got = os.read(self.stdout, 1 << 16)
            if not got:
                return said
            said += got
        self._buffer += said
        return None

    def _wait(self) -> None:
        with contextlib.suppress(ChildProcessError):  # it was waited for, or this program ignores SIGCHLD
            _, status, used = os.wait4(self._process.pid, 0)
            self._process.returncode = os.waitstatus_to_exitcode(status)
            self.cpu_s = used.ru_utime + used.ru_stime
        self._process.wait()

    def _clear_away(self) -> None:
        """Remove what a feeder that was killed could not remove itself."""
        if self._own_directory:
            shutil.rmtree(os.path.dirname(self.address), ignore_errors=True)
        elif not ipc.listening(self.address):
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
    prepare_timeout_s: float
    cache: Literal["memory", "disk"] | None
    cache_bytes: int | None
    cache_dir: str | os.PathLike[str] | None
    poison: bool
    peers: Peers | None
    design: str
    preparers: int | None


def spawn(
    pipeline: Pipeline,
    *,
    every_s: float = 1.0,
    start_timeout_s: float | None = START_S,
    deadly: Mapping[str, Mapping[int, int]] | None = None,
    **options: Unpack[Options],
) -> FeederProcess:
    """Start a feeder process and wait until it has begun.

    Args:
        every_s: seconds between its reports.
        start_timeout_s: how long that may take; None does not wait for it (`FeederProcess.wait`).
        deadly: index -> code (`pipelines.prepare.deadly_records`) of records that nobody is to prepare, of
        `"ring"` and of each
            resident set; with what the pipelines know themselves.
        options: `Feeder`'s.

    Raises:
        TypeError: `Feeder` has no such option.
        PipelineError: another feeder listens at the address; the pipeline cannot be prepared; says why.
    """
    inspect.signature(Feeder).bind(pipeline, **options)
    checks.resident(options.get("resident"))
    if (resident := options.get("resident")) is not None:
        options["resident"] = dict(resident)  # whatever mapping it is
    address = options.pop("address", None)
    directory = ipc.new_directory() if address is None else None
    try:
        address = checks.path("address", os.path.join(directory, "socket") if directory else address)
        process = _start(pipeline, options, _known(pipeline, options, deadly or {}), every_s, address, directory)
    except BaseException:
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)
        raise
    feeder = FeederProcess(process, address, own_directory=directory is not None)
    if start_timeout_s is not None:
        feeder.wait(start_timeout_s)
    return feeder


def _sets(pipeline: Pipeline, options: Options) -> dict[str, Pipeline]:
    return {**(options.get("resident") or {}), "ring": pipeline}


def _known(
    pipeline: Pipeline, options: Options, deadly: Mapping[str, Mapping[int, int]]
) -> dict[str, dict[int, int]]:
    """Of each set, the records that nobody is to prepare."""
    sets = _sets(pipeline, options).items()
    return {name: {**each.hazards.deadly, **deadly.get(name, {})} for name, each in sets}


def _start(
    pipeline: Pipeline,
    options: Options,
    deadly: dict[str, dict[int, int]],
    every_s: float,
    address: str,
    directory: str | None,
) -> subprocess.Popen[bytes]:
    listener = ipc.listen(address)
    try:
        payload = memory_pickle.dump((pipeline, options, deadly, every_s, directory))
        try:
            handed = (payload, listener.fileno())
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "pipelines.feeder.process", *map(str, handed)],
                pass_fds=handed,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=child_environment(),
            )
        finally:
            os.close(payload)
    except BaseException:
        os.unlink(address)
        raise
    finally:
        listener.close()


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
    payload, listening = map(int, arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when we end
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    reports, started = _Reports(), threading.Event()
    end_with_parent(started)
    listener = socket.socket(fileno=listening)
    ipc.keep_from_children(listener)
    pipeline, options, deadly, every_s, directory = memory_pickle.load(payload)
    os.close(payload)
    for name, each in _sets(pipeline, options).items():
        each.hazards.deadly.update(deadly[name])
    with contextlib.ExitStack() as leaving:
        if directory is not None:
            leaving.callback(shutil.rmtree, directory, ignore_errors=True)
        try:
            feeder = leaving.enter_context(Feeder(pipeline, listener=listener, **options))
        except Exception as error:
            reports.say("failed", error=f"{type(error).__name__}: {error}")
            return 1
        started.set()
        reports.say("ready")
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
        feeder.close()
        reports.state(feeder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
