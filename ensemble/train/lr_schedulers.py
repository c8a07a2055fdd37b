"""Learning-rate schedules: pure functions of a step's number, and the torch scheduler that applies one.

`damped` and `capped_linear` are those of Svyatkovskiy et al. 2019 (FRNN), in absolute rates: a rate λ of one
worker becomes min(n λ, 0.1), after `damped` has divided λ by 1 + n/100; below the cap it decays by γ an epoch. The
others multiply the optimizer's rate by a factor. All may begin with a linear warm-up (Goyal et al. 2017).
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, LRScheduler

from ensemble.spec.options import SCHEDULES, NamedOptions, resolve_with_hyperparameters
from ensemble.train.job import TrainingError

Factor = Callable[[int], float]
#: Attributes of torch's schedulers that are numbers of steps.
_COUNTS = ("T_max", "T_0", "total_iters", "total_steps", "step_size", "milestones", "_milestones")


def damped(lr: float, workers: float, epoch: int, *, gamma: float, max_lr: float, n0: float) -> float:
    """The rate of FRNN's damped law: min(n λ γ^epoch, max_lr) with λ = min(λ0, max_lr) / (1 + n/n0)."""
    return min(workers * min(lr, max_lr) / (1 + workers / n0) * math.pow(gamma, epoch), max_lr)


def capped_linear(lr: float, workers: float, epoch: int, *, gamma: float, max_lr: float) -> float:
    """The rate of linear scaling up to a cap: min(n λ0 γ^epoch, max_lr)."""
    return min(workers * lr * math.pow(gamma, epoch), max_lr)


def warm_up(step: int, warmup_steps: int) -> float:
    """Rises by equal steps from 1/warmup_steps at step 0 to 1 at the last step of the warm-up; then 1."""
    return min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0


def progress(step: int, steps: int, warmup_steps: int) -> float:
    """How much of the training after the warm-up is over: 0 until its first step, then below 1."""
    return min(1.0, max(0, step - warmup_steps) / max(1, steps - warmup_steps))


def polynomial(step: int, steps: int, *, power: float, end: float, warmup_steps: int = 0) -> float:
    """Warm-up, then end + (1 − end)(1 − progress)^power."""
    remaining = 1 - progress(step, steps, warmup_steps)
    return warm_up(step, warmup_steps) * (end + (1 - end) * math.pow(remaining, power))


def cosine(step: int, steps: int, *, end: float, warmup_steps: int = 0) -> float:
    """Warm-up, then half a cosine from 1 to `end` (Loshchilov & Hutter 2017, without restarts)."""
    way = progress(step, steps, warmup_steps)
    return warm_up(step, warmup_steps) * (end + (1 - end) * (1 + math.cos(math.pi * way)) / 2)


def cyclic(step: int, cycle_steps: int, *, end: float, warmup_steps: int = 0) -> float:
    """Warm-up, then half a cosine from 1 to `end`, again and again (Loshchilov & Hutter 2017: warm restarts)."""
    if step < cycle_steps:
        return cosine(step, cycle_steps, end=end, warmup_steps=warmup_steps)
    return warm_up(step, warmup_steps) * cosine(step % cycle_steps, cycle_steps, end=end)


def step_decay(
    step: int,
    steps_per_epoch: int,
    *,
    gamma: float,
    milestones: Sequence[float] = (),
    every_epochs: float | None = None,
    warmup_steps: int = 0,
) -> float:
    """γ to the number of milestones (epochs, may be fractions) that are over, or of every so many epochs (30)."""
    every = max(1, round((every_epochs or 30.0) * steps_per_epoch))
    drops = sum(step >= round(m * steps_per_epoch) for m in milestones) if milestones else step // every
    return warm_up(step, warmup_steps) * math.pow(gamma, drops)


