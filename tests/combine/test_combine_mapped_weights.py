"""Members whose weights do not fit into memory together are read from their checkpoints, with the same bits."""

from __future__ import annotations

import copy
import io
from pathlib import Path

import pytest
import torch
from execute_members import an_ensemble
from torch import nn

import ensemble


def file_of(tensor: torch.Tensor) -> str:
    """The name of the file whose page in memory holds a tensor; "" where it is none."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        span, *_, name = line.split(maxsplit=5)
        low, high = (int(end, 16) for end in span.split("-"))
        if low <= tensor.data_ptr() < high:
            return Path(name).name
    return ""


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [*model.members.parameters(), *(each for each in model.members.buffers() if each.dim())]  # type: ignore[operator,union-attr]


def test_weights_stay_in_the_checkpoints_where_memory_says_so_and_give_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = [{"lr": lr, "width": 33} for lr in (0.05, 0.1, 0.2)]
    made = an_ensemble(members, epochs=1, sharing="independent", batch_size=20, seed=3, combine="average")
    ensemble.submit(made, tmp_path / "run", "inline").wait()
    batch = {"x": torch.randn(7, 4)}
    held = ensemble.load(tmp_path / "run")
    monkeypatch.setattr("pipelines.environment.machine_limits.available_bytes", lambda: 0)
    with pytest.warns(
        UserWarning, match="the weights of 3 members are .* half of the memory .* stay in the checkpoints"
    ):
        mapped = ensemble.load(tmp_path / "run")
    for _ in range(2):
        files = {file_of(each) for each in weights(mapped)}
        assert len(files) == 1 and files.pop().startswith("checkpoint-")
        assert any(each.data_ptr() % 64 for each in weights(mapped)), "such weights are copied while they are used"
        assert torch.equal(mapped(batch), held(batch))
    assert not any(file_of(each).startswith("checkpoint-") for each in weights(held))
    assert torch.equal(copy.deepcopy(mapped)(batch), held(batch))
    with io.BytesIO() as file:
        torch.save(mapped, file)
        file.seek(0)
        assert torch.equal(torch.load(file, weights_only=False)(batch), held(batch))


@pytest.mark.more
def test_an_artifact_is_the_same_where_weights_stay_in_the_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = an_ensemble(
        [{"lr": 0.1}, {"lr": 0.2}], epochs=1, sharing="independent", batch_size=20, combine="average"
    )
    ensemble.submit(made, tmp_path / "run", "inline").wait()
    monkeypatch.setattr("ensemble.combine.loading._exceeds_memory", lambda *of: True)
    ensemble.export(
        tmp_path / "run", tmp_path / "out", uncertainty=False
    )  # compares bits of its program and the model
    assert (tmp_path / "out" / "model.pt2").exists()
