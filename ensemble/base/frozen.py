"""Opens the base of a run: its tensors are pages of its file, which the kernel keeps once for all processes."""

from __future__ import annotations

import contextlib
import copy
import os
import resource
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ensemble.base.files import BaseFile
from ensemble.comm._compat import count_writes
from ensemble.spec import SpecError
from ensemble.store import RunDir
from ensemble.train.job import TrainingError
from ensemble.train.loose_tensors import find_loose
from ensemble.train.own_tensors import BASES, OPENED, own_state
from ensemble.train.pickled import join_tensors

_last: FrozenBase | None = None  # that this process has opened

#: The modules around which a model was built.
COPIES: MutableMapping[nn.Module, nn.Module] = WeakKeyDictionary()


class FrozenBase:
    """A frozen network over tensors that this process shares with others.

    Attributes:
        digest: of its weights; source: where it came from.
        storages: addresses of its tensors' memory.
    """

    def __init__(self, path: Path, record: BaseFile) -> None:
        self.digest, self.source, self.path, self.record = record.digest, record.source, path, record
        self._module = _map_module(path, record)
        self._take_note()

    def _take_note(self) -> None:
        self._tensors = _list_tensors(self._module)
        addresses = {tensor.untyped_storage().data_ptr() for tensor in self._tensors.values()}
        self.storages = addresses - {0}  # that of all empty tensors
        self._versions = {name: count_writes(tensor) for name, tensor in self._tensors.items()}

    def build(self, model: Callable[..., Any], params: Mapping[str, Any]) -> Any:
        """What a model function builds around a copy.

        Raises:
            SpecError: a parameter of the base is to be trained, or was cast.
        """
        network = self.copy()
        built = model(params, network)
        if not isinstance(built, nn.Module):
            return built
        refuse_extra_state(built, "Recipe.model")
        BASES[built], COPIES[built] = self, network
        for name, tensor in self._tensors.items():
            if tensor.numel() and self.is_own(tensor):
                _forget()
                raise SpecError(
                    f"Recipe.model has cast or moved {name} of the base ({self.source}), which all members share: "
                    "cast only the member's own parts, and the tensors that it passes to the base"
                )
        for name, parameter in built.named_parameters():
            if parameter.requires_grad and not self.is_own(parameter):
                parameter.requires_grad_(False)
                raise SpecError(
                    f"Recipe.model lets {name} train, a parameter of the base ({self.source}) that all members "
                    "share: put copy.deepcopy() of its module in its place"
                )
        return built

    def is_own(self, tensor: Any) -> bool:
        """Whether the memory of a model's tensor is not the base's."""
        return nn.parameter.is_lazy(tensor) or tensor.untyped_storage().data_ptr() not in self.storages

    def select(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """What of a model's `state_dict` is its own."""
        return {name: tensor for name, tensor in state.items() if self.is_own(tensor)}

    def load(self, model: nn.Module, weights: Mapping[str, Any]) -> None:
        """Load a model's own weights.

        Raises:
            RuntimeError: they are not this model's.
        """
        own = own_state(model)
        if own.keys() != weights.keys():
            raise RuntimeError(f"the names differ in {', '.join(sorted(own.keys() ^ weights.keys())[:4])}")
        with torch.no_grad():  # load_state_dict() writes to some of what it is not given: num_batches_tracked
            for name, tensor in own.items():
                if nn.parameter.is_lazy(tensor):
                    tensor.materialize(weights[name].shape)
                if tensor.shape != weights[name].shape:
                    raise RuntimeError(f"{name} is {list(tensor.shape)}, and was {list(weights[name].shape)}")
                tensor.copy_(weights[name])

    def describe(self) -> dict[str, str]:
        """What a checkpoint says of it."""
        return {"digest": self.digest, "source": self.source}

    def copy(self) -> nn.Module:
        """Modules of their own over the shared tensors: one member may put layers inside, and others see nothing.

        Those that are the base's stay in evaluation mode, whatever `train()` is called.
        """
        copied = copy.deepcopy(self._module, {id(tensor): tensor for tensor in self._tensors.values()})
        for module in copied.modules():
            vars(module)["train"] = types.MethodType(_train_inside, module)
        return copied

    def place(self, device: torch.device) -> None:
        """Have the tensors on a device: one copy in each process, where it is no CPU."""
        if any(tensor.device != device for tensor in self._tensors.values()):
            self._module.to(device)
            self._take_note()

    def is_written(self) -> bool:
        """Whether torch has counted a write to one of the tensors."""
        return self.find_written(whole=False) is not None

    def find_written(self, *, whole: bool) -> str | None:
        """The name of a tensor that was written to; None where none was.

        Args:
            whole: compare all bytes with those of the file, as writes by `.data` or from outside of torch are
                counted nowhere.
        """
        counted = (name for name, tensor in self._tensors.items() if count_writes(tensor) != self._versions[name])
        written = next(counted, None)
        if written is None and whole:
            limits = resource.getrlimit(resource.RLIMIT_DATA)
            saved = _list_tensors(_map_module(self.path, self.record))
            differing = (name for name, tensor in self._tensors.items() if not _is_same(tensor, saved[name]))
            written = next(differing, None)
            resource.setrlimit(resource.RLIMIT_DATA, limits)  # the second mapping is gone after this
        return written

    def check_unwritten(self, *, whole: bool) -> None:
        """Raise TrainingError where somebody has written to the base; see `find_written`."""
        if (name := self.find_written(whole=whole)) is not None:
            _forget()
            raise TrainingError(
                f"the member has written to {name} of the frozen base ({self.source}), which all members share: "
                "put copy.deepcopy() of its module in its place in Recipe.model"
            )


@contextlib.contextmanager
def use_base(run_dir: str | os.PathLike[str], device: torch.device | str) -> Iterator[FrozenBase]:
    """A context in which models are built on the base of a run, on a device."""
    base = open_base(run_dir)
    base.place(torch.device(device))
    before = OPENED.set(base)
    try:
        yield base
    finally:
        OPENED.reset(before)


def open_base(run_dir: str | os.PathLike[str]) -> FrozenBase:
    """The base of a run; the one that this process has open, where that is it.

    Raises:
        StoreError: its file is gone or damaged, or somebody else may write it.
    """
    global _last
    run = RunDir(run_dir)
    record = BaseFile.read(run)
    path = record.path(run)
    if _last is None or (_last.path, _last.record) != (path, record) or _last.is_written():
        record.check(run)
        run.check_owners(path)
        _last = FrozenBase(path, record)
    return _last


def refuse_extra_state(model: nn.Module, source: str) -> None:
    """Raise SpecError where modules keep more than tensors: no digest has it, nor does `FrozenBase.load`."""
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise SpecError(f"{source} has {name or 'a network'} with get_extra_state: make that a buffer")


def _forget() -> None:
    global _last
    _last = None


def _map_module(path: Path, record: BaseFile) -> nn.Module:
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if soft != resource.RLIM_INFINITY:  # pages that could be written count for it, although they never are
        raised = soft + path.stat().st_size
        resource.setrlimit(resource.RLIMIT_DATA, (raised if hard < 0 else min(raised, hard), hard))
    saved = torch.load(path, mmap=True, weights_only=True)
    module = join_tensors(saved["module"].numpy().tobytes(), saved["tensors"])
    assert isinstance(module, nn.Module)
    return module


def _list_tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers()), **find_loose(module)}


def _is_same(tensor: Tensor, saved: Tensor) -> bool:
    """Whether two tensors have the same bits."""
    first, second = (part.detach().contiguous().reshape(-1).view(torch.uint8) for part in (tensor, saved))
    return torch.equal(first.cpu(), second)


def _train_inside(module: nn.Module, mode: bool = True) -> nn.Module:
    """`train()` of a module of the base: what a member has put inside it trains, itself it does not."""
    for child in module.children():
        child.train(mode)
    return module
