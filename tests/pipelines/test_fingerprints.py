"""What is ours goes by name, version and bound values in fingerprints: its code may be reworded and moved."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from source_cases import CASES, rows

import ensemble
import ensemble.combine
import pipelines
from pipelines import Feeder, Pipeline, attach, sources, stages, weights
from pipelines.fingerprint import SCHEME, describe, describe_ours, known_as
from pipelines.loader.collate import FromSamples
from pipelines.order import epoch_order
from pipelines.sources._arrays import Arrays
from pipelines.stages._pictures import Albumentation, Imaged, NoArrays
from pipelines.stages._values import Cast

MADE: dict[str, Any] = {
    "cast": stages.cast("x", "float32"),
    "fit": stages.fit(sources.arrays(a=np.arange(3.0))),
    "pad": stages.pad("x", length=4),
    "random_crop": stages.random_crop("x", 8, padding=1),
    "rename": stages.rename(x="y"),
    "tokenize": stages.tokenize("x", ("a", "b")),
    "tv_transform": stages.tv_transform(abs, images="x"),
}
for name in ("binary", "center_crop", "ragged", "random_resized_crop", "resize", "text"):
    MADE[name] = getattr(stages, name)("x", 8)
for name in ("decode_image", "decode_jpeg", "drop", "random_flip", "scale", "select"):
    MADE[name] = getattr(stages, name)("x")
# These stay as they are for good: whoever has to change one makes every run and cache refuse its own data.
DIGESTS = {
    "cast": "51007cf53365f1498118d1085f2f2511",
    "pad": "5a8e3a96e2871c6c49ee6f9ebc0abb4d",
    "random_resized_crop": "c5ecad6f8d9fec43113db4833caac3de",
    "tokenize": "cb3f3cbcbd1c24df7c8c1ce45a507dbf",
}


def is_ours(described: Any, name: str) -> bool:
    """Whether it is described by this public name and a version."""
    kind, what, version = described
    return [kind, what] == ["ours", name] and isinstance(version, int)


def test_every_stage_is_described_by_its_public_name_and_version_and_by_no_code() -> None:
    assert set(MADE) == set(stages.__all__) - {"build_vocabulary", "mean_std"}
    for name in stages.__all__:
        assert is_ours(describe(getattr(stages, name)).value, f"pipelines.stages.{name}")
    for name, made in MADE.items():
        kind, what, bound = describe(made).value
        assert kind == "dataclass" and is_ours(what, f"pipelines.stages.{name}")
        assert set(bound) <= set(vars(made)) and re.search("[0-9a-f]{32}", json.dumps(bound)) is None


def test_every_source_and_what_else_decides_batches_has_its_public_name_and_a_version(tmp_path: Path) -> None:
    for name, kind in ((name, getattr(sources, name)) for name in sources.__all__):
        assert is_ours(describe_ours(kind), f"pipelines.sources.{name}")
    for number, (name, case) in enumerate(CASES.items()):
        (tmp_path / str(number)).mkdir()
        case.write(tmp_path / str(number), rows(16))
        source = case.open(tmp_path / str(number))
        assert is_ours(source.identity()["source"], f"pipelines.sources.{name.replace(',', ' ').split()[0]}")
    of_part = sources.arrays(x=np.arange(4)).take(2).identity()
    assert is_ours(of_part["source"], "pipelines.sources.Subset")
    assert is_ours(of_part["of"]["source"], "pipelines.sources.arrays")
    made: list[tuple[Any, str]] = [(kind, kind.__name__) for kind in (Albumentation, Imaged, NoArrays)]
    of_order = (epoch_order.BlockOrder, epoch_order.Generators, epoch_order.epoch_indices)
    made += [*((kind, f"order.{kind.__name__}") for kind in of_order), (FromSamples, "from_samples")]
    made += [(type(weights.bootstrap(0)), "weights.bootstrap"), (type(weights.fold(4, 2, 0)), "weights.fold")]
    assert all(is_ours(describe_ours(kind), f"pipelines.{name}") for kind, name in made)


def test_all_that_users_import_goes_by_the_name_that_they_import_it_by() -> None:
    for package in (pipelines, ensemble, ensemble.combine):
        for name in package.__all__:
            public = getattr(package, name)
            if callable(public) and (package, name) != (ensemble, "load"):  # it is `ensemble.combine.load`, too
                assert describe_ours(public)[1] == f"{package.__name__}.{name}"


def test_digests_stay_for_good() -> None:
    assert {name: describe(MADE[name]).digest for name in DIGESTS} == DIGESTS
    whole = Pipeline(sources.arrays(id="records", x=np.arange(4)), seed=3).map(MADE["cast"]).map(MADE["pad"])
    assert whole.fingerprint == "493d07aa0266974736a9ab139722b2ed"


def test_bound_values_and_another_stage_make_another_digest() -> None:
    made = [stages.cast("x", "float32"), stages.cast("y", "float32"), stages.cast("x", "float64")]
    made += [stages.select("x"), stages.drop("x"), *(functools.partial(stages.cast, name) for name in "xy")]
    made += [stages.decode_jpeg("x"), stages.decode_jpeg("x", max_pixels=7), *map(weights.bootstrap, (1, 2))]
    assert len({describe(value).digest for value in made}) == len(made)
    with pytest.raises(ValueError, match=r"pipelines\.stages\.cast is of version 1, and of 2"):
        known_as("pipelines.stages.cast", version=2)(Mine)


@dataclass(frozen=True)
class Mine(Cast):
    """A user's class that inherits from ours."""

    offset: int = 0

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        cast = Cast.__call__(self, sample)
        return {**cast, self.field: cast[self.field] + self.offset}


