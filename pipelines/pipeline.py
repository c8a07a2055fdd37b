"""`Pipeline`: what users make, map, read and share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, Self

from pipelines.checks import check_epochs, check_flag
from pipelines.description import PipelineDescription
from pipelines.errors import PipelineError
from pipelines.loader.batch import ReadRange
from pipelines.loader.collate import Collate
from pipelines.loader.loader import Loader
from pipelines.loader.resident import Resident
from pipelines.prepare.inference import infer
from pipelines.samples.structure import Inferred
from pipelines.stage import Randomness, make_batch_stage, make_stage
from pipelines.weights import Weights


class Pipeline(PipelineDescription):
    """A source and the stages applied to each of its records.

    A sample is a pure function of (pipeline, seed, epoch, index); with `sampling`, of its position in the epoch
    too. A pipeline is immutable: `map` and `take` return a new one. One process reads it with `loader`, several
    share it through `Feeder` and `attach`, and `resident` loads all of it into memory.

    Args:
        source: a source from `pipelines.sources`.
        seed: an integer; determines the order of each epoch and all randomness in the stages.
        shuffle: `True` shuffles the samples in each epoch, `False` keeps the order of the source. `"blocks"`
            shuffles the groups in which the source is read (Parquet row groups, ranges of tar files) and mixes the
            samples of `shuffle_window` groups at a time. Each group is read once per epoch, for data larger than
            the cache of the source. See `pipelines.order.epoch_order.BlockOrder`.
        shuffle_window: number of groups whose samples are mixed with each other if `shuffle="blocks"`. The cache
            of the source should hold as many.
        sampling: draws the records of each epoch by weight or equally from each class (`pipelines.sampling`). Each
            of a record's positions in an epoch has random numbers of its own.
        on_error: `"raise"` fails on a record that cannot be prepared. `"skip"` leaves it out for all readers: its
            batch has one sample less, and the record is counted.
        max_skipped: how many records of an epoch `"skip"` may leave out: a share from 0.0 to 1.0 of its samples
            (one at least, unless it is 0.0), or a number. Reading ends with `TooManySkipped` where there are more.
        id: a name that identifies the source in fingerprints if its identity is unknown.

    Raises:
        PipelineError: the source is empty or not a source, or an argument is invalid.
        SampleError: the labels for `sampling` cannot be read.

    Examples:
        >>> pipe = Pipeline(sources.arrays(x=np.arange(8.0)), seed=0).map(stages.cast("x", "float32"))
    """

    def map(
        self,
        call: Callable[..., Any],
        *,
        field: str | None = None,
        random: Randomness | Literal[False] | None = None,
        fields: Mapping[str, tuple[tuple[int, ...], str]] | None = None,
        id: str | None = None,
        version: str | int | None = None,
    ) -> Self:
        """Returns the pipeline with one more stage.

        Args:
            call: `f(sample)` or `f(sample, rng)`. A sample is a dict of numpy arrays, numbers, texts or bytes; the
                function returns one, too. `rng` is a `numpy.random.Generator` seeded for this sample, epoch and
                stage.
            field: pass the value of this field to the function instead of the whole sample, and replace it by the
                result. Transforms of torchvision and albumentations are given what they take; for an image
                with its boxes or masks see `stages.tv_transform`.
            random: what it draws from, seeded before each call: `"numpy"` (its parameter `rng`), `"torch"`,
                `"python"` (`random`, numpy's global generator), `"global"` (all three), `"own"` (it has
                `set_random_seed` or `set_random_state`). Found for `rng`, `"own"`, known libraries.
                `False`: nothing.
            fields: name -> (shape, dtype) of all fields after this stage, if it is the last one. Unless given, a
                sample is prepared to find out.
            id: identifies the stage in fingerprints instead of its code and all that is bound to it.
            version: the version of what the description of its code does not cover (`why_unsure`), such as a
                file that it opens. Its code is still compared.

        Raises:
            PipelineError: `call` is not callable, or `random` is invalid.
        """
        return self._append(make_stage(call, field, random, id, version), fields)

    def filter(self, function: Callable[[dict[str, Any]], Any]) -> Self:
        """Returns the pipeline over the records of its source for which a function is true.

        Args:
            function: takes a record as the source has it. It is called once for each record, now; the fingerprint
                covers which records are kept.

        Raises:
            PipelineError: it is true for none, or the pipeline has `sampling` or stages.
            SampleError: a record cannot be read, or the function fails.

        Examples:
            >>> pipe = Pipeline(source, seed=0).filter(lambda record: record["label"] != 2)
        """
        if self.stages:
            raise PipelineError("filter() is given the records of the source: put it before map()")
        return self._select("filter", "(function)", lambda source: source.filter(function))

    def map_batches(
        self,
        call: Callable[..., Any],
        *,
        batch_size: int = 32,
        device: str = "auto",
        field: str | None = None,
        fields: Mapping[str, tuple[tuple[int, ...], str]] | None = None,
        id: str | None = None,
        version: str | int | None = None,
    ) -> Self:
        """Returns the pipeline with one more stage, which computes on batches with torch.

        What it makes of a sample must not depend on the others in the batch: the first sample is computed at each
        place of a batch and beside other samples, and compared bit for bit. Each batch has `batch_size` samples;
        where fewer are prepared at once, one is repeated.

        Args:
            call: `f(batch)` or `f(batch, rngs)`, called without gradients and with one thread. A batch is a dict
                of tensors `[batch_size, ...]`, and of lists of what no tensor can hold; the function returns one,
                too. `rngs` has a `torch.Generator` for each sample, seeded as `map`'s `rng` is. An `nn.Module`
                is copied, in evaluation mode.
            batch_size: samples in each batch. It is part of what is computed: last bits depend on it.
            device: `"cpu"`, `"cuda"` or `"cuda:1"`; `"auto"`: `"cuda"` where torch sees a GPU in this process,
                else `"cpu"`. Tensors and generators are there, and a module is copied there.
            field: pass the tensor of this field to the function instead of all, and replace it by the result.
            fields, id, version: as `map`'s.

        Raises:
            PipelineError: `call` is not callable, or an argument is invalid.

        Examples:
            >>> features = pipe.map_batches(torch.nn.Sequential(*list(resnet.children())[:-1]), field="image")
        """
        return self._append(make_batch_stage(call, field, batch_size, device, id, version), fields)

    def _infer(self) -> Inferred:
        return infer(self)

    def loader(
        self,
        batch_size: int,
        epochs: range | int | None = None,
        rank: int = 0,
        world: int = 1,
        drop_last: bool = False,
        start_step: int = 0,
        weights: Weights | None = None,
        *,
        workers: int = 0,
        prefetch: int | None = None,
        copy: bool = False,
        collate: Collate | None = None,
    ) -> Loader:
        """Returns an iterable of batches for this process alone.

        Args:
            batch_size: samples in a *global* batch; each rank receives its own rows of it.
            epochs: the epochs to read: a range, or a number of epochs from 0. Unless given, each pass over the
                loader is the next epoch, from 0.
            rank: the rank of this process, 0 to `world - 1`.
            world: number of processes that divide each global batch.
            drop_last: whether to leave out the last, smaller batch of an epoch.
            start_step: number of global batches of the first epoch to leave out, for a resume.
            weights, collate: see `attach`.
            workers: processes that prepare batches ahead; 0: each is prepared here when it is read.
            prefetch: batches that they prepare ahead; None: 2 for each worker, fewer if they exceed 256 MiB.
            copy: whether batches of workers are copies; else each is valid until the next one.

        Returns:
            Batches, dicts of tensors: each field [rows, *shape], and `"index"` int64 [rows].

        Raises:
            PipelineError: an argument is invalid.

        Examples:
            >>> for batch in pipe.loader(batch_size=128, epochs=3): ...
        """
        check_flag("copy", copy)
        read = check_epochs(1 if epochs is None else epochs)
        read = range(read) if isinstance(read, int) else read
        return Loader(
            self, ReadRange(len(self), batch_size, read, rank, world, drop_last, start_step),
            weights=weights, is_endless=epochs is None, workers=workers, prefetch=prefetch, copy=copy,
            collate=collate,
        )  # fmt: skip

    def resident(self) -> Resident:
        """Prepares all samples once, into the memory of this process.

        Raises:
            PipelineError: a stage draws random numbers, or the pipeline has `sampling`.
        """
        return Resident.prepare(self.without_randomness())
