"""What follows from a model's outputs: the call of the model, the task, predictions in the task's layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit import train_child as cases
from torch import nn

from ensemble.spec import Recipe
from ensemble.spec.task import CLASSIFICATION, Task, quantiles
from ensemble.train.call import Call, Observation, find_call
from ensemble.train.forward_errors import explain_forward_error, is_repeatable
from ensemble.train.output_shapes import OutputError, find_class_axis
from ensemble.train.outputs import compute_outputs, compute_values, to_values
from pipelines.loader.batch import Batch


def test_a_call_names_fields_by_identity() -> None:
    x, mask = torch.zeros(2, 3), torch.zeros(2, 3)
    batch = {"x": x, "mask": mask, "label": torch.zeros(2)}
    call = find_call((x,), {"attention": mask}, batch)
    assert call == Call(("x",), {"attention": "mask"}) and call.fields == ["x", "mask"]
    assert Call.from_record(call.as_record()) == call
    assert call.call(lambda x, attention: (x, attention), batch) == (x, mask)
    assert find_call((batch,), {}, batch) == Call((None,))
    for computed in ((x + 0,), (x, True), (x[:1],)):
        assert find_call(computed, {}, batch) is None


def test_an_observation_survives_a_checkpoint() -> None:
    seen = Observation(Call((None,), {"lengths": "n"}), quantiles(0.1, 0.9), None, ("float32", (3,)), None)
    assert Observation.from_checkpoint(seen.as_record()) == seen
    unclear = Observation(None, None, "declare it", None, None)
    assert Observation.from_checkpoint(unclear.as_record()) == unclear
    assert Observation.from_checkpoint({"model": {}}) is None


AXES: dict[int, list[tuple[Any, Any]]] = {
    -1: [((8, 3), (8,)), ((8, 1), (8,)), ((8, 5, 3), (8, 5)), ((8, 5, 1), (8, 5)), ((8, 3), None)],
    0: [((8,), (8,)), ((8, 5), (8, 5)), ((8,), (8, 1))],
    1: [((8, 3, 5), (8, 5)), ((8, 1, 5), (8, 5)), ((8, 3, 4, 6), (8, 4, 6))],
}


def test_the_axis_of_the_classes_follows_from_the_targets_shape() -> None:
    for axis, shapes in AXES.items():
        for outputs, target in shapes:
            assert find_class_axis(outputs, target) == axis, (outputs, target)
    no_scores = "no scores of classes for the target"
    for outputs, target, message in (
        ((8, 5, 5), (8, 5), "along axis 1 or along the last one"),
        *(((8, 3), (8, 5), no_scores), ((8, 3, 3), (8,), no_scores)),
    ):
        with pytest.raises(OutputError, match=message):
            find_class_axis(outputs, target)


def seen(*shape: int, axis: int | None = None) -> Observation:
    return Observation(target=("int64", shape), class_axis=axis)


def test_classes_are_last_in_predictions() -> None:
    scores = torch.randn(4, 3, 5, dtype=torch.bfloat16)
    first = to_values(CLASSIFICATION, scores, seen(5, axis=1))
    assert first.dtype == torch.float32
    torch.testing.assert_close(first, scores.float().softmax(dim=1).movedim(1, -1))
    torch.testing.assert_close(first, to_values(CLASSIFICATION, scores.movedim(1, -1), seen(5, axis=-1)))
    assert to_values(CLASSIFICATION, torch.zeros(4, 3, 9), seen(5, axis=1)).shape == (4, 9, 3), "of more steps"


def test_numbers_have_the_targets_shape() -> None:
    points, number = torch.arange(4.0), Task("regression")
    assert torch.equal(to_values(number, points[:, None], seen()), points)
    assert torch.equal(to_values(number, points, seen(1)), points[:, None])
    assert to_values(number, torch.zeros(4, 9, 1), seen(5)).shape == (4, 9), "more steps than in training"
    for outputs in ((points[:, None], points[:, None] + 1), {"variance": points + 1, "mean": points}):
        found = to_values(Task("gaussian"), outputs, seen())
        assert torch.equal(found, torch.stack([points, points + 1], dim=-1))
    assert to_values(quantiles(0.1, 0.9), torch.zeros(4, 5, 2), seen(5)).shape == (4, 5, 2)


def test_one_logit_at_each_position_is_two_classes() -> None:
    logits = torch.randn(4, 5)
    expected = torch.stack([1 - logits.sigmoid(), logits.sigmoid()], dim=-1)
    assert torch.equal(to_values(CLASSIFICATION, logits, seen(5, axis=0)), expected)
    assert torch.equal(to_values(CLASSIFICATION, logits[:, None], seen(5, axis=1)), expected)
    assert torch.equal(to_values(CLASSIFICATION, logits[..., None], seen(5, axis=-1)), expected)
    assert to_values(CLASSIFICATION, logits[:, 0], seen(1, axis=0)).shape == (4, 1, 2)


NUMBERS = torch.arange(4.0)
NO_TASK: list[tuple[Task, Any, str]] = [
    (Task("gaussian"), torch.zeros(4, 2), r"not \(mean, variance\)"),
    (Task("gaussian"), (NUMBERS, NUMBERS), "variance of a Gaussian is above 0"),
    (Task("gaussian"), (NUMBERS, NUMBERS + torch.nan), "variance of a Gaussian is above 0"),
    (quantiles(0.1, 0.9), torch.zeros(4, 3), "not 2 quantiles along the last axis"),
    (Task("free"), (NUMBERS,), "a tuple, not numbers"),
    (Task("multilabel"), torch.zeros(4, 2, dtype=torch.int64), "not numbers"),
    (CLASSIFICATION, {}, "a dict"),
    (CLASSIFICATION, torch.tensor([1, 2]), r"shape \[2\] and dtype torch.int64"),
]


@pytest.mark.parametrize(("task", "outputs", "message"), NO_TASK)
def test_outputs_that_the_task_does_not_know_are_refused(task: Task, outputs: Any, message: str) -> None:
    with pytest.raises(OutputError, match=message):
        to_values(task, outputs)


def doubled(x: Any) -> Any:
    return x * 2.0


ONES = {"x": torch.ones(2, 3)}


def compute(loss: Any, by: Any = compute_outputs, batch: Any = ONES, of: Any = None, **recipe: Any) -> Any:
    model = nn.Module()
    model.forward = doubled  # type: ignore[method-assign]
    made = Recipe(model=lambda params: None, loss=loss, **{"task": "classification", **recipe})
    outputs = by(made, model, batch, of)
    assert not model._forward_hooks
    return outputs


def test_a_known_call_computes_no_loss() -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        raise AssertionError("there is no need for it")

    known = Observation(Call(("x",)), Task("free"))
    assert torch.equal(compute(loss, compute_values, ONES, known, task="free"), ONES["x"] * 2)
    with pytest.raises(OutputError, match="called with the field 'x', and the batch has y"):
        compute(loss, compute_values, {"y": ONES["x"]}, known, task="free")


def test_without_a_call_the_loss_runs_to_its_end_on_zeros_of_the_targets_kind() -> None:
    ended: list[Any] = []

    def loss(model: nn.Module, batch: Any) -> Any:
        found = model(batch["x"] + 1)
        ended.append(batch["label"])
        return (found - batch["label"]).square().sum(dim=1)

    known = Observation(None, Task("regression"), None, ("float32", (3,)))
    assert torch.equal(compute(loss, of=known, task="regression"), torch.full((2, 3), 4.0))
    assert len(ended) == 1 and ended[0].shape == (2, 3) and ended[0].dtype == torch.float32


def test_what_a_loss_raises_after_the_call_does_not_matter_and_before_it_does() -> None:
    def after(model: nn.Module, batch: Any) -> Any:
        model(batch["x"])
        raise ValueError("no labels like these")

    def caught(model: nn.Module, batch: Any) -> Any:
        try:
            return after(model, batch)
        except Exception:
            return torch.zeros(2)

    def before(model: nn.Module, batch: Any) -> Any:
        raise KeyError("y")

    def around(model: nn.Module, batch: Any) -> Any:
        return batch["x"].sum(dim=1)

    for loss in (after, caught):
        assert torch.equal(compute(loss), ONES["x"] * 2)
    with pytest.raises(KeyError, match="y"):
        compute(before)
    with pytest.raises(OutputError, match=r"declare Recipe\.predict"):
        compute(around)
    probabilities = compute(after, compute_values, of=seen(axis=-1))
    torch.testing.assert_close(probabilities, (ONES["x"] * 2).softmax(dim=1))
    double = torch.full((2, 4), 0.25, dtype=torch.float64)
    assert compute(after, compute_values, predict=lambda model, batch: double).dtype == torch.float32


class Net(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).view(3, 4)


def fail(model: nn.Module, loss: Any = cases.loss) -> Exception:
    fields = {"x": torch.rand(16, 8), "label": torch.arange(16) % 4, "index": torch.arange(16)}
    with pytest.raises(Exception) as caught:
        loss(model, Batch(fields, epoch=0, step=0, global_size=16))
    return caught.value


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (
            nn.Sequential(nn.Linear(8, 16), nn.Linear(17, 4)),
            "in Linear(in_features=17, out_features=4, bias=True), where the batch has 'x' [16, 8] float32, "
            "'label' [16] int64, 'index' [16] int64",
        ),
        (nn.LSTM(9, 2), "in LSTM(9, 2), where the batch has"),
        (Net(8, 4), "in Net("),
        (nn.Linear(8, 4, dtype=torch.float64), "in Linear("),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_layer_and_the_fields_are_named(model: nn.Module, says: str) -> None:
    error = fail(model)
    assert says in str(explain_forward_error(error)) and is_repeatable(error)


def test_of_what_was_raised_elsewhere_nothing_is_said() -> None:
    error = fail(nn.Linear(8, 4), lambda model, batch: (Path(__file__).parent / "no such file").read_bytes())
    assert explain_forward_error(error) is None and not is_repeatable(error)
    assert not is_repeatable(RuntimeError("CUDA error: an illegal memory access of size 4"))
