"""Measures the members and the combined model on the same samples, for the figures of quality."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ensemble.reporting.ranking import rank_members

if TYPE_CHECKING:
    from ensemble.store import RunDir, RunState

Curve = list[tuple[float, float, int]]  # (mean confidence, accuracy, rows) of each bin


@dataclass
class Scores:
    """Metrics on one split.

    Attributes:
        split: `"test"` where members predicted on it, else `"valid"`.
        rows: samples in that split.
        members: id -> `{"accuracy", "nll", "ece", "brier"}`, from the saved predictions.
        combined: the same for the combined model, None where there is none yet.
        best: the member that is best on the validation split by the run's objective.
        curves: name -> reliability curve, of the best member and of the combined model.
        missing: why there is nothing, in one line; None when there is.
    """

    split: str = "valid"
    rows: int = 0
    members: dict[str, dict[str, float]] = field(default_factory=dict)
    combined: dict[str, float] | None = None
    best: str | None = None
    curves: dict[str, Curve] = field(default_factory=dict)
    missing: str | None = None


def read_scores(run_dir: RunDir, state: RunState) -> Scores:
    """Members' metrics from the predictions in the run directory, the combined model's from its event."""
    from ensemble.combine import CombineError
    from ensemble.combine.aligned import read_aligned
    from ensemble.combine.metrics import all_metrics, reliability
    from ensemble.store import StoreError

    combined: dict[str, Any] = state.combined or {}
    splits = [combined["split"]] if combined.get("split") else ["test", "valid"]
    try:
        for split in splits:
            aligned = read_aligned(run_dir, [member.id for member in rank_members(state)], split)
            if aligned.members and aligned.target is not None:
                break
        else:
            return Scores(missing="No member has saved class probabilities with the true classes yet.")
    except (CombineError, StoreError) as error:
        return Scores(missing=f"The saved predictions cannot be compared: {error}.")
    found = Scores(split, rows=len(aligned.index))
    rows = dict(zip(aligned.members, aligned.probabilities, strict=True))
    named = combined.get("best_member")
    found.best = named if named in rows else aligned.members[0]
    try:
        found.members = {member: all_metrics(p, aligned.target) for member, p in rows.items()}
        found.curves["best"] = reliability(rows[found.best], aligned.target)
    except CombineError as error:  # such as a class that the members do not know
        return Scores(missing=f"The saved {split} predictions cannot be measured: {error}.")
    if combined.get("metrics"):
        found.combined = combined["metrics"]["ensemble"]
    if combined.get("reliability"):
        found.curves["combined"] = [(c, a, int(n)) for c, a, n in combined["reliability"]["ensemble"]]
    return found
