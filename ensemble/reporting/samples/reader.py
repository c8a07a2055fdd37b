"""Reads the records of samples in a child process, whose memory and time are limited.

Reading a record runs the user's code (sources, stages) and decodes what others have made. All of that happens in
the child: it may hang, take memory, print, or end, and the server of the page does not notice more than that. It
is kept for a while, as importing torch takes seconds, and for one run only: modules of two may have one name.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ensemble.reporting.samples.targets import digest_values
from ensemble.store import RunDir, StoreError

if TYPE_CHECKING:
    from ensemble.reporting.samples.ranking import Ranking
    from ensemble.store import RunState

#: What a child may hold beside its interpreter, with torch and the run's declaration; how long it may take to
#: start and to load the declaration, for one record, and for all of a request; how often it is started for a
#: request; how long it is kept afterwards.
MEMORY_GB, LOAD_S, RECORD_S, REQUEST_S, MOST_STARTS, IDLE_S = 3.0, 60.0, 10.0, 90.0, 4, 60.0
WATCH_S = 0.25
MOST_SAMPLES = 24
#: Bytes of one answer, and of a picture in it.
MOST_BYTES, MOST_PICTURE = 4 * 2**20, 512 * 2**10
_PICTURES = {"data:image/png;base64,": b"\x89PNG\r\n\x1a\n", "data:image/jpeg;base64,": b"\xff\xd8\xff"}


class Field(msgspec.Struct, forbid_unknown_fields=True):
    """One field of a record, as `ensemble.reporting.samples.fields` describes it."""

    name: str
    text: str
    picture: str | None = None
    lines: list[str] = []


class Answer(msgspec.Struct, forbid_unknown_fields=True):
    """What a child says (`reader_main`)."""

    index: int | None = None
    fields: list[Field] | None = None
    error: str | None = None
    note: str | None = None
    end: bool = False


class _Ended(Exception):
    """A child has ended, or is to be.

    Attributes:
        why: for the user.
        is_of_record: whether that happened while it read a record, and not before.
    """

    def __init__(self, why: str, is_of_record: bool = False) -> None:
        super().__init__(why)
        self.why, self.is_of_record = why, is_of_record


@dataclass
class Records:
    """The records of a request.

    Attributes:
        records: by the index of the sample: its `fields`, or why it is not shown, `error`.
        note: what to know of all of them.
        missing: why there are none; None where there are.
    """

    records: dict[str, dict[str, Any]] = field(default_factory=dict)
    note: str = ""
    missing: str | None = None


class RecordReader:
    """Reads records, one request after the other; any thread may call it.

    Args:
        memory_gb, load_s, record_s, request_s, idle_s: the limits of a child, see above.
    """

    def __init__(
        self,
        memory_gb: float = MEMORY_GB,
        load_s: float = LOAD_S,
        record_s: float = RECORD_S,
        request_s: float = REQUEST_S,
        idle_s: float = IDLE_S,
    ) -> None:
        self._memory_gb, self._load_s, self._record_s = memory_gb, load_s, record_s
        self._request_s, self._idle_s = request_s, idle_s
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._timer: threading.Timer | None = None
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """Of the child that is kept; None where there is none."""
        child = self._child
        return None if child is None else child.process.pid

    def read(self, run_dir: RunDir, state: RunState, ranking: Ranking, indices: Sequence[int]) -> Records:
        """The records of some samples of the evaluated split.

        Args:
            indices: of the samples, at most `MOST_SAMPLES`; those that were not predicted are left out.
        """
        shown = ranking.evaluated.shown
        places = np.searchsorted(shown.index, indices)  # it ascends
        rows = {index: row for index, row in zip(indices, places.tolist(), strict=True) if row < len(shown.index)}
        wanted = [index for index, row in rows.items() if shown.index[row] == index][:MOST_SAMPLES]
        digests = {
            index: None if shown.target is None else digest_values(shown.target[rows[index]], shown.task.kind)
            for index in wanted
        }
        request = {
            "split": ranking.evaluated.split,
            "task": shown.task.kind,
            "data": state.header.data or {},
        }
        try:
            run_dir.check_owners(run_dir.ensemble_file)  # before a process is started for it
        except (StoreError, OSError) as error:
            return Records(missing=f"The records are not read: {error}.")
        with self._lock:
            if self._is_closed:
                return Records(missing="The server ends.")
            self._stop_timer()
            try:
                return self._read(run_dir, request, digests)
            finally:
                self._start_timer()

    def _read(self, run_dir: RunDir, request: Mapping[str, Any], digests: Mapping[int, str | None]) -> Records:
        found, todo = Records(), list(digests)
        deadline = time.monotonic() + self._request_s
        for _ in range(MOST_STARTS):
            try:
                child = self._find_child(run_dir)
                samples = [[index, digests[index]] for index in todo]
                for answer in child.ask({**request, "samples": samples}, len(todo), deadline):
                    if answer.index is not None and answer.index in todo:
                        todo.remove(answer.index)
                        found.records[str(answer.index)] = _clean(answer)
                    elif answer.error is not None:
                        return Records(missing=f"The records are not read: {answer.error}.")
                    elif answer.note is not None:
                        found.note = answer.note
                return found
            except _Ended as error:
                self._end_child()
                if not error.is_of_record or not todo:
                    return Records(missing=f"The records are not read: {error.why}.")
                found.records[str(todo.pop(0))] = {"error": error.why}
                if not todo or time.monotonic() > deadline:
                    break
        found.records |= {
            str(index): {"error": "it was not read any more: others took too long"} for index in todo
        }
        return found

    def _find_child(self, run_dir: RunDir) -> _Child:
        if self._is_closed:
            raise _Ended("the server ends")
        of = (str(run_dir.path), _stamp(run_dir.ensemble_file))
        if self._child is not None and (self._child.of != of or self._child.has_ended()):
            self._end_child()
        if self._child is None:
            self._child = _Child(of, self._memory_gb, self._load_s, self._record_s)
        return self._child

    def _end_child(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None

    def _start_timer(self) -> None:
        if self._child is not None and not self._is_closed:
            self._timer = threading.Timer(self._idle_s, self._end_idle)
            self._timer.daemon = True
            self._timer.start()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_idle(self) -> None:
        with self._lock:
            if self._timer is threading.current_thread():
                self._timer = None
                self._end_child()

    def close(self) -> None:
        """Ends the child, also in the middle of a request."""
        self._is_closed = True
        child = self._child
        if child is not None:
            child.kill()
        with self._lock:
            self._stop_timer()
            self._end_child()


def _stamp(path: Path) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_ino, found.st_mtime_ns


class _Child:
    """One child process: `ensemble.reporting.samples.reader_main`.

    Args:
        of: what it reads: the run directory, and what tells its declaration from another one.
    """

    def __init__(self, of: tuple[str, tuple[int, int]], memory_gb: float, load_s: float, record_s: float) -> None:
        from pipelines.ipc.child_processes import child_environment

        self.of = of
        self._memory_gb, self._load_s, self._record_s = memory_gb, load_s, record_s
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "ensemble.reporting.samples.reader_main"]
        with theirs:
            self.process = subprocess.Popen(
                [*command, str(theirs.fileno()), of[0], str(memory_gb)],
                stdin=subprocess.PIPE,  # by whose end it sees that of this process
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=child_environment() | {"CUDA_VISIBLE_DEVICES": ""},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._connection, self._received = ours, b""
        ours.setblocking(False)
        self._pidfd = os.pidfd_open(self.process.pid)

    def ask(self, request: Mapping[str, Any], samples: int, deadline: float) -> Iterator[Answer]:
        """Sends a request; yields the answers to it as they come.

        Raises:
            _Ended: the child has ended, or was ended here; with the reason, and whether it read a record.
        """
        is_reading, read = False, 0
        until = min(deadline, time.monotonic() + self._load_s)
        self._send(msgspec.json.encode(request) + b"\n", until)
        while True:
            line = self._receive(until, is_reading=is_reading)
            try:
                answer = msgspec.json.decode(line, type=Answer)
            except msgspec.MsgspecError as error:
                raise _Ended(f"its answer is not one ({str(error)[:100]})", is_reading) from None
            if answer.end:
                return
            is_reading, read = True, read + (answer.index is not None)
            until = min(deadline, time.monotonic() + self._record_s)
            yield answer
            is_reading = read < samples

    def _send(self, data: bytes, until: float) -> None:
        while data:
            try:
                data = data[self._connection.send(data) :]
            except BlockingIOError:
                self._wait(selectors.EVENT_WRITE, until, is_reading=False)
            except OSError:
                raise _Ended(self._describe_end()) from None

    def _receive(self, until: float, *, is_reading: bool) -> bytes:
        while b"\n" not in self._received:
            if len(self._received) > MOST_BYTES:
                raise _Ended("what it holds is too large to be shown", is_reading)
            try:
                piece = self._connection.recv(2**18)
            except BlockingIOError:
                self._wait(selectors.EVENT_READ, until, is_reading=is_reading)
                continue
            except OSError:
                piece = b""
            if not piece:
                raise _Ended(self._describe_end(), is_reading)
            self._received += piece
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _wait(self, event: int, until: float, *, is_reading: bool) -> None:
        """Waits until the connection is ready or the child has ended, and looks at its memory meanwhile."""
        from ensemble.meter.memory import held_memory_gb

        with selectors.DefaultSelector() as selector:
            selector.register(self._connection, event)
            selector.register(self._pidfd, selectors.EVENT_READ)
            while not (ready := selector.select(WATCH_S)):
                held_gb = held_memory_gb(self.process.pid) or 0.0
                if held_gb > self._memory_gb + 0.5:  # shared memory and further processes, which no limit counts
                    raise _Ended(f"reading it took more than {self._memory_gb:g} GiB of memory", is_reading)
                if time.monotonic() > until:
                    limit = self._record_s if is_reading else self._load_s
                    what = "reading it" if is_reading else "loading the run's declaration"
                    raise _Ended(f"{what} took longer than {limit:g} s", is_reading)
            if all(key.fileobj == self._pidfd for key, _ in ready):
                with contextlib.suppress(OSError):
                    if self._connection.recv(1, socket.MSG_PEEK):
                        return
                raise _Ended(self._describe_end(), is_reading)

    def has_ended(self, wait_s: float = 0.0) -> bool:
        """Whether the process has ended. It is not waited for: until then its number is of no other process."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._pidfd, selectors.EVENT_READ)
            return bool(selector.select(wait_s))

    def _describe_end(self) -> str:
        if not self.has_ended(WATCH_S):
            return "the process that read it closed its connection"
        found = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        assert found is not None
        said = f"exit status {found.si_status}" if found.si_code == os.CLD_EXITED else f"signal {found.si_status}"
        return f"the process that read it ended ({said}); its memory is limited to {self._memory_gb:g} GiB"

    def kill(self) -> None:
        """Kills it, all of its group, and what it has started in other groups."""
        import psutil

        from ensemble.executors.spawn import kill_group

        started: Iterable[psutil.Process] = ()
        with contextlib.suppress(psutil.Error):
            started = psutil.Process(self.process.pid).children(recursive=True)
        kill_group(self.process.pid)
        for each in started:
            with contextlib.suppress(psutil.Error):
                each.kill()

    def close(self) -> None:
        """Ends it."""
        self.kill()
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self._connection.close()
        os.close(self._pidfd)


def _clean(answer: Answer) -> dict[str, Any]:
    """A record as the page gets it, with pictures that are PNG or JPEG and nothing else."""
    if answer.fields is None:
        return {"error": (answer.error or "")[:1000]}
    fields: list[dict[str, Any]] = []
    for each in answer.fields[:100]:
        shown: dict[str, Any] = {"name": each.name[:1000], "text": each.text[:2000]}
        if each.picture is not None and _is_picture(each.picture):
            shown["picture"] = each.picture
        if each.lines:
            shown["lines"] = [line[:10_000] for line in each.lines[:4]]
        fields.append(shown)
    return {"fields": fields}


def _is_picture(uri: str) -> bool:
    head = uri.partition(",")[0] + ","
    if head not in _PICTURES or len(uri) > MOST_PICTURE:
        return False
    try:
        return base64.b64decode(uri[len(head) :], validate=True).startswith(_PICTURES[head])
    except (binascii.Error, ValueError):
        return False
