"""The result of a run: its members, the best of them, the combined model, and what was used."""

from __future__ import annotations

import dataclasses
import html
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble.events import to_dict
from ensemble.spec.frames import Row, Rows
from ensemble.spec.validation import unknown_name
from ensemble.store import RunDir, RunStatus, StoreError
from ensemble.store.mirror_status import explain_incomplete
from pipelines.providers import import_object

if TYPE_CHECKING:
    import pandas

    from ensemble.combine.per_class import PerClass


@dataclass(frozen=True, repr=False)
class Result:
    """The result of a run.

    Rows are dicts whose keys are attributes as well (`ensemble.spec.frames.Row`): `result.best.metric`,
    `result.best.params`, `result.combined.accuracy`.

    Attributes:
        members: a row per member, as `ensemble status` shows them.
        best: the row of the finished member with the best objective, None when none finished.
        front: the Pareto front of a search with a second objective: the names of the finished members that no
            other beats in both, the cheapest first.
        combined: the `combined` event (metrics of the ensemble, its best and mean member, weights; where nothing
            was combined `metrics` is None and `reason` says why), None when no member finished.
        ledger: CPU time and energy by member and role; None where it could not be computed.
        stopped: why the run was stopped, None when it ran to its end.
        run_dir: the run directory.
        mirror_rest: what the mirror of the run lacks, in words; None where it lacks nothing, or there is none.
    """

    members: Rows
    best: Row | None
    combined: Row | None
    ledger: dict[str, Any] | None
    stopped: str | None
    run_dir: Path
    front: list[str] = dataclasses.field(default_factory=list)
    mirror_rest: str | None = None

    def summary(self, *, everything: bool = False, width: int = 100) -> str:
        """What `ensemble run` prints at its end: the best members, the combined model, what it cost, what is next.

        Args:
            everything: all members and figures, as `ensemble summary --all` prints them.
            width: columns of the text; without `everything` 100 at most.
        """
        from ensemble.reporting import summary_text

        return summary_text(RunDir(self.run_dir), everything=everything, width=width)

    def to_frame(self) -> pandas.DataFrame:
        """A DataFrame with a row for each member; its hyperparameters and metrics are columns of their own.

        Raises:
            ImportError: pandas is not installed.
        """
        return self.members.to_frame()

    @cached_property
    def per_class(self) -> dict[str, PerClass]:
        """Figures of each class or label of the "ensemble" and of the "best" member, on the samples that the
        combined metrics are of; see `ensemble.combine.per_class`.

        Raises:
            CombineError: nothing was combined, the task has no classes, or the predictions have no targets.
        """
        from ensemble.combine.per_class import read_per_class

        return read_per_class(RunDir(self.run_dir))

    def file(self, member: str, name: str) -> Path:
        """A file that a member's train function has saved in `member.folder`, once its digest was compared.

        Args:
            member: its name.
            name: the path of the file in `member.folder`.

        Raises:
            StoreError: the member has not finished, or has no such file, or it is damaged.
        """
        from ensemble.store.member_files import find_file

        members = RunStatus.load(RunDir(self.run_dir)).state.as_finished().members
        if member not in members:
            raise StoreError(unknown_name(f"{self.run_dir} has no member", member, list(members)))
        return find_file(RunDir(self.run_dir), members[member], name)

    def __repr__(self) -> str:
        try:
            return self.summary()
        except (StoreError, OSError) as error:  # the directory is gone
            return f"Result({str(self.run_dir)!r}): {error}"

    def _repr_html_(self) -> str:
        try:
            return str(import_object("ensemble.reporting.notebook:result_html")(RunDir(self.run_dir)))
        except (StoreError, OSError) as error:
            return f"<p>{html.escape(str(error))}</p>"


def make_result(run_dir: RunDir) -> Result:
    """The result, so far, of the run in a directory."""
    from ensemble.reporting import RunProjection, status_rows
    from ensemble.reporting.ranking import front_members

    status = RunStatus.load(run_dir)
    state, run = status.state, RunProjection.from_status(status)
    rows = Rows(status_rows(run))
    best = run.best.id if run.best is not None and run.best.has_result else None
    try:
        ledger = json.loads(run_dir.ledger.read_text(encoding="utf-8"))
    except FileNotFoundError:
        ledger = None
    return Result(
        members=rows,
        best=next((row for row in rows if row["member"] == best), None),
        combined=None if state.combined is None else Row(to_dict(state.combined)),
        ledger=ledger,
        stopped=run.reason,
        run_dir=run_dir.path,
        front=[member.id for member in front_members(state)],
        mirror_rest=explain_incomplete(run_dir),
    )
