"""Whether a model can start with the weights of another one."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from ensemble.train.job import TrainingError

MOST_NAMED = 4


class ShapeMismatchError(TrainingError):
    """A model cannot start with the weights that were declared for it, and never will."""


def check_fit(model: nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    """Check that weights have the names and shapes of a model's parameters and buffers.

    Args:
        source: the member or the file whose weights they are, for the message.

    Raises:
        ShapeMismatchError: they have not; the message names those that differ.
    """
    own = model.state_dict()
    differences = [f"{name} is only in {source}" for name in weights if name not in own]
    for name, tensor in own.items():
        if name not in weights:
            differences.append(f"{source} has no {name}")
        elif not nn.parameter.is_lazy(tensor) and tensor.shape != weights[name].shape:
            differences.append(f"{name} is {list(tensor.shape)}, in {source} {list(weights[name].shape)}")
    if differences:
        more = f"; and {len(differences) - MOST_NAMED} more" if len(differences) > MOST_NAMED else ""
        raise ShapeMismatchError(
            f"the model cannot start with the weights of {source}: {'; '.join(differences[:MOST_NAMED])}{more}. "
            "Start it without them, or leave out what changes its shape"
        )
