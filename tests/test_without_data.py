"""Members whose train function reads its own data, or none: they have all that members of a pipeline have."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.event_dicts import ledger, read_events
from kit.finished_runs import of_kind, once, read_state
from kit.leftovers import wait_until
from kit.once import is_first

import ensemble
from ensemble import EarlyStopping, Ensemble, Member, Search, uniform
from ensemble.inspection import dry_run
from ensemble.reporting import summary_text
from ensemble.store import DamagedError, RunDir, StoreError
from ensemble.store.verification import verify
from pipelines import Pipeline, sources

MORE = pytest.mark.more
pytestmark = pytest.mark.usefixtures("no_report", "requests_are_seen_at_once")


def burn(cpu_s: float) -> None:
    until_s = time.process_time() + cpu_s
    while time.process_time() < until_s:
        pass


def fail_once(member: Any, number: int) -> None:
    """Raise, or kill this process, where it comes to the number 3 for the first time."""
    fault = member.params.get("fault")
    if number == 3 and fault and is_first(member.directory / "failed"):
        if fault == "raise":
            raise OSError("a file was not there")
        os.kill(os.getpid(), signal.SIGKILL)


def write_and_report(member: Any) -> None:
    """A whole program: one report, and a file."""
    burn(member.params.get("burn_s", 0.0))
    folder = member.folder / "made"
    folder.mkdir(exist_ok=True)
    np.save(folder / "values.npy", np.arange(member.params["count"]))
    member.report(error=1 / member.params["count"])


def climb(member: Any) -> None:
    """A loop of the member's, whose state a checkpoint has."""
    place = torch.nn.ParameterDict({"x": torch.nn.Parameter(torch.zeros(3))})
    member.state("place", place)
    for epoch in member.epochs():
        fail_once(member, epoch)
        while epoch == 3 and not Path(member.params.get("awaits", "/")).exists():
            time.sleep(0.01)
        rng = np.random.default_rng((member.identity.seed, epoch))
        with torch.no_grad():
            place["x"] += member.params.get("slope", 1.0) * torch.from_numpy(rng.uniform(0, 1, 3))
        member.report(height=float(place["x"].detach().sum()))


def call_back(member: Any) -> None:
    """A loop of its own, which reports as a callback of XGBoost would."""
    with open(member.directory / "rounds", "a") as file:
        for number in range(member.identity.epochs):
            fail_once(member, number)
            time.sleep(member.params.get("pause_s", 0))
            print(number, file=file, flush=True)
            member.report(height=number * member.params.get("slope", 1.0))


def declare(recipe: Any, *members: Any, **options: Any) -> Ensemble:
    given = {"name": "own", "objective": "height", "mode": "max", "checkpoint_every": 1, **options}
    return Ensemble(recipe=recipe, **({"members": list(members)} if members else {}), **given)


def heights(path: Path, member: str = "member-0") -> list[float]:
    return [event.metrics["height"] for event in read_state(path).members[member].history]


@pytest.mark.parametrize("executor", ["inline", "local"])
def test_a_report_is_enough_and_files_stay_with_their_digests(tmp_path: Path, executor: str) -> None:
    made = declare(write_and_report, {"count": 4, "burn_s": 0.5}, {"count": 8}, objective="error", mode="min")
    result = ensemble.submit(made, tmp_path, executor).wait()
    assert [row["state"] for row in result.members] == ["finished", "finished"]
    assert result.best is not None and result.best["member"] == "member-1"
    assert np.load(result.file("member-0", "made/values.npy")).tolist() == [0, 1, 2, 3]
    by_role = {(row.role, row.member): row.cpu_s for row in ledger(read_events(tmp_path / "events.jsonl")).rows}
    assert by_role["train", "member-0"] >= 0.5
    assert not {role for role, _ in by_role} & {"prepare", "feed", "profile"}
    for everything in (False, True):
        text = summary_text(RunDir(tmp_path), everything=everything)
        assert "CPU-seconds" in text and "shar" not in text and "sample" not in text.replace("samples/s", "")
    with pytest.raises(StoreError, match=r"no file 'made/value.npy'; did you mean 'made/values.npy'"):
        result.file("member-0", "made/value.npy")


def test_a_file_that_was_damaged_is_named_and_made_again(tmp_path: Path) -> None:
    made = declare(write_and_report, {"count": 4}, objective="error", mode="min")
    result = ensemble.submit(made, tmp_path, "inline").wait()
    path = result.file("member-0", "made/values.npy")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + b"\x07")
    with pytest.raises(DamagedError, match=r"values\.npy is damaged.*ensemble resume"):
        result.file("member-0", "made/values.npy")
    (check,) = [check for check in verify(RunDir(tmp_path)) if check.kind == "file"]
    assert (check.file, check.condition) == ("members/member-0/files/made/values.npy", "damaged")
    again = ensemble.resume(tmp_path).wait()
    assert again.file("member-0", "made/values.npy").read_bytes() == whole
    path.unlink()
    with pytest.raises(DamagedError, match=r"values\.npy is gone"):
        again.file("member-0", "made/values.npy")


