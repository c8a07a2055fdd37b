"""Mixup (Zhang et al. 2018): trains on pairs of samples, mixed by a random share.

    x = share * x[i] + (1 - share) * x[partner of i]
    loss = share * loss(x, target[i]) + (1 - share) * loss(x, target[partner of i])

The share is one number a step, drawn from Beta(alpha, alpha), equal on all ranks. Partners are drawn among a
rank's samples; a sample of weight 0 is nobody's partner, so that what a member is not to learn from has no
influence. Fields of floats are mixed, but for the target and the weights. Draws depend on the member's seed, the
rank and the step alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ensemble.train.job import TrainingError
from ensemble.train.seeding import step_seed
from pipelines import Batch

_NOT_MIXED = ("index", "weight")


class MixedBatch(Batch):
    """A batch of mixed samples; its target is that of the samples with the share.

    Attributes:
        share: of each sample; 1: nothing is mixed.
        target: the field of the target.
        partner_target: the target of each one's partner; None where nothing is mixed.
    """

    share: float
    target: str
    partner_target: Tensor | None

    def losses(self, compute: Callable[[Any], Tensor]) -> Tensor:
        """The loss of each mixed sample, [b].

        Args:
            compute: `compute(target) -> [b]`, the losses for a target.
        """
        own = compute(self.get(self.target))
        if self.partner_target is None:
            return own
        return self.share * own + (1 - self.share) * compute(self.partner_target)


def mix(batch: Batch, target: str, alpha: float, seed: int, rank: int, step: int) -> MixedBatch:
    """Mix the samples of a rank's batch, or of a part of it.

    Args:
        target: the field of the target.
        alpha: the parameter of mixup; 0: nothing is mixed.
        seed: of the member.
        step: of the member, over all epochs.

    Raises:
        TrainingError: the batch has no such field, or none to mix.
    """
    made = _like(batch, dict(batch))
    made.target, made.share, made.partner_target = target, 1.0, None
    if not alpha:
        return made
    if target not in batch:
        raise TrainingError(f"mixup: the batch has no target {target!r}; declare Recipe(target=...)")
    mixed = [
        name for name, value in batch.items() if name not in (*_NOT_MIXED, target) and value.is_floating_point()
    ]
    if not mixed:
        raise TrainingError(f"mixup needs a field of floats to mix; the batch has {', '.join(batch)}")
    share = float(np.random.default_rng((0, step_seed(seed, 0, step))).beta(alpha, alpha))
    partner = _draw_partners(batch, np.random.default_rng((1, step_seed(seed, rank, step))))
    for name in mixed:
        value = batch[name]
        made[name] = share * value + (1 - share) * value[partner]
    made.share, made.partner_target = share, batch[target][partner]
    return made


def _draw_partners(batch: Batch, rng: np.random.Generator) -> Tensor:
    """For each sample the row of its partner: a permutation of those with a weight; the others have themselves."""
    weight = batch.get("weight")
    index = batch["index"]
    partner = np.arange(len(index))
    usable = partner if weight is None else np.flatnonzero(weight.detach().cpu().numpy())
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
