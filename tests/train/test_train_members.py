"""Two members of two workers each, side by side in four processes: what one does in a step is its own affair."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import train_child as cases  # noqa: E402
from ranks import run_ranks  # noqa: E402
from torch import nn  # noqa: E402

from ensemble.comm.gradients import GradientExchange  # noqa: E402
from ensemble.comm.torch_dist import connect  # noqa: E402
from ensemble.spec import Recipe  # noqa: E402
from ensemble.store import weights_sha256  # noqa: E402
from ensemble.train import Inbox, work  # noqa: E402

SCALE = 2.0**16
#: Member -> its loss; that of the first overflows at sample 7, which one of its two workers has.
LOSSES = {"overflowing": cases.overflowing, "sound": cases.loss}
Said = list[dict[str, Any]]


def sum_gradients(rank: int, folder: Path) -> dict[str, list[float]]:
    """2048 + 1 + 1 + 1, and a sum that passes through what fp16 cannot hold, as gradients of fp16 and of fp32."""
    comm = connect((folder / "four").as_uri(), rank=rank, world=4, device=torch.device("cpu"), interface="lo")
    weights = {"fp16": nn.Parameter(torch.zeros(2).half()), "fp32": nn.Parameter(torch.zeros(2))}
    exchange = GradientExchange(list(weights.values()), comm)
    own = [[2048.0, 40000.0], [1.0, 40000.0], [1.0, -40000.0], [1.0, -39968.0]][rank]
    for weight in weights.values():
        weight.grad = torch.tensor(own).half().to(weight.dtype)
    exchange.finish()
    comm.close()
    return {name: weight.grad.tolist() for name, weight in weights.items() if weight.grad is not None}


def train(name: str, folder: Path, rank: int = 0, workers: int = 1) -> dict[str, Any]:
    """What a rank of a member with a static loss scale in fp16 did and said, and the weights that it ends with."""
    models: list[nn.Module] = []

    def keeping(params: dict[str, Any]) -> nn.Module:
        models.append(cases.plain(params))
        return models[0]

    recipe = Recipe(model=keeping, loss=LOSSES[name])
    ensemble = cases.declare(recipe, workers, precision="fp16", loss_scale=SCALE)
    events: list[dict[str, Any]] = []
    meet = (folder / f"meet-{name}").as_uri() if workers > 1 else None
    outcome = work(
        cases.make_job(folder / name, ensemble, rank=rank, rendezvous=meet), ensemble, events.append, Inbox()
    )
    epochs = [event for event in events if event["type"] == "epoch"]
    return {"outcome": outcome, "epochs": epochs, "weights": weights_sha256(models[0].state_dict())}


def take_part(number: int, folder: Path) -> dict[str, Any]:
    """One of four processes: all sum gradients, then two by two train."""
    summed = sum_gradients(number, folder)
    name = list(LOSSES)[number // 2]
    return {"sum": summed, name: train(name, folder, number % 2, workers=2)}


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Said:
    """What each process said."""
    return run_ranks(4, take_part, tmp_path_factory.mktemp("members"))


def test_the_gradients_of_four_ranks_are_summed_in_fp32(four: Said) -> None:
    half = torch.tensor([2048.0, 1.0, 1.0, 1.0]).half()
    assert (half[0] + half[1] + half[2] + half[3]).item() == 2048.0, "which is what a sum in half precision loses"
    # fp16 has no 2051: the sum of fp16 gradients is rounded to the next even one, once, at the end
    assert [said["sum"] for said in four] == [{"fp16": [2052.0, 32.0], "fp32": [2051.0, 32.0]}] * 4


def test_an_overflow_skips_the_step_on_all_ranks_of_its_member_and_of_no_other(four: Said) -> None:
    for name, ranks, skipped in (("overflowing", four[:2], 1), ("sound", four[2:], 0)):
        assert [said[name]["outcome"] for said in ranks] == ["finished"] * 2
        assert [epoch["skipped_steps"] for epoch in ranks[0][name]["epochs"]] == [skipped] * 3
        assert ranks[0][name]["weights"] == ranks[1][name]["weights"], "both ranks took the same steps"


@pytest.mark.parametrize("name", LOSSES)
def test_skipped_steps_change_nothing(four: Said, tmp_path: Path, name: str) -> None:
    """The member alone, in one worker, skips the same steps and learns the same from the others."""
    alone = train(name, tmp_path)
    assert alone["outcome"] == "finished"
    together = four[0 if name == "overflowing" else 2][name]
    for mine, other in zip(together["epochs"], alone["epochs"], strict=True):
        assert mine["skipped_steps"] == other["skipped_steps"]
        assert mine["metrics"] == pytest.approx(other["metrics"], rel=2e-3), "fp16 rounds by the batch's shape"
