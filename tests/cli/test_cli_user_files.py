"""No option touches a file that is not ours: each is tried with a user's file, and the bytes are compared."""

from __future__ import annotations

import contextlib
import io
import os
import sqlite3
from pathlib import Path
from typing import Any

import optuna
import pyarrow
import pyarrow.parquet
import pytest
import test_cli

from ensemble.cli import demo
from ensemble.store import RunDir
from pipelines import Pipeline, PipelineError, sources
from pipelines.feeder.peers import Peers
from pipelines.feeder.server import Feeder
from pipelines.multinode.rendezvous import Rendezvous
from pipelines.sources._kept_files import SourcesFolder

SPEC = """
import numpy as np, torch
from ensemble import Ensemble, Recipe, Search, choice
from ensemble.spec import TensorBoard
from pipelines import Pipeline, sources, stages

def samples(seed):
    label = np.arange(48) % 3
    pipe = Pipeline(sources.arrays(x=np.eye(4)[label], label=label), seed=seed)
    return pipe.map(stages.cast("x", "float32"))

def spec(storage: str = "", dir: str = "", cache: str = ""):
    chosen = {"search": Search({"lr": choice(0.1, 0.2)}, trials=2, storage=storage)} if storage else {}
    chosen = chosen or {"members": [{"lr": 0.1}, {"lr": 0.2}]}
    if dir:
        chosen["loggers"] = [TensorBoard(dir=dir)]
    if cache:
        chosen |= {"cache": "disk", "cache_dir": cache}
    recipe = Recipe(model=lambda params: torch.nn.Linear(4, 3), loss="cross_entropy", inputs=("x",))
    return Ensemble(name="tiny", recipe=recipe, optimizer="sgd",
                    train=samples(0), valid=samples(1), epochs=1, batch_size=16, **chosen)
"""


def make_database(statements: str) -> bytes:
    with contextlib.closing(sqlite3.connect(":memory:")) as opened:
        opened.executescript(statements)
        return opened.serialize()


def make_parquet() -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"a": [1, 2]}), file)
    return file.getvalue()


CSV, LINES, NOTEBOOK, MINE = b"a,b\n1,2\n3,4", b'{"x":1}\n{"y":', b'{\n "cells": [],\n "v": 1\n}\n', b"mine"
OTHER_DATABASE = make_database("CREATE TABLE photos (id); INSERT INTO photos VALUES (1)")
STUDY = b'{"op_code":0,"worker_id":"w","study_name":"mine","directions":[1]}\n'
NEW, WORK = (f"run SPEC --executor inline --run-dir {folder}" for folder in ("new", "work"))
PREDICT = "predict RUN --split valid --out"
#: Files that a user has, and commands that would replace each; RUN is a run that has ended.
STORAGES = {"table.csv": CSV, "log.jsonl": LINES, "photos": OTHER_DATABASE, "photos.db": OTHER_DATABASE}
STORAGES |= {"table.sqlite3": CSV, "damaged.journal": STUDY + b"half a li\n" + STUDY}
STORAGES |= {"torn.journal": STUDY + b"half a li\n" + STUDY[:9]}
OF_RUNS = {"thesis.tex": MINE, "spec.py": MINE, "ensemble.pkl": MINE, "run.json": b"{}", "data/x.npy": MINE}
OF_RUNS |= {"events.jsonl": LINES, "members/member-0/log.txt": MINE}
OF_LOGS = ("pause work", "cancel work", "stop work", "add work lr=0.1")
FETCH = "fetch file://CWD/far work"
OF_FOLDER = {"model/README.md": MINE, "model/model.pt2": MINE}
REFUSED: list[tuple[str, dict[str, bytes]]] = [
    *((f"{NEW} --set storage={name}", {name: content}) for name, content in STORAGES.items()),
    *((WORK, {f"work/{name}": content}) for name, content in OF_RUNS.items()),
    *((WORK, {"work/events.jsonl": MINE}), (WORK, {"work": CSV}), (f"{NEW} --set storage=m", {"m.lock": MINE})),
    *((command, {"work/events.jsonl": LINES}) for command in OF_LOGS),
    (f"{WORK} --dry-run", {"work/thesis.tex": MINE}),
    *((f"{NEW} --dry-run --set storage=a.csv", {"a.csv": CSV}), ("status RUN --json a.csv", {"a.csv": CSV})),
    (f"{NEW} --set storage=sqlite:///p.db", {"p.db": OTHER_DATABASE}),
    *((f"{NEW} --json a.ipynb", {"a.ipynb": NOTEBOOK}), ("list . --json a.json", {"a.json": b'[{"a": 1}]\n'})),
    *((f"{PREDICT} a.out", {"a.out": CSV}), (f"{PREDICT} a.parquet", {"a.parquet": make_parquet()})),
    *(("export RUN model", {"model": CSV}), ("export RUN model", OF_FOLDER)),
    ("demo", {"runs/demo/events.jsonl": LINES, "runs/demo/mine": MINE}),
    ("distill RUN --run-dir work --executor inline", {"work/report.html": MINE}),
    *((f"{verb} work", {"work/report.html": MINE, "work/events.jsonl": LINES}) for verb in ("resume", "report")),
    *((FETCH, {"work/thesis.tex": MINE}), (FETCH, {"far/thesis.tex": MINE})),
    (f"{NEW} --mirror file://CWD/far", {"far/thesis.tex": MINE}),
]
CACHE = {"cache/new-1": MINE, "cache/" + "0" * 32 + "/samples": MINE, "cache/lock-0": MINE}
#: Commands that do what they are asked for beside a user's files.
BESIDE: list[tuple[str, dict[str, bytes]]] = [
    (f"{WORK} --fresh", {"work/thesis.tex": MINE}),
    ("run SPEC --run-dir new --executor local --set cache=cache", CACHE),
    (f"{NEW} --set dir=board", {"board/events.out.tfevents.1": MINE}),
    (f"{NEW} --mirror file://CWD/far/run", {"far/head.json": MINE}),
    ("list .", {"work/events.jsonl": LINES}),
    ("export RUN model", {".model.0.tmp": MINE, ".tmpabcdef": MINE}),
    (f"{PREDICT} a.parquet", {".tmpabcdef": MINE, ".a.parquet.1.tmp": b""}),
]


