"""No option touches a file that is not ours: each is tried with a user's file, and the bytes are compared."""

from __future__ import annotations

import contextlib
import io
import json
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
import numpy as np

import torch
from ensemble import Ensemble, Recipe, Search, choice
from ensemble.spec import TensorBoard
from pipelines import Pipeline, sources

def model(params):
    return torch.nn.Linear(4, 3)

def loss(net, batch):
    return torch.nn.functional.cross_entropy(net(batch["x"]), batch["label"], reduction="none")

def samples(seed):
    label = np.arange(48) % 3
    return Pipeline(sources.arrays(x=np.eye(4, dtype=np.float32)[label], label=label), seed=seed)

def spec(storage: str = "", dir: str = "", cache: str = ""):
    chosen = {"search": Search({"lr": choice(0.1, 0.2)}, trials=2, storage=storage)} if storage else {}
    chosen = chosen or {"members": [{"lr": 0.1}, {"lr": 0.2}]}
    if dir:
        chosen["loggers"] = [TensorBoard(dir=dir)]
    if cache:
        chosen |= {"cache": "disk", "cache_dir": cache}
    return Ensemble(name="tiny", recipe=Recipe(model=model, loss=loss),
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


CSV, LINES, NOTEBOOK = (
    b"a,b\n1,2\n3,4",
    b'{"x":1}\n{"y":',
    json.dumps({"cells": [], "v": 1}, indent=1).encode() + b"\n",
)
OTHER_DATABASE = make_database("CREATE TABLE photos (id); INSERT INTO photos VALUES (1)")
STUDY = b'{"op_code":0,"worker_id":"w","study_name":"mine","directions":[1]}\n'
#: What a user has; the command; the place of the user's file in it is its name. RUN is a run that has ended.
REFUSED: dict[str, tuple[dict[str, bytes], str]] = {
    **{
        f"storage {name}": ({name: content}, f"run SPEC --run-dir new --executor inline --set storage={name}")
        for name, content in {
            "table.csv": CSV,
            "log.jsonl": LINES,
            "photos": OTHER_DATABASE,
            "photos.db": OTHER_DATABASE,
            "table.sqlite3": CSV,
            "damaged.journal": STUDY + b"half a li\n" + STUDY,
            "torn.journal": STUDY + b"half a li\n" + STUDY[:9],
        }.items()
    },
    "storage's lock": ({"mine.lock": b"mine"}, "run SPEC --run-dir new --executor inline --set storage=mine"),
    "storage URL": (
        {"p.db": OTHER_DATABASE},
        "run SPEC --run-dir new --executor inline --set storage=sqlite:///p.db",
    ),
    "storage dry run": ({"a.csv": CSV}, "run SPEC --run-dir new --executor inline --dry-run --set storage=a.csv"),
    **{
        f"--json {name}": ({name: content}, f"{command} --json {name}")
        for name, content, command in (
            ("a.csv", CSV, "status RUN"),
            ("a.ipynb", NOTEBOOK, "run SPEC --run-dir new --executor inline"),
            ("a.json", b'[{"mine": 1}]\n', "list ."),
        )
    },
    "predict --out csv": ({"a.out": CSV}, "predict RUN --split valid --out a.out"),
    "predict --out parquet": ({"a.parquet": make_parquet()}, "predict RUN --split valid --out a.parquet"),
    "export to a file": ({"model": CSV}, "export RUN model"),
    "export to a folder": ({"model/README.md": b"mine", "model/model.pt2": b"mine"}, "export RUN model"),
    "demo": ({"runs/demo/events.jsonl": LINES, "runs/demo/mine": b"mine"}, "demo"),
    **{
        f"--run-dir {name}": ({f"work/{name}": content}, "run SPEC --run-dir work --executor inline")
        for name, content in {
            "thesis.tex": b"mine",
            "spec.py": b"mine",
            "ensemble.pkl": b"mine",
            "events.jsonl": LINES,
            "run.json": b"{}",
            "members/member-0/log.txt": b"mine",
            "data/x.npy": b"mine",
        }.items()
    },
    "--run-dir one line": ({"work/events.jsonl": b"mine"}, "run SPEC --run-dir work --executor inline"),
    "run-dir is a file": ({"work": CSV}, "run SPEC --run-dir work --executor inline"),
    "distill": ({"work/report.html": b"mine"}, "distill RUN --run-dir work --executor inline"),
    "resume": ({"work/events.jsonl": LINES, "work/spec.py": b"mine"}, "resume work"),
    "report": ({"work/report.html": b"mine", "work/events.jsonl": LINES}, "report work"),
    "pause": ({"work/events.jsonl": LINES}, "pause work"),
    "cancel": ({"work/events.jsonl": LINES}, "cancel work"),
    "fetch": ({"work/thesis.tex": b"mine"}, "fetch file://CWD/far work"),
    "fetch from a folder": ({"far/thesis.tex": b"mine"}, "fetch file://CWD/far work"),
    "mirror": ({"far/thesis.tex": b"mine"}, "run SPEC --run-dir new --executor inline --mirror file://CWD/far"),
    "stop": ({"work/events.jsonl": LINES}, "stop work"),
    "add": ({"work/events.jsonl": LINES}, "add work lr=0.1"),
}
#: Commands that do what they are asked for beside a user's files.
BESIDE: dict[str, tuple[dict[str, bytes], str]] = {
    "run --fresh": ({"work/thesis.tex": b"mine"}, "run SPEC --run-dir work --executor inline --fresh"),
    "cache_dir": (
        {"cache/new-1": b"mine", "cache/" + "0" * 32 + "/samples": b"mine", "cache/lock-0": b"mine"},
        "run SPEC --run-dir new --executor local --set cache=cache",
    ),
    "TensorBoard": (
        {"board/events.out.tfevents.1": b"mine"},
        "run SPEC --run-dir new --executor inline --set dir=board",
    ),
    "mirror": ({"far/head.json": b"mine"}, "run SPEC --run-dir new --executor inline --mirror file://CWD/far/run"),
    "list": ({"work/events.jsonl": LINES}, "list ."),
    "export beside others": ({".model.0.tmp": b"mine", ".tmpabcdef": b"mine"}, "export RUN model"),
    "predict beside others": (
        {".tmpabcdef": b"mine", ".a.parquet.1.tmp": b""},
        "predict RUN --split valid --out a.parquet",
    ),
}


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
    status, _, err = call(
        f"run {folder}/tiny_spec.py --run-dir {folder}/runs/a --executor inline", folder / "runs" / "a"
    )
    assert status == 0, err
    return folder / "runs" / "a"


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_ours_is_refused_in_one_line_and_unchanged(case: str, run: Path) -> None:
    put(REFUSED[case][0])
    before = read_all()
    status, _, err = call(REFUSED[case][1], run)
    after = read_all()
    assert {name: after.get(name) for name in before} == before
    assert status == 2 and len(err.strip().splitlines()) == 1, (status, err)


@pytest.mark.parametrize("case", BESIDE)
def test_files_of_a_user_stay_beside_ours(case: str, run: Path) -> None:
    put(BESIDE[case][0])
    for path in Path().rglob("*.tmp*"):
        os.utime(path, (0, 0))  # as old as what a killed process has left
    before = read_all()
    status, _, err = call(BESIDE[case][1], run)
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
    put(
        {f"peers{number}/{name}": b"mine" for number, name in enumerate(("time-0", "wait-1.json", "group-3.json"))}
    )
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
    names = {
        study.study_name: study.n_trials
        for study in optuna.get_all_study_summaries(f"sqlite:///{tmp_path}/mine.db")
    }
    assert names == {"mine": 1, "tiny": 3} and not list(Path().iterdir())
