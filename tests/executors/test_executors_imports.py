"""Installed packages that a declaration names are imported once on a node, unless forks would differ by it."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import ensemble
from ensemble import Ensemble, Recipe
from ensemble.executors.declared_imports import find_installed
from ensemble.store import RunDir
from ensemble.store.declaration import read_named_modules
from pipelines import Pipeline, sources
from pipelines.ipc.child_processes import child_environment

#: A package that notes who imports it, and does what a test wants.
PACKAGE = """
import os
with open(os.environ["NOTES"], "a") as notes:
    notes.write(f"{{os.getpid()}}\\n")
{body}
def build(params):
    import torch
    if "DRAWN" in globals():
        with open(os.environ["NOTES"] + ".drawn", "a") as drawn:
            print([draw() for draw in DRAWN], file=drawn)
    return torch.nn.Linear(4, 3)
"""
#: What a package may do at its import so that forks of the process are not as if each had imported it.
OBSTACLES = {
    "thread": "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
    "waiting thread": "import threading; threading.Thread(target=threading.Event().wait).start()",
    "file": "log = open(os.environ['NOTES'] + '.log', 'w')",
    "file in memory": "import tempfile; log = os.memfd_create('some')",
    "file that is mapped": "import mmap; file = open(__file__, 'rb'); mmap.mmap(file.fileno(), 0, prot=1)",
    "lock": "import multiprocessing; lock = multiprocessing.get_context('fork').Lock()",
    "memory": "import mmap; memory = mmap.mmap(-1, 4096)",
    "process": "if (child := os.fork()) == 0: os.execlp('sh', 'sh', '-c', 'exec sleep 9 >/dev/null 2>&1')",
    "folder": "import tempfile; folder = tempfile.mkdtemp(dir=os.path.dirname(os.environ['NOTES']))",
    "SIGCHLD": "import signal; signal.signal(signal.SIGCHLD, lambda *_: None)",
    "time limit": "import socket; socket.setdefaulttimeout(1.0)",
}
HARMLESS = {
    "nothing": "",
    "function at the end": "import atexit; atexit.register(print, end='')",
    "threads of BLAS": "import scipy.linalg, numpy; scipy.linalg.inv(numpy.eye(500))",
    "a device": "random = open('/dev/urandom', 'rb')",
}
LOOK = """
import os
from ensemble.executors.declared_imports import _find_obstacle, _list_files, _list_shared_memory
before = _list_files(), _list_shared_memory()
{}
print(_find_obstacle(*before), flush=True)
os._exit(0)
"""


@pytest.fixture
def declare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Ensemble]]:
    """Writes a package, with something that it does at its import, and declares a run that names it."""
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    site = tmp_path / "site-packages"
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", f"{site}:{os.environ.get('PYTHONPATH', '')}")

    def write(body: str = "", *, is_installed: bool = True) -> Ensemble:
        (site / "some_package").mkdir(parents=True)
        (site / "some_package" / "__init__.py").write_text(PACKAGE.format(body=textwrap.dedent(body)))
        if is_installed:
            (site / "some_package-1.0.dist-info").mkdir()
        rng = np.random.default_rng(0)
        records = sources.arrays(x=rng.normal(size=(64, 4)).astype(np.float32), label=rng.integers(0, 3, 64))
        import some_package  # type: ignore[import-not-found]

        return Ensemble(
            name="imports",
            recipe=Recipe(model=some_package.build, loss="cross_entropy"),
            optimizer="sgd",
            members=[{"lr": lr} for lr in (0.1, 0.2, 0.3)],
            train=Pipeline(records, seed=0),
            epochs=2,
        )

    yield write
    sys.modules.pop("some_package", None)


def count_imports(tmp_path: Path) -> int:
    """How many processes have imported the package, without this one; a process that begins anew counts twice."""
    return len([pid for pid in (tmp_path / "notes").read_text().split() if pid != str(os.getpid())])


def run(declared: Ensemble, folder: Path, executor: str) -> list[str]:
    """The digests of the members' weights."""
    result = ensemble.submit(declared, folder, executor).wait()
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert [row["state"] for row in result.members] == ["finished"] * 3, result.members
    return sorted(event["weights_sha256"] for event in events if event["type"] == "finished")


def test_an_installed_package_is_imported_once_for_all_members(
    declare: Callable[..., Ensemble], tmp_path: Path
) -> None:
    declared = declare()
    weights = run(declared, tmp_path / "run", "local")
    assert count_imports(tmp_path) == 1, "the fork server; members, those that measure, and the checker do not"
    assert weights == run(declared, tmp_path / "inline", "inline")


