"""The simplest run is the measure of the core: two linear models on arrays, `inline`, two epochs.

How it is counted, in a new process, from `import ensemble` to the end of `wait()`, in all threads:

- modules: those of `ensemble` and `pipelines` in `sys.modules` at the end;
- functions: their different functions that were entered, by `sys.setprofile`: `def`, lambda, and comprehensions,
  which are functions of their own in Python 3.11; bodies of classes and modules are not counted;
- files: those that these functions are in;
- lines: of the `def`s among them, from the first decorator to the end, docstrings included;
- rooms: the folders and files of the first level that the call of `submit` alone passes through;
- climbs: pairs of them in which one calls another that is above it in the floors of `test_architecture.py`.

A bound is lowered when the figure falls, never raised.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_architecture import FLOORS

ROOT = Path(__file__).resolve().parents[1]
BOUNDS = {"modules": 341, "files": 265, "functions": 2478, "lines": 18127, "rooms": 20, "climbs": 1}
#: With the rehearsal that precedes a run.
WITH_REHEARSAL = {"modules": 348, "files": 273, "functions": 2653, "lines": 19307, "rooms": 20, "climbs": 1}
SLACK = 1.03  # a bound that is higher than the figure by more than this factor is out of date

PROGRAM = """
import json, os, sys, threading

ROOT, OUT = sys.argv[1:3]
PACKAGES = tuple(os.path.join(ROOT, name) + os.sep for name in ("ensemble", "pipelines"))
IS_FUNCTION = 2  # inspect.CO_NEWLOCALS, which bodies of classes and modules lack
entered = set()
calls = set()  # (caller's file, called file), while `submit` runs
is_submitting = False


def watch(frame, event, argument):
    if event != "call":
        return
    entered.add(frame.f_code)
    if is_submitting and frame.f_code.co_flags & IS_FUNCTION and frame.f_code.co_filename.startswith(PACKAGES):
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(PACKAGES):
            caller = caller.f_back
        calls.add((caller and caller.f_code.co_filename, frame.f_code.co_filename))


threading.setprofile(watch)
sys.setprofile(watch)

import numpy
import torch

import ensemble
from ensemble import Ensemble, Recipe
from pipelines import Pipeline, sources


def build_model(params):
    return torch.nn.Linear(4, 3 * params["width"])


def compute_loss(model, batch):
    return torch.nn.functional.cross_entropy(model(batch["x"]), batch["label"], reduction="none")


def make_optimizer(model, params):
    return torch.optim.SGD(model.parameters(), lr=params["lr"])


values = numpy.random.default_rng(0).normal(size=(96, 4)).astype("float32")
labels = values[:, :3].argmax(1)
train = Pipeline(sources.arrays(x=values[:64], label=labels[:64]), seed=0)
valid = Pipeline(sources.arrays(x=values[64:], label=labels[64:]), seed=0)
recipe = Recipe(model=build_model, loss=compute_loss, optimizer=make_optimizer)
members = [{"width": 1, "lr": 0.1}, {"width": 1, "lr": 0.2}]
data = {"train": train, "valid": valid, "batch_size": 16, "rehearsal": sys.argv[3] or None}
declared = Ensemble(name="simplest", recipe=recipe, members=members, epochs=2, **data)
submit = ensemble.submit
is_submitting = True
run = submit(declared, OUT, executor="inline")
is_submitting = False
result = run.wait()
sys.setprofile(None)
threading.setprofile(None)
assert [row["state"] for row in result.members] == ["finished", "finished"], result.members
assert result.combined["metrics"], result.combined
modules = [name for name in sys.modules if name.partition(".")[0] in ("ensemble", "pipelines")]
functions = {
    (os.path.relpath(code.co_filename, ROOT), code.co_firstlineno, code.co_name)
    for code in entered
    if code.co_filename.startswith(PACKAGES) and code.co_flags & IS_FUNCTION
}
calls = [[name and os.path.relpath(name, ROOT) for name in call] for call in calls]
print("\\n" + json.dumps({"modules": sorted(modules), "functions": sorted(functions), "calls": calls}))
"""


def measure(folder: Path, rehearsal: str) -> dict[str, int]:
    program = folder / "simplest.py"
    program.write_text(PROGRAM, encoding="utf-8")
    command = [sys.executable, str(program), str(ROOT), str(folder / "run"), rehearsal]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    # (file, first line, name) -> lines: those of a `def`, 0 of a lambda or comprehension within one
    functions: dict[tuple[str, int, str], int] = dict.fromkeys(map(tuple, seen["functions"]), 0)
    files = {file for file, _, _ in functions}
    for file in files:
        for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                if (file, first, node.name) in functions:
                    functions[file, first, node.name] = (node.end_lineno or first) - first + 1
    figures = {"modules": len(seen["modules"]), "files": len(files), "functions": len(functions)}
    return figures | {"lines": sum(functions.values())} | count_climbs(seen["calls"])


def count_climbs(calls: list[tuple[str | None, str]]) -> dict[str, int]:
    """The rooms of these calls, and in how many pairs of them the one below calls the one above."""
    floors = [floor for package in ("pipelines", "ensemble") for floor in FLOORS[package]]
    heights = {room: height for height, floor in enumerate(floors) for room in floor}

    def find_room(file: str) -> str:
        return "/".join(file.removesuffix(".py").split("/")[:2])

    pairs = {(find_room(caller), find_room(called)) for caller, called in calls if caller is not None}
    climbs = [pair for pair in pairs if heights[pair[0].split("/")[1]] < heights[pair[1].split("/")[1]]]
    return {"rooms": len({find_room(called) for _, called in calls}), "climbs": len(climbs)}


@pytest.mark.parametrize(
    ("rehearsal", "bounds"), [("", BOUNDS), ("refuse", WITH_REHEARSAL)], ids=["", "rehearsed"]
)
def test_the_simplest_run_passes_through_no_more_than_its_bounds(
    rehearsal: str, bounds: dict[str, int], tmp_path: Path
) -> None:
    figures = measure(tmp_path, rehearsal)
    for name, bound in bounds.items():
        assert figures[name] <= bound, f"the simplest run has {figures[name]:,} {name}, {bound:,} are allowed"
        assert figures[name] * SLACK > bound, (
            f"the simplest run has fewer {name}: the bound may be {figures[name]:,}"
        )
