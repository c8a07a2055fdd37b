"""What a member in training does beside computing: it reads a stream, sends events and writes files.

`TrainContext` and its `Lifecycle` do all of that through the `Effects` that they are given. A member that is only
measured (`ensemble.train.profile`) gets others, which leave nothing behind.
"""

from __future__ import annotations

import functools

import torch

from ensemble.comm import Communicator
from ensemble.spec import PREDICTED_SPLITS, Ensemble
from ensemble.spec.task import Task
from ensemble.store import PredictedRows, RunDir
from ensemble.train.checkpoint import Checkpointer, FileCheckpointer, Position
from ensemble.train.data import Data, as_stored_target, steps_per_epoch
from ensemble.train.job import Diverged, Inbox, Job, TrainingError
from ensemble.train.optimization import Optimization
from ensemble.train.poison_records import PoisonRecords
from ensemble.train.reporter import Reporter

MOST_FIELDS = 2**24  # bytes of fields for metrics, that are kept with the predictions


class Effects:
    """The effects of one member, on one of its ranks.

    Attributes:
        reporter: sends its events, and writes its log.
        data: reads its batches.
        checkpointer: saves and loads its checkpoints.
        steps_per_epoch: global batches of an epoch.
        splits: on which members are evaluated, those that the ensemble has.
        predictions_bytes: what its saved predictions would take as a whole; None: not known, or not yet.
    """

    predictions_bytes: int | None = None

    def __init__(
        self,
        job: Job,
        ensemble: Ensemble,
        comm: Communicator,
        reporter: Reporter,
        data: Data | None = None,
        checkpointer: Checkpointer | None = None,
    ) -> None:
        self._job, self._ensemble, self._comm, self.reporter = job, ensemble, comm, reporter
        device = torch.device(job.device)
        self.data = data or Data(ensemble, job.identity, job.feeder, device, comm, job.local_world)
        self.checkpointer = checkpointer or FileCheckpointer(job, ensemble)
        self.steps_per_epoch = steps_per_epoch(ensemble, job.identity)
        self.splits = [name for name in PREDICTED_SPLITS if getattr(ensemble, name) is not None]
        self.data.on_finding = functools.partial(reporter.event, "sample_difference")
        self.data.on_unusable = lambda error: reporter.event("unusable_data", error=error)

    def open(self, inbox: Inbox, at: Position | None) -> None:
        """Prepare the other splits, then read the stream; without records at which earlier attempts died.

        Args:
            at: where; None: no epoch is left to be trained.
        """
        pipelines = {name: self.data.pipeline(name) for name in ("train", *self.splits)}
        PoisonRecords(self._job, self._ensemble, self._comm, pipelines, self.reporter.event).start(inbox)
        self.data.prepare_splits()
        if at is not None:
            self.data.open(at.epoch, at.step)

    def end_training(self, optimization: Optimization) -> None:
        """Called where the steps of an epoch are done, before it is evaluated for good, reported and saved."""

    def end_diverged(self, error: Diverged) -> None:
        """Called after a step with a loss that is not finite; where it does not raise, the step only counts."""
        raise error from None

    def make_rows(self) -> PredictedRows:
        """Where this rank's predictions are collected."""
        return PredictedRows(RunDir(self._job.run_dir).member(self._job.identity.member))

    def save_predictions(
        self, split: str, what: Task, rows: PredictedRows, field: str, *, beside: str | None
    ) -> str:
        """Save the predictions of all ranks for a split; rank 0 calls it.

        Args:
            rows: without a target it is `field` of the samples, where that holds what the task needs.
            beside: the digest of the file in which this attempt has saved those on other splits.

        Returns:
            The digest of the file.

        Raises:
            TrainingError: the shapes do not fit, or a sample is there twice.
        """
        path = RunDir(self._job.run_dir).predictions(self._job.identity.member, self._job.attempt)
        try:
            if not rows.has_target:
                target = self.data.targets(split, field, torch.from_numpy(rows.index), what)
                rows.replace_target(as_stored_target(what, target))
            is_large = sum(part.nbytes for parts in rows.fields.values() for part in parts) > MOST_FIELDS
            if is_large:
                rows.fields = {}
            return rows.save(path, split, what, beside=beside)
        except ValueError as error:  # another attempt would give the same
            raise TrainingError(f"member.predictions({split!r}), task {what.kind}: {error}") from None
