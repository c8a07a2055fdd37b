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

import pipelines
from pipelines import Feeder, Pipeline, PipelineError, attach, sources, stages, weights
from pipelines.fingerprint import SCHEME, describe, describe_ours, known_as
from pipelines.loader.collate import FromSamples
from pipelines.order import epoch_order
from pipelines.sources._arrays import Arrays
from pipelines.stages._pictures import Albumentation, Imaged, NoArrays
from pipelines.stages._values import Cast

#: Public name -> version, of what computes something else than its version 1: runs and caches of before have other
#: data then.
RAISED = {"pipelines.sources.huggingface": 2} | {
    f"pipelines.weights.{name}": 2
    for name in ("assigned", "assigned_fold", "bootstrap", "expanding_window", "fold")
}

MADE: dict[str, Any] = {
    "binary": stages.binary("x", 8),
    "ragged": stages.ragged("x", 8),
    "text": stages.text("x", 8),
    "cast": stages.cast("x", "float32"),
    "center_crop": stages.center_crop("x", 8),
    "decode_image": stages.decode_image("x"),
    "decode_jpeg": stages.decode_jpeg("x"),
    "drop": stages.drop("x"),
    "fit": stages.fit(sources.arrays(a=np.arange(3.0))),
    "pad": stages.pad("x", length=4),
    "random_crop": stages.random_crop("x", 8, padding=1),
    "random_flip": stages.random_flip("x"),
    "random_resized_crop": stages.random_resized_crop("x", 8),
    "rename": stages.rename(x="y"),
    "resize": stages.resize("x", 8),
    "scale": stages.scale("x"),
    "select": stages.select("x"),
    "tokenize": stages.tokenize("x", ("a", "b")),
    "tv_transform": stages.tv_transform(abs, images="x"),
}

# These stay as they are for good: whoever has to change one makes every run and cache refuse its own data.
DIGESTS = {
    "cast": "51007cf53365f1498118d1085f2f2511",
    "pad": "5a8e3a96e2871c6c49ee6f9ebc0abb4d",
    "random_resized_crop": "c5ecad6f8d9fec43113db4833caac3de",
    "tokenize": "cb3f3cbcbd1c24df7c8c1ce45a507dbf",
}


def ours(name: str) -> list[Any]:
    return ["ours", name, RAISED.get(name, 1)]


def test_every_stage_is_described_by_its_public_name_and_version_and_by_no_code() -> None:
    assert set(MADE) == set(stages.__all__) - {"build_vocabulary", "mean_std"}
    for name in stages.__all__:
        assert describe(getattr(stages, name)).value == ours(f"pipelines.stages.{name}")
    for name, made in MADE.items():
        kind, what, bound = describe(made).value
        assert [kind, what] == ["dataclass", ours(f"pipelines.stages.{name}")]
        assert set(bound) <= set(vars(made)) and re.search("[0-9a-f]{32}", json.dumps(bound)) is None


def test_every_source_says_its_public_name_and_version(tmp_path: Path) -> None:
    for name in sources.__all__:
        assert describe_ours(getattr(sources, name)) == ours(f"pipelines.sources.{name}")
    for number, (name, case) in enumerate(CASES.items()):
        (tmp_path / str(number)).mkdir()
        case.write(tmp_path / str(number), rows(16))
        source = case.open(tmp_path / str(number))
        public = name.replace(",", " ").split()[0]
        assert source.identity()["source"] == ours(f"pipelines.sources.{public}")
    of_part = sources.arrays(x=np.arange(4)).take(2).identity()
    assert of_part["source"] == ours("pipelines.sources.Subset")
    assert of_part["of"]["source"] == ours("pipelines.sources.arrays")


def test_what_else_of_ours_decides_batches_has_a_version_too() -> None:
    known = {
        "pipelines.Albumentation": Albumentation,
        "pipelines.Imaged": Imaged,
        "pipelines.NoArrays": NoArrays,
        "pipelines.from_samples": FromSamples,
        "pipelines.order.BlockOrder": epoch_order.BlockOrder,
        "pipelines.order.Generators": epoch_order.Generators,
        "pipelines.order.epoch_indices": epoch_order.epoch_indices,
        "pipelines.weights.bootstrap": type(weights.bootstrap(0)),
        "pipelines.weights.fold": type(weights.fold(4, 2, 0)),
    }
    assert {name: describe_ours(each) for name, each in known.items()} == {name: ours(name) for name in known}


def test_all_that_users_import_goes_by_the_name_that_they_import_it_by() -> None:
    import ensemble
    import ensemble.combine

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

    factor = 2

    def __init__(self, columns: dict[str, Any], id: str | None, suffix: str) -> None:
        super().__init__(columns, id)
        self.suffix = suffix


class Identified(Scaled):
    def identity(self) -> Any:
        return {**super().identity(), "suffix": self.suffix}


def test_a_users_source_that_inherits_from_ours_is_described_by_its_own_code() -> None:
    texts = {"text": ["a", "b"]}
    ours, users = sources.arrays(**texts), Upper(texts, None)
    assert [users[0], ours[0]] == [{"text": "A"}, {"text": "a"}]
    assert users.identity() == Upper(texts, None).identity() != ours.identity()
    assert "function" in json.dumps(users.identity()["source"])
    assert users.take(1).identity()["of"] == users.identity()
    assert Pipeline(users).fingerprint not in (None, Pipeline(ours).fingerprint)


def test_a_users_source_is_described_with_state_of_which_its_identity_says_nothing() -> None:
    texts = {"text": ["a", "b"]}
    for kind in (Scaled, Identified):
        sure = [Pipeline(kind(texts, None, suffix)).fingerprint for suffix in "!?!"]
        assert None not in sure and sure[0] == sure[2] != sure[1]
        parts = [Pipeline(kind(texts, None, suffix).take(1)).fingerprint for suffix in "!?"]
        assert None not in parts and parts[0] != parts[1]
    assert Pipeline(Scaled(texts, None, "!"), id="texts").fingerprint is not None


