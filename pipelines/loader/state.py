"""Says where a loader stands in its stream, as JSON values, and takes another loader to the same place.

By law a batch depends on (pipeline, epoch, step, batch size, rank, world size) alone, so a place is all that a
state has to hold. It counts the samples of *global* batches: it is the same on all ranks, and other ranks, or
batches of another size that begin at the same sample, go on from it.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from pipelines.checks import check_integer, shorten_repr
from pipelines.description import PipelineDescription
from pipelines.errors import PipelineError
from pipelines.fingerprint import SCHEME
from pipelines.loader.batch import Batch, ReadRange

VERSION = 1
_KEYS = ("version", "epoch", "step", "samples", "batch_size", "n", "pipeline")


class Epoch:
    """One epoch of a loader: iterate it for its batches."""

    def __init__(self, loader: Resumable, epoch: int) -> None:
        self.epoch = epoch
        self._loader = loader

    def __len__(self) -> int:
        reading = self._loader.reading
        return reading.steps - reading.first_step(self.epoch)

    def __iter__(self) -> Iterator[Batch]:
        return (batch for batch in self.all_batches() if batch.global_size)

    def all_batches(self) -> Iterator[Batch]:
        """Each global batch, also one without a sample, of which `iter` gives none."""
        return self._loader._batches(self.epoch)


class Resumable:
    """The place of a loader in its stream: what it has delivered, and where its next pass begins.

    Args:
        is_endless: whether each pass is the next epoch.

    Attributes:
        pipeline, reading: the same; `reading.epochs` are the epochs of the present or next pass.
    """

    def __init__(self, pipeline: PipelineDescription, reading: ReadRange, *, is_endless: bool) -> None:
        self.pipeline = pipeline
        self._is_endless = is_endless
        self._has_begun = False
        self._passes = 0  # that have begun
        self._batches_before = 0  # batches of earlier ones
        self._read_from(reading)
        self._first_epoch = reading.epochs.start
        self._identity: dict[str, Any] | None = None

    def _read_from(self, reading: ReadRange) -> None:
        """Set what the next pass reads."""
        self.reading = reading
        self._next = (reading.epochs.start, reading.first_step(reading.epochs.start))

    def _leave_stream(self) -> None:
        """Leave a feeder's stream, because the next pass begins elsewhere."""

    def _end_pass(self) -> None:
        """A pass has ended, and no other has begun."""

    def _count_batches(self) -> int:
        """Batches that were delivered so far."""
        raise NotImplementedError

    def _batches(self, epoch: int) -> Iterator[Batch]:
        raise NotImplementedError

    def epochs(self) -> Iterator[Epoch]:
        """One pass: each of its epochs in turn, which has `.epoch` and iterates its batches.

        The pass begins with the request for its first epoch: an iterator that is never read is no pass.

        Raises:
            PipelineError: there is one pass (`epochs` was given), and it has begun.
        """
        self._check_pass()
        return self._iterate_epochs()

    def _check_pass(self) -> None:
        if self._has_begun and not self._is_endless:
            read = self.reading.epochs
            raise PipelineError(
                f"a second pass over a loader of epochs {read.start} to {read.stop - 1} would repeat them: "
                "leave epochs= out for the next epoch at each pass, or make a loader for each range of epochs"
            )

    def _begin_pass(self) -> None:
        self._check_pass()
        if self._has_begun:
            self._leave_stream()  # a pass that was left in the middle is still in it
            stop = self.reading.epochs.stop
            self._read_from(replace(self.reading, epochs=range(stop, stop + 1), start_step=0))
        self._has_begun, self._batches_before = True, self._count_batches()
        self._passes += 1

    def _iterate_epochs(self) -> Iterator[Epoch]:
        self._begin_pass()
        number = self._passes
        try:
            for epoch in self.reading.epochs:
                yield Epoch(self, epoch)
                self._next = (epoch + 1, 0)
        finally:
            if self._passes == number:  # else another pass has begun, and has what this one had
                self._end_pass()

    def __iter__(self) -> Iterator[Batch]:
        return _iterate_batches(self.epochs())  # `epochs` raises here, not at the first batch

    @property
    def batch_size(self) -> int:
        """Samples in a global batch, of all ranks together."""
        return self.reading.batch_size

    @property
    def drop_last(self) -> bool:
        """Whether an epoch's last, smaller batch is left out."""
        return self.reading.drop_last

    @property
    def dataset(self) -> PipelineDescription:
        """The pipeline; `len(loader.dataset)` is the number of samples in an epoch."""
        return self.pipeline

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be this epoch of the stream, from its start, as `DistributedSampler.set_epoch` does.

        If that is the epoch of the next pass already, nothing changes: a pass that `load_state_dict` has put in
        the middle of it stays there. Without `set_epoch` each pass is the next epoch.

        Args:
            epoch: the epoch of the stream, from 0.

        Raises:
            PipelineError: the loader was made for certain epochs.
        """
        epoch = check_integer("epoch", epoch, 0)
        if not self._is_endless:
            read = self.reading.epochs
            raise PipelineError(
                f"set_epoch() is for a loader without epochs=: this one reads the epochs {read.start} to "
                f"{read.stop - 1} in one pass"
            )
        if epoch != (self.reading.epochs.stop if self._has_begun else self.reading.epochs.start):
            self._continue_at(epoch, 0)

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands: after the last batch that it has delivered. Small; JSON values.

        It is the same on all ranks, and holds the fingerprints of the pipeline's parts.
        """
        if self._identity is None:
            self._identity = self.pipeline.describe_identity()
        (epoch, step), reading, identity = self._next, self.reading, self._identity
        parts = [list(part) for part in identity["parts"]]
        return {
            "version": VERSION,
            "epoch": epoch,
            "step": step,
            "samples": min(reading.n, step * reading.batch_size),
            "batch_size": reading.batch_size,
            "n": reading.n,
            "pipeline": {**identity, "tokens": list(identity["tokens"]), "parts": parts},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass go on from a state: it is the rest of that epoch.

        If the state was taken during an epoch's last batch, nothing is left of it and the pass is empty; if it
        was taken after the loop over the epoch, the pass is the whole next epoch. The number of ranks may have
        changed, and the batch size if a batch begins at the same sample.

        Args:
            state: what `state_dict` has returned, of the same pipeline.

        Raises:
            PipelineError: the state is of another pipeline (the error names the part), of another epoch than
                this loader reads, or of a place where no batch begins.
        """
        epoch, step = _find_place(state, self.pipeline, self.reading)
        if not self._is_endless and not (
            self._first_epoch <= epoch < self.reading.epochs.stop or (epoch, step) == (self.reading.epochs.stop, 0)
        ):
            raise PipelineError(
                f"the state is at epoch {epoch}, step {step}; this loader reads the epochs {self._first_epoch} to "
                f"{self.reading.epochs.stop - 1}"
            )
        self._continue_at(epoch, step)

    def _continue_at(self, epoch: int, step: int) -> None:
        """Let the next pass begin there."""
        self._leave_stream()
        stop = epoch + 1 if self._is_endless else self.reading.epochs.stop
        self._read_from(replace(self.reading, epochs=range(epoch, stop), start_step=step))
        self._has_begun, self._next = False, (epoch, step)


def _find_place(state: Any, pipeline: PipelineDescription, reading: ReadRange) -> tuple[int, int]:
    """The epoch and step at which a loader of this pipeline goes on from a state."""
    if not isinstance(state, Mapping) or any(key not in state for key in _KEYS):
        raise PipelineError(
            f"load_state_dict() needs what state_dict() of a loader returned, got {shorten_repr(state)}"
        )
    if state["version"] != VERSION:
        raise PipelineError(
            f"the loader's state is of version {state['version']!r}, this version of ray-ensemble reads {VERSION}"
        )
    _check_pipeline(state, pipeline)
    epoch = check_integer("the state's epoch", state["epoch"], 0)
    step = check_integer("the state's step", state["step"], 0)
    if state["batch_size"] != reading.batch_size:
        samples = check_integer("the state's samples", state["samples"], 0, reading.n)
        step, remainder = divmod(samples, reading.batch_size)
        if samples == reading.n:
            step, remainder = reading.steps, 0
        if remainder:
            raise PipelineError(
                f"the state is after {samples} samples of epoch {epoch}, in batches of {state['batch_size']}; no "
                f"batch of batch_size={reading.batch_size} begins there: use one that divides {samples}"
            )
    return epoch, min(step, reading.steps)


def _check_pipeline(state: Mapping[str, Any], pipeline: PipelineDescription) -> None:
    if state["n"] != len(pipeline):
        raise PipelineError(
            f"the loader's state belongs to another pipeline: its epochs had {state['n']} samples, here they have "
            f"{len(pipeline)}"
        )
    theirs, mine = state["pipeline"], pipeline.describe_identity()
    if theirs["tokens"][-1] == mine["tokens"][-1]:
        return
    if theirs["scheme"] != SCHEME:
        warnings.warn(
            "the loader's state was saved by a version of ray-ensemble that describes pipelines differently: "
            "whether it belongs to this pipeline cannot be checked",
            stacklevel=4,
        )
        return
    pairs = list(itertools.zip_longest(theirs["parts"], mine["parts"], fillvalue=("no stage", "")))
    for (their_name, their_digest, *_), (name, digest, *_) in pairs:
        if (their_name, their_digest) != (name, digest):
            difference = f"the {name} differs" if their_name == name else f"it has {their_name} in place of {name}"
            raise PipelineError(
                f"the loader's state belongs to another pipeline: {difference}. Load it into a loader of the same "
                "pipeline"
            )
    if why := theirs["why_unsure"] or mine["why_unsure"]:
        warnings.warn(f"cannot check that the loader's state is of this pipeline: {why}", stacklevel=4)


def _iterate_batches(epochs: Iterator[Epoch]) -> Iterator[Batch]:
    """A generator, which closes the loader when it is left early."""
    for epoch in epochs:
        yield from epoch
