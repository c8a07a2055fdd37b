"""Copies a run to an object store while it goes on; `ensemble.store.mirror_fetch` brings it back.

`manifest.json`, written last, names the object of each file, with its size and digest. No object is replaced by
another content, but for that of a file that grows (the log): what is beyond its size does not count.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
import uuid
from collections.abc import Iterator
from typing import Any, BinaryIO

import msgspec

from ensemble.store.digests import digest_blocks
from ensemble.store.errors import StoreError
from ensemble.store.event_log import EventLog, end_of_events
from ensemble.store.files import format_command
from ensemble.store.mirror_objects import (
    MANIFEST,
    Manifest,
    MirrorError,
    ObjectStore,
    Stored,
    check_url,
)
from ensemble.store.mirror_status import NO_MIRROR, MirrorOptions, MirrorStatus, load_status, save_status
from ensemble.store.rundir import RunDir

log = logging.getLogger(__name__)

EVENTS = "events.jsonl"
#: Files to which a run only appends.
GROWING = (EVENTS, "optuna.journal")
#: Files that are held open while others are sent, so that they can be sent when the run has removed them.
MOST_OPEN = 256
#: Seconds between two copies of what members print; bytes a second of the log, which is sent whole.
OUTPUT_S, LOG_RATE = 60.0, 1e6
LISTING_SHARE = 0.02  # of a core, at most, for listing files
OWNER_S = 5.0  # between two looks whether the run is copied from elsewhere, while files are sent

_OF_RUN = re.compile(
    r"events\.jsonl|run\.json|ensemble\.pkl|spec\.py|optuna\.journal"
    r"|report\.html|(?:ledger|results)\.json|(?:ledger|metrics)\.csv"
    r"|code/[0-9a-f]{16}/.+|data/[^/]+\.npy|base/(?:[0-9a-f]{64}\.pt|base\.json)"
    r"|members/[^/]+/(?:log\.txt|files/.+|(?:checkpoint|initial-weights|predictions)[^/]*\.safetensors)"
)
_IN_PROGRESS = re.compile(r"members/[^/]+/predictions-(?:.*-)?\d+\.safetensors")  # written in place by an attempt

#: Inode, size and time of the last change in nanoseconds; of the log its size alone.
Stamp = tuple[int, int, int]


class TakenOverError(StoreError):
    """The run went on elsewhere, and is copied to the address from there."""


def is_of_run(path: str) -> bool:
    """Whether a path is copied and fetched: requests, sockets, caches, loggers' and users' own files are not."""
    parts = path.split("/")
    is_plain = "\0" not in path and not {"", ".", ".."} & {*parts}
    ours = parts[:3] if parts[2:3] == ["files"] else parts  # in `member.folder` names may begin with a dot
    return (
        is_plain
        and not any(part[0] == "." for part in ours)
        and _OF_RUN.fullmatch(path) is not None
        and _IN_PROGRESS.fullmatch(path) is None
    )


def begin_mirror(run_dir: RunDir, url: str | None) -> MirrorOptions | None:
    """Check before anything trains that a run can be copied to an address, and take it over from earlier drivers.

    Args:
        url: None: the address of the last start, if it had one; "none": the run is not copied any more.

    Raises:
        SpecError: `url` is no address.
        TakenOverError: the address has a state of this run that this directory does not continue.
        StoreError: it has another run or other files, or cannot be written to.
    """
    status = load_status(run_dir)
    if url == NO_MIRROR:
        run_dir.mirror.unlink(missing_ok=True)
    url = url or (NO_MIRROR if status is None else status.url)
    if url == NO_MIRROR:
        return None
    store, manifest = find_mirror(url, run_dir.info["run_id"])
    if manifest is None:
        manifest = Manifest(run_id=run_dir.info["run_id"], name=run_dir.info["name"])
    _check_continues(run_dir, manifest, store.url)
    manifest.writer = uuid.uuid4().hex
    store.write(MANIFEST, [msgspec.json.encode(manifest)])
    save_status(run_dir, MirrorStatus(url=store.url))
    log.warning("the run is copied to %s", store.url)
    return MirrorOptions(store.url, manifest.writer)


def find_mirror(url: str, run_id: str | None) -> tuple[ObjectStore, Manifest | None]:
    """What is at an address to which a run can be copied; nothing is written.

    Args:
        run_id: of the run; None: it is a new one.

    Raises:
        SpecError: `url` is no address.
        StoreError: it has another run or other files.
    """
    store = ObjectStore(check_url(url))
    manifest = store.read_manifest()
    if manifest is None and (names := store.call("ls", detail=False)):
        name = names[0].rpartition("/")[2]
        raise StoreError(f"{url} is not empty and has no mirror ({name} ...): give an address below it")
    if manifest is not None and manifest.run_id != run_id:
        which = f"{manifest.name!r}, run id {manifest.run_id}"
        raise StoreError(f"{url} mirrors another run ({which}): give another address")
    return store, manifest


def _check_continues(run_dir: RunDir, manifest: Manifest, url: str) -> None:
    """Check that the log of a directory begins with the log of a manifest."""
    _, size, digest = manifest.files.get(EVENTS, ("", 0, ""))
    with open(run_dir.events, "rb") as events:
        if not size or digest_blocks(read_blocks(events, size)) == digest:
            return
    raise TakenOverError(
        f"the run at {url} went on elsewhere, so {run_dir.path} cannot continue it. "
        f"{format_command('fetch', url, 'NEW_DIR')} brings it here; or give another address, or --mirror none"
    )


class Copier:
    """Copies a run to the address that `begin_mirror` has taken.

    Attributes:
        behind: what is not there yet, and why.
    """

    def __init__(self, run_dir: RunDir, options: MirrorOptions) -> None:
        self._run_dir, self._store, self._writer = run_dir, ObjectStore(options.url), options.writer
        self.behind = load_status(run_dir) or MirrorStatus(url=options.url)
        self._sent: dict[str, tuple[Stamp, Stored]] = {}
        self._unnamed: set[str] = set()  # objects that were sent, or named before, and may have to be removed
        self._output_at = self._due_at = 0.0

    def copy(self, *, is_last: bool = False, is_now: bool = False) -> None:
        """Copy the files that are new or have changed, if there are any, with the log up to now.

        Args:
            is_last: the run has ended, and nothing more is written.
            is_now: do not wait, though the last copy was not long ago.

        Raises:
            TakenOverError: the run is copied from elsewhere; nothing is changed.
            StoreError: the store does not do what it is asked, or a file cannot be read; the next call goes on.
        """
        if not (is_last or is_now) and time.monotonic() < self._due_at:
            return
        began_s = time.thread_time()
        try:
            stamps = self._list_files(is_last=is_last)
            pause_s = max((time.thread_time() - began_s) / LISTING_SHARE, stamps[EVENTS][1] / LOG_RATE)
            self._due_at = time.monotonic() + pause_s
            sent = {path: stamp for path, (stamp, _) in self._sent.items()}
            changed = {path: stamp for path, stamp in stamps.items() if sent.get(path) != stamp}
            is_same = changed.keys() <= {EVENTS} and stamps.keys() == self._sent.keys()
            if is_same and self.behind.since is None and not is_last:
                return
            self._copy(stamps, changed)
        except (StoreError, OSError) as error:
            since = self.behind.since or time.time()
            self._note(error=" ".join(str(error).split())[:300], since=since, is_whole=False)
            raise
        is_whole = is_last and end_of_events(self._run_dir.events) == stamps[EVENTS][1]
        self._note(files=0, bytes=0, since=None, error="", is_whole=is_whole)

    def _list_files(self, *, is_last: bool) -> dict[str, Stamp]:
        """The files of the run, the log last; what members print is as it was sent until a minute later.

        A run writes a file before its log names it, and keeps a checkpoint and the one before. So what the log
        names up to a byte is there when it is listed after that byte was found.
        """
        end = end_of_events(self._run_dir.events)
        stamps: dict[str, Stamp] = {}
        is_due = is_last or time.monotonic() >= self._output_at + OUTPUT_S
        self._output_at = time.monotonic() if is_due else self._output_at
        for folder, folders, names in os.walk(self._run_dir.path, onerror=_raise):
            inside = f"{folder}/".removeprefix(f"{self._run_dir.path}/")
            if not inside:
                folders[:] = [name for name in folders if name in ("base", "code", "data", "members")]
            for path in (f"{inside}{name}" for name in names):
                if path.endswith("/log.txt") and path in self._sent and not is_due:
                    stamps[path] = self._sent[path][0]
                elif path != EVENTS and is_of_run(path):
                    with contextlib.suppress(FileNotFoundError):
                        status = os.stat(self._run_dir.path / path)
                        stamps[path] = status.st_ino, status.st_size, status.st_mtime_ns
        return {**stamps, EVENTS: (0, end, 0)}

    def _copy(self, stamps: dict[str, Stamp], changed: dict[str, Stamp]) -> None:
        """Send files, then the manifest that makes them count; remove what that does not name any more."""
        with contextlib.ExitStack() as opened:
            newest = sorted(changed, key=lambda path: changed[path][2], reverse=True)[:MOST_OPEN]
            held = {path: self._open(opened, path) for path in newest}
            manifest = self._read_own_manifest()
            size, since = sum(stamp[1] for stamp in changed.values()), self.behind.since or time.time()
            self._note(files=len(changed), bytes=size, since=since, is_whole=False)
            before, checked_at = manifest.files, time.monotonic()
            for path in before.keys() - stamps.keys():
                self._check_is_gone(path)
            self._unnamed |= {name for name, _, _ in before.values()}
            for path, stamp in changed.items():
                if time.monotonic() > checked_at + OWNER_S:
                    self._read_own_manifest()
                    checked_at = time.monotonic()
                file = held.get(path) or self._open(opened, path)
                if file is not None:
                    stored = self._sent[path][1] if path in self._sent else before.get(path)
                    self._sent[path] = stamp, self._send(path, stamp[1], file, stored)
        self._read_own_manifest()
        self._sent = {path: sent for path, sent in self._sent.items() if path in stamps}
        manifest.files = {path: file for path, (_, file) in self._sent.items()}
        self._store.write(MANIFEST, [msgspec.json.encode(manifest)])
        for name in self._unnamed - {name for name, _, _ in manifest.files.values()}:
            self._store.call("rm_file", name)
        self._unnamed.clear()

    def _check_is_gone(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.stat(self._run_dir.path / path)
            raise MirrorError(f"{self._run_dir.path / path} exists, but was not listed")

    def _read_own_manifest(self) -> Manifest:
        manifest = self._store.read_manifest()
        if manifest is None:
            raise MirrorError(f"{self._store.url}: its manifest is gone")
        if manifest.writer != self._writer:
            raise TakenOverError(f"{self._store.url}: the run went on elsewhere and is copied from there")
        return manifest

    def _open(self, opened: contextlib.ExitStack, path: str) -> BinaryIO | None:
        with contextlib.suppress(FileNotFoundError):
            return opened.enter_context(open(self._run_dir.path / path, "rb"))
        return None

    def _send(self, path: str, size: int, file: BinaryIO, stored: Stored | None) -> Stored:
        """Send a file unless the address has it; returns where it is, its size and digest.

        Another driver's object is not written, whatever it has of this file, nor one that the manifest names.
        """
        if path != EVENTS:
            size = os.fstat(file.fileno()).st_size
        digest = digest_blocks(read_blocks(file, size))
        tag = self._writer if path in GROWING else digest.rpartition(":")[2]
        sent = f"{path}@{tag[:16]}", size, digest
        if stored != sent:
            self._unnamed.add(sent[0])
            self._store.write(sent[0], read_blocks(file, size), size)
        return sent

    def _note(self, **changes: Any) -> None:
        self.behind = msgspec.structs.replace(self.behind, **changes)
        if self._run_dir.mirror.exists():  # else --mirror none has ended it
            save_status(self._run_dir, self.behind)


def complete_mirror(run_dir: RunDir, url: str | None) -> str | None:
    """Copy what the address of a run that has ended lacks; returns why that cannot be done, or None.

    Args:
        url: as of `begin_mirror`.
    """
    try:
        with EventLog(run_dir.events):
            if options := begin_mirror(run_dir, url):
                Copier(run_dir, options).copy(is_last=True)
    except (MirrorError, TakenOverError) as error:
        return str(error)
    return None


def _raise(error: OSError) -> None:
    raise error


def read_blocks(file: BinaryIO, size: int) -> Iterator[bytes]:
    for offset in range(0, size, 2**20):
        yield os.pread(file.fileno(), min(2**20, size - offset), offset)
