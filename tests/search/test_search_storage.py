"""The storage of a search: shared by runs, locked, gone, damaged."""

import contextlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from kit.finished_runs import of_kind, read_state
from optuna.trial import TrialState
from small_run import declare
from studies import read_study

import ensemble
from ensemble.search.kept_study import KeptStudy
from ensemble.search.searcher import Searcher
from ensemble.search.storage import without_password
from ensemble.spec import Search, loguniform
from ensemble.store import RunState, StoreError

SPACE = {"lr": loguniform(1e-4, 1.0)}


def searcher(storage: str, name: str = "a", run_id: str = "1") -> Searcher:
    made = Searcher(Search(SPACE, sampler="random"), direction="max", epochs=3, storage=storage)
    state = RunState(name=name, run_id=run_id, objective="accuracy")
    made.open(state)
    return made


def values(storage: str, name: str = "a") -> list[Any]:
    is_url = "://" in storage
    study = optuna.load_study(study_name=name, storage=storage) if is_url else read_study(Path(storage), name)
    return [trial.value for trial in study.trials]


def train(search: Searcher, number: int, value: float) -> None:
    search.ask(number)
    search.report(number, 0, value)
    search.tell(number, "finished", value)
    search.flush()


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with Optuna's tables, which take a second to make."""
    path = tmp_path_factory.mktemp("tables") / "study.db"
    optuna.storages.RDBStorage(f"sqlite:///{path}")
    return path


@pytest.fixture
def database(tables: Path, tmp_path: Path) -> Path:
    path = tmp_path / "study.db"
    path.write_bytes(tables.read_bytes())
    return path


def test_a_run_killed_as_it_makes_its_study_finds_it_again(tmp_path: Path, monkeypatch: Any) -> None:
    url = str(tmp_path / "two.journal")
    for number, run_id in enumerate(["aaaaaaaaaeef", "bbbbbbbbbeef"]):
        with monkeypatch.context() as patch:
            patch.setattr(KeptStudy, "_claim", lambda self, study: 1 / 0)
            with pytest.raises(StoreError, match="cannot be read"):
                searcher(url, "a", run_id)
        train(searcher(url, "a", run_id), 0, float(number))
    assert (values(url), values(url, "a-bbbbbbbb")) == ([0.0], [1.0])


@pytest.mark.parametrize("kind", ["sqlite", "journal"])
def test_runs_share_a_storage_and_those_of_one_name_have_a_study_each(
    kind: str, database: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"sqlite:///{database}" if kind == "sqlite" else str(tmp_path / "two.journal")
    first, second = searcher(url), searcher(url, "b", "2")
    train(first, 0, 0.25)
    train(second, 0, 0.5)
    train(second, 1, 0.75)
    assert (values(url), values(url, "b")) == ([0.25], [0.5, 0.75])
    assert not caplog.messages
    nights = [f"{number:08x}beef" for number in range(3, 6)]
    for night in nights:
        train(searcher(url, "a", night), 0, 0.625)
    (said, *_) = caplog.messages
    assert "study 'a' of another run (1)" in said and "'a-00000003'" in said and len(caplog.messages) == 3
    resumed = searcher(url, "a", nights[0])
    train(resumed, 1, 0.875)
    again = searcher(url, "a", "1")  # the study that it began under the plain name
    train(again, 1, 0.375)
    assert len(caplog.messages) == 3, "what was known is not said again"
    assert [values(url, f"a-{night[:8]}") for night in nights] == [[0.625, 0.875], [0.625], [0.625]]
    assert (values(url), values(url, "b")) == ([0.25, 0.375], [0.5, 0.75])


HOLD = """
import sqlite3, sys
held = sqlite3.connect(sys.argv[1], isolation_level=None)
held.execute("BEGIN EXCLUSIVE")
print("held", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def holding(database: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has locked the database, until the end or until its stdin is closed."""
    pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOLD, str(database)], text=True, **pipe) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        yield holder


