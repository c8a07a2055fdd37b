"""What a shell or a scheduler does to a command: closed streams, its output read by a program, signals, slips."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPEC = """
import os, sys
import numpy as np
from ensemble import Ensemble, Recipe, seeds
from pipelines import Pipeline, sources
{more}
def model(params):
    import torch
    return torch.nn.Linear(4, 3)

def spec(epochs=1):
    print("printed by the spec")
    os.write(1, b"written by a library\\n")
    x, y = np.random.default_rng(0).normal(size=(48, 4)).astype("float32"), np.arange(48) % 3
    data = Pipeline(sources.arrays(x=x, label=y))
    return Ensemble(name="small", recipe=Recipe(model=model, loss="cross_entropy"), members=seeds(1),
                    epochs=epochs, batch_size=8, optimizer={{"name": "sgd", "lr": 0.1}}, train=data, valid=data,
                    rehearsal=None)
"""


def command(folder: Path, arguments: str, shell: str = "") -> subprocess.CompletedProcess[str]:
    line = f"{sys.executable} -m ensemble {arguments} {shell}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        line, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def write_spec(folder: Path, more: str = "") -> None:
    (folder / "small.py").write_text(SPEC.format(more=more))


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_run_needs_no_standard_streams(tmp_path: Path, closed: str) -> None:
    write_spec(tmp_path)
    ended = command(tmp_path, "run small.py --executor local", closed)
    assert (ended.returncode, "Traceback" in ended.stderr) == (0, False), ended.stderr
    (row,) = json.loads(command(tmp_path, "status runs/small --json -").stdout)
    assert row["state"] == "finished"


def test_standard_output_has_the_json_alone(tmp_path: Path) -> None:
    write_spec(tmp_path)
    ended = command(tmp_path, "run small.py --executor inline --json -")
    (row,) = json.loads(ended.stdout)
    assert row["state"] == "finished"
    assert "printed by the spec" in ended.stderr
    assert "written by a library" in ended.stderr


def test_a_resume_finds_what_the_spec_imported_from_a_folder_that_it_named(tmp_path: Path) -> None:
    other, own = tmp_path / "other", tmp_path / "own"
    other.mkdir(), own.mkdir()
    (other / "base.py").write_text("import torch\ndef build(params):\n    return torch.nn.Linear(4, 3)\n")
    write_spec(own, f"sys.path.insert(0, {str(other)!r})\nimport base\n")
    (own / "small.py").write_text((own / "small.py").read_text().replace("model=model", "model=base.build"))
    assert command(own, "run small.py --executor inline").returncode == 0
    ended = command(tmp_path, "resume own/runs/small --executor inline --epochs 2")
    assert ended.returncode == 0, ended.stderr


def test_sigusr1_writes_checkpoints_and_ends_the_run_in_order(tmp_path: Path) -> None:
    write_spec(tmp_path)
    run = subprocess.Popen(
        [sys.executable, "-m", "ensemble", "run", "small.py", "--executor", "inline", "--set", "epochs=1000000"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    events = tmp_path / "runs/small/events.jsonl"
    while not (events.exists() and b'"type":"epoch"' in events.read_bytes().replace(b" ", b"")):
        assert run.poll() is None
        time.sleep(0.05)
    run.send_signal(signal.SIGUSR1)
    _, shown = run.communicate(timeout=300)
    assert run.returncode == 128 + signal.SIGUSR1, shown
    assert list((tmp_path / "runs/small/members").rglob("checkpoint-*"))


@pytest.mark.parametrize("name", ["optuna.py", "ray/__init__.py", "yaml.py", "pipelines/__init__.py"])
def test_a_file_beside_the_spec_that_hides_what_we_import_is_refused(tmp_path: Path, name: str) -> None:
    write_spec(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    ended = command(tmp_path, "run small.py --executor local")
    (line,) = ended.stderr.splitlines()
    assert ended.returncode == 2
    assert "rename" in line and name.partition("/")[0] in line


def test_a_file_beside_the_spec_may_have_the_name_of_a_package_that_we_do_not_need(tmp_path: Path) -> None:
    from ensemble.spec.user_imports import check_hidden_modules

    for name in ("utils.py", "data.py", "models.py", "helpers.py"):
        (tmp_path / name).touch()
    (tmp_path / "datasets").mkdir()  # of data
    check_hidden_modules(tmp_path)


def test_a_spec_that_reads_the_command_line_is_refused_in_one_line(tmp_path: Path) -> None:
    write_spec(tmp_path, "import argparse\nparser = argparse.ArgumentParser()\nparser.parse_args()\n")
    ended = command(tmp_path, "run small.py")
    (line,) = ended.stderr.splitlines()
    assert ended.returncode == 2
    assert "--set" in line and "small.py" in line


def test_a_misspelt_command_is_recognized(tmp_path: Path) -> None:
    ended = command(tmp_path, "rnu small.py")
    assert ended.returncode == 2
    assert "'run'" in ended.stderr
