"""What is shared, kept on disk or attached to is never another pipeline's: real feeders, caches and runs."""

from __future__ import annotations

import importlib
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_pipes import leaves_nothing, nameless  # noqa: F401

from pipelines import Feeder, Pipeline, PipelineError, attach, find_shared_stages, sources


def values(pipeline: Pipeline, address: str) -> list[int]:
    return sorted(int(x) for batch in attach(address, pipeline, 4, epochs=1) for x in batch["x"])


def test_a_helper_that_was_edited_renews_the_cache_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "staged.py").write_text("import helped\ndef stage(s): return {**s, 'x': helped.f(s['x'])}\n")
    for factor in (2, 3, 3):
        (tmp_path / "helped.py").write_text(f"def f(x): return x * {factor}\n")
        for name in ("staged", "helped"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.invalidate_caches()
        pipeline = Pipeline(sources.arrays(id="eight", x=np.arange(8)))
        pipeline = pipeline.map(importlib.import_module("staged").stage)
        with Feeder(pipeline, cache="disk", cache_dir=tmp_path / "cache") as feeder:
            assert values(pipeline, feeder.address) == [factor * n for n in range(8)]
    assert len(list((tmp_path / "cache").glob("*/samples"))) == 2, "the third one found that of the second"
    for name in ("staged", "helped"):
        sys.modules.pop(name, None)


def test_an_unsure_stage_that_is_no_common_object_is_not_shared_and_it_is_said_why(monkeypatch: Any) -> None:
    monkeypatch.delenv("NAMELESS", raising=False)
    base = Pipeline(sources.arrays(id="eight", x=np.arange(8)))
    with pytest.warns(
        UserWarning, match=r"up to the source are .*nameless reads the environment.* id= or version="
    ):
        assert not find_shared_stages([base.map(nameless), base.map(nameless)]).stages
    begun = base.map(nameless)
    ends = [begun.map(lambda s: {**s, "y": 1}), begun.map(lambda s: {**s, "y": 2})]
    assert len(find_shared_stages(ends).stages) == 1
    versions = [base.map(nameless, version=version) for version in (1, 1, 2)]
    assert find_shared_stages(versions[:2]) is versions[0] and not find_shared_stages(versions).stages


class Lazy:
    """A stage that makes a table when it is first used, and counts."""

    def __init__(self, offset: int) -> None:
        self.offset, self.calls = offset, 0
        self.table: list[int] | None = None

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        self.calls += 1
        if self.table is None:
            self.table = [n + self.offset for n in range(8)]
        return {**sample, "x": np.int64(self.table[int(sample["x"])])}


def test_a_stage_whose_state_changes_while_it_is_used_is_the_same() -> None:
    def build(offset: int) -> Pipeline:
        return Pipeline(sources.arrays(id="eight", x=np.arange(8)), seed=3).map(Lazy(offset))

    used, other = build(1), build(2)
    before = used.fingerprint
    assert len(list(used.loader(4, 1))) == len(list(other.loader(4, 1))) == 2
    copy = pickle.loads(pickle.dumps(used))
    assert used.fingerprint == copy.fingerprint == build(1).fingerprint == before != other.fingerprint
    with Feeder(used) as feeder:
        assert values(build(1), feeder.address) == [n + 1 for n in range(8)]
        with pytest.raises(PipelineError, match="the pipelines differ: stage 0 Lazy"):
            attach(feeder.address, build(2), 4, epochs=1)


LATER = """
class Stage:
    factor = None
    def __call__(self, sample): return helped(HELPER, self.factor, sample)
def helped(helper, factor, sample): return dict(sample, x=(helper or OTHER or int)(sample["x"]) * (factor or 1))
def twice(x): return 2 * x
def thrice(x): return 3 * x
def read(x): return x + len(open("/dev/null").read())
OTHER = {other}
"""


@pytest.mark.parametrize("what", ["helper", "helper before another", "missing", "object", "class"])
def test_what_is_set_between_mapping_and_use_counts(what: str) -> None:
    def build(name: str) -> Pipeline:
        module = types.ModuleType("set_later")
        if what != "missing":
            module.HELPER = None
        exec(LATER.format(other=name if what == "helper before another" else None), module.__dict__)
        stage = module.Stage()
        mapped = Pipeline(sources.arrays(id="eight", x=np.arange(8))).map(stage)
        if what == "object":
            stage.factor = len(name)
        elif what == "class":
            module.Stage.factor = len(name)
        else:
            module.HELPER = abs if what == "helper before another" else getattr(module, name)
        return mapped

    assert build("twice").fingerprint == build("twice").fingerprint != build("thrice").fingerprint
    if what == "helper":
        assert "reads files (open)" in str(build("read").why_unsure)
