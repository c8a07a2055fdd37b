"""Copies a run to its mirror while it goes on: files first, then the manifest that makes them count."""

from __future__ import annotations

import contextlib
import os
import re
import time
import uuid
from typing import Any, BinaryIO

import msgspec

from ensemble.store.errors import StoreError
from ensemble.store.log_lines import end_of_events
from ensemble.store.member_log import read_pieces
from ensemble.store.mirror import (
    EVENTS,
    Manifest,
    MirrorError,
    MirrorOptions,
    MirrorStatus,
    ObjectStore,
    StoredFile,
    TakenOverError,
    check_continues,
    digest_blocks,
    is_of_run,
    list_manifests,
    load_status,
    name_manifest,
    read_blocks,
    read_manifest,
    save_status,
)
from ensemble.store.rundir import RunDir

#: Files that are held open, so that they can be sent when the run has removed them.
MOST_OPEN = 256
#: Seconds between two copies of what members print; bytes a second of the log, which is sent whole.
OUTPUT_S, LOG_RATE = 60.0, 1e6
LISTING_SHARE = 0.02  # of a core, at most, for listing files
FOLDERS = ("code", "data", "members")
#: Names that only a copier gives: of what one has sent that was killed before its manifest.
_LEFTOVER = re.compile(
    r".+@[0-9a-f]{8}|members/[^/]+/(?:log\.txt|(?:checkpoint|initial-weights|predictions)[^/]*\.safetensors)"
)

#: Inode, size and time of the last change in nanoseconds; of the log its size alone.
Stamp = tuple[int, int, int]


