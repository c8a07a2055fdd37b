"""Opens the base of a run: its tensors are pages of its file, which the kernel keeps once for all processes."""

from __future__ import annotations

import copy
import os
import resource
import types
from pathlib import Path

import torch
from torch import Tensor, nn

from ensemble.base.files import BaseFile
from ensemble.comm._compat import count_writes
from ensemble.meter.memory import note_shared_file
from ensemble.store import DamagedError, RunDir
from ensemble.store.digests import open_checked
from ensemble.train.pickled import join_tensors

_last: FrozenBase | None = None  # that this process has opened


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

    def copy(self, device: torch.device) -> nn.Module:
        """Modules of their own over the shared tensors: one member may put layers inside, and others see nothing.

        Those that are the base's stay in evaluation mode, whatever `train()` is called.
        """
        self._place(device)
        copied = copy.deepcopy(self._module, {id(tensor): tensor for tensor in self._tensors.values()})
        for module in copied.modules():
            vars(module)["train"] = types.MethodType(_train_inside, module)
        return copied

    def _place(self, device: torch.device) -> None:
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
            saved = _list_tensors(_map_module(self.path, self.record))
            differing = (name for name, tensor in self._tensors.items() if not _is_same(tensor, saved[name]))
            written = next(differing, None)
        if written is not None:
            _forget()
        return written


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
        _last = FrozenBase(_check(run, path, record), record)
    return _last


def _forget() -> None:
    global _last
    _last = None


def _check(run: RunDir, path: Path, record: BaseFile) -> Path:
    try:
        run.check_owners(path)
        with open_checked(path, record.file):
            pass
    except (FileNotFoundError, DamagedError) as error:
        raise record.explain(error) from None
    return path


def _map_module(path: Path, record: BaseFile) -> nn.Module:
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if soft != resource.RLIM_INFINITY:  # pages that could be written count for it, although they never are
        raised = soft + path.stat().st_size
        resource.setrlimit(resource.RLIMIT_DATA, (raised if hard < 0 else min(raised, hard), hard))
    note_shared_file(path)
    saved = torch.load(path, mmap=True, weights_only=True)
    module = join_tensors(saved["module"].numpy().tobytes(), saved["tensors"])
    assert isinstance(module, nn.Module)
    return module


def _list_tensors(module: nn.Module) -> dict[str, Tensor]:
    from ensemble.train.loose_tensors import find_loose

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
