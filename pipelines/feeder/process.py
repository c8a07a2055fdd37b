"""Runs a feeder as a process of its own: `spawn` starts `python -m pipelines.feeder.process`.

The parent passes the pipelines through anonymous memory and reads reports, one JSON line each, from the process's
standard output. The process ends when its standard input closes, so it never outlives its parent.

The parent opens the listening socket and passes it on. Consumers may therefore connect at once and wait for the
first answer; if the process ends before that, their connections close.
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
from typing import Any

from pipelines.checks import check_path, check_resident
from pipelines.errors import PipelineError
from pipelines.feeder.server import Feeder
from pipelines.ipc import memory_pickle, messages
from pipelines.ipc.child_processes import START_S, child_environment, end_with_parent, reap
from pipelines.pipeline import Pipeline
from pipelines.workers.processes import list_descriptors, prepare_to_fork

VERSION = 1


class FeederProcess:
    """A running feeder process.

    Attributes:
        address: for `pipelines.attach`; the socket listens from the start.
        stdout: a descriptor to wait on before `read`.
        ready: whether the feeder has started: its pipeline can be prepared, and consumers get answers.
        failure: why it could not start, if it reported that.
        cpu_s: CPU-seconds of the process and its workers, after `stop`; None if unknown.
    """

    def __init__(self, process: subprocess.Popen[bytes], address: str, *, owns_directory: bool = False) -> None:
        assert process.stdout is not None
        self._process = process
        self._owns_directory = owns_directory
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
        """The reports since the last call; None when the process has ended."""
        try:
            received = os.read(self.stdout, 1 << 16)
        except BlockingIOError:
            return self._pop_reports()
        if not received:
            return self._pop_reports() or None
        *lines, self._buffer = (self._buffer + received).split(b"\n")
        for line in lines:
            self._parse_line(line)
        return self._pop_reports()

    def _parse_line(self, line: bytes) -> None:
        report = json.loads(line)
        if report["type"] == "ready":
            self.ready = True
        elif report["type"] == "failed":
            self.failure = report["error"]
        else:
            self._reports.append(report)

    def _pop_reports(self) -> list[dict[str, Any]]:
        reports, self._reports = self._reports, []
        return reports

    def wait(self, timeout_s: float) -> None:
        """Wait until it is ready.

        Raises:
            PipelineError: it is not ready in time, or has failed; the process has been ended.
        """
        until, output = time.monotonic() + timeout_s, select.poll()
        output.register(self.stdout, select.POLLIN)
        earlier: list[dict[str, Any]] = []
        while not self.ready:
            has_output = bool(output.poll(1000 * max(0.0, until - time.monotonic())))
            reports = self.read() if has_output else None
            if reports is None and not self.ready:
                reason = "its process has ended" if has_output else f"it was not ready after {timeout_s:g} s"
                reason = self.failure or reason
                self.stop()
                raise PipelineError(f"the feeder did not start: {reason}")
            earlier += reports or []
        self._reports = earlier

    def expect_readers(self, members: int) -> None:
        """Wait at the start gate for another number of members (`Feeder.set_expect`)."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):  # it has died, or was stopped
            self._process.stdin.write(json.dumps({"expect": members}).encode() + b"\n")
            self._process.stdin.flush()

    def stop(self) -> list[dict[str, Any]]:
        """End the process and return its last reports; its consumers continue alone."""
        assert self._process.stdin is not None and self._process.stdout is not None
        if self._process.stdout.closed:
            return []
        if not self.ready:  # it serves nobody yet
            self._process.kill()
        with contextlib.suppress(BrokenPipeError):  # unsent data to a process that has ended
            self._process.stdin.close()
        if (output_rest := self._read_rest(10.0)) is None:
            self._process.kill()
            output_rest = self._read_rest(None) or b""
        self.cpu_s = reap(self._process)
        self._process.stdout.close()
        if self._process.returncode:  # it has not removed its socket
            if self._owns_directory:
                shutil.rmtree(os.path.dirname(self.address), ignore_errors=True)
            elif not messages.is_listening(self.address):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self.address)
        for line in (self._buffer + output_rest).split(b"\n"):
            if line.endswith(b"}"):
                self._parse_line(line)
        return self._pop_reports()

    def _read_rest(self, timeout_s: float | None) -> bytes | None:
        """Read its output to the end; None if it does not end in time."""
        received_rest, until = b"", None if timeout_s is None else time.monotonic() + timeout_s
        output = select.poll()
        output.register(self.stdout, select.POLLIN)
        while output.poll(None if until is None else max(0.0, 1e3 * (until - time.monotonic()))):
            received = os.read(self.stdout, 1 << 16)
            if not received:
                return received_rest
            received_rest += received
        self._buffer += received_rest
        return None

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)


