"""Runs that are gone on with: what a resume takes up again, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ensemble
from ensemble import Ensemble, Recipe
from ensemble.store import RunDir, fold, read_events
from pipelines import Pipeline, sources

torch = pytest.importorskip("torch")


def model(params: dict[str, Any]) -> Any:
    made = torch.nn.Linear(4, 3)
    made.broken = Path(params.get("broken", "/nonexistent"))
    return made


def loss(model: Any, batch: Any) -> Any:
    """With the marker `broken` the member's checkpoint cannot be written, or its name says how to fail."""
    if model.broken.exists():
        if model.broken.name == "error":
            raise KeyError("a mistake")
        Path(model.broken.read_text()).mkdir(parents=True, exist_ok=True)
    return torch.nn.functional.cross_entropy(model(batch["x"]), batch["label"], reduction="none")


def samples(n: int = 24, seed: int = 0) -> Pipeline:
    rng = np.random.default_rng(0)
    return Pipeline(
        sources.arrays(x=rng.normal(size=(n, 4)).astype(np.float32), label=np.arange(n) % 3), seed=seed
    )


def an_ensemble(members: list[Any] | None = None, **options: Any) -> Ensemble:
    given = {"train": samples(), "sharing": "independent", "epochs": 2, "batch_size": 8, "retries": 0, **options}
    recipe = Recipe(model=model, loss=loss)
    return Ensemble(name="again", recipe=recipe, members=members or [{"lr": 0.1}, {"lr": 0.2}], **given)


def members(path: Path) -> dict[str, tuple[str, int]]:
    state = fold(read_events(RunDir(path).events))
    return {member.id: (member.state, member.attempts) for member in state.members.values()}


@pytest.mark.parametrize("broken", ["disk", "error"])
def test_what_failed_is_taken_up_by_a_resume_once_it_is_mended(tmp_path: Path, broken: str) -> None:
    path, marker = tmp_path / "run", tmp_path / broken
    checkpoint = RunDir(path).checkpoint("member-1")
    marker.write_text(str(checkpoint))
    ensemble.submit(an_ensemble([{"lr": 0.1}, {"lr": 0.2, "broken": str(marker)}]), path, "inline").wait()
    assert members(path) == {"member-0": ("finished", 1), "member-1": ("failed", 1)}
    assert fold(read_events(RunDir(path).events)).members["member-1"].reason == broken

    ensemble.resume(path).wait()
    assert members(path)["member-1"] == ("failed", 2), "nothing was mended"

    marker.unlink()
    if checkpoint.is_dir():
        checkpoint.rmdir()
    ensemble.resume(path).wait()
    assert members(path) == {"member-0": ("finished", 1), "member-1": ("finished", 3)}
