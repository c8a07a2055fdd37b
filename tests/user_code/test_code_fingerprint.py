"""The fingerprint of code: what changes it, what does not, and that a difference has a name."""

from __future__ import annotations

import argparse
import array
import collections
import datetime
import decimal
import fractions
import json
import operator
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ensemble import Ensemble, Recipe
from ensemble.spec.spec_file import load_spec
from ensemble.store import RunDir
from ensemble.store.kept_code import pickle_ensemble
from ensemble.user_code.fingerprint import Code, code_of
from pipelines import Pipeline, sources
from pipelines.fingerprint.instructions import find_use

SPEC = '''
"""A spec."""
import dataclasses
import functools
import enum
from pathlib import Path

import numpy as np
import torch
from torch import nn

import helpers
from ensemble import Ensemble, Recipe
from helpers import Net
from pipelines import Pipeline, sources

HERE = Path(__file__).parent
SMOOTHING = 0.1
WEIGHTS = {"a": 1.0, "b": [2, 3]}
NAMES = frozenset(("x", "y", "z", "label"))
criterion = nn.CrossEntropyLoss(reduction="none", label_smoothing=0.0)


@dataclasses.dataclass(frozen=True)
class Options:
    width: int = 4
    depth: int = 1


class Kind(enum.Enum):
    ONE = 1
    TWO = 2


@functools.cache
def table(n):
    return [n * SMOOTHING for _ in range(n)]


def model(params):
    """Builds it."""
    assert HERE
    return Net(params.get("width", Options().width))


def make_loss(scale, power=2):
    def loss(model, batch):
        # a comment
        out = model(batch["x"])
        if batch["x"].ndim > 3 and Kind.ONE is not Kind.TWO:
            return out.sum(dim=1) * sum(table(3))
        for name in NAMES:
            if name in batch and name == "label":
                return helpers.scaled(criterion(out, batch["label"]), scale) ** power * WEIGHTS["a"]
        return out.sum(dim=1)

    return loss


def spec():
    pipe = Pipeline(sources.arrays(x=np.zeros((8, 4), np.float32), label=np.zeros(8, np.int64)))
    pipe = pipe.map(lambda sample: {**sample, "x": sample["x"] * 1.0})
    return Ensemble(
        name="code",
        recipe=Recipe(
            model=model, loss=make_loss(1.0), task="free", metrics=lambda outputs, batch: {"m": outputs.mean()}
        ),
        members=[{}],
        train=pipe,
    )
'''

HELPERS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        return self.out(x)


def scaled(values, by):
    from late import shift

    return shift(values * by)


def never_used(x):
    return x + 1
