"""Says where each file of a run lies in its directory (docs/concepts/run-directory.md describes each).

The event log is the truth, and what is derived can be made again from it and from the files that it names.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ensemble.store.errors import DamagedError, StoreError
from pipelines.sources._remote import is_url

if TYPE_CHECKING:
    from ensemble.store.member import MemberState

FILES = "files"  # the folder of what a member's train function saves itself


class RunPaths:
    """The paths of one run; the constructor does not access the disk.

    Raises:
        StoreError: an address is given.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        path = getattr(path, "run_dir", path)  # of a Run or a Result
        if not isinstance(path, str | os.PathLike):
            raise StoreError(f"a run directory is a path, such as result.run_dir, got {type(path).__name__}")
        if is_url(os.fspath(path)):
            raise StoreError(
                f"{os.fspath(path)} is an address, not a run directory: `ensemble fetch URL RUN_DIR` brings a run "
                "back from its mirror"
            )
        self.path = Path(path).expanduser().absolute()
        self.events = self.path / "events.jsonl"
        self.snapshot = self.path / "snapshot.msgpack"
        self.info_file = self.path / "run.json"
        self.ensemble_file = self.path / "ensemble.pkl"
        self.spec_file = self.path / "spec.py"
        self.data = self.path / "data"
        self.requests = self.path / "requests"
        self.ledger = self.path / "ledger.json"
        self.ledger_csv = self.path / "ledger.csv"
        self.results = self.path / "results.json"
        self.metrics_csv = self.path / "metrics.csv"
        self.loggers = self.path / "loggers"
        self.report = self.path / "report.html"
        self.journal = self.path / "optuna.journal"
        self.mirror = self.path / "mirror.json"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    def __fspath__(self) -> str:
        return str(self.path)

    def member(self, id: str) -> Path:
        """The directory of one member.

        Raises:
            StoreError: its name is none of a directory: a log or a request may have any text there.
        """
        return self.path / "members" / _check_name("member", id)

    def checkpoint(self, id: str, attempt: int, epoch: int, step: int) -> Path:
        """The checkpoint that an attempt of a member writes at a position.

        Each has a file of its own: what the log names is never written over by what it does not name yet, neither
        by this attempt nor by one that is taken to be lost and still runs behind a broken network.
        """
        return self.member(id) / f"checkpoint-{attempt}-{epoch}-{step}.safetensors"

    def list_checkpoints(self, id: str) -> list[tuple[tuple[int, int, int], Path]]:
        """The checkpoints of a member that are there, each after its (attempt, epoch, step), in this order."""
        checkpoints = []
        for path in self.member(id).glob("checkpoint-*.safetensors"):
            numbers = path.stem.split("-")[1:]
            if len(numbers) == 3 and all(number.isdecimal() for number in numbers):
                checkpoints.append(((int(numbers[0]), int(numbers[1]), int(numbers[2])), path))
        return sorted(checkpoints)

    def valid_checkpoint(self, member: MemberState) -> Path:
        """The checkpoint that the log names as a member's last one.

        Raises:
            DamagedError: it names none.
        """
        if member.checkpoint is None:
            raise DamagedError(f"{self.path}: {member.id}: {member.explain_no_checkpoint()}")
        return self.member(member.id) / Path(member.checkpoint.path).name

    def initial_weights(self, id: str) -> Path:
        """The weights with which a warm clone, or a member with a declared start, begins."""
        return self.member(id) / "initial-weights.safetensors"

    def files(self, id: str) -> Path:
        return self.member(id) / FILES

    def log(self, id: str) -> Path:
        return self.member(id) / "log.txt"

    def code(self, fingerprint: str) -> Path:
        """The folder of the code with this fingerprint.

        Raises:
            StoreError: it is none: a log may have any text there.
        """
        return self.path / "code" / _check_name("version of the code", fingerprint)

    def feeders(self, cohort: int) -> Path:
        """The rendezvous directory of the feeders of a cohort that spans several nodes."""
        return self.path / "feeders" / f"cohort-{cohort}"

    def predictions(self, id: str, attempt: int | None = None) -> Path:
        """The member's predictions on all splits; `attempt`: of one that has not finished yet."""
        return self.member(id) / f"predictions{'' if attempt is None else f'-{attempt}'}.safetensors"

    def remove_unfinished_predictions(self, id: str) -> None:
        """Remove the predictions of a member's attempts that ended without finishing; none may still run."""
        for file in self.member(id).glob("*predictions-[0-9]*"):  # with temporary files, `.predictions-0….tmp`
            file.unlink(missing_ok=True)

    def list_results(self) -> list[Path]:
        """What is written of a run that has ended; the report where the extension that makes it is there."""
        report = [self.report] if importlib.util.find_spec("ensemble.reporting.report") else []
        return [*report, self.ledger, self.ledger_csv, self.results, self.metrics_csv]

    def logger_state(self, name: str) -> Path:
        """Where a logger notes how far it has followed the log."""
        return self.loggers / f"{name}.json"

    def list_missing_results(self) -> list[str]:
        """The names of the results that are not there, or empty."""
        return [path.name for path in self.list_results() if not path.exists() or not path.stat().st_size]


def _check_name(what: str, name: str) -> str:
    if not name or name in (".", "..") or "/" in name or "\0" in name:
        raise StoreError(f"{name[:100]!r} is not a name of a {what}: it must be one part of a path")
    return name
