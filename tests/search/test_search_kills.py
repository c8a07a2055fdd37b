"""A search that is killed anywhere goes on as if it had not been, and tells nothing twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.property_examples import examples
from optuna.samplers import CmaEsSampler, NSGAIISampler, QMCSampler, RandomSampler, TPESampler
from small_run import SPACE, Run, declare
from studies import read_study

import ensemble
from ensemble.controller.performer import complete_event
from ensemble.controller.starts import make_trials
from ensemble.spec import Search, choice, integer, loguniform, uniform
from ensemble.store import RunDir, RunState, read_events


def conditional(trial: Any) -> dict[str, Any]:
    """A space in which a hyperparameter exists only beside another, and one is made of two."""
    act = trial.suggest_categorical("act", ["relu", "gelu"])
    params = {"act": act, "lr": trial.suggest_float("lr", 1e-4, 1.0, log=True)}
    if act == "gelu":
        params["p"] = trial.suggest_float("p", 0.0, 0.5, step=0.1)
    layers = [trial.suggest_int(f"width_{n}", 4, 64, log=True) for n in range(trial.suggest_int("depth", 1, 3))]
    return {**params, "layers": layers, "width": sum(layers)}


NUMBERS = {"lr": loguniform(1e-4, 1.0), "p": uniform(0, 1), "act": "a", "width": 8}
STEPS = {"lr": choice(0.001, 0.01, 0.1), "act": choice("relu", "gelu"), "width": integer(4, 24, step=20), "p": 0.5}
FIRST = [{"lr": 0.01}, {"act": "relu"}]
PERCENTILE = optuna.pruners.PercentilePruner(50.0)
SEARCHES: dict[str, dict[str, Any]] = {
    "tpe": {"pruner": "hyperband"},
    "tpe, conditional": {"space": conditional, "pruner": "asha", "enqueue": FIRST},
    "random": {"sampler": "random", "pruner": "median"},
    "cmaes": {"sampler": "cmaes", "space": NUMBERS, "pruner": "none"},
    "gp": {"sampler": "gp", "space": NUMBERS, "pruner": "patience", "trials": 12},
    "grid": {"sampler": "grid", "space": STEPS, "pruner": "asha"},
    "nsga2": {"sampler": {"name": "nsga2", "population_size": 4}},
    "own tpe": {"sampler": TPESampler(seed=3, multivariate=True, n_startup_trials=4), "pruner": PERCENTILE},
    "own random": {"sampler": RandomSampler(), "space": conditional, "pruner": PERCENTILE},
    "own nsga": {"sampler": NSGAIISampler(seed=3, population_size=4), "enqueue": FIRST, "pruner": "none"},
    "own qmc": {"sampler": QMCSampler(seed=3, scramble=True), "space": NUMBERS, "pruner": PERCENTILE},
    "own cmaes": {"sampler": CmaEsSampler(seed=3, n_startup_trials=2), "space": NUMBERS, "pruner": PERCENTILE},
}
OFTEN = ("tpe", "cmaes", "own qmc", "tpe, conditional")
WHOLE: dict[str, Run] = {}


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning", "ignore:.*independent")
@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.more) for name in SEARCHES]
)
@examples(6)
@given(share=st.floats(0, 1), is_logged=st.booleans())
def test_a_search_killed_at_any_byte_goes_on_as_if_it_had_not_been(
    tmp_path_factory: pytest.TempPathFactory, case: str, share: float, is_logged: bool
) -> None:
    folder = tmp_path_factory.mktemp("killed")
    if case not in WHOLE:
        search = Search(**{"space": SPACE, "trials": 16, "seed": 3, **SEARCHES[case]})
        WHOLE[case] = Run(search, folder / "whole").to_the_end()
    expected = WHOLE[case]
    assert expected.journal is not None
    at = int(share * expected.journal.stat().st_size)
    resumed = expected.killed(at, folder / "journal", is_logged=is_logged)
    assert resumed.to_the_end().outcome == expected.outcome
    whole, again = (read_study(journal, "s").trials for journal in (expected.journal, folder / "journal"))
    assert [(t.state, t.params, t.values) for t in again] == [(t.state, t.params, t.values) for t in whole]


#: Kills itself with the n-th write to the journal: before it, or after.
DRIVER = """
import os, signal, sys
sys.path[:0] = sys.argv[4:]
from optuna.storages.journal import JournalFileBackend
from small_run import declare
import ensemble
from test_search_kills import small_search

