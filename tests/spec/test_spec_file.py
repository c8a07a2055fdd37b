"""Spec files: how `--set` fills options, and that a mistake names the line of the user's own file."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.finished_runs import of_kind

from ensemble import Ensemble, Recipe, SpecError
from ensemble.spec.spec_file import call_spec, import_file, load_spec
from pipelines import Pipeline, sources

OPTIONS: list[dict[str, Any]] = []


def an_ensemble(**options: Any) -> Ensemble:
    """What a spec function makes of its options: an ensemble, and a note of the options as it got them."""
    OPTIONS.append(options)
    return Ensemble(
        name="spec",
        recipe=Recipe(model=print, loss=print, task="classification"),
        members=[{}],
        train=Pipeline(sources.arrays(x=np.zeros((4, 1), np.float32))),
    )


def options_of(made: Ensemble) -> dict[str, Any]:
    assert made.name == "spec"
    return OPTIONS[-1]


@pytest.fixture
def written(tmp_path: Path) -> Iterator[Any]:
    """Writes a spec file; what its import leaves in this process is taken away."""
    path, modules = list(sys.path), set(sys.modules)

    def write(text: str, name: str = "a_spec.py") -> Path:
        (tmp_path / name).write_text(text)
        return tmp_path / name

    yield write
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def refusal(path: Path, *settings: str) -> str:
    with pytest.raises(SpecError) as caught:
        load_spec(path, settings)
    (line,) = str(caught.value).splitlines()
    return line


def options(
    number: int = 3,
    rate: float = 1,
    flag: bool = False,
    text: str = "a",
    maybe: int | None = None,
    plain=2.5,  # type: ignore[no-untyped-def]
    widths=(16, 32),  # type: ignore[no-untyped-def]
    unknown=None,  # type: ignore[no-untyped-def]
    chosen: Literal["a", "b", 2] | None = "a",
    where: Path | None = None,
    sizes: list[int] | None = None,
    pair: tuple[int, float] = (1, 0.1),
    named: Sequence[str] = (),
    on: bool | None = None,
    hidden: NotImported | None = None,  # type: ignore[name-defined]  # noqa: F821
) -> Ensemble:
    return an_ensemble(**locals())


SETTINGS = {"number=7": 7, "number=-7": -7, "rate=1e-3": 1e-3, "flag=yes": True, "flag=0": False, "text=7": "7"}
SETTINGS |= {"rate=0.5": 0.5}  # annotated as a number, though its default looks like an integer
SETTINGS |= {
    "text=a=b": "a=b",
    "text=": "",
    "maybe=7": 7,
    "maybe=none": None,
    "plain=3": 3.0,
    "widths=8,24": (8, 24),
}
SETTINGS |= {"unknown=7": 7, "unknown=0.5": 0.5, "unknown=true": True, "unknown=yes": "yes"}
SETTINGS |= {"unknown=some/path": "some/path", "unknown=None": None, "unknown=12e5": "12e5", "unknown=007": "007"}
SETTINGS |= {"unknown=1.10": "1.10", "text=007": "007", "text=None": "None", "plain=12e5": 12e5, "number=007": 7}
SETTINGS |= {"chosen=b": "b", "chosen=2": 2, "chosen=None": None, "where=a/b": Path("a/b"), "sizes=3, 4": [3, 4]}
SETTINGS |= {"pair=2,0.5": (2, 0.5), "named=007,b": ["007", "b"], "on=off": False, "hidden=7": 7}


def test_a_setting_becomes_what_the_option_is() -> None:
    for setting, value in SETTINGS.items():
        got = options_of(call_spec(options, [setting]))[setting.partition("=")[0]]
        assert (got, type(got)) == (value, type(value)), setting


@pytest.mark.parametrize(
    ("setting", "valid"),
    [
        ("number=None", "integer"),
        ("number=12e5", "integer"),
        ("chosen=c", "a or b or 2"),
        ("on=maybe", "true or false"),
        ("sizes=3,x", "integer"),
        ("pair=1", "2 values"),
        ("rate=fast", "number"),
    ],
)
def test_a_value_of_another_type_is_refused_with_the_option_and_what_is_valid(setting: str, valid: str) -> None:
    with pytest.raises(SpecError, match=f"--set {setting.partition('=')[0]} .*{valid}"):
        call_spec(options, [setting])


def test_an_option_without_a_default_must_be_set_and_has_its_annotation() -> None:
    def spec(data: str, *, members: int, **anything: Any) -> Ensemble:
        return an_ensemble(data=data, members=members, **anything)

    with pytest.raises(SpecError, match=r"--set data=\.\.\. --set members=\.\.\."):
        call_spec(spec, [])
    expected = {"data": "007", "members": 3, "width": 8, "kind": "conv"}
    assert options_of(call_spec(spec, ["data=007", "members=3", "width=8", "kind=conv"])) == expected


@given(st.integers() | st.floats(allow_nan=False) | st.booleans() | st.text(min_size=1))
def test_a_value_written_out_is_read_back(value: Any) -> None:
    default = type(value)()

    def spec(option=default) -> Ensemble:  # type: ignore[no-untyped-def]
        return an_ensemble(option=option)

    written = f"@{value}" if str(value).startswith("@") else value
    got = options_of(call_spec(spec, [f"option={written}"]))["option"]
    assert (got, type(got)) == (value, type(value))


WHOLE = """
import numpy as np
from ensemble import Ensemble, Recipe
from pipelines import Pipeline, sources

