"""`load_predictions`: what a member, or the combined model, has predicted on a split, with targets and names."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble.events import NOT_COMBINED
from ensemble.spec import PREDICTED_SPLITS, SpecError, check_choice, unknown_name
from ensemble.store import RunDir, StoreError, read_predictions, read_state
from ensemble.store.predictions import list_splits

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ensemble.combine.per_class import PerClass
    from ensemble.store import RunState


@dataclass(frozen=True)
class SavedPredictions:
    """Predictions of one model for each sample of a split.

    Attributes:
        run_dir: the directory of the run.
        member: its name; None: the combined model.
        split: "valid" or "test".
        task: what is predicted: "classification", "multilabel", "regression", "gaussian", "quantiles" or "free".
        index: int64 [n], ascending: the samples, by their place in the split's source.
        values: [n, ...] as `ensemble.spec.task` lays them out, such as probabilities [n, classes]; float32 of a
            member, mapped from its file (read only), float64 of the combined model.
        targets: int64 or float64 [n, ...]; None where the split has none.
        classes: names of the classes or labels; None where the data have none.
        levels: for quantiles, their probabilities.
        positions: int64 [k], of which positions of each sample they are, counted over its flattened axes, where
            `Ensemble.keep_predictions_gb` kept a part of them; None: all.
    """

    run_dir: Path
    member: str | None
    split: str
    task: str
    index: npt.NDArray[np.int64]
    values: npt.NDArray[np.floating[Any]]
    targets: npt.NDArray[Any] | None
    classes: tuple[str, ...] | None
    levels: tuple[float, ...] = ()
    positions: npt.NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.index)

    def per_class(self) -> PerClass:
        """Precision, recall, F1 and support of each class, and the confusion matrix.

        Raises:
            CombineError: the task has no classes, or there are no targets.
        """
        from ensemble.combine import CombineError
        from ensemble.combine.per_class import compute_per_class
        from ensemble.spec.task import Task

        if self.targets is None:
            raise CombineError(f"{self.run_dir}: the {self.split} split has no targets")
        task = Task(self.task, self.levels)  # type: ignore[arg-type]
        return compute_per_class(task, self.values, self.targets, self.classes, self.split)


def load_predictions(
    run_dir: str | os.PathLike[str], split: str = "test", member: str | None = None
) -> SavedPredictions:
    """What a run has predicted on a split.

    Args:
        run_dir: the directory of the run.
        split: "test" or "valid".
        member: the name of a member; None: the combined model, whose predictions are made again from those of the
            members, so that they are those of which the run's figures are.

    Returns:
        The predictions [n, ...] with the index [n] and, where they are known, the targets of their samples.

    Raises:
        SpecError: there is no such split or member.
        StoreError: there is no run, or no such predictions.
        CombineError: the run has no combined model.
    """
    from ensemble.combine.recorded import read_combined

    check_choice("load_predictions(split=)", split, PREDICTED_SPLITS)
    run = RunDir(run_dir)
    state = read_state(run.events).as_finished()
    combined = state.combined or NOT_COMBINED
    if member is None:
        if combined.weights:
            _check_saved(run, state, split, next(iter(combined.weights)))
        predictions = read_combined(run, state, split)
    else:
        if member not in state.members:
            raise SpecError(unknown_name(f"{run.path} has no member", member, list(state.members)))
        _check_saved(run, state, split, member)
        predictions = read_predictions(run, state.members[member], split, mapped=True)
    classes = combined.classes
    return SavedPredictions(
        run_dir=run.path,
        member=member,
        split=split,
        task=predictions.task.kind,
        index=predictions.index,
        values=predictions.values,
        targets=predictions.target,
        classes=None if classes is None else tuple(classes),
        levels=predictions.task.levels,
        positions=predictions.positions,
    )


def _check_saved(run: RunDir, state: RunState, split: str, member: str) -> None:
    saved = list_splits(run.predictions(member))
    if split in saved:
        return
    why = f"it is {state.members[member].state}" if not saved else f"it saved those of {', '.join(saved)}"
    raise StoreError(f"{run.path}: {member} saved no {split} predictions ({why})")
