"""Identifies the data of a run, so that a resume can verify that it reads the same data.

The log records the identity of all splits, and each checkpoint that of the training data; a resume compares it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ensemble.spec import PREDICTED_SPLITS, Ensemble
from ensemble.spec.splits import LABELLED, describe_numbering
from ensemble.user_code.fingerprint import PYTHON
from pipelines.fingerprint import SCHEME, digest

if TYPE_CHECKING:
    from pipelines import Pipeline


def training_data(ensemble: Ensemble, params: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """All that determines the batches beside the members' identities: `data` of `ensemble.events.RunStarted`.

    `fingerprint` is None where it cannot be determined. Arrays without an `id=` are read once for it.

    Args:
        params: of a single member; None for the run.
    """
    common = {"scheme": SCHEME, "python": PYTHON, "samples": ensemble.samples, "drop_last": ensemble.drop_last}
    splits = {split: getattr(ensemble, split) for split in ("train", *LABELLED)}
    common |= {"numbering": describe_numbering(splits, ensemble.target, ensemble.classes)}
    if params is None:
        others = ((split, getattr(ensemble, split)) for split in PREDICTED_SPLITS)
        common |= {"splits": {split: _identify(pipeline) for split, pipeline in others if pipeline is not None}}
    if ensemble.train is None:
        return {"fingerprint": "no data", **common}
    if not callable(ensemble.train) or params is not None:
        return {"fingerprint": ensemble.pipeline(params or {}).fingerprint, **common}
    numbers = range(len(ensemble.members or ()))
    members = [ensemble.identify(number) for number in numbers]
    return {"fingerprints": {one.member: ensemble.pipeline(one.params).fingerprint for one in members}, **common}


def renew_data(ensemble: Ensemble) -> Ensemble:
    """The declaration with its sources made anew where their files have changed; itself where none has."""
    splits = ((split, getattr(ensemble, split)) for split in ("train", *PREDICTED_SPLITS))
    sources = dict[int, Any]()
    pairs = ((split, pipe, pipe.renew(sources)) for split, pipe in splits if hasattr(pipe, "renew"))
    renewed = {split: new for split, pipe, new in pairs if new is not pipe}
    return dataclasses.replace(ensemble, **renewed) if renewed else ensemble


def _identify(pipeline: Pipeline) -> list[Any]:
    """Number of samples, and a fingerprint of what determines them: None where it is unsure."""
    parts = pipeline.parts()
    kept = None if parts is None else [part for part in parts if part[0] not in ("seed", "shuffle", "on_error")]
    return [len(pipeline), None if kept is None else digest([SCHEME, kept])]


def describe_changed_splits(before: Mapping[str, Any], present: Mapping[str, Any]) -> dict[str, str]:
    """The splits on which members are evaluated that are others than before, and what is known of how."""
    earlier_splits, splits = before.get("splits"), present.get("splits") or {}
    if earlier_splits is None:
        return {}
    unsure, changed = list_unsure_splits(before, present), dict[str, str]()
    numbering = [data.get("numbering") or {} for data in (before, present)]
    for split, (count, fingerprint) in splits.items():
        samples, earlier = earlier_splits.get(split, (None, None))
        if samples is None:
            changed[split] = f"{split} is new"
        elif samples != count:
            changed[split] = f"{split} had {samples:,} samples, has {count:,}"
        elif (earlier != fingerprint and split not in unsure) or len({data.get(split) for data in numbering}) > 1:
            changed[split] = f"{split} has changed (its source, classes or stages)"
    return changed


def list_unsure_splits(before: Mapping[str, Any], present: Mapping[str, Any]) -> list[str]:
    """The splits beside `train` of which only the lengths can be compared."""
    splits = [data.get("splits") or {} for data in (before, present)]
    comparable = _is_comparable(before, present) and not _is_of_another_python(before, present)
    common = [name for name in splits[0] if name in splits[1]]
    return [name for name in common if not comparable or None in (splits[0][name][1], splits[1][name][1])]


def why_unsure(before: Mapping[str, Any], present: Mapping[str, Any]) -> str | None:
    """The reason, for the user, why only the lengths can be compared; None where fingerprints can.

    A trial's pipeline is compared with that in its checkpoint.
    """
    if not _is_comparable(before, present):
        return "they were recorded by another version of ray-ensemble, which describes data differently"
    pairs = _pair_fingerprints(before, present).values()
    if any(None in pair for pair in pairs):
        return "the fingerprint could not be determined when the run began"
    if _is_of_another_python(before, present) and any(one != other for one, other in pairs):
        versions = before["python"], present["python"]
        return "Python {} compiled the functions of its stages then, Python {} does now".format(*versions)
    return None


def is_identified(data: Mapping[str, Any]) -> bool:
    """Whether a `training_data` says anything of the data: a log without a start, or of a search whose trials each
    have data of their own and of which none was recorded, does not.
    """
    return bool(data) and data.get("fingerprints") != {}


def _is_comparable(before: Mapping[str, Any], present: Mapping[str, Any]) -> bool:
    return bool(before["scheme"] == present["scheme"])


def _is_of_another_python(before: Mapping[str, Any], present: Mapping[str, Any]) -> bool:
    return bool(before["python"] != present["python"])


def _pair_fingerprints(
    before: Mapping[str, Any], present: Mapping[str, Any]
) -> dict[str, tuple[str | None, str | None]]:
    """Fingerprints then and present, by member, for members in both; by \"\" where all have the same pipeline."""
    by_member = [data.get("fingerprints") for data in (before, present)]
    if by_member == [None, None]:
        return {"": (before.get("fingerprint"), present.get("fingerprint"))}
    names = [name for name in by_member[0] or by_member[1] or () if by_member[1] is None or name in by_member[1]]
    pairs = zip((before, present), by_member, strict=True)
    columns = [[data.get("fingerprint") if own is None else own[name] for name in names] for data, own in pairs]
    return {name: (first, second) for name, first, second in zip(names, *columns, strict=True)}


def describe_difference(before: Mapping[str, Any], present: Mapping[str, Any]) -> str | None:
    """The first difference of the training data, for the user; None where there is none.

    Fingerprints of another scheme or Python are not compared: `why_unsure` says so.
    """
    for name, meaning in (("samples", "samples of train"), ("drop_last", "drop_last")):
        if name in before and before[name] != present[name]:
            return f"{meaning} was {before[name]}, is {present[name]}"
    if (before.get("numbering") or {}).get("train") != (present.get("numbering") or {}).get("train"):
        return "the classes of train are numbered differently from before"
    comparable = _is_comparable(before, present) and not _is_of_another_python(before, present)
    pairs = _pair_fingerprints(before, present) if comparable else {}
    for name, (first, second) in pairs.items():
        if None not in (first, second) and first != second:
            of = f" of {name}" if name else ""
            return (
                f"the training pipeline{of} has changed (its source, seed, shuffle, sampling or stages): its "
                f"fingerprint was {first}, is {second}"
            )
    return None
