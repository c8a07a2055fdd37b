"""`distill`: trains one model on what the ensemble of a run predicts, and says what is lost by that."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ensemble.api import submit
from ensemble.combine import CombineError, find_math
from ensemble.combine.bootstrap import intervals
from ensemble.combine.distilled_loss import DISTILLED, PROBABILITIES, DistilledLoss, Teacher, digest_combination
from ensemble.combine.recorded import read_combined
from ensemble.controller.clones import recover_declaration
from ensemble.events import NOT_COMBINED
from ensemble.run import Run
from ensemble.spec import Ensemble, Recipe, SpecError, unknown_name
from ensemble.spec.loops import explain_no_averages
from ensemble.spec.member import change_member
from ensemble.spec.recipe import has_own_loop
from ensemble.spec.task import CLASSIFICATION, Task
from ensemble.spec.validation import check_number
from ensemble.store import MemberState, Predictions, RunDir, RunState, StoreError, read_state
from ensemble.store.files import write_json
from pipelines.environment.library_settings import keeps_settings

log = logging.getLogger(__name__)

TEMPERATURE, WEIGHT = 2.0, 0.5  # measured, see docs/decisions/0037
#: The figures that are compared, as far as a task has them.
FIGURES = ("nll", "ece", "accuracy", "subset_accuracy", "rmse")


@keeps_settings
def distill(
    run_dir: str | os.PathLike[str],
    student_dir: str | os.PathLike[str] | None = None,
    *,
    member: str | None = None,
    params: Mapping[str, Any] | None = None,
    model: Callable[[dict[str, Any]], Any] | None = None,
    epochs: int | None = None,
    temperature: float | None = None,
    weight: float = WEIGHT,
    executor: str | None = None,
    on_event: Callable[[dict[str, Any]], None] | None = None,
    accept_code: bool = False,
    fresh: bool = False,
) -> Run:
    """Train one model, the student, on what the ensemble of a run predicts on the training batches.

    It is a run of its own, with one member: metered, resumable, reported. The ensemble is loaded by the student's
    workers, so its run directory must stay as it is until the student has finished. `compare` says what is lost.

    Args:
        run_dir: the directory of a run that has finished and combined its members.
        student_dir: the directory of the student's run; `RUN_DIR-distilled` unless given. A run that is there
            already is continued.
        member: name of the member whose declaration the student takes; the best member unless given.
        params: hyperparameters that differ.
        model: `model(params) -> nn.Module`, instead of the recipe's.
        epochs: the epochs of the student; as many as the member's unless given.
        temperature: the temperature of the distance between probabilities, 2 unless given; other tasks have none.
        weight: the weight of the distance to the ensemble in the loss, 0 to 1; the recipe's own has `1 - weight`.
        executor: the one of the run unless given.
        on_event: as in `submit`.
        accept_code: as in `submit`.
        fresh: as in `submit`.

    Returns:
        A handle on the student's run.

    Raises:
        SpecError: an argument is invalid, or what the run trains cannot be distilled; the message says why.
        StoreError: there is no such run, or no combination.
    """
    run = RunDir(run_dir)
    state = read_state(run.events).as_finished()
    parent = _find_parent(run, state, member)
    ensemble = run.load_ensemble(state.header.code, takes_settings=True)
    declared = declare_student(
        run,
        state,
        ensemble,
        parent,
        params=params or {},
        model=model,
        epochs=epochs,
        temperature=temperature,
        weight=weight,
    )
    path = Path(student_dir) if student_dir is not None else run.path.with_name(f"{run.path.name}-distilled")
    return submit(
        declared, path, executor or state.executor or "ray", on_event, accept_code=accept_code, fresh=fresh
    )


def declare_student(
    run: RunDir,
    state: RunState,
    ensemble: Ensemble,
    parent: MemberState,
    *,
    params: Mapping[str, Any],
    model: Callable[[dict[str, Any]], Any] | None,
    epochs: int | None,
    temperature: float | None,
    weight: float,
) -> Ensemble:
    """The declaration of a student's run; see `distill`."""
    recipe, task = ensemble.recipe, _find_task(run, state)
    if ensemble.out_of_fold:
        raise SpecError(
            f"{run.path} is a cross-validation, and has no validation split for a student: distill a run with "
            "valid=, or train each configuration once on all samples (ensemble.refit)"
        )
    if not isinstance(recipe, Recipe) or has_own_loop(recipe):
        raise SpecError(
            f"{run.path} was trained by a train function, whose loss is its own: load the ensemble in it "
            "(ensemble.load) and add the distance to its predictions"
        )
    if temperature is not None and task.kind not in PROBABILITIES:
        raise SpecError(f"temperature= is for probabilities, not for the task {task.kind}")
    check_number("temperature", temperature, low=0, above=True, optional=True)
    check_number("weight", weight, low=0)
    if weight > 1:
        raise SpecError(f"weight must be from 0 to 1, got {weight!r}")
    names = {name for member in state.members.values() for name in member.params}
    for name in params:
        if name not in names and model is None:
            raise SpecError(unknown_name(f"{parent.id} has no hyperparameter", name, sorted(names)))
    teacher = Teacher(str(run.path), digest_combination(state))
    loss = DistilledLoss(
        dataclasses.replace(recipe, task=task),
        teacher,
        task,
        TEMPERATURE if temperature is None else temperature,
        float(weight),
    )
    own = recover_declaration(parent, ensemble)
    trained = next(number for number in (epochs, own.epochs, ensemble.epochs) if number is not None)
    averages = own.averaging if own.averaging is not None else ensemble.averaging
    why = explain_no_averages(averages, trained)
    if why is not None:
        log.warning("the student keeps its own weights, not an average of them: %s", why)
    student = change_member(
        own,
        params,
        epochs=own.epochs if epochs is None else epochs,
        averaging="none" if why is not None else own.averaging,
        seed=1 + max(int(member.identity["seed"]) for member in state.members.values()),
        weights="uniform",
    )
    recipe = recipe if model is None else dataclasses.replace(recipe, model=model, base=None)
    made = dataclasses.replace(recipe, loss=loss, inputs=(), label_smoothing=None, task=task)
    return dataclasses.replace(
        ensemble,
        name=f"{ensemble.name}-distilled",
        recipe=made,
        members=[student],
        search=None,
        weights="uniform",
        combine="average",
    )


