"""What lies at the address of a mirrored run, and what its directory says of it.

manifests/000007.json   the objects that are the run
PATH, PATH@DIGEST       a file of the run as it was first, and as it was when it had changed
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, ClassVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from ensemble.spec import SpecError
from ensemble.store.errors import StoreError
from ensemble.store.files import format_command, write_bytes
from ensemble.store.run_paths import RunPaths
from ensemble.store.rundir import RunDir

log = logging.getLogger(__name__)

VERSION = 1
#: Given as an address: the run is not copied any more.
NO_MIRROR = "none"
MANIFESTS, EVENTS = "manifests", "events.jsonl"
#: Of a file that is sent in parts, of which a store takes 10,000 at most.
PART_BYTES, MOST_PARTS = 16 * 2**20, 9000

_PATIENCE = {"connect_timeout": 10, "retries": {"max_attempts": 1}}  # of botocore; s3fs tries again by itself
_OF_RUN = re.compile(
    r"events\.jsonl|run\.json|ensemble\.pkl|spec\.py|prior-trials\.json|digests\.json|optuna\.journal"
    r"|report\.html|(?:ledger|results|summary)\.json|(?:ledger|metrics|uncertainty)\.csv"
    r"|code/[0-9a-f]{16}/.+|data/[^/]+\.npy"
    r"|members/[^/]+/(?:log\.txt|(?:checkpoint|initial-weights|predictions)[^/]*\.safetensors)"
)
_IN_PROGRESS = re.compile(r"members/[^/]+/predictions-(?:.*-)?\d+\.safetensors")  # written in place by an attempt


class MirrorError(StoreError):
    """An object store does not do what it is asked."""


class TakenOverError(StoreError):
    """The run went on elsewhere, and is copied to the address from there."""


@dataclass(frozen=True)
class MirrorOptions:
    """What the process that copies a run is given."""

    name: ClassVar[str] = "mirror"
    url: str


class StoredFile(Struct, frozen=True, array_like=True):
    """The name of a file's object, its size and digest, and when it was changed, in Unix seconds."""

    name: str
    size: int
    digest: str
    mtime: float


class Manifest(Struct, kw_only=True):
    """A state of a run that can be resumed: its files by their paths.

    Attributes:
        writer: tells which `Copier` wrote it; empty where a driver has taken the address over.
    """

    v: int = VERSION
    writer: str = ""
    run_id: str
    name: str
    files: dict[str, StoredFile] = {}


class MirrorStatus(Struct, kw_only=True):
    """What `mirror.json` in a run directory says of its mirror.

    Attributes:
        files, bytes: that are not there yet.
        since: when the oldest of them was found, in Unix seconds; None: none is known.
        error: why the last attempt failed; empty where it did not.
        is_whole: whether the run has ended, and all of it is there.
    """

    url: str
    files: int = 0
    bytes: int = 0
    since: float | None = None
    error: str = ""
    is_whole: bool = False

    def __str__(self) -> str:
        if self.since is None:
            return f"mirror: {self.url}: {'complete' if self.is_whole else 'up to date'}"
        files = f"{self.files} files, {self.bytes / 1e6:.1f} MB " if self.files else ""
        since, error = time.strftime("%H:%M", time.localtime(self.since)), f" ({self.error})" * bool(self.error)
        return f"mirror: {self.url}: {files}behind since {since}{error}"


