"""The object store of a mirror, by fsspec: whole objects, put so that a reader sees all of one or nothing.

What it needs beside an address, such as keys or an endpoint, fsspec takes from its configuration and the
environment.
"""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ensemble.store.errors import StoreError

#: Of a file that is sent in parts: a part is in memory while it is sent. S3 takes 10,000 parts.
PART_BYTES, MOST_PARTS = 16 * 2**20, 9000

_S3 = ("s3", "s3a")
#: Of botocore, in seconds: it is tried again by s3fs, and by whoever calls, who can say so meanwhile.
_PATIENCE = {"connect_timeout": 10, "retries": {"max_attempts": 1}}


class MirrorError(StoreError):
    """An object store does not do what it was asked."""


class GoneError(MirrorError):
    """There is no such object."""


class Bucket:
    """The objects below an address.

    Args:
        url: as `check_url` returns it.

    Raises:
        MirrorError: no library for its protocol is installed.
    """

    def __init__(self, url: str) -> None:
        self.url, self._protocol = url, url.partition("://")[0]
        self._is_local = self._protocol in ("file", "local")
        try:
            import fsspec

            more: dict[str, Any] = {"auto_mkdir": True} if self._is_local else {"use_listings_cache": False}
            if self._protocol in _S3:
                given = fsspec.config.conf.get(self._protocol, {}).get("config_kwargs", {})
                more["config_kwargs"] = {**_PATIENCE, **given}
            found: tuple[Any, str] = fsspec.core.url_to_fs(url, skip_instance_cache=True, **more)
        except (ImportError, ValueError) as error:
            raise MirrorError(f"{url}: {error}") from None
        self._fs, self._root = found[0], found[1].rstrip("/")

    def list(self, folder: str = "") -> list[str]:
        """The names in a folder; empty where there is none."""
        with self._naming("cannot be listed"):
            with contextlib.suppress(FileNotFoundError):
                more = {} if self._is_local else {"refresh": True}
                found = self._fs.ls(self._path(folder), detail=False, **more)
                return sorted(name for each in found if (name := each.rstrip("/").rpartition("/")[2])[:1] != ".")
            return []

    def read(self, name: str) -> bytes | None:
        """What a small object holds; None where there is none."""
        with self._naming(f"{name} cannot be read"):
            with contextlib.suppress(FileNotFoundError):
                found: bytes = self._fs.cat_file(self._path(name))
                return found
            return None

    def fetch(self, name: str, path: Path) -> None:
        """Copy an object to a file.

        Raises:
            GoneError: there is none.
        """
        with self._naming(f"{name} cannot be fetched"):
            try:
                self._fs.get_file(self._path(name), str(path))
            except FileNotFoundError:
                raise GoneError(f"{self.url}: {name} is not there") from None

    def create(self, name: str, content: bytes) -> bool:
        """Put a small object where there is none; returns whether there was none.

        Where a store has no such request, it is looked first whether there is one.
        """
        path = self._path(name)
        with self._naming("cannot be written to"):
            try:
                if self._is_local:
                    _make_private_folder(path)
                    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                        file.write(content)
                else:
                    self._fs.pipe_file(path, content, mode="create")
                return True
            except FileExistsError:
                return False
            except (TypeError, ValueError, NotImplementedError, OSError) as error:
                if isinstance(error, OSError) and error.errno != errno.ENOSYS:
                    raise
        if self.read(name) is not None:
            return False
        self.put(name, content)
        return True

    def put(self, name: str, content: bytes) -> None:
        """Put a small object, or replace it."""
        path = self._path(name)
        with self._naming("cannot be written to"):
            if not self._is_local:
                self._fs.pipe_file(path, content)
                return
            with self._written_whole(path) as temporary:
                Path(temporary).write_bytes(content)

    def put_file(self, name: str, descriptor: int) -> None:
        """Put a file; from then on there is all of it."""
        source, path = f"/proc/self/fd/{descriptor}", self._path(name)
        more: dict[str, Any] = {}
        if self._protocol in _S3:
            part = max(PART_BYTES, os.fstat(descriptor).st_size // MOST_PARTS)
            more = {"chunksize": part, "max_concurrency": 2}
        with self._naming("cannot be written to"):
            if not self._is_local:
                self._fs.put_file(source, path, **more)
                return
            with self._written_whole(path) as temporary:
                self._fs.put_file(source, temporary)

    def copy(self, name: str, to: str) -> None:
        """Copy an object within the store."""
        with self._naming(f"{name} cannot be copied"):
            if not self._is_local:
                self._fs.cp_file(self._path(name), self._path(to))
                return
            with self._written_whole(self._path(to)) as temporary:
                self._fs.cp_file(self._path(name), temporary)

    def remove(self, name: str, *, recursive: bool = False) -> None:
        """Remove an object, or all in a folder; there may be none."""
        with self._naming(f"{name} cannot be removed"), contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._path(name), recursive=recursive)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    @contextlib.contextmanager
    def _written_whole(self, path: str) -> Iterator[str]:
        _make_private_folder(path)
        temporary = f"{os.path.dirname(path)}/.{uuid.uuid4().hex}.tmp"
        try:
            os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            yield temporary
            os.replace(temporary, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)

    @contextlib.contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        """Say of an error of a library which address it is about."""
        try:
            yield
        except StoreError:
            raise
        except Exception as error:  # of the library for the protocol
            text = " ".join(str(error).split())[:200]
            raise MirrorError(f"{self.url}: {what}: {type(error).__name__}: {text}") from error


def _make_private_folder(path: str) -> None:
    os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
