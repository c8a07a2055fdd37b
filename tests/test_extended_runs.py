"""More epochs for runs that have ended: the weights of a longer training, or a reason why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kit.execute_members import an_ensemble, loss, model, momentum
from kit.finished_runs import of_kind, once, read_state

import ensemble
from ensemble import Member, Recipe
from ensemble.cli.parser import main
from ensemble.controller.more_epochs import reads_attribute, reads_parameter
from ensemble.store import RunDir, StoreError, load_predictions

pytestmark = pytest.mark.usefixtures("requests_are_seen_at_once")
K, N = 2, 5
STEP = {"name": "step", "milestones": [1, 3], "gamma": 0.5}


def noisy_model(params: dict[str, Any]) -> Any:
    """With dropout: its weights depend on the random numbers of each step."""
    import torch

    return torch.nn.Sequential(torch.nn.Dropout(0.3), model(params))


def make(epochs: int = K, members: Any = None, **options: Any) -> ensemble.Ensemble:
    recipe = options.pop("recipe", Recipe(model=noisy_model, loss=loss, optimizer=momentum))
    if members is None and "search" not in options:
        members = [{"lr": 0.05, "width": 8}, {"lr": 0.1, "width": 4}]
    given = {"sharing": "independent", "schedule": STEP, "batch_size": 20, "seed": 3, **options}
    return an_ensemble(members, recipe=recipe, epochs=epochs, **given)


def digests(path: Path) -> list[str | None]:
    state = read_state(path)
    assert {member.state for member in state.members.values()} == {"finished"}
    return [member.weights_sha256 for member in state.members.values()]


def train(path: Path, made: ensemble.Ensemble) -> Path:
    ensemble.submit(made, path, "inline").wait()
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[str | None]:
    return digests(train(tmp_path_factory.mktemp("whole") / "run", make(N)))


def test_epochs_added_to_a_finished_run_give_the_weights_of_the_longer_one(
    whole: list[str | None], tmp_path: Path
) -> None:
    path = train(tmp_path / "run", make())
    short = digests(path)
    before = load_predictions(RunDir(path).predictions("member-0"), "valid")
    result = ensemble.resume(path, epochs=N).wait()
    assert digests(path) == whole and not set(short) & set(whole)
    state = read_state(path)
    assert [len(member.history) for member in state.members.values()] == [N, N]
    extended = {"epochs": N, "members": {"member-0": K, "member-1": K}, "notes": [], "keeps_results": True}
    assert [start.get("more_epochs") for start in of_kind(path, "run_started")] == [None, extended]
    assert (state.epochs, result.stopped) == (N, None)
    combined = of_kind(path, "combined")
    assert len(combined) == 2 and result.combined == combined[1]
    after = load_predictions(RunDir(path).predictions("member-0"), "valid")
    assert (before.values != after.values).any()
    assert RunDir(path).report.stat().st_mtime_ns > of_kind(path, "run_started")[1]["t"] * 1e9


@pytest.mark.more
def test_epochs_can_be_added_more_than_once_and_the_run_is_that_of_the_longer_declaration(
    whole: list[str | None], tmp_path: Path
) -> None:
    path = train(tmp_path / "run", make())
    ensemble.resume(path, epochs=3).wait()
    with pytest.raises(StoreError, match=r"member-0 has epochs=3, now 2: `ensemble resume --epochs` gave it 3"):
        ensemble.submit(make(), path, "inline")
    ensemble.resume(path, epochs=N).wait()
    assert digests(train(path, make(N))) == whole, "the declaration with all epochs is this run's"
    member = read_state(path).members["member-0"]
    assert (member.identity["epochs"], member.identity["epochs_before"], member.attempts) == (N, K, 3)


def test_a_stopped_run_can_be_given_more_epochs_and_a_stopped_extension_goes_on_to_the_new_end(
    whole: list[str | None], tmp_path: Path
) -> None:
    path = tmp_path / "run"

    def stop() -> None:
        ensemble.attach(path).stop()

    ensemble.submit(make(), path, "inline", on_event=once("started", stop)).wait()
    ensemble.resume(path, on_event=once("checkpoint", stop), epochs=N).wait()
    assert "finished" not in {member.state for member in read_state(path).members.values()}
    ensemble.resume(path).wait()
    assert digests(path) == whole


def by_all_steps(optimizer: Any, params: dict[str, Any], steps: int) -> Any:
    import torch

    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=params["lr"], total_steps=steps)


@pytest.mark.more
def test_members_keep_more_epochs_of_their_own_and_failures_are_not_tried_again(tmp_path: Path) -> None:
    members = [{"lr": 0.05}, Member({"lr": 0.05}, epochs=4), Member({"lr": 0.1}, epochs=1), {"lr": 3e38}]
    path = train(tmp_path / "run", make(members=members))
    before = read_state(path).members["member-1"].weights_sha256
    for more in ({"epochs": 3}, {}):
        ensemble.resume(path, **more).wait()  # type: ignore[arg-type]
        state = read_state(path)
        assert [member.identity["epochs"] for member in state.members.values()] == [3, 4, 3, K]
        ends = [(member.state, member.attempts, len(member.history)) for member in state.members.values()]
        assert ends == [("finished", 2, 3), ("finished", 1, 4), ("finished", 2, 3), ("failed", 1, 0)]
    assert of_kind(path, "run_started")[1]["more_epochs"]["members"] == {"member-0": K, "member-2": 1}
    assert (state.members["member-1"].weights_sha256, state.members["member-3"].reason) == (before, "nan")


def own_loop(member: Any) -> None:
    import torch

    net = model(member.params)
    optimizer = momentum(net, member.params)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=member.steps)
    net, optimizer = member.prepare(net, optimizer, schedule)
    for _ in member.epochs():
        for batch in member.batches():
            member.backward(loss(net, batch))
            member.step()
        member.report(loss=1.0)


REFUSED = {
    "'cosine' of member-0 ends with the learning rate 0 after its 2 epochs": lambda: make(schedule="cosine"),
    "Recipe.schedule reads the number of all steps": lambda: make(
        recipe=Recipe(model=model, loss=loss, optimizer=momentum, schedule=by_all_steps), schedule=None
    ),
    "the train function reads `member.steps`": lambda: make(recipe=own_loop, schedule=None, objective="loss"),
}


@pytest.mark.parametrize(
    "why", [why if "cosine" in why else pytest.param(why, marks=pytest.mark.more) for why in REFUSED]
)
def test_an_extension_that_would_not_train_as_declared_is_refused_and_changes_nothing(
    why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = train(tmp_path / "run", REFUSED[why]())
    log = RunDir(path).events.read_bytes()
    with pytest.raises(StoreError, match="its members train for 2 epochs already; give more than that, not 2"):
        ensemble.resume(path, epochs=K)
    with pytest.raises(StoreError, match=why):
        ensemble.resume(path, epochs=N)
    assert main(["resume", str(path), "--epochs", str(N)]) == 2 and why in capsys.readouterr().err
    assert RunDir(path).events.read_bytes() == log


def test_an_extension_without_its_checkpoint_or_of_a_run_in_progress_is_refused(tmp_path: Path) -> None:
    path = train(tmp_path / "run", make())
    said: list[str] = []

    def extend_again(event: dict[str, Any]) -> None:
        if event["type"] == "started":
            with pytest.raises(StoreError, match="is in progress") as refused:
                ensemble.resume(path, epochs=9)
            said.append(str(refused.value))

    ensemble.resume(path, epochs=3, on_event=extend_again).wait()
    assert len(said) == 2
    member = read_state(path).members["member-1"]
    RunDir(path).valid_checkpoint(member).unlink()
    with pytest.raises(StoreError, match=r"from which member-1 would go on, is not there any more"):
        ensemble.resume(path, epochs=9)


@pytest.mark.more
def test_a_schedule_that_has_ended_above_zero_stays_there_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = train(tmp_path / "run", make(schedule={"name": "cosine", "end": 0.25}))
    ensemble.resume(path, epochs=4).wait()
    (note,) = of_kind(path, "run_started")[1]["more_epochs"]["notes"]
    assert "'cosine' has ended after 2 epochs: the learning rate stays at 0.25 of the declared one" in note
    assert note in caplog.text
    rates = [epoch.lr for epoch in read_state(path).members["member-0"].history]
    assert rates[2:] == [pytest.approx(0.05 * 0.25)] * 2


@pytest.mark.more
def test_pruned_trials_stay_pruned_and_the_declaration_with_all_epochs_is_the_runs(tmp_path: Path) -> None:
    """Trials that were pruned have the epochs of the first declaration; later epochs are not judged."""
    import optuna

    pruner, space = {"name": "median", "startup_trials": 1}, {"lr": ensemble.loguniform(1e-7, 0.5)}

    def searched(epochs: int, trials: int) -> ensemble.Ensemble:
        search = ensemble.Search(space, trials=trials, sampler="random", seed=2, pruner=pruner)
        return make(epochs, search=search, recipe=Recipe(model=model, loss=loss))

    path = train(tmp_path / "run", searched(2, 8))
    before = {m.id: (m.state, m.attempts, len(m.history)) for m in read_state(path).members.values()}
    finished = [name for name, (state, *_) in before.items() if state == "finished"]
    assert {state for state, *_ in before.values()} == {"finished", "pruned"}
    ensemble.resume(path, epochs=3).wait()
    state = read_state(path)
    assert set(of_kind(path, "run_started")[1]["more_epochs"]["members"]) == set(finished)
    for name, member in state.members.items():
        if name in finished:
            assert (member.state, len(member.history)) == ("finished", 3)
        else:
            assert (member.state, member.attempts, len(member.history)) == before[name]
    backend = optuna.storages.journal.JournalFileBackend(str(RunDir(path).journal))
    study = optuna.load_study(study_name="executed", storage=optuna.storages.JournalStorage(backend))
    last = {trial.user_attrs["member"]: trial for trial in study.trials}
    assert len(study.trials) == len(last) + len(finished), "what was trained further is told as another trial"
    for name, trial in last.items():
        member = state.members[name]
        assert trial.state.name == ("COMPLETE" if name in finished else "PRUNED")
        assert trial.last_step == len(member.history)
        assert name not in finished or trial.value == member.metrics["accuracy"]
    with pytest.raises(StoreError, match=r"has epochs=3, now 2: `ensemble resume --epochs` gave it 3"):
        train(path, searched(2, 8))
    train(path, searched(3, 9))
    found = list(read_state(path).members.values())
    assert [member.state for member in found[:8]] == [state for state, *_ in before.values()] and len(found) == 9
    assert {len(m.history) for m in found if m.state == "finished"} == {3}


@pytest.mark.more
def test_the_declaration_with_all_epochs_is_the_runs_also_where_a_member_stopped_early(tmp_path: Path) -> None:
    early = Member({"lr": 0.0, "width": 4}, early_stopping={"patience": 1})
    path = train(tmp_path / "run", make(3, [{"lr": 0.1, "width": 4}, early], averaging="swa"))
    ensemble.resume(path, epochs=N).wait()
    assert [len(member.history) for member in read_state(path).members.values()] == [N, 2]
    (note,) = of_kind(path, "run_started")[1]["more_epochs"]["notes"]
    assert note == "SWA goes on with the average that began after 0.75 of the declared 3 epochs"
    train(path, make(N, [{"lr": 0.1, "width": 4}, early], averaging="swa"))
    assert [member.attempts for member in read_state(path).members.values()] == [2, 1]
    with pytest.raises(StoreError, match="member-1 has epochs=3, now 7"):
        train(path, make(7, [Member({"lr": 0.1, "width": 4}, epochs=N), early], averaging="swa"))
    alone = train(tmp_path / "alone", make(3, [early]))
    with pytest.raises(StoreError, match="its members stopped early"):
        ensemble.resume(alone, epochs=N)


def test_what_a_function_reads_is_seen() -> None:
    assert reads_parameter(by_all_steps, 2) and not reads_parameter(lambda optimizer, params, steps: optimizer, 2)
    assert reads_parameter(lambda a, b, steps: lambda: steps, 2), "by a function that it makes"
    assert not reads_parameter(lambda a, b, steps: b["steps"], 2), "a hyperparameter of that name"
    assert reads_parameter(lambda *all: None, 2) and reads_parameter(print, 2), "what cannot be seen"
    assert reads_attribute(own_loop, "steps") and not reads_attribute(loss, "steps")
