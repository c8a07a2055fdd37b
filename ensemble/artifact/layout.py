"""An artifact on disk: its files, how they are written whole or not at all, and its record.

    model.pt2             a `torch.export` program: a batch (field -> tensor [b, ...]) to values [b, ...]
    uncertainty.pt2       where the task has them: the same batch to values and uncertainties [b, ...], by name
    model.safetensors     the weights of both, by the names that the loaded ensemble gives them
    artifact.json         what they take and return, how it is to be read (`read_record`)
    README.md             the model card
    ledger.json           what the run used

The folder needs torch alone. Nothing in it is a pickle, but `torch.export.load` unpickles parts of a .pt2 file
that say so: load no artifact that you do not trust. `ensemble predict` refuses one with pickles.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ensemble.store.digests import digest_bytes, digest_file, open_checked
from ensemble.store.errors import DamagedError, explain_format
from ensemble.store.files import StoreError, fsync_directory, make_write_error

VERSION = 1
KIND = "ray-ensemble artifact"
PROGRAM, UNCERTAINTY, WEIGHTS = "model.pt2", "uncertainty.pt2", "model.safetensors"
RECORD, CARD, LEDGER = "artifact.json", "README.md", "ledger.json"
#: What a record has, see `read_record`.
_KEYS = ("task", "fields", "outputs", "uncertainty", "classes", "members", "weights", "conformal", "stages")


class ArtifactError(StoreError):
    """An artifact cannot be made or used; the message is one line that says what is wrong and what to do."""


def is_artifact(path: str | os.PathLike[str]) -> bool:
    """Whether a folder is an artifact, of whatever version."""
    try:
        record = json.loads((Path(path) / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(record, dict) and record.get("kind") == KIND


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
    """Raises where an artifact cannot be put: there is something at `path`.

    Raises:
        ArtifactError: see above.
    """
    is_empty = path.is_dir() and not path.is_symlink() and not os.path.ismount(path) and not any(path.iterdir())
    if os.path.lexists(path) and not is_empty:
        raise ArtifactError(f"{path} exists and is left as it is: choose a new folder, or remove it")


def write_folder(path: Path, write: Callable[[Path], None]) -> None:
    """Make the folder with what `write(temporary)` puts into it, or leave all as it was.

    Raises:
        ArtifactError: there is something else at `path`.
        WriteError: it could not be written.
    """
    check_target(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir(mode=0o755)
        write(temporary)
        for file in temporary.iterdir():
            _flush(file)
        fsync_directory(temporary)
        os.rename(temporary, path)  # fails where something has come there while it was written
        fsync_directory(path.parent)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            raise make_write_error(path, error) from None
        raise


def _flush(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fchmod(descriptor, 0o644)  # what writes safetensors lets nobody else read them
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
