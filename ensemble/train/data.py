"""Supplies the batches of one rank: the training stream, and the resident splits."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from ensemble.comm import Communicator
from ensemble.spec import PREDICTED_SPLITS, Ensemble, Identity
from ensemble.spec.out_of_fold import is_out_of_fold
from ensemble.spec.sample_weights import list_held_out, make_weight_function
from ensemble.spec.task import IGNORED, LABELS, Task, find_known
from ensemble.spec.validation import unknown_name
from ensemble.train.call import find_target
from ensemble.train.gather import gather_json
from ensemble.train.job import SharingDiffers, StopTraining, TrainingError, UnusableData
from ensemble.train.node_checks import NODE_DIRECTORY, NodeChecks, first_on_node, make_checker_address
from ensemble.train.split_checks import REMEDY, SplitChecks
from pipelines.verification.reader import Finding, Verification

if TYPE_CHECKING:
    from pipelines import Batch, Loader, Pipeline, Resident
    from pipelines.loader.collate import Collate
    from pipelines.loader.resident import StreamedSet
    from pipelines.verification.reader import MakeVerification, StreamOrigin

WHAT_IS_BAD = "members cannot be evaluated on these data"


def steps_per_epoch(ensemble: Ensemble, identity: Identity) -> int:
    """Global batches of an epoch, those included that have no sample of weight above 0.

    Raises:
        TrainingError: there is none.
    """
    from pipelines.order.epoch_order import steps_per_epoch as count

    steps = count(ensemble.samples, identity.batch_size, drop_last=ensemble.drop_last)
    if steps == 0:
        raise TrainingError(
            f"an epoch of {ensemble.samples} samples has no batch of {identity.batch_size}: "
            "take a smaller batch_size or drop_last=False"
        )
    return steps


def as_stored_target(task: Task, target: torch.Tensor | None) -> torch.Tensor | None:
    """A target as predictions are measured and saved with it: int64 of classes and labels, float64 of numbers.

    Floats that stand for labels become integers, NaN becomes IGNORED; those that do not (soft labels) stay floats.
    Of numbers what takes no part becomes NaN.
    """
    if target is None or task.kind == "free":
        return target
    of_labels = task.kind in LABELS
    known = find_known(target, of_labels=of_labels)
    if not of_labels:
        return torch.where(known, target.double(), torch.nan)
    if not target.is_floating_point():
        return target.long()
    labels = torch.where(known, target.double(), IGNORED)
    return labels if bool((labels != labels.round()).any()) else labels.long()


def describe_not_finite(batch: Mapping[str, Any], describe: Callable[[int], str]) -> str:
    """Which fields of a batch hold NaN or infinity, and in which sample, to be put behind a message; "" if none.

    A target that takes no part may be among them.
    """
    found = []
    for name, values in batch.items():
        if not isinstance(values, torch.Tensor) or not values.is_floating_point() or not values.numel():
            continue
        if not values.dim() or len(values) != len(batch.get("index", values)):  # rows of a collate function
            if not bool(torch.isfinite(values).all()):
                found.append(repr(name))
            continue
        wrong = (~torch.isfinite(values)).reshape(len(values), -1).any(dim=1)
        if bool(wrong.any()):
            index = batch["index"][wrong][0].item() if "index" in batch else int(wrong.nonzero()[0])
            found.append(f"{name!r} of {describe(int(index))}")
    return f"; NaN or infinity is in {', '.join(found)}" if found else ""


class Data:
    """The batches of this rank, from the node's feeder where there is one, else prepared in this process.

    Attributes:
        on_resident_wait: called every second while a resident split is awaited.
        on_wait: called every second while the stream is awaited; what it raises leaves the training loop.
        on_finding: called with the fields of a `sample_difference` event.
        on_unusable: called with the reason, where the member trains and cannot be evaluated on a split.
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
        self.on_resident_wait: Callable[[], None] | None = None
        self.on_wait: Callable[[], None] | None = None
        self.on_finding: Callable[..., None] = lambda **fields: None
        self.on_unusable: Callable[[str], None] = lambda error: None
        self.first_epoch = identity.first_epoch
        self._ensemble = ensemble
        self._identity = identity
        self._feeder = feeder
        self._device = device
        self._comm = comm
        self._local_world = local_world
        self._resident_feeder = feeder
        self._loader: Loader | None = None
        self._before: Counter[str] = Counter()  # counters of loaders that were closed
        self._epochs: Iterator[Any] = iter(())
        self._residents: dict[str, Resident | StreamedSet] = {}
        self._were_read = set[str]()  # splits of which batches were asked for
        self.checks = SplitChecks(ensemble)
        self._late: Iterator[None] = iter(())  # reads splits in so many parts before each batch
        self._parts = 0

    def prepare_splits(self) -> None:
        """Prepare the splits on which the member is evaluated, and look at their records and labels.

        Without a feeder only `valid` stays: the others are read by one member of the node. What memory does not
        hold is read within the first epoch.

        Raises:
            UnusableData: records of some cannot be prepared, or labels are none; it names those of all splits.
        """
        from pipelines.environment.machine_limits import fits_in_memory
        from pipelines.errors import SampleError, TooManySkipped
        from pipelines.loader.resident import TRIED, Resident
        from pipelines.shm.ring import Layout

        checks, early, late = self.checks, list[str](), list[str]()
        for split in (name for name in PREDICTED_SPLITS if getattr(self._ensemble, name) is not None):
            try:
                if split != "valid" and self._resident_feeder is None:
                    still = self.pipeline(split).without_randomness()
                    fits = fits_in_memory(Layout(still.fields, len(still)).nbytes)
                    (early if fits else late).append(split)
                elif isinstance(samples := self._resident(split), Resident):
                    checks.look_at_labels(split, samples.pipeline, samples.columns)
                else:
                    late.append(split)
            except (SampleError, TooManySkipped) as error:
                checks.bad[split] = str(error)
        with (
            first_on_node("splits-read", on_wait=self.on_resident_wait)
            if early
            else contextlib.nullcontext(False) as is_first
        ):
            for _ in self._read(early if is_first else ()):
                pass
            if why := checks.explain():
                raise UnusableData(f"{WHAT_IS_BAD}, so that nothing was trained: {why}")
        if late and self._comm.rank == 0:
            records = sum(len(self.pipeline(split)) for split in late)
            self._parts = -(-records // (TRIED * steps_per_epoch(self._ensemble, self._identity)))
            self._late = self._read_late(late)

    def _read(self, splits: Iterable[str]) -> Iterator[None]:
        for part in self.checks.read(splits):
            if self.on_resident_wait is not None:
                self.on_resident_wait()
            yield part

    def _read_late(self, splits: list[str]) -> Iterator[None]:
        with first_on_node("large-splits-read", 0.0) as is_first:
            yield from self._read(splits if is_first else ())
        if why := self.checks.explain():
            self.on_unusable(f"{WHAT_IS_BAD}, and what was trained is kept: {why}")

    def _read_between(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            for _ in itertools.islice(self._late, self._parts):
                pass
            yield batch
        for _ in self._late:  # the epoch is over
            pass

    def open(self, epoch: int, step: int) -> None:
        """Open the stream at a step of an own epoch; all ranks call it."""
        own = self._identity
        if epoch >= own.epochs:
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

    def _verify_with(self, split: str) -> MakeVerification | Literal[False]:
        """What compares samples of a split with those of this member's pipeline, in the node's checker."""
        directory = os.environ.get(NODE_DIRECTORY)
        if not self._ensemble.verify_sharing or directory is None:
            return False
        pipeline, own = self.pipeline(split), self._identity

        def make(stream: StreamOrigin) -> Verification | None:
            if split == "train" and stream.is_same_object and not (stream.has_peers or self._ensemble.cache_dir):
                return None
            checks = NodeChecks(
                make_checker_address(Path(directory)),
                split,
                own.params,
                is_exact=stream.is_exact,
                limit_s=self._ensemble.prepare_timeout_s,
                on_wait=self.on_wait if split == "train" else self.on_resident_wait,
            )
            return Verification(checks, own.member, pipeline, functools.partial(self._handle_finding, split))

        return make

    def _handle_finding(self, split: str, found: Finding) -> None:
        """Report what was found; where the member has read other samples before, its training ends here.

        Raises:
            SharingDiffers: what it has learned is not what its own pipeline teaches.
        """
        result, mode = found.result, self._ensemble.verify_sharing
        # The ranks of a member read a resident set each for itself: they cannot leave it together.
        is_late = found.is_late or (split != "train" and self._comm.world > 1)
        action = "none" if result.kind != "different" else "alone" if not is_late else "anew"
        action = "fails" if action == "anew" and mode == "fail" else action
        self.on_finding(split=split, action=action, **found.as_record())
        if action in ("anew", "fails"):
            raise SharingDiffers(
                f"what it was served of {split} is not what its own pipeline prepares, {found.describe()}",
                begins_anew=action == "anew",
            )
        if action == "alone" and split == "train":
            self._feeder = None

    def epoch(self, own_epoch: int, collate: Collate | None = None) -> Iterator[Batch]:
        """Yield the batches of the stream's next epoch, which is this own epoch, on the member's device.

        Args:
            collate: applied to each.
        """
        epoch = next(self._epochs, None)
        if epoch is None or self.first_epoch is None or epoch.epoch != self.first_epoch + own_epoch:
            raise TrainingError(
                "member.batches() is one pass in each declared epoch: write `for _ in member.epochs():` around it"
            )
        return self._on_device(self._apply_collate(self._read_between(epoch.all_batches()), collate))

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

    def split_steps(self, name: str) -> int:
        """This rank's batches of a resident split."""
        from pipelines.loader.resident import cut_rows
        from pipelines.order.epoch_order import rank_bounds

        first, last = rank_bounds(0, len(self.pipeline(name)), self._comm.rank, self._comm.world)
        return len(cut_rows(first, last, self._identity.batch_size, self.find_held_out(name))) - 1

    def find_held_out(self, split: str) -> npt.NDArray[np.bool_] | None:
        """Whether each sample of a split is of those that the member is evaluated on, bool [n]; None: all are."""
        return self._held_out if split == "valid" and is_out_of_fold(self._identity.weights) else None

    @functools.cached_property
    def _held_out(self) -> npt.NDArray[np.bool_]:
        return list_held_out(self._identity.weights, self.pipeline("train").source)

    @functools.cached_property
    def _weights(self) -> Any:
        return make_weight_function(self._identity.weights, self.pipeline("train").source)

    def split(self, name: str, collate: Collate | None = None) -> Iterator[Batch]:
        """Yield this rank's share of a resident split, in its source's order, on the member's device."""
        rank, world, chosen = self._comm.rank, self._comm.world, self.find_held_out(name)
        self._were_read.add(name)
        share = self._resident(name).loader(self._identity.batch_size, rank, world, chosen=chosen)
        return self._on_device(self._apply_collate(self._read_split(name, share), collate, is_training=False))

    def _read_split(self, split: str, batches: Iterable[Batch]) -> Iterator[Batch]:
        from pipelines.errors import SampleError, TooManySkipped

        try:
            yield from batches
        except (SampleError, TooManySkipped) as error:  # before whoever reads all of it has come so far
            why = f"{WHAT_IS_BAD}, and what was trained is kept: {split}: {error}{REMEDY}"
            if self._comm.world > 1:  # the others would wait for this rank
                raise UnusableData(why) from None
            self.on_unusable(why)
            raise StopTraining("stopped", is_unsaved=True) from None

    def has_read(self, name: str) -> bool:
        """Whether batches of a resident split were read."""
        return name in self._were_read

    def read_first(self, name: str, samples: int, collate: Collate | None = None) -> Batch:
        """The first samples of a resident split as a batch, on the member's device; the same on all ranks.

        Raises:
            StopIteration: the split is empty.
        """
        return self._take_first(
            self._resident(name).loader(samples, 0, 1, chosen=self.find_held_out(name)), collate
        )

    def peek(self, name: str, samples: int, collate: Collate | None = None) -> Batch:
        """The first samples of a split as a batch, on the member's device: of those at hand, or prepared here.

        Raises:
            StopIteration: there is none.
        """
        from pipelines.loader.resident import StreamedSet

        held = self._residents.get(name)  # where a feeder has prepared it, this process needs no decoder
        few = (held or StreamedSet(self.pipeline(name).without_randomness())).loader(samples)
        with torch.autocast("cpu", enabled=False), torch.autocast(self._device.type, enabled=False):
            return self._take_first(few, collate)

    def _take_first(self, batches: Iterable[Batch], collate: Collate | None) -> Batch:
        """The first of some batches that has samples: those that are skipped leave none."""
        prepared = self._on_device(self._apply_collate(iter(batches), collate, is_training=False))
        return next(batch for batch in prepared if len(batch["index"]))

    def _apply_collate(
        self,
        batches: Iterator[Batch],
        collate: Collate | None,
        *,
        is_training: bool = True,
    ) -> Iterator[Batch]:
        from pipelines.loader.collate import make_collator

        if collate is None:
            return batches
        weighted = is_training and self._weights is not None
        call = make_collator(collate, self.pipeline("train").seed, self._comm.rank, weighted=weighted)
        return (call(batch, is_training=is_training) for batch in batches)

    def targets(self, split: str, field: str, index: torch.Tensor, task: Task) -> torch.Tensor | None:
        """The targets [m, ...] of the samples with indices int64 [m]; None where the field holds none.

        Those of a classification are integers.
        """
        declared = self.pipeline(split).fields.get(field)
        if declared is None:
            return None
        if task.kind == "classification" and not declared.dtype.startswith(("int", "uint", "bool")):
            return None
        known: dict[int, torch.Tensor] = {}
        for batch in self._resident(split).loader(self._identity.batch_size):
            target = find_target(batch, field)
            if target is None:  # texts, or arrays of several lengths
                return None
            known.update(zip(batch["index"].tolist(), target.clone(), strict=True))
        missing = next((i for i in index.tolist() if i not in known), None)
        if missing is not None:
            raise TrainingError(f"predictions of {split!r} name the sample {missing}, which it does not have")
        return torch.stack([known[i] for i in index.tolist()])

    def _resident(self, split: str) -> Resident | StreamedSet:
        from pipelines import resident

        if split not in self._residents:
            if split != "valid" and self._resident_feeder is None:  # one at a time: each member has its own
                for name in self._residents.keys() - {"valid"}:
                    self._before.update({"prepare_cpu_s": self._residents.pop(name).prepare_cpu_s})
            self._residents[split] = resident(
                self._resident_feeder,
                split,
                self.pipeline(split),
                self.on_resident_wait,
                verify=self._verify_with(split) if self._comm.rank == 0 else False,
            )
        return self._residents[split]

    def describe_sample(self, split: str, index: int) -> str:
        """A sample by its number in the split, and where its record lies."""
        return f"sample {index} ({self.pipeline(split).source.where(index)})"

    def pipeline(self, split: str) -> Pipeline:
        """The pipeline of a split.

        Raises:
            TrainingError: the ensemble has none of that name.
        """
        if split == "train":
            return self._train
        pipeline = getattr(self._ensemble, split, None) if split in PREDICTED_SPLITS else None
        if pipeline is None:
            splits = [name for name in PREDICTED_SPLITS if getattr(self._ensemble, name) is not None]
            raise TrainingError(unknown_name("the Ensemble has no split", split, ["train", *splits]))
        found: Pipeline = pipeline
        return found

    @functools.cached_property
    def _train(self) -> Pipeline:
        return self._ensemble.pipeline(self._identity.params)

    def _on_device(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        if self._device.type == "cpu":
            return batches
        return (batch.to(self._device, non_blocking=True) for batch in batches)

    def stats(self) -> dict[str, Any]:
        """The loader's counters, zero before the stream is open; CPU time of resident splits included."""
        stats: dict[str, Any] = dict(self._before)
        if self._loader is not None:
            stats = {name: stats.get(name, 0) + value for name, value in self._loader.stats().items()}
        own = sum(resident.prepare_cpu_s for resident in self._residents.values()) + self.checks.cpu_s
        stats["prepare_cpu_s"] = stats.get("prepare_cpu_s", 0.0) + own
        return stats

    def close(self) -> None:
        """Leave the stream."""
        if self._loader is not None:
            self._loader.close()