def _find_parent(run: RunDir, state: RunState, member: str | None) -> MemberState:
    """The member whose declaration the student has."""
    combined = state.combined
    if combined is None or not combined.weights or not combined.metrics:
        why = (combined or NOT_COMBINED).reason or "its members have not been combined"
        raise StoreError(f"{run.path} has no ensemble to learn from: {why}")
    name = member or combined.best_member or combined.members[0]
    if name not in state.members:
        raise SpecError(unknown_name(f"{run.path} has no member", name, list(state.members)))
    return state.members[name]


def _find_task(run: RunDir, state: RunState) -> Task:
    record = (state.combined or NOT_COMBINED).task
    task = CLASSIFICATION if record is None else Task.from_record(record)
    if task.kind not in DISTILLED:
        why = {
            "quantiles": "the distance between two sets of quantiles has no agreed meaning",
            "free": "nothing says what its outputs mean",
        }
        raise SpecError(f"{run.path} predicts {task.kind}, which is not distilled: {why[task.kind]}")
    return task


def compare(run_dir: str | os.PathLike[str], student_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The figures of an ensemble, of its best member and of the student, each calibrated where the run calibrates.

    Returns:
        A row each of "ensemble", "best member", "student": `model`, `split`, and the figures of the task. The
        student's has `lost`, name -> its figure minus the ensemble's, and `lost_intervals`, name -> [low, high],
        95 % intervals of these by the bootstrap of the same samples for both; empty where one of the two has no
        saved predictions any more. The rows are written to `distillation.json` in the student's run directory.

    Raises:
        StoreError: one of the runs has no figures.
    """
    teacher, student = (read_state(RunDir(path).events).combined for path in (run_dir, student_dir))
    for path, combined in ((run_dir, teacher), (student_dir, student)):
        if combined is None or not combined.metrics:
            why = (combined or NOT_COMBINED).reason or "nothing finished"
            raise StoreError(f"{RunDir(path).path} has no figures to compare: {why}")
    assert teacher is not None and student is not None and teacher.metrics and student.metrics
    figures = {
        "ensemble": teacher.metrics["ensemble"],
        "best member": teacher.best_calibrated or teacher.metrics["best"],
        "student": student.metrics["ensemble"],
    }
    rows: list[dict[str, Any]] = [
        {"model": name, "split": teacher.split, **{key: own[key] for key in FIGURES if key in own}}
        for name, own in figures.items()
    ]
    rows[2]["split"] = student.split
    rows[2]["lost"] = {key: rows[2][key] - rows[0][key] for key in FIGURES if key in rows[0] and key in rows[2]}
    found = _find_intervals(run_dir, student_dir, str(teacher.split)) if student.split == teacher.split else {}
    rows[2]["lost_intervals"] = {key: found[key] for key in rows[2]["lost"] if key in found}
    write_json(RunDir(student_dir).path / "distillation.json", rows)
    return rows


def _find_intervals(
    run_dir: str | os.PathLike[str], student_dir: str | os.PathLike[str], split: str
) -> dict[str, list[float]]:
    """Intervals of the student's figures minus the ensemble's, of their predictions of the same samples."""
    teacher, student = (_read_samples(RunDir(path), split) for path in (run_dir, student_dir))
    if teacher is None or student is None or not np.array_equal(teacher.index, student.index):
        return {}
    math, target = find_math(teacher.task), teacher.target
    if target is None:
        return {}
    statistics = {
        "student": math.statistics(student.values, target),
        "ensemble": math.statistics(teacher.values, target),
    }
    return intervals(statistics, len(target))["difference"]


def _read_samples(run: RunDir, split: str) -> Predictions | None:
    """The combined predictions of a run; None where they cannot be made of the saved ones."""
    state = read_state(run.events).as_finished()
    try:
        return read_combined(run, state, split, lambda: run.load_ensemble(state.header.code).combine)
    except (CombineError, StoreError):
        return None