def load_status(run_dir: RunPaths) -> MirrorStatus | None:
    """What a run directory says of its mirror; None where it has none."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(run_dir.mirror.read_bytes(), type=MirrorStatus)
    return None


def save_status(run_dir: RunPaths, status: MirrorStatus) -> None:
    """Replace what a run directory says of its mirror."""
    write_bytes(run_dir.mirror, msgspec.json.encode(status) + b"\n")


def explain_incomplete(run_dir: RunPaths) -> str | None:
    """What the mirror of a run that has ended lacks, and what to do; None where it lacks nothing."""
    status = load_status(run_dir)
    if status is None or status.is_whole:
        return None
    return f"{status}; it is not complete, and {format_command('resume', run_dir.path)} completes it"


def check_url(url: str) -> str:
    """Return the address of a mirror without a slash at its end.

    Raises:
        SpecError: it is no address, or holds a user's name, a password, a token or a pattern.
    """
    parts, shown = urlsplit(url), re.sub(r"//[^/]*@", "//...@", url).partition("?")[0]
    is_address = "://" in url and parts.scheme not in ("http", "https", "memory")
    if not is_address or not (parts.netloc + parts.path).strip("/"):
        raise SpecError(f"{shown!r} is no address for a mirror: give s3://BUCKET/PATH, gs://..., file:///...")
    if parts.scheme in ("file", "local") and parts.netloc:
        raise SpecError(f"{shown!r} names no folder: write its whole path after three slashes, as file:///backup")
    if "@" in parts.netloc or parts.query or parts.fragment or re.search(r"[*?\[\]]", url):
        raise SpecError(
            f"{shown!r}: an address of a mirror holds no credentials, queries or patterns; fsspec takes "
            "credentials from the environment and its configuration"
        )
    return url.rstrip("/")


def is_of_run(path: str) -> bool:
    """Whether a path is copied and fetched: requests, sockets, caches, loggers' and users' own files are not."""
    is_plain = not any(not part or part[0] == "." or "\0" in part for part in path.split("/"))
    return is_plain and _OF_RUN.fullmatch(path) is not None and _IN_PROGRESS.fullmatch(path) is None


class ObjectStore:
    """The objects below an address, by fsspec.

    Raises:
        MirrorError: no library for its protocol is installed.
    """

    def __init__(self, url: str) -> None:
        import fsspec

        self.url, protocol = url, url.partition("://")[0]
        self._is_local = protocol in ("file", "local")
        options: dict[str, Any] = {"auto_mkdir": True} if self._is_local else {"use_listings_cache": False}
        if protocol in ("s3", "s3a"):
            configured = fsspec.config.conf.get(protocol, {}).get("config_kwargs", {})
            options["config_kwargs"] = {**_PATIENCE, **configured}
        try:
            self._fs, root = fsspec.core.url_to_fs(url, skip_instance_cache=True, **options)
        except (ImportError, ValueError) as error:
            raise MirrorError(f"{url}: {error}") from None
        self._root = root.rstrip("/")

    def call(self, method: str, name: str = "", *arguments: Any, **options: Any) -> Any:
        """Call a method of the file system with the name of an object or a folder; None where there is none."""
        with self._naming(f"{method} {name}"), contextlib.suppress(FileNotFoundError):
            return getattr(self._fs, method)(f"{self._root}/{name}".rstrip("/"), *arguments, **options)

    def list_folder(self, folder: str = "") -> list[str]:
        """The names in a folder."""
        self._fs.invalidate_cache()
        return [path.rpartition("/")[2] for path in self.call("ls", folder, detail=False) or ()]

    def find(self) -> list[str]:
        """The names of all objects."""
        return [path[len(self._root) + 1 :] for path in self.call("find")]

    def write(self, name: str, content: Iterable[bytes], size: int = 0) -> None:
        """Write an object of about so many bytes."""
        if self._is_local:
            os.makedirs(self._root, 0o700, exist_ok=True)
        part = max(PART_BYTES, (size // MOST_PARTS | (2**18 - 1)) + 1)
        with self._naming(f"write {name}"), self._fs.open(f"{self._root}/{name}", "wb", block_size=part) as out:
            for block in content:
                out.write(block)

    @contextlib.contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of the library for the protocol
            text = " ".join(str(error).split())[:200]
            raise MirrorError(f"{self.url}: cannot {what}: {type(error).__name__}: {text}") from error


def list_manifests(store: ObjectStore) -> list[int]:
    """The numbers of the manifests, the last one first."""
    names = (name for name in store.list_folder(MANIFESTS) if re.fullmatch(r"\d{6}\.json", name))
    return sorted((int(name[:6]) for name in names), reverse=True)


def name_manifest(number: int) -> str:
    """The name of a manifest."""
    return f"{MANIFESTS}/{number:06d}.json"


def read_manifest(store: ObjectStore) -> tuple[int, Manifest | None]:
    """The last whole manifest and its number; 0 and None where there is none.

    Raises:
        StoreError: this version can read none of them.
    """
    while numbers := list_manifests(store):
        for number in numbers:
            with contextlib.suppress(msgspec.MsgspecError):  # its writer was killed, or it was replaced
                manifest = msgspec.json.decode(store.call("cat_file", name_manifest(number)) or b"", type=Manifest)
                if manifest.v == VERSION:
                    return number, manifest
        if list_manifests(store) == numbers:
            raise StoreError(f"{store.url} is damaged, or was written by another version of ray-ensemble")
    return 0, None


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
    store = ObjectStore(check_url(url))
    number, manifest = read_manifest(store)
    if manifest is None:
        if names := store.list_folder():
            raise StoreError(f"{url} is not empty and has no mirror ({names[0]} ...): give an address below it")
        manifest = Manifest(run_id=run_dir.info["run_id"], name=run_dir.info["name"])
    check_continues(run_dir, manifest, store.url)
    manifest.writer = ""
    store.write(name_manifest(number + 1), [msgspec.json.encode(manifest)])
    save_status(run_dir, MirrorStatus(url=store.url))
    log.warning("the run is copied to %s", store.url)
    return MirrorOptions(store.url)


def check_continues(run_dir: RunDir, manifest: Manifest, url: str) -> None:
    """Check that a directory has the run of a manifest, and that its log begins with the log there.

    Raises:
        TakenOverError, StoreError: as `begin_mirror`.
    """
    own, other = run_dir.info["run_id"], manifest.run_id
    if own != other:
        raise StoreError(f"{url} mirrors another run ({manifest.name!r}, run id {other}): give another address")
    stored = manifest.files.get(EVENTS)
    with open(run_dir.events, "rb") as events:
        if stored is None or digest_blocks(read_blocks(events, stored.size)) == stored.digest:
            return
    raise TakenOverError(
        f"{url} has a state of the run that {run_dir.path} does not continue: the run went on elsewhere. "
        f"{format_command('fetch', url, 'NEW_DIR')} brings it here; or give another address, or --mirror none"
    )


def read_blocks(file: BinaryIO, size: int) -> Iterator[bytes]:
    """The first bytes of a file."""
    for offset in range(0, size, 2**20):
        yield os.pread(file.fileno(), min(2**20, size - offset), offset)


def digest_blocks(blocks: Iterable[bytes]) -> str:
    """The digest of what blocks make, as `ensemble.store.digests` has it."""
    import xxhash

    digest = xxhash.xxh3_128()
    for block in blocks:
        digest.update(block)
    return f"xxh3:{digest.hexdigest()}"
