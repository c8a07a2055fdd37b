"""What people use now: Optuna's TPE and a training loop of one's own, and the best single model by validation NLL.

It has the space, networks, splits, AdamW and cosine schedule of the other methods. Its data are tensors in memory,
and a model is evaluated once, after its last epoch, which is the cheapest that can be done.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

from benchmarks.what_it_buys.tasks import MEAN, PADDING, STD, Arrays, Task, build

if TYPE_CHECKING:
    import torch


def used_cpu_s() -> float:
    """User and system time of this process and of its children that have ended."""
    return sum(os.times()[:4])


class Loop:
    """Trains models of a task on tensors in memory."""

    def __init__(self, task: Task, arrays: Arrays) -> None:
        import torch

        self.task = task
        self.splits = {name: tuple(map(torch.from_numpy, pair)) for name, pair in arrays.items()}

    def train(self, params: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
        """Train a model; returns its log probabilities on the splits "valid" and "test", [n, classes]."""
        import torch
        from torch.nn import functional

        torch.manual_seed(seed)
        net, (x, label) = build(params), self.splits["train"]
        optimizer = torch.optim.AdamW(net.parameters(), lr=params["lr"], weight_decay=params["weight_decay"])
        size, epochs = self.task.batch_size, self.task.epochs
        steps = epochs * math.ceil(len(label) / size)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda at: (1 + math.cos(math.pi * at / steps)) / 2
        )
        net.train()
        for _ in range(epochs):
            for rows in torch.randperm(len(label)).split(size):  # type: ignore[no-untyped-call]
                optimizer.zero_grad()
                functional.cross_entropy(net(self._prepare(x[rows], augment=True)), label[rows]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()
        net.eval()
        with torch.inference_mode():
            return {name: self._predict(net, self.splits[name][0]) for name in ("valid", "test")}

    def _predict(self, net: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        import torch

        parts = x.split(256)  # type: ignore[no-untyped-call]
        return torch.cat([net(self._prepare(part)).log_softmax(1) for part in parts])

    def _prepare(self, x: torch.Tensor, *, augment: bool = False) -> torch.Tensor:
        """Images as floats, those to learn from cropped and flipped, each at random by itself."""
        import torch
        from torch.nn import functional

        if not self.task.has_augmentation:
            return x
        if augment:
            count, _, high, wide = x.shape
            padded = functional.pad(x, [PADDING] * 4)
            top, left_edge = torch.randint(2 * PADDING + 1, (2, count, 1))
            columns = left_edge + torch.arange(wide)
            columns = torch.where(torch.rand(count, 1) < 0.5, columns, columns.flip(1))
            rows = top + torch.arange(high)
            at = torch.arange(count)[:, None, None]
            x = padded.permute(0, 2, 3, 1)[at, rows[:, :, None], columns[:, None]].permute(0, 3, 1, 2)
        mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
        return (x / 255 - mean) / std


def score(log_probabilities: torch.Tensor, label: torch.Tensor, temperature: float = 1.0) -> tuple[float, float]:
    """The negative log-likelihood in nats, and the accuracy."""
    from torch.nn import functional

    nll = functional.nll_loss((log_probabilities / temperature).log_softmax(1), label)
    return float(nll), float((log_probabilities.argmax(1) == label).float().mean())


def fit_temperature(log_probabilities: torch.Tensor, label: torch.Tensor) -> float:
    """The temperature of least negative log-likelihood (Guo et al. 2017)."""
    from scipy.optimize import minimize_scalar  # type: ignore[import-untyped]

    minimum = minimize_scalar(
        lambda log_t: score(log_probabilities, label, math.exp(log_t))[0], bounds=(-3, 3), method="bounded"
    )
    return math.exp(float(minimum.x))


def search(task: Task, arrays: Arrays, seed: int, budget_s: float) -> dict[str, Any]:
    """Search until another trial would probably not fit into the budget of CPU-seconds.

    Returns:
        What `Cell` has of a method; `trace` has, for each trial, the CPU-seconds at its end, and of the best model
        so far the test NLL, that after temperature scaling on the validation split, and the test accuracy.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    began, loop, trace = used_cpu_s(), Loop(task, arrays), list[list[float]]()
    label = {name: pair[1] for name, pair in loop.splits.items()}

    def objective(trial: optuna.Trial) -> float:
        outputs = loop.train(task.suggest(trial), seed=1000 * seed + trial.number)
        value = score(outputs["valid"], label["valid"])[0]
        done = [finished_trial.value for finished_trial in trial.study.trials if finished_trial.value is not None]
        best = trace[-1][1:] if trace else []
        if value < min(done, default=math.inf):
            temperature = fit_temperature(outputs["valid"], label["valid"])
            nll, accuracy = score(outputs["test"], label["test"])
            best = [nll, score(outputs["test"], label["test"], temperature)[0], accuracy]
        trace.append([used_cpu_s() - began, *best])
        return value

    def stop(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        used = used_cpu_s() - began
        if used + used / (trial.number + 1) > budget_s:
            study.stop()

    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed), direction="minimize")
    study.optimize(objective, callbacks=[stop], catch=())
    _, nll, scaled, accuracy = trace[-1]
    return {
        "nll": nll,
        "raw_nll": nll,
        "scaled_nll": scaled,
        "accuracy": accuracy,
        "best_nll": nll,
        "best_accuracy": accuracy,
        "trained": len(study.trials),
        "combined": 1,
        "trace": trace,
    }
