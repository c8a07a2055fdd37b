"""The loss of a student: a model that learns what an ensemble predicts, beside the targets (Hinton et al. 2015).

The ensemble is computed on the student's own training batches, augmented as they are: predictions that were saved
are of other splits. Both see the same numbers, and nothing of it is kept on the disk.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ensemble.events import NOT_COMBINED
from ensemble.spec import Recipe
from ensemble.spec.task import LABELS, Kind, Task, find_known
from ensemble.train.call import find_target
from ensemble.train.job import TrainingError
from pipelines.fingerprint import known_as

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from ensemble.combine.model import EnsembleModel
    from ensemble.store import RunState

#: The tasks with a distance between two predictions; of probabilities, at a temperature.
PROBABILITIES: tuple[Kind, ...] = LABELS
DISTILLED: tuple[Kind, ...] = (*PROBABILITIES, "regression", "gaussian")

_EPSILON = 1e-12
_loaded: dict[tuple[str, str, str], EnsembleModel] = {}  # (run directory, digest, device)


def digest_combination(state: RunState) -> str:
    """What a run's combination computes: a digest of its members' weights, and of how they are combined."""
    combined = state.combined or NOT_COMBINED
    members = {name: state.members[name].weights_sha256 for name in combined.weights}
    how = {name: getattr(combined, name) for name in ("method", "weights", "temperature", "calibration")}
    if combined.code is not None:  # of a function of the user's
        how["code"] = combined.code
    return hashlib.sha256(json.dumps([members, how], sort_keys=True).encode()).hexdigest()[:16]


@known_as("ensemble.distill.Teacher")
@dataclass(frozen=True)
class Teacher:
    """The combination of a run.

    Attributes:
        run_dir: of the run.
        digest: of its combination when the student was declared (`digest_combination`).
    """

    run_dir: str
    digest: str

    def predict(self, batch: Mapping[str, Any], device: torch.device) -> Tensor:
        """Its values of a batch, without gradients, in fp32.

        Raises:
            TrainingError: the run is not there any more, or its combination is another one now.
        """
        import torch

        model = _loaded.get((self.run_dir, self.digest, str(device)))
        if model is None:
            model = self._load().to(device)
            _loaded[self.run_dir, self.digest, str(device)] = model
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            values: Tensor = model(batch)
        return values

    def _load(self) -> EnsembleModel:
        from ensemble.combine.loading import load
        from ensemble.combine.metrics import CombineError
        from ensemble.store import RunDir, StoreError, read_state

        try:
            digest = digest_combination(read_state(RunDir(self.run_dir).events).as_finished())
            if digest != self.digest:
                raise TrainingError(
                    f"the ensemble of {self.run_dir} has changed since the student began to learn from it (it was "
                    f"{self.digest}, is {digest}): distill it into a new run directory"
                )
            model = load(self.run_dir)
            model.thresholds = None  # the student learns what is probable, and decides itself
            return model
        except (StoreError, CombineError) as error:
            raise TrainingError(f"the ensemble that the student learns from cannot be loaded: {error}") from None


@known_as("ensemble.distill.DistilledLoss")
@dataclass(frozen=True)
class DistilledLoss:
    """`loss(model, batch) -> [b]`: (1 - weight) of the recipe's own loss + weight of the distance to the teacher.

    Outside training it is the recipe's own.

    Attributes:
        recipe: the student's, with its own loss.
        teacher: that it learns from.
        task: what both predict; one of `DISTILLED`.
        temperature: of the distance between probabilities, which is multiplied by its square, so that gradients
            keep their size.
        weight: of the distance, from 0 to 1.
    """

    recipe: Recipe
    teacher: Teacher
    task: Task
    temperature: float
    weight: float

    def __call__(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        """The loss of each sample, [b]."""
        from ensemble.train.outputs import scale_values

        if not model.training:
            own: Tensor = self.recipe.loss(model, batch)
            return own
        own, values = self._run_student(model, batch)
        soft = self.teacher.predict(batch, values.device)
        if self.recipe.target_scale is not None:  # both in the unit in which the student learns
            mean, std = self.recipe.target_scale
            soft = scale_values(self.task, soft, -mean / std, 1 / std)
        if soft.shape != values.shape:
            raise TrainingError(
                f"the student predicts {list(values.shape)}, the ensemble {list(soft.shape)}: they must be equal"
            )
        distance = find_distance(self.task, self.temperature)(values, soft)
        distance = mean_where_known(distance, find_target(batch, self.recipe.target), self.task)
        return (1 - self.weight) * own + self.weight * distance.to(own.dtype)

    def _run_student(self, model: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Its own loss, [b], and its predictions, laid out by the task, by one forward pass.

        Raises:
            TrainingError: it predicts something else.
        """
        from ensemble.train.outputs import first_output, observe, take_first, to_values

        with first_output(model) as returned:
            own: Tensor = self.recipe.loss(model, batch)
        if self.recipe.predict is not None:
            return own, self.recipe.predict(model, batch).float()
        if (task := self.recipe.find_task()) != self.task:
            raise TrainingError(f"the ensemble predicts {self.task.kind}, the student {task.kind}")
        outputs = take_first(returned)
        return own, to_values(self.task, outputs, observe(self.recipe, model, batch, outputs))


def find_distance(task: Task, temperature: float) -> Callable[[Tensor, Tensor], Tensor]:
    """`distance(values, teacher's values)` of each position, for values laid out by the task.

    - classification, multilabel: KL(teacher || student) of probabilities at the temperature, times its square.
    - regression: the squared difference.
    - gaussian: KL(teacher || student) of the two Gaussians.
    """
    import torch

    def divergence(values: Tensor, soft: Tensor) -> Tensor:
        student, teacher = (
            torch.log_softmax(p.clamp_min(_EPSILON).log() / temperature, dim=-1) for p in (values, soft)
        )
        return (teacher.exp() * (teacher - student)).sum(dim=-1) * temperature**2

    if task.kind == "classification":
        return divergence
    if task.kind == "multilabel":
        return lambda p, soft: divergence(torch.stack([p, 1 - p], -1), torch.stack([soft, 1 - soft], -1))
    if task.kind == "regression":
        return lambda values, soft: (values - soft).square()

    def of_gaussians(values: Tensor, soft: Tensor) -> Tensor:
        (mean, variance), (aim, spread) = values.unbind(-1), soft.unbind(-1)
        return 0.5 * (torch.log(variance / spread) + (spread + (aim - mean).square()) / variance - 1)

    return of_gaussians


def mean_where_known(distance: Tensor, target: Tensor | None, task: Task) -> Tensor:
    """The mean over a sample's positions that have a target, [b]; over all, where there is no such target."""
    import torch

    rows = distance.flatten(1) if distance.dim() > 1 else distance[:, None]  # of a rank without samples, too
    if target is None or target.shape != distance.shape or target.is_complex():
        return rows.mean(dim=1)
    takes_part = find_known(target, of_labels=task.kind in LABELS).reshape(rows.shape)
    return torch.where(takes_part, rows, 0.0).sum(dim=1) / takes_part.sum(dim=1).clamp(min=1)
