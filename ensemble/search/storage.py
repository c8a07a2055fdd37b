"""Opens the Optuna storage that a user names.

A journal file in which something was appended to a torn line cannot be read any more, and a lock left by a killed
process delays the next write: both are repaired here.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from ensemble.store.files import StoreError

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

#: Age in seconds from which on a journal's lock belongs to a killed process; a write takes milliseconds.
STALE_LOCK_S = 3


def open_storage(storage: str | os.PathLike[str] | BaseStorage | None) -> BaseStorage:
    """Open the Optuna storage given by a path, a URL, a storage or None (in memory).

    Raises:
        StoreError: it cannot be opened.
    """
    from optuna.storages import BaseStorage, InMemoryStorage, RDBStorage

    if storage is None:
        return InMemoryStorage()
    if isinstance(storage, BaseStorage):
        return storage
    if not isinstance(storage, str) or "://" not in storage:
        return _open_journal(Path(storage).expanduser())
    try:
        return RDBStorage(storage)
    except Exception as error:  # whatever the database's driver raises
        line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if isinstance(error.__cause__, ModuleNotFoundError):  # of the driver that the URL asks for, or implies
            line = f"{error.__cause__}: install it, or name another driver (postgresql+psycopg2://)"
        said = without_password(f"cannot open the Optuna storage {storage}: {line}", storage)
        raise StoreError(said) from None  # what the driver says in full may hold the password


def _open_journal(path: Path) -> BaseStorage:
    from ensemble.search.journal import Journal

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _mend_journal(path)
        try:
            return Journal(str(path), STALE_LOCK_S)
        except (ValueError, KeyError, AssertionError):  # its middle is damaged: it is written anew from the log
            os.replace(path, path.with_name(path.name + ".damaged"))
            return Journal(str(path), STALE_LOCK_S)
    except OSError as error:
        raise StoreError(f"cannot open the Optuna journal {path}: {error.strerror}") from error


def _mend_journal(path: Path) -> None:
    lock = path.with_name(path.name + ".lock")
    with contextlib.suppress(FileNotFoundError):
        if time.time() - os.lstat(lock).st_mtime > STALE_LOCK_S:
            lock.unlink()
    if path.exists():
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(path, whole)


#: Parameters of a URL's query with secret values: passwd, sslpassword, token, api_key ...
_SECRET = re.compile(r"[?&;]([^=&;#]*(?:pass|pwd|token|secret|credential|key)[^=&;#]*)=([^&;#]+)", re.IGNORECASE)
_TOKEN_LENGTH = 12  # a user part of at least so many characters without a password is taken for a token


def without_password(text: str, url: str) -> str:
    """Replace the secrets of a storage URL in a text by stars, in their encoded and decoded forms.

    Secrets are the password, the values of query parameters such as token or key, and the user part, which may be
    a token: within the URL always, elsewhere in the text if it is long and no password follows it.
    """
    scheme, _, rest = url.partition("://")
    login, at, _ = rest.rpartition("@")
    user, _, password = login.partition(":")
    secrets = {password, *(value for _, value in _SECRET.findall(rest))}
    if len(user) >= _TOKEN_LENGTH and len(password) < _TOKEN_LENGTH:
        secrets.add(user)
    if at:
        text = text.replace(f"{scheme}://{login}@", f"{scheme}://***@")
    for secret in sorted(secrets | {unquote(one) for one in secrets}, key=len, reverse=True):
        if secret:
            text = text.replace(secret, "***")
    return text
