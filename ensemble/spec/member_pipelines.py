"""The members' training pipelines: one for all, or one for each member with stages of its own at the end.

Where `train=` is a function of the hyperparameters, each member has its own pipeline. The stages that all
pipelines start with run once, in the feeders; the others run in the members (`pipelines.find_shared_stages`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ensemble.spec.fields import STACKED_ROWS
from ensemble.spec.recipe import has_own_loop
from ensemble.spec.split_metrics import OF_ONE_CLASS
from ensemble.spec.splits import (
    LABELLED,
    count_overlaps,
    describe_overlap,
    find_leak,
    find_raw_name,
    list_classes,
    number_classes,
)
from ensemble.spec.task import LABELS
from ensemble.spec.validation import SpecError, as_json_value

if TYPE_CHECKING:
    from ensemble.spec.search import Search
    from pipelines import Pipeline


def make_pipeline(train: Any, params: Mapping[str, Any]) -> Pipeline:
    """The training pipeline of a member with these hyperparameters; None where there is no `train`.

    Raises:
        SpecError: the function `train` fails, or does not return a pipeline.
    """
    pipeline: Pipeline = train
    if not callable(train):
        return pipeline
    try:
        pipeline = train(dict(params))
    except Exception as error:
        raise SpecError(f"Ensemble.train({dict(params)!r}) raised {type(error).__name__}: {error}") from error
    if not hasattr(pipeline, "loader"):
        made = " ".join(repr(pipeline).split())[:60]
        raise SpecError(f"Ensemble.train({dict(params)!r}) must return a pipelines.Pipeline, got {made}")
    return pipeline


def _with_tuples(value: Any, like: Any) -> Any:
    """A value as JSON has it, with tuples where another one has them."""
    if isinstance(value, list) and isinstance(like, tuple):
        return tuple(_with_tuples(item, like[0] if like else item) for item in value)
    if isinstance(value, dict) and isinstance(like, Mapping):
        return {key: _with_tuples(item, like.get(key, item)) for key, item in value.items()}
    return value


class MemberPipelines:
    """The part of an `Ensemble` that knows its members' training pipelines."""

    train: Pipeline | Callable[[dict[str, Any]], Pipeline] | None
    valid: Pipeline | None
    test: Pipeline | None
    recipe: Any
    search: Search | None
    members: Sequence[Any] | None
    seed: int
    out_of_fold: bool
    allow_overlap: bool
    combine: Any
    calibrate: bool | str
    thresholds: Any
    objective: Any

    @property
    def target(self) -> str:
        """The field of the labels."""
        return str(getattr(self.recipe, "target", "label"))

    @functools.cached_property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes in the training data, in the order of their numbers, which are those in all splits;
        empty where the data have no names, or the task no classes.
        """
        train, task = self.first_pipeline(), getattr(self.recipe, "known_task", None)
        has_classes = getattr(task, "kind", "classification") in LABELS
        return list_classes(train, self.target) if has_classes else ()

    def first_pipeline(self) -> Pipeline:
        """The training pipeline of the first member, as it was declared."""
        return make_pipeline(self.train, next(iter(self._list_params()), {}))

    @functools.cached_property
    def overlaps(self) -> dict[str, dict[str, int]]:
        """Samples of `valid` and `test` that a split before them has, too, by split and that other one."""
        if self.valid is None and self.test is None:
            return {}
        splits: dict[str, list[Any]] = {"train": self._distinct_pipelines()}
        splits["valid"] = [] if self.out_of_fold else [self.valid]
        splits["test"] = [self.test]
        return count_overlaps({name: [one for one in of if hasattr(one, "source")] for name, of in splits.items()})

    def list_overlaps(self) -> list[dict[str, Any]]:
        """The same as rows of an event: `split`, `with`, how many samples are `shared`, `samples` of the split."""
        return [
            {"split": split, "with": before, "shared": shared, "samples": len(getattr(self, split))}
            for split, others in self.overlaps.items()
            for before, shared in others.items()
        ]

    def list_tables(self) -> list[str]:
        """Return what became of the columns of each table that a stage was fitted to."""
        calls = [stage.call for one in self._distinct_pipelines() for stage in getattr(one, "stages", ())]
        return list(dict.fromkeys(str(call) for call in calls if hasattr(call, "fitted_to")))

    def list_notices(self) -> list[str]:
        """What a user should know of the splits before training, one sentence each."""
        notices = [describe_overlap(row) for row in self.list_overlaps()]
        is_fixed = callable(self.combine) and not self.calibrate and self.thresholds is None  # nothing is selected
        if self.valid is None and not has_own_loop(self.recipe) and not is_fixed:
            notices.append(
                "there is no valid=: members are not ranked, and no combined model is selected or calibrated"
            )
        asked = {self.objective, self.thresholds, *getattr(self.recipe, "split_metrics", ())} & OF_ONE_CLASS
        if asked and len(self.classes) == 2:
            notices.append(
                f"of the class {self.classes[1]!r}, the second in sorted order: {', '.join(sorted(asked))}"
            )
        if self.combine == "stack" and self.valid is not None and len(self.valid) < STACKED_ROWS:
            notices.append(
                f"combine='stack' needs {STACKED_ROWS} validation samples, and valid= has {len(self.valid)}: "
                "members will be averaged"
            )
        return notices

    def _compare_splits(self) -> None:
        """Number the classes of all splits alike, and raise SpecError for samples that a split must not have."""
        self._number_classes()
        if self.allow_overlap:
            return
        for row in self.list_overlaps() if self.test is not None else ():
            if row["split"] == "test":
                sentence = describe_overlap(row)
                raise SpecError(f"Ensemble.{sentence}; give a test= of other samples, or allow_overlap=True")
        for split in LABELLED[self.out_of_fold :]:
            pipeline = getattr(self, split)
            if hasattr(pipeline, "source") and (leak := find_leak(split, pipeline, self._distinct_pipelines())):
                raise SpecError(f"Ensemble.{leak}. With allow_overlap=True it is taken as it is")

    def _number_classes(self) -> None:
        """Number the classes of all splits by the names in the training data, which have to have each class."""
        if not self.classes:
            return
        train = self.first_pipeline()
        if not callable(self.train):
            object.__setattr__(self, "train", self._number(train))
        for split in LABELLED:
            if (pipeline := getattr(self, split)) is not None:
                object.__setattr__(self, split, number_classes(split, pipeline, train, self.target, self.classes))

    def _number(self, train: Pipeline) -> Pipeline:
        """A training pipeline with the classes numbered by `classes`."""
        raw = find_raw_name(train, self.target)
        has_names = train.source.find_class_names(raw) is not None or train.source.is_text(raw)
        return train.number_classes(raw, self.classes) if self.classes and has_names else train

    @functools.cached_property
    def records(self) -> int:
        """Number of training records, which with `Pipeline(sampling=)` is not that of the samples of an epoch.

        Raises:
            SpecError: the members' pipelines cannot be made, or differ in it.
        """
        pipelines = self._distinct_pipelines()
        if all(getattr(pipeline, "sampling", None) is None for pipeline in pipelines):
            return self.samples
        counts = sorted({len(pipeline.source) for pipeline in pipelines})
        if len(counts) > 1:
            raise SpecError(f"Ensemble.train(params) must have as many records for every member, has {counts}")
        return counts[0]

    @functools.cached_property
    def record_fields(self) -> tuple[str, ...]:
        """Fields of the first training record, as its source gives it."""
        return tuple(self._distinct_pipelines()[0].source[0])

    @functools.cached_property
    def samples(self) -> int:
        """Number of training samples of an epoch, the same for all members; 0 without `train`.

        Raises:
            SpecError: the members' pipelines cannot be made, or differ in length.
        """
        lengths = sorted({len(pipeline) for pipeline in self._distinct_pipelines()})
        if len(lengths) > 1:
            raise SpecError(f"Ensemble.train(params) must have as many samples for every member, has {lengths}")
        return lengths[0] if lengths else 0

    @functools.cached_property
    def stream(self) -> Pipeline:
        """What the feeders prepare: the training pipeline, or the common beginning of the members' pipelines.

        Raises:
            PipelineError: the members' pipelines have no common beginning.
        """
        from pipelines import find_shared_stages

        return find_shared_stages(self._distinct_pipelines())

    def as_declared(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Recorded hyperparameters with the tuples that `members=` or the space of the search have.

        A value that neither has, of a member that was added, has them where the others have them.
        """
        made = {}
        for name, value in params.items():
            declared = self._tuples.get(name, ())
            other = _with_tuples(value, next(iter(declared), value))
            made[name] = next((own for own in declared if as_json_value(name, own) == value), other)
        return made

    @functools.cached_property
    def _tuples(self) -> dict[str, list[Any]]:
        """Declared values of hyperparameters of which some have tuples, by name."""
        items = [item for one in self.members or () for item in one.params.items()]
        items += [] if self.search is None else self.search.list_items()
        values: dict[str, list[Any]] = {}
        for name, value in items:
            if value is not None and value not in values.setdefault(name, []):
                values[name].append(value)
        return {name: declared for name, declared in values.items() if any("(" in repr(own) for own in declared)}

    def pipeline(self, params: Mapping[str, Any]) -> Pipeline:
        """The training pipeline of a member with these hyperparameters."""
        pipeline = make_pipeline(self.train, self.as_declared(params))
        if not callable(self.train):
            return pipeline
        return self._number(pipeline) if self.classes else pipeline

    def _distinct_pipelines(self) -> list[Pipeline]:
        """The members' pipelines without repetitions; of a search, those of a few points of its space."""
        if not callable(self.train):
            return [] if self.train is None else [self.train]
        distinct = {json.dumps(params, sort_keys=True): params for params in self._list_params()}
        return [self.pipeline(params) for params in distinct.values()]

    def _list_params(self) -> Iterable[Mapping[str, Any]]:
        if self.search:
            return self.search.sample(self.seed)
        return (getattr(one, "params", one) for one in self.members or ())
