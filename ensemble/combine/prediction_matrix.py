"""Aligns the members' saved predictions of one split, so that each row is the same sample for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ensemble.combine.formulas import list_chunks
from ensemble.combine.metrics import Array, CombineError
from ensemble.combine.tasks import find_math
from ensemble.spec.positions import TAILS, choose_positions, count_positions, fill_up, take_positions
from ensemble.spec.task import CLASSIFICATION, Task

if TYPE_CHECKING:
    from ensemble.store import Predictions, RunDir, RunState

UNSAVED = "saved no"

MOST_FITTED, FEWEST_FITTED = 2**21, 2**19
"""Numbers of all members together, of one at least, beyond which weights and calibration are fitted to a part."""


@dataclass(frozen=True)
class PredictionMatrix:
    """Predictions of several members for the same samples in the same order.

    Attributes:
        members: their ids.
        values: one array [n, ...] each, float32 as saved, laid out by the task.
        index: int64 [n], ascending: the samples.
        target: [n, ...], None where the split has none.
        left_out: members whose predictions cannot be used -> why.
        task: what all of them predict.
        groups: of each member the number of its configuration, where its row has the out-of-fold predictions of
            that (`ensemble.combine.out_of_fold`); else None.
        part: of which of the positions they are, as a note to the user; "": of all.
        positions: which ones of each sample were kept; None: all.
        fields: fields of the samples that metrics of the split ask for.
    """

    members: list[str]
    values: list[Array]
    index: Array
    target: Array | None
    left_out: dict[str, str]
    task: Task = CLASSIFICATION
    groups: tuple[int, ...] | None = None
    part: str = ""
    positions: Array | None = None
    fields: Mapping[str, Array] = field(default_factory=dict)

    @property
    def unsaved(self) -> bool:
        """Whether all members that are left out saved no predictions at all."""
        return all(why.startswith(UNSAVED) for why in self.left_out.values())

    def holds_same_samples(self, other: PredictionMatrix) -> bool:
        """Whether both splits are the same samples in one order: to the last bit the first member says the same of
        them, and so do their targets.
        """
        if self.target is None or other.target is None or self.target.shape != other.target.shape:
            return False
        first = self.members[0]
        own, theirs = self.values[0], other.select([first]).values[0]
        return are_equal(own, theirs) and are_equal(self.target, other.target)

    def list_group(self, group: int) -> list[str]:
        """The members of a configuration, by its number in `groups`."""
        return [member for member, own in zip(self.members, self.groups or (), strict=True) if own == group]

    def select(self, members: Sequence[str]) -> PredictionMatrix:
        """Returns the predictions of these members only, in this order."""
        at = {member: i for i, member in enumerate(self.members)}
        chosen = [self.values[at[member]] for member in members]
        groups = None if self.groups is None else tuple(self.groups[at[member]] for member in members)
        return replace(self, members=list(members), values=chosen, groups=groups)

    def thin(self, members: int | None = None) -> PredictionMatrix:
        """Returns the predictions of a part of the positions of each sample, where all are too many to fit so many
        members to; None: these.
        """
        shape = self.values[0].shape
        most = max(FEWEST_FITTED, MOST_FITTED // max(1, members or len(self.values)))
        at = choose_positions(self.task, shape, most)
        if at is None:
            return self
        distinct = {id(own): own for own in self.values}  # members of one configuration have the same array
        target, tail = self.target, find_math(self.task).tail
        parts = {key: take_positions(own, at, tail) for key, own in distinct.items()}
        if target is not None and target.shape == shape[: len(shape) - tail]:  # else it is refused later
            target = take_positions(target, at, 0)
        part = (
            "weights, calibration and figures of uncertainty and of classes are of "
            f"{len(at):,} positions of each sample, drawn from its {count_positions(self.task, shape):,}"
        )
        part = f"{self.part}; {part}" if self.part else part
        values = [parts[id(own)] for own in self.values]
        positions = at if self.positions is None else self.positions[at]
        return replace(self, values=values, target=target, part=part, positions=positions)

    def take(self, rows: Any) -> PredictionMatrix:
        """Returns the predictions of these rows only: a slice, or int64 [k]."""
        target = None if self.target is None else self.target[rows]
        return replace(self, values=[own[rows] for own in self.values], index=self.index[rows], target=target)


def read_prediction_matrix(
    run_dir: RunDir, state: RunState, members: Sequence[str], split: str
) -> PredictionMatrix:
    """Read and align what `members` saved for `split` (valid or test); who saved nothing is left out.

    Of members that each predicted another fold of `valid`, the rows are out of fold (`read_out_of_fold`).

    Raises:
        DamagedError: predictions are not what the log says that was saved.
        CombineError: see `align`.
    """
    from ensemble.combine.out_of_fold import are_of_folds, read_out_of_fold
    from ensemble.store import has_predictions, read_predictions

    if split == "valid" and are_of_folds(run_dir, state, members):
        return read_out_of_fold(run_dir, state, members)
    saved: dict[str, Predictions] = {}  # mapped: all members together may be larger than the memory
    left_out: dict[str, str] = {}
    for member in members:
        member_state = state.members[member]
        if has_predictions(run_dir, member_state, split):
            saved[member] = read_predictions(run_dir, member_state, split, mapped=True)
        else:
            why = next((text for text in member_state.remarks if f"no predictions on {split!r}" in text), "")
            left_out[member] = f"{UNSAVED} {split} predictions{why and ': '}{why.partition('saved: ')[2]}"
            if member_state.outdated is not None:
                left_out[member] = f"could not be evaluated again: {member_state.outdated}"
    return align(split, saved, left_out)


def align(
    split: str, saved: Mapping[str, Predictions], left_out: Mapping[str, str] | None = None
) -> PredictionMatrix:
    """Sorts each member's rows by `index` and checks that all have the same samples and targets.

    A member whose outputs are no predictions of their task is left out and named in `left_out`.

    Raises:
        CombineError: when two members have different tasks, predicted different samples, saw different targets for
            one, or predict values of different shapes: then they did not read the same data and no figure would
            mean anything.
    """
    left_out = dict(left_out or {})
    task = _find_common_task(split, {member: one.task for member, one in saved.items()})
    math, matrices = find_math(task), dict[str, PredictionMatrix]()
    for member, one in saved.items():
        values = np.asarray(one.values)
        chunks = [values[at] for at in list_chunks(values)]  # mapped, of which few are in memory
        if any(math.explain_invalid(chunk) is not None for chunk in chunks):
            left_out[member] = f"{split} {math.explain_invalid(values)}"
            continue
        is_rounded = any(math.normalise(chunk) is not chunk for chunk in chunks)
        index, target, values = _sort_by_index(one)
        values = math.normalise(values) if is_rounded else values
        twice = index[1:][index[1:] == index[:-1]]
        if len(twice):
            raise CombineError(
                f"{member} has two {split} predictions for sample {twice[0]}; one per index is expected"
            )
        positions = None if one.positions is None else np.asarray(one.positions)
        own = PredictionMatrix([member], [values], index, target, {}, task, None, "", positions, one.fields)
        _check_alike(split, next(iter(matrices.values()), own), own)
        matrices[member] = own
    if not matrices:
        return PredictionMatrix([], [], np.empty(0, dtype=np.int64), None, left_out, task)
    first = next(iter(matrices.values()))
    kept = [len(own.positions) for own in matrices.values() if own.positions is not None]
    part = f"all figures are of the {kept[0]:,} positions of each sample that are kept" if kept else ""
    fields = (own.fields for own in saved.values() if own.fields and np.array_equal(own.index, first.index))
    values_of = [own.values[0] for own in matrices.values()]
    return replace(
        first, members=list(matrices), values=values_of, left_out=left_out, part=part, fields=next(fields, {})
    )


def widen_alike(saved: Sequence[Predictions]) -> list[Predictions]:
    """Those of samples that are of unlike length, filled up as in `PredictedRows`; others as they are."""
    tail, axes = TAILS.get(saved[0].task.kind), {own.values.ndim for own in saved}
    if tail is None or len(axes) > 1 or any(own.positions is not None for own in saved):
        return list(saved)
    shapes = [own.values.shape[1 : max(axes) - tail] for own in saved]
    lengths = tuple(max(sizes) for sizes in zip(*shapes, strict=True))
    return [own if own.values.shape[1 : len(lengths) + 1] == lengths else _widen(own, lengths) for own in saved]


def _widen(one: Predictions, longest: tuple[int, ...]) -> Predictions:
    axes, target = len(longest), one.target
    lengths = np.tile(one.values.shape[1 : axes + 1], (len(one.values), 1))
    if target is not None:
        target = fill_up(target.reshape(-1), lengths, longest, is_target=True)
    flat = one.values.reshape(-1, *one.values.shape[axes + 1 :])
    return replace(one, values=fill_up(flat, lengths, longest), target=target)


def are_equal(first: Array, second: Array) -> bool:
    """Whether two arrays hold the same, NaN too; some rows at a time."""
    is_float = first.dtype.kind == second.dtype.kind == "f"
    return first.shape == second.shape and all(
        np.array_equal(first[at], second[at], equal_nan=is_float) for at in list_chunks(first)
    )


def explain_left_out(left_out: Mapping[str, str]) -> str:
    """Why all members were left out, in one line: the first member's reason."""
    member, why = next(iter(left_out.items()))
    others = f" (and {len(left_out) - 1} more members)" if len(left_out) > 1 else ""
    hint = "; a train function saves them by member.predict_all()" if why == f"{UNSAVED} valid predictions" else ""
    if "outputs of shape" in why:
        hint = "; declare Recipe.predict(model, batch) -> probabilities [b, classes]"
    return f"{member}{others}: {why}{hint}"


