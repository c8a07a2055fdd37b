"""Opens the Optuna storage that a user names, a database or a journal; what Optuna has not written is refused.

A journal in which something was appended to a torn line cannot be read any more, and a lock left by a killed
process delays the next write: a torn last line is cut, and such a lock is removed.
"""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

from ensemble.spec.search import DATABASE
from ensemble.store.files import StoreError
from ensemble.store.user_files import check_writable

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

#: Age in seconds from which on a journal's lock belongs to a killed process; a write takes milliseconds.
STALE_LOCK_S = 3
_SQLITE = b"SQLite format 3\0"
_OPERATION = re.compile(rb'\{"op_code": ?\d+, ?"worker_id": ?"')
#: What databases say of a table, or a row in it, that another process has just made, and how often it is tried.
_MADE_BY_ANOTHER = re.compile(r"already exists|duplicate|unique constraint", re.IGNORECASE)
_MOST_TRIES, _PAUSE_S = 20, 0.05
_JOURNAL = "a journal that Optuna wrote"


def open_storage(storage: str | os.PathLike[str] | BaseStorage | None) -> BaseStorage:
    """Open the Optuna storage given by a path, a URL, a storage or None (in memory)."""
    from optuna.storages import BaseStorage, InMemoryStorage

    if storage is None:
        return InMemoryStorage()
    if isinstance(storage, BaseStorage):
        return storage
    storage = check_storage(storage)
    if isinstance(storage, Path):
        return _open_journal(storage)
    try:
        return _open_database(storage)
    except Exception as error:  # whatever the database's driver raises
        line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if isinstance(error.__cause__, ModuleNotFoundError):  # of the driver that the URL asks for, or implies
            line = f"{error.__cause__}: install it, or name another driver (postgresql+psycopg2://)"
        message = without_password(f"cannot open the Optuna storage {storage}: {line}", storage)
        raise StoreError(message) from None  # what the driver says in full may hold the password


def _open_database(url: str) -> BaseStorage:
    """Open a database, whose tables another search may make at the same moment."""
    from optuna.storages import RDBStorage
    from sqlalchemy.exc import DBAPIError

    for left in reversed(range(_MOST_TRIES)):
        try:
            return RDBStorage(url)
        except Exception as error:  # one of Optuna's has the database's own as its cause
            cause = error if isinstance(error, DBAPIError) else error.__cause__
            if not (left and isinstance(cause, DBAPIError) and _MADE_BY_ANOTHER.search(str(cause.orig))):
                raise
            time.sleep(_PAUSE_S)
    raise AssertionError("the last try raises")


def check_storage(storage: str | os.PathLike[str]) -> str | Path:
    """The URL of a database, or the path of a journal file that Optuna may have written. Nothing is written."""
    if isinstance(storage, str) and (database := DATABASE.fullmatch(storage)):
        _check_database(Path(database["path"]))
        return storage
    if isinstance(storage, str) and "://" in storage:
        return storage
    path = Path(storage).expanduser()
    head = b""
    if path.is_file():
        with contextlib.suppress(OSError), open(path, "rb") as file:
            head = file.read(64)
    is_named_so = path.suffix.lower() in (".db", ".sqlite", ".sqlite3") and not _OPERATION.match(head)
    if is_named_so or head.startswith(_SQLITE):
        _check_database(path)
        return f"sqlite:///{path.absolute()}"
    check_writable(path, _is_journal, f"{_JOURNAL}, or a SQLite database")
    return path


def _is_journal(content: bytes) -> bool:
    return bool(_OPERATION.match(content)) or b'{"op_code":0,"worker_id":"'.startswith(content)  # torn at once


def _check_database(path: Path) -> None:
    """Refuse a file that is no SQLite database, and a database with tables of another program."""
    check_writable(path, lambda content: content.startswith(_SQLITE), "a SQLite database")
    if not path.is_file() or not path.stat().st_size:
        return
    try:
        with contextlib.closing(
            sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro", uri=True)
        ) as opened:
            tables = {name for (name,) in opened.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except sqlite3.OperationalError:  # another process has it locked: opening it says so
        return
    except sqlite3.Error as error:
        raise StoreError(f"cannot open the SQLite database {path}: {error}") from None
    if tables and "studies" not in tables:
        raise StoreError(f"{path} is a database of another program, not of Optuna: choose another file")


def _open_journal(path: Path) -> BaseStorage:
    from ensemble.search.journal import Journal

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _mend_journal(path)
        return Journal(str(path), STALE_LOCK_S)
    except (ValueError, KeyError, AssertionError, TypeError) as error:  # its middle is damaged
        raise StoreError(
            f"{path} is not {_JOURNAL}, or is damaged ({type(error).__name__}: {error}): it is left as it "
            "is; choose another file"
        ) from None
    except OSError as error:
        raise StoreError(f"cannot open the Optuna journal {path}: {error.strerror}") from error


def _mend_journal(path: Path) -> None:
    from optuna.storages.journal import JournalFileSymlinkLock

    lock = path.with_name(path.name + ".lock")
    with contextlib.suppress(FileNotFoundError):
        if not lock.is_symlink() and lock.stat().st_size:  # Optuna would take it for its own, and remove it
            raise StoreError(f"{lock} is in the way of Optuna's lock: choose another storage, or move that file")
        if abs(time.time() - os.lstat(lock).st_mtime) > STALE_LOCK_S:  # a clock may have been ahead
            lock.unlink()
    if not path.exists() or _find_torn_line(path) is None:
        return
    writing = JournalFileSymlinkLock(str(path), STALE_LOCK_S)  # what another process is writing is not torn
    writing.acquire()
    try:
        if (whole := _find_torn_line(path)) is not None:
            os.truncate(path, whole)
    finally:
        writing.release()


def _find_torn_line(path: Path) -> int | None:
    """Where the last line of a journal begins, if that is incomplete.

    Raises:
        StoreError: a line of it is no operation.
    """
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    for number, line in enumerate(content[:whole].splitlines(), start=1):
        if not _OPERATION.match(line):
            raise StoreError(
                f"{path}: line {number} is not of {_JOURNAL}; it is left as it is: choose another file"
            )
    return whole if whole < len(content) else None


#: Parameters of a URL's query with secret values: passwd, sslpassword, token, api_key ...
_SECRET = re.compile(r"[?&;]([^=&;#]*(?:pass|pwd|token|secret|credential|key)[^=&;#]*)=([^&;#]+)", re.IGNORECASE)
_TOKEN_LENGTH = 12  # a user part of at least so many characters without a password is taken for a token


def without_password(text: str, url: str) -> str:
    """Replace the secrets of a storage URL in a text by stars, in their encoded and decoded forms.

    Secrets are the password, the values of query parameters such as token or key, and the user part, which may be
    a token: within the URL always, elsewhere in the text if it is long and no password follows it.
    """
    scheme, _, address = url.partition("://")
    login, at, _ = address.rpartition("@")
    user, _, password = login.partition(":")
    secrets = {password, *(value for _, value in _SECRET.findall(address))}
    if len(user) >= _TOKEN_LENGTH and len(password) < _TOKEN_LENGTH:
        secrets.add(user)
    if at:
        text = text.replace(f"{scheme}://{login}@", f"{scheme}://***@")
    for secret in sorted(secrets | {unquote(one) for one in secrets}, key=len, reverse=True):
        if secret:
            text = text.replace(secret, "***")
    return text
