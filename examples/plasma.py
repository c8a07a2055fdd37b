"""Warnings of plasma disruptions: a CNN reads each step's profiles, an LSTM the sequence; each step has a target.

ensemble run examples/plasma.py --set shots=800        (the signals are made up, by `Shots`)

As in Svyatkovskiy et al. 2019 it counts when an alarm is raised: `shot_roc_auc` is of whole shots, `warning_steps`
how early alarms come at 5 % of false ones. Shots differ in length; what pads them has no target.
"""

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch import nn

from ensemble import Ensemble, Recipe
from ensemble.spec.task import IGNORED
from pipelines import Pipeline, sources, stages

STEPS, POINTS, WARNING = 96, 32, 24  # the longest shot, points of a profile, steps before the end in which to warn


class Shots:
    """Every second shot ends in a disruption, before which a mode grows and the profiles flatten."""

    def __init__(self, shots: int, seed: int):
        self.shots, self.seed = shots, seed

    def __len__(self):
        return self.shots

    def __getitem__(self, number):
        rng = np.random.default_rng((self.seed, number))
        steps, disrupts = int(rng.integers(STEPS // 2, STEPS + 1)), number % 2 == 1
        left = np.arange(steps)[::-1]  # steps to the end
        grown = disrupts * rng.uniform(0.3, 1.2) * np.exp(-left / rng.uniform(4, 12))[:, None]
        scalars = 0.1 * rng.normal(size=(steps, 4)).cumsum(axis=0) + rng.normal(scale=0.3, size=(steps, 4))
        scalars += grown * [1.0, 0.5, -0.5, 0.0]
        radius = np.linspace(0, 1, POINTS)
        shapes = np.exp(-((radius / (0.4 + 0.3 * grown)) ** 2)), 1 - 0.5 * radius**2 * (1 - grown)
        profiles = np.stack(shapes, axis=1) + rng.normal(scale=0.2, size=(steps, 2, POINTS))
        label = ((left < WARNING) & disrupts).astype(np.int64)
        return {"scalars": scalars.astype(np.float32), "profiles": profiles.astype(np.float32), "label": label}


class Warner(nn.Module):
    """[b, T, S] scalars and [b, T, 2, P] profiles to a logit for each step, [b, T]."""

    def __init__(self, width: int):
        super().__init__()
        convolve = nn.Conv1d(2, 8, 5, 2, 2), nn.ReLU(), nn.Conv1d(8, 8, 5, 2, 2), nn.ReLU(), nn.Flatten()
        self.profile = nn.Sequential(*convolve)
        self.lstm = nn.LSTM(4 + 8 * POINTS // 4, width, batch_first=True)
        self.head = nn.Linear(width, 1)

    def forward(self, scalars, profiles):
        seen = self.profile(profiles.flatten(0, 1)).unflatten(0, profiles.shape[:2])
        return self.head(self.lstm(torch.cat([scalars, seen], dim=2))[0]).squeeze(2)


def highest_alarms(values, target):
    """The highest alarm so far [n, T], and which shots disrupt [n]."""
    return np.maximum.accumulate(values[..., 1] * (target != IGNORED), axis=1), (target == 1).any(axis=1)


def shot_roc_auc(values, target):
    highest, disrupts = highest_alarms(values, target)
    return roc_auc_score(disrupts, highest[:, -1])


def warning_steps(values, target):
    highest, disrupts = highest_alarms(values, target)
    is_raised = highest > np.quantile(highest[~disrupts, -1], 0.95)
    return (is_raised & (target != IGNORED))[disrupts].sum(axis=1).mean()


def make_pipeline(shots: int, seed: int):
    pipeline = Pipeline(sources.dataset(Shots(shots, seed), id=f"shots-{shots}-{seed}"), seed=seed)
    pipeline = pipeline.map(stages.pad("scalars", STEPS)).map(stages.pad("profiles", STEPS))
    return pipeline.map(stages.pad("label", STEPS, IGNORED))


def spec(shots: int = 400, epochs: int = 6):
    return Ensemble(
        name="plasma",
        recipe=Recipe(
            model=lambda params: Warner(params["width"]),
            loss="binary_cross_entropy",
            inputs=("scalars", "profiles"),
            task="classification",
            split_metrics=("roc_auc", shot_roc_auc, warning_steps),
            objective="roc_auc",
        ),
        members=[{"width": width, "lr": lr} for width in (16, 48) for lr in (0.003, 0.01)],
        train=make_pipeline(shots, 0),
        valid=make_pipeline(shots // 2, 1),
        test=make_pipeline(shots // 2, 2),
        optimizer="adam",
        epochs=epochs,
        batch_size=32,
    )
