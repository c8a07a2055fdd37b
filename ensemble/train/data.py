"""Supplies the batches of one rank: the training stream beside the splits."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ensemble.comm import Communicator
from ensemble.spec import PREDICTED_SPLITS, Ensemble, Identity
from ensemble.spec.task import IGNORED, LABELS, Task, find_known
from ensemble.train.gather import gather_json
from ensemble.train.job import Inbox, Job, TrainingError
from ensemble.train.poison_records import PoisonRecords
from ensemble.train.split_data import SplitData

if TYPE_CHECKING:
    from pipelines import Batch, Loader
    from pipelines.loader.collate import Collate


ONE_PASS = "member.batches() is one pass in each declared epoch: write `for _ in member.epochs():` around it"
NO_TRAIN = (
    "the Ensemble has no train=: its train function makes its own batches, with loss.backward() and "
    "optimizer.step(); or give train=Pipeline(source)"
)


def as_stored_target(task: Task, target: torch.Tensor | None) -> torch.Tensor | None:
    """A target as predictions are measured and saved with it: int64 of classes and labels, float64 of numbers.

    Floats that stand for labels become integers, NaN becomes IGNORED; those that do not (soft labels) stay floats.
    Of numbers what takes no part becomes NaN.
    """
    if target is None or task.kind == "free":
        return target
    of_labels = task.kind in LABELS
    takes_part = find_known(target, of_labels=of_labels)
    if not of_labels:
        return torch.where(takes_part, target.double(), torch.nan)
    if not target.is_floating_point():
        return target.long()
    labels = torch.where(takes_part, target.double(), IGNORED)
    return labels if bool((labels != labels.round()).any()) else labels.long()


def describe_not_finite(
    batch: Mapping[str, Any], describe: Callable[[int], str], largest: float = math.inf
) -> str:
    """Which fields of a batch hold NaN or infinity, and in which sample, to be put behind a message; "" if none.

    A target that takes no part may be among them.

    Args:
        largest: the largest number of the precision; what is beyond becomes infinite.
    """
    faults = []
    for name, values in batch.items():
        if not isinstance(values, torch.Tensor) or not values.is_floating_point() or not values.numel():
            continue
        if not values.dim() or len(values) != len(batch.get("index", values)):  # rows of a collate function
            if not bool((torch.isfinite(values) & (values.abs() <= largest)).all()):
                faults.append(repr(name))
            continue
        wrong = (~torch.isfinite(values) | (values.abs() > largest)).reshape(len(values), -1).any(dim=1)
        if bool(wrong.any()):
            index = batch["index"][wrong][0].item() if "index" in batch else int(wrong.nonzero()[0])
            faults.append(f"{name!r} of {describe(int(index))}")
    most = f", or more than the {largest:g} that the precision has," if largest < math.inf else ""
    return f"; NaN or infinity{most} is in {', '.join(faults)}" if faults else ""


def steps_per_epoch(ensemble: Ensemble, identity: Identity) -> int:
    """Global batches of an epoch, those included that have no sample of weight above 0."""
    from pipelines.order.epoch_order import steps_per_epoch as count

    steps = count(ensemble.samples, identity.batch_size, drop_last=ensemble.drop_last)
    if steps == 0 and ensemble.train is not None:
        raise TrainingError(
            f"an epoch of {ensemble.samples} samples has no batch of {identity.batch_size}: "
            "take a smaller batch_size or drop_last=False"
        )
    return steps


class Data(SplitData):
    """The batches of this rank, from the node's feeder where there is one, else prepared in this process.

    Attributes:
        first_epoch: the stream epoch of the member's first own epoch. Where the identity leaves it to the feeder,
            it is None until the stream is open.
    """

    def __init__(
        self,
        ensemble: Ensemble,
        identity: Identity,
        feeder: str | None,
        device: torch.device,
        comm: Communicator,
        local_world: int | None = None,
    ) -> None:
        super().__init__(ensemble, identity, feeder, device, comm)
        self.first_epoch = identity.first_epoch
        self._local_world = local_world
        self._loader: Loader | None = None
        self._epochs: Iterator[Any] = iter(())

    def start(self, job: Job, inbox: Inbox, emit: Callable[..., None]) -> None:
        """Prepare the splits, without records at which earlier attempts died."""
        splits = [split for split in ("train", *PREDICTED_SPLITS) if getattr(self._ensemble, split) is not None]
        pipelines = {split: self.pipeline(split) for split in splits}
        PoisonRecords(job, self._ensemble, self._comm, pipelines, emit).start(inbox)
        self.prepare_splits()

    def open(self, epoch: int, step: int) -> None:
        """Open the stream at a step of an own epoch; all ranks call it."""
        own = self._identity
        if epoch >= own.epochs or self._ensemble.train is None:
            return
        if self.first_epoch is None:
            # Only the feeder knows the position of the stream: rank 0 asks, and all ranks begin there.
            if self._comm.rank == 0 and self._feeder is None:
                self.first_epoch = 0
            elif self._comm.rank == 0:
                self._loader = self._open_loader(own.epochs - epoch, 0)
                self.first_epoch = self._loader.reading.epochs.start - epoch
            self.first_epoch = gather_json(self._comm, self.first_epoch)[0]
        assert self.first_epoch is not None
        if self._loader is None:
            self._loader = self._open_loader(range(self.first_epoch + epoch, self.first_epoch + own.epochs), step)
        self._verify_start(step)
        self._epochs = self._loader.epochs()

    def _verify_start(self, step: int) -> None:
        """Compare the first samples of the stream; if one differs, all ranks prepare their batches themselves."""
        if not self._ensemble.verify_sharing:
            return
        assert self._loader is not None
        differs = False
        if self._comm.rank == 0 and self._feeder is not None:  # it speaks for the others
            self._loader.verify_start()
            differs = self._feeder is None
        if self._comm.world > 1:
            differs = gather_json(self._comm, differs)[0]
        if differs and self._feeder is not None:
            epochs, self._feeder = self._loader.reading.epochs, None
            self._close_loader()
            self._loader = self._open_loader(epochs, step)

    def switch_feeder(self, feeder: str | None, own_epoch: int) -> bool:
        """Read another feeder's stream, or none's, from this own epoch on.

        The stream epochs do not change: a batch is the same wherever it is prepared. Where the feeder is at
        another epoch, or rejects this member, the batches are prepared in this process.

        Returns:
            Whether the next batch comes from the feeder.
        """
        from pipelines import PipelineError

        self._close_loader()
        self._feeder = feeder
        self._resident_feeder = feeder or self._resident_feeder
        try:
            self.open(own_epoch, 0)
        except PipelineError as error:
            warnings.warn(f"{self._identity.member} prepares its own batches: {error}", stacklevel=2)
            self._feeder = None
            self.open(own_epoch, 0)
        return self._loader is not None and self._loader.shared

    def _close_loader(self) -> None:
        if self._loader is not None:
            self._loader.close()
            self._before.update(self._loader.stats())
            self._loader = None

    def _open_loader(self, epochs: range | int, start_step: int) -> Loader:
        from pipelines import attach

        pipeline, own, comm = self.pipeline("train"), self._identity, self._comm
        drop_last, weights = self._ensemble.drop_last, self._weights
        if self._feeder is None:
            return pipeline.loader(own.batch_size, epochs, comm.rank, comm.world, drop_last, start_step, weights)
        return attach(
            self._feeder,
            pipeline,
            batch_size=own.batch_size,
            epochs=epochs,
            name=own.member,
            rank=comm.rank,
            world=comm.world,
            drop_last=drop_last,
            start_step=start_step,
            on_wait=self.on_wait,
            weights=weights,
            local_world=self._local_world,
            verify=self._verify_with("train") if comm.rank == 0 else False,
        )

    def epoch(self, own_epoch: int, collate: Collate | None = None) -> Iterator[Batch]:
        """Yield the batches of the stream's next epoch, which is this own epoch, on the member's device."""
        epoch = next(self._epochs, None)
        if epoch is None or self.first_epoch is None or epoch.epoch != self.first_epoch + own_epoch:
            raise TrainingError(NO_TRAIN if self._ensemble.train is None else ONE_PASS)
        return self._on_device(self._apply_collate(epoch.all_batches(), collate))

    def leave(self) -> None:
        """Leave the stream before its end, so that it waits for this rank no more; resident splits stay."""
        self._close_loader()

    def reread(self, own_epoch: int, collate: Collate | None = None) -> Iterator[Batch]:
        """Yield the batches of an own epoch once more, prepared in this process, on the member's device."""
        own, pipeline = self._identity, self.pipeline("train")
        epoch = (self.first_epoch or 0) + own_epoch
        rank, world = self._comm.rank, self._comm.world
        epochs, drop_last = range(epoch, epoch + 1), self._ensemble.drop_last
        loader = pipeline.loader(own.batch_size, epochs, rank, world, drop_last, weights=self._weights)
        try:
            yield from self._on_device(self._apply_collate(iter(loader), collate))
        finally:
            loader.close()
            self._before.update({"prepare_cpu_s": loader.stats()["prepare_cpu_s"]})

    def count_batches(self, own_epoch: int, steps: int) -> int:
        """Of the `steps` global batches of an own epoch those that have a sample of weight above 0."""
        if self._weights is None:
            return steps
        pipeline, size = self.pipeline("train"), self._identity.batch_size
        epoch, positions = (self.first_epoch or 0) + own_epoch, min(len(pipeline), steps * size)
        is_left = self._weights(pipeline.order()(epoch, 0, positions)) > 0
        return int(np.logical_or.reduceat(is_left, range(0, positions, size)).sum())

    def stats(self) -> dict[str, Any]:
        """The loader's counters, zero before the stream is open; CPU time of resident splits included."""
        stats: dict[str, Any] = dict(self._before)
        if self._loader is not None:
            stats = {name: stats.get(name, 0) + value for name, value in self._loader.stats().items()}
        own = sum(resident.prepare_cpu_s for resident in self._residents.values())
        stats["prepare_cpu_s"] = stats.get("prepare_cpu_s", 0.0) + own
        return stats

    def close(self) -> None:
        """Leave the stream."""
        if self._loader is not None:
            self._loader.close()
