"""Reads the runs of a comparison for the page, and compares the models of pairs of them.

What was read of a run is kept for as long as its log does not change, and so are the figures of its combined model
in each draw of the samples, those that were used last: which run the others are compared with changes nothing that
takes long. How two models differ is kept as well, when one of them no longer is. A call takes
a limited time: what was not reached by then is left for the next one, and the document says how much that is. Code
of a run is never executed here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble.events import NOT_COMBINED
from ensemble.reporting.comparison.compare import ComparedModel, find_differences, read_model
from ensemble.reporting.comparison.declarations import Declared
from ensemble.reporting.dashboard.comparison_document import Compared, Document, Pair, describe_comparison
from ensemble.reporting.dashboard.runs import recall_declared
from ensemble.store import RunDir, StoreError
from ensemble.store.folding import EVENT_ERRORS
from ensemble.store.regular_files import measure

if TYPE_CHECKING:
    from ensemble.combine.metrics import Array

#: Runs in a comparison; runs, and pairs of them, that are remembered.
MOST_RUNS, MOST_KEPT, MOST_PAIRS = 50, 200, 2500
#: Seconds that a call may take before it leaves the rest to the next one.
BUDGET_S = 0.5
#: Times as long as reading a log took, until one that grows is read again.
PAUSE = 10.0
#: Of the saved predictions of a run's combined model, that are read; of what is kept of all runs' models.
MOST_BYTES, MOST_KEPT_BYTES = 256 * 2**20, 256 * 2**20

Stamp = tuple[int, ...]
#: A run, with the log that it was read from.
ModelKey = tuple[Path, Stamp]


@dataclass(frozen=True)
class _Recalled:
    """What was read of a run: of which log, and when one that grows may be read again (monotonic seconds)."""

    stamp: Stamp
    declared: Declared
    next: float


class Comparisons:
    """Compares runs; called by one thread at a time."""

    def __init__(self) -> None:
        self._runs: dict[Path, _Recalled] = {}
        self._models: dict[ModelKey, ComparedModel | str] = {}  # those that were used last are at the end
        self._pairs: dict[tuple[ModelKey, ModelKey], Pair] = {}
        self._until, self._has_worked = 0.0, False

    def compare(self, paths: Mapping[str, Path], rows: Mapping[str, Mapping[str, Any]]) -> Document:
        """Returns the document of a comparison (`describe_comparison`).

        Args:
            paths: of the runs, by their keys, in order.
            rows: their rows in the list of runs.
        """
        self._until = time.monotonic() + BUDGET_S
        self._has_worked = False
        states = {key: rows[key]["state"] for key in paths}
        runs = [Compared(key, rows[key]["cells"]["name"], **states[key]) for key in paths]
        _make_unique(runs, paths)
        for run in runs:
            self._recall(run, paths[run.key])
        pairs = self._compare_pairs(runs, [paths[run.key] for run in runs])
        _drop_first(self._runs, MOST_KEPT)
        _drop_first(self._models, MOST_KEPT)
        _drop_first(self._pairs, MOST_PAIRS)
        return describe_comparison(runs, pairs)

    def _may_work(self) -> bool:
        """Whether there is time for one more thing in this call; for the first one there is."""
        may, self._has_worked = not self._has_worked or time.monotonic() < self._until, True
        return may

    def _recall(self, run: Compared, path: Path) -> None:
        """Gives a run what is known of it, as far as there is time to read."""
        known, now = self._runs.get(path), time.monotonic()
        run_dir = RunDir(path)
        try:
            found = os.stat(run_dir.events)
            stamp = (found.st_ino, found.st_size, found.st_mtime_ns)
            is_due = known is None or (known.stamp != stamp and now >= known.next)
            if is_due and self._may_work():
                declared = recall_declared(run_dir, found.st_size)
                ended = time.monotonic()
                known = self._runs[path] = _Recalled(stamp, declared, ended + PAUSE * (ended - now))
        except FileNotFoundError:
            run.missing = "it has not started"
        except (OSError, StoreError, *EVENT_ERRORS) as error:
            run.missing = " ".join(str(error).split()) or type(error).__name__
        else:
            run.declared = known.declared if known is not None else None

    def _compare_pairs(self, runs: Sequence[Compared], paths: Sequence[Path]) -> dict[str, Pair | None]:
        found = dict[str, Pair | None]()
        for run, path in zip(runs[1:], paths[1:], strict=True):
            if runs[0].declared is None or run.declared is None:
                continue
            key = (paths[0], self._runs[paths[0]].stamp), (path, self._runs[path].stamp)
            if key not in self._pairs:
                ours = self._find_model(runs[0].declared, key[0])
                theirs = None if ours is None else self._find_model(run.declared, key[1])
                if ours is not None and theirs is not None:
                    self._pairs[key] = _subtract(runs[0].declared, ours, run.declared, theirs)
            found[run.key] = self._pairs.get(key)
        return found

    def _find_model(self, run: Declared, key: ModelKey) -> ComparedModel | str | None:
        """What the combined model of a run predicted, or why that is not known; None where there was no time."""
        model = self._models.pop(key, None)
        if model is None and self._may_work():
            model = _read_combined(run)
            if isinstance(model, ComparedModel):
                self._share_samples(model)
        if model is not None:
            self._models[key] = model
            while len(self._models) > 2 and self._count_bytes() > MOST_KEPT_BYTES:  # a pair is needed
                self._models.pop(next(iter(self._models)))
        return model

    def _count_bytes(self) -> int:
        """Of all models; arrays that several share count once."""
        models = (model for model in self._models.values() if isinstance(model, ComparedModel))
        return sum({id(array): array.nbytes for model in models for array in model.list_arrays()}.values())

    def _share_samples(self, model: ComparedModel) -> None:
        """Has models that predicted the same samples hold one array of them, and one of their targets."""
        own = model.predictions
        for each in self._models.values():
            other = each.predictions if isinstance(each, ComparedModel) else own
            if other is not own and _is_same(own.index, other.index) and _is_same(own.target, other.target):
                model.predictions = replace(own, index=other.index, target=other.target)
                return


def _drop_first(kept: dict[Any, Any], most: int) -> None:
    while len(kept) > most:
        kept.pop(next(iter(kept)))


def _is_same(one: Array | None, other: Array | None) -> bool:
    if one is None or other is None:
        return one is other
    return one is other or (
        one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    )


def _make_unique(runs: Sequence[Compared], paths: Mapping[str, Path]) -> None:
    """Names runs that are called alike by their directories as well."""
    names = [run.name for run in runs]
    folder = os.path.commonpath([path.parent for path in paths.values()])
    for run in runs:
        if names.count(run.name) > 1:
            run.name = f"{run.name} ({paths[run.key].relative_to(folder)})"


def _read_combined(run: Declared) -> ComparedModel | str:
    """What the combined model of a run predicted; or why that is not known here."""
    combined = run.state.combined or NOT_COMBINED
    try:
        files = [run.run_dir.predictions(member) for member in combined.weights]
        size = sum(measure(path) or 0 for path in files)
        if size > MOST_BYTES:
            return f"the predictions of {run.run_dir.path} have {size >> 20} MiB; `ensemble compare` reads them"
        model = read_model(run, "combined", runs_code=False)
        if isinstance(model, ComparedModel):
            model.drop_values()
        return model
    except Exception as error:
        return f"the predictions of {run.run_dir.path} cannot be read: {type(error).__name__}: {error}"


def _subtract(first: Declared, ours: ComparedModel | str, other: Declared, theirs: ComparedModel | str) -> Pair:
    try:
        return find_differences(first, ours, other, theirs)
    except Exception as error:
        return f"their predictions cannot be compared: {type(error).__name__}: {error}"
