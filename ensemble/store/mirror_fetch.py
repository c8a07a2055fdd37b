"""Brings a run back from the address to which it was mirrored."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ensemble.store.digests import digest_file
from ensemble.store.errors import DamagedError, StoreError
from ensemble.store.files import format_command, make_directory
from ensemble.store.mirror import EVENTS, is_of_run
from ensemble.store.mirror_objects import ObjectStore, check_url
from ensemble.store.mirror_status import MirrorStatus, save_status
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
        raise DamagedError(f"{damaged}; all other files are in {target}; {command} restores what it can")
    return target


def _fetch_files(store: ObjectStore, target: Path) -> str:
    """Fetch the files of the manifest; returns what is damaged or missing, in words."""
    damaged: list[str] = []
    for _ in range(TRIES):
        manifest = store.read_manifest()
        if manifest is None or EVENTS not in manifest.files:
            raise StoreError(f"no run here: nothing was copied to {store.url} yet")
        for path, (name, _, _) in manifest.files.items():
            if not is_of_run(path) or not re.fullmatch(re.escape(path) + "@[0-9a-f]+", name):
                raise StoreError(f"{store.url} is damaged, or no mirror of a run: it has a file {path[:100]!r}")
        for file in [path for path in target.rglob("*") if path.is_file()]:  # of the manifest before
            if file.relative_to(target).as_posix() not in manifest.files:
                file.unlink()
        with ThreadPoolExecutor(READERS) as pool:
            files = [(store, target / path, *stored) for path, stored in manifest.files.items()]
            try:
                is_whole = list(pool.map(lambda file: _fetch_file(*file), files))
            finally:
                pool.shutdown(cancel_futures=True)
        damaged = [path for path, whole in zip(manifest.files, is_whole, strict=True) if not whole]
        if not damaged or store.read_manifest() == manifest:  # else the run has replaced them meanwhile
            break
    names = damaged[:5] + ["..."] * (len(damaged) > 5)
    description = f"{store.url} is damaged: {', '.join(names)} missing or not as written" if damaged else ""
    if EVENTS in damaged:
        raise DamagedError(f"{description}; nothing was fetched")
    return description


def _fetch_file(store: ObjectStore, file: Path, name: str, size: int, digest: str) -> bool:
    """Fetch a file unless it is there; returns whether it is as it was written."""

    def is_as_written() -> bool:
        if not file.is_file() or file.stat().st_size < size:
            return False
        os.truncate(file, size)  # what was appended after the manifest was written
        return digest_file(file) == digest

    if not is_as_written():
        make_directory(file.parent, 0o700)
        store.call("get_file", name, str(file))
    if not is_as_written():
        file.unlink(missing_ok=True)
        return False
    file.chmod(0o600)
    return True
