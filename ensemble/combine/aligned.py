"""Aligns the members' saved predictions of one split, so that each row is the same sample for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ensemble.combine.metrics import Array, CombineError, explain_invalid_probabilities

if TYPE_CHECKING:
    from ensemble.store import Predictions, RunDir

UNSAVED = "saved no"


@dataclass(frozen=True)
class Aligned:
    """Predictions of several members for the same samples in the same order.

    Attributes:
        members: their ids.
        probabilities: one array [n, C] each, float32 as saved; rows sum to 1.
        index: int64 [n], ascending: the samples.
        target: int64 [n], None where the split has none.
        left_out: members whose predictions cannot be used -> why.
    """

    members: list[str]
    probabilities: list[Array]
    index: Array
    target: Array | None
    left_out: dict[str, str]

    @property
    def unsaved(self) -> bool:
        """Whether all members that are left out saved no predictions at all."""
        return all(why.startswith(UNSAVED) for why in self.left_out.values())

    def select(self, members: Sequence[str]) -> Aligned:
        """Returns the predictions of these members only, in this order."""
        at = {member: i for i, member in enumerate(self.members)}
        chosen = [self.probabilities[at[member]] for member in members]
        return Aligned(list(members), chosen, self.index, self.target, self.left_out)


def read_aligned(run_dir: RunDir, members: Sequence[str], split: str) -> Aligned:
    """Read and align what `members` saved for `split` ("valid" or "test"); who saved nothing is left out."""
    from ensemble.store import load_predictions

    saved: dict[str, Predictions] = {}
    left_out: dict[str, str] = {}
    for member in members:
        path = run_dir.predictions(member, split)
        if path.exists():
            saved[member] = load_predictions(path)
        else:
            left_out[member] = f"{UNSAVED} {split} predictions"
    return align(split, saved, left_out)


def align(split: str, saved: Mapping[str, Predictions], left_out: Mapping[str, str] | None = None) -> Aligned:
    """Sorts each member's rows by `index` and checks that all have the same samples and targets.

    A member whose outputs are not class probabilities is left out and named in `left_out`.

    Raises:
        CombineError: when two members predicted different samples, saw different targets for one, or know
            different numbers of classes: then they did not read the same data and no figure would mean anything.
    """
    left_out = dict(left_out or {})
    members: list[str] = []
    probabilities: list[Array] = []
    index = target = None
    for member, one in saved.items():
        problem = explain_invalid_probabilities(np.asarray(one.probabilities))
        if problem:
            left_out[member] = f"{split} {problem}"
            continue
        order = np.argsort(one.index, kind="stable")
        own_index = np.asarray(one.index)[order]
        own_target = None if one.target is None else np.asarray(one.target)[order]
        _check_duplicates(split, member, own_index)
        if index is None:
            index, target = own_index, own_target
        else:
            _check_same_samples(split, members[0], index, member, own_index)
            _check_same_targets(split, members[0], target, member, own_target, index)
        rows = _normalise(np.asarray(one.probabilities)[order])
        if probabilities and rows.shape[1] != probabilities[0].shape[1]:
            raise CombineError(
                f"{member} predicts {rows.shape[1]} classes on {split}, {members[0]} {probabilities[0].shape[1]}: "
                "members of one ensemble must know the same classes"
            )
        members.append(member)
        probabilities.append(rows)
    if index is None:
        index = np.empty(0, dtype=np.int64)
    return Aligned(members, probabilities, index, target, left_out)


def _check_duplicates(split: str, member: str, index: Array) -> None:
    twice = index[1:][index[1:] == index[:-1]]
    if len(twice):
        raise CombineError(
            f"{member} has two {split} predictions for sample {twice[0]}; one per index is expected"
        )


def _check_same_samples(split: str, first: str, index: Array, member: str, other: Array) -> None:
    if np.array_equal(index, other):
        return
    different = np.setxor1d(index, other)[0]
    has, lacks = (first, member) if different in index else (member, first)
    raise CombineError(
        f"{first} and {member} predicted different {split} samples ({len(index)} and {len(other)}): "
        f"{has} has index {different}, {lacks} does not; all members must predict the whole split"
    )


def _check_same_targets(
    split: str, first: str, target: Array | None, member: str, other: Array | None, index: Array
) -> None:
    if (target is None) != (other is None):
        has, lacks = (member, first) if target is None else (first, member)
        raise CombineError(f"{has} saved targets with its {split} predictions, {lacks} did not")
    if target is not None and other is not None and not np.array_equal(target, other):
        row = int(np.argmax(target != other)) if target.shape == other.shape else 0
        raise CombineError(
            f"{first} and {member} saw different targets for {split} sample {index[row]}: "
            "they did not read the same data"
        )


def _normalise(rows: Array) -> Array:
    """Rows that sum to 1; those rounded to a half precision are off by up to a hundredth."""
    sums = rows.sum(axis=1, keepdims=True, dtype=np.float64)
    if np.abs(sums - 1).max() < 1e-4 and rows.min() >= 0:
        return rows
    rows = np.maximum(rows, 0)
    scaled: Array = (rows / rows.sum(axis=1, keepdims=True, dtype=np.float64)).astype(np.float32)
    return scaled
