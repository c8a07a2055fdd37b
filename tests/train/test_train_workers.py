"""Members with several workers, as real processes: equal to one, exact resumes, common ends; sparse gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit import loop_cases, train_child
from kit.loop_cases import read_weights
from kit.ranks import run_ranks
from torch import nn

from ensemble.comm.sparse_gradients import find_sparse_parameters
from ensemble.spec import Recipe
from ensemble.store import RunDir, load_predictions
from ensemble.train.job import TrainingError
from ensemble.train.optimizers import make_optimizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workers")
    for world in (1, 2, 3):
        (folder / str(world)).mkdir()
    return folder


RANKS = {"two": (2, train_child.WITH_TWO), "second": (2, train_child.SECOND), "three": (3, train_child.WITH_THREE)}
AS_ONE = ["smooth", "float64", "ragged", "folds", "head"]
AS_ONE += ["clipped", "clipped in 4", "scaled in 2", "folds in 2"]
RESUMED = {"mid-fp32": "whole-fp32", "end-fp32": "whole-fp32", "mid-bf16": "whole-bf16"}
RESUMED |= {"mid-bootstrap": "bootstrap", "mid-noisy in 2": "noisy in 2", "mid-qsgd4": "qsgd4"}
RESUMED |= {"mid-powersgd": "powersgd", "mid-fp16-onebit": "fp16-onebit", "mid-grouped": "grouped"}


def tiered(*cases: str) -> list[Any]:
    """Values of a parameter, each in the tier in which two workers train it."""
    return [pytest.param(case, marks=pytest.mark.more if case in train_child.SECOND else ()) for case in cases]


@pytest.fixture(scope="module")
def ask(folder: Path) -> Callable[[str], Any]:
    """What each of the ranks said of a case; those of a tier are trained together, when the first is asked for."""
    trained: dict[str, list[Any]] = {}

    def ask(case: str, tier: str = "") -> Any:
        tier = tier or next(tier for tier in ("second", "two", "three") if case in RANKS[tier][1])
        world, cases = RANKS[tier]
        if tier not in trained:
            trained[tier] = run_ranks(world, train_child.train_cases, world, cases, folder / str(world))
        return [said[case] for said in trained[tier]]

    return ask


def of(said: dict[str, Any], type: str) -> list[dict[str, Any]]:
    return loop_cases.of(said["events"], type)


def end(ranks: Any, outcomes: Any = ("finished",)) -> dict[str, Any]:
    """The end of a case, whose attempts have ended so on all ranks; rank 0 tells it."""
    assert [said["outcomes"] for said in ranks] == [list(outcomes)] * len(ranks), ranks[0]["events"][-1]
    return dict(of(ranks[0], outcomes[-1])[0])


@pytest.fixture(scope="module")
def one(folder: Path) -> dict[str, Any]:
    names = ("smooth", "float64", "ragged", "folds", "clipped", "head")
    return {name: train_child.train_case(name, folder / "1") for name in names}


@pytest.mark.parametrize("case", tiered(*AS_ONE))
def test_two_workers_are_one(ask: Any, one: dict[str, Any], folder: Path, case: str) -> None:
    check_equal(folder, 2, one, ask(case), case, 1e-5 if case == "smooth" else 1e-12)


@pytest.mark.parametrize("case", ["ragged", "clipped in 2", "clipped in groups"])
def test_three_workers_are_one(ask: Any, one: dict[str, Any], folder: Path, case: str) -> None:
    ranks = ask(case, "three")
    check_equal(folder, 3, one, ranks, case, 1e-12)
    if case == "clipped in groups":
        assert [plan["tuned"]["groups"] for plan in of(ranks[0], "plan")] == [[[0, 1], [2]]]


def check_equal(folder: Path, world: int, one: dict[str, Any], ranks: Any, case: str, rtol: float) -> None:
    reference = "clipped" if case == "clipped in groups" else train_child.ACCUMULATED.get(case, case)
    weights = read_weights(folder / str(world) / case)
    for name, value in read_weights(folder / "1" / reference).items():
        np.testing.assert_allclose(weights[name], value, rtol=rtol, atol=rtol * abs(value).max(), err_msg=name)
    for ours, theirs in zip(of(ranks[0], "epoch"), of(one[reference], "epoch"), strict=True):
        assert ours["metrics"] == pytest.approx(theirs["metrics"], rel=10 * rtol)
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=10 * rtol)
        assert ours["samples"] == theirs["samples"], "every sample counts once, over all workers"


def test_what_was_measured_at_the_start_holds_after_a_resume(ask: Any) -> None:
    ranks = ask("mid-measured")
    end(ranks, ("stopped", "finished"))
    first, second = of(ranks[0], "plan")
    assert first["tuned"] == second["tuned"] and first["tuned"]["measured"]


def test_compression_changes_the_weights_and_the_bytes(ask: Any) -> None:
    plain, packed = ask("whole-fp32"), ask("qsgd4")
    assert end(plain)["weights_sha256"] != end(packed)["weights_sha256"]
    sent = [of(ranks[0], "epoch")[0]["sent_bytes"] for ranks in (plain, packed)]
    assert sent[1] < sent[0], "also where all but the weights are left alone"


@pytest.mark.more
def test_an_overflow_under_compression_is_one_skipped_step(ask: Any) -> None:
    for case in ("fp16-onebit", "mid-fp16-onebit"):
        epochs = of(ask(case)[0], "epoch")
        assert [(e["skipped_steps"], e["loss_scale"]) for e in epochs] == [(n, 32768.0) for n in (1, 0, 0)]


def test_workers_that_see_different_checkpoints_say_so(ask: Any) -> None:
    assert "must be shared by all nodes" in end(ask("apart"), ("stopped", "failed"))["error"]


@pytest.mark.parametrize("case", tiered(*RESUMED))
def test_workers_resume_to_the_bits_of_an_undisturbed_training(ask: Any, case: str) -> None:
    resumed, whole = ask(case), ask(RESUMED[case])
    assert all(said["outcomes"][-2:] == ["stopped", "finished"] for said in resumed)
    ends = [(of(r[0], "finished")[0]["weights_sha256"], of(r[0], "epoch")[-1]) for r in (resumed, whole)]
    assert ends[0][0] == ends[1][0]
    for name in ("train_loss", "metrics"):
        assert ends[0][1][name] == ends[1][1][name]
    stopped = {"mid-fp32": [(0, 3)], "end-fp32": [(1, 0)]}
    if case in stopped:
        assert [(e["epoch"], e["step"]) for e in of(resumed[0], "stopped")] == stopped[case]


def test_a_train_function_is_the_recipe_loop(ask: Any) -> None:
    loop = end(ask("loop"), ("stopped", "finished"))
    assert loop["weights_sha256"] == end(ask("whole-fp32"))["weights_sha256"]


def test_predictions_of_all_workers_are_saved_in_order(ask: Any, folder: Path) -> None:
    for case in ("whole-fp32", "loop"):
        accuracy = of(ask(case)[0], "finished")[0]["metrics"]["accuracy"]
        saved = load_predictions(RunDir(folder / "2" / case).predictions("member-0", 0), "valid")
        assert saved.index.tolist() == list(range(13))
        assert saved.values.sum(axis=1) == pytest.approx(np.ones(13), abs=1e-6)
        assert (saved.values.argmax(axis=1) == saved.target).mean() == pytest.approx(accuracy)


OVERFLOWS = [("fp16", [1, 0, 0], 2.0**15)]  # once, then the scale is low enough for good
OVERFLOWS += [("fp16-static", [1, 1, 1], 2.0**16)]  # sample 7 overflows in each epoch


@pytest.mark.parametrize(
    ("case", "skipped", "scale"), [OVERFLOWS[0], pytest.param(*OVERFLOWS[1], marks=pytest.mark.more)]
)
def test_an_overflow_on_one_worker_skips_the_step_on_all(
    ask: Any, folder: Path, case: str, skipped: Any, scale: float
) -> None:
    ranks = ask(case)
    end(ranks, ("stopped", "finished"))
    assert [e["skipped_steps"] for e in of(ranks[0], "epoch")] == skipped
    assert loop_cases.checkpoint(folder / "2" / case)["precision"]["scaler"]["scale"] == scale
    assert all(np.isfinite(value).all() for value in read_weights(folder / "2" / case).values())


def test_a_worker_without_a_sample_trains_in_fp16_from_the_first_step_and_after_a_resume(ask: Any) -> None:
    ranks = ask("fp16-empty")
    end(ranks, ("stopped", "finished"))
    assert [e["samples"] for e in of(ranks[0], "epoch")] == [5, 5]


def test_a_nan_on_one_worker_ends_all_and_names_step_and_rate(ask: Any) -> None:
    failed = end(ask("nan"), ("failed",))
    assert failed["reason"] == "nan" and not failed["retry"]
    for part in ("loss is nan", "learning rate 0.05", "epoch 1, step "):
        assert part in failed["error"]
    assert [len(of(said, "failed")) for said in ask("nan")] == [1, 0]


@pytest.mark.parametrize(
    ("case", "outcome", "epochs"), [("cancel", "cancelled", 1), ("awaits_pruner", "pruned", 2)]
)
def test_what_rank_0_is_told_holds_for_all(ask: Any, case: str, outcome: str, epochs: int) -> None:
    end(ask(case), (outcome,))
    assert len(of(ask(case)[0], "epoch")) == epochs


def test_a_fault_of_one_worker_is_told_by_rank_0_with_its_cause(ask: Any, folder: Path) -> None:
    failed = end(ask("fault"), ("failed",))
    assert failed["error"] == "RuntimeError: the fault of rank 1"
    assert failed["reason"] == "error" and failed["retry"]
    assert "rank 1: Traceback" in RunDir(folder / "2" / "fault").log("member-0").read_text()


def test_only_rank_0_tells_of_the_member_and_all_tell_their_use(ask: Any) -> None:
    for rank, said in enumerate(ask("whole-fp32")):
        assert ("epoch" in {event["type"] for event in said["events"]}) is (rank == 0)
        usage = of(said, "usage")
        assert {e["role"] for e in usage} == {"startup", "train", "prepare"}
        assert {e["rank"] for e in usage} == {rank}


@pytest.mark.parametrize("case", tiered("kept", "swa"))
def test_all_ranks_decide_alike_and_have_the_weights_that_are_kept(ask: Any, folder: Path, case: str) -> None:
    """They stop after the same epoch, and each predicts its rows with the weights of the checkpoint."""
    whole = end(ask(case))
    assert whole["early_stopping"] and whole["epoch"] < 8 and whole["kept"]["epoch"] <= whole["epoch"] - 2
    (batch,) = train_child.data(13, 1).loader(13, 1)
    model = train_child.noisy({})
    model.load_state_dict({k: torch.from_numpy(v) for k, v in read_weights(folder / "2" / case).items()})
    with torch.no_grad():
        expected = model.eval()(batch["x"][batch["index"].argsort()]).softmax(dim=1).numpy()
    values = load_predictions(RunDir(folder / "2" / case).predictions("member-0", 0), "valid").values
    np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-6)
    resumed = ask(f"mid-{case}")
    assert of(resumed[0], "finished") == [whole], "resumed, they keep and stop as if undisturbed"
    assert [said["outcomes"][-1] for said in resumed] == ["finished"] * 2


@pytest.mark.more
def test_workers_whose_model_is_compiled_end_with_the_same_bits(tmp_path: Path) -> None:
    """Also stopped within an epoch; their gradients are exchanged while the backward pass runs."""
    said = run_ranks(2, train_child.train_cases, 2, train_child.COMPILED, tmp_path)
    assert said[0]["compiled"]["outcomes"] == ["stopped", "finished"]
    compiled, plain = (of(said[0][case], "finished")[0] for case in train_child.COMPILED)
    assert {**compiled, "attempt": 0} == {**plain, "attempt": 0}


def test_a_member_ends_with_all_its_ranks_where_one_of_them_stops_it(ask: Any) -> None:
    stopped = end(ask("stop of rank 1"))
    assert (stopped["epoch"], stopped["early_stopping"]) == (1, {"reason": "good enough", "epochs": 5})


@pytest.mark.more
def test_a_member_ends_with_the_same_weights_whichever_of_its_ranks_end_it(ask: Any) -> None:
    ends = [end(ask(case)) for case in ("stop of rank 1", "leave of rank 0", "stop of both")]
    assert {ended["epoch"] for ended in ends} == {1} and len({ended["weights_sha256"] for ended in ends}) == 1
    assert end(ask("handed over"))["metrics"] == {"loss": 0.5}, "weights of rank 0 are those of all ranks"


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


def recipe(loss: Any = train_child.loss, optimizer: Any = None, clip_norm: Any = None, **layers: bool) -> Recipe:
    make = lambda params: Bag(params["sparse"], **layers)  # noqa: E731
    options = {"optimizer": optimizer, "clip_norm": clip_norm}
    return Recipe(model=make, loss=loss, task="classification", **options)


def overflowing(model: nn.Module, batch: Any) -> torch.Tensor:
    """Sample 7 has a finite loss whose fp16-scaled gradient is infinite, at any scale above 1e38."""
    losses = train_child.loss(model, batch)
    huge = (batch["index"] == 7) * model.words.weight[0].sum() * 1e304
    return losses + (huge - huge.detach())


PLAIN, TIED = recipe(clip_norm=0.05), recipe(tied=True)


def momentum(model: nn.Module, params: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=params["lr"], momentum=0.9)


def sparse_adam(model: nn.Module, params: Any) -> Any:
    return torch.optim.SparseAdam(model.parameters(), lr=params["lr"])


MOMENTUM, ADAM = recipe(optimizer=momentum), recipe(optimizer=sparse_adam, head=False)


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
CASES |= {"overflow": case(recipe(overflowing), precision="fp16", loss_scale=65536.0, batch_size=5, epochs=1)}
train_child.CASES.update(CASES)
AS_DENSE = {"sparse": "dense", "in 2 parts": "dense", "scaled": "dense", "momentum": "dense momentum"}
AS_DENSE |= {"mid-momentum": "dense momentum", "tied": "dense tied", "lonely": "dense lonely"}
AS_DENSE |= {"compressed": "dense"}


def train_all(rank: int, world: int, folder: Path) -> dict[str, Any]:
    return train_child.train_cases(rank, world, tuple(CASES), folder)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("one")
    return folder, train_all(0, 1, folder)


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.more)])
def many(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("many")
    return folder, run_ranks(request.param, train_all, request.param, folder)[0]


def check_as_dense(folder: Path, said: Any, case: str, expected: Path) -> None:
    assert said[case]["outcomes"][-1] == "finished"
    weights = read_weights(folder / case)
    for name, value in read_weights(expected).items():
        np.testing.assert_allclose(weights[name], value, rtol=1e-12, atol=1e-14, err_msg=name)


@pytest.mark.parametrize("case", AS_DENSE)
def test_one_worker_trains_a_sparse_embedding_as_a_dense_one(alone: tuple[Path, Any], case: str) -> None:
    check_as_dense(*alone, case, alone[0] / AS_DENSE[case])


@pytest.mark.parametrize("case", [*AS_DENSE, "dense", "adam"])
def test_several_workers_train_a_sparse_embedding_as_one_does(alone: Any, many: Any, case: str) -> None:
    check_as_dense(*many, case, alone[0] / AS_DENSE.get(case, case))
    if case == "lonely":  # 40 words of 4 values in float64: with batches of one sample at most 6 rows are sent
        sent = [of(many[1][name], "epoch")[0]["sent_bytes"] for name in ("lonely", "dense lonely")]
        assert sent[0] < sent[1], "the rows of a batch are fewer bytes than the table"


def test_a_sparse_embedding_resumes_to_the_same_bits_and_skips_an_overflow(alone: Any, many: Any) -> None:
    for folder, said in (alone, many):
        for case in ("momentum", "adam"):
            assert said[f"mid-{case}"]["outcomes"] == ["stopped", "finished"]
            ends = [of(said[name], "finished")[0]["weights_sha256"] for name in (case, f"mid-{case}")]
            assert ends[0] == ends[1]
        assert [epoch["skipped_steps"] for epoch in of(said["overflow"], "epoch")] == [1]
        assert all(np.isfinite(value).all() for value in read_weights(folder / "overflow").values())


def test_embeddings_with_sparse_gradients_are_found_once() -> None:
    shared = nn.Embedding(3, 2, sparse=True)
    bag = nn.EmbeddingBag(3, 2, sparse=True)
    model = nn.ModuleList([shared, nn.ModuleList([shared]), nn.Embedding(3, 2), bag])
    assert [id(p) for p in find_sparse_parameters(model)] == [id(shared.weight), id(bag.weight)]


@pytest.mark.parametrize("options", ["adam", "adamw", "lars", {"name": "sgd", "weight_decay": 0.1}])
def test_an_optimizer_that_takes_no_sparse_gradients_is_refused_before_the_first_step(options: Any) -> None:
    with pytest.raises(TrainingError, match=r"takes no sparse gradients.*SparseAdam"):
        make_optimizer(options, nn.Embedding(3, 2, sparse=True), {"lr": 0.1})
