"""Identifies the data of a run, so that a resume can verify that it reads the same data.

The log records the identity of all splits, and each checkpoint that of the training data; a resume compares it.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ensemble.spec import PREDICTED_SPLITS, Ensemble
from ensemble.spec.splits import LABELLED, describe_numbering
from ensemble.user_code.fingerprint import PYTHON
from pipelines.fingerprint import SCHEME, digest
from pipelines.sources._sides import Moves, Sketch, find_moves, mix

if TYPE_CHECKING:
    from pipelines import Pipeline

MOST_STAMPS = 4096
"""Of each split, numbers by which changed records are found: of more records, one for several in a row."""
MOST_NAMED = 3


def training_data(ensemble: Ensemble, params: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """All that determines the batches beside the members' identities, as JSON values.

    `scheme` is the form of fingerprints (`pipelines.fingerprint`).
    `python` is the version that compiled the user's functions in them.
    `fingerprint` is the training pipeline's (source, seed, order, stages), None where it cannot be determined;
    `samples` its length. `numbering` says how the classes of a split are mapped whose source numbers them
    otherwise than the training data do (`ensemble.spec.splits`). Arrays without an `id=` are read once for it.
    `splits` has, of each other split of a run, the number of its samples and a fingerprint of its source and its
    stages.
    `sides` has a sample of the records of splits that are parts of the same data (`describe_moves`).
    `records` has, of splits of which each record can change alone, `MOST_STAMPS` numbers that do (uint32, base64).
    Where each member has a pipeline of its own (`train=` is a function), `fingerprints` has that of each declared
    member instead, and `sides` is empty.

    Args:
        params: of a single member; None for the run.
    """
    common = {"scheme": SCHEME, "python": PYTHON, "samples": ensemble.samples, "drop_last": ensemble.drop_last}
    splits = {split: getattr(ensemble, split) for split in ("train", *LABELLED)}
    common |= {"numbering": describe_numbering(splits, ensemble.target, ensemble.classes)}
    if params is None:
        others = ((split, getattr(ensemble, split)) for split in PREDICTED_SPLITS)
        common |= {"splits": {split: _identify(pipeline) for split, pipeline in others if pipeline is not None}}
        common |= {"sides": ensemble.sides}
        stamped = ((name, _stamp(pipe)) for name, pipe in splits.items() if hasattr(pipe, "source"))
        common |= {"records": {name: stamps for name, stamps in stamped if stamps is not None}}
    if not callable(ensemble.train) or params is not None:
        return {"fingerprint": ensemble.pipeline(params or {}).fingerprint, **common}
    numbers = range(len(ensemble.members or ()))
    members = [ensemble.identify(number) for number in numbers]
    return {"fingerprints": {one.member: ensemble.pipeline(one.params).fingerprint for one in members}, **common}


def renew_data(ensemble: Ensemble) -> Ensemble:
    """The declaration with its sources made anew where their files have changed; itself where none has."""
    splits, known = ((split, getattr(ensemble, split)) for split in ("train", *PREDICTED_SPLITS)), dict[int, Any]()
    pairs = ((split, pipe, pipe.renew(known)) for split, pipe in splits if hasattr(pipe, "renew"))
    renewed = {split: new for split, pipe, new in pairs if new is not pipe}
    return dataclasses.replace(ensemble, **renewed) if renewed else ensemble


def _identify(pipeline: Pipeline) -> list[Any]:
    """Number of samples, and a fingerprint of what determines them: None where it is unsure."""
    parts = pipeline.parts()
    kept = None if parts is None else [part for part in parts if part[0] not in ("seed", "shuffle", "on_error")]
    return [len(pipeline), None if kept is None else digest([SCHEME, kept])]


def _stamp(pipeline: Pipeline) -> str | None:
    stamps = pipeline.source.stamp_records() if hasattr(pipeline.source, "stamp_records") else None
    if stamps is None:
        return None
    n = len(stamps)
    mixed = mix(stamps + np.arange(n, dtype=np.uint64))
    blocks = np.bitwise_xor.reduceat(mixed, range(0, n, -(-n // MOST_STAMPS)))
    return base64.b64encode(blocks.astype("<u4").tobytes()).decode("ascii")


def describe_changed_records(
    before: Mapping[str, Any], now: Mapping[str, Any], ensemble: Ensemble, split: str
) -> str:
    """How many records of a split are others than before, and which, as the end of a message; "" if not known."""
    known = [(data.get("records") or {}).get(split, "") for data in (before, now)]
    then, here = (np.frombuffer(base64.b64decode(text), "<u4") for text in known)
    source = getattr(getattr(ensemble, split), "source", None)  # the training data may be a function's
    if len(then) != len(here) or source is None:
        return ""
    changed = np.flatnonzero(then != here).tolist()
    step = -(-len(source) // MOST_STAMPS)
    if not changed:
        return ""
    named = ", ".join(source.where(place * step) for place in changed[:MOST_NAMED])
    more = ", ..." if len(changed) > MOST_NAMED else ""
    what, near = f"{len(changed):,} of its {len(source):,} records", ""
    if step > 1:
        what, near = f"records in {len(changed):,} places", "near "
    return f": {what} changed ({near}{named}{more})"


def describe_changed_splits(
    before: Mapping[str, Any], now: Mapping[str, Any], ensemble: Ensemble
) -> dict[str, str]:
    """The splits on which members are evaluated that are others than before, and what is known of how."""
    then, here = before.get("splits"), now.get("splits") or {}
    if then is None:
        return {}
    unsure, found = list_unsure_splits(before, now), {}
    numbering = [data.get("numbering") or {} for data in (before, now)]
    for split, (count, fingerprint) in here.items():
        samples, earlier = then.get(split, (None, None))
        if samples is None:
            found[split] = f"{split} is new"
        elif samples != count:
            found[split] = f"{split} had {samples:,} samples, has {count:,}"
        elif (earlier != fingerprint and split not in unsure) or len({each.get(split) for each in numbering}) > 1:
            records = describe_changed_records(before, now, ensemble, split)
            found[split] = f"{split} has changed{records or ' (its source, classes or stages)'}"
    return found


def check_split(before: Mapping[str, Any], ensemble: Ensemble, split: str) -> tuple[str | None, bool]:
    """Compares a split of a declaration with that which a run read.

    Args:
        before: the `training_data` of the run.
        ensemble: of which nothing but the split is looked at.

    Returns:
        Why it is another one, None where nothing says so; and whether fingerprints prove that it is the same.
    """
    pipeline, then = getattr(ensemble, split), (before.get("splits") or {}).get(split)
    if pipeline is None:
        return f"the declaration in the run directory has no {split}= any more", False
    if then is None:
        return None, False
    count, fingerprint = _identify(pipeline)
    now = {"scheme": SCHEME, "python": PYTHON, "splits": {split: [count, fingerprint]}}
    if count != then[0]:
        return f"samples of {split} was {then[0]}, is {count}", False
    if list_unsure_splits(before, now):
        return None, False
    if fingerprint != then[1]:
        return f"the pipeline of {split} is another one: its fingerprint was {then[1]}, is {fingerprint}", False
    return None, True


def list_unsure_splits(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The splits beside `train` of which only the lengths can be compared."""
    then, here = before.get("splits") or {}, now.get("splits") or {}
    comparable = _is_comparable(before, now) and not _is_of_another_python(before, now)
    return [name for name in then if name in here and (not comparable or None in (then[name][1], here[name][1]))]