def test_a_users_class_that_inherits_from_ours_is_its_own_code_and_ours_by_name() -> None:
    (kind, cls, bound), parts = describe(Mine("x", "int64", offset=3)).value
    assert kind == "dataclass" and bound == {"field": "x", "dtype": "int64", "offset": 3}
    _, name, defined, bases = parts[cls[1]]
    assert name == "Mine" and bases[0] == ["ours", "pipelines.stages.cast", 1]
    assert parts[defined["__call__"][1]][:2] == ["function", "Mine.__call__"]
    (field,) = defined["fields"]  # the inherited ones are ours
    assert field == ["offset", [True, True, True, None, False], ["default", 0], "none"]


class Upper(Arrays):
    """A user's source that reads other records than ours and inherits its identity."""

    def _read(self, index: int) -> dict[str, Any]:
        return {name: value.upper() for name, value in super()._read(index).items()}


class Scaled(Upper):
    """A user's source with an attribute that the inherited identity does not cover."""

    def __init__(self, columns: dict[str, Any], suffix: str) -> None:
        super().__init__(columns, None)
        self.suffix = suffix


def test_a_users_source_that_inherits_from_ours_is_described_by_its_own_code_and_all_its_state() -> None:
    texts = {"text": ["a", "b"]}
    ours, users = sources.arrays(**texts), Upper(texts, None)
    assert [users[0], ours[0]] == [{"text": "A"}, {"text": "a"}]
    assert users.identity() == Upper(texts, None).identity() != ours.identity()
    assert "function" in json.dumps(users.identity()["source"])
    assert users.take(1).identity()["of"] == users.identity()
    assert Pipeline(users).fingerprint not in (None, Pipeline(ours).fingerprint)
    for part in (2, 1):
        sure = [Pipeline(Scaled(texts, suffix).take(part)).fingerprint for suffix in "!?!"]
        assert None not in sure and sure[0] == sure[2] != sure[1]


USER = """
import json, sys
import pipelines
from pipelines import stages
from pipelines.fingerprint import describe
from pipelines.stages import cast

def by_name(sample): return cast("x", "int64")(sample)
def by_module(sample): return stages.cast("x", "int64")(sample)
def by_package(sample): return pipelines.stages.cast("x", "int64")(sample)
def other(sample): return pipelines.stages.select("x")(sample)

class Mine(type(cast("x", "int64"))):
    def more(self):
        return 1

made = [stages.cast("x", "float32"), stages.pad("x", 4), by_name, by_module, by_package, other, Mine]
print(json.dumps([pipelines.__file__, *(describe(each).digest for each in made)]))
"""