def spec(epochs: int = 2):
    train = Pipeline(sources.arrays(x=np.zeros((4, 1), np.float32)))
    recipe = Recipe(model=print, loss=print, task="free")
    return Ensemble(name="spec", recipe=recipe, members=[{}], train=train, epochs=epochs)
"""


LINES = {
    "x = 1\ndef spec(:\n": ", line 2: invalid syntax",
    "import os\nimport no_such_library\n": ", line 2: ModuleNotFoundError: No module named",
    "from os import no_such_name\n": ", line 1: ImportError: cannot import name 'no_such_name'",
    "\n\nraise RuntimeError('two\\nlines')\n": ", line 3: RuntimeError: two lines",
    "\nimport sys; sys.exit(3)\n": ", line 2: it ended the program",
    "\nimport sys; sys.exit('no data')\n": ", line 2: it ended the program: no data",
    "x = 1\n": " defines no function spec(**options) -> Ensemble",
    "spec = 3\n": " defines no function spec(**options) -> Ensemble",
    "def spec():\n    return 7\n": ": spec() returned int, not an Ensemble",
    "def spec():\n    return {}['a']\n": ", line 2: KeyError: 'a'",
    "import json\ndef spec():\n    x = 1\n    return json.loads('{')\n": ", line 4: JSONDecodeError",
    "raise EOFError('EOF when reading a line')": "make it an option, as in spec(epochs=5), and give it by",
    WHOLE.replace("epochs=epochs", "epoch=3"): ", line 9: Ensemble has no option 'epoch'",
    WHOLE.replace("arrays(x=", "parquet('no/such.parquet') or ("): ", line 7: parquet('no/such.parquet'): no such",
    b"\xff\xfe broken".decode("latin-1") + "\x00": "",
}


@pytest.mark.parametrize("text", LINES)
def test_a_mistake_in_a_spec_file_names_its_line(text: str, written: Any, tmp_path: Path) -> None:
    line = refusal(written(text))
    says = LINES[text]
    assert line.startswith(f"{tmp_path}/a_spec.py") and (f"a_spec.py{says}" in line or says in line)


def test_a_mistake_in_a_file_beside_the_spec_names_that_file(written: Any, tmp_path: Path) -> None:
    written("def half(x):\n    return x / 0\n", "helpers_beside.py")
    path = written("import helpers_beside\ndef spec():\n    return helpers_beside.half(1)\n")
    assert refusal(path) == f"{tmp_path}/helpers_beside.py, line 2: ZeroDivisionError: division by zero"
    written("def half(x:\n", "helpers_beside_two.py")
    path = written("import helpers_beside_two\n", "b_spec.py")
    assert refusal(path).startswith(f"{tmp_path}/helpers_beside_two.py, line 1: ")


@pytest.mark.parametrize("name", ["numpy.py", "ensemble.py", "random.py", "pipelines.py", "this.py", "sklearn.py"])
def test_a_spec_file_that_would_hide_a_module_is_refused(name: str, written: Any) -> None:
    before = sys.modules.get(name.removesuffix(".py"))
    assert "rename it" in refusal(written(WHOLE, name))
    assert sys.modules.get(name.removesuffix(".py")) is before


@pytest.mark.parametrize("beside", ["types.py", "queue/__init__.py"])
def test_a_file_beside_the_spec_that_hides_a_module_of_python_is_named(beside: str, written: Any) -> None:
    (path := written(WHOLE)).parent.joinpath(beside).parent.mkdir(exist_ok=True)
    written("", beside)
    name = beside.partition("/")[0].removesuffix(".py")
    line = refusal(path)
    assert f"{path.parent / name}" in line and f"Python's own module '{name}'" in line and "rename it" in line


def test_a_folder_of_data_may_have_the_name_of_the_spec(written: Any, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "photographs").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert load_spec(written(WHOLE, "photographs.py")).epochs == 2


RUNS = """
import numpy as np
from torch import nn
from torch.nn import functional as F
from ensemble import Ensemble, Recipe
from pipelines import Pipeline, sources
from . import numbers_of

def model(params):
    return nn.Linear(4, numbers_of.classes())

def loss(net, batch):
    from ..late_of import shift

    return F.cross_entropy(shift(net(batch["x"])), batch["label"], reduction="none")

def spec():
    train = Pipeline(sources.arrays(x=np.ones((32, 4), np.float32), label=np.arange(32) % 3))
    recipe = Recipe(model=model, loss=loss)
    return Ensemble(name="inside", recipe=recipe, members=[{"lr": 0.1}], epochs=1, train=train)