def write_in_epochs(member: Any) -> None:
    for epoch in member.epochs():
        (member.folder / "checkpoint-1.safetensors").write_text(f"epoch {epoch}")
        member.report(height=epoch)


def test_a_damaged_file_that_is_written_within_epochs_is_made_again_from_the_first_one(tmp_path: Path) -> None:
    made = declare(write_in_epochs, {}, {}, epochs=2, keep_checkpoints="selected")
    result = ensemble.submit(made, tmp_path, "inline").wait()
    for member in ("member-0", "member-1"):
        result.file(member, "checkpoint-1.safetensors").write_text("damaged")
    again = ensemble.resume(tmp_path).wait()
    for member in ("member-0", "member-1"):
        assert again.file(member, "checkpoint-1.safetensors").read_text() == "epoch 1"
    assert [row["attempts"] for row in again.members] == [2, 2]


@pytest.mark.parametrize("recipe", [climb, call_back])
@pytest.mark.parametrize(("fault", "executor"), [("raise", "inline"), pytest.param("kill", "local", marks=MORE)])
def test_a_member_that_fails_is_tried_again_and_ends_as_it_would_have(
    tmp_path: Path, recipe: Any, fault: str, executor: str
) -> None:
    for name in (fault, ""):
        ensemble.submit(declare(recipe, {"fault": name}, epochs=5), tmp_path / f"run {name}", executor).wait()
    failed, alone = (read_state(tmp_path / f"run {name}").members["member-0"] for name in (fault, ""))
    assert (failed.state, failed.attempts, alone.attempts) == ("finished", 2, 1)
    assert [event.epoch for event in failed.history] == [0, 1, 2, 3, 4]
    assert heights(tmp_path / f"run {fault}") == heights(tmp_path / "run ")
    if recipe is call_back:  # the second attempt begins again
        rounds = (RunDir(tmp_path / f"run {fault}").member("member-0") / "rounds").read_text().split()
        assert rounds == ["0", "1", "2", "0", "1", "2", "3", "4"]


def draw(member: Any) -> None:
    total = torch.nn.ParameterDict({"x": torch.nn.Parameter(torch.zeros(1))})
    member.state("total", total)
    for epoch in member.epochs():
        fail_once(member, epoch)
        with torch.no_grad():
            total["x"] += torch.rand(1) + np.random.random()
        member.report(height=float(total["x"].detach()))


def test_what_an_epoch_draws_at_random_is_the_same_after_a_resume(tmp_path: Path) -> None:
    for fault in ("raise", ""):
        ensemble.submit(declare(draw, {"fault": fault}, epochs=5), tmp_path / f"run {fault}", "inline").wait()
    assert heights(tmp_path / "run raise") == heights(tmp_path / "run ")


def test_a_function_that_begins_again_is_heard_while_its_reports_are_passed_over(tmp_path: Path) -> None:
    heard: list[str] = []
    made = declare(call_back, {"fault": "raise", "pause_s": 0.6}, epochs=4)
    ensemble.submit(made, tmp_path, "inline", on_event=lambda event: heard.append(event["type"])).wait()
    second = heard[len(heard) - heard[::-1].index("started") : len(heard) - heard[::-1].index("epoch")]
    assert "progress" in second, "it would be taken to hang"


@MORE
def test_a_run_whose_driver_is_killed_goes_on_from_the_checkpoints_of_its_members(tmp_path: Path) -> None:
    script = "import sys, test_without_data as t; t.drive(*sys.argv[1:])"
    search_path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parent / "support"), *sys.path])
    run, go_on = tmp_path / "run", tmp_path / "go on"
    with subprocess.Popen(
        [sys.executable, "-c", script, str(run), str(go_on)], env={**os.environ, "PYTHONPATH": search_path}
    ) as driver:
        wait_until(lambda: (run / "events.jsonl").exists() and len(of_kind(run, "epoch")) >= 3, "three epochs")
        driver.kill()
    go_on.touch()
    assert ensemble.resume(run).wait().members[0]["state"] == "finished"
    ensemble.submit(declare(climb, {}, epochs=5), tmp_path / "alone", "inline").wait()
    assert heights(run) == heights(tmp_path / "alone")
    member = read_state(run).members["member-0"]
    assert member.attempts == 2 and [event.epoch for event in member.history] == [0, 1, 2, 3, 4]


def drive(run_dir: str, go_on: str) -> None:
    ensemble.submit(declare(climb, {"awaits": go_on}, epochs=5), run_dir, "local").wait()