def test_a_locked_database_is_said_before_anything_trains(database: Path, tmp_path: Path) -> None:
    search = Search({"lr": loguniform(0.01, 0.1)}, trials=2, storage=f"sqlite:///{database}?timeout=0.2")
    with holding(database), pytest.raises(StoreError, match=r"the Optuna storage .*: .*database is locked"):
        ensemble.submit(declare(search, epochs=1), run_dir=tmp_path / "run", executor="inline")
    events = tmp_path / "run" / "events.jsonl"
    assert not events.exists() or b'"member"' not in events.read_bytes()
    result = ensemble.submit(declare(search, epochs=1), run_dir=tmp_path / "run", executor="inline").wait()
    assert len(result.members) == len(values(str(search.storage), "small")) == 2


def test_a_database_that_is_locked_later_is_waited_for(database: Path, caplog: pytest.LogCaptureFixture) -> None:
    search = searcher(f"sqlite:///{database}?timeout=0.2")
    search.ask(0)
    with holding(database) as holder:

        def free(record: logging.LogRecord) -> bool:
            assert holder.stdin is not None
            holder.stdin.close()
            return True

        caplog.handler.addFilter(free)  # when it is said that it is tried again
        search.report(0, 0, 0.5)
        search.flush()
    caplog.handler.removeFilter(free)
    (said,) = caplog.messages
    assert "database is locked; it is tried again in 0.5 s" in said
    search.tell(0, "finished", 0.5)
    search.flush()
    assert values(f"sqlite:///{database}") == [0.5]


