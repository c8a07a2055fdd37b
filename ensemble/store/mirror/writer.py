"""Writes a mirror: what the log names, then the log, then the head that makes it count; removals come last."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from ensemble.events import RunFinished
from ensemble.store.errors import StoreError
from ensemble.store.event_handlers import apply_event
from ensemble.store.files import make_read_error
from ensemble.store.follower import LogFollower, LogReplacedError
from ensemble.store.log_lines import end_of_events
from ensemble.store.member_log import HEAD_BYTES, LIMIT_BYTES, TAIL_BYTES, read_pieces
from ensemble.store.mirror.bucket import Bucket, MirrorError
from ensemble.store.mirror.claim import (
    FencedError,
    MirrorOptions,
    claim_mirror,
    continues,
    hash_file,
    hash_log,
    list_code,
    read_claim,
    read_head,
)
from ensemble.store.mirror.layout import (
    HEAD,
    SEGMENT_BYTES,
    STARTS,
    MirrorClaim,
    MirrorHead,
    Stored,
    claim_of,
    find_merge,
    is_of_run,
    prefix_of,
    read_numbers,
)
from ensemble.store.mirror.status import MirrorStatus, is_fetched, load_status, save_status
from ensemble.store.packs import find_home
from ensemble.store.rundir import RunDir
from ensemble.store.state import RunState

log = logging.getLogger(__name__)

#: Files that are held open together: what the run removes meanwhile can still be read.
MOST_OPEN = 256
#: How often the log is read again for files that the run has removed meanwhile, before what is there is written.
MOST_ROUNDS = 10
#: Between two copies of what a member prints, and between two notes on how far the mirror is.
OUTPUT_S, NOTE_S = 60.0, 2.0

#: Device, inode, size and time of the last change in nanoseconds: of a file that was read.
_Stamp = tuple[int, int, int, int]


class MirrorWriter:
    """Writes the mirror of a run.

    Args:
        run_dir: of the run, which has started.
        options: by `claim_mirror`.
    """

    def __init__(self, run_dir: RunDir, options: MirrorOptions) -> None:
        self._run_dir, self._options = run_dir, options
        self._bucket, self._prefix = Bucket(options.url), prefix_of(options.start)
        self._status = MirrorStatus(
            url=options.url,
            code=options.code,
            start=options.start,
            token=options.token,
            is_fetched=is_fetched(run_dir),
        )
        known = load_status(run_dir)
        self._saved: MirrorStatus | None = None
        if known is not None and known.token == options.token:
            self._status = self._saved = known
        self._fenced: FencedError | None = None
        self._said_gone: set[str] = set()
        self._run_id = self._name = ""
        self._is_open, self._noted_at, self._output_at = False, 0.0, 0.0
        self._older: dict[str, str] = {}  # objects of earlier starts, by digest, and their folders
        self._own: set[str] = set()  # objects of this start
        self._seen: dict[str, tuple[_Stamp, Stored]] = {}
        self._head: MirrorHead | None = None
        self._begin_log()

    def _begin_log(self) -> None:
        self._state, self._log = RunState(), LogFollower(self._run_dir)
        self._segments: list[Stored] = []
        self._hash = hashlib.sha256()

    def sync(self, *, is_last: bool = False) -> None:
        """Bring the mirror to what the log names now.

        Args:
            is_last: the run has ended, and nothing more will be written.

        Raises:
            FencedError: another start of the run has taken over; nothing was changed.
            MirrorError: the store does not do what it is asked; all that was copied counts for the next call.
            StoreError: the log or a file cannot be read.
        """
        try:
            self._sync(is_last=is_last)
        except (StoreError, OSError) as error:
            is_fenced = isinstance(error, FencedError)
            self._note(error=" ".join(str(error).split())[:300], is_fenced=is_fenced)
            raise

    def _sync(self, *, is_last: bool) -> None:
        self._open()
        files: dict[str, Stored] = {}
        gone, lost = set[str](), set[str]()
        for _ in range(MOST_ROUNDS):
            self._read_log()
            gone = self._copy_files(files, is_last=is_last)
            # A file that the log named when it was read, and that it names no more, is no loss. One that is gone
            # though the log was read again and names it still, is: the run finds that, too, and goes on without.
            if gone <= lost or end_of_events(self._run_dir.events) <= self._log.offset:
                break
            lost = gone
        if gone - self._said_gone:
            log.warning("%s: the log names files that are not there: %s", self._run_dir.path, sorted(gone)[:3])
            self._said_gone |= gone
        if self._head is None or files != self._head.files or self._log.offset != self._head.log_bytes:
            self._copy_log()
            self._write_head(files)
            self._remove_retired()
        is_whole = is_last and end_of_events(self._run_dir.events) == self._log.offset
        done: dict[str, Any] = {"files": 0, "bytes": 0, "log_bytes": self._log.offset, "since": None, "error": ""}
        self._note(**done, is_whole=is_whole)

    # -- beginning ----------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """MirrorClaim the start, and learn what is there already; once."""
        if self._fenced is not None:
            raise self._fenced
        if self._is_open:
            return
        bucket, options, run_dir = self._bucket, self._options, self._run_dir
        self._run_id, self._name = run_dir.info["run_id"], run_dir.info["name"]
        claim = MirrorClaim(
            run_id=self._run_id,
            name=self._name,
            token=options.token,
            host=socket.gethostname(),
            pid=os.getpid(),
            t=time.time(),
        )
        bucket.create(claim_of(options.start), msgspec.json.encode(claim))
        owner = read_claim(bucket, options.start)  # also where it was created: a store may know no such request
        if owner is None or owner.token != options.token:
            self._raise_fenced(options.start)
        numbers = self._check_fence()
        head = read_head(bucket, numbers)
        self._own = {name for name in bucket.list(self._prefix) if name != HEAD}  # of this process, which has died
        if head is not None and head.start == options.start and continues(run_dir, head):
            self._segments, self._head = list(head.log), head
            self._hash = hash_log(run_dir.events, head.log_bytes)
        elif head is not None and head.start != options.start:
            self._older = {each.digest: prefix_of(head.start) for each in head.files.values()}
        self._is_open = True

    def _check_fence(self) -> list[int]:
        numbers = read_numbers(self._bucket.list(STARTS))
        if numbers and numbers[-1] > self._options.start:
            self._raise_fenced(numbers[-1])
        return numbers

    def _raise_fenced(self, start: int) -> NoReturn:
        claim = read_claim(self._bucket, start)
        by = "" if claim is None else f" by process {claim.pid} on {claim.host}"
        self._fenced = FencedError(
            f"{self._bucket.url} is written by start {start} of the run{by}; this one, start "
            f"{self._options.start}, writes nothing there any more"
        )
        raise self._fenced

    # -- files --------------------------------------------------------------------------------------------------

    def _read_log(self) -> None:
        try:
            for events, _ in self._log.read():
                for event in events:
                    apply_event(self._state, event)
        except LogReplacedError:
            self._begin_log()
            self._read_log()

    def _list_files(self, *, is_last: bool) -> Iterator[tuple[str, bool]]:
        """Yields the files of the run as the log has it, and whether each must be there as the log names it."""
        run_dir, state = self._run_dir, self._state
        yield from ((name, True) for name in list_code(run_dir))
        yield from ((name, False) for name in state.files if name.startswith(f"{run_dir.data.name}/"))
        yield from ((name, True) for name in state.packs)
        for member in state.members.values():
            folder, is_loose = f"members/{member.id}", not member.is_packed
            yield from ((f"{folder}/{name}", is_loose) for name, _ in member.list_checkpoints())
            yield f"{folder}/{run_dir.initial_weights(member.id).name}", False
            if member.state == "finished":
                yield from (
                    (f"{folder}/predictions-{split}.safetensors", is_loose) for split in member.predictions or {}
                )
            yield f"{folder}/log.txt", False
        yield from ((path.name, False) for path in (run_dir.notes, run_dir.prior))
        if isinstance(state.ended, RunFinished) or is_last:
            yield from ((path.name, False) for path in (*run_dir.list_results(state), run_dir.result_digests))

    def _copy_files(self, files: dict[str, Stored], *, is_last: bool) -> set[str]:
        """Copy the files of the run that are not there yet.

        Args:
            files: is filled with all of them.

        Returns:
            Those that the log names and that are gone.
        """
        files.clear()
        known, new, gone = self._head.files if self._head else {}, [], set[str]()
        now = time.monotonic()
        copies_output = is_last or now >= self._output_at + OUTPUT_S
        for name, is_named in self._list_files(is_last=is_last):
            if not is_of_run(name):
                continue
            stamp = _read_stamp(self._run_dir.path / name)
            if stamp is None:
                gone |= {name} if is_named and self._is_gone(name) else set()
            elif name in self._seen and self._seen[name][0] == stamp and self._seen[name][1].digest in self._own:
                files[name] = self._seen[name][1]
            elif name.endswith("/log.txt") and not copies_output:
                files |= {name: known[name]} if name in known else {}
            else:
                new.append((name, _measure(name, stamp), is_named))
        self._output_at = now if copies_output else self._output_at
        self._note_backlog([size for _, size, _ in new])
        if new:
            self._check_fence()
        for at in range(0, len(new), MOST_OPEN):
            gone |= self._copy_open(new[at : at + MOST_OPEN], files)
        self._seen = {name: each for name, each in self._seen.items() if name in files}
        return gone

    def _is_gone(self, name: str) -> bool:
        """Whether a file that is not there is in no pack either, as far as the log was read."""
        path = self._run_dir.path / name
        home = find_home(path)
        return home == path or home.relative_to(self._run_dir.path).as_posix() not in self._state.packs

    def _copy_open(self, new: Sequence[tuple[str, int, bool]], files: dict[str, Stored]) -> set[str]:
        gone = set[str]()
        with contextlib.ExitStack() as stack:
            opened = []
            for name, size, is_named in new:
                try:
                    opened.append((name, size, stack.enter_context(open(self._run_dir.path / name, "rb"))))
                except FileNotFoundError:
                    gone |= {name} if is_named and self._is_gone(name) else set()
                except OSError as error:
                    raise make_read_error(self._run_dir.path / name, error) from None
            for name, size, file in opened:
                stamp = _stamp_of(os.fstat(file.fileno()))
                files[name] = self._copy_file(name, file)
                self._seen[name] = stamp, files[name]
                left = self._status.files - 1, max(0, self._status.bytes - size)
                self._note(is_due=time.monotonic() >= self._noted_at + NOTE_S, files=left[0], bytes=left[1])
        return gone

    def _copy_file(self, name: str, file: Any) -> Stored:
        if not name.endswith("/log.txt"):
            return self._put(hash_file(file.fileno()), file.fileno())
        with tempfile.TemporaryFile() as copy:  # the log of a member grows meanwhile, and its middle may be a hole
            for piece, _ in read_pieces(file):
                copy.write(piece)
            copy.flush()
            return self._put(hash_file(copy.fileno()), copy.fileno())

    def _put(self, stored: Stored, descriptor: int) -> Stored:
        if stored.digest in self._own:
            return stored
        target, older = f"{self._prefix}/{stored.digest}", self._older.get(stored.digest)
        try:
            if older is None:
                raise MirrorError("it was not copied before")
            self._bucket.copy(f"{older}/{stored.digest}", target)  # within the store
        except MirrorError:
            self._bucket.put_file(target, descriptor)
        self._own.add(stored.digest)
        return stored

    # -- the log, and what makes it count -----------------------------------------------------------------------

    def _copy_log(self) -> None:
        """Copy what is new of the log as segments, and merge small ones."""
        end, at = self._log.offset, sum(each.size for each in self._segments)
        while at < end:
            content = self._read_bytes(at, min(SEGMENT_BYTES, end - at))
            self._segments.append(self._put_segment(content))
            self._hash.update(content)
            at += len(content)
        first = find_merge([each.size for each in self._segments])
        if first < len(self._segments):
            size = sum(each.size for each in self._segments[first:])
            self._segments[first:] = [self._put_segment(self._read_bytes(end - size, size))]

    def _read_bytes(self, at: int, size: int) -> bytes:
        with open(self._run_dir.events, "rb") as file:
            content = os.pread(file.fileno(), size, at)
        if len(content) != size:
            raise StoreError(f"{self._run_dir.events} was cut")
        return content

    def _put_segment(self, content: bytes) -> Stored:
        stored = Stored(hashlib.sha256(content).hexdigest(), len(content))
        if stored.digest not in self._own:
            self._bucket.put(f"{self._prefix}/{stored.digest}", content)
            self._own.add(stored.digest)
        return stored

    def _write_head(self, files: dict[str, Stored]) -> None:
        self._check_fence()
        head = MirrorHead(
            run_id=self._run_id,
            name=self._name,
            start=self._options.start,
            t=time.time(),
            log=list(self._segments),
            log_digest=self._hash.hexdigest(),
            files=dict(files),
        )
        self._bucket.put(f"{self._prefix}/{HEAD}", msgspec.json.encode(head))
        self._head = head

    def _remove_retired(self) -> None:
        """Remove the objects that the head names no more, and, after the first head, those of earlier starts."""
        assert self._head is not None
        kept = {each.digest for each in (*self._head.log, *self._head.files.values())}
        with contextlib.suppress(MirrorError):  # they take room, and no more; the next call tries again
            for digest in self._own - kept:
                self._bucket.remove(f"{self._prefix}/{digest}")
                self._own.discard(digest)
            if self._older or self._options.start > 1:
                claimed = {prefix_of(number) for number in read_numbers(self._bucket.list(STARTS))}
                for folder in self._bucket.list():
                    if folder in claimed and folder < self._prefix:
                        self._bucket.remove(folder, recursive=True)
                self._older = {}

    # -- how far it is ------------------------------------------------------------------------------------------

    def _note_backlog(self, sizes: Sequence[int]) -> None:
        """Say how many files are to be copied, and since when some are."""
        is_behind = bool(sizes) or self._head is None or self._log.offset > self._head.log_bytes
        since = self._status.since or time.time() if is_behind else None
        self._note(files=len(sizes), bytes=sum(sizes), since=since, is_whole=False)

    def _note(self, *, is_due: bool = True, **changes: Any) -> None:
        self._status = msgspec.structs.replace(self._status, **changes)
        if is_due and self._status != self._saved:
            self._noted_at, self._saved = time.monotonic(), self._status
            known = load_status(self._run_dir)
            if known is None or known.token == self._options.token:  # else a later start has claimed the mirror
                save_status(self._run_dir, self._status)


def complete_mirror(run_dir: RunDir, url: str | None) -> None:
    """Copy what the mirror of a run that has ended lacks, in this process.

    Args:
        url: as `claim_mirror` has it.

    Raises:
        MirrorError: the store does not do what it is asked.
        StoreError: as `claim_mirror` and `MirrorWriter.sync` raise it.
    """
    options = claim_mirror(run_dir, url)
    if options is not None:
        MirrorWriter(run_dir, options).sync(is_last=True)


def _read_stamp(path: Path) -> _Stamp | None:
    """What tells a regular file, and whether it has changed; None where there is none."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return _stamp_of(os.stat(path))
    return None


def _measure(name: str, stamp: _Stamp) -> int:
    """The bytes that are copied of a file: of the log of a member about what is kept of it."""
    size = stamp[2]
    return HEAD_BYTES + TAIL_BYTES if name.endswith("/log.txt") and size > LIMIT_BYTES else size


def _stamp_of(found: os.stat_result) -> _Stamp:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
