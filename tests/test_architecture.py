"""The laws of the house that can be read off the source: who imports whom, who unpickles, who sleeps.

The files are parsed, not run, so an import inside a function or under TYPE_CHECKING is seen, and counts, as well.
"""

from __future__ import annotations

import ast
import functools
import gc
import graphlib
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from private_names import nodes, own_privates, privates

ROOT = Path(__file__).resolve().parents[1]

# From the ground up, as CONTRIBUTING.md's map says. A file imports only from its own floor and from those
# before it. A room is a file or a folder of that name; a new one is put where it belongs before the tests pass.
HOUSE = {
    "pipelines": """
        checks environment errors fingerprint ipc order samples weights / providers / stage stages / sources /
        sampling / description / prepare / verification / cache shm / workers / loader / pipeline / shared_stages /
        feeder / multinode / __init__""",
    "ensemble": """
        events interrupts / spec / user_code / meter / comm / store / schedule / train / base integrations /
        combine / artifact / search / executors / reporting / controller /
        __init__ api distillation driven_run extend inspection refit result run / cli / __main__""",
}
FLOORS = {package: [floor.split() for floor in floors.split("/")] for package, floors in HOUSE.items()}

# Unpickling runs whatever the bytes say, so each place that does it says from whom the bytes come.
MAY_UNPICKLE = {
    "pipelines/ipc/memory_pickle.py": "memory that the process's own parent made and handed down",
    "pipelines/sources/_arrow_files.py": "an Arrow array that the source itself has pickled",
    "ensemble/integrations/lightning.py": "the best checkpoint, which the member's own Trainer has written",
    "ensemble/store/declaration.py": "ensemble.pkl, after its owner was found to be the user",
    "ensemble/base/frozen.py": "tensors with weights_only=True, of a file that nobody but the user may write",
    "ensemble/artifact/program.py": "with weights_only=True, to see that there is nothing but tensors",
    "ensemble/train/pickled.py": "what the user told torch.load to run, or a checkpoint of the user's own",
}

HEAVY = ("torch", "ray", "optuna", "pyarrow", "cv2", "sklearn", "rich", "pandas", "scipy")
LOGGER_LIBRARIES = ("tensorboard", "mlflow", "wandb")  # which have processes of their own
HEAVY += LOGGER_LIBRARIES
LOGGERS = "ensemble/reporting/loggers/"


@dataclass(frozen=True)
class Import:
    """One imported name, in full (`pipelines.shm.ring.Ring`), and where."""

    name: str
    where: str

    @property
    def package(self) -> str:
        return self.name.partition(".")[0]


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_collected() -> Iterator[None]:
    """Circles are not looked for among a million nodes again and again: that takes longer than to parse them."""
    gc.disable()
    yield
    gc.enable()


def files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def last_name(node: ast.expr) -> str:
    return str(getattr(node, "attr", getattr(node, "id", "")))


