"""`Evaluator`: evaluates a member, and saves its predictions.

The weights that are evaluated, and those that predictions are saved of, are those that count for the member: see
`ensemble.train.best_weights`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from ensemble.spec.positions import TAILS, choose_kept
from ensemble.spec.split_metrics import measure_reported
from ensemble.spec.task import CLASSIFICATION, Task, as_task
from ensemble.store import PredictedRows
from ensemble.train.averaging import LossProbe
from ensemble.train.call import Observation
from ensemble.train.data import as_stored_target
from ensemble.train.gather import Means, find_first, gather_predictions
from ensemble.train.job import StopTraining, TrainingError
from ensemble.train.seeding import seed_everything, step_seed
from ensemble.train.state import TrainState
from ensemble.train.undisturbed import evaluation_mode

if TYPE_CHECKING:
    from pipelines import Batch

#: By how much, in parts of the larger, a reported metric may differ from that of the saved predictions.
MOST_COMPARED = 2**26  # bytes of predictions of which metrics are computed again
DIFFERENCE = 0.02

Measure = Callable[[nn.Module, "Batch"], Mapping[str, Any]]


class Evaluator:
    """Evaluates one member on one of its ranks; `TrainContext` has the methods of the same names.

    Attributes:
        measure: the last one; None before the first.
        predictions: digests of the predictions that were saved, by split.
        measured: metrics that were reported, of the predictions that were saved on validation.
        footprint: what `ensemble.train.footprint` has measured.
    """

    def __init__(self, state: TrainState) -> None:
        self._state = state
        self.measure: Measure | None = None
        self.predictions: dict[str, str] = {}
        self.measured: dict[str, float] = {}
        self.footprint: dict[str, float] = {}
        self._has_warned = False
        self._kept_bytes = 0  # of this rank's predictions of the splits so far
        state.data.on_resident_wait = state.report_progress

    def evaluate(self, measure: Measure, split: str) -> dict[str, float]:
        """The means of metrics over all samples of a split, of all ranks."""
        state = self._state
        self.renew_statistics(measure)
        if split not in state.effects.splits:
            return {}
        means = Means()
        with self.evaluating() as model:
            for batch in self.batches(split):
                with state.precision.autocast():
                    values = measure(model, batch)
                means.add(values, len(batch["index"]))
        return means.over_all(state.comm)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """Yield the model in evaluation mode, with the weights that count."""
        self.renew_known_statistics()
        with self._applying() as model:
            yield model

    @contextlib.contextmanager
    def _applying(self) -> Iterator[nn.Module]:
        optimization = self._state.optimization
        model = optimization.model
        with optimization.kept.applied():
            optimization.share_buffers()
            with evaluation_mode(model), torch.no_grad():
                yield model

    def renew_statistics(self, measure: Measure) -> None:
        """Compute the running statistics of batch normalization for averaged weights, where they are stale."""
        self.measure, state, kept = measure, self._state, self._state.optimization.kept
        if not kept.statistics_are_stale:
            return
        seed_everything(step_seed(state.identity.seed, state.comm.rank, state.global_step), state.device)

        def batches() -> Iterator[Batch]:
            for batch in state.data.reread(state.at.epoch, state.collate):
                if len(batch["index"]):
                    yield batch
                state.report_progress()

        with self._applying() as model, state.precision.autocast():
            update_bn(batches(), LossProbe(model, measure))
            kept.renew_statistics()

    def renew_known_statistics(self) -> None:
        """`renew_statistics` for a train function that has not done it: by the last `measure`, or by the call of
        the model that was observed. Where neither is known, the function may do it itself; the log says so.
        """
        state, seen = self._state, self._state.observer.seen
        call = None if seen is None else seen.call
        if not state.optimization.kept.statistics_are_stale:
            return
        if self.measure is not None:
            self.renew_statistics(self.measure)
        elif call is not None:
            self.renew_statistics(lambda model, batch: {"outputs": call.call(model, batch)})
        elif not self._has_warned:
            self._has_warned = True
            state.reporter.log(
                "averaged weights need running statistics of their own, and it is not known how the model is "
                "called: they have the average of those in training, unless the train function computes them "
                "within member.evaluating(); use member.evaluate(measure), or call member.validate_with(measure) "
                "before the loop"
            )

    def batches(self, split: str) -> Iterator[Batch]:
        """Yield this rank's batches of a resident split."""
        state, busy = self._state, self._state.gpu_busy
        for batch in state.data.split(split, state.collate):
            is_within_step = state.micro_batches is not None  # which is measured as a whole
            if busy is not None and not is_within_step:
                busy.begin()
            yield batch
            if busy is not None and not is_within_step:
                busy.end()
            state.report_progress()
            # A function of the user's may have changed what is to be saved, and several ranks must agree.
            if not is_within_step and state.comm.world == 1 and not state.is_own_loop:
                self.interrupt_evaluation()

    def interrupt_evaluation(self) -> None:
        """Execute a command while the member is evaluated; a resume evaluates it from the beginning.

        The checkpoint is written once the loop has been left: until then the model may have other weights than
        those in training.
        """
        state, at = self._state, self._state.at
        command = state.poll_command()
        if command == "stop":
            raise StopTraining("stopped", is_unsaved=state.saved_at != (at.epoch, at.step))
        if command == "cancel":
            raise StopTraining("cancelled")

    def save_predictions(
        self,
        split: str,
        task: str | Task | None,
        values: Tensor | None,
        index: Tensor | None,
        target: Tensor | None,
    ) -> None:
        """Save the predictions of all ranks for a split: each has its own, or None."""
        what = self._find_task(task)
        truth = None if target is None else as_stored_target(what, target.detach().cpu())
        is_float = find_first(self._state.comm, (truth is not None and truth.is_floating_point()) or None)
        if truth is not None and is_float:  # on any rank, as where labels are soft
            truth = truth.double()
        with contextlib.closing(self._state.effects.make_rows()) as rows:
            why = "" if values is None else self.bound(rows, what, values)
            if why := find_first(self._state.comm, why or None):
                self._state.reporter.log(f"no predictions on {split!r} are saved: {why}")
                return
            try:
                if values is not None and index is not None:
                    rows.add(values.detach().float().cpu(), index.detach().cpu(), truth)
            except ValueError as error:
                raise TrainingError(f"member.predictions({split!r}): {error}") from None
            self.save_rows(split, what, rows)

    def bound(self, rows: PredictedRows, task: Task, values: Tensor) -> str:
        """Choose by the first batch [b, ...] which positions of values are kept; returns why none are, or ""."""
        rows.positions, why = choose_kept(self._state.ensemble, task, values.shape[1:])
        rows.tail = TAILS.get(task.kind)
        if rows.positions is None:
            return why
        self._state.remark(why)
        return ""

    def explain_excess(self, rows: PredictedRows) -> str | None:
        """Why samples of unlike length are not kept, of which the first batch does not tell what all take."""
        gb, kept = self._state.ensemble.keep_predictions_gb, self._kept_bytes + rows.nbytes
        if not rows.is_ragged or kept * self._state.comm.world <= gb * 1e9:
            return None
        return (
            f"the predictions of samples of unlike length take more than Ensemble.keep_predictions_gb={gb:g}: "
            "none are kept; declare a larger one"
        )

    def _find_task(self, task: str | Task | None) -> Task:
        """The task of predictions, the same on all ranks: the one given, else the recipe's, else what was seen."""
        state = self._state
        declared = as_task("task", task) or as_task("Recipe.task", state.recipe.task)
        declared = declared or (state.observer.seen or Observation()).task
        record = find_first(state.comm, None if declared is None else declared.as_record())
        return CLASSIFICATION if record is None else Task.from_record(record)

    def save_rows(self, split: str, task: str | Task | None, rows: PredictedRows) -> None:
        """Save what all ranks predict for a split.

        Args:
            rows: this rank's.
        """
        state = self._state
        if state.optimization.kept.is_in_use and not state.is_over:
            raise TrainingError(
                "member.predictions() comes after the end of member.epochs(): only then are the weights known "
                "that are kept"
            )
        what = self._find_task(task)
        held_out = state.data.find_held_out(split)
        wrong = held_out is not None and not held_out[rows.index].all()
        if find_first(state.comm, wrong or None):
            raise TrainingError(
                "with Ensemble.out_of_fold a member predicts on 'valid' only what it has not learnt from: the "
                "samples that member.batches('valid') gives"
            )
        self._kept_bytes += rows.nbytes
        with contextlib.closing(state.effects.make_rows()) as together:
            gathered = gather_predictions(state.comm, rows, together)
            if state.comm.rank == 0:
                self._save(split, what, gathered)

    def _save(self, split: str, task: Task, rows: PredictedRows) -> None:
        if not len(rows):
            return
        digest = self._state.effects.save_predictions(
            split, task, rows, self._state.target, beside=next(iter(self.predictions.values()), None)
        )
        self.predictions = dict.fromkeys([*self.predictions, split], digest)  # one file has all of them
        if split == "valid" and rows.positions is None:
            data = self._state.data
            samples, is_skipped = len(data.pipeline(split)), data.pipeline(split).on_error == "skip"
            if len(rows) < samples and not is_skipped and data.find_held_out(split) is None:
                self._state.remark(f"predictions on 'valid' are of {len(rows)} of its {samples} samples")
            if rows.has_target and rows.nbytes <= MOST_COMPARED:
                values, _, target = rows.arrays()
                with contextlib.suppress(Exception):  # a target of one's own may have any form
                    assert target is not None
                    self.measured = measure_reported(self.find_reported(), task, values, target)

    def find_reported(self) -> dict[str, float]:
        """The metrics of the weights that are kept, as they were reported."""
        at, best = self._state.at, self._state.selection.best
        if at.handed_over:
            return at.handed_over
        return dict(best["metrics"] if best is not None and self._state.identity.keep == "best" else at.metrics)

    def compare_reported(self) -> None:
        """Remark a metric that was reported otherwise than the saved predictions on validation have it."""
        reported = self.find_reported()
        for name, figure in self.measured.items():
            own = reported.get(name, figure)
            if abs(own - figure) > DIFFERENCE * max(abs(own), abs(figure)):
                self._state.remark(
                    f"it reported {name} {own:.4g}, and its saved predictions on 'valid' have {figure:.4g}: where "
                    "one is in other units or of other weights, members are combined by wrong values"
                )