def test_a_run_that_is_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    made = declare(climb, {}, epochs=5)
    run = ensemble.submit(made, tmp_path / "run", "inline", on_event=once("epoch", lambda: run.stop()))
    assert run.wait().stopped == "asked to"
    assert read_state(tmp_path / "run").members["member-0"].state == "stopped"
    ensemble.resume(tmp_path / "run").wait()
    ensemble.submit(made, tmp_path / "alone", "inline").wait()
    assert heights(tmp_path / "run") == heights(tmp_path / "alone")
    assert len(of_kind(tmp_path / "run", "epoch")) == 5


@pytest.mark.parametrize("recipe", [climb, call_back])
def test_a_search_prunes_trials_between_their_reports(tmp_path: Path, recipe: Any) -> None:
    pruner = {"name": "median", "startup_trials": 1}
    search = Search({"slope": uniform(-1, 1)}, trials=6, sampler="random", pruner=pruner)
    ensemble.submit(declare(recipe, search=search, epochs=6), tmp_path, "inline").wait()
    members = read_state(tmp_path).members.values()
    pruned = [len(member.history) for member in members if member.state == "pruned"]
    assert pruned and 0 < max(pruned) < 6
    assert {len(member.history) for member in members if member.state == "finished"} == {6}


def test_a_loop_of_its_own_stops_early_and_its_later_reports_do_not_count(tmp_path: Path) -> None:
    made = declare(call_back, {"slope": 0.0}, epochs=6, early_stopping=EarlyStopping(2))
    ensemble.submit(made, tmp_path, "inline").wait()
    member = read_state(tmp_path).members["member-0"]
    assert (member.state, len(member.history)) == ("finished", 3) and member.early_stopping is not None


def break_off(member: Any) -> None:
    for epoch in member.epochs():
        member.report(height=epoch)
        if epoch == 1:
            break


def report_once(member: Any) -> None:
    member.report(height=1.0)


@pytest.mark.parametrize(("recipe", "epochs", "why"), [(break_off, 2, "left"), (report_once, 1, "returned")])
def test_a_function_that_ends_before_its_last_epoch_has_finished(
    tmp_path: Path, recipe: Any, epochs: int, why: str
) -> None:
    ensemble.submit(declare(recipe, {}, epochs=4), tmp_path, "inline").wait()
    member = read_state(tmp_path).members["member-0"]
    assert (member.state, len(member.history)) == ("finished", epochs)
    assert why in (member.early_stopping or {})["reason"]


def predict(member: Any) -> None:
    """A model of torch beside one that is none, on the validation data."""
    index = torch.cat([batch["index"].clone() for batch in member.batches("valid")])
    label = torch.cat([batch["label"].clone() for batch in member.batches("valid")])
    if member.params["torch"]:
        model = torch.nn.Linear(3, 3, bias=False)
        model, optimizer = member.prepare(model, torch.optim.SGD(model.parameters(), lr=5.0))
        for _ in member.epochs():
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(torch.eye(3)), torch.arange(3)).backward()
            optimizer.step()
            member.report(height=float(model.weight.detach().diagonal().sum()))
        values = model(torch.eye(3)).softmax(1).detach()[label]
    else:
        values = 0.1 + 0.7 * torch.eye(3)[label]
        member.report(height=1.0)
    member.predictions("valid", values, index)


def test_predictions_on_validation_data_are_combined_and_the_weights_of_torch_are_kept(tmp_path: Path) -> None:
    label = np.arange(60) % 3
    valid = Pipeline(sources.arrays(x=np.zeros((60, 2), np.float32), label=label))
    members = Member({"torch": True}, epochs=3, keep="best"), {"torch": False}
    result = ensemble.submit(declare(predict, *members, valid=valid, combine="average"), tmp_path, "inline").wait()
    assert result.combined is not None and result.combined["metrics"]["ensemble"]["accuracy"] == 1.0
    assert set(result.combined["weights"]) == {"member-0", "member-1"}
    members_of = read_state(tmp_path).members
    assert members_of["member-0"].weights_sha256 != members_of["member-1"].weights_sha256
    assert "shar" not in result.summary()


def test_more_members_than_cores_wait_for_places_and_nothing_is_measured_before(tmp_path: Path) -> None:
    many = 2 * len(os.sched_getaffinity(0))
    result = ensemble.submit(declare(report_once, *({} for _ in range(many))), tmp_path, "local").wait()
    assert [row["state"] for row in result.members] == ["finished"] * many
    assert not of_kind(tmp_path, "measuring") and not of_kind(tmp_path, "feeder")


def fail_at_once(member: Any) -> None:
    raise AssertionError("a dry run calls no train function without a pipeline")


def test_a_dry_run_calls_nothing_and_says_that_nothing_is_known(tmp_path: Path) -> None:
    text = str(dry_run(declare(fail_at_once, {}, {}), tmp_path / "run", "local"))
    assert "samples: none, train functions read their own data" in text and "not measured: " in text
    assert "shar" not in text and "fail" not in text