"""

LATE = "def shift(values):\n    return values + 0.0\n"


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # what is edited within a second is to be read anew
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name in ("a_spec", "helpers", "late"):
            del sys.modules[name]


TEXTS = {"a_spec": SPEC, "helpers": HELPERS, "late": LATE}


def write(folder: Path, **texts: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (TEXTS | texts).items():
        (folder / f"{name}.py").write_text(text)
    return folder / "a_spec.py"


def compare(tmp_path: Path, file: str, old: str, new: str, text: str | None = None) -> tuple[bool, list[str]]:
    """Whether the fingerprint stays when a text is replaced in a file, in another folder; what has changed."""
    text = TEXTS[file] if text is None else text
    assert old in text
    before = code(write(tmp_path / "one", **{file: text}))
    after = code(write(tmp_path / "another" / "folder", **{file: text.replace(old, new)}))
    return after.fingerprint == before.fingerprint, after.changed(before)


def code(spec: Path) -> Code:
    """Of a spec file, as if no process had imported anything of its folder before."""
    for name in ("a_spec", "helpers", "late"):
        sys.modules.pop(name, None)
    sys.path[:] = [str(spec.parent), *(each for each in sys.path if "pytest" not in each)]
    sys.path_importer_cache.clear()
    return code_of(load_spec(spec))


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("a_spec", "        # a comment\n", "\n\n        # two\n        # lines\n"),
        ("a_spec", '"""Builds it."""', '"""Builds\n    a model."""'),
        ("a_spec", '    """Builds it."""\n', ""),
        ("a_spec", "import enum\n", "import enum\nimport json\n\nUNUSED = 3\n"),
        ("a_spec", 'model(batch["x"])', 'model(\n            batch[\n              "x"\n            ]\n        )'),
        ("a_spec", '{"m": outputs.mean()}', '(\n    {"m": outputs.mean()}\n)'),
        ("helpers", "return x + 1", "return x + 2"),
        ("helpers", "import torch\n", "import torch\n\n\n\n"),
        ("late", "def shift", "# moved\n\n\ndef shift"),
    ],
)
def test_what_changes_no_result_changes_no_fingerprint(tmp_path: Path, file: str, old: str, new: str) -> None:
    assert compare(tmp_path, file, old, new) == (True, [])


LOSS = "a_spec.make_loss.<locals>.loss"
# what only this loss uses
PARTS = [f"a_spec.{name}" for name in ("Kind", "NAMES", "WEIGHTS", "criterion", "table", "SMOOTHING")]


@pytest.mark.parametrize(
    ("file", "old", "new", "names"),
    [
        ("a_spec", "scale) ** power", "scale) * power", [LOSS]),
        ("a_spec", "make_loss(1.0)", "make_loss(2.0)", [LOSS]),
        ("a_spec", "make_loss(1.0)", "helpers.scaled", ["Recipe.loss", LOSS, *PARTS]),
        ("a_spec", "SMOOTHING = 0.1", "SMOOTHING = 0.2", ["a_spec.SMOOTHING"]),
        ("a_spec", '"b": [2, 3]', '"b": [2, 4]', ["a_spec.WEIGHTS"]),
        ("a_spec", "label_smoothing=0.0", "label_smoothing=0.5", ["a_spec.criterion"]),
        ("a_spec", "outputs.mean()", "outputs.sum()", ["a_spec.spec.<locals>.<lambda>"]),
        ("a_spec", 'sample["x"] * 1.0', 'sample["x"] * 3.0', ["a_spec.spec.<locals>.<lambda> (2)"]),
        ("a_spec", "width: int = 4", "width: int = 8", ["a_spec.Options"]),
        ("a_spec", "n * SMOOTHING", "n + SMOOTHING", ["a_spec.table"]),
        ("a_spec", "TWO = 2", "TWO = 3", ["a_spec.Kind"]),
        ("helpers", "self.out(x)", "self.out(-x)", ["helpers.Net.forward"]),
        ("helpers", "values * by", "values / by", ["helpers.scaled"]),
        ("late", "values + 0.0", "values + 1.0", ["module late"]),
    ],
)
def test_what_changes_a_result_is_named(tmp_path: Path, file: str, old: str, new: str, names: list[str]) -> None:
    assert compare(tmp_path, file, old, new) == (False, names)


@pytest.mark.parametrize("decorated", ["@torch.no_grad()", "@torch.enable_grad()\n@torch.no_grad()"])
@pytest.mark.parametrize(
    ("file", "definition", "old", "new", "name"),
    [
        ("a_spec", "def model(params):", "Options().width", "2 * Options().width", "a_spec.model"),
        ("a_spec", "def model(params):", "width: int = 4", "width: int = 8", "a_spec.Options"),
        ("helpers", "    def forward(self, x):", "self.out(x)", "self.out(-x)", "helpers.Net.forward"),
    ],
)
def test_a_function_under_an_installed_packages_decorator_is_looked_into(
    tmp_path: Path, decorated: str, file: str, definition: str, old: str, new: str, name: str
) -> None:
    indent = definition[: len(definition) - len(definition.lstrip())]
    lines = "".join(f"{indent}{line}\n" for line in decorated.split("\n"))
    text = TEXTS[file].replace(definition, lines + definition)
    assert compare(tmp_path, file, old, new, text) == (False, [name])


def test_a_container_that_is_only_read_counts_and_one_that_is_written_does_not(tmp_path: Path) -> None:
    written = '        SEEN[batch["x"].ndim + 1] = batch["y"] = WEIGHTS["a"]\n'
    writes = SPEC.replace("        # a comment\n", written).replace(
        "SMOOTHING = 0.1\n", "SMOOTHING = 0.1\nSEEN = {}\n"
    )
    assert compare(tmp_path, "a_spec", "SEEN = {}", "SEEN = {2: 1.0}", writes)[1] == []
    assert compare(tmp_path, "a_spec", '"a": 1.0', '"a": 2.0', writes)[1] == ["a_spec.WEIGHTS"]
    counts = '        global SMOOTHING\n        SMOOTHING += 1\n        WEIGHTS["a"] += 1\n'
    counts = writes.replace(written, counts + "        SEEN.setdefault(1, 2)\n")
    for old, new in (("SMOOTHING = 0.1", "SMOOTHING = None"), ('"a": 1.0', '"a": 2.0'), ("{}\n", "{1: 2}\n")):
        assert compare(tmp_path, "a_spec", old, new, counts)[1] == []


DECORATED = """
class Wraps:
    def __init__(self, function):
        functools.update_wrapper(self, function)

    def __call__(self, params):
        return self.__wrapped__(params)


