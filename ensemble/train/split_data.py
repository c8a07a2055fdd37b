"""The splits on which a member is evaluated, prepared once and resident, and the pipelines of a member.

Their records and labels are looked at before anything is trained (docs/decisions/0070).
"""

from __future__ import annotations

import functools
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from ensemble.comm import Communicator
from ensemble.spec import PREDICTED_SPLITS, Ensemble, Identity, Recipe
from ensemble.spec.losses import NamedLoss
from ensemble.spec.out_of_fold import is_out_of_fold
from ensemble.spec.recipe import has_own_loop
from ensemble.spec.sample_weights import list_held_out, make_weight_function
from ensemble.spec.splits import LABELLED
from ensemble.spec.task import IGNORED, Task, find_known
from ensemble.spec.validation import unknown_name
from ensemble.train.call import find_target
from ensemble.train.job import SharingDiffers, TrainingError, UnusableData
from ensemble.train.node_checks import NODE_DIRECTORY, NodeChecks, first_on_node, make_checker_address
from pipelines.verification.reader import Finding, Verification

if TYPE_CHECKING:
    from pipelines import Batch, Pipeline, Resident
    from pipelines.description import PipelineDescription
    from pipelines.loader.collate import Collate
    from pipelines.loader.resident import StreamedSet
    from pipelines.samples.fields import Columns
    from pipelines.verification.reader import MakeVerification, StreamOrigin

REMEDY = (
    ". Replace the files and resume the run; or leave such records out: "
    'Pipeline(on_error="skip"), at most max_skipped= of them'
)
_AT_ONCE = 2**22  # bytes of labels that are compared at a time


