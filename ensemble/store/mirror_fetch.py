"""Brings a run back from the address to which it was mirrored."""

from __future__ import annotations

import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ensemble.store.digests import digest_file
from ensemble.store.errors import DamagedError, StoreError
from ensemble.store.files import format_command, make_directory
from ensemble.store.mirror import (
    EVENTS,
    MirrorStatus,
    ObjectStore,
    StoredFile,
    check_url,
    is_of_run,
    read_manifest,
    save_status,
)
from ensemble.store.run_paths import RunPaths

#: Files that are fetched at a time, and tries to fetch a run that changes meanwhile.
READERS, TRIES = 8, 10


def fetch(url: str, run_dir: str | os.PathLike[str]) -> Path:
    """Bring a run back from the address to which it was mirrored; all commands then work on its directory.

    Its declaration is a pickle, which runs code when the run is resumed or loaded: fetch only what you trust, and
    let nobody else write to the address.

    Args:
        url: as it was given as `mirror=`.
        run_dir: a new directory, or an empty one.

    Returns:
        The directory.

    Raises:
        SpecError: `url` is no address.
        StoreError: there is no run, the directory is not empty, or the store does not answer.
        DamagedError: objects are damaged or missing; all other files are in the directory, unless the event log
            is damaged.
    """
    target, store = RunPaths(run_dir).path, ObjectStore(check_url(url))
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise StoreError(f"{target} is not empty: give a new directory")
    target.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        damaged = _fetch_files(store, made)
        save_status(RunPaths(made), MirrorStatus(url=store.url))
        if target.exists():
            target.rmdir()
        made.rename(target)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    if damaged:
        command = format_command("resume", target)
        raise DamagedError(f"{damaged}; all other files are in {target}; {command} makes again what it can")
    return target


def _fetch_files(store: ObjectStore, target: Path) -> str:
    """Fetch the files of the last manifest; returns what is damaged or missing, in words."""
    damaged: list[str] = []
    for _ in range(TRIES):
        number, manifest = read_manifest(store)
        if manifest is None or EVENTS not in manifest.files:
            raise StoreError(f"no run here: nothing was copied to {store.url} yet")
        if names := [path for path in manifest.files if not is_of_run(path)]:
            raise StoreError(f"{store.url} is damaged, or no mirror of a run: it has a file {names[0][:100]!r}")
        for file in [path for path in target.rglob("*") if path.is_file()]:  # of the manifest before
            if file.relative_to(target).as_posix() not in manifest.files:
                file.unlink()
        with ThreadPoolExecutor(READERS) as pool:
            files = [(target / path, stored) for path, stored in manifest.files.items()]
            pending = [pool.submit(_fetch_file, store, file, stored) for file, stored in files]
            try:
                is_whole = [future.result() for future in pending]
            finally:
                pool.shutdown(cancel_futures=True)
        damaged = [stored.name for (_, stored), whole in zip(files, is_whole, strict=True) if not whole]
        if not damaged or read_manifest(store)[0] == number:  # else the run has replaced them meanwhile
            break
    names = damaged[:5] + ["..."] * (len(damaged) > 5)
    description = f"{store.url} is damaged: {', '.join(names)} missing or not as written" if damaged else ""
    if not RunPaths(target).events.exists():
        raise DamagedError(f"{description}; nothing was fetched")
    return description


def _fetch_file(store: ObjectStore, file: Path, stored: StoredFile) -> bool:
    """Fetch a file unless it is there; returns whether it is as it was written."""
    if not _is_as_written(file, stored):
        make_directory(file.parent)
        store.call("get_file", stored.name, str(file))
    if not _is_as_written(file, stored):
        file.unlink(missing_ok=True)
        return False
    file.chmod(0o600)
    os.utime(file, (stored.mtime, stored.mtime))
    return True


def _is_as_written(file: Path, stored: StoredFile) -> bool:
    return file.is_file() and file.stat().st_size == stored.size and digest_file(file) == stored.digest