@Wraps
"""


def test_names_of_modules_are_no_part_of_it_and_functions_of_one_name_are_told_apart(tmp_path: Path) -> None:
    spec = SPEC.replace("        # a comment\n", "        assert __name__\n")
    spec = spec.replace("def model(", DECORATED + "def model(")
    before = code(write(tmp_path / "one", a_spec=spec))
    write(tmp_path / "two", a_spec=spec).rename(tmp_path / "two" / "another.py")
    renamed = code(tmp_path / "two" / "another.py")
    assert renamed.changed(before) == [] and renamed.fingerprint == before.fingerprint
    assert {"another.model", "another.Wraps"} < set(renamed.names.values())
    edited = write(tmp_path / "two", a_spec=spec.replace("** power", "* power"))
    assert code(edited.rename(tmp_path / "two" / "third.py")).changed(before) == ["third.make_loss.<locals>.loss"]
    same, twice = "def scaled(values, by):\n    return values * by\n", "helpers.scaled(other.scaled({}, 1.0), 2.0)"
    uses = spec.replace("import helpers\n", "import helpers\nimport other\n")
    uses = uses.replace("helpers.scaled(", twice[:15])
    uses = uses.replace('scaled(criterion(out, batch["label"]), scale)', twice[8:].format("out"))
    texts = {"a_spec": uses, "helpers": HELPERS + same, "other": same.replace("*", "-")}
    one = code(write(tmp_path / "three", **texts))
    sys.modules.pop("other")
    swapped = {"helpers": HELPERS + same.replace("*", "-"), "other": same}
    both = code(write(tmp_path / "three", **{**texts, **swapped}))
    sys.modules.pop("other")
    assert both.changed(one) == ["helpers.scaled", "other.scaled"] and both.fingerprint != one.fingerprint


SCALED = [types.SimpleNamespace, argparse.Namespace]
SCALED += [getattr(collections, name) for name in ("OrderedDict", "Counter", "UserDict")]


@pytest.mark.parametrize(
    "make",
    [
        *(lambda value, kind=kind: kind(scale=value) for kind in SCALED),
        *(lambda value: collections.defaultdict(int, scale=value), lambda value: collections.deque([value])),
        lambda value: collections.ChainMap({"scale": value}),
        lambda value: array.array("i", [value]),
        *(decimal.Decimal, fractions.Fraction, operator.itemgetter, datetime.date.fromordinal),
        *(np.matrix, np.poly1d, lambda value: np.vectorize(lambda x: x * value, otypes="d")),
    ],
)
def test_what_objects_of_python_s_and_numpy_s_hold_counts(make: Callable[[int], Any]) -> None:
    def of(value: Any) -> Code:
        recipe = Recipe(model=lambda params: value, loss=lambda model, batch: 0, task="free")
        train = Pipeline(sources.arrays(x=np.zeros((2, 1), np.float32)))
        return code_of(Ensemble(name="a", recipe=recipe, members=[{}], train=train, epochs=1))

    value = make(1)
    before = of(value)
    if callable(value):
        value([1, 2])
    assert of(value).changed(before) == of(make(1)).changed(before) == []
    assert of(make(100)).changed(before)


def test_the_declaration_that_is_kept_has_the_same_and_needs_no_module_any_more(tmp_path: Path) -> None:
    spec = write(tmp_path / "here")
    before = code(spec)
    run = RunDir.create(tmp_path / "run", load_spec(spec), spec)
    kept = run.code(before.fingerprint)
    assert (kept / "helpers.py").read_text() == HELPERS and (kept / "late.py").read_text() == LATE
    (spec.parent / "helpers.py").write_text("raise SystemExit('imported again')\n")
    for name in ("a_spec", "helpers", "late"):
        sys.modules.pop(name, None)
    loaded = RunDir(run.path).load_ensemble()
    assert "helpers" not in sys.modules
    again = code_of(loaded)
    assert again.changed(before) == [] and again.fingerprint == before.fingerprint


def test_of_loaded_modules_only_those_of_the_spec_are_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, realpath = write(tmp_path / "here"), os.path.realpath
    declared, looked_up = load_spec(spec), list[str]()

    def note(path: Any, **how: Any) -> Any:
        looked_up.append(os.fspath(path))
        return realpath(path, **how)

    monkeypatch.setattr(os.path, "realpath", note)
    pickle_ensemble(declared, spec)
    assert str(spec) in looked_up
    assert [path for path in looked_up if path.startswith(sys.prefix)] == [], "libraries' modules"


MAKE_MODEL = """
SOURCE = sources.arrays(x=np.zeros((3, 2), np.float32))
SIZES = {name: len(name) for name in NAMES | {"alpha", "beta", "gamma", "delta"}}
BASE = Pipeline(SOURCE).map(lambda sample: {**sample, "y": sample["x"] + SMOOTHING})


