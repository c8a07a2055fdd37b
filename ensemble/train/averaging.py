"""Averages of a model's weights over steps (EMA) or epochs (SWA), kept beside the model.

What is evaluated, and kept at the end, are then the averages; what is trained are the weights themselves. The
averages stand in the model's own tensors while it is evaluated, so that whatever holds the model sees them: a
train function, hooks, a compiled forward. All ranks have the same parameters, so they have the same averages.
Buffers of rank 0 count (`Optimization.share_buffers`).

Parameters are averaged; buffers are those of the model in training: vectors of a power iteration, counters, masks
and extremes have no average. The running statistics of batch normalization, whose inputs the averaged weights
change, are those of training with EMA, and computed anew with SWA (`statistics_are_stale`,
`torch.optim.swa_utils.update_bn`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from ensemble.train.batchnorm import BATCH_NORMS

_WITH_STATISTICS = (*BATCH_NORMS, nn.SyncBatchNorm)


class WeightAverage:
    """The running average of a model's parameters.

    Args:
        options: as `ensemble.spec.loops` resolves them.
        epochs: of the member, as they were declared.

    Attributes:
        count: how many weights were averaged; the average is in use from the first on.
    """

    def __init__(self, model: nn.Module, options: Mapping[str, Any], epochs: int) -> None:
        self.count = 0
        self._model, self._options = model, options
        start = options.get("start", 0)
        self._start = int(start * epochs) if start < 1 else int(start)
        self._averages: dict[str, Tensor] = {}
        self._statistics: dict[str, Tensor] = {}  # that were computed for the averaged weights
        self._statistics_of = 0  # the count for which they were
        self._is_applied = False

    @property
    def statistics_are_stale(self) -> bool:
        """Whether batch normalization has running statistics that are not those of the averaged weights."""
        if self._options["name"] != "swa" or self._statistics_of == self.count:
            return False
        return bool(self._find_statistics())

    def renew_statistics(self) -> None:
        """Take the statistics that the model has now for those of the averaged weights; they are in the model."""
        self._statistics = {name: buffer.clone() for name, buffer in self._find_statistics().items()}
        self._statistics_of = self.count

    def _find_statistics(self) -> dict[str, Tensor]:
        """The running statistics of batch normalization in the model, by name."""
        return {
            f"{path}.{name}".lstrip("."): buffer
            for path, module in self._model.named_modules()
            if isinstance(module, _WITH_STATISTICS) and module.running_mean is not None
            for name, buffer in module.named_buffers(recurse=False)
        }

    def end_step(self, epoch: int, *, is_last: bool, applied: bool) -> None:
        """Add the weights after a step, where they count.

        Args:
            epoch: the own epoch, 0-based.
            is_last: whether it was the epoch's last step.
            applied: whether it changed the weights.
        """
        if self._options["name"] == "ema":
            if applied:
                decay = min(self._options["decay"], (1 + self.count) / (10 + self.count))
                self._add(get_ema_multi_avg_fn(decay))  # type: ignore[no-untyped-call]
        elif is_last and epoch >= self._start and (epoch - self._start) % self._options["every_epochs"] == 0:
            self._add(get_swa_multi_avg_fn())  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _add(self, average: Any) -> None:
        tensors = dict(self._model.named_parameters())
        if not self._averages:
            self._averages = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        else:
            alike: dict[Any, list[str]] = {}
            for name, tensor in tensors.items():
                alike.setdefault((tensor.device, tensor.dtype), []).append(name)
            for names in alike.values():
                average([self._averages[n] for n in names], [tensors[n].detach() for n in names], self.count)
        self.count += 1

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Within the block the model has the averages, where there are any; its buffers then are those to keep."""
        if not self.count or self._is_applied:
            yield
            return
        tensors = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        trained = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        copy_into(tensors, self._averages)
        if self._statistics_of == self.count:
            copy_into(tensors, self._statistics)
        before = {name: buffer.clone() for name, buffer in self._find_statistics().items()}
        self._is_applied = True
        try:
            yield
        finally:
            self._is_applied = False
            if any(not torch.equal(buffer, before[name]) for name, buffer in self._find_statistics().items()):
                self.renew_statistics()  # whoever has the model computed them
            copy_into(tensors, trained)

    def state_dict(self) -> dict[str, Any]:
        """The averages and what belongs to them."""
        own = {"averages": dict(self._averages), "statistics": dict(self._statistics)}
        return {"count": self.count, "statistics_of": self._statistics_of, **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self.count, self._statistics_of = state["count"], state["statistics_of"]
        tensors = {**dict(self._model.named_parameters()), **self._find_statistics()}
        # Those of an earlier version have buffers among the averages.
        held = {**state["averages"], **state.get("statistics", state["averages"])}
        own = {n: torch.empty_like(each).copy_(held[n]) for n, each in tensors.items() if n in held}
        parameters = {name for name, _ in self._model.named_parameters()}
        self._averages = {name: tensor for name, tensor in own.items() if name in parameters}
        self._statistics = {name: tensor for name, tensor in own.items() if name not in parameters}


class LossProbe(nn.Module):
    """A model as `torch.optim.swa_utils.update_bn` calls it: with a batch, which `measure` knows how to use."""

    def __init__(self, model: nn.Module, measure: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        self.model, self._measure = model, measure

    def forward(self, batch: Any) -> Any:
        """The measures of the batch."""
        return self._measure(self.model, batch)


@torch.no_grad()
def copy_into(targets: Mapping[str, Tensor], sources: Mapping[str, Tensor]) -> None:
    """Copy each source into the target of its name, in place."""
    for name, source in sources.items():
        targets[name].copy_(source)