def why_unsure(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """The reason, for the user, why only the lengths can be compared; None where fingerprints can.

    A trial's pipeline is compared with that in its checkpoint.
    """
    if not _is_comparable(before, now):
        return "they were recorded by another version of ray-ensemble, which describes data otherwise"
    pairs = _pair_fingerprints(before, now).values()
    if any(None in pair for pair in pairs):
        return "the fingerprint could not be determined when the run began"
    if _is_of_another_python(before, now) and any(one != other for one, other in pairs):
        return (
            f"Python {before['python']} compiled the functions of its stages then, Python {now['python']} does now"
        )
    return None


def is_identified(data: Mapping[str, Any]) -> bool:
    """Whether a `training_data` says anything of the data: a log without a start, or of a search whose trials each
    have data of their own and of which none was recorded, does not.
    """
    return bool(data) and data.get("fingerprints") != {}


def _is_comparable(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    return bool(before["scheme"] == now["scheme"])


def _is_of_another_python(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    return bool(before["python"] != now["python"])


def _pair_fingerprints(
    before: Mapping[str, Any], now: Mapping[str, Any]
) -> dict[str, tuple[str | None, str | None]]:
    """Fingerprints then and now, by member, for members in both; by \"\" where all have the same pipeline."""
    then, here = before.get("fingerprints"), now.get("fingerprints")
    if then is None and here is None:
        return {"": (before.get("fingerprint"), now.get("fingerprint"))}
    names = [name for name in then or here or () if here is None or name in here]
    return {
        name: (
            before.get("fingerprint") if then is None else then[name],
            now.get("fingerprint") if here is None else here[name],
        )
        for name in names
    }


def describe_difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """The first difference of the training data, for the user; None where there is none.

    Fingerprints of another scheme or Python are not compared: `why_unsure` says so.
    """
    for name, meaning in (("samples", "samples of train"), ("drop_last", "drop_last")):
        if name in before and before[name] != now[name]:
            return f"{meaning} was {before[name]}, is {now[name]}"
    if (before.get("numbering") or {}).get("train") != (now.get("numbering") or {}).get("train"):
        return "the classes of train have other numbers than before"
    comparable = _is_comparable(before, now) and not _is_of_another_python(before, now)
    pairs = _pair_fingerprints(before, now) if comparable else {}
    for name, (first, second) in pairs.items():
        if None not in (first, second) and first != second:
            of = f" of {name}" if name else ""
            return (
                f"the training pipeline{of} is another one (its source, seed, shuffle, sampling or stages): "
                f"its fingerprint was {first}, is {second}"
            )
    return None


def describe_moves(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """How many records are in another split than before, for the user; empty where that cannot be told."""
    moves = _find_moves(before, now)
    if moves is not None:
        moved = sum(count for (old, new), count in moves.counts.items() if old != new)
        said = moves.describe(moved, sum(moves.counts.values()))
        return f"{said} of the records that both have are in another split"
    if before.get("sides") and now.get("sides"):
        return "how many records are in another split is not known, as nothing names them: split(key=) does"
    return ""


def describe_trained(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """How many records of the other splits now were in `train` before, a text for each split that has some."""
    moves = _find_moves(before, now)
    if moves is None:
        return []
    found = {new: count for (old, new), count in moves.counts.items() if old == "train" != new and count}
    known = f", by their {moves.by}," if moves.by.startswith("key") else ""
    return [
        f"{moves.describe(count, moves.sizes[split])} of the samples of {split}{known}"
        for split, count in found.items()
    ]


def _find_moves(before: Mapping[str, Any], now: Mapping[str, Any]) -> Moves | None:
    then, here = (
        {split: Sketch.from_json(each) for split, each in (data.get("sides") or {}).items()}
        for data in (before, now)
    )
    return find_moves(then, here)
