"""Files of object stores and web servers, each kept on this machine while it is used.

`fsspec` opens them (`s3://`, `gs://`, `http://` ...); what it needs beside an address, such as keys or an
endpoint, it takes from its own configuration and environment, so that no source carries secrets. A file is fetched
whole when it is first read, into a folder that all processes of the user share, and from there it is read like any
other. The folder has a limit: beyond it the files that were not opened for longest are removed. Readers that have
them open keep what they read.

What says that a file is still the same is what its server says of it: its size, and a tag or the time of its last
change.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from pipelines.errors import PipelineError

FOLDER, BYTES = "ENSEMBLE_REMOTE_DIR", "ENSEMBLE_REMOTE_BYTES"
#: Kinds of sources that read such files.
KINDS = ("csv", "jsonl", "parquet", "tar", "tfrecord")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_NAME = re.compile(r"[0-9a-f]{32}-[A-Za-z0-9._-]{0,60}(\.part)?")  # of a file that was fetched
_LEFT_S = 3600  # what is not written to for so long was left by a process that was killed
_TAGS = ("ETag", "etag", "md5Hash", "crc32c", "LastModified", "Last-Modified", "last_modified", "mtime", "updated")


def is_url(path: str) -> bool:
    """Whether a path is the address of a file that is elsewhere."""
    return _URL.match(path) is not None


@dataclass(frozen=True)
class Folder:
    """Where fetched files are kept.

    Attributes:
        path: of the folder.
        limit: bytes of all files in it.
    """

    path: str
    limit: int

    @classmethod
    def of_environment(cls) -> Folder:
        """As the environment says; else in the user's cache, with half of what is free there.

        Raises:
            PipelineError: the limit is no number, or the folder cannot be made or is not the user's alone.
        """
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        path = os.path.abspath(os.environ.get(FOLDER) or os.path.join(cache, "ray-ensemble", "remote"))
        given = os.environ.get(BYTES)
        try:
            os.makedirs(path, 0o700, exist_ok=True)
            status = os.stat(path)
            if status.st_uid != os.geteuid() or status.st_mode & 0o022:  # others could put files there
                raise PipelineError(
                    f"{path}, where remote files are kept, is not a folder that you alone write to"
                )
            limit = int(float(given)) if given else _sum_bytes(path) // 2 + shutil.disk_usage(path).free // 2
        except ValueError:
            raise PipelineError(f"{BYTES} must be a number of bytes, got {given!r}") from None
        except OSError as error:
            raise PipelineError(
                f"{path}, where remote files are kept, cannot be made: {error.strerror}"
            ) from error
        return cls(path, limit)

    def fetch(self, url: str, size: int, tag: str) -> str:
        """The path of a file in the folder; where it is not there, it is fetched, by one process at a time.

        Raises:
            PipelineError: it cannot be fetched, or its server says that it is another one now.
        """
        name = _name(url, size, tag)
        kept = os.path.join(self.path, name)
        with self._locked(name):
            if not os.path.exists(kept):
                self._make_room(size)
                part = f"{kept}.part"
                try:
                    system = _open_filesystem(url)
                    system.get_file(url, part)
                    system.invalidate_cache()
                    if _read_info(system, url) != (size, tag) or os.path.getsize(part) != size:
                        raise PipelineError(
                            f"{url}: was changed after its records were indexed; make the source anew"
                        )
                    os.replace(part, kept)
                except PipelineError:
                    raise
                except Exception as error:  # of the library for the protocol
                    raise PipelineError(f"{url}: cannot be fetched: {type(error).__name__}: {error}") from error
                finally:
                    with contextlib.suppress(OSError):
                        os.unlink(part)
            with contextlib.suppress(OSError):
                os.utime(kept)  # it was used last
        return kept

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        descriptor = os.open(
            os.path.join(self.path, f".{name[:2]}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _make_room(self, size: int) -> None:
        """Remove the files that were used least lately, until there is room for another."""
        left, found = self.limit - size, []
        with os.scandir(self.path) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    status = entry.stat()
                    if not _NAME.fullmatch(entry.name):  # a user's own
                        continue
                    if entry.name.endswith(".part"):
                        if time.time() - status.st_mtime > _LEFT_S:
                            os.unlink(entry.path)
                    else:
                        found.append((status.st_mtime_ns, status.st_size, entry.path))
        left -= sum(bytes_ for _, bytes_, _ in found)
        for _, bytes_, path in sorted(found):
            if left >= 0:
                return
            with contextlib.suppress(OSError):
                os.unlink(path)
                left += bytes_


def find_folder() -> Folder:
    """The folder of this process's environment, on whatever machine it runs.

    Raises:
        PipelineError: see `Folder.of_environment`.
    """
    folder = _find_folder(*(os.environ.get(name) for name in (FOLDER, BYTES, "XDG_CACHE_HOME", "HOME")))
    if not os.path.isdir(folder.path):  # it was removed meanwhile
        _find_folder.cache_clear()
        return Folder.of_environment()
    return folder


@functools.lru_cache(maxsize=4)
def _find_folder(*environment: str | None) -> Folder:
    return Folder.of_environment()


def list_urls(kind: str, url: str) -> list[tuple[str, int, str]]:
    """Address, size and tag of each file that an address names, which may be a pattern.

    Args:
        kind: of the source.
        url: of a file, or a pattern of fsspec (`*`, `?`, `[...]`) where its file system lists files.

    Raises:
        PipelineError: the source does not read such files, fsspec has no file system for it, or none is there.
    """
    if kind not in KINDS:
        raise PipelineError(
            f"{kind}({url!r}): reads files of this machine; {', '.join(KINDS)} read addresses, too"
        )
    system = _open_filesystem(url)
    try:
        protocol = url.partition("://")[0]
        names = [url]
        if re.search(r"[*?\[]", url.partition("://")[2]) and protocol not in ("http", "https"):
            names = [system.unstrip_protocol(name) for name in sorted(system.glob(url))]
        found = []
        for name in names:
            found.append((name, *_read_info(system, name)))
    except PipelineError:
        raise
    except FileNotFoundError:
        raise PipelineError(f"{kind}({url!r}): no such file or directory") from None
    except Exception as error:  # of the library for the protocol
        raise PipelineError(f"{kind}({url!r}): {type(error).__name__}: {error}") from error
    if not found:
        raise PipelineError(f"{kind}({url!r}): the pattern matches no file")
    return found


def _read_info(system: Any, url: str) -> tuple[int, str]:
    """Size and tag of a file."""
    info: dict[str, Any] = system.info(url)
    if info.get("type") == "directory":
        raise PipelineError(f"{url}: is a folder; name its files, as in {url.rstrip('/')}/*")
    if info.get("size") is None:
        raise PipelineError(f"{url}: its server does not say how large it is")
    return int(info["size"]), next((str(info[key]) for key in _TAGS if info.get(key) is not None), "")


def open_in_parts(url: str) -> BinaryIO | None:
    """The file for reading in parts, without a copy here; None where its server gives it whole alone."""
    file: BinaryIO | None = None
    try:
        file = _open_filesystem(url).open(url, "rb")
        file.seek(-1, os.SEEK_END)
        file.read(1)
        file.seek(0)
    except Exception:  # of the library for the protocol; who fetches the file sees what is wrong
        if file is not None:
            file.close()
        return None
    return file


def _name(url: str, size: int, tag: str) -> str:
    """What a file is called in a folder."""
    digest = hashlib.blake2b(f"{url}\0{size}\0{tag}".encode(), digest_size=16).hexdigest()
    return f"{digest}-{re.sub('[^A-Za-z0-9._-]', '_', url.rpartition('/')[2])[-60:]}"


def _open_filesystem(url: str) -> Any:
    import fsspec

    try:
        return fsspec.filesystem(url.partition("://")[0])
    except (ImportError, ValueError) as error:
        raise PipelineError(f"{url}: {error}") from None


def _sum_bytes(path: str) -> int:
    found = 0
    with os.scandir(path) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # another process has just removed it
                found += entry.stat().st_size if _NAME.fullmatch(entry.name) else 0
    return found