def make_model():
    class Here(Net):
        def forward(self, x):
            return super().forward(x)

    return lambda params: Here(SIZES["beta"] + len(BASE) - len(SOURCE))


"""


OTHER_PROCESS = """
import sys
from ensemble.spec.spec_file import load_spec
from ensemble.store import RunDir
from ensemble.user_code.fingerprint import code_of

kept = RunDir(sys.argv[1]).load_ensemble()
print(*(code_of(each).fingerprint for each in (kept, load_spec(sys.argv[2]))))
"""


def test_it_is_the_same_in_every_process_whatever_its_hash_seed_declared_or_kept(tmp_path: Path) -> None:
    made = SPEC.replace("def make_loss", MAKE_MODEL + "def make_loss")
    spec = write(tmp_path / "here", a_spec=made.replace("model=model", "model=make_model()"))
    before = code(spec)
    assert {"a_spec.make_model.<locals>.Here", "a_spec.BASE", "a_spec.SOURCE"} < set(before.names.values())
    declared = load_spec(spec)
    declared.recipe.model.__globals__["BASE"].fingerprint  # noqa: B018 - what it reads of its data, it keeps
    assert code_of(declared).changed(before) == []
    run = RunDir.create(tmp_path / "run", declared, spec)
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2]), "PYTHONHASHSEED": seed}
    command = [sys.executable, "-c", OTHER_PROCESS, str(run.path), str(spec)]
    said = subprocess.check_output(command, env=environment, cwd=tmp_path, text=True)
    assert said.split() == [before.fingerprint] * 2


OURS = """
import functools, json, sys
import ensemble, pipelines
from ensemble import Ensemble, Recipe
from ensemble.user_code.fingerprint import code_of
from pipelines import Pipeline, sources, stages, weights
from pipelines.stages import cast

def model(params):
    return ensemble.combine.find_math

def loss(model, batch):
    return weights.bootstrap(3)(batch["index"]) * stages.cast("x", "int64")(batch)["x"]