def digests(folder: Path, edits: Mapping[str, str], installed: str = "checkout", move: bool = False) -> list[str]:
    """What users' and our functions are with our source edited, in a folder of its own and another process."""
    root, script = folder / installed, folder / "users.py"
    shutil.copytree(Path(pipelines.__file__).parent, root / "pipelines")
    values, init = (root / "pipelines" / "stages" / name for name in ("_values.py", "__init__.py"))
    text = values.read_text()
    for old, new in edits.items():
        assert old in text
        text = text.replace(old, new)
    values.write_text(text)
    if move:
        values.rename(values.with_name("numbers.py"))
        init.write_text(init.read_text().replace("_values", "numbers"))
    script.write_text(USER)
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    output = subprocess.check_output([sys.executable, str(script)], env=environment, cwd=folder, text=True)
    file, *described = json.loads(output)
    assert file.startswith(str(root))
    return list(described)


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return digests(tmp_path_factory.mktemp("before"), {})


def test_our_code_may_be_reworded_and_moved(tmp_path: Path, before: list[str]) -> None:
    # An error, a local variable, a function, a class, and the same said otherwise.
    edits = {"a number": "any number", "kept": "remaining", "_as_float32": "_float_copy"}
    edits |= {"class Cast": "class Converts", "-> Cast": "-> Converts", "Cast(field": "Converts(field"}
    edits["values = np.asarray(value)"] = "values = np.asarray(a=value)"
    assert digests(tmp_path, edits, "site-packages", move=True) == before


AFTER = "truncate: Side | None\n\n    def"
LATER = AFTER.replace("\n\n", "\n    later: int = 0\n\n")
GIVEN = {AFTER: AFTER.replace("\n\n", "\n    later: int\n\n"), "truncate)\n": "truncate, 3)\n"}
VERSION = {'known_as("pipelines.stages.cast")': 'known_as("pipelines.stages.cast", version=2)'}
CHANGES = {"a later option at its default": ({AFTER: LATER}, []), "a later option": (GIVEN, [1])}
CHANGES["a raised version, also of what uses it"] = (VERSION, [0, 2, 3, 4, 6])


@pytest.mark.parametrize(("edits", "others"), CHANGES.values(), ids=CHANGES)
def test_what_changes_a_digest(tmp_path: Path, before: list[str], edits: Any, others: list[int]) -> None:
    changed = zip(before, digests(tmp_path, edits), strict=True)
    assert [i for i, (one, two) in enumerate(changed) if one != two] == others


def test_a_cache_of_another_scheme_is_not_taken_up(tmp_path: Path) -> None:
    pipe = Pipeline(sources.arrays(x=np.arange(8, dtype=np.float32))).map(stages.cast("x", "float64"))
    for kept in (0, 8, 0):
        with Feeder(pipe, cache="disk", cache_dir=tmp_path) as feeder:
            assert feeder.stats()["cache"]["samples"] == kept
            assert len(list(attach(feeder.address, pipe, 4, epochs=1))) == 2
        (file,) = tmp_path.glob("*/samples")
        head, line, records = file.read_bytes().partition(b"\n")
        assert json.loads(head)["scheme"] == SCHEME
        if kept:
            of_before = {name: value for name, value in json.loads(head).items() if name != "scheme"}
            file.write_bytes(json.dumps(of_before).encode().ljust(len(head)) + line + records)


NAMED = """
from pipelines.fingerprint import describe

def stage(sample):
    return {**sample, "kind": len(type(sample).__name__)}

if __name__ == "__main__":
    import named
    print(describe(stage).digest, describe(named.stage).digest)
"""


def test_a_function_of_a_script_that_reads_a_name_is_the_same_when_imported(tmp_path: Path) -> None:
    (tmp_path / "named.py").write_text(NAMED)  # `__name__` is an attribute of types and a global of modules
    environment = {**os.environ, "PYTHONPATH": str(Path(pipelines.__file__).parents[1])}
    command = [sys.executable, "named.py"]
    run, imported = subprocess.check_output(command, env=environment, cwd=tmp_path, text=True).split()
    assert run == imported