class SplitData:
    """The splits on which a member is evaluated, as one rank reads them; `Data` has the training stream, too.

    Attributes:
        on_resident_wait: called every second while a resident split is awaited.
        on_wait: called every second while the stream is awaited; what it raises leaves the training loop.
        on_finding: called with the fields of a `sample_difference` event.
        bad: split -> why members cannot be evaluated on its records.
    """

    def __init__(
        self, ensemble: Ensemble, identity: Identity, feeder: str | None, device: torch.device, comm: Communicator
    ) -> None:
        self.on_resident_wait: Callable[[], None] | None = None
        self.on_wait: Callable[[], None] | None = None
        self.on_finding: Callable[..., None] = lambda **fields: None
        self._ensemble, self._identity, self._device, self._comm = ensemble, identity, device, comm
        self._feeder = self._resident_feeder = feeder
        self._before: Counter[str] = Counter()  # counters of loaders and sets that were closed
        self._residents: dict[str, Resident | StreamedSet] = {}
        self._were_read = set[str]()  # splits of which batches were asked for
        self.bad: dict[str, str] = {}
        # The least and the largest label of a split, with their samples.
        self._labels: dict[str, list[tuple[float, int]]] = {}

    # --- before training --------------------------------------------------------------------------------

    def prepare_splits(self) -> None:
        """Prepare the splits on which the member is evaluated, and look at their records and labels.

        Without a feeder only `valid` stays: the others, and what memory does not hold, are read by one member of
        the node.
        """
        from pipelines.errors import SampleError, TooManySkipped
        from pipelines.loader.resident import Resident

        streamed: list[str] = []
        for split in (name for name in PREDICTED_SPLITS if getattr(self._ensemble, name) is not None):
            try:
                is_here = split == "valid" or self._resident_feeder is not None
                samples = self._resident(split) if is_here else None
                if isinstance(samples, Resident):
                    self._look_at_labels(split, samples.pipeline, samples.columns)
                else:
                    streamed.append(split)
            except (SampleError, TooManySkipped) as error:
                self.bad[split] = str(error)
        if streamed:
            with first_on_node("splits-read", math.inf, on_wait=self.on_resident_wait) as is_first:
                for split in streamed if is_first else ():
                    self._read_once(split)
                self._refuse_bad()
        self._refuse_bad()

    def _refuse_bad(self) -> None:
        recipe = self._ensemble.recipe
        loss = recipe.loss if isinstance(recipe, Recipe) and not has_own_loop(recipe) else None
        is_of_classes = isinstance(loss, NamedLoss) and loss.is_of_classes
        bad = "; ".join(f"{split}: {why}" for split, why in self.bad.items())
        labels = self.explain_labels(math.inf) if is_of_classes else ""
        if why := "; ".join(filter(None, (bad and bad + REMEDY, labels))):
            raise UnusableData(f"members cannot be evaluated on these data, so that nothing was trained: {why}")

    def _read_once(self, split: str) -> None:
        """Prepare all records of a split, and keep none."""
        from pipelines.loader.resident import StreamedSet, explain_failures

        errors, still = list[Any](), self.pipeline(split).without_randomness()
        samples = StreamedSet(still)
        for _, columns in samples.try_records(errors):
            self._look_at_labels(split, still, columns)
            if self.on_resident_wait is not None:
                self.on_resident_wait()
        self._before.update({"prepare_cpu_s": samples.prepare_cpu_s})
        if (why := explain_failures(still, errors)) is not None:
            self.bad[split] = why

    def _look_at_labels(self, split: str, pipeline: PipelineDescription, columns: Columns) -> None:
        """Take note of the least and the largest label among samples of a split."""
        from pipelines.samples.fields import GOOD, INDEX, OK

        recipe = self._ensemble.recipe
        is_shown = isinstance(recipe, Recipe) and recipe.collate is None and pipeline.structure is None
        target = columns.get(recipe.target) if isinstance(recipe, Recipe) and is_shown else None
        if split not in LABELLED or target is None or target.dtype.kind not in "iuf":
            return
        rows = max(1, _AT_ONCE // max(1, target[:1].nbytes))
        for part in (slice(first, first + rows) for first in range(0, len(target), rows)):
            labels = target[part].reshape(len(target[part]), -1)
            is_label = find_known(labels, of_labels=True) & (columns[OK][part] & GOOD != 0)[:, None]
            for value in (labels[is_label].min(), labels[is_label].max()) if is_label.any() else ():
                row = (is_label & (labels == value)).any(axis=1).argmax()
                label = float(value), int(columns[INDEX][part][row])
                labels_so_far = [*self._labels.get(split, []), label]
                self._labels[split] = [min(labels_so_far), max(labels_so_far)]

    def explain_labels(self, most: float) -> str:
        """Which label of a split is not in 0 ... `most`, and what to do; empty where there is none."""
        for split, labels in self._labels.items():
            for label, index in labels:
                if not 0 <= label <= most:
                    valid = f"0 ... {most:g}" if math.isfinite(most) else "0, 1, 2 ..."
                    target = getattr(self._ensemble.recipe, "target", "")
                    return (
                        f"Ensemble.{split}: {self.describe_sample(split, index)} has the label {label:g} in "
                        f"{target!r}, and labels are {valid}: if it means that there is no label, let a stage "
                        f"replace it by {IGNORED} (torch's ignore_index), which is ignored; or leave out {split}="
                    )
        return ""

    # --- samples that others prepared --------------------------------------------------------------------

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
            return Verification(checks.check, own.member, pipeline, functools.partial(self._handle_finding, split))

        return make

    def _handle_finding(self, split: str, finding: Finding) -> None:
        """Report what was found; where the member has read other samples before, its training ends here."""
        result, mode = finding.result, self._ensemble.verify_sharing
        # The ranks of a member read a resident set each for itself: they cannot leave it together.
        is_late = finding.is_late or (split != "train" and self._comm.world > 1)
        action = "none" if result.kind != "different" else "alone" if not is_late else "anew"
        action = "fails" if action == "anew" and mode == "fail" else action
        self.on_finding(split=split, action=action, **finding.as_record())
        if action in ("anew", "fails"):
            raise SharingDiffers(
                f"shared samples of {split} differ from what its own pipeline prepares: {finding.describe()}",
                begins_anew=action == "anew",
            )
        if action == "alone" and split == "train":
            self._feeder = None

    # --- batches ----------------------------------------------------------------------------------------

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
        except (SampleError, TooManySkipped) as error:  # it could be prepared before
            raise UnusableData(f"members cannot be evaluated on these data: {split}: {error}{REMEDY}") from None

    def has_read(self, name: str) -> bool:
        """Whether batches of a resident split were read."""
        return name in self._were_read

    def read_first(self, name: str, samples: int, collate: Collate | None = None) -> Batch:
        """The first samples of a resident split as a batch, on the member's device; the same on all ranks."""
        return self._take_first(name, samples, self.find_held_out(name), collate)

    def read_last(self, name: str, samples: int, collate: Collate | None = None) -> Batch:
        """The last samples of a resident split as a batch, on the member's device; the same on all ranks."""
        held_out = self.find_held_out(name)
        chosen = np.ones(len(self.pipeline(name)), bool) if held_out is None else held_out.copy()
        chosen[np.flatnonzero(chosen)[:-samples]] = False
        return self._take_first(name, samples, chosen, collate)

    def _take_first(
        self, name: str, samples: int, chosen: npt.NDArray[np.bool_] | None, collate: Collate | None
    ) -> Batch:
        batches = self._resident(name).loader(samples, 0, 1, chosen=chosen)
        prepared = self._on_device(self._apply_collate(iter(batches), collate, is_training=False))
        for batch in prepared:
            if len(batch["index"]):  # those that are skipped leave none
                return batch
        raise TrainingError(f"no sample of {name} that the member is evaluated on can be prepared")

    def _apply_collate(
        self, batches: Iterator[Batch], collate: Collate | None, *, is_training: bool = True
    ) -> Iterator[Batch]:
        if collate is None:
            return batches
        from pipelines.loader.collate import Collator

        weighted = is_training and self._weights is not None
        call = Collator(collate, self.pipeline("train").seed, self._comm.rank, weighted=weighted)
        return (call(batch, is_training=is_training) for batch in batches)

    def _on_device(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        if self._device.type == "cpu":
            return batches
        return (batch.to(self._device, non_blocking=True) for batch in batches)

    def targets(self, split: str, field: str, index: torch.Tensor, task: Task) -> torch.Tensor | None:
        """The targets [m, ...] of the samples with indices int64 [m]; None where the field holds none.

        Those of a classification are integers.
        """
        declared = self.pipeline(split).fields.get(field)
        if declared is None:
            return None
        if task.kind == "classification" and not declared.dtype.startswith(("int", "uint", "bool")):
            return None
        targets: dict[int, torch.Tensor] = {}
        for batch in self._resident(split).loader(self._identity.batch_size):
            target = find_target(batch, field)
            if target is None:  # texts, or arrays of several lengths
                return None
            targets.update(zip(batch["index"].tolist(), target.clone(), strict=True))
        missing = next((i for i in index.tolist() if i not in targets), None)
        if missing is not None:
            raise TrainingError(f"predictions of {split!r} name the sample {missing}, which it does not have")
        return torch.stack([targets[i] for i in index.tolist()])

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

    # --- pipelines --------------------------------------------------------------------------------------

    def describe_sample(self, split: str, index: int) -> str:
        """A sample by its number in the split, and where its record lies."""
        return f"sample {index} ({self.pipeline(split).source.where(index)})"

    def pipeline(self, split: str) -> Pipeline:
        """The pipeline of a split."""
        if split == "train":
            return self._train
        pipeline: Pipeline | None = getattr(self._ensemble, split, None) if split in PREDICTED_SPLITS else None
        if pipeline is None:
            splits = [name for name in PREDICTED_SPLITS if getattr(self._ensemble, name) is not None]
            raise TrainingError(unknown_name("the Ensemble has no split", split, ["train", *splits]))
        return pipeline

    @functools.cached_property
    def _train(self) -> Pipeline:
        return self._ensemble.pipeline(self._identity.params)
