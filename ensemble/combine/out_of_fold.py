"""Out-of-fold predictions: of each training sample by the members of a configuration that have not learnt from it.

With `Ensemble(out_of_fold=True)`, or where a train function saves no others, a member's predictions on "valid" are
of the samples of its own fold. Those of all members of a configuration together are of all samples, and stand for
each of these members: what is selected and calibrated on them are configurations. With several partitions, the
predictions of a sample are averaged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ensemble.combine.methods import average_weights
from ensemble.combine.metrics import Array, CombineError
from ensemble.combine.prediction_matrix import UNSAVED, PredictionMatrix, align, widen_alike
from ensemble.combine.tasks import find_math
from ensemble.spec.out_of_fold import find_configuration, find_partition, is_out_of_fold

if TYPE_CHECKING:
    from ensemble.store import Predictions, RunDir, RunState


def read_out_of_fold(run_dir: RunDir, state: RunState, members: Sequence[str]) -> PredictionMatrix:
    """The matrix of "valid" whose row of a member has the out-of-fold predictions of its configuration.

    They are read of all members of the configuration, also of those that are not named. Where no partition has
    predictions of all folds, the members of a configuration are left out.

    Raises:
        DamagedError: predictions are not what the log says that was saved.
        CombineError: see `align`; or two members saw different targets for a sample.
    """
    from ensemble.store import has_predictions, read_predictions

    configurations: dict[str, list[str]] = {}
    for member_state in state.members.values():
        configurations.setdefault(find_configuration(member_state.identity), []).append(member_state.id)
    merged: dict[str, Predictions] = {}
    left_out: dict[str, str] = {}
    first: dict[str, str] = {}  # member -> the first one that is named of its configuration
    for ids in configurations.values():
        named = [member for member in members if member in ids]
        if not named:
            continue
        saved = [member for member in ids if has_predictions(run_dir, state.members[member], "valid")]
        missing = _find_missing_fold({member: state.members[member].identity["weights"] for member in ids}, saved)
        if missing is not None:
            left_out |= dict.fromkeys(named, f"{UNSAVED} valid predictions of fold {missing} of its configuration")
            continue
        each_saved = [read_predictions(run_dir, state.members[member], "valid", mapped=True) for member in saved]
        merged[named[0]] = merge_folds(saved, each_saved)
        first |= dict.fromkeys(named, named[0])
    matrix = align("valid", merged, left_out)
    problems = {
        member: matrix.left_out[one] for member, one in first.items() if one in matrix.left_out and member != one
    }
    chosen = [member for member in members if first.get(member) in matrix.members]
    groups = tuple(matrix.members.index(first[member]) for member in chosen)
    values = [matrix.values[group] for group in groups]
    return replace(matrix, members=chosen, values=values, left_out={**matrix.left_out, **problems}, groups=groups)


def are_of_folds(run_dir: RunDir, state: RunState, members: Sequence[str]) -> bool:
    """Whether members predict "valid" by folds: declared so, or members of different folds share no sample."""
    from ensemble.store import has_predictions, read_predictions

    weights = {member: state.members[member].identity.get("weights") or {} for member in members}
    if any(map(is_out_of_fold, weights.values())):
        return True
    if not members or any(record.get("kind") != "fold" for record in weights.values()):
        return False
    of_sample: dict[str, dict[int, object]] = {}  # partition -> sample -> fold
    for one in state.members.values():
        record = one.identity.get("weights") or {}
        if record.get("kind") != "fold" or not has_predictions(run_dir, one, "valid"):
            continue
        of, fold = of_sample.setdefault(find_partition(record), {}), record["held_out"]
        for index in np.asarray(read_predictions(run_dir, one, "valid", mapped=True).index).tolist():
            if of.setdefault(index, fold) != fold:
                return False
    return any(len(set(of.values())) > 1 for of in of_sample.values())


def _find_missing_fold(weights: Mapping[str, Mapping[str, object]], saved: Sequence[str]) -> int | None:
    """The first fold of the first partition that has no predictions; None where some partition has all folds."""
    partitions: dict[str, set[object]] = {}
    for member, record in weights.items():
        folds = partitions.setdefault(find_partition(record), set())
        if member in saved:
            folds.add(record["held_out"])
    k = {find_partition(record): int(str(record["k"])) for record in weights.values()}
    missing = {key: sorted(set(range(k[key])) - folds) for key, folds in partitions.items()}
    return None if not all(missing.values()) else next(iter(missing.values()))[0]


def merge_folds(members: Sequence[str], saved: Sequence[Predictions]) -> Predictions:
    """The predictions of several members as those of one: of a sample that several predict, their mean.

    Raises:
        CombineError: they predict values of other shapes or tasks, or saw different targets for a sample.
    """
    saved = widen_alike(saved)
    one = saved[0]
    for member, other in zip(members, saved, strict=True):
        is_alike = other.task == one.task and other.values.shape[1:] == one.values.shape[1:]
        if not is_alike or (other.target is None) != (one.target is None):
            what = "one saved targets, one did not" if is_alike else "predict values of different kinds"
            raise CombineError(f"{members[0]} and {member}, of one configuration, {what}")
    index = np.concatenate([own.index for own in saved])
    order = np.argsort(index, kind="stable")
    values = np.concatenate([own.values for own in saved])[order]
    samples, at, counts = np.unique(index[order], return_index=True, return_counts=True)
    target: Array | None = None
    if one.target is not None:
        all_targets = np.concatenate([np.asarray(own.target) for own in saved])[order]
        target = all_targets[at]
        if not np.array_equal(all_targets, np.repeat(target, counts, axis=0), equal_nan=target.dtype.kind == "f"):
            raise CombineError(
                f"the members {', '.join(members)} saw different targets for one sample: they did not read the "
                "same data"
            )
    mean = values[at]
    for many in np.unique(counts[counts > 1]).tolist():
        rows = at[counts == many]
        parts = [values[rows + own] for own in range(many)]
        mean[counts == many] = find_math(one.task).mix(parts, average_weights(many))
    fields = {
        name: np.concatenate([own.fields[name] for own in saved])[order][at]
        for name in one.fields
        if all(name in own.fields for own in saved)
    }
    return replace(one, values=mean, index=samples, target=target, fields=fields)