def call(command: str, run: Path) -> tuple[int, str, str]:
    words = command.replace("RUNS", str(run.parent)).replace("RUN", str(run)).replace("CWD", str(Path.cwd()))
    done = test_cli.call(*words.replace("SPEC", str(run.parent.parent / "tiny_spec.py")).split())
    return done.returncode, done.stdout, done.stderr


def put(files: dict[str, bytes]) -> None:
    for name, content in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content)


def read_all() -> dict[str, Any]:
    return {str(path): path.read_bytes() for path in sorted(Path().rglob("*")) if path.is_file()}


@pytest.fixture(autouse=True)
def _in_a_folder_of_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ended")
    (folder / "tiny_spec.py").write_text(SPEC)
    done = test_cli.call("run", folder / "tiny_spec.py", "--run-dir", folder / "runs/a", "--executor", "inline")
    assert done.returncode == 0, done.stderr
    return folder / "runs" / "a"


def list_names(cases: list[tuple[str, dict[str, bytes]]]) -> list[str]:
    return [f"{command.replace('/', '_')}, {min(files).replace('/', '_')}" for command, files in cases]


@pytest.mark.parametrize(("command", "files"), REFUSED, ids=list_names(REFUSED))
def test_what_is_not_ours_is_refused_in_one_line_and_unchanged(command: str, files: Any, run: Path) -> None:
    put(files)
    before = read_all()
    status, _, err = call(command, run)
    after = read_all()
    assert {name: after.get(name) for name in before} == before
    assert status == 2 and len(err.strip().splitlines()) == 1, (status, err)


@pytest.mark.parametrize(("command", "files"), BESIDE, ids=list_names(BESIDE))
def test_files_of_a_user_stay_beside_ours(command: str, files: Any, run: Path) -> None:
    put(files)
    for path in Path().rglob("*.tmp*"):
        os.utime(path, (0, 0))  # as old as what a killed process has left
    before = read_all()
    status, _, err = call(command, run)
    assert status == 0, err
    after = read_all()
    assert {name: after.get(name) for name in before} == before


@pytest.mark.parametrize("command", ["status RUN --json a.json", "predict RUN --split valid --out a.parquet"])
def test_our_own_output_is_replaced(command: str, run: Path) -> None:
    assert [call(command, run)[0] for _ in range(2)] == [0, 0]


def test_a_link_to_a_users_file_is_not_written_through(run: Path) -> None:
    put({"a.csv": CSV})
    Path("link.json").symlink_to("a.csv")
    assert call("status RUN --json link.json", run)[0] == 2
    assert Path("a.csv").read_bytes() == CSV and Path("link.json").is_symlink()


def test_the_demo_moves_what_an_earlier_one_left(tmp_path: Path) -> None:
    RunDir.create("runs/demo", demo.spec())
    put({"runs/demo/notes.txt": b"mine"})
    (Path("runs/demo") / "events.jsonl").touch()
    status, _, error = call("demo --executor inline", tmp_path)  # which is refused for members of two workers
    assert status == 2 and "inline" in error
    assert Path("runs/demo-2/notes.txt").read_bytes() == b"mine" and not Path("runs/demo/notes.txt").exists()


def test_folders_and_addresses_of_pipelines_leave_a_users_files(tmp_path: Path) -> None:
    put({"peers0/time-0": MINE, "peers1/wait-1.json": MINE, "peers2/group-3.json": MINE})
    put({"socket": b"mine", "far/photo.jpg": b"mine", "far/a.part": b"mine"})
    for name in ("far/photo.jpg", "far/a.part"):
        os.utime(name, (0, 0))
    before = read_all()
    for number in range(3):
        with pytest.raises(PipelineError, match=r"choose another Peers\.directory"):
            Rendezvous(Peers(f"peers{number}", 0, 2), "same", near=64)
    with pytest.raises(PipelineError, match="cannot listen at"):
        Feeder(Pipeline(sources.arrays(x=[1, 2])), address=str(tmp_path / "socket"))
    SourcesFolder(str(tmp_path / "far"), limit=1)._make_room(10)
    assert len(sources.iterable([{"x": 1}], 1)) == 1
    assert read_all() == before


@pytest.mark.parametrize("storage", ["mine.db", "sqlite:///mine.db"])
def test_a_study_in_a_database_is_kept_and_one_database_is_meant_from_any_folder(
    storage: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    optuna.create_study(storage="sqlite:///mine.db", study_name="mine").enqueue_trial({"x": 1})
    assert call(f"run SPEC --run-dir new --executor inline --set storage={storage}", run)[0] == 0
    Path("elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert call("resume ../new --budget trials=3", run)[0] == 0
    studies = optuna.get_all_study_summaries(f"sqlite:///{tmp_path}/mine.db")
    assert {study.study_name: study.n_trials for study in studies} == {"mine": 1, "tiny": 3}
    assert not list(Path().iterdir())
