"""Compiled models: checkpoints, weights and names are those of any other."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit import train_child as cases
from kit.loop_cases import checkpoint, finished

import ensemble
from ensemble.spec import Recipe
from pipelines import Pipeline, sources


@pytest.mark.parametrize(
    "backend",
    ["eager", pytest.param("aot_eager", marks=pytest.mark.more), pytest.param("inductor", marks=pytest.mark.slow)],
)
def test_a_compiled_model_has_the_checkpoint_of_any_other(tmp_path: Path, backend: str) -> None:
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler, and there is no g++")
    recipe = Recipe(
        model=lambda params: cases.Net(norm=True), loss=cases.loss, task="classification"
    )  # dropout would draw otherwise
    plain = finished(tmp_path / "plain", recipe, epochs=2)
    made = finished(tmp_path / "made", recipe, epochs=2, compile={"name": "default", "backend": backend})
    ours, theirs = checkpoint(tmp_path / "made")["model"], checkpoint(tmp_path / "plain")["model"]
    assert list(ours) == list(theirs)
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-5)
    assert made["metrics"]["loss"] == pytest.approx(plain["metrics"]["loss"], rel=1e-3)


def test_a_model_is_compiled(tmp_path: Path) -> None:
    """Its forward pass in Python runs while it is traced, and not at each of 10 steps and 4 evaluations."""
    calls = 0

    class Counted(cases.Net):
        def forward(self, x: Any) -> Any:
            if not torch.compiler.is_compiling():
                nonlocal calls
                calls += 1
            return super().forward(x)

    options: dict[str, Any] = {"epochs": 2, "valid": None, "train": cases.data(25)}
    recipe = Recipe(model=lambda params: Counted(), loss=cases.loss, task="classification")
    looks = 2  # at the first batch once more: the whole, and its first half
    finished(tmp_path / "plain", recipe, **options)
    assert calls == 10 + looks
    finished(tmp_path / "made", recipe, compile={"name": "default", "backend": "eager"}, **options)
    assert calls <= 10 + 2 * looks
    assert not list(tmp_path.rglob("compiled/*/inductor/*")), "nothing was compiled to files"


def test_kernels_are_kept_with_the_run_and_the_process_is_left_as_it_was(tmp_path: Path, monkeypatch: Any) -> None:
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    seen: list[str | None] = []

    def loss(model: Any, batch: Any) -> Any:
        seen.append(os.environ.get(names[0]))
        return cases.loss(model, batch)

    recipe = Recipe(model=cases.plain, loss=loss, task="classification")
    for run in ("one", "two"):
        finished(tmp_path / run, recipe, epochs=1, compile={"name": "default", "backend": "eager"})
        (folder,) = set(seen)
        assert folder is not None and Path(folder).parents[1] == tmp_path / run / "compiled"
        assert stat.S_IMODE(Path(folder).parents[1].stat().st_mode) == 0o700, (
            "what is loaded from there is the user's"
        )
        assert not [name for name in names if name in os.environ]
        seen.clear()
    elsewhere = str(tmp_path / "elsewhere")
    monkeypatch.setenv(names[0], elsewhere)
    finished(tmp_path / "three", recipe, epochs=1, compile={"name": "default", "backend": "eager"})
    assert set(seen) == {elsewhere} == {os.environ[names[0]]}


@pytest.mark.more
def test_the_next_start_of_a_run_compiles_nothing_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler, and there is no g++")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    train = Pipeline(sources.arrays(x=np.eye(16, 6, dtype=np.float32), label=np.arange(16) % 3), seed=0)
    declared = ensemble.Ensemble(
        name="compiled",
        recipe=Recipe(model=cases.plain, loss=cases.loss, task="classification"),
        members=[{"lr": 0.1}],
        train=train,
        epochs=1,
        batch_size=8,
        compile=True,
        devices="cpu",
    )
    ensemble.submit(declared, tmp_path / "run", "local").wait()
    kernels = {path: path.stat().st_mtime_ns for path in (tmp_path / "run" / "compiled").rglob("*.so")}
    assert kernels
    result = ensemble.resume(tmp_path / "run", epochs=2).wait()
    assert {row["state"] for row in result.members} == {"finished"}
    assert kernels == {path: path.stat().st_mtime_ns for path in (tmp_path / "run" / "compiled").rglob("*.so")}
