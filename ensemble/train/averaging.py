"""Averages of a model's weights over steps (EMA) or epochs (SWA), kept beside the model.

What is evaluated, and kept at the end, are then the averages, which stand in the model's own tensors meanwhile.
Buffers are those of the model in training; with SWA the running statistics of batch normalization are computed
anew for the averaged weights (`torch.optim.swa_utils.update_bn`). All ranks have the same averages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn, update_bn

from ensemble.spec.callbacks import MemberCallback
from ensemble.train.batchnorm import BATCH_NORMS
from ensemble.train.evaluator import evaluation_mode
from ensemble.train.own_tensors import select_own
from ensemble.train.seeding import seed_everything, step_seed

if TYPE_CHECKING:
    from ensemble.train.evaluator import Measure
    from ensemble.train.member import TrainContext
    from pipelines import Batch

_WITH_STATISTICS = (*BATCH_NORMS, nn.SyncBatchNorm)
_UNKNOWN_CALL = (
    "averaged weights need running statistics of their own, which cannot be computed, as it is not known how the "
    "model is called: they get the average of those in training, unless the train function computes them within "
    "member.evaluating(); declare Recipe.predict, or call member.validate_with(measure) before the loop"
)


class Averaging(MemberCallback):
    """The running average of a model's parameters: the callback of `averaging=`.

    Attributes:
        count: how many weights were averaged; the average is in use from the first on.
    """

    def __init__(self, options: Mapping[str, Any], epochs: int) -> None:
        self.count = 0
        self._options = options
        start = options.get("start", 0)
        self._start = int(start * epochs) if start < 1 else int(start)
        self._averages: dict[str, Tensor] = {}
        self._statistics: dict[str, Tensor] = {}  # that were computed for the averaged weights
        self._statistics_of = 0  # the count for which they were
        self._is_applied = self._has_warned = False

    def begin_training(self, member: TrainContext) -> None:
        """See `MemberCallback`: the averages of a checkpoint go to the model's device."""
        for name, tensor in member.model.named_parameters():
            if name in self._averages:
                self._averages[name] = self._averages[name].to(tensor.device, tensor.dtype)

    def end_step(self, member: TrainContext, *, applied: bool) -> None:
        """See `MemberCallback`: add the weights where they count."""
        if self._options["name"] == "ema":
            if applied:
                decay = min(self._options["decay"], (1 + self.count) / (10 + self.count))
                self._add(member.model, get_ema_multi_avg_fn(decay))  # type: ignore[no-untyped-call]
            return
        epoch, step = member.position["epoch"], member.position["step"]
        is_last, after = step == member.steps_per_epoch, epoch - self._start
        if is_last and after >= 0 and after % self._options["every_epochs"] == 0:
            self._add(member.model, get_swa_multi_avg_fn())  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _add(self, model: nn.Module, average: Any) -> None:
        own = select_own(model)
        tensors = {name: tensor for name, tensor in model.named_parameters() if own(tensor)}
        if not self._averages:
            self._averages = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        else:
            alike: dict[Any, list[str]] = {}
            for name, tensor in tensors.items():
                alike.setdefault((tensor.device, tensor.dtype), []).append(name)
            for names in alike.values():
                average([self._averages[n] for n in names], [tensors[n].detach() for n in names], self.count)
        self.count += 1

    def other_weights(self, member: TrainContext) -> contextlib.AbstractContextManager[None] | None:
        """See `MemberCallback`: the averages, where there are any."""
        return self._applied(member) if self.count else None

    @contextlib.contextmanager
    def _applied(self, member: TrainContext) -> Iterator[None]:
        """Within the block the model has the averages; its buffers then are those to keep."""
        if self._is_applied:
            yield
            return
        model, own = member.model, select_own(member.model)
        everything = (*model.named_parameters(), *model.named_buffers())
        tensors = {name: tensor for name, tensor in everything if own(tensor)}
        trained = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        _copy_into(tensors, self._averages)
        if self._statistics_of == self.count:
            _copy_into(tensors, self._statistics)
        self._is_applied = True
        try:
            is_stale = self._options["name"] == "swa" and self._statistics_of != self.count
            if is_stale and _find_statistics(model):
                self._compute_statistics(member)
            before = {name: buffer.clone() for name, buffer in _find_statistics(model).items()}
            yield
            if any(not torch.equal(buffer, before[name]) for name, buffer in _find_statistics(model).items()):
                self._take_statistics(model)  # whoever has the model computed them
        finally:
            self._is_applied = False
            _copy_into(tensors, trained)

    def _compute_statistics(self, member: TrainContext) -> None:
        """Compute the running statistics by the epoch in progress, where it is known how the model is called."""
        state, model = member._state, member.model
        measure: Any = state.forward or state.recipe.predict or (state.call and state.call.call)
        if measure is None:
            if not self._has_warned:
                self._has_warned = True
                member.log(_UNKNOWN_CALL)
            return

        def batches() -> Iterator[Batch]:
            for batch in state.data.reread(state.at.epoch, state.collate):
                if len(batch["index"]):
                    yield batch
                state.report_progress()

        seed_everything(step_seed(state.identity.seed, state.comm.rank, state.global_step), state.device)
        state.optimization.share_buffers()
        with evaluation_mode(model), torch.no_grad(), state.precision.autocast():
            update_bn(batches(), _Probe(model, measure))
        self._take_statistics(model)

    def _take_statistics(self, model: nn.Module) -> None:
        """Take the statistics that the model has now for those of the averaged weights."""
        self._statistics = {name: buffer.clone() for name, buffer in _find_statistics(model).items()}
        self._statistics_of = self.count

    def state_dict(self) -> dict[str, Any]:
        """The averages and what belongs to them."""
        own = {"averages": dict(self._averages), "statistics": dict(self._statistics)}
        return {"count": self.count, "statistics_of": self._statistics_of, **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self.count, self._statistics_of = state["count"], state["statistics_of"]
        self._averages, self._statistics = dict(state["averages"]), dict(state["statistics"])


class _Probe(nn.Module):
    """A model as `torch.optim.swa_utils.update_bn` calls it: with a batch, which `measure` knows how to use."""

    def __init__(self, model: nn.Module, measure: Measure) -> None:
        super().__init__()
        self.model, self._measure = model, measure

    def modules(self, remove_duplicate: bool = True) -> Iterator[nn.Module]:
        """All whose statistics are computed: not those of a base."""
        own = select_own(self.model)
        return (
            part
            for part in super().modules(remove_duplicate)
            if (mean := getattr(part, "running_mean", None)) is None or own(mean)
        )

    def forward(self, batch: Any) -> Any:
        return self._measure(self.model, batch)


def _find_statistics(model: nn.Module) -> dict[str, Tensor]:
    """The running statistics of batch normalization in the model, by name; not those of its base."""
    own = select_own(model)
    return {
        f"{path}.{name}".lstrip("."): buffer
        for path, module in model.named_modules()
        if isinstance(module, _WITH_STATISTICS) and module.running_mean is not None
        for name, buffer in module.named_buffers(recurse=False)
        if own(buffer)
    }


@torch.no_grad()
def _copy_into(targets: Mapping[str, Tensor], sources: Mapping[str, Tensor]) -> None:
    """Copy each source into the target of its name, in place."""
    for name, source in sources.items():
        targets[name].copy_(source)