def test_a_version_is_said_in_one_place() -> None:
    with pytest.raises(ValueError, match=r"pipelines\.stages\.cast is of version 1, and of 2"):
        known_as("pipelines.stages.cast", version=2)(Mine)


# --- another version of our source -----------------------------------------------------------------------

USER = """
import json, sys
import pipelines
from pipelines import stages
from pipelines.fingerprint import describe
from pipelines.stages import cast

def by_name(sample):
    return cast("x", "int64")(sample)

def by_module(sample):
    return stages.cast("x", "int64")(sample)

def by_package(sample):
    return pipelines.stages.cast("x", "int64")(sample)

def other(sample):
    return pipelines.stages.select("x")(sample)

class Mine(type(cast("x", "int64"))):
    def more(self):
        return 1

made = [stages.cast("x", "float32"), stages.pad("x", 4), by_name, by_module, by_package, other, Mine]
print(json.dumps([pipelines.__file__, *(describe(each).digest for each in made)]))
"""


def digests(
    folder: Path, edits: Mapping[str, str], installed: str = "checkout", *, move: bool = False
) -> list[str]:
    """What users' and our functions are with our source edited, in a folder of its own and another process."""
    root = folder / installed
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
    script = folder / "users.py"
    script.write_text(USER)
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    said = subprocess.check_output([sys.executable, str(script)], env=environment, cwd=folder, text=True)
    file, *found = json.loads(said)
    assert file.startswith(str(root))
    return list(found)


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return digests(tmp_path_factory.mktemp("before"), {})


@pytest.mark.parametrize(
    ("installed", "move"), [pytest.param("checkout", False, marks=pytest.mark.more), ("site-packages", True)]
)
def test_our_code_may_be_reworded_and_moved(tmp_path: Path, before: list[str], installed: str, move: bool) -> None:
    edits = {
        "a number": "any number",  # an error
        "kept": "remaining",  # a local variable
        "_as_float32": "_float_copy",  # a function
        "class Cast": "class ConvertsType",
        "-> Cast": "-> ConvertsType",
        "Cast(field": "ConvertsType(field",
        "np.asarray(value).astype": "np.asarray(a=value).astype",  # the same, said otherwise
    }
    assert digests(tmp_path, edits, installed, move=move) == before


def test_an_option_that_comes_later_changes_nothing_where_it_has_its_default(
    tmp_path: Path, before: list[str]
) -> None:
    edits = {"    truncate: Side | None\n\n    def": "    truncate: Side | None\n    later: int = 0\n\n    def"}
    assert digests(tmp_path / "one", edits) == before
    other = {
        "truncate: Side | None\n\n    def": "truncate: Side | None\n    later: int\n\n    def",
        "truncate)\n": "truncate, 3)\n",
    }
    changed = digests(tmp_path / "two", other)
    assert [i for i, (one, two) in enumerate(zip(before, changed, strict=True)) if one != two] == [1]


def test_a_raised_version_changes_ours_and_every_users_function_that_uses_it(
    tmp_path: Path, before: list[str]
) -> None:
    changed = digests(
        tmp_path, {'known_as("pipelines.stages.cast")': 'known_as("pipelines.stages.cast", version=2)'}
    )
    same = [one == two for one, two in zip(before, changed, strict=True)]
    assert same == [False, True, False, False, False, True, False]


# --- schemes ---------------------------------------------------------------------------------------------


def test_a_feeder_refuses_a_consumer_of_another_scheme_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = Pipeline(sources.arrays(x=np.arange(8, dtype=np.float32)))
    said = Pipeline.describe_for_peers

    def of_before(self: Pipeline) -> dict[str, Any]:
        return {name: value for name, value in said(self).items() if name != "scheme"}

    with Feeder(pipe) as feeder:
        assert len(list(attach(feeder.address, pipe, 4, epochs=1))) == 2
        monkeypatch.setattr(Pipeline, "describe_for_peers", of_before)
        with pytest.raises(PipelineError, match=r"another version of ray-ensemble.*install the same version"):
            list(attach(feeder.address, pipe, 4, epochs=1))


def test_a_cache_of_another_scheme_is_not_taken_up(tmp_path: Path) -> None:
    pipe = Pipeline(sources.arrays(x=np.arange(8, dtype=np.float32))).map(stages.cast("x", "float64"))
    kept = tmp_path / "cache"
    with Feeder(pipe, cache="disk", cache_dir=kept) as feeder:
        list(attach(feeder.address, pipe, 4, epochs=1))
    own = next(kept.glob("*/samples")).parent
    file = own / "samples"
    head, line, rest = file.read_bytes().partition(b"\n")
    of_before = {name: value for name, value in json.loads(head).items() if name != "scheme"}
    file.write_bytes(json.dumps(of_before).encode().ljust(len(head)) + line + rest)
    with Feeder(pipe, cache="disk", cache_dir=kept) as feeder:
        assert feeder.stats()["cache"]["samples"] == 0
        batches = [batch["x"].numpy().copy() for batch in attach(feeder.address, pipe, 4, epochs=1)]
        assert sorted(np.concatenate(batches).tolist()) == list(range(8))
    assert json.loads(file.read_bytes().partition(b"\n")[0])["scheme"] == SCHEME


NAMED = """
import sys
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
    said = subprocess.check_output([sys.executable, "named.py"], env=environment, cwd=tmp_path, text=True)
    run, imported = said.split()
    assert run == imported
