"""What terminal, files and loggers say of the combined model of runs of each task."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kit import task_events as tasks
from kit.event_dicts import fold, project, typed

from ensemble.combine.tasks import find_math
from ensemble.events import Combined
from ensemble.meter import LedgerView
from ensemble.reporting import text
from ensemble.reporting.loggers.points import describe_end
from ensemble.reporting.metrics.families import project as project_metrics
from ensemble.reporting.model_figures import FIGURES, HEADLINES, compare, describe_figure, list_figures
from ensemble.reporting.results import make_results
from ensemble.reporting.sections.quality import describe_benefit, tabulate
from ensemble.reporting.summary import summary
from ensemble.spec import quantiles
from ensemble.spec.objectives import REPORTED, infer_mode
from ensemble.spec.split_metrics import KNOWN
from ensemble.spec.task import KINDS, Kind, Task


def show(events: list[Any], width: int) -> str:
    return "\n".join(line for line, _ in summary(project(events), everything=True, width=width))


def test_a_direction_is_that_of_the_name_unless_the_run_declares_another() -> None:
    better = {"accuracy": "higher", "nll": "lower", "val_loss": "lower", "angle": None}
    assert {name: describe_figure(name).better for name in better} == better
    assert describe_figure("angle", ranking=("angle", "min")).better == "lower"
    assert describe_figure("coverage", quantiles(0.1, 0.5, 0.9)).nominal == pytest.approx(0.8)
    coverage = describe_figure("coverage_90")
    assert coverage.heading == "coverage of 90 % intervals → 0.9" and coverage.is_better(0.88, 0.95) is True
    assert describe_figure("rmse").is_better(2.0, 1.0) is False
    assert describe_figure("angle").is_better(2, 1) is None


#: Figures that have a best value, or mean nothing without another one: no name implies a direction of theirs.
NO_OBJECTIVE = {"coverage_90", "coverage", "width"}


def test_the_directions_of_reports_are_those_of_objectives() -> None:
    modes = {"higher": "max", "lower": "min"}
    for name, figure in FIGURES.items():
        assert infer_mode(name) == (None if name in NO_OBJECTIVE else modes[str(figure.better)]), name
    for name, known in KNOWN.items():
        assert modes[str(describe_figure(name).better)] == known.mode == infer_mode(name), name


@pytest.mark.parametrize("kind", KINDS)
def test_every_figure_of_a_task_has_a_name_and_a_direction(kind: Kind) -> None:
    rng = np.random.default_rng(0)
    numbers = rng.normal(size=8)
    some: dict[str, Any] = {
        "classification": (rng.dirichlet(np.ones(7), 8), np.arange(8) % 7),
        "multilabel": (rng.random((8, 3)), np.arange(24).reshape(8, 3) % 2),
        "regression": (numbers, numbers + 0.1 * rng.normal(size=8)),
        "gaussian": (np.stack([numbers, np.ones(8)], axis=1), numbers + 0.1),
        "quantiles": (np.stack([numbers - 1, numbers, numbers + 1], axis=1), numbers + 0.1),
        "free": (numbers, numbers),
    }
    math = find_math(quantiles(0.1, 0.5, 0.9) if kind == "quantiles" else Task(kind))
    measured = math.measure(*some[kind])
    assert set(measured) | set(REPORTED[kind]) <= set(FIGURES)
    assert set(HEADLINES[kind]) <= set(measured), "what is shown first is measured"
    assert all(infer_mode(name) is not None for name in math.criteria)


def test_figures_that_say_most_come_first_and_all_are_kept() -> None:
    figures = list_figures(["mine", "r2", "rmse", "crps"], Task("gaussian"))
    assert [figure.name for figure in figures] == ["rmse", "crps", "r2", "mine"]


@pytest.mark.parametrize("kind", tasks.TASKS)
def test_the_summary_has_the_figures_of_the_task_with_interval_difference_and_noise(kind: str) -> None:
    events = tasks.task_run(kind)
    wide, narrow = show(events, 160), show(events, 70)
    figures = compare(fold(events).combined, tasks.OBJECTIVES[kind])
    assert all(words in wide for words in ("uncertainty", "conformal", *(f.figure.heading for f in figures[:4])))
    assert f"{figures[0].value:.4f}" in narrow and wide.count("  95 % interval") == 2, "of both models"
    assert figures[0].best_interval is not None and text.interval(figures[0].best_interval) in wide
    assert text.score(fold(events).combined.metrics["mean"][figures[0].figure.name]) in wide
    assert ("(noise)" in wide) == any(figure.is_noise for figure in figures[:5])
    assert max(map(len, narrow.splitlines())) <= 70


def test_what_is_measured_on_the_validation_split_is_not_said_to_be_of_a_test_split() -> None:
    for split in ("test", "valid"):
        events = [e | {"split": split} if e["type"] == "combined" else e for e in tasks.task_run("regression")]
        (table,) = (each for each in tabulate(fold(events)) if each.id == "conformal")
        assert ("measured on the test split" in table.text) == (split == "test")


def test_results_loggers_and_metrics_have_figures_intervals_and_uncertainty() -> None:
    events = tasks.task_run("gaussian")
    run = project(events)
    event, results = run.state.combined, make_results(run)
    assert results["figures"]["crps"] == describe_figure("crps").as_record()
    assert results["combined"]["intervals"] == event.intervals
    values = describe_end(run).values
    assert values["ensemble/crps"] == event.metrics["ensemble"]["crps"]
    assert values["difference/crps_low"] == event.intervals["difference"]["crps"][0]
    assert values["uncertainty/epistemic"] == 0.15 and values["conformal/absolute/coverage"] == 0.894
    events, view = tasks.task_run("regression"), LedgerView()
    for event in events:
        view.apply(typed(event))
    samples = {(s.family.name, s.labels): s.value for s in project_metrics("r", fold(events), view)}
    value = fold(events).combined.metrics["ensemble"]["rmse"]
    assert samples["ensemble_run_combined_figure", ("r", "rmse", "ensemble", "test", "lower")] == value
    assert samples["ensemble_run_combined_figure_bound", ("r", "rmse", "best", "low")] > 0
    assert samples["ensemble_run_uncertainty", ("r", "total")] == 0.4


MEMBERS = [f"member-{i}" for i in range(6)]


def combined(
    value: float, best: float, difference: tuple[float, float], used: int = 3, name: str = "nll", **more: Any
) -> Combined:
    noise = [name] if difference[0] <= 0 <= difference[1] else []
    weights = {member: float(i < used) for i, member in enumerate(MEMBERS)}
    metrics = {"ensemble": {name: value}, "best": {name: best}}
    given = {"task": {"kind": "classification"}, "uncertainty": {"disagreement": 0.021}, "split": "test"}
    given |= {"metrics": metrics, "weights": weights, "candidates": MEMBERS, "noise": noise, **more}
    given["intervals"] = {"difference": {name: list(difference)}}
    return Combined(method="greedy", members=MEMBERS[:used], **given)


def gain(**more: Any) -> Combined:
    return combined(0.3, 0.341, (-0.06, -0.02), **more)


CHOSEN = "3 of 6 members were chosen: "
THAN = "than the best member's (95 % interval:"
BETTER = f"{CHOSEN}their NLL is 0.0410 better {THAN} 0.0200 to 0.0600)"
LOSS = f"their NLL is 0.0090 worse {THAN} 0.0040 to 0.0200), more than chance"
NOISE = f"their NLL is 0.0060 better {THAN} −0.0100 to 0.0200), which may be chance; vary the members more"
RMSE = f"their RMSE is 0.5000 better {THAN} 0.2000 to 0.7000), more than chance"
MINE = f"their mine is 0.1000 better {THAN} 0.0500 to 0.1500), more than chance"
POINTS: dict[str, Any] = {"task": {"kind": "regression"}, "uncertainty": None}
FREE: dict[str, Any] = {"task": {"kind": "free"}, "uncertainty": None}


@pytest.mark.parametrize(
    ("found", "sentence", "tone"),
    [
        (gain(), f"{BETTER}, more than chance", "good"),
        (gain(best_calibrated={"nll": 0.31}),
         f"{BETTER}, more than chance; 0.0310 of it is calibration", "good"),
        (gain(best_calibrated={"nll": 0.29}),
         f"{BETTER}, but calibration alone gains 0.0510; vary the members more", ""),
        (gain(split="valid"),
         f"{BETTER}, on the samples that it was chosen by: only a test split can show a gain", ""),
        (gain(split="valid", out_of_fold=True), f"{BETTER}, more than chance", "good"),
        (combined(0.35, 0.341, (0.004, 0.02)), f"{CHOSEN}{LOSS}", "bad"),
        (combined(0.335, 0.341, (-0.02, 0.01)), f"{CHOSEN}{NOISE}", ""),
        (combined(0.341, 0.341, (0, 0), used=1), "1 of 6 members was chosen: no gain from combining", ""),
        (combined(2.0, 2.5, (-0.7, -0.2), 6, "rmse", **POINTS), f"all 6 members were combined: {RMSE}", "good"),
        (combined(0.9, 0.8, (0.05, 0.15), name="mine", **FREE), f"{CHOSEN}{MINE}", "good"),
        (gain(used=1, candidates=["member-0"]), "", ""),
        (Combined(method=None, members=[], split=None, reason="there is no validation split"), "", ""),
        (None, "", ""),
    ],
)  # fmt: skip
def test_a_sentence_says_whether_combining_has_helped(found: Combined | None, sentence: str, tone: str) -> None:
    said, how = describe_benefit(found, ("mine", "max"))
    assert (said.replace("-", "−"), how) == (sentence.replace("-", "−"), tone)
