"""Values that no training can use: what is said names the field and the sample, and nothing is tried again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import loop_cases  # noqa: E402
from loop_cases import of, train  # noqa: E402
from torch import nn  # noqa: E402

from ensemble import Recipe, Task  # noqa: E402
from ensemble.store import RunDir, load_predictions  # noqa: E402
from pipelines import Pipeline, sources  # noqa: E402

X = np.random.default_rng(0).normal(size=(23, 4)).astype(np.float32)
LABELS = (X[:, :3] > 0).astype(np.int64)
NUMBERS = X.sum(axis=1)


def linear(params: Any) -> nn.Module:
    return nn.Linear(4, 3)


def one_number(params: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))


def failure(folder: Path, recipe: Recipe, valid: Pipeline | None = None, **fields: Any) -> dict[str, Any]:
    data = Pipeline(sources.arrays(**fields))
    return loop_cases.failed(*train(folder, recipe, train=data, valid=valid, optimizer="sgd"))


MULTILABEL = Recipe(model=linear, loss="binary_cross_entropy", target="y", inputs=("x",), task=Task("multilabel"))


def test_a_label_of_several_that_is_neither_0_nor_1_is_refused(tmp_path: Path) -> None:
    wrong = LABELS.copy()
    wrong[7, 1] = 7
    failed = failure(tmp_path / "train", MULTILABEL, x=X, y=wrong)
    assert "has the label 7: labels are 0, 1, or shares between" in failed["error"] and not failed["retry"]
    valid = Pipeline(sources.arrays(x=X, y=wrong))
    failed = failure(tmp_path / "valid", MULTILABEL, valid, x=X, y=LABELS)
    assert "has the label 7" in failed["error"] and not failed["retry"]


def own_loss(model: nn.Module, batch: Any) -> Any:
    return nn.functional.binary_cross_entropy_with_logits(
        model(batch["x"]), batch["y"].float(), reduction="none"
    ).mean(dim=1)


def test_a_wrong_label_among_the_validation_data_is_named_where_the_loss_takes_any(tmp_path: Path) -> None:
    wrong = LABELS.copy()
    wrong[7, 1] = 7
    recipe = Recipe(model=linear, loss=own_loss, target="y", task="multilabel")
    failed = failure(tmp_path, recipe, Pipeline(sources.arrays(x=X, y=wrong)), x=X, y=LABELS)
    says = "Ensemble.valid: sample 7 (arrays(x, y):row 7) has the label 7: labels"
    assert failed["error"].startswith(says) and not failed["retry"]


def test_labels_of_another_kind_in_other_splits_fail_no_member(tmp_path: Path) -> None:
    classes = np.arange(23) % 5  # by their number
    late = LABELS.copy()
    late[20] = 7
    for name, shifted in {"classes": classes, "late": late}.items():
        options = {split: Pipeline(sources.arrays(x=X, y=shifted)) for split in ("test", "shifted")}
        outcome, events = train(
            tmp_path / name,
            MULTILABEL,
            train=Pipeline(sources.arrays(x=X, y=LABELS)),
            valid=None,
            optimizer="sgd",
            **options,
        )
        assert outcome == "finished", of(events, "failed")
        run = RunDir(tmp_path / name)
        assert "no predictions on 'test' are saved: multilabel: " in run.log("member-0").read_text()
        assert load_predictions(run.predictions("member-0", 0), "shifted").values.shape == (23, 3)
    assert "has the label 7: labels are 0, 1, or shares between" in run.log("member-0").read_text()


@pytest.mark.parametrize("batch_size", [16, 64])
def test_a_soft_label_drops_the_figures_of_labels_whatever_its_batch(tmp_path: Path, batch_size: int) -> None:
    x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    labels = (x[:, :3] > 0).astype(np.float32)
    soft = labels.copy()
    soft[40, 1] = 0.5

    def metrics(outputs: Any, batch: Any) -> dict[str, Any]:
        return {"mine": outputs.sum(dim=1)}

    recipe = replace(MULTILABEL, metrics=metrics, objective="loss")
    outcome, events = train(
        tmp_path,
        recipe,
        train=Pipeline(sources.arrays(x=x, y=labels)),
        valid=Pipeline(sources.arrays(x=x, y=soft)),
        optimizer="sgd",
        batch_size=batch_size,
    )
    assert outcome == "finished", of(events, "failed")
    assert all(set(event["metrics"]) == {"loss", "mine"} for event in of(events, "epoch"))
    log = RunDir(tmp_path).log("member-0").read_text()
    assert log.count("no figures of the predictions on 'valid': multilabel: the target has fractions") == 1


def test_a_field_that_the_data_lack_is_named_with_those_that_they_have(tmp_path: Path) -> None:
    recipe = Recipe(model=one_number, loss="mse", target="z")
    failed = failure(tmp_path, recipe, x=X, y=NUMBERS)
    assert "the data have no field 'z' of Recipe.target; they have x, y" in failed["error"]
    assert not failed["retry"]


def test_a_nan_among_the_inputs_is_named_with_its_sample(tmp_path: Path) -> None:
    recipe = Recipe(model=one_number, loss="mse", target="y", inputs=("x",))
    x = X.copy()
    x[11, 2] = np.nan
    failed = failure(tmp_path, recipe, x=x, y=NUMBERS)
    assert failed["reason"] == "nan" and "NaN or infinity is in 'x' of sample 11" in failed["error"]
