"""`list_contents`: every file of a run directory, with what it holds and of whom."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ensemble.events import CodeSaved, RunStarted
from ensemble.store import StoreError, read_events
from ensemble.store.frozen_arrays import IN_MEMORY, KEPT, is_name

if TYPE_CHECKING:
    from ensemble.spec import Ensemble
    from ensemble.store import RunDir

#: What files hold and of whom, by a pattern of their paths; the first that fits.
_KINDS = (
    ("members/checker/*", "output of the processes that compare shared samples", "the run"),
    ("members/*/log.txt", "all that the member printed", "{member}"),
    ("members/*/checkpoint-*", "weights, state of the optimizer, hyperparameters", "{member}"),
    ("members/*/initial-weights*", "weights that the member began with", "{member}"),
    ("members/*/predictions*", "a prediction, an index and a target for each sample", "{member}"),
    ("members/*", "numbers of samples in preparation", "{member}"),
    ("code/*/code.json", "names and digests of the code", "your code"),
    ("code/*.py", "the whole text of a module", "your code"),
    ("spec.py", "the whole text of the spec file", "your code"),
    ("code/*/ensemble.pkl", "the same as ensemble.pkl, with other code or the same", "your code and data"),
    ("events.jsonl", "events: hyperparameters, metrics, messages of errors, names of nodes", "the run"),
    ("snapshot.msgpack", "the state of the run by the events", "the run"),
    ("run.json", "name, versions of libraries, folder of the code", "the run"),
    ("ledger*", "CPU-seconds and joules", "the run"),
    ("metrics.csv", "metrics of each epoch", "all members"),
    ("uncertainty.csv", "uncertainties and targets of each sample", "the validation and test data"),
    ("optuna.journal", "hyperparameters and metrics", "all members"),
    ("prior-trials.json", "hyperparameters and values of an earlier study", "the run"),
    ("report.html", "the report, with figures, and predictions of some samples", "the run"),
    ("results.json", "metrics of the members and of the combined model", "all members"),
    ("summary.json", "metrics of the members and of the combined model", "all members"),
    ("mirror.json", "the address of the mirror, and what is missing there", "the run"),
    ("tensorboard/*", "what a logger has written", "all members"),
    ("mlflow/*", "what a logger has written", "all members"),
    ("wandb/*", "what a logger has written", "all members"),
    ("loggers/*", "what loggers have written, and their messages", "all members"),
    ("requests/*", "requests to the run", "the run"),
    ("digests.json", "digests of results", "the run"),
    ("compiled/*", "kernels that torch.compile has made", "your code"),
)
_UNKNOWN = "not known"


def list_contents(run_dir: RunDir) -> list[dict[str, Any]]:
    """All files of a run directory.

    The declaration is unpickled, which runs code of the run: it is done for one of this user's only.

    Returns:
        A row for each: `file`, its path in the directory; `bytes`; what it `holds`; and `of` whom.

    Raises:
        StoreError: there is no run in the directory.
    """
    known = run_dir.info
    try:
        declared: Ensemble | None = run_dir.load_ensemble()
    except StoreError:
        declared = None
    rows = []
    for path in _list_files(run_dir):
        name = path.relative_to(run_dir.path).as_posix()
        if name == run_dir.ensemble_file.name:
            holds, of = _describe_declaration(declared), "your code and data"
        elif path.parent == run_dir.data and is_name(path.name):
            holds, of = _describe_array(path), "your data"
        else:
            holds, of = _describe(name)
        size = 0 if path.suffix == IN_MEMORY else path.lstat().st_size
        rows.append({"file": name, "bytes": size, "holds": holds, "of": of or str(known["name"])})
    return rows


def _describe(name: str) -> tuple[str, str]:
    parts = name.split("/")
    for pattern, holds, of in _KINDS:
        if fnmatch.fnmatch(name, pattern):
            return holds, of.format(member=parts[1] if len(parts) > 1 else "")
    return _UNKNOWN, _UNKNOWN


#: The files that a run writes at the top of its directory, and those in folders, besides its code and data.
_TOP = [
    "events.jsonl",
    "snapshot.msgpack",
    "run.json",
    "ensemble.pkl",
    "spec.py",
    "ledger.json",
    "ledger.csv",
    "results.json",
    "summary.json",
    "metrics.csv",
    "uncertainty.csv",
    "report.html",
    "optuna.journal",
    "prior-trials.json",
    "digests.json",
    "mirror.json",
]
_DEEPER = (
    "members/*/log.txt",
    "members/*/checkpoint-*.safetensors",
    "members/*/initial-weights.safetensors",
    "members/*/predictions*.safetensors",
    "members/*/preparing-*",
    "members/*/failure-*.json",
    "members/*/rendezvous-*",
    "loggers/*.json",
    "loggers/*.lock",
    "usage/*.json",
    "requests/*.json",
    "feeders/cohort-*/*",
    "code/*/code.json",
    "code/*/ensemble.pkl",
)
#: Folders in which libraries write what they like.
_OF_LIBRARIES = ("tensorboard", "mlflow", "wandb", "compiled")


def find_foreign_files(run_dir: RunDir) -> list[str]:
    """The files and links of a run directory, by their paths in it, that no run writes, as far as it is known.

    Raises:
        StoreError: its log cannot be read.
    """
    written = (event for event in read_events(run_dir.events) if isinstance(event, CodeSaved | RunStarted))
    logged = {name for event in written for name in event.files}
    found = []
    for path in _list_files(run_dir):
        parts = path.relative_to(run_dir.path).parts
        is_own = (
            "/".join(parts) in logged
            or parts[0] in _OF_LIBRARIES
            or (len(parts) == 2 and parts[0] == run_dir.data.name and is_name(parts[1]))
            or (len(parts) == 1 and parts[0] in _TOP)
            or any(_fits(parts, pattern.split("/")) for pattern in _DEEPER)
        )
        if not is_own:
            found.append("/".join(parts))
    return found


def _fits(parts: Sequence[str], patterns: Sequence[str]) -> bool:
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


def _list_files(run_dir: RunDir) -> list[Path]:
    return sorted(each for each in run_dir.path.rglob("*") if each.is_file() or each.is_symlink())


def _describe_array(path: Path) -> str:
    name = path.stem.rpartition("-")[0]
    if path.suffix != KEPT:
        return f"nothing: {name!r} is in the memory of the process that drives the run"
    try:
        array = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError):
        return f"{name!r}, unreadable"
    return f"{name!r}, {array.dtype} {list(array.shape)}"


def _describe_declaration(declared: Ensemble | None) -> str:
    """The declaration, with the arrays that are small enough to be in it."""
    if declared is None:
        return "the declaration, which cannot be loaded here"
    columns = [
        f"{split} {column}" for split in ("train", "valid", "test", "shifted") for column in _list(declared, split)
    ]
    inside = f"; the arrays {', '.join(columns)}" if columns else ""
    return f"the declaration, with functions and what they use by value{inside}"


def _list(declared: Ensemble, split: str) -> Iterator[str]:
    from pipelines.sources._arrays import Arrays

    pipeline = declared.first_pipeline() if split == "train" else getattr(declared, split)
    source: Any = getattr(pipeline, "source", None)
    while not isinstance(source, Arrays) and hasattr(source, "source"):
        source = source.source
    if isinstance(source, Arrays):
        for name in dict.fromkeys(name for name, _ in source.list_arrays()):
            yield f"{name!r} ({len(source)} records)"
