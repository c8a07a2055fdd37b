"""A database as the mirror of a search: shared by runs, locked, emptied; the search never waits for it."""

import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import optuna
import pytest

from ensemble.search.searcher import Searcher
from ensemble.search.storage import without_password
from ensemble.spec import Search, loguniform
from ensemble.store import RunState, StoreError

SPACE = {"lr": loguniform(1e-4, 1.0)}


def searcher(storage: str, name: str = "a", run_id: str = "1") -> Searcher:
    made = Searcher(Search(SPACE, sampler="random"), direction="max", epochs=3, storage=storage)
    made.restore(RunState(name=name, run_id=run_id))
    return made


def values(storage: str, name: str = "a") -> list[Any]:
    return [trial.value for trial in optuna.load_study(study_name=name, storage=storage).trials]


def train(search: Searcher, number: int, value: float) -> None:
    search.ask(number)
    search.report(number, 0, value)
    search.tell(number, "finished", value)


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


def test_runs_share_a_database_and_those_of_one_name_have_a_study_each(
    database: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"sqlite:///{database}"
    first, second = searcher(url), searcher(url, "b", "2")
    train(first, 0, 0.25)
    train(second, 0, 0.5)
    train(second, 1, 0.75)
    for one in (first, second):
        one.catch_up()
    assert (values(url), values(url, "b")) == ([0.25], [0.5, 0.75])
    assert not caplog.messages
    nights = [f"{number:08x}beef" for number in range(3, 6)]
    for night in nights:
        third = searcher(url, "a", night)
        train(third, 0, 0.625)
        third.catch_up()
    (said, *_) = caplog.messages
    assert "study 'a' of another run (1)" in said and "'a-00000003'" in said and len(caplog.messages) == 3
    resumed = searcher(url, "a", nights[0])
    train(resumed, 0, 0.625)
    resumed.catch_up()
    again = searcher(url, "a", "1")  # the study that it began under the plain name
    train(again, 0, 0.25)
    again.catch_up()
    assert len(caplog.messages) == 3, "what was known is not said again"
    assert [values(url, f"a-{night[:8]}") for night in nights] == [[0.625]] * 3
    assert (values(url), values(url, "b")) == ([0.25], [0.5, 0.75])


HOLD = """
import sqlite3, sys
held = sqlite3.connect(sys.argv[1], isolation_level=None)
held.execute("BEGIN EXCLUSIVE")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("patience_s", [0.2, 600])
def test_a_database_locked_by_another_process_is_caught_up_with_when_it_is_free(
    patience_s: float, database: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"sqlite:///{database}?timeout={patience_s}"
    search = searcher(url)
    search.ask(0)
    search.catch_up()
    pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOLD, str(database)], text=True, **pipe) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        for epoch in range(3):  # reports only: Optuna makes up to five attempts to begin a trial
            search.report(0, epoch, epoch / 10)
            began = time.monotonic()
            search.catch_up(0.1)
            assert time.monotonic() - began < 300, "nobody waits for it"
            time.sleep(0.2)
        until = time.monotonic() + 300
        while patience_s < 1 and "the Optuna storage is behind" not in caplog.text:
            assert time.monotonic() < until
            time.sleep(0.01)
    assert ("the Optuna storage is behind" in caplog.text) == (patience_s < 1)
    search.tell(0, "finished", 0.5)
    train(search, 1, 0.75)
    search.catch_up()
    assert values(url) == [0.5, 0.75]


def test_a_database_that_was_emptied_is_written_anew(database: Path, caplog: pytest.LogCaptureFixture) -> None:
    url = f"sqlite:///{database}"
    search = searcher(url)
    train(search, 0, 0.25)
    search.ask(1)
    search.catch_up()
    with sqlite3.connect(database) as connection:
        for (table,) in connection.execute("SELECT name FROM sqlite_master WHERE type='table'").fetchall():
            connection.execute(f"DROP TABLE {table}")
    connection.close()
    search.report(1, 0, 0.5)
    search.catch_up()
    assert "the Optuna storage is behind" in caplog.text
    search.tell(1, "finished", 0.75)
    search.catch_up()
    assert values(url) == [0.25, 0.75]


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
    if secrets:
        with pytest.raises(StoreError) as caught:
            Searcher(Search(SPACE), direction="max", epochs=1, storage=f"no{url}")
        assert not any(secret in str(caught.value) for secret in secrets) and caught.value.__cause__ is None


def test_of_a_user_with_a_password_only_the_password_is_hidden_where_a_driver_names_him() -> None:
    said = without_password('FATAL: no role "ann" (s3cret)', "postgresql://ann:s3cret@host/db")
    assert said == 'FATAL: no role "ann" (***)'


def test_a_driver_that_is_absent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg2", None)
    with pytest.raises(StoreError, match=r"psycopg2.*: install it, or name another driver"):
        searcher("postgresql+psycopg2://ann:s3cret@host/db")
