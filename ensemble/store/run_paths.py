"""Says where each file of a run lies in its directory.

    run.json                        name, id, versions, revision, when it was made
    ensemble.pkl, spec.py           what the user declared (cloudpickle), and a copy of the spec file
    code/<fingerprint>/             the code that members trained with (`ensemble.store.kept_code`)
    data/                           large arrays of the declaration (`ensemble.store.frozen_arrays`)
    events.jsonl                    the event log, the truth
    snapshot.msgpack                how the run stood at some byte of a long log; a cache
    requests/                       what other shells ask of the run
    members/<id>/                   log.txt, checkpoint-<attempt>-<epoch>-<step>.safetensors (the log names the
                                    valid one, and while the member trains, the one before it is there as well),
                                    predictions.safetensors of the attempt that finished, and of a member that
                                    began warm initial-weights.safetensors, a copy of what it began with
    compiled/                       kernels that torch.compile has made (`ensemble.train.kernel_caches`); a cache
    prior-trials.json               of an earlier Optuna study, which the search knows (`ensemble.search.prior`)
    optuna.journal                  the Optuna study of a search, unless that has another storage: the truth of it
    report.html, ledger.json, ledger.csv,
    results.json, metrics.csv,
    summary.json, uncertainty.csv   derived
    digests.json                    digests of these, as they were written last
    mirror.json                     where the run is mirrored, and what is missing there (`ensemble.store.mirror`)
    loggers/                        what each logger has written (`ensemble.reporting.loggers`), and its messages
    tensorboard/, mlflow/, wandb/   what loggers write, unless they were given another place

What is derived can be made again from the others.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ensemble.events import NOT_COMBINED
from ensemble.store.errors import DamagedError, StoreError
from pipelines.sources._remote import is_url

if TYPE_CHECKING:
    from ensemble.store.member import MemberState
    from ensemble.store.state import RunState


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
        self.usage = self.path / "usage"
        self.ledger = self.path / "ledger.json"
        self.ledger_csv = self.path / "ledger.csv"
        self.results = self.path / "results.json"
        self.summary = self.path / "summary.json"
        self.metrics_csv = self.path / "metrics.csv"
        self.uncertainty_csv = self.path / "uncertainty.csv"
        self.loggers = self.path / "loggers"
        self.report = self.path / "report.html"
        self.journal = self.path / "optuna.journal"
        self.prior = self.path / "prior-trials.json"
        self.mirror = self.path / "mirror.json"
        self.result_digests = self.path / "digests.json"

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
        found = []
        for path in self.member(id).glob("checkpoint-*.safetensors"):
            numbers = path.stem.split("-")[1:]
            if len(numbers) == 3 and all(number.isdecimal() for number in numbers):
                found.append(((int(numbers[0]), int(numbers[1]), int(numbers[2])), path))
        return sorted(found)

    def newest_checkpoint(self, id: str, attempt: int) -> Path | None:
        """The last checkpoint that an attempt has written; None: it has written none."""
        return next((path for (of, *_), path in reversed(self.list_checkpoints(id)) if of == attempt), None)

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

    def log(self, id: str) -> Path:
        """The log file of a member: what it printed."""
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
        for file in self.member(id).glob("predictions-[0-9]*.safetensors"):
            file.unlink(missing_ok=True)

    def list_results(self, state: RunState) -> list[Path]:
        """What is written of the run as it stands when it has ended."""
        found = [self.report, self.ledger, self.ledger_csv, self.results, self.metrics_csv, self.summary]
        return found + ([self.uncertainty_csv] if (state.combined or NOT_COMBINED).metrics else [])


def _check_name(what: str, name: str) -> str:
    if not name or name in (".", "..") or "/" in name or "\0" in name:
        raise StoreError(f"{name[:100]!r} is no name of a {what}: it is not one part of a path")
    return name
