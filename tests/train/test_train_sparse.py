"""Embeddings with sparse gradients: what dense ones give, by one worker and by several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit import train_child
from kit.loop_cases import read_weights
from kit.ranks import run_ranks
from torch import nn

from ensemble.comm.sparse_gradients import clip_gradients, find_sparse_parameters
from ensemble.spec import Recipe
from ensemble.train.job import TrainingError
from ensemble.train.optimizers import make_optimizer

WORDS, WIDTH = 40, 4


class Bag(nn.Module):
    def __init__(self, sparse: bool, head: bool = True, tied: bool = False) -> None:
        super().__init__()
        width = WIDTH if head else train_child.CLASSES
        self.words = nn.Embedding(WORDS, width, sparse=sparse, dtype=torch.float64)
        self.head = nn.Linear(width, train_child.CLASSES, dtype=torch.float64) if head else nn.Identity()
        self.tied = tied

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = (x.abs() * 5).long().clamp(max=WORDS - 1)
        mean = self.words(words).mean(dim=1)
        return mean @ self.words.weight[: train_child.CLASSES].T if self.tied else self.head(mean)


def bag(params: dict[str, Any]) -> nn.Module:
    return Bag(params["sparse"])


def words_only(params: dict[str, Any]) -> nn.Module:
    return Bag(params["sparse"], head=False)


def tied(params: dict[str, Any]) -> nn.Module:
    return Bag(params["sparse"], tied=True)


def momentum(model: nn.Module, params: dict[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=params["lr"], momentum=0.9)


def sparse_adam(model: nn.Module, params: dict[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.SparseAdam(model.parameters(), lr=params["lr"])


def overflowing(model: nn.Module, batch: Any) -> torch.Tensor:
    """Sample 7 has a finite loss whose fp16-scaled gradient is infinite, at any scale above 1e38."""
    losses = train_child.loss(model, batch)
    huge = (batch["index"] == 7) * model.words.weight[0].sum() * 1e304
    return losses + (huge - huge.detach())


OVERFLOWING = Recipe(model=bag, loss=overflowing, task="classification")
PLAIN = Recipe(model=bag, loss=train_child.loss, task="classification", clip_norm=0.05)
MOMENTUM = Recipe(model=bag, loss=train_child.loss, task="classification", optimizer=momentum)
ADAM = Recipe(model=words_only, loss=train_child.loss, task="classification", optimizer=sparse_adam)
TIED = Recipe(model=tied, loss=train_child.loss, task="classification")


def case(recipe: Recipe, sparse: bool = True, steps: tuple[int | None, ...] = (None,), **options: Any) -> Any:
    given = {"params": {"sparse": sparse}, "valid": None, "train": train_child.data(23), **options}
    return {"recipe": recipe, **given}, list(steps)


CASES = {"dense": case(PLAIN, sparse=False), "sparse": case(PLAIN), "in 2 parts": case(PLAIN, accumulate=2)}
CASES |= {"scaled": case(PLAIN, precision="bf16", loss_scale=1000.0)}
CASES |= {"dense momentum": case(MOMENTUM, sparse=False), "momentum": case(MOMENTUM)}
CASES |= {"mid-momentum": case(MOMENTUM, steps=(7, None)), "adam": case(ADAM)}
CASES |= {"mid-adam": case(ADAM, steps=(7, None)), "dense tied": case(TIED, sparse=False), "tied": case(TIED)}
CASES |= {"lonely": case(PLAIN, batch_size=1, epochs=1)}
CASES |= {"dense lonely": case(PLAIN, sparse=False, batch_size=1, epochs=1)}
CASES |= {"compressed": case(PLAIN, compression={"name": "qsgd8", "bucket": 32, "min_size": 1000})}
CASES |= {"overflow": case(OVERFLOWING, precision="fp16", loss_scale=65536.0, batch_size=5, epochs=1)}
train_child.CASES.update(CASES)
AS_DENSE = {"sparse": "dense", "in 2 parts": "dense", "scaled": "dense", "momentum": "dense momentum"}
AS_DENSE |= {"mid-momentum": "dense momentum", "tied": "dense tied", "lonely": "dense lonely"}
AS_DENSE |= {"compressed": "dense"}


def train_all(rank: int, world: int, folder: Path) -> dict[str, Any]:
    return train_child.train_cases(rank, world, tuple(CASES), folder)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("one")
    return folder, train_all(0, 1, folder)


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.more)])
def many(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("many")
    return folder, run_ranks(request.param, train_all, request.param, folder)[0]


def check_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-12, atol=1e-14, err_msg=name)


def of(said: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [event for event in said["events"] if event["type"] == kind]


@pytest.mark.parametrize("case", AS_DENSE)
def test_one_worker_trains_a_sparse_embedding_as_a_dense_one(one: tuple[Path, Any], case: str) -> None:
    folder, said = one
    assert said[case]["outcomes"][-1] == "finished"
    check_equal(read_weights(folder / case), read_weights(folder / AS_DENSE[case]))


@pytest.mark.parametrize("case", [*AS_DENSE, "dense", "adam"])
def test_several_workers_train_a_sparse_embedding_as_one_does(one: Any, many: Any, case: str) -> None:
    assert many[1][case]["outcomes"][-1] == "finished"
    check_equal(read_weights(many[0] / case), read_weights(one[0] / AS_DENSE.get(case, case)))


@pytest.mark.parametrize("case", ["momentum", "adam"])
def test_a_sparse_embedding_resumes_to_the_same_bits(one: Any, many: Any, case: str) -> None:
    for _, said in (one, many):
        assert said[f"mid-{case}"]["outcomes"] == ["stopped", "finished"]
        ends = [of(said[name], "finished")[0]["weights_sha256"] for name in (case, f"mid-{case}")]
        assert ends[0] == ends[1]


def test_the_rows_of_a_batch_are_fewer_bytes_than_the_table(many: tuple[Path, Any]) -> None:
    """40 words of 4 values in float64: with batches of one sample at most 6 rows are sent."""
    sent = {case: of(many[1][case], "epoch")[0]["sent_bytes"] for case in ("lonely", "dense lonely")}
    assert sent["lonely"] < sent["dense lonely"]


def test_an_overflow_in_a_sparse_gradient_skips_the_step_on_all_workers(one: Any, many: Any) -> None:
    for folder, said in (one, many):
        assert [epoch["skipped_steps"] for epoch in of(said["overflow"], "epoch")] == [1]
        assert all(np.isfinite(value).all() for value in read_weights(folder / "overflow").values())


def test_sparse_gradients_are_clipped_by_the_norm_of_all() -> None:
    found = {}
    for sparse in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(9, 3, sparse=sparse), nn.Linear(3, 2))
        model(torch.tensor([1, 4, 4, 7])).square().sum().backward()
        if sparse:
            model[0].weight.grad = model[0].weight.grad.coalesce()
        clip_gradients(list(model.parameters()), 0.01)
        found[sparse] = [p.grad.to_dense() for p in model.parameters()]
    total = torch.cat([g.flatten() for g in found[True]]).norm()
    assert float(total) == pytest.approx(0.01, rel=1e-4)
    for ours, dense in zip(found[True], found[False], strict=True):
        torch.testing.assert_close(ours, dense)


def test_embeddings_with_sparse_gradients_are_found_once() -> None:
    shared = nn.Embedding(3, 2, sparse=True)
    bag = nn.EmbeddingBag(3, 2, sparse=True)
    model = nn.ModuleList([shared, nn.ModuleList([shared]), nn.Embedding(3, 2), bag])
    assert [id(p) for p in find_sparse_parameters(model)] == [id(shared.weight), id(bag.weight)]


@pytest.mark.parametrize("options", ["adam", "adamw", "lars", {"name": "sgd", "weight_decay": 0.1}])
def test_an_optimizer_that_takes_no_sparse_gradients_is_refused_before_the_first_step(options: Any) -> None:
    with pytest.raises(TrainingError, match=r"takes no sparse gradients.*SparseAdam"):
        make_optimizer(options, nn.Embedding(3, 2, sparse=True), {"lr": 0.1})
