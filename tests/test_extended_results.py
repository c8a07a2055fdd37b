"""A finished run that is given more epochs keeps its models until the better ones are there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.execute_members import an_ensemble, loss, model, momentum
from kit.finished_runs import of_kind, once, read_state
from kit.once import is_first
from kit.scripts import ROOT

import ensemble
from ensemble import MemberCallback, Recipe, Result
from ensemble.cli.parser import main
from ensemble.inspection.saved_predictions import load_predictions
from ensemble.result import make_result
from ensemble.store import RunDir
from ensemble.store.snapshot import RunStatus
from ensemble.store.verification import verify

pytestmark = pytest.mark.usefixtures("requests_are_seen_at_once")
K, N = 4, 8
BATCH = {"x": torch.arange(24.0).reshape(6, 4) / 24}
Weights = dict[str, torch.Tensor]


class Fate(MemberCallback):
    """Breaks the weights of a member in an epoch, or kills its process there once."""

    def begin_epoch(self, member: Any, epoch: int) -> None:
        if epoch == member.params.get("nan_in"):
            with torch.no_grad():
                next(member.model.parameters()).fill_(float("nan"))
        if epoch == member.params.get("raise_in"):
            raise RuntimeError("no such luck")
        if epoch == member.params.get("killed_in") and is_first(member.directory / "killed"):
            os.kill(os.getpid(), signal.SIGKILL)


def make(*fates: dict[str, int], epochs: int = K, **options: Any) -> ensemble.Ensemble:
    members = [{"lr": 0.05 * (1 + n), "width": 4, **fate} for n, fate in enumerate(fates)]
    recipe = Recipe(model=model, loss=loss, optimizer=momentum)
    given = {"sharing": "independent", "batch_size": 20, "seed": 3, "callbacks": [Fate()], **options}
    return an_ensemble(members, recipe=recipe, epochs=epochs, **given)


def train(path: Path, *fates: dict[str, int], **options: Any) -> Result:
    return ensemble.submit(make(*fates, **options), path, "inline").wait()


def weights(path: Path, **which: Any) -> list[Weights]:
    """Copies of the weights of the members of the model that is loaded from a run."""
    loaded = ensemble.load(path, **which)
    return [{n: t.clone() for n, t in one.state_dict().items()} for one in loaded.members.values()]


def are_equal(first: list[Weights], second: list[Weights]) -> bool:
    pairs = zip(first, second, strict=True)
    return all(one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one) for one, two in pairs)


def answers(path: Path) -> torch.Tensor:
    with torch.no_grad():
        values: torch.Tensor = ensemble.load(path)(BATCH)
    return values


@pytest.mark.parametrize(("fate", "why"), [({"nan_in": K}, "nan: "), ({"raise_in": K + 1}, "no such luck")])
def test_further_epochs_that_fail_leave_the_run_as_it_was(
    fate: dict[str, int], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run"
    before = train(path, fate, fate)
    model_before, rows = answers(path), [{**row} for row in before.members]
    saved = load_predictions(path, split="valid").values.copy()
    assert main(["resume", str(path), "--epochs", str(N)]) == 3
    said = " ".join(capsys.readouterr().out.split())
    assert "member-0" in said and "further epochs came to nothing" in said and why in said
    state = read_state(path)
    assert {(m.state, m.epoch, m.identity["epochs"], len(m.history)) for m in state.members.values()} == {
        ("finished", K, K, K)
    }
    assert (
        torch.equal(answers(path), model_before) and (load_predictions(path, split="valid").values == saved).all()
    )
    after = make_result(RunDir(path))
    for row, now in zip(rows, after.members, strict=True):
        assert all(now[name] == row[name] for name in ("state", "epoch", "metric", "metrics"))
    assert after.best is not None and before.best is not None and after.best["member"] == before.best["member"]
    assert after.combined is not None and before.combined is not None
    assert (after.combined.weights, after.combined.metrics) == (before.combined.weights, before.combined.metrics)
    assert all(check.is_sound for check in verify(RunDir(path)))
    log = RunDir(path).events.read_bytes()
    assert main(["resume", str(path)]) == 3, "nothing is trained, and the state is said"
    assert "further epochs came to nothing" in " ".join(capsys.readouterr().out.split())
    assert RunDir(path).events.read_bytes() == log
    ensemble.submit(make(fate, fate), path, "inline").wait()
    assert torch.equal(answers(path), model_before), "the declaration with the fewer epochs is the run's again"


def test_the_combination_has_the_earlier_result_of_one_member_and_the_new_one_of_another(tmp_path: Path) -> None:
    path, whole = tmp_path / "run", tmp_path / "whole"
    train(path, {"nan_in": K + 2}, {})
    before = weights(path, members=["member-0"])
    ensemble.resume(path, epochs=N).wait()
    train(whole, {}, {}, epochs=N)
    first, second = weights(path, members=["member-0", "member-1"])
    assert are_equal([first], before)
    assert are_equal([second], weights(whole, members=["member-1"]))
    state = read_state(path)
    assert [m.epoch for m in state.members.values()] == [K, N] and not any(
        m.result for m in state.members.values()
    )
    combined = of_kind(path, "combined")
    assert len(combined) == 2 and set(combined[1]["candidates"]) == {"member-0", "member-1"}
    assert str(state.members["member-0"].unextended).startswith("nan: the loss is nan")
    log = RunDir(path).events.read_bytes()
    assert main(["resume", str(path)]) == 3 and RunDir(path).events.read_bytes() == log
    assert {member.id: member.epoch for member in RunStatus.load(RunDir(path)).state.members.values()} == {
        "member-0": K,
        "member-1": N,
    }


def test_the_model_can_be_loaded_at_each_event_of_the_further_epochs_and_is_never_a_mixture(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run"
    train(path, {}, {}, combine="weighted")
    before, alone = answers(path), weights(path, members=["member-0", "member-1"])
    seen: list[tuple[str, bool]] = []

    def look(event: dict[str, Any]) -> None:
        if event["type"] in ("started", "epoch", "checkpoint", "finished", "combined"):
            is_same = are_equal(weights(path, members=["member-0", "member-1"]), alone)
            seen.append((event["type"], is_same and torch.equal(answers(path), before)))
            if len(seen) == 2:
                ensemble.export(path, tmp_path / "exported")
                assert make_result(RunDir(path)).best is not None

    ensemble.resume(path, epochs=N, on_event=look).wait()
    kinds = [kind for kind, _ in seen]
    first = kinds.index("finished")
    assert all(same for _, same in seen[:first]) and not any(same for _, same in seen[first:])
    assert kinds.count("epoch") == 2 * (N - K)


def test_a_run_that_is_killed_or_stopped_in_its_further_epochs_keeps_its_model_and_goes_on(tmp_path: Path) -> None:
    path, whole = tmp_path / "run", tmp_path / "whole"
    before = train(path, {}, {"killed_in": K + 2})
    model_before = answers(path)
    code = f"import ensemble; ensemble.resume({str(path)!r}, 'inline', epochs={N}).wait()"
    places = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests" / "support")))
    environment = {**os.environ, "PYTHONPATH": places}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == -signal.SIGKILL
    assert read_state(path).members["member-1"].epoch == K + 2
    model_after_kill = answers(path)
    ensemble.resume(path, "inline", on_event=once("started", lambda: ensemble.attach(path).stop())).wait()
    states = {member.state for member in read_state(path).members.values()}
    assert "stopped" in states, states
    after = make_result(RunDir(path))
    assert after.stopped and after.combined == before.combined
    assert any("until it has finished all 8 epochs, its result is that of 4" in line for line in notes(path))
    assert torch.equal(answers(path), model_after_kill)
    one = weights(path, members=["member-1"])
    ensemble.resume(path, "inline").wait()
    train(whole, {}, {"killed_in": 99}, epochs=N)
    assert are_equal(weights(path), weights(whole)) and not are_equal(weights(path, members=["member-1"]), one)
    assert torch.equal(answers(path), answers(whole)) and not torch.equal(answers(path), model_before)


def notes(path: Path) -> list[str]:
    from ensemble.reporting import RunProjection
    from ensemble.reporting.status import status_notes

    return status_notes(RunProjection.from_status(RunStatus.load(RunDir(path))))