def test_a_database_that_is_gone_ends_the_run_and_a_resume_goes_on(
    database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ensemble.search.kept_study.PAUSES_S", (0.01,))
    url, away = f"sqlite:///{database}", tmp_path / "away.db"
    search = Search({"lr": loguniform(0.01, 0.1)}, trials=3, storage=url, pruner="none", seed=1)
    whole = ensemble.submit(declare(replace(search, storage=None), epochs=1), tmp_path / "whole", "inline")

    def drop(event: dict[str, Any]) -> None:
        if event["type"] == "finished" and not away.exists():
            database.rename(away)

    with pytest.raises(StoreError, match=r"the Optuna storage .* cannot be written: .*; a resume goes on"):
        ensemble.submit(declare(search, epochs=1), tmp_path / "run", "inline", on_event=drop).wait()
    database.unlink(missing_ok=True)  # SQLite makes an empty one
    away.rename(database)
    result = ensemble.resume(tmp_path / "run", executor="inline").wait()
    assert [row["params"] for row in result.members] == [row["params"] for row in whole.wait().members]
    assert len(values(url, "small")) == 3 and None not in values(url, "small")


@pytest.mark.more
def test_trials_of_hyperband_share_one_stream_and_a_database_shows_them(database: Path, tmp_path: Path) -> None:
    url, run_dir = f"sqlite:///{database}", tmp_path / "run"
    search = Search({"lr": loguniform(1e-3, 1.0)}, trials=9, pruner="hyperband", storage=url, seed=5)
    three = {"limits": {"cpus": 1.5}, "capacity": 8, "gate_timeout_s": 300.0}
    ledger = ensemble.submit(declare(search, epochs=3, batch_size=4, **three), run_dir, "local").wait().ledger
    members, told = list(read_state(run_dir).members.values()), of_kind(run_dir, "epoch")
    assert {member.state for member in members} == {"finished", "pruned"}
    assert not any(event["private_batches"] for event in told), "no trial prepares for itself"
    assert all(later.first_epoch for later in members[3:]), "those in freed places joined where it was"
    read = {member.first_epoch + epoch for member in members for epoch in range(member.epoch)}
    reuse = ledger["reuse"] if ledger else {}
    assert reuse["consumed"] == 12 * len(told) > reuse["prepared"]
    # The ring may have been filled in vain when all readers leave at once.
    assert reuse["prepared"] <= 12 * (len(read) + len(members)), "each epoch once, for all that read it"
    trials = optuna.load_study(study_name="small", storage=url).trials
    states = {"finished": "COMPLETE", "pruned": "PRUNED"}
    shown = [(trial.user_attrs["member"], trial.state.name, trial.value) for trial in trials]
    assert shown == [(member.id, states[member.state], member.metrics["accuracy"]) for member in members]


@pytest.mark.parametrize("kind", ["sqlite", "journal"])
def test_a_trial_that_is_ended_in_the_storage_goes_on_as_another(
    kind: str, database: Path, tmp_path: Path
) -> None:
    url = f"sqlite:///{database}" if kind == "sqlite" else str(tmp_path / "a.journal")
    search = searcher(url)
    search.ask(0)
    search.ask(1)
    for number in (0, 1):
        other = optuna.load_study(study_name="a", storage=url) if kind == "sqlite" else read_study(Path(url), "a")
        other.tell(number, state=TrialState.FAIL)
        for epoch in range(2):
            search.report(number, epoch, 0.25)
    search.flush()
    for number in (0, 1):
        search.tell(number, "finished", 0.5)
    search.flush()
    train(search, 2, 0.75)
    assert values(url) == [None, None, 0.5, 0.5, 0.75]
    assert searcher(url).next_number == 0, "as members 0 to 2 are in no log"


def test_a_torn_line_is_cut_and_a_damaged_journal_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "optuna.journal"
    train(searcher(str(path)), 0, 0.5)
    whole = path.read_bytes()
    for torn in (b'{"op_code":', b'{"op_code":6,"worker_id":"x","tri'):
        path.write_bytes(whole + torn)
        assert searcher(str(path)).study.trials[0].value == 0.5 and path.read_bytes() == whole
    path.write_bytes(b'{"op_co')  # the first line of all
    assert searcher(str(path)).next_number == 0
    damaged = whole.replace(b'"study_name"', b'"study_nome"')
    path.write_bytes(damaged)
    with pytest.raises(StoreError, match=r"or is damaged .* it is left as it is"):
        searcher(str(path))
    assert path.read_bytes() == damaged


def test_a_lock_left_by_a_killed_process_delays_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ensemble.search.storage.STALE_LOCK_S", 3600)
    path = tmp_path / "optuna.journal"
    train(searcher(str(path)), 0, 0.5)
    lock = path.with_name("optuna.journal.lock")
    os.symlink(path, lock)
    os.utime(lock, (time.time() - 7200,) * 2, follow_symlinks=False)
    train(searcher(str(path)), 1, 0.5)
    assert not lock.is_symlink()


@pytest.mark.parametrize(
    ("url", "secrets"),
    [
        ("postgresql://ann:s3cret@host:5432/db", ["s3cret"]),
        ("postgresql+psycopg2://ann:p%40ss%2Fword@host/db", ["p%40ss%2Fword", "p@ss/word"]),
        ("postgresql://host/db?user=ann&password=hidden", ["hidden"]),
        ("mysql://host/db?user=ann&passwd=hidden", ["hidden"]),
        ("postgresql://ann:s3cret@host/db?sslmode=require&sslpassword=h%20dden", ["s3cret", "h%20dden", "h dden"]),
        ("postgresql://glpat-0123456789abcdef@host/db", ["glpat-0123456789abcdef"]),
        ("postgresql://glpat-0123456789abcdef:x@host/db?api_key=k-9", ["glpat-0123456789abcdef", "k-9"]),
        ("sqlite:///study.db", []),
    ],
)
def test_no_password_is_said(url: str, secrets: list[str]) -> None:
    said = without_password(f"cannot open {url}: could not connect with {' or '.join(secrets)}", url)
    assert not any(secret in said for secret in secrets)
    assert ("***" in said) == bool(secrets)
    assert url not in repr(Search(SPACE, storage=url))
    if "ann:s3cret@" in url:
        assert without_password('no role "ann" (s3cret)', url) == 'no role "ann" (***)'
    if secrets:
        with pytest.raises(StoreError, match="cannot open the Optuna storage") as caught:
            Searcher(Search(SPACE), direction="max", epochs=1, storage=f"no{url}")
        assert not any(secret in str(caught.value) for secret in secrets) and caught.value.__cause__ is None


def test_a_driver_that_is_absent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg2", None)
    with pytest.raises(StoreError, match=r"psycopg2.*: install it, or name another driver"):
        searcher("postgresql+psycopg2://ann:s3cret@host/db")
