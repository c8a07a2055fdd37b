"""Programs in copies of one process that has imported what they need; NVIDIA's library is a stand-in for each."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kit import nvml_stand_in

ROOT = Path(__file__).resolve().parents[2]

#: Forks a process for each message, which has its code, its environment, and with it its standard streams.
SERVER = """
import contextlib, json, os, socket, sys, traceback
import ensemble.executors.host, ensemble.meter.gpu_activity, ensemble.meter.gpus, ensemble.meter.power

server = socket.socket(fileno=int(sys.argv[1]))
while True:
    message, streams, _, _ = socket.recv_fds(server, 2**16, 3)
    if not message:
        break
    if os.fork() == 0:
        server.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        code, environment = json.loads(message)
        os.environ.update(environment)
        try:
            exec(code, {"__name__": "__main__"})
            sys.stdout.flush()
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    for stream in streams:
        os.close(stream)
    with contextlib.suppress(ChildProcessError):
        while os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG) is not None:
            pass
with contextlib.suppress(ChildProcessError):
    while True:
        os.wait()
"""


class Program:
    def __init__(self, server: socket.socket, code: str, environment: dict[str, str]) -> None:
        (stdin, to_it), (from_it, stdout) = os.pipe(), os.pipe()
        socket.send_fds(server, [json.dumps([code, environment]).encode()], [stdin, stdout, 2])
        os.close(stdin)
        os.close(stdout)
        self.stdin, self.stdout = os.fdopen(to_it, "w"), os.fdopen(from_it)

    def ask(self, line: str) -> str:
        self.stdin.write(line + "\n")
        self.stdin.flush()
        return self.stdout.readline()

    def end(self) -> str:
        """Close its input; what it says until it has ended."""
        self.stdin.close()
        with self.stdout:
            return self.stdout.read()


class Programs:
    """Starts programs on a node with some GPUs, which are as the file `state` says."""

    def __init__(self, server: socket.socket) -> None:
        self._server = server

    def start(self, code: str, gpus: str, state: Path | None = None, **environment: str) -> Program:
        stand_in = {"STAND_IN_GPUS": gpus} | ({} if state is None else {"STAND_IN_STATE": str(state)})
        return Program(self._server, code, stand_in | environment)

    def run(self, code: str, gpus: str, state: Path | None = None, **environment: str) -> str:
        return self.start(code, gpus, state, **environment).end()


@contextmanager
def serve(folder: Path) -> Iterator[Programs]:
    """A process that starts programs; the stand-in is built into `folder`."""
    usual = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environment = {**usual, **nvml_stand_in.build(folder), "PYTHONPATH": str(ROOT)}
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            command = [sys.executable, "-c", SERVER, str(theirs.fileno())]
            process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
        try:
            yield Programs(ours)
        finally:
            ours.close()  # at which the process ends
            process.wait(600)
