"""Runs in a real notebook: functions of its cells train, a table shows progress, an interrupt stops the run."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from kit.event_dicts import fold, read_events
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

import ensemble
from ensemble.reporting.notebook import is_notebook, progress_html
from ensemble.store import RunDir

DECLARE = """
import time
import numpy as np, torch
import ensemble
from ensemble import Ensemble, Recipe
from pipelines import Pipeline, sources

SCALE = 2.0

def build(params):
    return torch.nn.Linear(8, 4)

def loss(model, batch):
    time.sleep({step_s})
    return torch.nn.functional.cross_entropy(SCALE * model(batch["x"]), batch["label"], reduction="none")

def double(sample):
    return {{**sample, "x": 2 * sample["x"]}}

rng = np.random.default_rng(0)
x, label = rng.normal(size=(64, 8)).astype("float32"), rng.integers(0, 4, 64)
pipe, held_out = (Pipeline(sources.arrays(x=x[:n], label=label[:n]), seed=0).map(double) for n in (64, 32))
declared = Ensemble(
    name="cells", recipe=Recipe(model=build, loss=loss), members=ensemble.seeds(2, {{"lr": 0.1}}), optimizer="sgd",
    train=pipe, valid=held_out, epochs={epochs}, batch_size=16, energy=ensemble.Energy(measure_idle_s=0),
)
"""


@pytest.fixture(autouse=True)
def _own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "")


def make_client(folder: Path, *cells: str) -> NotebookClient:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    path = str(Path(ensemble.__file__).parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join([path, *filter(None, [os.environ.get("PYTHONPATH")])])
    return NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )


def find_html(cell: Any) -> list[str]:
    return [output["data"]["text/html"] for output in cell.outputs if "text/html" in output.get("data", {})]


def declare(step_s: float = 0.0, epochs: int = 3) -> str:
    return DECLARE.format(step_s=step_s, epochs=epochs)


@pytest.mark.more
@pytest.mark.parametrize("executor", ["inline", pytest.param("local", marks=pytest.mark.slow)])
def test_functions_of_cells_train_and_one_table_shows_the_progress(tmp_path: Path, executor: str) -> None:
    run = f"run = ensemble.submit(declared, 'run', executor={executor!r})\nresult = run.wait()"
    client = make_client(tmp_path, declare(step_s=0.05), run, "result", "run", "print(declared.members[1].seed)")
    notebook = client.execute()
    _, wait, result, handle, printed = notebook.cells
    (live,) = find_html(wait)
    assert "<table>" in live and "2/2 finished" in live and "member-1" in live
    assert [output.output_type for output in wait.outputs if output.output_type != "stream"] == ["display_data"]
    streams = [output for output in wait.outputs if output.output_type == "stream"]
    assert sum(len(output.text.splitlines()) for output in streams) <= 3, "no flood of lines"
    for cell in (result, handle):
        (table,) = find_html(cell)
        assert "finished" in table and "lr 0.1" in table
    assert printed.outputs[0].text == "1\n"
    state = fold(read_events(RunDir(tmp_path / "run").events))
    assert [member.state for member in state.members.values()] == ["finished"] * 2
    assert state.header.code, "the cells' code has a fingerprint"


@pytest.mark.more
def test_a_changed_cell_is_other_code(tmp_path: Path) -> None:
    submit = "ensemble.submit(declared, 'run', executor='inline').wait();"
    client = make_client(tmp_path, declare(epochs=1), submit, "SCALE = 3.0", submit)
    with pytest.raises(CellExecutionError, match="the code has changed"):
        client.execute()


def test_outside_of_a_notebook_a_run_is_a_table_and_names_are_no_markup(trained: Path, tmp_path: Path) -> None:
    assert not is_notebook()
    state = fold(read_events(RunDir(trained).events))
    state.name = "<script>alert(1)</script>"
    state.members["member-0"].error = "<b>"
    html = progress_html(state)
    assert "<script>" not in html and "&lt;script&gt;" in html
    assert ensemble.attach(trained)._repr_html_().count("<tr") == 3
    run = ensemble.attach(trained)
    assert "2/2" in run.wait()._repr_html_()
    for shown in (run, run.wait()):
        lines = [line for line in repr(shown).splitlines() if re.match(r"\S* *member-\d ", line)]
        assert len(lines) == 2 and len(repr(shown)) < 4000
    gone = ensemble.Run(RunDir(tmp_path / "gone"))
    assert "gone" in repr(gone) and "gone" in gone._repr_html_()