"""


@pytest.mark.more
def test_a_spec_in_a_package_is_run_as_python_does_it_and_goes_on_from_any_folder(tmp_path: Path) -> None:
    inner = tmp_path / "here" / "outer_of" / "inner_of"
    inner.mkdir(parents=True)
    (inner / "spec.py").write_text(RUNS)
    (inner / "numbers_of.py").write_text("def classes():\n    return 3\n")
    (inner.parent / "late_of.py").write_text("def shift(values):\n    return values + 0.0\n")

    def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ensemble.cli", *arguments]
        path = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        return subprocess.run(command, cwd=cwd, env=path, capture_output=True, text=True)

    first = ("run", "spec.py", "--run-dir", str(tmp_path / "run"), "--executor", "local")
    refused = run(*first, cwd=inner)
    assert refused.returncode == 2 and "spec.py, line 7" in refused.stderr and "__init__.py" in refused.stderr
    for folder in (inner, inner.parent):
        (folder / "__init__.py").touch()
    assert (done := run(*first, cwd=inner)).returncode == 0, done.stderr
    (inner / "numbers_of.py").unlink()  # the declaration that is kept has it
    more = ("--epochs", "2", "--max-cpus", "0.75")
    assert (done := run("resume", str(tmp_path / "run"), *more, cwd=tmp_path)).returncode == 0, done.stderr
    assert of_kind(tmp_path / "run", "node")[-1]["cpus"] == 0.75


def test_a_spec_file_imports_what_lies_beside_it_and_another_may_follow(written: Any, tmp_path: Path) -> None:
    written("EPOCHS = 7", "numbers_beside.py")
    path = written("from numbers_beside import EPOCHS\n" + WHOLE.replace("int = 2", "int = EPOCHS"))
    assert load_spec(path).epochs == 7
    (tmp_path / "other").mkdir()
    assert load_spec(written(WHOLE.replace("int = 2", "int = 9"), "other/a_spec.py")).epochs == 9


def test_what_is_no_spec_file_is_named(written: Any, tmp_path: Path) -> None:
    assert "there is no spec file" in refusal(tmp_path / "no_such.py") and "no spec file" in refusal(tmp_path)
    written(WHOLE)
    for name in ("a_spec", "a_spce.py", "aspec.py"):
        assert refusal(tmp_path / name).endswith(f"; did you mean '{tmp_path}/a_spec.py'?")
    assert "not a Python file" in refusal(written(WHOLE, "a_spec.yaml"))


def test_a_spec_file_is_imported_under_its_own_name_which_may_have_a_dot(written: Any) -> None:
    module = import_file(written(WHOLE, "named_so.py"))
    assert sys.modules["named_so"] is module and module.spec.__module__ == "named_so"
    written("", "helping.py")
    assert import_file(written("import helping\n", "my.v2.py")).helping


LOGIN = """
from ensemble import Ensemble, Search, uniform
import numpy as np
from pipelines import Pipeline, sources

def spec(password: str = "", epochs: int = 1):
    if password.startswith("bad"):
        raise ValueError(f"cannot log in by {password}")
    train = Pipeline(sources.arrays(x=np.zeros((8, 2), np.float32)))
    search = Search({"lr": uniform(0, 1)}, storage=f"postgresql://ann:{password}@host/db")
    return Ensemble(name="login", recipe=len, search=search, train=train, epochs=epochs)
"""


def with_secret(tmp_path: Path, value: str) -> tuple[Path, str]:
    (tmp_path / "login.py").write_text(LOGIN)
    (tmp_path / "secret").write_text(value + "\n")
    return tmp_path / "login.py", f"password=@{tmp_path / 'secret'}"


def test_a_value_is_read_from_a_file_where_the_run_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, setting = with_secret(tmp_path, "s3cret w@rd")
    monkeypatch.setenv("HOME", str(tmp_path))
    for given_as, value in (
        (setting, "s3cret w@rd"),
        ("password=@~/secret", "s3cret w@rd"),
        ("password=@@home", "@home"),
    ):
        search = load_spec(path, [given_as]).search
        assert search is not None and search.storage == f"postgresql://ann:{value}@host/db"


def test_no_error_says_what_was_in_the_file(tmp_path: Path) -> None:
    path, setting = with_secret(tmp_path, "bad s3cret")
    with pytest.raises(SpecError, match=r"line 8: ValueError: cannot log in by \*\*\*") as caught:
        load_spec(path, [setting])
    assert "s3cret" not in "".join(traceback.format_exception(caught.value))
    assert "--set epochs takes an integer, got what is in " in refusal(path, setting.replace("password", "epochs"))
    absent = f"{tmp_path}/absent"
    assert f"--set password: {absent} cannot be read: No such file or directory" in refusal(
        path, f"password=@{absent}"
    )
    assert "the spec has no option 'pasword'" in refusal(path, f"pasword=@{absent}")
