"""The rehearsal: faults of a user's code are found before the first epoch, sound programs pass without a word."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

import ensemble
from ensemble.spec import Ensemble, Folds, MemberCallback, Recipe, SpecError
from ensemble.store import RunDir, read_state
from pipelines import Pipeline, sources

RNG = np.random.default_rng(0)
X = RNG.normal(size=(201, 12)).astype("float32")
Y = X[:, :3].argmax(1)


def make_spec(model: Any, *, train: int = 120, valid: int = 80, **options: Any) -> Ensemble:
    recipe = options.pop("recipe", None) or Recipe(model=model, loss="cross_entropy", inputs=("x",))
    splits = {"train": slice(0, train), "valid": slice(train, train + valid)}
    pipelines = {name: Pipeline(sources.arrays(x=X[part], label=Y[part]), seed=0) for name, part in splits.items()}
    pipelines |= options.pop("pipelines", {})
    usual: dict[str, Any] = {"epochs": 6, "batch_size": 16, "optimizer": "adam", "rehearsal": "refuse"}
    usual["members"] = [{"lr": 0.01}] * 2
    return Ensemble(name="run", recipe=recipe, **{**usual, **pipelines, **options})


def run(declared: Ensemble, run_dir: Path) -> ensemble.Result:
    return ensemble.submit(declared, run_dir=run_dir, executor="inline").wait()


def mlp(params: Any = None) -> nn.Sequential:
    return nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


class Net(nn.Module):
    """A network whose forward pass is given."""

    def __init__(self, forward: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(12, 16), nn.Linear(16, 3)
        self.calls, self._given = 0, forward

    def forward(self, x: Tensor) -> Tensor:
        return self._given(self, x)


class Annealing(MemberCallback):
    """Counts steps in an attribute that no state holds."""

    def __init__(self, *, is_kept: bool) -> None:
        self.steps, self.is_kept = 0, is_kept

    def wrap_loss(self, member: Any, loss: Any) -> Any:
        return lambda model, batch: loss(model, batch) * min(1.0, 0.05 * self.steps)

    def end_step(self, member: Any, *, applied: bool) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps} if self.is_kept else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def carry_state(net: Net, x: Tensor) -> Tensor:
    """Adds what it saw last, as a recurrent network that keeps its hidden state."""
    hidden = torch.relu(net.body(x))
    last = getattr(net, "last", torch.zeros(16))
    net.last = hidden.detach().mean(0)  # type: ignore[assignment]
    return net.head(hidden + last)  # type: ignore[no-any-return]


VARYING = {
    "draw random numbers": lambda net, x: net.head(F.dropout(torch.relu(net.body(x)), 0.5)),
    "which samples are in the batch": lambda net, x: net.head(net.body(x).softmax(0)),
    "predicted before": carry_state,
}


@pytest.mark.parametrize("words", VARYING)
def test_predictions_that_vary_are_refused(words: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=words):
        run(make_spec(lambda params: Net(VARYING[words])), tmp_path / "run")
    state = read_state(RunDir(tmp_path / "run").events)
    assert all(member.attempts == 0 for member in state.members.values())
    assert not (tmp_path / "run" / "members" / "rehearsal").exists()


def test_a_count_that_no_checkpoint_holds_is_refused(tmp_path: Path) -> None:
    declared = make_spec(mlp, callbacks=[Annealing(is_kept=False)])
    with pytest.raises(SpecError, match="a resume would not continue"):
        run(declared, tmp_path / "run")


def test_what_is_said_trains_all_the_same(tmp_path: Path) -> None:
    declared = make_spec(mlp, callbacks=[Annealing(is_kept=False)], rehearsal="say")
    result = run(declared, tmp_path / "run")
    assert [row["state"] for row in result.members] == ["finished"] * 2
    [found] = read_state(RunDir(tmp_path / "run").events).rehearsed
    assert "a resume would not continue" in found.refused[0]


def squeeze(net: Net, x: Tensor) -> Tensor:
    return net.head(torch.relu(net.body(x))).squeeze()


def normalize(net: Net, x: Tensor) -> Tensor:
    hidden = net.body(x)
    return net.head(F.batch_norm(hidden, None, None, training=True) if net.training else hidden)  # type: ignore[no-any-return]


LATE: dict[str, tuple[dict[str, Any], str]] = {
    "valid": ({"valid": 81, "model": lambda params: Net(squeeze)}, "the last batch of valid, of 1 sample"),
    "train": ({"train": 113, "model": lambda params: Net(normalize)}, "drop_last=True"),
}


@pytest.mark.parametrize("split", LATE)
def test_a_last_batch_that_fails_is_named(split: str, tmp_path: Path) -> None:
    options, words = LATE[split]
    with pytest.raises(SpecError, match=words):
        run(make_spec(**options), tmp_path / "run")


def test_an_id_of_valid_beyond_an_embedding_is_named(tmp_path: Path) -> None:
    item = np.arange(200) % 30
    item[170] = 77

    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(30, 8), nn.Linear(8, 3)

        def forward(self, item: Tensor) -> Tensor:
            return self.head(self.table(item))  # type: ignore[no-any-return]

    parts = {"train": slice(0, 120), "valid": slice(120, 200)}
    pipelines = {
        name: Pipeline(sources.arrays(item=item[part], label=Y[:200][part])) for name, part in parts.items()
    }
    recipe = Recipe(model=lambda params: Embedded(), loss="cross_entropy", inputs=("item",))
    declared = make_spec(None, recipe=recipe, pipelines=pipelines)
    with pytest.raises(SpecError, match="the largest 'item' is 77, of sample 50"):
        run(declared, tmp_path / "run")


def test_one_member_that_fails_late_stays_one(tmp_path: Path) -> None:
    def build(params: dict[str, Any]) -> nn.Module:
        net = mlp()
        calls = itertools.count()
        if params["fails"]:
            net.register_forward_pre_hook(lambda module, args: 1 / (next(calls) < 2))
        return net

    members = [{"lr": 0.01, "fails": True}, {"lr": 0.01, "fails": False}]
    result = run(make_spec(build, retries=0, members=members), tmp_path / "run")
    assert [row["state"] for row in result.members] == ["failed", "finished"]


BLOCKS = Pipeline(sources.arrays(x=X[:200], label=Y[:200], block=np.arange(200) // 100), seed=0)


def write_into_batch(model: Any, batch: Any) -> Tensor:
    batch["x"].mul_(2.0)
    return F.cross_entropy(model(batch["x"]), batch["label"], reduction="none")


SOUND: dict[str, dict[str, Any]] = {
    "batches that are written into": {"model": mlp, "recipe": Recipe(model=mlp, loss=write_into_batch)},
    "batch norm": {"model": mlp},
    "averages": {"model": mlp, "averaging": "ema"},
    "stochastic averages": {"model": mlp, "averaging": "swa"},
    "dropout": {"model": lambda params: nn.Sequential(nn.Linear(12, 16), nn.Dropout(), nn.Linear(16, 3))},
    "best": {"model": mlp, "keep": "best", "early_stopping": ensemble.EarlyStopping(patience=1)},
    "mixup and a schedule": {"model": mlp, "mixup": 0.2, "schedule": "cosine"},
    "parts in bf16": {"model": mlp, "accumulate": 2, "precision": "bf16"},
    "a count that is kept": {"model": mlp, "callbacks": [Annealing(is_kept=True)]},
    "one epoch": {"model": mlp, "epochs": 1},
    "many epochs": {"model": mlp, "epochs": 40},
    "folds in blocks": {
        "model": mlp,
        "weights": Folds(2, assigned="block"),
        "out_of_fold": True,
        "pipelines": {"train": BLOCKS, "valid": None},
    },
}


@pytest.mark.parametrize("name", SOUND)
def test_sound_programs_pass_without_a_word(name: str, tmp_path: Path) -> None:
    result = run(make_spec(**SOUND[name]), tmp_path / "run")
    assert [row["state"] for row in result.members] == ["finished"] * 2
    [found] = read_state(RunDir(tmp_path / "run").events).rehearsed
    assert (found.refused, found.remarks, found.failed) == ([], [], None)


class PruneLate(MemberCallback):
    """Prunes a layer behind the epochs that are rehearsed."""

    def begin_epoch(self, member: Any, epoch: int) -> None:
        if epoch == 13:
            prune.l1_unstructured(member.model[0], "weight", amount=0.5)


def test_a_checkpoint_of_a_model_that_changed_later_is_tried(tmp_path: Path) -> None:
    declared = make_spec(mlp, epochs=15, checkpoint_every=1, callbacks=[PruneLate()])
    run(declared, tmp_path / "run")
    first, *later = read_state(RunDir(tmp_path / "run").events).rehearsed
    assert (first.refused, first.epochs) == ([], 12)
    assert [("weight_orig" in one.refused[0], one.of) for one in later] == [(True, "member-0")]


def test_a_run_rehearses_once(tmp_path: Path) -> None:
    run(make_spec(mlp, epochs=2), tmp_path / "run")
    run(make_spec(mlp, epochs=2), tmp_path / "run")
    ensemble.resume(tmp_path / "run", executor="inline", epochs=3).wait()
    assert len(read_state(RunDir(tmp_path / "run").events).rehearsed) == 1


def test_a_rehearsal_changes_no_weight(tmp_path: Path) -> None:
    digests = []
    for rehearsal in ("refuse", None):
        run_dir = tmp_path / str(rehearsal)
        run(make_spec(mlp, rehearsal=rehearsal), run_dir)
        digests.append([member.weights_sha256 for member in read_state(RunDir(run_dir).events).members.values()])
    assert digests[0] == digests[1]
