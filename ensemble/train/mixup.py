"""Mixup (Zhang et al. 2018): trains on pairs of samples, mixed by a random share.

    x = share * x[i] + (1 - share) * x[partner of i]
    loss = share * loss(x, target[i]) + (1 - share) * loss(x, target[partner of i])

The share is one number a step, drawn from Beta(alpha, alpha), equal on all ranks. Partners are drawn among a
rank's samples; a sample of a target that takes no part is nobody's partner, so that what a member is not to learn
from has no influence. Where samples have weights, each of the two losses has that of its sample.
Fields of floats are mixed, but for the target and the weights. Draws depend on the member's seed, the rank and the
step alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ensemble.spec.callbacks import Loss, MemberCallback
from ensemble.spec.losses import NamedLoss
from ensemble.spec.task import find_known
from ensemble.train.job import TrainingError
from ensemble.train.seeding import step_seed
from pipelines import Batch

if TYPE_CHECKING:
    from ensemble.train.member import TrainContext


class Mixup(MemberCallback):
    """Mixes the samples of training batches: the callback of `mixup=`."""

    def __init__(self, alpha: float) -> None:
        self._alpha, self._has_mixed = alpha, False

    def state_dict(self) -> dict[str, Any]:
        """See `MemberCallback`; draws follow from the step."""
        return {}

    def wrap_loss(self, member: TrainContext, loss: Loss) -> Loss:
        """See `MemberCallback`."""
        return lambda model, batch: mixed_losses(loss, model, self.mix(member, batch))

    def mix(self, member: TrainContext, batch: Batch) -> MixedBatch:
        """Mix the samples of a training batch, or of a part of it."""
        state = member._state
        own, loss = state.identity, state.recipe.loss
        inputs = loss.find_inputs(batch) if isinstance(loss, NamedLoss) and not state.is_own_loop else ()
        step, weighted = state.global_step, own.weights is not None
        mixed = mix(batch, state.target, self._alpha, own.seed, member.rank, step, inputs, weighted=weighted)
        self._has_mixed = True
        return mixed

    def after_backward(self, member: TrainContext) -> None:
        """See `MemberCallback`; refuses a train function that mixes nothing in its first step."""
        parts = member._state.micro_batches
        is_left_out = not self._has_mixed and parts is not None and len(parts.batch["index"])
        if is_left_out and not member._state.global_step:  # later a loop may leave it out
            raise TrainingError("mixup= is declared, but the loop mixes nothing: train on member.mixup(batch)")


class MixedBatch(Batch):
    """A batch of mixed samples; its target is that of the samples with the share.

    Attributes:
        share: of each sample; 1: nothing is mixed.
        partner_target: the target of each one's partner; None where nothing is mixed.
        partner_weight: [b], the weight of each one's partner over its own; None where samples have none.
    """

    share: float
    target: str
    partner_target: Tensor | None
    partner_weight: Tensor | None = None

    def losses(self, compute: Callable[[Any], Tensor]) -> Tensor:
        """The loss of each mixed sample, [b].

        Args:
            compute: `compute(target) -> [b]`, the losses for a target.
        """
        own = compute(self.get(self.target))
        if self.partner_target is None:
            return own
        others = compute(self.partner_target)
        if self.partner_weight is not None:  # the sum is multiplied by the own weight (`TrainContext.backward`)
            others = others * self.partner_weight
        return self.share * own + (1 - self.share) * others


def mix(
    batch: Batch,
    target: str,
    alpha: float,
    seed: int,
    rank: int,
    step: int,
    inputs: Collection[str] = (),
    *,
    weighted: bool = False,
) -> MixedBatch:
    """Mix the samples of a rank's batch, or of a part of it.

    Args:
        inputs: the fields that the model is called with, as far as they are known.
        weighted: whether the field "weight" has the weights of the samples; else it is one as any other.
    """
    made = not_mixed(batch, target)
    if target not in batch:
        raise TrainingError(f"mixup: the batch has no target {target!r}; declare Recipe(target=...)")
    unmixed = ("index", target, *(("weight",) if weighted else ()))
    samples = len(batch["index"])
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor) and value.dim()}
    mixed = [name for name, value in tensors.items() if name not in unmixed and value.is_floating_point()]
    if not mixed:
        raise TrainingError(f"mixup needs a field of floats to mix; the batch has {', '.join(batch)}")
    for name, value in batch.items():
        is_input, rows = name in (target, *inputs), len(value) if name in tensors else samples
        if name in tensors and is_input and name not in (*mixed, *unmixed):
            why = f"is {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
            is_wrong = value.dim() > 1 and value.dtype != torch.bool  # a mask is that of its sample
        else:
            why, is_wrong = "is nested, ragged or a text", is_input and name not in tensors
        if is_wrong or rows != samples:
            raise TrainingError(
                f"mixup: the model is called with {name!r}, which {why if is_wrong else f'has {rows} rows'}, and "
                "cannot be mixed: make it floats, as by stages.scale (bools where it is a mask), mix in collate=, "
                "or leave mixup= out"
            )
    share = float(np.random.default_rng((0, step_seed(seed, 0, step))).beta(alpha, alpha))
    weight = batch["weight"] if weighted else None
    partner = _draw_partners(batch, target, np.random.default_rng((1, step_seed(seed, rank, step))))
    for name in mixed:
        value = batch[name]
        made[name] = share * value + (1 - share) * value[partner]
    made.share, made.partner_target = share, batch[target][partner]
    if weight is not None:
        made.partner_weight = weight[partner] / weight  # none is 0
    return made


def not_mixed(batch: Batch, target: str) -> MixedBatch:
    """The batch as it is, with the losses of its own targets."""
    made = _like(batch, dict(batch))
    made.target, made.share, made.partner_target = target, 1.0, None
    return made


def _draw_partners(batch: Batch, target: str, rng: np.random.Generator) -> Tensor:
    """For each sample the row of its partner: a permutation of those with a target that takes part; others have
    themselves.
    """
    index = batch["index"]
    partner = np.arange(len(index))
    is_usable = find_known(batch[target]).reshape(len(index), -1).any(dim=1)
    usable = np.flatnonzero(is_usable.cpu().numpy())
    partner[usable] = rng.permutation(usable)
    return torch.from_numpy(partner).to(index.device)


def _like(batch: Batch, fields: dict[str, Tensor]) -> MixedBatch:
    return MixedBatch(fields, epoch=batch.epoch, step=batch.step, global_size=batch.global_size)


@contextlib.contextmanager
def one_forward(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Within the block, a loss that is computed again gets the outputs of the first time.

    Yields:
        A function to call before the second time: from there on, calls of the model return, in their order, what
        they returned before.
    """
    before, forward = vars(model).get("forward"), model.forward
    outputs: list[Any] = []
    replayed: Iterator[Any] | None = None

    def recorded(*args: Any, **kwargs: Any) -> Any:
        if replayed is not None:
            return next(replayed)
        outputs.append(forward(*args, **kwargs))
        return outputs[-1]

    def replay() -> None:
        nonlocal replayed
        replayed = iter(outputs)

    model.forward = recorded
    try:
        yield replay
    finally:
        if before is None:
            del model.forward
        else:
            model.forward = before


def mixed_losses(loss: Callable[[nn.Module, Batch], Tensor], model: nn.Module, batch: MixedBatch) -> Tensor:
    """The losses of mixed samples by a loss function, with one forward pass."""
    with one_forward(model) as replay:

        def compute(target: Tensor) -> Tensor:
            if target is not batch.partner_target:
                return loss(model, batch)
            replay()
            return loss(model, _like(batch, {**batch, batch.target: target}))

        return batch.losses(compute)