folder, nth, when = sys.argv[1], int(sys.argv[2]), sys.argv[3]
append, count = JournalFileBackend.append_logs, 0

def killing(self, logs):
    global count
    count += 1
    if count == nth and when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    append(self, logs)
    if count == nth:
        os.kill(os.getpid(), signal.SIGKILL)

JournalFileBackend.append_logs = killing
ensemble.submit(declare(small_search(), epochs=2), run_dir=folder, executor="inline").wait()
"""


def small_search() -> Search:
    return Search({"lr": loguniform(1e-3, 1.0), "width": integer(1, 9)}, trials=3, pruner="asha", seed=1)


def run_killed(folder: Path, nth: int, when: str) -> int:
    import small_run

    paths = [os.path.dirname(small_run.__file__), *sys.path]
    done = subprocess.run([sys.executable, "-c", DRIVER, str(folder), str(nth), when, *paths], capture_output=True)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr.decode()[-2000:]
    return done.returncode


def list_proposals(folder: Path) -> list[dict[str, Any]]:
    return [event.params for event in read_events(RunDir(folder).events) if event.type == "member"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    ensemble.submit(declare(small_search(), epochs=2), run_dir=folder, executor="inline").wait()
    return folder


#: Writes: three make the study; a trial is asked, reports two epochs, and is told its end.
@pytest.mark.parametrize(
    ("nth", "when"),
    [(4, "before"), (4, "after"), (7, "before")],
    ids=["before it asks", "before its member is declared", "ended in the log, and not told"],
)
def test_a_search_goes_on_alike_after_a_kill_in_a_trial(
    nth: int, when: str, undisturbed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    assert run_killed(folder, nth, when) == -signal.SIGKILL
    result = ensemble.resume(folder, executor="inline").wait()
    assert [row["state"] for row in result.members].count("failed") == 0
    assert list_proposals(folder) == list_proposals(undisturbed), "and no trial is asked twice"
    whole, again = (read_study(RunDir(each).journal, "small").trials for each in (undisturbed, folder))
    shown, expected = ([(t.state, t.values, t.intermediate_values) for t in trials] for trials in (again, whole))
    assert shown == expected
    lines = [json.loads(line) for line in RunDir(folder).journal.read_text().splitlines()]
    told = Counter(line["trial_id"] for line in lines if line["op_code"] == 6)
    assert set(told.values()) == {1} and len(told) == len(again), "and none is told twice"


def test_the_command_of_optuna_reads_it(undisturbed: Path) -> None:
    optuna_command = Path(sys.executable).with_name("optuna")
    storage = ["--storage", str(RunDir(undisturbed).journal), "--storage-class", "JournalFileBackend"]
    command = [str(optuna_command)] if optuna_command.exists() else [sys.executable, "-m", "optuna.cli"]
    done = subprocess.run(
        [*command, "trials", *storage, "--study-name", "small", "-f", "json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert [row["user_attrs"]["member"] for row in json.loads(done.stdout)] == ["member-0", "member-1", "member-2"]


def test_an_epoch_whose_report_got_lost_is_told_when_its_member_starts_again(tmp_path: Path) -> None:
    declared = declare(small_search(), epochs=2)
    trials = make_trials(declared, RunDir(tmp_path), RunState(name="small", objective="accuracy"), sharing=False)
    identity = trials.next()
    last = {"epoch": 0, "step": 1, "metrics": {"accuracy": 0.5}}
    started = {"type": "started", "member": "member-0", "attempt": 1, "epoch": 1, "last_epoch": last}
    assert complete_event(started, RunDir(tmp_path), trials, lambda event: identity) == started
    trials.flush()
    (trial,) = read_study(RunDir(tmp_path).journal, "small").trials
    assert trial.intermediate_values == {1: 0.5}
