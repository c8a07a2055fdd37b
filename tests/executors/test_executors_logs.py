"""The logs of members that print much, while processes of the local executor write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ensemble
from ensemble import Ensemble, Recipe
from ensemble.cli.parser import main
from ensemble.store import RunDir, member_log
from pipelines import Pipeline, sources

torch = pytest.importorskip("torch")

LIMIT = 2**20


def model(params: dict[str, Any]) -> Any:
    return torch.nn.Linear(4, 3)


def loss(model: Any, batch: Any) -> Any:
    for number in range(20_000):
        print(f"step {number} of a member that prints in every step what nobody reads")
    if len(batch["x"]) == 4:
        raise ValueError("the reason")
    return torch.nn.functional.cross_entropy(model(batch["x"]), batch["label"], reduction="none")


@pytest.mark.more  # of a log alone: tests/store/test_store_member_log.py
def test_the_log_of_a_member_that_prints_without_end_is_bounded_and_says_why_it_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("HEAD_BYTES", LIMIT // 16), ("TAIL_BYTES", LIMIT // 4), ("LIMIT_BYTES", LIMIT)):
        monkeypatch.setattr(member_log, name, value)
    x = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    data = Pipeline(sources.arrays(x=x, label=np.arange(20) % 3))
    recipe = Recipe(model=model, loss=loss)
    options: dict[str, Any] = {"epochs": 1, "batch_size": 8, "retries": 0, "sharing": "independent"}
    declared = Ensemble(name="printing", recipe=recipe, train=data, members=[{"lr": 0.1}], **options)
    run = ensemble.submit(declared, tmp_path, executor="local")
    run.wait()
    log = RunDir(tmp_path).log("member-0")
    assert log.stat().st_size < LIMIT // 2
    text = run.logs("member-0")
    assert "step 0 of" in text and "bytes of output are left out here" in text
    for end in (text[-LIMIT // 8 :], run.logs("member-0", lines=100)):
        assert "step 19999 of" in end and "ValueError: the reason" in end
    capsys.readouterr()
    assert main(["logs", str(tmp_path), "member-0", "--lines", "100"]) == 0
    assert capsys.readouterr().out.splitlines() == run.logs("member-0", lines=100).splitlines()
    assert main(["logs", str(tmp_path), "member-0"]) == 0
    assert len(capsys.readouterr().out) == pytest.approx(len(text), abs=10)
