"""The run directory: where a run keeps what a status, a resume or a load needs.

    run.json                        name, id, versions, revision, when it was made
    ensemble.pkl, spec.py           what the user declared (cloudpickle), and a copy of the file that said it
    events.jsonl                    the event log, the truth
    requests/                       what other shells ask of the run
    members/<id>/                   checkpoint.safetensors, log.txt, predictions-<split>.safetensors
    optuna.journal, ledger.json, report.html        derived

Loading `ensemble.pkl` runs code, so it is loaded only when the directory and the file belong to the user.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import stat
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble.store.errors import StoreError
from ensemble.store.files import cannot_write, write_bytes, write_json
from ensemble.store.provenance import revision, versions

if TYPE_CHECKING:
    from ensemble.spec import Ensemble

VERSION = 1

#: Room that must be there before anything starts: a log, a report and a checkpoint of a small model.
PROBE_BYTES = 16 * 2**20


class RunDir:
    """The paths of one run; making one touches nothing on the disk."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self.events = self.path / "events.jsonl"
        self.info_file = self.path / "run.json"
        self.ensemble_file = self.path / "ensemble.pkl"
        self.spec_file = self.path / "spec.py"
        self.requests = self.path / "requests"
        self.ledger = self.path / "ledger.json"
        self.report = self.path / "report.html"
        self.journal = self.path / "optuna.journal"

    def __repr__(self) -> str:
        return f"RunDir({str(self.path)!r})"

    def __fspath__(self) -> str:
        return str(self.path)

    def member(self, id: str) -> Path:
        """The directory of one member."""
        return self.path / "members" / id

    def checkpoint(self, id: str) -> Path:
        """The member's checkpoint."""
        return self.member(id) / "checkpoint.safetensors"

    def log(self, id: str) -> Path:
        """What the member printed."""
        return self.member(id) / "log.txt"

    def feeders(self, cohort: int) -> Path:
        """Where the feeders of a cohort that spans several nodes meet."""
        return self.path / "feeders" / f"cohort-{cohort}"

    def predictions(self, id: str, split: str) -> Path:
        """The member's predictions on a split, `valid` or `test`."""
        return self.member(id) / f"predictions-{split}.safetensors"

    @property
    def info(self) -> dict[str, Any]:
        """What run.json says.

        Raises:
            StoreError: this is no run directory, or one of a newer version.
        """
        try:
            info = json.loads(self.info_file.read_text())
            version = info["v"]
        except (FileNotFoundError, NotADirectoryError):
            raise StoreError(f"no run here: {self.info_file} does not exist; give a run directory") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{self.info_file} is unreadable: {error}") from None
        if version > VERSION:
            raise StoreError(f"{self.path} was made by a newer ray-ensemble; upgrade ray-ensemble to read it")
        return dict(info)

    @classmethod
    def create(
        cls, path: str | os.PathLike[str], ensemble: Ensemble, spec_file: str | os.PathLike[str] | None = None
    ) -> RunDir:
        """Make the directory of a run, or come back to the one that this ensemble already has there.

        On coming back, `run.json` stays and the declaration is replaced by the present one.

        Raises:
            StoreError: it holds another run, cannot be written, has no room, or the ensemble cannot be pickled.
        """
        run_dir = cls(path)
        if run_dir.info_file.exists() and (other := run_dir.info["name"]) != ensemble.name:
            raise StoreError(
                f"{run_dir.path} holds the run of another ensemble ({other!r}, not {ensemble.name!r}); "
                "choose another run directory, or remove it"
            )
        spec = Path(spec_file) if spec_file is not None else None
        content = _pickled(ensemble, spec)
        try:
            run_dir._make(len(content))
            for directory in (run_dir.requests, run_dir.path / "members"):
                directory.mkdir(mode=0o700, exist_ok=True)
            write_bytes(run_dir.ensemble_file, content)
            if spec is not None and spec.absolute() != run_dir.spec_file:
                write_bytes(run_dir.spec_file, spec.read_bytes())
            if not run_dir.info_file.exists():
                write_json(run_dir.info_file, _info(ensemble, spec))
        except OSError as error:
            raise cannot_write(run_dir.path, error) from None
        return run_dir

    def _make(self, needed_bytes: int) -> None:
        if not self.path.is_dir():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir(mode=0o700)
        probe = self.path / f".probe-{uuid.uuid4().hex}"
        try:
            descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, PROBE_BYTES + needed_bytes)
            finally:
                os.close(descriptor)
        finally:
            probe.unlink(missing_ok=True)

    def load_ensemble(self) -> Ensemble:
        """The declaration of the run, as it was pickled.

        Raises:
            StoreError: the directory or the file is not the user's own, is writable by everyone, or its code
                cannot be imported here.
        """
        try:
            _check_own(self.path, os.stat(self.path))
            code = self.info.get("code")
            if code is not None and code not in sys.path:
                sys.path.append(code)
            with open(self.ensemble_file, "rb") as file:
                _check_own(self.ensemble_file, os.fstat(file.fileno()))
                ensemble: Ensemble = pickle.load(file)
        except FileNotFoundError as error:
            raise StoreError(f"no run here: {error.filename} does not exist; give a run directory") from None
        except (ImportError, AttributeError) as error:
            raise StoreError(
                f"{self.ensemble_file} needs code that is not found here ({error}); "
                "start from the directory it was submitted from, or put that on PYTHONPATH"
            ) from error
        except (OSError, pickle.UnpicklingError, EOFError) as error:
            raise StoreError(f"cannot read {self.ensemble_file}: {error}") from error
        return ensemble


def _check_own(path: Path, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise StoreError(f"{path} belongs to another user (uid {found.st_uid}); its code is not run: copy the run")
    if found.st_mode & stat.S_IWOTH:
        raise StoreError(
            f"{path} can be written by everyone; its code is not run: `chmod o-w {path}` if you trust it"
        )


def _info(ensemble: Ensemble, spec: Path | None) -> dict[str, Any]:
    return {
        "v": VERSION,
        "name": ensemble.name,
        "run_id": uuid.uuid4().hex,
        "created": time.time(),
        "versions": versions(),
        "revision": revision(_folder(spec)),
        "code": str(_folder(spec)),
    }


def _folder(spec: Path | None) -> Path:
    """Where the modules lie that the declaration imports beside those that are installed."""
    return spec.resolve().parent if spec is not None else Path.cwd()


def _pickled(ensemble: Ensemble, spec: Path | None) -> bytes:
    import cloudpickle

    with _by_value(spec):
        try:
            return bytes(cloudpickle.dumps(ensemble))
        except Exception as error:  # objects raise whatever they like from __reduce__
            raise StoreError(
                f"ensemble {ensemble.name!r} cannot be sent to other processes: {error}; keep open files, "
                "locks and device tensors out of its functions' closures"
            ) from error


@contextlib.contextmanager
def _by_value(spec: Path | None) -> Iterator[None]:
    """Pickle what the spec file defines itself: other processes and a later resume cannot import that file."""
    import cloudpickle

    file = str(spec.resolve()) if spec is not None else None
    modules = [m for m in list(sys.modules.values()) if file and _file_of(m) == file and m.__name__ != "__main__"]
    new = [m for m in modules if m.__name__ not in cloudpickle.list_registry_pickle_by_value()]
    for module in new:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in new:
            cloudpickle.unregister_pickle_by_value(module)


def _file_of(module: Any) -> str | None:
    file = getattr(module, "__file__", None)
    return os.path.realpath(file) if isinstance(file, str) else None
