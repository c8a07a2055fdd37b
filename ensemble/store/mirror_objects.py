"""What is at the address of a mirror: objects, by fsspec, and a manifest of which files of the run they are."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from ensemble.spec import SpecError
from ensemble.store.errors import StoreError, explain_format

#: Of the manifest, and of which files of a run are copied.
VERSION = 4
MANIFEST = "manifest.json"
#: Of a file that is sent in parts, of which a store takes 10,000 at most.
PART_BYTES, MOST_PARTS = 16 * 2**20, 9000
_PATIENCE = {"connect_timeout": 10, "retries": {"max_attempts": 1}}  # of botocore; s3fs tries again by itself

#: The object that has a file, the file's size and its digest.
Stored = tuple[str, int, str]


class Manifest(Struct, kw_only=True):
    """The files of a run at an address, by path; `writer` tells which driver copies it."""

    v: int = VERSION
    writer: str = ""
    run_id: str
    name: str
    files: dict[str, Stored] = {}


class MirrorError(StoreError):
    """An object store does not do what it is asked."""


def check_url(url: str) -> str:
    """Return the address of a mirror without a slash at its end.

    Raises:
        SpecError: it is no address, or holds a user's name, a password, a token or a pattern.
    """
    parts, shown = urlsplit(url), re.sub(r"//[^/]*@", "//...@", url).partition("?")[0]
    is_address = "://" in url and parts.scheme not in ("http", "https", "memory")
    if not is_address or not (parts.netloc + parts.path).strip("/"):
        raise SpecError(f"{shown!r} is not an address for a mirror: give s3://BUCKET/PATH, gs://..., file:///...")
    if parts.scheme in ("file", "local") and parts.netloc:
        raise SpecError(f"{shown!r} names no folder: write its whole path after three slashes, as file:///backup")
    if "@" in parts.netloc or parts.query or parts.fragment or re.search(r"[*?\[\]]", url):
        raise SpecError(
            f"{shown!r}: an address of a mirror holds no credentials, queries or patterns; fsspec takes "
            "credentials from the environment and its configuration"
        )
    return url.rstrip("/")


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
        """Call a method of the file system with the name of an object; None where there is none."""
        with self._naming(f"{method} {name}"), contextlib.suppress(FileNotFoundError):
            return getattr(self._fs, method)(f"{self._root}/{name}".rstrip("/"), *arguments, **options)

    def read_manifest(self) -> Manifest | None:
        """The manifest; None where there is none.

        Raises:
            StoreError: it is damaged, or an earlier version wrote what is there.
        """
        content = self.call("cat_file", MANIFEST)
        if content is None:
            if self.call("ls", "manifests"):
                raise StoreError(
                    f"{self.url} was written by an earlier version of ray-ensemble: fetch it with that version, "
                    "or give another address for a mirror"
                )
            return None
        with contextlib.suppress(msgspec.MsgspecError):
            manifest = msgspec.json.decode(content, type=Manifest)
            if manifest.v != VERSION:
                raise StoreError(
                    explain_format(self.url, manifest.v, VERSION, "give another address for a mirror")
                )
            return manifest
        raise StoreError(f"{self.url} is damaged, or was written by another version of ray-ensemble")

    def write(self, name: str, content: Iterable[bytes], size: int = 0) -> None:
        """Write an object of about so many bytes; it is there whole or as it was."""
        path = f"{self._root}/{name}"
        written = f"{os.path.dirname(path)}/.{os.path.basename(path)}.new" if self._is_local else path
        if self._is_local:
            os.makedirs(self._root, 0o700, exist_ok=True)
        part = max(PART_BYTES, (size // MOST_PARTS | (2**18 - 1)) + 1)
        with self._naming(f"write {name}"):
            with self._fs.open(written, "wb", block_size=part) as out:
                for block in content:
                    out.write(block)
            if self._is_local:
                os.replace(written, path)

    @contextlib.contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of the library for the protocol
            text = " ".join(str(error).split())[:200]
            raise MirrorError(f"{self.url}: cannot {what}: {type(error).__name__}: {text}") from error
