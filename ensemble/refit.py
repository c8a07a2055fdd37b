"""`refit`: trains the configurations of a cross-validated run anew, on all training samples."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median_low
from typing import Any

from ensemble.api import submit
from ensemble.controller.clones import recover_declaration
from ensemble.events import NOT_COMBINED
from ensemble.run import Run
from ensemble.spec import Ensemble, Member, SpecError
from ensemble.spec.member import change_member
from ensemble.spec.out_of_fold import find_configuration
from ensemble.spec.task import CLASSIFICATION, Task
from ensemble.store import MemberState, RunDir, RunState, StoreError, read_state
from pipelines.environment.library_settings import keeps_settings


@dataclass(frozen=True)
class FittedCombination:
    """A combination, `Ensemble.combine`, that was fitted to the out-of-fold predictions of another run.

    Attributes:
        task: of the members.
        weights: of each, sum 1.
        calibration: the parameters of the calibrator.
        calibrator: its name; None: the task's own.
    """

    task: Task
    weights: tuple[float, ...]
    calibration: Any
    calibrator: str | None = None

    def __call__(self, values: Any) -> Any:
        """The calibrated mixture, a tensor [n, ...], of the members' values [m, n, ...]."""
        import torch

        from ensemble.combine import formulas
        from ensemble.combine.calibrators import apply_calibration

        weights = torch.tensor(self.weights, dtype=values.dtype, device=values.device)
        mixed = formulas.mix(self.task, list(values), weights)
        return apply_calibration(self.task, mixed, self.calibration, self.calibrator)


@keeps_settings
def refit(
    run_dir: str | os.PathLike[str],
    final_dir: str | os.PathLike[str] | None = None,
    *,
    executor: str | None = None,
    on_event: Callable[[dict[str, Any]], None] | None = None,
    accept_code: bool = False,
    fresh: bool = False,
) -> Run:
    """Train each selected configuration of a run with `Ensemble.out_of_fold` once more, on all training samples.

    It is a run of its own, with one member for each configuration that has weight in the combined model. It trains
    as many epochs as the median of the folds' members: those up to the best one where they stopped early or kept
    the best, else all. The weights and the calibration are those that were fitted out of fold, so that it needs no
    validation split; `test` gives the figures.

    Args:
        run_dir: the directory of the run that has finished and combined its members.
        final_dir: the directory of the new run; `RUN_DIR-refitted` unless given. A run that is there already is
            continued.
        executor: the one of the run unless given.
        on_event: as in `submit`.
        accept_code: as in `submit`.
        fresh: as in `submit`.

    Returns:
        A handle on the new run.

    Raises:
        SpecError: the run is no cross-validation, or its combination is no mean by weights.
        StoreError: there is no such run, or it has not combined its members.
    """
    run = RunDir(run_dir)
    state = read_state(run.events).as_finished()
    declared = declare_refit(run, state, run.load_ensemble(state.header.code, takes_settings=True))
    path = Path(final_dir) if final_dir is not None else run.path.with_name(f"{run.path.name}-refitted")
    return submit(
        declared, path, executor or state.executor or "ray", on_event, accept_code=accept_code, fresh=fresh
    )


def declare_refit(run: RunDir, state: RunState, ensemble: Ensemble) -> Ensemble:
    """The declaration of the run that `refit` starts."""
    from ensemble.combine.combination import read_calibration

    if not ensemble.out_of_fold:
        raise SpecError(f"{run.path} is not a cross-validation: refit() needs a run of Ensemble(out_of_fold=True)")
    combined = state.combined or NOT_COMBINED
    if not combined.weights:
        raise StoreError(
            f"{run.path} has no combined model: {combined.reason or 'it has not combined its members'}"
        )
    if combined.method not in ("average", "weighted", "greedy"):
        raise SpecError(
            f"refit() takes over weights of configurations, and {run.path} is combined by {combined.method!r}: "
            "declare combine='weighted', or load the run as it is"
        )
    if combined.decision is not None:
        raise SpecError("refit() does not take over decision thresholds: leave Ensemble.thresholds out")
    configurations: dict[str, list[MemberState]] = {}
    for name in combined.weights:
        member = state.members[name]
        configurations.setdefault(find_configuration(member.identity), []).append(member)
    task = CLASSIFICATION if combined.task is None else Task.from_record(combined.task)
    weights = tuple(sum(combined.weights[member.id] for member in members) for members in configurations.values())
    return replace(
        ensemble,
        name=f"{ensemble.name}-refitted",
        members=[_declare_member(members, ensemble) for members in configurations.values()],
        weights="uniform",
        out_of_fold=False,
        valid=None,
        keep="last",
        early_stopping="none",
        validate_every=0,
        combine=FittedCombination(task, weights, *read_calibration(combined.calibration)),
        calibrate=False,
    )


def _declare_member(members: Sequence[MemberState], ensemble: Ensemble) -> Member:
    return change_member(
        recover_declaration(members[0], ensemble),
        {},
        epochs=median_low(_count_epochs(member) for member in members),
        seed=members[0].identity["seed"],
        weights="uniform",
        keep="last",
        early_stopping="none",
        validate_every=0,
    )


def _count_epochs(member: MemberState) -> int:
    """Epochs up to the member's best one, where it was asked for, else all that it trained."""
    best = member.kept or (member.early_stopping or {}).get("best") or {}
    return int(best["epoch"]) + 1 if "epoch" in best else member.epoch
