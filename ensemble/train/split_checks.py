"""Looks at the records and labels of the splits on which members are evaluated, before they are
(docs/decisions/0070)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ensemble.spec import Ensemble, Recipe
from ensemble.spec.losses import NamedLoss
from ensemble.spec.recipe import has_own_loop
from ensemble.spec.splits import LABELLED
from ensemble.spec.task import IGNORED, find_known

if TYPE_CHECKING:
    from pipelines.description import PipelineDescription
    from pipelines.samples.fields import Columns

REMEDY = (
    ". Replace the files and resume the run; or leave such records out: "
    'Pipeline(on_error="skip"), at most max_skipped= of them'
)
_AT_ONCE = 2**22  # bytes of labels that are compared at a time


class SplitChecks:
    """What is known of the records and labels of splits.

    Attributes:
        bad: split -> why members cannot be evaluated on its records.
        cpu_s: CPU-seconds that were spent on reading splits.
    """

    def __init__(self, ensemble: Ensemble) -> None:
        recipe, self._ensemble = ensemble.recipe, ensemble
        self._target, loss = "", None
        if isinstance(recipe, Recipe) and recipe.collate is None:
            self._target, loss = recipe.target, None if has_own_loop(recipe) else recipe.loss
        self._is_of_classes = isinstance(loss, NamedLoss) and loss.is_of_classes
        self._labels: dict[str, list[tuple[float, int]]] = {}  # the least and the largest, with their samples
        self.bad, self.cpu_s = dict[str, str](), 0.0

    def look_at_labels(self, split: str, pipeline: PipelineDescription, columns: Columns) -> None:
        """Take note of the least and the largest label among samples of a split."""
        from pipelines.samples.fields import GOOD, INDEX, OK

        target, is_plain = columns.get(self._target), pipeline.structure is None
        if split not in LABELLED or target is None or target.dtype.kind not in "iuf" or not is_plain:
            return
        rows = max(1, _AT_ONCE // max(1, target[:1].nbytes))
        for part in (slice(first, first + rows) for first in range(0, len(target), rows)):
            labels = target[part].reshape(len(target[part]), -1)
            known = find_known(labels, of_labels=True) & (columns[OK][part] & GOOD != 0)[:, None]
            for value in (labels[known].min(), labels[known].max()) if known.any() else ():
                row = (known & (labels == value)).any(axis=1).argmax()
                label = float(value), int(columns[INDEX][part][row])
                seen = [*self._labels.get(split, []), label]
                self._labels[split] = [min(seen), max(seen)]

    def explain_labels(self, most: float) -> str:
        """Which label of a split is not in 0 ... `most`, and what to do; empty where there is none."""
        for split, labels in self._labels.items():
            for label, index in labels:
                if not 0 <= label <= most:
                    where = getattr(self._ensemble, split).source.where(index)
                    known = f"0 ... {most:g}" if math.isfinite(most) else "0, 1, 2 ..."
                    return (
                        f"Ensemble.{split}: sample {index} ({where}) has the label {label:g} in {self._target!r}, "
                        f"and labels are {known}: where it stands for none, let a stage replace it by {IGNORED}, "
                        f"torch's ignore_index, which takes no part; or leave out {split}="
                    )
        return ""

    def explain(self) -> str:
        """Why members cannot be evaluated on these data, and what to do; empty where nothing is known of that."""
        bad = "; ".join(f"{split}: {why}" for split, why in self.bad.items())
        labels = self.explain_labels(math.inf) if self._is_of_classes else ""
        return "; ".join(filter(None, (bad and bad + REMEDY, labels)))

    def read(self, splits: Iterable[str]) -> Iterator[None]:
        """Prepare all records of splits, and keep none; yields after every few of them."""
        from pipelines.loader.resident import StreamedSet, explain_failures

        for split in splits:
            errors, still = list[Any](), getattr(self._ensemble, split).without_randomness()
            samples, before_s = StreamedSet(still), self.cpu_s
            for _, columns in samples.try_records(errors):
                self.look_at_labels(split, still, columns)
                self.cpu_s = before_s + samples.prepare_cpu_s
                yield
            if (why := explain_failures(still, errors)) is not None:
                self.bad[split] = why