def spawn(
    pipeline: Pipeline,
    *,
    every_s: float = 1.0,
    start_timeout_s: float | None = START_S,
    poison_records: Mapping[str, Mapping[int, int]] | None = None,
    settings: Mapping[str, Any] | None = None,
    **options: Any,
) -> FeederProcess:
    """Start a feeder process and wait until it is ready.

    Args:
        every_s: seconds between its reports.
        start_timeout_s: how long to wait; None does not wait (`FeederProcess.wait`).
        poison_records: for `"ring"` and each resident set, index -> code of records
            that must not be prepared, in addition to those that the pipelines know.
        settings: of libraries (`find_settings`) that it has; None for those of this process.
        options: arguments of `Feeder`.

    Raises:
        TypeError: `Feeder` has no such option.
        PipelineError: another feeder listens at the address, or the pipeline cannot be prepared.
    """
    inspect.signature(Feeder).bind(pipeline, **options)
    resident = options.get("resident")
    check_resident(resident)
    resident = options["resident"] = dict(resident or {})  # any mapping can be pickled as a dict
    address = options.pop("address", None)
    directory = messages.create_directory() if address is None else None
    try:
        address = check_path("address", os.path.join(directory, "socket") if directory else address)
        extra_poison = poison_records or {}
        named = {**resident, "ring": pipeline}
        poison = {
            name: {**pipe.poison_records.codes, **extra_poison.get(name, {})} for name, pipe in named.items()
        }
        process = _start_process((pipeline, options, poison, every_s, directory), address, settings)
    except BaseException:
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)
        raise
    feeder = FeederProcess(process, address, owns_directory=directory is not None)
    if start_timeout_s is not None:
        feeder.wait(start_timeout_s)
    return feeder


def _start_process(
    arguments: tuple[Any, ...], address: str, settings: Mapping[str, Any] | None
) -> subprocess.Popen[bytes]:
    listener = messages.listen(address)
    try:
        payload = memory_pickle.dump(arguments, settings)
        try:
            inherited = (payload, listener.fileno())
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "pipelines.feeder.process", *map(str, inherited)],
                pass_fds=inherited,
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


class _ReportWriter:
    """Writes reports to this process's standard output; user code then prints to standard error."""

    def __init__(self) -> None:
        self._fd = os.dup(1)
        os.dup2(2, 1)
        os.register_at_fork(after_in_child=self._close_copy)

    def _close_copy(self) -> None:
        """Close a forked worker's copy of the pipe: with it the parent would not notice this process ending."""
        if self._fd >= 0:  # else in a process that the worker has forked
            os.close(self._fd)
            self._fd = -1

    def send(self, kind: str, **fields: Any) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._fd, json.dumps({"v": VERSION, "type": kind, **fields}).encode() + b"\n")

    def send_state(self, feeder: Feeder) -> None:
        stats = feeder.stats()
        pids = {"feed": os.getpid(), "prepare": stats.pop("workers")}
        self.send("feeder", pids=pids, cpu=stats.pop("cpu_s"), **stats)


def main(arguments: list[str]) -> int:
    """Run the feeder process; returns its exit status."""
    payload, listening = map(int, arguments)
    for number in (signal.SIGINT, signal.SIGUSR1):  # the parent decides when we end
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    reports, started = _ReportWriter(), threading.Event()
    end_with_parent(started)
    listener = socket.socket(fileno=listening)
    messages.close_in_children(listener)
    descriptors = list_descriptors()
    pipeline, options, known_poison, every_s, directory = memory_pickle.load(payload)
    os.close(payload)
    for name, pipe in {**options["resident"], "ring": pipeline}.items():
        pipe.poison_records.codes.update(known_poison[name])
    forks = prepare_to_fork(pipeline, descriptors)
    with contextlib.ExitStack() as cleanup:
        if directory is not None:
            cleanup.callback(shutil.rmtree, directory, ignore_errors=True)
        try:
            feeder = cleanup.enter_context(Feeder(pipeline, listener=listener, forks=forks, **options))
        except Exception as error:
            reports.send("failed", error=f"{type(error).__name__}: {error}")
            return 1
        started.set()
        reports.send("ready")
        while True:
            if select.select([0], [], [], every_s)[0]:
                message = os.read(0, 1 << 16)
                if not message:
                    break
                feeder.set_expect(json.loads(message.splitlines()[-1])["expect"])
            reports.send_state(feeder)
            if feeder.stats()["failure"] is not None:
                return 1
        reports.send_state(feeder)
        feeder.close()
        reports.send_state(feeder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