class Copier:
    """Copies a run to the address that `begin_mirror` has taken.

    Attributes:
        behind: what is not there yet, and why.
    """

    def __init__(self, run_dir: RunDir, options: MirrorOptions) -> None:
        self._run_dir, self._store = run_dir, ObjectStore(options.url)
        self.behind = load_status(run_dir) or MirrorStatus(url=options.url)
        self._writer = uuid.uuid4().hex
        self._number, self._manifest = 0, Manifest(run_id="", name="")
        self._sent: dict[str, tuple[Stamp, StoredFile]] = {}
        self._unnamed: set[str] = set()  # objects that the last manifest does not name
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
            with contextlib.ExitStack() as opened:
                stamps = self._list_files(is_last=is_last)
                pause_s = max((time.thread_time() - began_s) / LISTING_SHARE, stamps[EVENTS][1] / LOG_RATE)
                self._due_at = time.monotonic() + pause_s
                sent = {path: stamp for path, (stamp, _) in self._sent.items()}
                changed = {path: stamp for path, stamp in stamps.items() if sent.get(path) != stamp}
                is_same = changed.keys() <= {EVENTS} and stamps.keys() == sent.keys()
                if is_same and self.behind.since is None and not is_last:
                    return
                newest = sorted(changed, key=lambda path: changed[path][2], reverse=True)[:MOST_OPEN]
                files = {path: self._open(opened, path) for path in newest}
                self._check_owner()
                size, since = sum(stamp[1] for stamp in changed.values()), self.behind.since or time.time()
                self._note(files=len(changed), bytes=size, since=since, is_whole=False)
                for path, stamp in changed.items():
                    self._send(path, stamp, files.get(path))
            self._write_manifest(stamps)
        except (StoreError, OSError) as error:
            since = self.behind.since or time.time()
            self._note(error=" ".join(str(error).split())[:300], since=since, is_whole=False)
            raise
        is_whole = is_last and end_of_events(self._run_dir.events) == stamps[EVENTS][1]
        self._note(files=0, bytes=0, since=None, error="", is_whole=is_whole)

    def _list_files(self, *, is_last: bool) -> dict[str, Stamp]:
        """The files of the run; what members print is as it was sent until a minute later.

        A run writes a file before its log names it, and keeps a checkpoint and the one before. So what the log
        names up to a byte is there when it is listed after that byte was found.
        """
        stamps: dict[str, Stamp] = {EVENTS: (0, end_of_events(self._run_dir.events), 0)}
        is_due = is_last or time.monotonic() >= self._output_at + OUTPUT_S
        self._output_at = time.monotonic() if is_due else self._output_at
        for folder, folders, names in os.walk(self._run_dir.path):
            inside = f"{folder}/".removeprefix(f"{self._run_dir.path}/")
            if not inside:
                folders[:] = [name for name in folders if name in FOLDERS]
            for path in (f"{inside}{name}" for name in names):
                if path.endswith("/log.txt") and path in self._sent and not is_due:
                    stamps[path] = self._sent[path][0]
                elif path != EVENTS and is_of_run(path):
                    with contextlib.suppress(FileNotFoundError):
                        status = os.stat(self._run_dir.path / path)
                        stamps[path] = status.st_ino, status.st_size, status.st_mtime_ns
        return stamps

    def _check_owner(self) -> None:
        """Read the manifest that is there, and check that nobody else has written it since this copier began."""
        if self._number and list_manifests(self._store) == [self._number]:
            return
        number, manifest = read_manifest(self._store)
        if manifest is None:
            raise MirrorError(f"{self._store.url}: its manifests are gone")
        if not self._number:
            check_continues(self._run_dir, manifest, self._store.url)
            self._unnamed = {name for name in self._store.find() if _LEFTOVER.fullmatch(name)}
        elif number != self._number and manifest.writer != self._writer:
            raise TakenOverError(f"{self._store.url}: the run went on elsewhere and is copied from there")
        self._number, self._manifest = number, manifest
        self._unnamed |= {name_manifest(other) for other in list_manifests(self._store)}

    def _open(self, opened: contextlib.ExitStack, path: str) -> BinaryIO | None:
        with contextlib.suppress(FileNotFoundError):
            return opened.enter_context(open(self._run_dir.path / path, "rb"))
        return None

    def _send(self, path: str, stamp: Stamp, file: BinaryIO | None) -> None:
        """Send a file unless the address has it; one that the run has removed is left out.

        Args:
            file: held open since the file was listed, if it was.
        """
        with contextlib.ExitStack() as opened:
            file = file or self._open(opened, path)
            if file is None:
                self._sent.pop(path, None)
                return
            output = None
            status = os.fstat(file.fileno())
            size = stamp[1] if path == EVENTS else status.st_size
            if path.endswith("/log.txt"):  # its middle may have been freed on the disk
                output = [piece for piece, _ in read_pieces(file)]
                size = sum(map(len, output))
            digest, stored = digest_blocks(output or read_blocks(file, size)), self._manifest.files.get(path)
            if stored is None or (stored.size, stored.digest) != (size, digest):
                name = path if stored is None else f"{path}@{digest[-8:]}"
                self._unnamed.add(name)
                self._store.write(name, output or read_blocks(file, size), size)
                stored = StoredFile(name, size, digest, status.st_mtime)
            self._sent[path] = stamp, stored

    def _write_manifest(self, stamps: dict[str, Stamp]) -> None:
        """Make what was sent the state at the address, and remove what that does not name."""
        self._sent = {path: sent for path, sent in self._sent.items() if path in stamps}
        files = {path: stored for path, (_, stored) in self._sent.items()}
        manifest = msgspec.structs.replace(self._manifest, writer=self._writer, files=files)
        self._unnamed |= {name_manifest(self._number), *(stored.name for stored in self._manifest.files.values())}
        self._store.write(name_manifest(self._number + 1), [msgspec.json.encode(manifest)])
        self._number, self._manifest = self._number + 1, manifest
        self._unnamed -= {name_manifest(self._number), *(stored.name for stored in files.values())}
        with contextlib.suppress(MirrorError):  # they only take room; the next copy tries again
            for name in sorted(self._unnamed):
                self._store.call("rm_file", name)
                self._unnamed.discard(name)

    def _note(self, **changes: Any) -> None:
        self.behind = msgspec.structs.replace(self.behind, **changes)
        if self._run_dir.mirror.exists():  # else --mirror none has ended it
            save_status(self._run_dir, self.behind)
