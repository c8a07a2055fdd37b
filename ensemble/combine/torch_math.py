"""Mixes, stacks, calibrates and decomposes predictions in torch: what a loaded ensemble does in its forward pass.

Each function has a twin in numpy, which fits and measures: in `ensemble.combine.tasks`, `decompose` in
`ensemble.combine.uncertainty`, `decide` in `ensemble.combine.thresholds`. They differ by rounding (float32 here,
float64 there). `explain_invalid` may read values of a tensor, nothing else does: all else can be compiled and
exported.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ensemble.combine.metrics import EPSILON
from ensemble.combine.tasks import Stack
from ensemble.combine.tasks.classification import SUM_TOLERANCE
from ensemble.combine.tasks.stacks import LabelStacker, PointStacker, Stacker
from ensemble.combine.thresholds import LEAST
from ensemble.spec.task import Task


def mix(task: Task, each: Sequence[Tensor], weights: Tensor) -> Tensor:
    """The members' mean by their weights [m]; of Gaussians the moments of their mixture: [b, ...]."""
    if task.kind != "gaussian":
        return _mean(each, weights)
    means = [values[..., 0] for values in each]
    mean = _mean(means, weights)
    variance = _mean([values[..., 1] for values in each], weights) + _spread(means, mean, weights)
    return torch.stack([mean, variance], dim=-1)


def calibrate(task: Task, values: Tensor, factor: float) -> Tensor:
    """Calibrated values; unchanged for a factor of 1, and for tasks that have no calibration.

    Args:
        factor: the temperature of probabilities, the scale of a Gaussian's variance.
    """
    if factor == 1.0:
        return values
    if task.kind == "classification":
        return torch.softmax(_log(values) / factor, dim=-1)
    if task.kind == "multilabel":
        return torch.sigmoid(compute_logits(values) / factor)
    if task.kind == "gaussian":
        return torch.stack([values[..., 0], values[..., 1] * factor], dim=-1)
    return values


def decide(task: Task, values: Tensor, thresholds: Tensor) -> Tensor:
    """The classes that are predicted, int64 [b, ...], or the labels, bool [b, L]."""
    return values >= thresholds if task.kind == "multilabel" else (values.clamp(min=LEAST) / thresholds).argmax(-1)


def decompose(task: Task, each: Sequence[Tensor], weights: Tensor) -> dict[str, Tensor]:
    """The uncertainty of each sample, [b] each, by the parts that have a meaning for the task.

    Args:
        each: of each of m members, [b, ...] as the task lays them out.
        weights: [m], sum 1.
    """
    parts: dict[str, Tensor] = {}
    if task.kind == "classification":
        parts = _decompose_classes(each, weights)
    elif task.kind == "multilabel":
        parts = _decompose_classes([torch.stack([1 - p, p], dim=-1) for p in each], weights)
    elif task.kind == "regression":
        parts = {"epistemic": _spread(each, _mean(each, weights), weights)}
    elif task.kind == "gaussian":
        means = [values[..., 0] for values in each]
        epistemic = _spread(means, _mean(means, weights), weights)
        aleatoric = _mean([values[..., 1] for values in each], weights)
        parts = {"total": aleatoric + epistemic, "aleatoric": aleatoric, "epistemic": epistemic}
    elif task.kind == "quantiles":
        if len(task.levels) > 1:
            parts = {"aleatoric": _mean([values[..., -1] - values[..., 0] for values in each], weights)}
        parts["epistemic"] = _spread(each, _mean(each, weights), weights).mean(dim=-1).sqrt()
    return {name: one.flatten(1).mean(dim=1) if one.dim() > 1 else one for name, one in parts.items()}


def normalise(task: Task, values: Tensor) -> Tensor:
    """Values without what rounding did to them: probabilities of classes sum to 1, those of labels are 0 ... 1."""
    if task.kind == "classification":
        values = values.clamp_min(0)
        return values / values.sum(dim=-1, keepdim=True)
    return values.clamp(0, 1) if task.kind == "multilabel" else values


def explain_invalid(task: Task, values: Tensor, *, read: bool) -> str | None:
    """Returns why `values` [b, ...] are not what the task says; None where they are.

    Args:
        read: whether to look at the values, too, and not at their shape alone; on a GPU that waits for them.
    """
    shape = list(values.shape)
    if task.kind == "classification" and (values.dim() < 2 or shape[-1] < 2):
        return f"outputs of shape {shape}, not probabilities [b, ..., classes]"
    if task.kind == "multilabel" and values.dim() != 2:
        return f"outputs of shape {shape}, not probabilities [b, labels]"
    columns = {"gaussian": 2, "quantiles": len(task.levels)}.get(task.kind)
    if columns is not None and (values.dim() < 2 or shape[-1] != columns):
        return f"outputs of shape {shape}, not {task.kind} values [b, ..., {columns}]"
    if not read or not values.numel():
        return None
    if task.kind == "classification":
        sums, least = values.sum(dim=-1), values.min()
        if not (bool(((sums - 1).abs() <= SUM_TOLERANCE).all()) and least >= -1e-6):
            return (
                f"rows that are no probabilities of classes (they sum to {sums.min():.3g} ... {sums.max():.3g}): "
                "declare Recipe(task='multilabel') where they are several labels a sample"
            )
    elif task.kind == "multilabel" and not (values.min() >= -1e-6 and values.max() <= 1 + 1e-6):
        return f"values that are no probabilities of labels: {values.min():.3g} ... {values.max():.3g}"
    elif task.kind == "gaussian" and not values[..., 1].min() > 0:
        return f"a variance of {values[..., 1].min():.3g}, which must be above 0"
    return None


