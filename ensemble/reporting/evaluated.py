"""What the members of a run and its combined model predict on the split of which the run's figures are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ensemble.events import NOT_COMBINED, Combined
from ensemble.reporting.ranking import rank_members
from ensemble.store.regular_files import measure

if TYPE_CHECKING:
    from ensemble.combine.combination import Combination
    from ensemble.combine.metrics import Array
    from ensemble.combine.prediction_matrix import PredictionMatrix
    from ensemble.combine.tasks import TaskMath
    from ensemble.store import RunDir, RunState

#: Members of which predictions are read, those of the combined model and the best first.
MOST_MEMBERS = 300
MOST_BYTES = 256 * 2**20
#: How members are combined while the run has not combined them itself: the default of `Ensemble.combine`.
METHOD = "greedy"

#: Rows of the split, a slice or int64 [k] -> what a model predicts there, [k, ...].
Predict = Callable[[Any], "Array"]


@dataclass(frozen=True)
class Evaluated:
    """The predictions that are shown.

    Attributes:
        combined: the run's event; `NOT_COMBINED` while there is none.
        split: "test" or "valid".
        valid, shown: the predictions on the validation split, and on `split`.
        best: the best member by the objective.
        both: members of both.
    """

    combined: Combined
    split: str
    valid: PredictionMatrix
    shown: PredictionMatrix
    best: str
    both: list[str]

    @property
    def rows_of(self) -> dict[str, Array]:
        """Member -> its predictions [n, ...] on the split."""
        return dict(zip(self.shown.members, self.shown.values, strict=True))

    def combine(self) -> Array | None:
        """The combined model's predictions [n, ...], as the run combined; None where they do not determine it."""
        from ensemble.combine.recorded import combine_again

        known, measured = self.valid.select(self.both), self.shown.select(self.both)
        return combine_again(self.combined, known, measured, is_valid=self.split == "valid")

    def combine_so_far(self, state: RunState, task_math: TaskMath) -> Combination:
        """The combination of the members that have finished so far, fitted on the validation split."""
        from ensemble.combine.combination import fit_held_out

        criterion = task_math.choose_criterion(state.objective, state.direction)
        known = self.valid.select(self.both)
        return fit_held_out(
            METHOD, known.values, known.target, task=task_math.task, objective=criterion, groups=known.groups
        )[0]

    def find_combined(self, state: RunState) -> tuple[Predict | None, dict[str, float]]:
        """What predicts chosen rows as the combined model does, or as that of the members so far; and its weights.

        Only the rows that are asked for are computed, but of a stack, which is fitted anew.
        """
        from ensemble.combine.recorded import combine_again
        from ensemble.combine.tasks import find_math

        task_math, combined = find_math(self.shown.task), self.combined
        known, measured = self.valid.select(self.both), self.shown.select(self.both)
        if state.combined is not None:
            if combined.method == "stack":
                values = self.combine()
                return (None if values is None else values.__getitem__), dict(combined.weights)

            def predict(rows: Any) -> Array:
                part = measured.take(rows)
                again = combine_again(combined, known, part, is_valid=self.split == "valid")
                assert again is not None
                return again

            has_rows = combine_again(combined, known, measured.take(slice(0, 1)), is_valid=False) is not None
            return (predict if has_rows else None), dict(combined.weights or {})
        if not self.both or not task_math.criteria or known.target is None:
            return None, {}
        combination = self.combine_so_far(state, task_math)
        weights = dict(zip(known.members, combination.weights.tolist(), strict=True))
        return lambda rows: combination.predict(measured.take(rows).values), weights


def read_evaluated(run_dir: RunDir, state: RunState) -> Evaluated | None:
    """Reads the predictions that are shown; None while no member has saved any, with targets if its task has some.

    Raises:
        DamagedError: predictions are not what the log says that was saved.
        CombineError: members predicted other samples.
    """
    from ensemble.combine.prediction_matrix import read_prediction_matrix

    combined = state.combined or NOT_COMBINED
    chosen = _choose_members(run_dir, state)
    valid = read_prediction_matrix(run_dir, state, chosen, "valid")
    split, shown = "valid", valid
    if combined.split != "valid":
        test = read_prediction_matrix(run_dir, state, chosen, "test")
        if test.members and test.target is not None:
            split, shown = "test", test
    if not shown.members or (shown.target is None and shown.task.kind != "free"):
        return None
    best = combined.best_member
    best = best if best in shown.members else shown.members[0]  # they are ranked
    both = [member for member in valid.members if member in shown.members]
    return Evaluated(combined, split, valid, shown, best, both)


def _choose_members(run_dir: RunDir, state: RunState) -> list[str]:
    """Finished members, those of the combined model first, then the best, as far as they can be held in memory."""
    finished = [member.id for member in rank_members(state) if member.state == "finished"]
    known = set(finished)
    order = [member for member in (state.combined or NOT_COMBINED).members if member in known]
    chosen: list[str] = []
    size = 0
    for member in dict.fromkeys([*order, *finished]):
        size += measure(run_dir.predictions(member)) or 0
        if chosen and (size > MOST_BYTES or len(chosen) == MOST_MEMBERS):
            break
        chosen.append(member)
    return sorted(chosen, key=finished.index)
