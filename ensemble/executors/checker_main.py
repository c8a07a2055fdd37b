"""The main program of a node's checker: it compares served samples with what members' own pipelines prepare.

It serves one member after another, with that member's environment, and sees no GPU (docs/decisions/0042). A
request is the message `check` with the descriptor of memory that holds `ServedSample.pack`; the answer is
`result`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import mmap
import os
import select
import signal
import socket
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from ensemble.meter.memory import data_gb
from ensemble.spec import Ensemble
from ensemble.store import RunDir
from pipelines.errors import PipelineError
from pipelines.ipc import messages
from pipelines.verification.checker import SampleChecker, ServedSample
from pipelines.verification.compare import CheckResult

#: Pipelines are kept, with what they have opened, while they are few and have made this process little larger.
MOST_KEPT, MOST_KEPT_GB = 64, 0.25


class Checker:
    """Compares the samples of the members of one run.

    Args:
        ensemble: the run's declaration.
    """

    def __init__(self, ensemble: Ensemble) -> None:
        self._ensemble = ensemble
        self._checkers: OrderedDict[str, SampleChecker] = OrderedDict()  # the last used last
        self._least_gb = data_gb()

    def check(self, packed: bytes) -> CheckResult:
        """Compares one sample.

        Args:
            packed: it, with `split`, `params`, `is_exact` and `environment` of the member.
        """
        served, about = ServedSample.unpack(packed)
        environment = {**about["environment"], "CUDA_VISIBLE_DEVICES": ""}
        if dict(os.environ) != environment:
            os.environ.clear()
            os.environ.update(environment)
        return self._find_checker(about).check(served)

    def _find_checker(self, about: Mapping[str, Any]) -> SampleChecker:
        is_made = about["split"] == "train" and callable(self._ensemble.train)  # of these params
        key = json.dumps([about["split"], about["params"] if is_made else None, about["is_exact"]], sort_keys=True)
        if key not in self._checkers:
            if about["split"] == "train":
                pipeline = self._ensemble.pipeline(about["params"])
            else:
                pipeline = getattr(self._ensemble, about["split"]).without_randomness()
            self._checkers[key] = SampleChecker(pipeline, is_exact=about["is_exact"])
        self._checkers.move_to_end(key)
        while len(self._checkers) > MOST_KEPT or (len(self._checkers) > 1 and self._has_grown()):
            self._checkers.popitem(last=False)
        return self._checkers[key]

    def _has_grown(self) -> bool:
        return data_gb() - self._least_gb > MOST_KEPT_GB


def main(descriptor: int, executor: int, run_dir: str) -> int:
    """Serve requests until the executor ends.

    Args:
        descriptor: of the listening socket.
        executor: process id of the executor.
        run_dir: the run directory, as a path on this node.
    """
    import torch

    torch.set_num_threads(1)
    listener = socket.socket(fileno=descriptor)
    listener.set_inheritable(False)
    with contextlib.suppress(PermissionError):
        os.setpgid(0, 0)
    parent = os.pidfd_open(executor)
    find_checker = functools.cache(lambda: Checker(RunDir(run_dir).load_ensemble(takes_settings=True)))
    members: dict[int, socket.socket] = {}
    waited = select.poll()
    for descriptor_waited in (parent, listener.fileno()):
        waited.register(descriptor_waited, select.POLLIN)
    while True:
        ready = {fd for fd, _ in waited.poll()}
        if parent in ready:
            os.killpg(0, signal.SIGKILL)
        if listener.fileno() in ready:
            try:
                connection, _ = listener.accept()
            except OSError:  # it has gone again
                continue
            if _is_of_this_user(connection):
                members[connection.fileno()] = connection
                waited.register(connection.fileno(), select.POLLIN)
            else:
                connection.close()
        for fd in ready & members.keys():
            try:
                message, memory = messages.receive_with_descriptor(members[fd])
                result = answer(message, memory, find_checker)
                messages.send(members[fd], messages.pack("result", found=result.as_record()))
            except messages.ConnectionLost:
                waited.unregister(fd)
                members.pop(fd).close()


def answer(message: bytes, memory: int | None, find_checker: Callable[[], Checker]) -> CheckResult:
    """Compares the sample of a request; whatever is wrong with it, or happens, there is an answer.

    Args:
        message: `check`, with the seconds that this may take, `limit_s`; after that the process ends.
        memory: the descriptor that came with it, which is closed.
    """
    try:
        faulthandler.dump_traceback_later(messages.unpack(message)["limit_s"], exit=True)
        with mmap.mmap(-1 if memory is None else memory, 0, prot=mmap.PROT_READ) as packed:
            return find_checker().check(bytes(packed))
    except PipelineError as error:
        return CheckResult(kind="left_out", detail=str(error))
    except (Exception, SystemExit) as error:  # of the user's code
        return CheckResult(kind="left_out", detail=f"{type(error).__name__}: {error}")
    finally:
        faulthandler.cancel_dump_traceback_later()
        if memory is not None:
            os.close(memory)


def _is_of_this_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", credentials)[1] == os.getuid())
