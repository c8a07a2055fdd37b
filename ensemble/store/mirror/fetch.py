"""Fetches a run, or its log alone, from a mirror into a directory of this user.

A bucket has no owner that could be checked, and whoever may write to it may put code there. So nothing of it is
loaded unless the digest that the user gives is that of the declaration and the code there (`layout.digest_code`).
What the digest does not cover is data: the log, checkpoints, predictions, arrays. Each is compared with the head's
digest when it is fetched, and with the log's when it is read; none of it is unpickled or imported, and the log
does not say what is (`log_check`).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from ensemble.spec import SpecError
from ensemble.store.errors import DamagedError, StoreError
from ensemble.store.files import make_write_error
from ensemble.store.mirror.bucket import Bucket, GoneError, MirrorError
from ensemble.store.mirror.claim import hash_file, read_head
from ensemble.store.mirror.layout import (
    STARTS,
    MirrorHead,
    Stored,
    check_url,
    digest_code,
    is_code,
    is_url,
    prefix_of,
    read_numbers,
)
from ensemble.store.mirror.log_check import check_log
from ensemble.store.mirror.status import MirrorStatus, save_status
from ensemble.store.run_paths import RunPaths
from ensemble.store.rundir import RunDir

T = TypeVar("T")

#: How often it is tried to read what a run in progress has replaced, or a store does not give; files at a time.
TRIES, BACK_OFF_S, READERS = 5, 0.5, 8

#: Arrays that are no column of a source: what functions hold (`ensemble.store.declaration`).
_OF_FUNCTIONS = re.compile(r"data/array-[0-9a-f]{32}\.npy")
_OF_MODEL = re.compile(r"packs/[^/]+|members/[^/]+/(?:checkpoint|predictions)[^/]*\.safetensors")


def fetch_run(url: str, into: Path | None, trust: str | None, *, model_only: bool = False) -> RunDir:
    """Fetch a run into a new directory.

    Args:
        url: of its mirror.
        into: the directory; None: a temporary one, which is removed when this process ends.
        trust: the digest of its declaration and code, as the run said it when it was started.
        model_only: fetch what `load` needs, not the data.

    Raises:
        StoreError: there is no run, its code has another digest, its log names other code or what is no file of a
            run, or the directory is not empty.
        DamagedError: an object does not hold what its name says.
        MirrorError: the store does not answer.
    """
    bucket = Bucket(check_url(url))
    if into is not None and into.exists() and not (into.is_dir() and not any(into.iterdir())):
        raise StoreError(f"{into} is not empty: give a new directory with --into, or resume the run that is there")
    target = Path(tempfile.mkdtemp(prefix="ensemble-mirror-")) if into is None else into.absolute()
    if into is None:
        _remove_at_exit(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _made_whole(target) as made:
            head = _fetch(bucket, made, lambda name: not model_only or _is_of_model(name), trust)
            check_log(RunDir(made), bucket.url)
            save_status(
                RunPaths(made), MirrorStatus(url=bucket.url, code=digest_code(head.files), is_fetched=True)
            )
    except OSError as error:
        raise make_write_error(target, error) from None
    return RunDir(target)


def open_run(path: str | os.PathLike[str], trust: str | None, *, model_only: bool = False) -> RunDir:
    """A run's directory, fetched to a temporary one where an address is given; the arguments are `fetch_run`'s.

    Raises:
        SpecError: a digest is given for a directory.
    """
    if is_url(str(path)):
        return fetch_run(str(path), None, trust, model_only=model_only)
    if trust is not None:
        raise SpecError(f"trust= is the digest of a mirror's code, and {path} is no address of one")
    return RunDir(path)


def fetch_log(url: str) -> tuple[RunDir, MirrorHead]:
    """Fetch the log of a run into a temporary directory, which is removed when this process ends.

    Returns:
        The directory, with the log alone, and what is at the address. Nothing of it is code.

    Raises:
        StoreError, DamagedError, MirrorError: as `fetch_run`.
    """
    target = Path(tempfile.mkdtemp(prefix="ensemble-mirror-"))
    _remove_at_exit(target)
    return RunDir(target), _fetch(Bucket(check_url(url)), target, lambda name: False, None, runs_code=False)


def _is_of_model(name: str) -> bool:
    return is_code(name) or bool(_OF_FUNCTIONS.fullmatch(name) or _OF_MODEL.fullmatch(name))


def _fetch(
    bucket: Bucket, target: Path, wants: Callable[[str], bool], trust: str | None, *, runs_code: bool = True
) -> MirrorHead:
    done: dict[str, Stored] = {}
    for left in reversed(range(TRIES)):
        try:
            head = _patiently(lambda: read_head(bucket, read_numbers(bucket.list(STARTS))))
            if head is None:
                raise StoreError(f"no run here: {bucket.url} holds no mirror of a run")
            if runs_code:
                _check_trust(bucket.url, head, trust)
            files = {name: stored for name, stored in head.files.items() if wants(name)}
            _fetch_files(bucket, head, target, files, done)
            _fetch_segments(bucket, head, target)
            return head
        except GoneError:  # a run in progress has replaced it
            if not left:
                raise
            time.sleep(BACK_OFF_S)  # its next head may be on its way
    raise AssertionError


def _check_trust(url: str, head: MirrorHead, trust: str | None) -> None:
    found = digest_code(head.files)
    if trust == found:
        return
    compare = (
        "compare it with what the run said when it was started (its line 'mirror:'), or with "
        "`ensemble status RUN_DIR` where it ran"
    )
    if trust is None:
        raise StoreError(
            f"{url} holds code that would run here, and a bucket does not say who wrote it. The digest of that "
            f"code is {found}: {compare}, and give --trust {found} (trust= in Python) if it is the same"
        )
    raise StoreError(
        f"{url} is not loaded: the digest of the code there is {found}, and {trust} is trusted; {compare}: a "
        "start with edited code has another one"
    )


def _fetch_files(
    bucket: Bucket, head: MirrorHead, target: Path, files: Mapping[str, Stored], done: dict[str, Stored]
) -> None:
    """Fetch files; `done`: those that an earlier call has fetched, to which these are added."""

    def fetch(name: str, stored: Stored) -> None:
        if done.get(name) == stored:
            return
        path = target / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        done.pop(name, None)
        _fetch_object(bucket, head, stored, path)
        done[name] = stored

    with ThreadPoolExecutor(READERS) as pool:
        pending = [pool.submit(fetch, name, stored) for name, stored in files.items()]
        try:
            for each in pending:
                each.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    known = set(files)
    for path in [each for each in target.rglob("*") if each.is_file()]:  # of a head that was replaced meanwhile
        if path.relative_to(target).as_posix() not in known:
            path.unlink()
            done.pop(path.relative_to(target).as_posix(), None)


def _fetch_segments(bucket: Bucket, head: MirrorHead, target: Path) -> None:
    log, part = RunPaths(target).events, target / ".segment"
    with open(log, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as whole:
        for segment in head.log:
            _fetch_object(bucket, head, segment, part)
            with open(part, "rb") as file:
                shutil.copyfileobj(file, whole)
    part.unlink(missing_ok=True)
    if not _holds(log, Stored(head.log_digest, head.log_bytes)):
        raise DamagedError(f"{bucket.url} is damaged: its log is not what its head says")


def _fetch_object(bucket: Bucket, head: MirrorHead, stored: Stored, path: Path) -> None:
    name = f"{prefix_of(head.start)}/{stored.digest}"
    _patiently(lambda: bucket.fetch(name, path))
    path.chmod(0o600)
    if not _holds(path, stored):
        path.unlink()
        raise DamagedError(
            f"{bucket.url} is damaged: {name} does not hold what its name says; nothing of it is used"
        )


def _holds(path: Path, stored: Stored) -> bool:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), open(path, "rb") as file:
        return hash_file(file.fileno()) == stored
    return False


def _patiently(read: Callable[[], T]) -> T:
    """What is read, after some tries where the store does not give it."""
    for tried in range(TRIES):
        try:
            return read()
        except GoneError:
            raise
        except MirrorError:
            if tried == TRIES - 1:
                raise
            time.sleep(BACK_OFF_S * 2**tried)
    raise AssertionError


@contextlib.contextmanager
def _made_whole(target: Path) -> Iterator[Path]:
    """Yields a new directory beside a path, which takes its name at the end, or is removed."""
    made = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield made
        with contextlib.suppress(FileNotFoundError):
            target.rmdir()
        made.rename(target)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


def _remove_at_exit(path: Path) -> None:
    import atexit

    atexit.register(shutil.rmtree, path, ignore_errors=True)
