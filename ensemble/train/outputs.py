"""Computes a Recipe's model outputs and probabilities for a batch.

A Recipe has no function for its outputs: it has `loss(model, batch)`, which calls the model in its own way
(which fields, which order, which preprocessing). So the outputs are what the model *returned inside the loss*,
seen by a forward hook. Outside training nothing but the outputs is wanted, and there may be no label: then the
loss is left right after the forward pass.

Both functions leave the model's mode and the gradient mode to the caller, who usually wants `model.eval()` and
`torch.no_grad()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from ensemble.spec import Recipe


class OutputError(Exception):
    """The outputs of a Recipe's model are not available; the message says what to declare."""


class _ForwardDone(BaseException):
    """Leaves a loss right after the forward pass; not an Exception, so that no `except` of the user takes it."""


@contextmanager
def capture_output(model: torch.nn.Module, *, leave: bool = False) -> Iterator[Callable[[], Any]]:
    """Yield a function that gives what the first call of `model` inside the block returned.

    Args:
        leave: leave the block right after that call.
    """
    returned: list[Any] = []

    def keep(module: torch.nn.Module, args: Any, output: Any) -> None:
        if not returned:
            returned.append(output)
        if leave:
            raise _ForwardDone

    def first() -> Any:
        if not returned:
            raise OutputError(
                "Recipe.loss never called model(...) itself (a method or a part of it does not count); "
                "declare Recipe.predict(model, batch) -> probabilities"
            )
        return returned[0]

    handle = model.register_forward_hook(keep)
    try:
        yield first
    except _ForwardDone:
        pass
    finally:
        handle.remove()


def compute_outputs(recipe: Recipe, model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> Any:
    """What `model` returns for `batch` inside `recipe.loss`, without computing the loss.

    Works for a batch that has no `recipe.target`: a loss that looks it up before its forward pass finds zeros,
    int64 [b].

    Raises:
        OutputError: when the loss does not call the model itself.
    """
    with capture_output(model, leave=True) as returned:
        recipe.loss(model, _with_target(recipe.target, batch))
    return returned()


def compute_probabilities(
    recipe: Recipe, model: torch.nn.Module, batch: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Class probabilities float32 [b, C]: `recipe.predict`, or what follows from the model's outputs.

    Raises:
        OutputError: when the outputs are not one score per class and `recipe.predict` is not declared.
    """
    if recipe.predict is not None:
        predicted: torch.Tensor = recipe.predict(model, batch)
        return predicted.float()
    return to_probabilities(compute_outputs(recipe, model, batch))


def to_probabilities(outputs: Any) -> torch.Tensor:
    """Probabilities, float32, of scores: the softmax over the last axis of [b, C], C >= 2.

    One score per sample, [b] or [b, 1], is the logit of the second of two classes: [b, 2].
    """
    import torch

    if not isinstance(outputs, torch.Tensor) or not outputs.is_floating_point() or outputs.dim() == 0:
        raise OutputError(
            f"the model returned {_describe(outputs)}, not scores [b, classes]; "
            "declare Recipe.predict(model, batch) -> probabilities"
        )
    scores = outputs.float()
    if scores.shape[1:].numel() == 1:
        second = torch.sigmoid(scores.reshape(-1, 1))
        return torch.cat([1 - second, second], dim=1)
    return torch.softmax(scores, dim=-1)


def explain_label_error(
    recipe: Recipe, model: torch.nn.Module, batch: Mapping[str, torch.Tensor], split: str
) -> str | None:
    """The first label of this batch for which the model has no class, as an error message; None if there is none.

    Called after the loss has failed, whose own message has neither the sample nor the split. Not on a GPU, which
    is unusable after such an error.
    """
    import torch

    target = batch.get(recipe.target)
    if target is None or target.dim() != 1 or target.is_floating_point() or target.device.type != "cpu":
        return None
    try:
        with torch.no_grad():
            outputs = compute_outputs(recipe, model, batch)
    except Exception:  # a failure before the model returned has nothing to do with labels
        return None
    if not isinstance(outputs, torch.Tensor) or outputs.dim() != 2 or outputs.shape[1] < 2:
        return None
    wrong = ((target < 0) | (target >= outputs.shape[1])).nonzero().flatten().tolist()
    if not wrong:
        return None
    return (
        f"Ensemble.{split}: sample {int(batch['index'][wrong[0]])} has the label {int(target[wrong[0]])} in "
        f"{recipe.target!r}, and the model has the classes 0 ... {outputs.shape[1] - 1}"
    )


def _with_target(target: str, batch: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """The batch, with zeros for a target that it lacks."""
    import torch

    if target in batch or not batch:
        return batch
    some = next(iter(batch.values()))
    return {**batch, target: torch.zeros(len(some), dtype=torch.int64, device=some.device)}


def _describe(value: Any) -> str:
    shape = getattr(value, "shape", None)
    kind = type(value).__name__
    return f"a {kind}" if shape is None else f"a {kind} of shape {list(shape)} and dtype {value.dtype}"