def test_a_module_of_the_users_own_is_imported_by_each_member(
    declare: Callable[..., Ensemble], tmp_path: Path
) -> None:
    run(declare(is_installed=False), tmp_path / "run", "local")
    assert count_imports(tmp_path) >= 3


@pytest.mark.parametrize("kind", ["thread", "file"])
def test_where_a_fork_would_differ_each_member_imports_the_package(
    kind: str, declare: Callable[..., Ensemble], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    burns = "import time\nuntil = time.process_time() + 1.0\nwhile time.process_time() < until: pass\n"
    declared = declare(burns + OBSTACLES[kind])
    with caplog.at_level(logging.WARNING):
        weights = run(declared, tmp_path / "run", "local")
    assert count_imports(tmp_path) >= 4, "the fork server, in vain, and each member"
    (text,) = (
        record.getMessage() for record in caplog.records if "imports its packages itself" in record.getMessage()
    )
    assert "thread" in text or "file" in text
    assert weights == run(declared, tmp_path / "inline", "inline")


def test_a_package_that_cannot_be_imported_is_the_members_fault(
    declare: Callable[..., Ensemble], tmp_path: Path
) -> None:
    declared = declare("if len([*open(os.environ['NOTES'])]) == 2: raise SystemExit('the second time')")
    run(declared, tmp_path / "run", "local")


GENERATORS = """
import random, numpy
made = random.Random(), numpy.random.default_rng(), numpy.random.RandomState()
seeded = random.Random(3), numpy.random.default_rng(3), numpy.random.RandomState(3)
DRAWN = [generator.random for generator in seeded] + [generator.random for generator in made]
"""


def test_generators_without_a_seed_are_each_processs_own(declare: Callable[..., Ensemble], tmp_path: Path) -> None:
    run(declare(GENERATORS), tmp_path / "run", "local")
    assert count_imports(tmp_path) == 1
    rows = [json.loads(line) for line in (tmp_path / "notes.drawn").read_text().splitlines()]
    firsts = [row for row in rows if row[:3] == [0.23796462709189137, 0.08564916714362436, 0.5507979025745755]]
    assert len(firsts) >= 3, "as they are seeded, in each member"
    for column in zip(*(row[3:] for row in firsts), strict=True):
        assert len({*column}) == len(column)


def test_ranks_import_packages_with_their_own_rank(declare: Callable[..., Ensemble], tmp_path: Path) -> None:
    declared = declare(
        "with open(os.environ['NOTES'] + '.ranks', 'a') as ranks: ranks.write(os.environ.get('RANK', '-'))"
    )
    wide = dataclasses.replace(declared, members=[ensemble.Member({"lr": 0.1}, workers=2)], batch_size=8)
    ensemble.submit(wide, tmp_path / "run", "local").wait()
    assert {*(tmp_path / "notes.ranks").read_text()} == {"-", "0", "1"}


@pytest.mark.parametrize("body", OBSTACLES.values(), ids=OBSTACLES)
def test_a_process_that_cannot_be_forked_says_why(body: str, tmp_path: Path) -> None:
    assert look(body, tmp_path) != "None"


@pytest.mark.parametrize("body", HARMLESS.values(), ids=HARMLESS)
def test_a_process_that_can_be_forked_is(body: str, tmp_path: Path) -> None:
    assert look(body, tmp_path) == "None"


def look(body: str, tmp_path: Path) -> str:
    (tmp_path / "script.py").write_text(LOOK.format(body))
    environment = child_environment() | {"NOTES": str(tmp_path / "notes"), "OPENBLAS_NUM_THREADS": "2"}
    command = [sys.executable, str(tmp_path / "script.py")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


def test_what_a_declaration_names_is_read_and_not_loaded(declare: Callable[..., Ensemble], tmp_path: Path) -> None:
    declared = declare()
    import sklearn.linear_model
    import some_package

    class Model:  # of the user's: by value
        def __call__(self, params: object) -> object:
            return some_package.build(params)

    def optimizer(model: object, params: object) -> object:
        return sklearn.linear_model

    named = ensemble.Ensemble(
        name="named",
        recipe=Recipe(model=Model(), loss="cross_entropy", optimizer=optimizer),
        members=[{"lr": 0.1}],
        train=declared.train,
        epochs=1,
    )
    RunDir.create(tmp_path / "run", named)
    names = read_named_modules(tmp_path / "run")
    assert {"some_package", "sklearn"} <= {name.partition(".")[0] for name in names}
    assert count_imports(tmp_path) == 0
    installed = find_installed([*names, "json", "not_there", "ensemble"])
    assert "some_package" in installed and "sklearn" in {name.partition(".")[0] for name in installed}
    assert not {"json", "not_there", "ensemble"} & {*installed}
