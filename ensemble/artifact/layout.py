"""An artifact on disk: its files, how they are written whole or not at all, and its record.

    model.pt2             a `torch.export` program: a batch (field -> tensor [b, ...]) to values [b, ...]
    uncertainty.pt2       where the task has them: the same batch to values and uncertainties [b, ...], by name
    model.safetensors     the weights of both, by the names that the loaded ensemble gives them
    model.onnx            on request: the same as model.pt2
    artifact.json         what they take and return, how it is to be read (`read_record`)
    README.md             the model card
    ledger.json           what the run used

The folder needs torch alone. Nothing in it is a pickle, but `torch.export.load` unpickles parts of a .pt2 file
that say so: load no artifact that you do not trust. `ensemble predict` refuses one with pickles.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import glob
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ensemble.store.digests import digest_bytes, digest_file, open_checked
from ensemble.store.errors import DamagedError, explain_format
from ensemble.store.files import StoreError, fsync_directory, make_write_error

VERSION = 1
KIND = "ray-ensemble artifact"
PROGRAM, UNCERTAINTY, WEIGHTS, ONNX = "model.pt2", "uncertainty.pt2", "model.safetensors", "model.onnx"
RECORD, CARD, LEDGER = "artifact.json", "README.md", "ledger.json"
FILES = frozenset((PROGRAM, UNCERTAINTY, WEIGHTS, ONNX, RECORD, CARD, LEDGER))
#: What a record has, see `read_record`.
_KEYS = (
    "task",
    "fields",
    "outputs",
    "uncertainty",
    "classes",
    "members",
    "weights",
    "method",
    "conformal",
    "stages",
)
#: What a system puts into folders: lost with an artifact that is replaced. NFS keeps removed files that are open.
_OF_SYSTEM = (".DS_Store", ".nfs*")
#: An export whose folder is unchanged for so long is not under way: other hosts may not see its lock.
_LEFT_S = 3600
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # renameat2(2)


class ArtifactError(StoreError):
    """An artifact cannot be made or used; the message is one line that says what is wrong and what to do."""


def is_artifact(path: str | os.PathLike[str]) -> bool:
    """Whether a folder is an artifact, of whatever version."""
    try:
        found = json.loads((Path(path) / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found.get("kind") == KIND


def read_record(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What artifact.json says.

    Returns:
        - `kind`, `v`; `name`, `run_id`, `created` (unix time) of the run; `versions`.
        - `task`: as `ensemble.spec.task` records it.
        - `fields`: field -> {"shape", "dtype"} of what the program takes. A shape is a list of numbers and, for
          what may vary, names: "batch" first; `least`: name -> smallest size of those that have one.
        - `outputs`: name -> {"shape", "dtype"} of model.pt2; `uncertainty`: the same of uncertainty.pt2, or None.
        - `classes`: names of the classes or labels, or None.
        - `members`, `weights`, `method`, `calibration`, `conformal`, `thresholds`: how the members are one model.
        - `files`: name -> digest of each other file, and `digest`: of this record without that field.
        - `stages`: {"in_program", "of_caller"}: what is done to a record before the model, in order; each a name
          and a record by which `predict` does it, or None where it is the user's own function.

    Raises:
        ArtifactError: this is no artifact, or one of another format.
    """
    file = Path(path) / RECORD
    if not is_artifact(path):
        raise ArtifactError(f"no artifact here: {file} does not exist or is none; make one with `ensemble export`")
    record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if record.get("digest", digest := _digest_record(record)) != digest:
        raise ArtifactError(
            f"{file} is damaged: its contents do not have the digest that it records; export the run again"
        )
    version = record.get("v")
    lacking = [key for key in _KEYS if key not in record]
    if type(version) is not int or (version == VERSION and lacking):
        raise ArtifactError(f"{file} is damaged: it has no {'version' if not lacking else lacking[0]}")
    if version != VERSION:
        raise ArtifactError(explain_format(path, version, VERSION, "export the run again"))
    return record


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Write artifact.json, with digests of the other files and of itself. Last: it makes a folder an artifact."""
    record = {**record, "files": {file.name: digest_file(file) for file in sorted(folder.iterdir())}}
    record["digest"] = _digest_record(record)
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _digest_record(record: dict[str, Any]) -> str:
    own = {name: value for name, value in record.items() if name != "digest"}
    return digest_bytes(json.dumps(own, sort_keys=True).encode())


def check_file(file: Path, record: dict[str, Any]) -> None:
    """Raises for a file of an artifact that is not what was exported.

    Raises:
        ArtifactError: it is damaged.
    """
    try:
        with open_checked(file, (record.get("files") or {}).get(file.name)):
            pass
    except DamagedError as error:
        raise ArtifactError(f"{error}; export the run again") from None


def check_target(path: Path) -> None:
    """Raises where an artifact cannot be put: what is there is none, or has files or a model card of a user's.

    Raises:
        ArtifactError: see above.
    """
    if not os.path.lexists(path):
        return
    if os.path.ismount(path) and not path.is_symlink():
        raise ArtifactError(f"{path} is a mount point, which cannot be replaced; choose a new folder in it")
    if is_artifact(path) and not path.is_symlink():
        names = {each.name for each in path.iterdir()} - FILES
        others = sorted(name for name in names if not any(map(Path(name).match, _OF_SYSTEM)))
        written = json.loads((path / RECORD).read_text(encoding="utf-8")).get("files") or {}
        if CARD in written and (path / CARD).is_file() and digest_file(path / CARD) != written[CARD]:
            others.insert(0, f"{CARD}, which was edited")
        if others:
            more = ", ..." if len(others) > 3 else ""
            raise ArtifactError(
                f"{path} is an artifact with other files in it ({', '.join(others[:3])}{more}), which would be "
                "lost: move them, or choose another folder"
            )
        return
    if path.is_symlink() or not path.is_dir() or any(path.iterdir()):
        raise ArtifactError(f"{path} exists and is no artifact; choose another folder, or remove it")


def write_folder(path: Path, write: Callable[[Path], None]) -> None:
    """Make the folder with what `write(temporary)` puts into it, or leave all as it was; an artifact is replaced.

    Raises:
        ArtifactError: there is something else at `path`.
        WriteError: it could not be written.
    """
    check_target(path)
    _remove_leftovers(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir(mode=0o755)
        with _lock(temporary):
            write(temporary)
            for file in temporary.iterdir():
                _flush(file)
            fsync_directory(temporary)
            check_target(path)  # what has come while it was written
            _replace(temporary, path)
            fsync_directory(path.parent)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            raise make_write_error(path, error) from None
        raise


def _replace(temporary: Path, path: Path) -> None:
    """Put a folder in the place of an artifact, or of nothing, in one step where the file system can."""
    if not is_artifact(path):
        os.rename(temporary, path)
    elif _exchange(temporary, path):
        shutil.rmtree(temporary, ignore_errors=True)
    else:
        former = temporary.with_suffix(".old")
        os.rename(path, former)
        try:
            os.rename(temporary, path)
        except BaseException:
            os.rename(former, path)
            raise
        shutil.rmtree(former, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two folders in one step; False: the C library or the file system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    return bool(rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0)


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Hold a folder while it is written: one that nobody holds was left behind by a process that was killed."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _remove_leftovers(path: Path) -> None:
    """Remove what exports to this path left behind that were killed, and have not touched since `_LEFT_S`."""
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 32}.tmp"):
        with contextlib.suppress(OSError):  # another export holds it, or there are no locks
            descriptor = os.open(leftover, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                changed = max(each.stat().st_mtime for each in (leftover, *leftover.iterdir()))
                if time.time() - changed > _LEFT_S:
                    shutil.rmtree(leftover)
            finally:
                os.close(descriptor)


def _flush(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fchmod(descriptor, 0o644)  # what writes safetensors lets nobody else read them
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
