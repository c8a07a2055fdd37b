"""Sees to it that the models of two members share no parameter that trains.

A network at the level of a module would be trained by each member of a process in turn; in a loaded ensemble it
has the weights of the member that was loaded last.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Iterable

from torch import nn

from ensemble.spec import SpecError


class Noted:
    """Parameters that were there before the next model is built."""

    def __init__(self) -> None:
        self._by_id: dict[int, weakref.ref[nn.Parameter]] = {}

    def add(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take note of parameters."""
        for dead in [key for key, reference in self._by_id.items() if reference() is None]:
            del self._by_id[dead]
        self._by_id.update({id(each): weakref.ref(each) for each in parameters})

    def find(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """The parameters of a new model that are not its own, by name."""
        known = self._by_id
        return {name: p for name, p in model.named_parameters() if id(p) in known and known[id(p)]() is p}


TRAINED, LOADED = Noted(), Noted()


@functools.cache
def note_process() -> None:
    """Take note of the parameters of this process, before it builds the first model that it trains.

    Frozen objects (`gc.freeze`) are not looked at: a fork server's, which has no code of the user's.
    """
    TRAINED.add(each for each in gc.get_objects() if type(each) is nn.Parameter)


def refuse_shared(model: nn.Module) -> None:
    """Take note of the parameters of a new model; raises SpecError where one that trains is not its own."""
    shared = [name for name, each in TRAINED.find(model).items() if each.requires_grad]
    if shared:
        more = f" and {len(shared) - 1} more" if len(shared) > 1 else ""
        raise SpecError(
            f"the model has a parameter that was there before it was built, {shared[0]}{more}: members would "
            "train it one after the other. Build the network inside Recipe.model, take copy.deepcopy() of it "
            "there, or freeze it (requires_grad_(False))"
        )
    TRAINED.add(model.parameters())
