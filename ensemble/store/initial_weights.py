"""Keeps the weights that a member starts with: the run's own copy of another member's checkpoint, or of a file.

The other member goes on and replaces its checkpoint. The copy is a hard link where the file system has them, which
costs no room until then: a checkpoint is replaced as a whole and never written in place.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ensemble.events import Checkpoint
from ensemble.store.checkpoint import is_checkpoint, load_checkpoint, save_checkpoint, weights_sha256
from ensemble.store.digests import pin_file
from ensemble.store.files import (
    StoreError,
    fsync_directory,
    make_directory,
    make_write_error,
    write_atomically,
)
from ensemble.store.rundir import RunDir

_PREFIX = ".initial-weights."


@dataclass(frozen=True)
class KeptCheckpoint:
    """A copy of a checkpoint that no member has yet.

    Attributes:
        path: of the copy.
        epoch, step: of the member that wrote it; None for a plain file of weights.
        weights_sha256: digest of its weights and buffers.
        digest: of the file, by the log; None where that does not know it.
    """

    path: Path
    epoch: int | None
    step: int | None
    weights_sha256: str
    digest: str | None = None

    def give_to(self, run_dir: RunDir, member: str) -> None:
        """Make it the weights that a member starts with.

        Raises:
            WriteError: it cannot be.
        """
        target = run_dir.initial_weights(member)
        try:
            make_directory(target.parent)
            os.replace(self.path, target)
            self.path.unlink(missing_ok=True)  # rename(2) does nothing where both are links to one file
            fsync_directory(target.parent)
        except OSError as error:
            raise make_write_error(target, error) from None

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def keep_checkpoint(run_dir: RunDir, checkpoint: Path, logged: Checkpoint) -> KeptCheckpoint:
    """Copy the checkpoint of a member that may be writing the next one.

    Only the controller calls it: copies that a killed one left are removed.

    Args:
        logged: the member's last `checkpoint` event. Where the file is of that step, its digest is taken from
            there: to compute that of a gigabyte takes seconds. It may be a later one, whose event is on its way.

    Raises:
        StoreError: it is not there, is damaged, or cannot be copied.
    """
    path = _make_room(run_dir)
    _link_or_copy(checkpoint, path)
    try:
        position = load_checkpoint(path, ("position",), logged.digest)["position"]
        is_logged = (logged.epoch, logged.step) == (position["epoch"], position["step"])
        digest = logged.weights_sha256 if is_logged else None
        if digest is None:
            digest = weights_sha256(load_checkpoint(path, parts=("model",))["model"])
        file_digest = logged.digest if is_logged else None
        return KeptCheckpoint(path, position["epoch"], position["step"], digest, file_digest)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def keep_weights(run_dir: RunDir, file: Path) -> KeptCheckpoint:
    """Copy the weights of a file that somebody may change: a safetensors file of a state dict, or a checkpoint.

    Only the controller calls it, see `keep_checkpoint`.

    Raises:
        StoreError: it is neither, cannot be read, or cannot be copied.
    """
    state = read_weights(file)
    path, position = _make_room(run_dir), state.get("position", {})
    save_checkpoint(path, state)
    return KeptCheckpoint(path, position.get("epoch"), position.get("step"), weights_sha256(state["model"]))


def digest_weights(file: Path) -> str:
    """The digest of the weights that `keep_weights` would copy."""
    return weights_sha256(read_weights(file)["model"])


def read_weights(file: Path) -> dict[str, Any]:
    """The part `model`, and of a checkpoint also `base`, `loose` and `position`.

    Raises:
        StoreError: it is not a safetensors file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with pin_file(file) as name, safe_open(name, framework="pt") as opened:
            if not is_checkpoint(opened.metadata()):
                names = opened.keys()
                return {"model": {name: opened.get_tensor(name).clone() for name in names}}
    except (OSError, SafetensorError, ValueError) as error:
        raise StoreError(
            f"{file} is not a safetensors file ({error}); safetensors.torch.save_file(model.state_dict(), path) "
            "writes one"
        ) from None
    return load_checkpoint(file, parts=("model", "base", "loose", "position"))


def _make_room(run_dir: RunDir) -> Path:
    """A new name for a copy; copies that a killed controller left are removed."""
    folder = run_dir.path / "members"
    for leftover in folder.glob(f"{_PREFIX}*"):
        leftover.unlink(missing_ok=True)
    return folder / f"{_PREFIX}{uuid.uuid4().hex}"


def load_initial_state(
    run_dir: RunDir,
    member: str,
    digest: str,
    parts: tuple[str, ...] | None = None,
    file_digest: str | None = None,
) -> dict[str, Any]:
    """The checkpoint that a member starts with, on the CPU.

    Args:
        digest: of its weights and buffers, by the log.
        parts: of the checkpoint, `model` among them; None: all.
        file_digest: of the whole file, by the log; None: it is not known.

    Raises:
        StoreError: it is missing or damaged, or has other weights than those that the log names.
    """
    path = run_dir.initial_weights(member)
    state: dict[str, Any] = load_checkpoint(path, parts, file_digest)
    own_digest = weights_sha256(state["model"])
    if own_digest != digest:
        raise StoreError(
            f"{path} has other weights ({own_digest[:12]}) than {member} is to start with ({digest[:12]})"
        )
    return state


def _link_or_copy(source: Path, target: Path) -> None:
    with contextlib.suppress(OSError):  # such as a file system without hard links; a copy tells why it fails
        os.link(source, target)
        return
    try:
        with pin_file(source) as name:
            write_atomically(target, lambda temporary: _copy(name, temporary))
    except FileNotFoundError:
        raise StoreError(f"there is no checkpoint {source}") from None
    except OSError as error:
        raise make_write_error(target, error) from None


def _copy(source: str, target: Path) -> None:
    shutil.copyfile(source, target)
