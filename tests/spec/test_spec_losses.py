"""Losses by name against torch's own and against their definitions; what is ignored, what is refused."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from ensemble import Ensemble, Recipe, SpecError, Task, quantiles
from ensemble.spec.losses import LOSSES, NamedLoss
from ensemble.spec.task import IGNORED, find_known
from pipelines import Pipeline, sources


def compute(name: str, outputs: Any, target: Any, **options: Any) -> Any:
    training = options.pop("training", False)
    return NamedLoss(name, "y", **options).compute(outputs, target, training=training)


def seeded(*shape: int) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def test_cross_entropy_is_torchs_of_integers_of_any_width() -> None:
    scores, target = seeded(6, 4), torch.tensor([0, 1, 2, 3, 0, 1])
    for smoothing, training in ((0.0, False), (0.2, True), (0.2, False)):
        theirs = {"reduction": "none", "label_smoothing": smoothing if training else 0.0}
        own = compute("cross_entropy", scores, target, label_smoothing=smoothing, training=training)
        torch.testing.assert_close(own, functional.cross_entropy(scores, target, **theirs))
    scores, target = seeded(3, 200), torch.tensor([156, 1, 199])  # 156 is what -100 would be in uint8
    narrow = [target.clamp(max=120).to(kind) for kind in (torch.int16, torch.int32)]
    for given in (target, target.to(torch.uint8), *narrow):
        expected = functional.cross_entropy(scores, given.long(), reduction="none")
        torch.testing.assert_close(compute("cross_entropy", scores, given), expected)
        assert (expected > 0).all()
    two = compute("cross_entropy", scores[:, :2], torch.tensor([True, False, True]))
    torch.testing.assert_close(two, compute("cross_entropy", scores[:, :2], torch.tensor([1, 0, 1])))


def test_labels_have_a_logit_each_and_one_that_takes_no_part_may_be_a_float() -> None:
    theirs, name = functional.binary_cross_entropy_with_logits, "binary_cross_entropy"
    logits, target = seeded(5, 3), torch.tensor([[0, 1, 1]] * 4 + [[1, -100, 0]])
    torch.testing.assert_close(
        compute(name, logits, target)[4], theirs(logits[4, [0, 2]], torch.tensor([1.0, 0.0]))
    )
    one = compute(name, logits[:, :1], target[:, 0])
    torch.testing.assert_close(one, theirs(logits[:, 0], target[:, 0].float(), reduction="none"))
    logits, target = seeded(2, 3), torch.tensor([[0.0, 1.0, -100.0], [float("nan"), 1.0, 0.0]])
    torch.testing.assert_close(compute(name, logits, target)[0], theirs(logits[0, :2], target[0, :2]))
    samples = NamedLoss(name, "y").find_samples(torch.tensor([[-100.0, 1.0], [-100.0, -100.0]]))
    assert samples.tolist() == [True, False]
    assert NamedLoss("mse", "y").find_samples(torch.tensor([-100.0, float("nan")])).tolist() == [True, False]


@pytest.mark.parametrize("axis", [1, -1])
def test_steps_and_pixels_have_their_classes_on_either_axis(axis: int) -> None:
    scores, target = seeded(5, 4, 7, 2), torch.randint(0, 4, (5, 7, 2), generator=torch.Generator().manual_seed(1))
    target[0], target[1, 3:] = -100, -100
    expected = functional.cross_entropy(scores, target, reduction="none", ignore_index=-100)
    means = [each[each != 0].mean() if (each != 0).any() else torch.tensor(0.0) for each in expected]
    given = scores if axis == 1 else scores.movedim(1, -1)
    losses = compute("cross_entropy", given, target)
    torch.testing.assert_close(losses, torch.stack(means))
    assert losses[0] == 0, "a sample of which nothing counts"


@pytest.mark.parametrize(("name", "of"), [("mse", functional.mse_loss), ("huber", functional.huber_loss)])
def test_a_missing_number_takes_no_part_and_gives_no_gradient(name: str, of: Any) -> None:
    outputs = seeded(3, 2).requires_grad_()
    target = torch.tensor([[1.0, float("nan")], [float("nan"), float("nan")], [0.5, 3.0]])
    losses = compute(name, outputs, target)
    torch.testing.assert_close(losses[0], of(outputs[0, 0], target[0, 0]))
    torch.testing.assert_close(losses[2], of(outputs[2], target[2]))
    losses.sum().backward()
    assert losses[1] == 0 and outputs.grad is not None
    assert outputs.grad[1].tolist() == [0, 0] and outputs.grad[0, 1] == 0 and torch.isfinite(outputs.grad).all()


def test_the_likelihood_of_a_gaussian_is_its_density() -> None:
    mean, variance, target = seeded(4, 1), seeded(4, 1).exp(), seeded(4).flip(0)
    expected = -torch.distributions.Normal(mean[:, 0], variance[:, 0].sqrt()).log_prob(target)
    for outputs in ({"mean": mean, "variance": variance}, (mean, variance)):
        torch.testing.assert_close(compute("gaussian_nll", outputs, target), expected)


def test_pinball_is_least_at_the_quantiles() -> None:
    levels = (0.1, 0.5, 0.8)
    target = torch.linspace(0, 1, 1001, dtype=torch.float64)
    grid = torch.linspace(0, 1, 101, dtype=torch.float64)
    for column, level in enumerate(levels):
        means = []
        for value in grid:
            outputs = torch.tensor(levels, dtype=torch.float64).repeat(1001, 1)
            outputs[:, column] = value
            means.append(compute("pinball", outputs, target, levels=levels).mean())
        assert grid[torch.stack(means).argmin()].item() == pytest.approx(level)


def test_half_precision_is_widened() -> None:
    half = seeded(4).half()
    given = {"cross_entropy": (seeded(4, 3).half(), torch.tensor([0, 1, 2, 0]))}
    given |= {"pinball": (seeded(4, 2).half(), seeded(4)), "gaussian_nll": ((half, half.exp()), seeded(4))}
    for name in LOSSES:
        assert compute(name, *given.get(name, (half, torch.zeros(4))), levels=(0.1, 0.9)).dtype == torch.float32


def test_the_model_gets_the_fields_that_are_named() -> None:
    fields = {"a": seeded(3), "b": seeded(3), "y": seeded(3), "index": torch.arange(3), "weight": torch.ones(3)}
    losses = NamedLoss("mse", "y", ("b", "a"))(lambda b, a: 2 * b - a, fields)
    torch.testing.assert_close(losses, (2 * fields["b"] - fields["a"] - fields["y"]) ** 2)
    with pytest.raises(SpecError, match=r"which fields are the model's inputs \(a, b\): .* Recipe\(inputs="):
        NamedLoss("mse", "y")(lambda b, a: b, fields)
    del fields["b"]
    torch.testing.assert_close(NamedLoss("mse", "y")(lambda a: a, fields), (fields["a"] - fields["y"]) ** 2)


CRITERION = torch.nn.CrossEntropyLoss(reduction="none")


def of_module(model: Any, batch: Any) -> Any:
    return CRITERION(model(batch["x"]), batch["label"])


def of_two_kinds(model: Any, batch: Any) -> Any:
    return functional.cross_entropy(model(batch), batch) + functional.mse_loss(model(batch), batch)


def of_logits(model: Any, batch: Any) -> Any:
    hidden = model.encode(batch["x"])
    labels = functional.binary_cross_entropy_with_logits(model(hidden), batch["label"], reduction="none")
    return labels + 0.01 * functional.mse_loss(model.decode(hidden), batch["x"])


def of_margins(model: Any, batch: Any) -> Any:
    margins = torch.nn.MultiMarginLoss(reduction="none")(model(batch["x"]), batch["label"])
    return margins + functional.l1_loss(model.decode(batch["x"]), batch["x"])


def of_a_divergence(model: Any, batch: Any) -> Any:
    return functional.kl_div(model(batch), batch["soft"]) + functional.mse_loss(model(batch), batch["y"])


def my_loss(values: Any) -> Any:
    return values


def of_my_own(model: Any, batch: Any) -> Any:
    return my_loss(functional.mse_loss(model(batch), batch["y"], reduction="none"))


class Smoothed:
    def __call__(self, model: Any, batch: Any) -> Any:
        return functional.cross_entropy(model(batch), batch, label_smoothing=0.1)


def make_loss(name: str) -> Any:
    function = getattr(functional, name)
    return lambda model, batch: function(model(batch["x"]), batch["label"], reduction="none")


IMPLIED: list[Any] = [("cross_entropy", "classification"), ("huber", "regression"), (of_my_own, "regression")]
IMPLIED += [(make_loss("cross_entropy"), "classification"), (make_loss("l1_loss"), "regression")]
IMPLIED += [(functools.partial(make_loss("gaussian_nll_loss")), "gaussian"), (of_module, "classification")]
IMPLIED += [(Smoothed(), "classification")]


def test_the_task_follows_from_the_loss_or_is_asked_for() -> None:
    for loss, task in IMPLIED:
        assert Recipe(model=dict, loss=loss).known_task == Task(task)
        assert Recipe(model=dict, loss=loss, task="free").known_task == Task("free"), "what is declared counts"
    for loss in ("binary_cross_entropy", len, of_two_kinds, of_logits, of_margins, of_a_divergence):
        with pytest.raises(SpecError, match=r"Recipe\(task=...\), one of classification, multilabel, regression"):
            Recipe(model=dict, loss=loss)
        assert Recipe(model=dict, loss=loss, task="multilabel").task == Task("multilabel")


def test_another_loss_implies_another_task() -> None:
    recipe = Recipe(model=dict, loss="mse")
    assert recipe.find_task() == Task("regression")
    pipe = Pipeline(sources.arrays(x=np.zeros((4, 2), np.float32), label=np.zeros(4, np.int64)))
    options: Any = {"name": "ranked", "train": pipe, "valid": pipe, "epochs": 1, "batch_size": 2, "members": [{}]}
    options |= {"allow_overlap": True, "optimizer": {"name": "sgd", "lr": 0.1}}
    assert str(Ensemble(recipe=recipe, **options).objective) == "loss"
    classes = Ensemble(recipe=dataclasses.replace(recipe, loss=of_module), **options)
    assert str(classes.objective) == "accuracy"
    assert dataclasses.replace(recipe, loss=of_module).find_task() == Task("classification")
    assert dataclasses.replace(recipe, loss=of_module, task="regression").find_task() == Task("regression")


def test_what_is_predicted_is_laid_out_as_the_target_and_a_task_is_the_same_after_its_record() -> None:
    recipe = Recipe(model=dict, train=lambda member: None)  # which predicts classes unless it says otherwise
    assert recipe.known_task is None and recipe.find_task() == Task("classification")
    for task, values, predicted in (
        (Task("classification"), [[0.2, 0.8], [0.6, 0.4]], [1, 0]),
        (Task("multilabel"), [[0.5, 0.4]], [[True, False]]),
        (Task("gaussian"), [[1.5, 0.2], [2.5, 9.0]], [1.5, 2.5]),
        (quantiles(0.1, 0.4, 0.9), [[1.0, 2.0, 3.0]], [2.0]),
        (Task("regression"), [4.0], [4.0]),
    ):
        assert task.decide(np.array(values)).tolist() == predicted
        assert Task.from_record(task.as_record()) == task == Recipe(model=len, loss=len, task=task).task


KNOWN: list[Any] = [(np.array([0, IGNORED, 3]), False, [True, False, True])]
KNOWN += [(np.array([156, 3], np.uint8), True, [True, True]), (np.array([True, False]), True, [True, True])]
KNOWN += [(np.array([0, IGNORED], np.int8), True, [True, False])]
KNOWN += [(np.array([1.0, np.nan, IGNORED]), False, [True, False, True])]
KNOWN += [(np.array([1.0, np.nan, IGNORED], np.float32), True, [True, False, False])]


def test_what_takes_part_is_the_same_of_arrays_and_tensors() -> None:
    for target, of_labels, known in KNOWN:
        assert find_known(target, of_labels=of_labels).tolist() == known
        of_tensor = find_known(torch.from_numpy(target), of_labels=of_labels)
        assert of_tensor.dtype == torch.bool and of_tensor.tolist() == known
