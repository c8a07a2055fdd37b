"""The batches of members that are measured: prepared once, and used again."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from ensemble.comm import Communicator
from ensemble.spec import Ensemble, Identity
from ensemble.spec.out_of_fold import is_out_of_fold
from ensemble.spec.sample_weights import list_held_out, make_weight_function
from ensemble.train.data import Data
from ensemble.train.stopwatch import Stopwatch
from pipelines.loader.ragged import find_tensors
from pipelines.loader.resident import StreamedSet

if TYPE_CHECKING:
    from pipelines import Batch, Loader, Pipeline
    from pipelines.loader.collate import Collate


READY = 2  # batches
LOOKED_AT = 64  # batches, for the largest


class PreparedBatches:
    """Batches of this rank, prepared before the steps are timed; shared by members that read the same data."""

    def __init__(self, ensemble: Ensemble, comm: Communicator) -> None:
        self._ensemble, self._comm = ensemble, comm
        self._pipelines: tuple[str, Pipeline] | None = None
        self._kept: dict[str, tuple[Pipeline, str, list[Batch]]] = {}
        self.prepare_s = 0.0

    @property
    def bytes(self) -> int:
        """Memory of the batches."""
        batches = (batch for _, _, batches in self._kept.values() for batch in batches)
        return sum(tensor.nbytes for batch in batches for tensor in find_tensors(batch))

    def load(self, identity: Identity) -> None:
        """Prepare the batches of a member."""
        self.batches("train", identity)
        if self._ensemble.valid is not None:
            self.batches("valid", identity)

    def train(self, identity: Identity) -> Pipeline:
        """A member's training pipeline."""
        params = json.dumps(identity.params, sort_keys=True) if callable(self._ensemble.train) else ""
        if self._pipelines is None or self._pipelines[0] != params:
            self._pipelines = params, self._ensemble.pipeline(identity.params)
        return self._pipelines[1]

    def batches(self, split: str, identity: Identity) -> list[Batch]:
        """A few training batches of the largest size, or the first one of another split, as each rank reads it."""
        pipeline = self.train(identity) if split == "train" else getattr(self._ensemble, split)
        weights = identity.weights if split == "train" or is_out_of_fold(identity.weights) else None
        read = json.dumps([identity.batch_size, weights])
        known = self._kept.get(split)
        if known is None or known[0] is not pipeline or known[1] != read:
            prepare = self._prepare_training if split == "train" else self._prepare_evaluated
            known = self._kept[split] = pipeline, read, prepare(split, pipeline, identity)
        return known[2]

    def _prepare_training(self, split: str, pipeline: Pipeline, identity: Identity) -> list[Batch]:
        weights = make_weight_function(identity.weights, pipeline.source)
        rank, world, size = self._comm.rank, self._comm.world, identity.batch_size
        first = 0
        if weights is not None:  # batches have as many samples as have a weight: the largest of the first few
            index = pipeline.order()(0, 0, min(len(pipeline), size * LOOKED_AT))
            first = int(np.argmax(np.add.reduceat(weights(index) > 0, range(0, len(index), size), dtype=int)))
        loader = pipeline.loader(size, 1, rank, world, start_step=first, weights=weights)
        made = list(itertools.islice(self._time_preparation(loader), READY))
        loader.close()
        return [batch for batch in made if batch.global_size == made[0].global_size]

    def _prepare_evaluated(self, split: str, pipeline: Pipeline, identity: Identity) -> list[Batch]:
        chosen = None
        if split == "valid" and is_out_of_fold(identity.weights):
            chosen = list_held_out(identity.weights, self.train(identity).source)
        rows = StreamedSet(pipeline.without_randomness())
        loader = rows.loader(identity.batch_size, self._comm.rank, self._comm.world, chosen=chosen)
        return [batch.clone() for batch in itertools.islice(loader, 1)]

    def _time_preparation(self, loader: Loader) -> Iterator[Batch]:
        """Yield the batches of a loader; sets `prepare_s`, CPU-seconds a sample, to that of the last batch."""
        cpu_s, samples = 0.0, 0
        for batch in loader:
            stats = loader.stats()
            new = max(1, stats["samples"] - samples)
            self.prepare_s = (stats["prepare_cpu_s"] - cpu_s) / new
            cpu_s, samples = stats["prepare_cpu_s"], stats["samples"]
            yield batch


class PreparedData(Data):
    """Repeats a few prepared batches, as many as the stopwatch wants.

    Attributes:
        on_evaluated: called when the steps are measured, and a batch of a split is, where there is one.
    """

    def __init__(
        self,
        ensemble: Ensemble,
        identity: Identity,
        device: torch.device,
        comm: Communicator,
        ready: PreparedBatches,
        watch: Stopwatch,
    ) -> None:
        super().__init__(ensemble, identity, None, device, comm)
        self._ready, self._watch = ready, watch
        self.on_evaluated: Callable[[], None] = lambda: None

    def epoch(self, own_epoch: int, collate: Collate | None = None) -> Iterator[Batch]:
        """Yield the batches of the only epoch; what `collate` takes is part of a step."""
        return self._on_device(self._apply_collate(self._time_steps(), collate))

    def count_batches(self, own_epoch: int, steps: int) -> int:
        """All: none of them is empty."""
        return steps

    def _time_steps(self) -> Iterator[Batch]:
        ready = itertools.cycle(self._ready.batches("train", self._identity))
        while self._watch.has_next():
            batch = next(ready).clone()  # members may write into it
            self._watch.start(batch)
            yield batch
            self._watch.stop()
        if self._ensemble.valid is None:
            self.on_evaluated()

    def reread(self, own_epoch: int, collate: Collate | None = None) -> Iterator[Batch]:
        """Yield a few batches of the epoch."""
        batches = (batch.clone() for batch in self._ready.batches("train", self._identity))
        return self._on_device(self._apply_collate(batches, collate))

    def split(self, name: str, collate: Collate | None = None) -> Iterator[Batch]:
        """Yield one batch, as often as the stopwatch wants; once suffices to measure memory."""
        self.pipeline(name)
        batches = self._watch.time_evaluations(self._ready.batches(name, self._identity))
        yield from self._on_device(self._apply_collate(batches, collate, is_training=False))
        if self._watch.is_complete:
            self.on_evaluated()

    @functools.cached_property
    def _train(self) -> Pipeline:
        return self._ready.train(self._identity)