def make_stack(stacker: Stack) -> nn.Module:
    """The twin of a fitted stack: members' values, a list of [b, ...], to one [b, ...]."""
    if isinstance(stacker, LabelStacker):
        return LabelStackModel(stacker)
    if isinstance(stacker, PointStacker):
        return PointStackModel(stacker)
    assert isinstance(stacker, Stacker)
    return ClassStackModel(stacker)


def compute_logits(probabilities: Tensor) -> Tensor:
    """log(p / (1 - p)) of probabilities kept `EPSILON` away from 0 and 1."""
    return _log(probabilities) - _log(1 - probabilities)


class ClassStackModel(nn.Module):
    """`Stacker.predict` in torch: members' probabilities, [b, ..., C] each, to one [b, ..., C]."""

    coefficients: Tensor
    intercept: Tensor
    seen: Tensor

    def __init__(self, stacker: Stacker) -> None:
        super().__init__()
        self.register_buffer("coefficients", torch.tensor(stacker.coefficients, dtype=torch.float32))
        self.register_buffer("intercept", torch.tensor(stacker.intercept, dtype=torch.float32))
        self.register_buffer("seen", torch.tensor(stacker.seen, dtype=torch.int64))
        self.classes = stacker.classes

    def forward(self, each: Sequence[Tensor]) -> Tensor:
        """Probabilities; classes without validation rows keep their average share."""
        scores = torch.cat([_log(p) for p in each], dim=-1) @ self.coefficients.T + self.intercept
        fitted = torch.softmax(scores, dim=-1)
        if len(self.seen) == self.classes:
            return fitted
        out = torch.stack(tuple(each)).mean(dim=0)
        share = out[..., self.seen].sum(dim=-1, keepdim=True)
        return out.index_copy(-1, self.seen, fitted * share)


class LabelStackModel(nn.Module):
    """`LabelStacker.predict` in torch: members' probabilities, [b, L] each, to one [b, L]."""

    coefficients: Tensor
    intercept: Tensor
    seen: Tensor

    def __init__(self, stacker: LabelStacker) -> None:
        super().__init__()
        self.register_buffer("coefficients", torch.tensor(stacker.coefficients.T, dtype=torch.float32))
        self.register_buffer("intercept", torch.tensor(stacker.intercept, dtype=torch.float32))
        self.register_buffer("seen", torch.tensor(stacker.seen, dtype=torch.bool))

    def forward(self, each: Sequence[Tensor]) -> Tensor:
        """Probabilities; labels that validation does not have both present and absent are averaged."""
        logits = torch.stack([compute_logits(p) for p in each])
        scores = self.intercept + (self.coefficients[:, None] * logits).sum(dim=0)
        return torch.where(self.seen, torch.sigmoid(scores), torch.stack(tuple(each)).mean(dim=0))


class PointStackModel(nn.Module):
    """`PointStacker.predict` in torch: members' points, [b, ...] each, to one [b, ...]."""

    coefficients: Tensor

    def __init__(self, stacker: PointStacker) -> None:
        super().__init__()
        self.register_buffer("coefficients", torch.tensor(stacker.coefficients, dtype=torch.float32))
        self.intercept = stacker.intercept

    def forward(self, each: Sequence[Tensor]) -> Tensor:
        """Points."""
        return _mean(each, self.coefficients) + self.intercept


def _log(probabilities: Tensor) -> Tensor:
    return probabilities.clamp_min(EPSILON).log()


def _mean(each: Sequence[Tensor], weights: Tensor) -> Tensor:
    return torch.stack([weight * values for weight, values in zip(weights, each, strict=True)]).sum(dim=0)


def _spread(each: Sequence[Tensor], center: Tensor, weights: Tensor) -> Tensor:
    """The members' variance about their mean."""
    return _mean([(values - center) ** 2 for values in each], weights)


def _decompose_classes(each: Sequence[Tensor], weights: Tensor) -> dict[str, Tensor]:
    """The parts of each position, [b, ...], of probabilities [b, ..., C]."""
    total = _entropy(_mean(each, weights))
    aleatoric = _mean([_entropy(p) for p in each], weights)
    ones = [torch.zeros_like(p).scatter(-1, p.argmax(dim=-1, keepdim=True), 1.0) for p in each]
    votes = _mean(ones, weights)
    everyone = votes.sum(dim=-1) ** 2  # 1, rounded as the votes are: members that all agree disagree by 0
    differ = (everyone - (votes**2).sum(dim=-1)).clamp_min(0)
    pairs = everyone - (weights**2).sum()
    # Where one member has all the weight there are no pairs.
    disagreement = torch.where(pairs > 0, (differ / pairs).clamp_max(1), 0.0)
    epistemic = (total - aleatoric).clamp_min(0)
    return {"total": total, "aleatoric": aleatoric, "epistemic": epistemic, "disagreement": disagreement}


def _entropy(probabilities: Tensor) -> Tensor:
    """Shannon's entropy in nats over the last axis; what has probability 0 adds nothing."""
    entropy: Tensor = torch.special.entr(probabilities).sum(dim=-1).clamp_min(0)
    return entropy
