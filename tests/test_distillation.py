"""Students of ensembles: what they learn from, what is lost, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")

from distilled_members import digits, of_task, smooth_loss, tiny  # noqa: E402
from kit.event_dicts import ledger, read_events  # noqa: E402
from kit.finished_runs import once, read_state  # noqa: E402

import ensemble  # noqa: E402
from ensemble import Recipe, SpecError  # noqa: E402
from ensemble.cli.parser import main  # noqa: E402
from ensemble.combine.distilled_loss import find_distance, mean_where_known  # noqa: E402
from ensemble.distillation import compare  # noqa: E402
from ensemble.spec import SWA  # noqa: E402
from ensemble.spec.task import Task  # noqa: E402
from ensemble.store import RunDir, StoreError  # noqa: E402


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("teacher") / "digits"
    ensemble.submit(digits(), path, "inline").wait()
    return path


def test_a_student_is_a_run_of_its_own_and_what_it_loses_is_shown(
    teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    student = tmp_path / "student"
    command = ["distill", str(teacher), "--run-dir", str(student), "--executor", "inline"]
    assert main(command) == 0
    said = capsys.readouterr().out
    (member,) = read_state(student).members.values()
    best = read_state(teacher).members[read_state(teacher).combined.best_member]  # type: ignore[index]
    assert (member.state, member.params) == ("finished", best.params)
    used = ledger(read_events(RunDir(student).events)).cpu_by_role()
    assert used["train"] > 0 and RunDir(student).report.exists()
    rows = json.loads((student / "distillation.json").read_text())
    assert [row["model"] for row in rows] == ["ensemble", "best member", "student"]
    assert {row["split"] for row in rows} == {"test"}
    assert rows[2]["lost"]["nll"] == pytest.approx(rows[2]["nll"] - rows[0]["nll"])
    assert {"nll", "ece", "accuracy"} <= set(rows[2]["lost"]) == set(rows[2]["lost_intervals"])
    assert "student (test): nll" in said and "the student against the ensemble, in brackets 95 %" in said
    for name in ("nll", "accuracy"):
        low, high = rows[2]["lost_intervals"][name]
        assert low < rows[2]["lost"][name] < high and high - low < 0.2
    assert rows == compare(teacher, student)
    assert main([*command, "--json", str(tmp_path / "rows.json")]) == 0, "again shows it again"
    assert json.loads((tmp_path / "rows.json").read_text()) == rows and len(read_state(student).members) == 1
    assert read_state(student).members["member-0"].attempts == 1


@pytest.mark.more
def test_a_student_that_ends_before_averages_begin_keeps_its_own_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    declared = digits(epochs=3, averaging=SWA(2), members=[{"width": 16, "lr": 0.1}, {"width": 20, "lr": 0.1}])
    run, student = tmp_path / "run", tmp_path / "student"
    ensemble.submit(declared, run, "inline").wait()
    ensemble.distill(run, student, epochs=1, executor="inline").wait()
    (member,) = read_state(student).members.values()
    assert member.state == "finished" and member.identity["averaging"] is None
    assert "averaging begins after 2 epochs, and the member trains for 1" in caplog.text
    (run / "ensemble.pkl").unlink()  # then the figures are those of the logs, without intervals
    rows = compare(run, student)
    assert rows[2]["lost"]["nll"] == pytest.approx(rows[2]["nll"] - rows[0]["nll"])


def test_a_student_with_few_parameters_learns_more_from_the_ensemble_than_from_labels_alone(
    teacher: Path, tmp_path: Path
) -> None:
    model = ensemble.load(teacher)
    test = digits().test
    assert test is not None
    (batch,) = test.loader(batch_size=500)
    target = model(batch)
    distances = {}
    for weight in (0.0, 1.0):
        path = tmp_path / f"{weight}"
        ensemble.distill(teacher, path, model=tiny, weight=weight, executor="inline").wait()
        log = ensemble.load(path)(batch).clamp_min(1e-12).log()
        distances[weight] = float((target * (target.clamp_min(1e-12).log() - log)).sum(dim=1).mean())
    assert distances[1.0] < distances[0.0]


@pytest.mark.usefixtures("requests_are_seen_at_once")
def test_a_student_that_is_stopped_resumes_to_the_same_bits(teacher: Path, tmp_path: Path) -> None:
    stop = once("checkpoint", lambda: ensemble.attach(tmp_path / "stopped").stop())
    how = {"epochs": 2, "params": {"width": 8}, "executor": "inline"}
    ensemble.distill(teacher, tmp_path / "whole", **how).wait()  # type: ignore[arg-type]
    ensemble.distill(teacher, tmp_path / "stopped", on_event=stop, **how).wait()  # type: ignore[arg-type]
    assert read_state(tmp_path / "stopped").members["member-0"].state == "stopped"
    ensemble.resume(tmp_path / "stopped").wait()
    ends = [read_state(tmp_path / name).members["member-0"].weights_sha256 for name in ("whole", "stopped")]
    assert ends[0] == ends[1] is not None


def test_a_student_does_not_go_on_with_another_ensemble_or_without_it(teacher: Path, tmp_path: Path) -> None:
    copied = tmp_path / "digits"
    shutil.copytree(teacher, copied)
    how = {"epochs": 1, "params": {"width": 16}, "executor": "inline"}  # another member may be the best one then
    ensemble.distill(copied, tmp_path / "first", **how).wait()  # type: ignore[arg-type]
    ensemble.resume(copied, epochs=5).wait()
    with pytest.raises(StoreError, match="code has changed"):
        ensemble.distill(copied, tmp_path / "first", **how)  # type: ignore[arg-type]
    student = ensemble.distill(copied, tmp_path / "second", **how)  # type: ignore[arg-type]
    shutil.rmtree(copied)
    student.wait()
    failed = read_state(tmp_path / "second").members["member-0"]
    assert failed.state == "failed" and failed.attempts == 1
    assert "the ensemble that the student learns from cannot be loaded" in str(failed.error)


@pytest.mark.more
def test_another_student_is_trained_beside_the_first_where_that_is_asked_for(
    teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["distill", str(teacher), "--run-dir", str(tmp_path / "student"), "--executor", "inline", "--epochs"]
    with pytest.raises(SystemExit, match="2"):
        main([*command, "1", "--accept-data"])
    assert "--accept-data" in capsys.readouterr().err, "it is not offered: a student's data are those of the run"
    assert main([*command, "1"]) == 0 and "1 member, 1 epoch, " in capsys.readouterr().err
    assert main([*command, "2"]) == 2 and "--fresh starts a new run beside this one" in capsys.readouterr().err
    assert main([*command, "2", "--fresh"]) == 0 and "1 member, 2 epochs, " in capsys.readouterr().err
    assert read_state(tmp_path / "student-2").members["member-0"].epoch == 2
    assert read_state(tmp_path / "student").members["member-0"].epoch == 1


@pytest.mark.parametrize(
    "kind", ["gaussian", *(pytest.param(kind, marks=pytest.mark.more) for kind in ("regression", "multilabel"))]
)
def test_students_of_other_tasks(kind: str, tmp_path: Path) -> None:
    ensemble.submit(of_task(kind), tmp_path / "run", "inline").wait()
    ensemble.distill(tmp_path / "run", tmp_path / "student", executor="inline").wait()
    rows = compare(tmp_path / "run", tmp_path / "student")
    wanted = {"regression": "rmse", "gaussian": "nll", "multilabel": "nll"}[kind]
    assert all(np.isfinite(row[wanted]) for row in rows)
    low, high = rows[2]["lost_intervals"][wanted]
    assert low < rows[2]["lost"][wanted] < high
    assert read_state(tmp_path / "student").members["member-0"].state == "finished"


def test_the_intervals_of_what_is_lost_are_of_the_same_samples_and_may_be_missing(
    teacher: Path, tmp_path: Path
) -> None:
    """A student that is the ensemble to the bit loses nothing, with certainty."""
    copied = tmp_path / "copy"
    shutil.copytree(teacher, copied)
    rows = compare(teacher, copied)
    assert set(rows[2]["lost"].values()) == {0.0} and rows[2]["lost_intervals"]["nll"] == [0.0, 0.0]
    for file in (copied / "members").rglob("predictions*"):
        file.unlink()
    assert compare(teacher, copied)[2]["lost_intervals"] == {}


def test_what_cannot_be_distilled_is_refused_with_the_reason(teacher: Path, tmp_path: Path) -> None:
    for arguments, why in (
        ({"params": {"widht": 3}}, r"has no hyperparameter 'widht'; did you mean 'width'\?"),
        ({"member": "member-9"}, "has no member 'member-9'"),
        ({"weight": 1.5}, "weight must be from 0 to 1"),
        ({"temperature": 0.0}, "temperature"),
        ({"epochs": 0}, "epochs"),
    ):
        with pytest.raises(SpecError, match=why):
            ensemble.distill(teacher, tmp_path / "s", executor="inline", **arguments)  # type: ignore[arg-type]
    alone = digits(epochs=1, valid=None, test=None, members=[{"width": 4, "lr": 0.1}])
    for made, options, why in (
        (of_task("quantiles", epochs=1), {}, "predicts quantiles, which is not distilled: the distance between"),
        (of_task("regression", epochs=1), {"temperature": 3.0}, "temperature= is for probabilities, not for"),
        (alone, {}, "has no ensemble to learn from: there is no validation split"),
    ):
        ensemble.submit(made, tmp_path / made.name, "inline").wait()
        with pytest.raises((SpecError, StoreError), match=why):
            ensemble.distill(tmp_path / made.name, executor="inline", **options)  # type: ignore[arg-type]

    def eleven(params: dict[str, Any]) -> Any:
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 11))

    ensemble.distill(teacher, tmp_path / "s", model=eleven, epochs=1, executor="inline").wait()
    failed = read_state(tmp_path / "s").members["member-0"]
    assert failed.attempts == 1 and "the student predicts [50, 11], the ensemble [50, 10]" in str(failed.error)


def test_distances_are_those_of_torch_of_what_is_known() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(5, 7, generator=generator, dtype=torch.float64).softmax(dim=1) for _ in range(2))
    found = find_distance(Task("classification"), 1.0)(p, q)
    torch.testing.assert_close(found, torch.nn.functional.kl_div(p.log(), q, reduction="none").sum(dim=1))
    softer = find_distance(Task("classification"), 4.0)(p, q) / 16
    assert (softer < found).all() and (softer > 0).all()
    mean, variance = torch.randn(6, generator=generator), torch.rand(6, generator=generator) + 0.1
    of = torch.distributions.Normal
    expected = torch.distributions.kl_divergence(
        of(mean, variance.sqrt()), of(mean.flip(0), variance.flip(0).sqrt())
    )
    values, soft = torch.stack([mean.flip(0), variance.flip(0)], -1), torch.stack([mean, variance], -1)
    torch.testing.assert_close(find_distance(Task("gaussian"), 1.0)(values, soft), expected)
    steps = find_distance(Task("classification"), 2.0)(torch.rand(2, 5, 3), torch.rand(2, 5, 3))
    target = torch.tensor([[0, 1, -100, -100, -100], [-100] * 5])
    means = mean_where_known(steps, target, Task("classification"))
    torch.testing.assert_close(means, torch.stack([steps[0, :2].mean(), torch.tensor(0.0)]))
    empty = find_distance(Task("regression"), 2.0)(torch.rand(0), torch.rand(0))  # of a rank without samples
    assert mean_where_known(empty, torch.zeros(0), Task("regression")).shape == (0,)
    labels = find_distance(Task("multilabel"), 1.0)(p, q)
    bernoulli = torch.distributions.Bernoulli
    torch.testing.assert_close(labels, torch.distributions.kl_divergence(bernoulli(q), bernoulli(p)))


def test_a_loss_of_the_recipes_own_stays_what_it_is_outside_training(teacher: Path, tmp_path: Path) -> None:
    ensemble.distill(teacher, tmp_path / "s", epochs=1, executor="inline").wait()
    recipe = RunDir(tmp_path / "s").load_ensemble().recipe
    assert isinstance(recipe, Recipe)
    (batch,) = digits().valid.loader(batch_size=400)  # type: ignore[union-attr]
    model = tiny({}).eval()
    torch.testing.assert_close(recipe.loss(model, batch), smooth_loss(model, batch))
    assert not torch.allclose(recipe.loss(model.train(), batch), smooth_loss(model, batch))