def imports(tree: ast.Module, path: str) -> Iterator[Import]:
    """Every import of a file: statements, relative ones resolved, and import_module("...") calls."""
    package = Path(path).parent.parts
    for node in nodes(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            names = [f"{module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and last_name(node.func) in ("import_module", "__import__"):
            names = [a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        for name in names:
            yield Import(name, f"{path}:{getattr(node, 'lineno', 0)}")


def calls_of(tree: ast.Module, modules: set[str], functions: set[str]) -> Iterator[int]:
    """Lines that use one of `functions` of one of `modules`, under whatever name they were imported."""
    aliases: set[str] = set()
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            aliases |= {a.asname or a.name for a in node.names if a.name in modules}
        elif (
            isinstance(node, ast.ImportFrom)
            and node.module in modules
            and functions & {a.name for a in node.names}
        ):
            yield node.lineno
    for node in nodes(tree):
        if isinstance(node, ast.Attribute) and node.attr in functions and ast.unparse(node.value) in aliases:
            yield node.lineno


def unpickles(tree: ast.Module) -> Iterator[int]:
    """Lines that may run code found in data: pickle and its kin, torch.load, numpy's allow_pickle."""
    yield from calls_of(tree, {"pickle", "_pickle", "cloudpickle", "dill"}, {"load", "loads", "Unpickler"})
    yield from calls_of(tree, {"torch", "joblib"}, {"load"})
    for node in nodes(tree):
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            yield node.value.lineno


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@functools.cache
def imports_of(path: Path) -> tuple[Import, ...]:
    return tuple(imports(parse(path), name_of(path)))


def floor_of(package: str, room: str) -> int | None:
    return next((level for level, rooms in enumerate(FLOORS[package]) if room in rooms), None)


def room_of(path: Path) -> tuple[str, str]:
    package, first, *_ = path.relative_to(ROOT).parts
    return package, first.removesuffix(".py")


def rooms_of(path: Path, imported: Iterable[Import]) -> Iterator[tuple[str, str]]:
    package, own = room_of(path)
    for found in imported:
        target = found.name.split(".")[1] if "." in found.name else "__init__"
        if found.package != package or (target.startswith("__") and target not in ("__init__", "__main__")):
            continue  # `from ensemble import __version__`
        if floor_of(package, target) is None:
            target = "__init__"  # a public name of the package's face, such as `from pipelines import Pipeline`
        if target != own:
            yield target, found.where


def wrong_way(path: Path, imported: Iterable[Import]) -> Iterator[str]:
    package, own = room_of(path)
    own_floor = floor_of(package, own)
    assert own_floor is not None
    for target, where in rooms_of(path, imported):
        floor = floor_of(package, target)
        assert floor is not None
        if floor > own_floor:
            yield f"{where}: {own} imports {target}, which lies below it (see FLOORS)"


def test_pipelines_imports_neither_ray_nor_ensemble() -> None:
    imported = [one for path in files("pipelines") for one in imports_of(path)]
    assert [one.where for one in imported if one.package in ("ray", "ensemble", "benchmarks")] == []


def test_within_ensemble_only_executors_ray_imports_ray() -> None:
    """A logger's library only its own file, and nothing the studies of papers, which are not installed."""
    imported = [one for path in files("ensemble") for one in imports_of(path)]
    places = {"ray": "ensemble/executors/ray", **{name: f"{LOGGERS}{name}.py" for name in LOGGER_LIBRARIES}}
    assert places.keys() <= {one.package for one in imported}
    assert [one.where for one in imported if not one.where.startswith(places.get(one.package, ""))] == []
    assert [one.where for one in imported if one.package == "benchmarks"] == []


@pytest.mark.parametrize("package", sorted(FLOORS))
def test_every_file_has_its_floor_and_imports_only_from_rooms_above_and_in_no_circle(package: str) -> None:
    homeless = [name_of(path) for path in files(package) if floor_of(*room_of(path)) is None]
    assert homeless == [], "put these rooms where they belong in FLOORS of tests/test_architecture.py"
    assert [line for path in files(package) for line in wrong_way(path, imports_of(path))] == []
    rooms: dict[str, set[str]] = {}
    for path in files(package):
        rooms.setdefault(room_of(path)[1], set()).update(room for room, _ in rooms_of(path, imports_of(path)))
    graphlib.TopologicalSorter(rooms).prepare()  # its error names the circle


@pytest.mark.parametrize("package", sorted(FLOORS))
def test_no_two_public_classes_of_a_package_have_one_name(package: str) -> None:
    trees = map(parse, files(package))
    found = Counter(node.name for tree in trees for node in nodes(tree) if isinstance(node, ast.ClassDef))
    assert [name for name, count in found.items() if count > 1 and not name.startswith("_")] == []


def test_nothing_is_unpickled_but_where_a_reason_is_given() -> None:
    paths = [*files("pipelines"), *files("ensemble")]
    found = {name_of(path): lines for path in paths if (lines := sorted(set(unpickles(parse(path)))))}
    assert {name: lines for name, lines in found.items() if name not in MAY_UNPICKLE} == {}
    assert [name for name in MAY_UNPICKLE if name not in found] == [], "no longer unpickles: take it off the list"


def test_private_api_of_libraries_is_used_only_where_it_is_accounted_for() -> None:
    trees = {name_of(path): parse(path) for package in FLOORS for path in files(package)}
    ours = set[str]().union(*map(own_privates, trees.values()))
    found = {name: sorted(set(privates(tree, ours))) for name, tree in trees.items()}
    elsewhere = {name: uses for name, uses in found.items() if uses and not name.endswith("_compat.py")}
    assert elsewhere == {}, "use a public API, or put it into the library's _compat.py (see tests/test_compat.py)"
    assert sum(bool(uses) for name, uses in found.items() if name.endswith("_compat.py")) > 3, "they are seen"


def test_nothing_sleeps_in_the_pipelines_but_between_two_trials_to_read_a_record() -> None:
    found = {name_of(path): list(calls_of(parse(path), {"time"}, {"sleep"})) for path in files("pipelines")}
    assert [name for name, lines in found.items() if lines] == ["pipelines/prepare/transient.py"]


def test_importing_a_package_loads_no_heavy_library() -> None:
    modules = "pipelines, ensemble.api, ensemble.controller.controller"  # with their packages
    code = f"import sys, {modules}; print(*sorted(set(sys.modules) & set({HEAVY!r})))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, [], "")


def test_every_text_says_its_encoding() -> None:
    """Not the locale; ruff's rule knows only what is written as `Path(...)`."""
    found = []
    for path in (path for package in FLOORS for path in files(package)):
        for node in nodes(parse(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                arguments = len(node.args) + sum(keyword.arg == "encoding" for keyword in node.keywords)
                if arguments < {"read_text": 1, "write_text": 2}.get(node.func.attr, 0):
                    found.append(f"{name_of(path)}:{node.lineno}")
    assert found == []


def test_a_break_of_a_law_is_seen() -> None:
    """A law that its check cannot see broken is no law."""
    for source, name in (
        ("def f():\n    from ray.util import placement_group", "ray.util.placement_group"),
        ("import typing\nif typing.TYPE_CHECKING:\n    import ray", "ray"),
        ("import importlib\nimportlib.import_module('ray.util')", "ray.util"),
        ("from ..ring import Ring", "pipelines.ring.Ring"),
    ):
        assert name in [found.name for found in imports(ast.parse(source), "pipelines/feed/x.py")]
    for source in ("import cloudpickle as cp\ncp.load(f)", "from pickle import loads as read"):
        assert list(unpickles(ast.parse(source))) != []
    for room, source in (
        ("schedule.py", "if TYPE_CHECKING:\n    from ensemble.executors import Node"),
        ("store.py", "from ensemble import submit"),
    ):
        assert list(wrong_way(ROOT / "ensemble" / room, imports(ast.parse(source), f"ensemble/{room}"))) != []
    for source in ("import torch\ntorch.optim.Adam(p)._step", "def f(trial): return trial._trial_id"):
        assert list(privates(ast.parse(source), {"_ours"})) != []
