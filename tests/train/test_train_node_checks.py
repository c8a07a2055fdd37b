"""What members do once on a node."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ensemble import Recipe
from ensemble.train.node_checks import NODE_DIRECTORY
from ensemble.train.recipe import build_model


def test_the_first_member_of_a_node_downloads_for_the_others(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv(NODE_DIRECTORY, str(tmp_path))
    downloads, all_at_once = [], threading.Barrier(4)

    def model(params: dict[str, Any]) -> nn.Module:
        file = tmp_path / "weights.pt"
        if not file.exists():
            downloads.append(1)
            with_others(all_at_once)
            torch.save({}, file)
        return nn.Identity()

    member: Any = SimpleNamespace(params={})
    recipe = Recipe(model=model, loss="cross_entropy")
    threads = [threading.Thread(target=build_model, args=(recipe, member)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert downloads == [1]


def with_others(barrier: threading.Barrier) -> None:
    with contextlib.suppress(threading.BrokenBarrierError):
        barrier.wait(0.5)
