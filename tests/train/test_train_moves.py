"""A member's side of moving between streams, and which checkpoints a wider one goes on from."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit import loop_cases
from kit import train_child as cases
from kit.checkpoints import newest_checkpoint
from kit.loop_cases import Events, of
from kit.ranks import run_ranks

from ensemble.spec import EMA, Recipe
from ensemble.store import RunDir
from ensemble.train import Inbox, checkpoint, work
from ensemble.train.data_identity import training_data
from ensemble.train.job import TrainingError
from ensemble.train.recipe import _make_schedule
from pipelines import Feeder


def train(folder: Path, inbox: Inbox, feeder: str | None = None, attempt: int = 0) -> tuple[str, Events]:
    return loop_cases.train(folder, cases.SMOOTH, inbox, attempt, job={"feeder": feeder})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Events:
    return of(train(tmp_path_factory.mktemp("whole"), Inbox())[1], "finished")


def test_what_waits_for_the_end_of_an_epoch_is_the_last_that_was_asked_but_an_end_counts_most() -> None:
    inbox = Inbox()
    assert inbox.pop_deferred() is None and inbox.poll() is None
    inbox.put("alone")
    inbox.put("join", feeder="f", cohort=2)
    inbox.put("continue")
    inbox.put("stop")
    assert inbox.pop_deferred() == {"command": "join", "feeder": "f", "cohort": 2}
    assert inbox.pop_deferred() is None
    assert (inbox.wait(), inbox.poll(), inbox.poll()) == ("continue", "stop", None)
    inbox.put("stop_after_epoch")
    inbox.put("alone")
    assert inbox.pop_deferred() == {"command": "stop_after_epoch"}
    for wrong, fields in (("join", {}), ("alone", {"feeder": "f"}), ("stop", {"feeder": "f"}), ("rest", {})):
        with pytest.raises(ValueError, match=wrong):
            inbox.put(wrong, **fields)


class Later(Inbox):
    def __init__(self, *deferred: dict[str, Any] | None) -> None:
        super().__init__()
        self._deferred = list(deferred)

    def pop_deferred(self) -> dict[str, Any] | None:
        return self._deferred.pop(0) if self._deferred else None


def test_a_member_changes_feeders_and_goes_on_alone_with_the_same_batches(tmp_path: Path, whole: Any) -> None:
    valid = {"valid": cases.data(13, seed=1)}
    with Feeder(cases.data(), resident=valid) as first, Feeder(cases.data(), replacement=True) as second:
        inbox = Later({"command": "join", "feeder": second.address, "cohort": 1}, {"command": "alone"})
        outcome, events = train(tmp_path / "moved", inbox, first.address)
        assert outcome == "finished"
        until = time.monotonic() + 300
        while first.stats()["members"] or second.stats()["members"]:
            assert time.monotonic() < until, "it reads no longer"
            time.sleep(0.01)
        assert (first.stats()["consumed"], second.stats()["consumed"]) == (23, 23)
        assert max(first.stats()["prepared"], second.stats()["prepared"]) <= 69
    assert of(events, "finished") == whole
    moves = [(e["cohort"], e["feeder"], e["epoch"], e["shared"]) for e in of(events, "moved")]
    assert moves == [(1, second.address, 1, True), (None, None, 2, False)]
    counts = [(e["shared_batches"], e["private_batches"]) for e in of(events, "epoch")]
    assert counts == [(5, 0), (5, 0), (0, 5)], "counted by epoch, whoever gave the batches"


def test_a_feeder_that_cannot_take_a_member_leaves_it_alone(tmp_path: Path, whole: Events) -> None:
    """Its ring is too small for a batch, it prepares something else, or it is not there at all."""
    with Feeder(cases.data(), capacity=4, block=2) as small, Feeder(cases.data(29)) as other:
        for number, address in enumerate((small.address, other.address, str(tmp_path / "nobody"))):
            inbox = Later({"command": "join", "feeder": address, "cohort": 1})
            with pytest.warns(UserWarning, match="alone|its own batches|no feeder"):
                outcome, events = train(tmp_path / str(number), inbox)
            assert outcome == "finished" and of(events, "finished") == whole
            assert [event["shared"] for event in of(events, "moved")] == [False]


def test_an_end_after_an_epoch_is_a_checkpoint_between_two(tmp_path: Path, whole: Events) -> None:
    outcome, events = train(tmp_path / "ended", Later(None, {"command": "stop_after_epoch"}))
    assert outcome == "stopped" and of(events, "stopped")[0]["epoch"] == 2
    assert of(events, "checkpoint")[-1]["step"] == of(events, "stopped")[0]["step"] == 0
    outcome, events = train(tmp_path / "ended", Inbox())
    assert outcome == "finished" and of(events, "finished") == whole
    for command in ("alone", "stop_after_epoch"):  # after the last epoch nothing changes any more
        outcome, events = train(tmp_path / command, Later(None, None, {"command": command}))
        assert outcome == "finished" and not of(events, "moved") and not of(events, "stopped")


def test_only_an_elastic_member_goes_on_from_a_checkpoint_of_fewer_workers(tmp_path: Path) -> None:
    train(tmp_path, Inbox())
    ensemble = cases.declare(cases.SMOOTH, 1)
    path, narrow = newest_checkpoint(RunDir(tmp_path), "member-0", 0), ensemble.identify(0)
    assert path is not None
    wide, data = replace(narrow, workers=2), training_data(ensemble, narrow.params)
    assert checkpoint.read(path, wide, data, elastic=True)["identity"]["workers"] == 1
    assert checkpoint.read(path, narrow, data)["identity"]["workers"] == 1
    for identity, elastic, says in (
        *((identity, False, "workers was 1, is 2") for identity in (wide, replace(wide, auto=["workers"]))),
        (replace(wide, seed=5), True, "seed was 0, is 5"),
    ):
        with pytest.raises(TrainingError, match=says):
            checkpoint.read(path, identity, data, elastic=elastic)


def test_the_learning_rate_of_a_widened_member_stays_what_it_was() -> None:
    """The damped law scales it by workers for the sake of the batch, which has not grown."""
    recipe = Recipe(model=cases.plain, loss=cases.loss, task="classification")
    identity = cases.declare(recipe, 1, schedule="damped").identify(0)

    def rate(**changes: Any) -> float:
        about = {"identity": replace(identity, **changes), "params": {}, "steps": 15, "steps_per_epoch": 5}
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.01)
        _make_schedule(recipe, SimpleNamespace(**about), optimizer)  # type: ignore[arg-type]
        return float(optimizer.param_groups[0]["lr"])

    assert rate(workers=4, widened_from=1) == rate() != rate(workers=4)


FLOAT64 = {name: cases.DOUBLE[name] for name in ("train", "valid")}
LOOP = {**loop_cases.STOPPING, **FLOAT64, "epochs": 9, "keep": "best", "averaging": EMA(0.8), "validate_every": 2}
LOOP |= {"elastic": True, "params": {"lr": 0.4, "dtype": "float64"}}


def train_widened(rank: int, folder: Path, world: int = 1, stop: Any = None) -> tuple[str, Events]:
    ensemble, events = cases.declare(cases.SMOOTH, world, **LOOP), Events()
    identity = replace(ensemble.identify(0), widened_from=1 if world > 1 else None)
    meet = (folder / "meet").as_uri() if world > 1 else None
    job = cases.make_job(folder / "run", ensemble, identity=identity, rank=rank, rendezvous=meet)
    return work(job, ensemble, events.append, cases.Script(stop, "stop")), events


def end(outcome: str, events: Events) -> dict[str, Any]:
    assert outcome == "finished", events[-1]
    return of(events, "finished")[0]


@pytest.mark.parametrize("stop", [4, 13], ids=["within the first epoch", "later"])
def test_a_widened_member_decides_as_it_would_have_with_one_worker(tmp_path: Path, stop: int) -> None:
    whole = end(*train_widened(0, tmp_path / "whole"))
    folder = tmp_path / "widened"
    assert train_widened(0, folder, stop=stop)[0] == "stopped"
    ranks = run_ranks(2, train_widened, folder, 2)
    wide = end(*ranks[0])
    assert ranks[1][0] == "finished"
    for name in ("epoch", "step"):
        assert wide["kept"][name] == whole["kept"][name]
    assert wide["epoch"] == whole["epoch"] < 8 and wide["metrics"] == pytest.approx(whole["metrics"], rel=1e-9)