def make_schedule(
    options: NamedOptions,
    optimizer: torch.optim.Optimizer,
    params: Mapping[str, Any],
    *,
    steps: int,
    steps_per_epoch: int,
    workers: int,
    batch_size: int,
) -> LRScheduler:
    """The scheduler, to be stepped after each step of training.

    Its state is the number of steps done: the rate is a function of that alone, so a resume gets the same.

    Args:
        options: a name of `ensemble.spec.options.SCHEDULES`, or a dict of the name and options. `warmup_epochs`
            may be a fraction. `base_batch_size` is the batch size for which the learning rate was chosen: the rate
            is multiplied by batch_size / base_batch_size (Goyal et al. 2017); None does not change it. In the laws
            of FRNN that quotient is n; None takes the number of workers.
        optimizer: its learning rates are the λ0.
        params: hyperparameters; one of an option's name takes the option's place.
    """
    chosen = resolve_with_hyperparameters("schedule", options, SCHEDULES, params)
    name = chosen.pop("name")
    warmup_steps = round(chosen.pop("warmup_epochs") * steps_per_epoch)
    base = chosen.pop("base_batch_size")
    if name in ("damped", "capped_linear"):
        law = functools.partial(damped if name == "damped" else capped_linear, **chosen)
        n = workers if base is None else batch_size / base
        lrs = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
        return LambdaLR(optimizer, [_divide_law(law, lr, n, steps_per_epoch, warmup_steps) for lr in lrs])
    chosen["warmup_steps"] = warmup_steps
    factor: Factor
    decays: dict[str, Callable[..., float]] = {"polynomial": polynomial, "cosine": cosine}
    if name == "constant":
        factor = functools.partial(warm_up, **chosen)
    elif name == "step":
        factor = functools.partial(step_decay, steps_per_epoch=steps_per_epoch, **chosen)
    elif name == "cyclic":
        cycle_steps = max(1, round(chosen.pop("cycle_epochs") * steps_per_epoch))
        factor = functools.partial(cyclic, cycle_steps=cycle_steps, **chosen)
    else:
        factor = functools.partial(decays[name], steps=steps, **chosen)
    scale = 1.0 if base is None else batch_size / base
    return LambdaLR(optimizer, lambda step: scale * factor(step))


def _divide_law(
    law: Callable[[float, float, int], float], lr: float, workers: float, steps_per_epoch: int, warmup_steps: int
) -> Factor:
    """Warm-up, then an absolute rate, as a factor of λ0."""
    return lambda step: warm_up(step, warmup_steps) * law(lr, workers, step // steps_per_epoch) / lr if lr else 0.0


def check_schedule(schedule: Any, steps_per_epoch: int, epochs: int, remark: Callable[[str], None]) -> None:
    """Refuse a scheduler that is stepped by a metric; remark on one that seems to count epochs, not steps.

    Raises:
        TrainingError: its `step` needs an argument.
    """
    name, parameters = type(schedule).__name__, inspect.signature(schedule.step).parameters.values()
    needed = [
        p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if needed:
        raise TrainingError(
            f"the schedule {name} is stepped with {needed[0]!r}, and that of a member after each batch, without: "
            "leave it out, keep it in a train function by member.state('schedule', scheduler), and call "
            f"scheduler.step({needed[0]}) after each epoch"
        )
    parts = list(_list_parts(schedule))
    counts = [count for part in parts for count in _list_counts(part)]
    decay = math.prod(part.gamma for part in parts if isinstance(part, ExponentialLR))
    if steps_per_epoch > 1 and (
        max(counts, default=math.inf) <= epochs or decay ** (steps_per_epoch * epochs) < 1e-9
    ):
        remark(
            f"the schedule {name} seems to count epochs, and is stepped after each of {steps_per_epoch} steps an "
            "epoch: give it numbers of steps, schedule(optimizer, params, steps, steps_per_epoch), or take one by "
            "name, such as Ensemble(schedule='cosine')"
        )


def _list_parts(schedule: Any) -> Iterator[Any]:
    """A scheduler and those that it holds."""
    yield schedule
    for value in vars(schedule).values():
        for part in value if isinstance(value, list | tuple) else [value]:
            if isinstance(part, LRScheduler):
                yield from _list_parts(part)


def _list_counts(schedule: Any) -> Iterator[int]:
    for name in _COUNTS:
        value = getattr(schedule, name, ())
        yield from [value] if isinstance(value, int) else value
