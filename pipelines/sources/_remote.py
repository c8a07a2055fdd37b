"""Addresses of files on object stores and web servers (`s3://`, `gs://`, `http://` ...), which fsspec opens.

What fsspec needs beside an address, such as keys or an endpoint, it takes from its own configuration and
environment, so that no source carries secrets.
"""

from __future__ import annotations

import os
import re
from typing import Any, BinaryIO

from pipelines.errors import PipelineError

#: Kinds of sources that read such files.
KINDS = ("csv", "jsonl", "parquet", "tar")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_TAGS = ("ETag", "etag", "md5Hash", "crc32c", "LastModified", "Last-Modified", "last_modified", "mtime", "updated")


def is_url(path: str) -> bool:
    """Whether a path is the address of a file that is elsewhere."""
    return _URL.match(path) is not None


def list_urls(kind: str, url: str) -> list[tuple[str, int, str]]:
    """Address, size and tag of each file that an address names, which may be a pattern.

    Args:
        kind: of the source.
        url: of a file, or a pattern of fsspec (`*`, `?`, `[...]`) where its file system lists files.
    """
    if kind not in KINDS:
        raise PipelineError(
            f"{kind}({url!r}): reads files of this machine; {', '.join(KINDS)} read addresses, too"
        )
    system = _open_filesystem(url)
    protocol, _, path = url.partition("://")
    try:
        names = [url]
        if re.search(r"[*?\[]", path) and protocol not in ("http", "https"):
            names = [system.unstrip_protocol(name) for name in sorted(system.glob(url))]
        files = [(name, *_read_info(system, name)) for name in names]
    except PipelineError:
        raise
    except FileNotFoundError:
        raise PipelineError(f"{kind}({url!r}): no such file or directory") from None
    except Exception as error:  # of the library for the protocol
        raise PipelineError(f"{kind}({url!r}): {type(error).__name__}: {error}") from error
    if not files:
        raise PipelineError(f"{kind}({url!r}): the pattern matches no file")
    return files


def fetch(url: str, size: int, tag: str, path: str) -> None:
    """Copies a file to a path of this machine."""
    try:
        system = _open_filesystem(url)
        system.get_file(url, path)
        system.invalidate_cache()
        is_same = _read_info(system, url) == (size, tag) and os.path.getsize(path) == size
    except PipelineError:
        raise
    except Exception as error:  # of the library for the protocol
        raise PipelineError(f"{url}: cannot be fetched: {type(error).__name__}: {error}") from error
    if not is_same:
        raise PipelineError(f"{url}: was changed after its records were indexed; make the source again")


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


def _read_info(system: Any, url: str) -> tuple[int, str]:
    """Size and tag of a file."""
    info: dict[str, Any] = system.info(url)
    if info.get("type") == "directory":
        raise PipelineError(f"{url}: is a folder; name its files, as in {url.rstrip('/')}/*")
    if info.get("size") is None:
        raise PipelineError(f"{url}: its server does not say how large it is")
    return int(info["size"]), next((str(info[key]) for key in _TAGS if info.get(key) is not None), "")


def _open_filesystem(url: str) -> Any:
    import fsspec

    try:
        return fsspec.filesystem(url.partition("://")[0])
    except (ImportError, ValueError) as error:
        raise PipelineError(f"{url}: {error}") from None
