"""`Evaluator`: evaluates a member, and saves its predictions, with the weights that count for it
(`ensemble.train.best_weights`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ensemble.spec.positions import TAILS, choose_kept
from ensemble.spec.task import Task, as_task
from ensemble.store import PredictedRows, RunDir
from ensemble.train.data import as_stored_target
from ensemble.train.gather import Means, find_first, gather_predictions
from ensemble.train.job import StopTraining, TrainingError
from ensemble.train.state import TrainState

if TYPE_CHECKING:
    from pipelines import Batch

Measure = Callable[[nn.Module, "Batch"], Mapping[str, Any]]
MOST_FIELDS = 2**24  # bytes of fields for metrics, that are kept with the predictions


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluate in the block; afterwards each module has the mode that it had: a loop may have frozen a layer."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


class Evaluator:
    """Evaluates one member on one of its ranks.

    Attributes:
        predictions: digests of the predictions that were saved, by split.
    """

    def __init__(self, state: TrainState) -> None:
        self._state = state
        self.predictions: dict[str, str] = {}
        self.footprint: dict[str, float] = {}
        self._kept_bytes = 0  # of this rank's predictions of the splits so far
        state.data.on_resident_wait = state.report_progress

    def evaluate(
        self, measure: Measure, split: str, complete: Callable[[nn.Module], Mapping[str, Any]] | None = None
    ) -> dict[str, float]:
        """See `TrainContext.evaluate`.

        Args:
            complete: called at the end for what `measure` has held back.
        """
        state = self._state
        if state.is_own_loop:
            state.forward = measure
        if split not in state.splits:
            return {}
        means = Means()
        with self.evaluating() as model:
            for batch in self.batches(split):
                with state.precision.autocast():
                    values = measure(model, batch)
                means.add(values, len(batch["index"]))
            if complete is not None:
                with state.precision.autocast():
                    means.add(complete(model), 0)
        return means.over_all(state.comm)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """Yield the model in evaluation mode, with the weights that count."""
        optimization = self._state.optimization
        with optimization.kept.applied():
            optimization.share_buffers()
            with evaluation_mode(optimization.model), torch.no_grad():
                yield optimization.model

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
            if state.catches_up:  # one batch, as a loop may divide by the number of samples
                return
            state.report_progress()
            # A function of the user's may have changed what is to be saved, and several ranks must agree.
            if not is_within_step and state.comm.world == 1 and not state.is_own_loop:
                self._interrupt()

    def _interrupt(self) -> None:
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

    # --- predictions ------------------------------------------------------------------------------------

    def make_rows(self) -> PredictedRows:
        """Where this rank's predictions are collected."""
        return PredictedRows(RunDir(self._state.job.run_dir).member(self._state.identity.member))

    def save_predictions(
        self,
        split: str,
        task: str | Task | None,
        values: Tensor | None,
        index: Tensor | None,
        target: Tensor | None,
    ) -> None:
        """See `TrainContext.predictions`."""
        comm, declared = self._state.comm, as_task("task", task)
        record = find_first(comm, None if declared is None else declared.as_record())
        what = self._state.recipe.find_task() if record is None else Task.from_record(record)
        truth = None if target is None else as_stored_target(what, target.detach().cpu())
        is_float = find_first(comm, (truth is not None and truth.is_floating_point()) or None)
        if truth is not None and is_float:  # on any rank, as where labels are soft
            truth = truth.double()
        with contextlib.closing(self.make_rows()) as rows:
            why = "" if values is None else self.bound(rows, what, values)
            if why := find_first(comm, why or None):
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

    def save_rows(self, split: str, task: Task | None, rows: PredictedRows) -> None:
        """Save what all ranks predict for a split, each its own rows."""
        state = self._state
        if state.optimization.kept.is_in_use and not state.is_over:
            raise TrainingError(
                "call member.predictions() after the end of member.epochs(): only then is it known which weights "
                "are kept"
            )
        held_out = state.data.find_held_out(split)
        wrong = held_out is not None and not held_out[rows.index].all()
        if find_first(state.comm, wrong or None):
            raise TrainingError(
                "with Ensemble.out_of_fold a member predicts only the samples of 'valid' on which it did not "
                "train: those that member.batches('valid') gives"
            )
        self._kept_bytes += rows.nbytes
        with contextlib.closing(self.make_rows()) as together:
            gathered = gather_predictions(state.comm, rows, together)
            if state.comm.rank == 0 and len(gathered):
                self._write(split, task or state.recipe.find_task(), gathered)

    def _write(self, split: str, task: Task, rows: PredictedRows) -> None:
        """Write the predictions of all ranks."""
        state, data = self._state, self._state.data
        path = RunDir(state.job.run_dir).predictions(state.identity.member, state.job.attempt)
        try:
            if not rows.has_target:
                target = data.targets(split, state.target, torch.from_numpy(rows.index), task)
                rows.replace_target(as_stored_target(task, target))
            if sum(part.nbytes for parts in rows.fields.values() for part in parts) > MOST_FIELDS:
                rows.fields = {}
            digest = rows.save(path, split, task, beside=next(iter(self.predictions.values()), None))
        except ValueError as error:  # another attempt would give the same
            raise TrainingError(f"member.predictions({split!r}), task {task.kind}: {error}") from None
        self.predictions = dict.fromkeys([*self.predictions, split], digest)  # one file has all of them
        samples, is_skipped = len(data.pipeline(split)), data.pipeline(split).on_error == "skip"
        is_whole = is_skipped or data.find_held_out(split) is not None or rows.positions is not None
        if split == "valid" and len(rows) < samples and not is_whole:
            state.remark(f"predictions on 'valid' are of {len(rows)} of its {samples} samples")
