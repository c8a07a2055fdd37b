"""Sees to it that the models of two members share no parameter that trains.

A network at the level of a module would be trained by each member of a process in turn; in a loaded ensemble it
has the weights of the member that was loaded last.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import MutableMapping

from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from ensemble.spec import SpecError

#: The parameters of models that this process has built to train, or to load, as keys.
TRAINED: MutableMapping[nn.Parameter, None] = WeakTensorKeyDictionary()
LOADED: MutableMapping[nn.Parameter, None] = WeakTensorKeyDictionary()


@functools.cache
def note_process() -> None:
    """Take note of the parameters of this process, before it builds the first model that it trains.

    Frozen objects (`gc.freeze`) are not looked at: a fork server's, which has no code of the user's.
    """
    TRAINED.update(dict.fromkeys(value for value in gc.get_objects() if type(value) is nn.Parameter))


def refuse_shared(model: nn.Module) -> None:
    """Take note of the parameters of a new model; raises SpecError where one that trains is not its own."""
    shared = [
        name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter in TRAINED
    ]
    if shared:
        more = f" and {len(shared) - 1} more" if len(shared) > 1 else ""
        raise SpecError(
            f"the model has a parameter that was there before it was built, {shared[0]}{more}: members would "
            "train it one after the other. Build the network inside Recipe.model, take copy.deepcopy() of it "
            "there, or freeze it (requires_grad_(False))"
        )
    TRAINED.update(dict.fromkeys(model.parameters()))