def _sort_by_index(one: Predictions) -> tuple[Array, Array | None, Array]:
    """Index, target and values in the order of the index; as they are, and not copied, where they have it."""
    index, target, values = np.asarray(one.index), one.target, np.asarray(one.values)
    target = None if target is None else np.asarray(target)
    if (index[1:] >= index[:-1]).all():
        return index, target, values
    order = np.argsort(index, kind="stable")
    return index[order], None if target is None else target[order], values[order]


def _find_common_task(split: str, tasks: Mapping[str, Task]) -> Task:
    """The task of all members; classification where there are none."""
    first = next(iter(tasks), "")
    for member, task in tasks.items():
        if task != tasks[first]:
            raise CombineError(
                f"{first} and {member} saved {split} predictions of different tasks "
                f"({describe_task(tasks[first])} and {describe_task(task)}): "
                "members of one ensemble must have the same task"
            )
    return tasks.get(first, CLASSIFICATION)


def describe_task(task: Task) -> str:
    """The task in a word, with the levels of quantiles."""
    return f"{task.kind}{f' {list(task.levels)}' if task.levels else ''}"


def _check_alike(split: str, first: PredictionMatrix, other: PredictionMatrix) -> None:
    """Raise CombineError where two members predicted other samples, positions or shapes, or saw other targets."""
    (one, own), (two, theirs) = ((matrix.members[0], matrix.values[0]) for matrix in (first, other))
    if not np.array_equal(first.index, other.index):
        different = np.setxor1d(first.index, other.index)[0]
        has, lacks = (one, two) if different in first.index else (two, one)
        raise CombineError(
            f"{one} and {two} predicted different {split} samples ({len(first.index)} and {len(other.index)}): "
            f"{has} has index {different}, {lacks} does not; all members must predict the whole split"
        )
    kept = [np.empty(0) if matrix.positions is None else matrix.positions for matrix in (first, other)]
    if not np.array_equal(kept[0], kept[1]):
        raise CombineError(
            f"{one} and {two} keep different positions of the {split} samples, as they were evaluated with "
            "different splits or Ensemble.keep_predictions_gb; changing that option evaluates all members again"
        )
    target, target_too = first.target, other.target
    if (target is None) != (target_too is None):
        has, lacks = (two, one) if target is None else (one, two)
        raise CombineError(f"{has} saved targets with its {split} predictions, {lacks} did not")
    if target is not None and target_too is not None and not are_equal(target, target_too):
        row = 0
        if target.shape == target_too.shape:
            differs = (target != target_too) & ~((target != target) & (target_too != target_too))
            row = int(np.argmax(differs.reshape(len(target), -1).any(axis=1)))
        raise CombineError(
            f"{one} and {two} saw different targets for {split} sample {first.index[row]}: "
            "they did not read the same data"
        )
    if own.shape[1:] == theirs.shape[1:]:
        return
    if first.task == CLASSIFICATION and own.shape[:-1] == theirs.shape[:-1]:
        raise CombineError(
            f"{two} predicts {theirs.shape[-1]} classes on {split}, {one} {own.shape[-1]}: "
            "members of one ensemble must know the same classes"
        )
    raise CombineError(
        f"{two} predicts values of shape {list(theirs.shape[1:])} for each {split} sample, {one} of "
        f"{list(own.shape[1:])}: members of one ensemble must predict the same shape"
    )