made = sources.arrays(x=[1.0, 2.0], id="two")
pipe = Pipeline(made).map(cast("x", "float32")).map(stages.pad("x", 4)).map(functools.partial(cast("x", "int8")))
pipe = pipe.map(lambda sample: cast("x", "int64")(sample))
code = code_of(Ensemble(name="a", recipe=Recipe(model=model, loss=loss, task="free"), members=[{}], train=pipe))
print(json.dumps([ensemble.__file__, code.fingerprint, dict(code.parts)]))
"""


def of_ours(folder: Path, installed: str, edits: dict[str, str], bound: str = "x") -> tuple[str, dict[str, str]]:
    """The code of a declaration that uses ours, with our stages edited and their module moved."""
    root = folder / installed
    for package in ("ensemble", "pipelines"):
        shutil.copytree(Path(__file__).resolve().parents[2] / package, root / package)
    stages = root / "pipelines" / "stages"
    text = (stages / "_values.py").read_text()
    for old, new in edits.items():
        assert old in text
        text = text.replace(old, new)
    (stages / "_values.py").unlink()
    (stages / "numbers.py").write_text(text)
    init = stages / "__init__.py"
    init.write_text(init.read_text().replace("_values", "numbers"))
    (folder / "declared.py").write_text(OURS.replace('cast("x", "float32")', f'cast("{bound}", "float32")'))
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    said = subprocess.check_output([sys.executable, "declared.py"], env=environment, cwd=folder, text=True)
    file, fingerprint, parts = json.loads(said)
    assert file.startswith(str(root))
    return fingerprint, parts


def test_what_is_ours_goes_by_name_version_and_bound_values(tmp_path: Path) -> None:
    reworded = {
        "a number": "any number",
        "kept": "remaining",
        "class Cast": "class Converts",
        " Cast": " Converts",
    }
    raised = {'"pipelines.stages.cast")': '"pipelines.stages.cast", version=2)'}
    before, parts = of_ours(tmp_path / "one", "checkout", {})
    assert of_ours(tmp_path / "two", "site-packages", reworded) == (before, parts)
    fingerprint, changed = of_ours(tmp_path / "three", "checkout", {}, bound="y")
    assert fingerprint != before and [name for name in parts if changed[name] != parts[name]] == ["train stage 0"]
    _, changed = of_ours(tmp_path / "four", "checkout", raised)
    users = ["train stage 0", "train stage 2", "loss", "<lambda>"]
    assert sorted(name for name in parts if changed[name] != parts[name]) == sorted(users)


def test_a_module_that_cannot_be_kept_is_imported_and_its_change_is_seen(tmp_path: Path) -> None:
    locked = HELPERS.replace("def scaled", "import threading\nLOCK = threading.Lock()\n\ndef scaled")
    late = "from late import shift\n"
    locked = locked.replace(late, f"LOCK.acquire(); LOCK.release()\n    {late}")
    spec = write(tmp_path / "here", helpers=locked)
    before = code(spec)
    run = RunDir.create(tmp_path / "run", load_spec(spec), spec)
    (spec.parent / "helpers.py").write_text(locked.replace("values * by", "values / by"))
    sys.modules.pop("helpers")
    sys.path_importer_cache.clear()
    again: Any = code_of(RunDir(run.path).load_ensemble())
    assert again.changed(before) == ["helpers.scaled"]


def test_an_import_within_a_function_of_many_constants_is_found() -> None:
    lines = [
        "def busy():",
        *(f"    x = {n}.5" for n in range(300)),
        "    from late import shift",
        "    return shift",
    ]
    space: dict[str, Any] = {}
    exec("\n".join(lines), space)
    assert find_use(space["busy"].__code__).imports == {("late", 0, ("shift",))}


def test_how_members_predict_is_compared_with_all_that_it_calls_and_with_nothing_else() -> None:
    def shared(scores: Any, by: int = 1) -> Any:
        return scores * by

    def shared_otherwise(scores: Any, by: int = 2) -> Any:
        return scores * by

    def predicts(**functions: Any) -> str | None:
        functions = {"model": lambda params: None, "loss": lambda model, batch: shared(model(batch)), **functions}
        recipe = Recipe(**{"task": "free", **functions})
        train = Pipeline(sources.arrays(x=np.zeros((2, 1), np.float32)))
        return code_of(Ensemble(name="a", recipe=recipe, members=[{}], train=train, epochs=1)).predicts

    def make(helper: Any) -> Any:
        return lambda model, batch: helper(model(batch))

    before = predicts(predict=make(shared))
    assert predicts(predict=make(shared), model=lambda params: 1, metrics=lambda outputs, batch: {}) == before
    assert predicts(predict=make(shared_otherwise)) != before, "the loss calls it, too"
    assert predicts(predict=make(shared), task="regression") != before != predicts()
