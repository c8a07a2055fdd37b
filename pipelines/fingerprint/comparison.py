"""Compares the pipelines of two processes by their descriptions (`Pipeline.describe_for_peers`).

A description has `tokens`, which identify the pipeline object at each number of stages and are the same in pickled
copies; `parts`, name and digest of each part, and whether the digest is sure; `fields`, None if no sample was
prepared yet; and `scheme`, the form of the digests (1 if absent).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipelines.fingerprint import SCHEME

#: Parts before the stages: source, seed, order, error policy.
PARTS_BEFORE_STAGES = 4


@dataclass(frozen=True)
class Difference:
    """Why two pipelines are not taken for the same.

    Attributes:
        reason: a sentence for the user.
        unsure: they may be the same, but a part of one cannot be identified.
    """

    reason: str
    unsure: bool = False


@dataclass(frozen=True)
class Part:
    """One part of a pipeline, for comparisons.

    Attributes:
        name: such as "source" or "stage 2 resize('image')".
        digest: of all that could be described of it.
        gaps: what could not, in words; empty if an equal digest means an equal part.
    """

    name: str
    digest: str
    gaps: tuple[str, ...] = ()

    @property
    def is_sure(self) -> bool:
        """Whether an equal digest means an equal part."""
        return not self.gaps

    def as_json(self) -> list[Any]:
        """As peers receive it."""
        return [self.name, self.digest, self.is_sure]


def explain_unsure(parts: Sequence[Part]) -> str | None:
    """Say which part of a pipeline keeps it from having a fingerprint, and what to do; None where none does."""
    part = next((part for part in parts if not part.is_sure), None)
    if part is None:
        return None
    more = f" (and {len(part.gaps) - 1} more)" if len(part.gaps) > 1 else ""
    remedy = "id= to Pipeline()" if part.name == "source" else "id= or version= to map()"
    return f"{part.name} cannot be identified reliably: {part.gaps[0]}{more}; give {remedy}"


def count_common_stages(tokens: Sequence[str], parts: Sequence[Part], theirs: Mapping[str, Any]) -> int:
    """Count the leading stages that two pipelines have in common, by tokens and then by sure digests.

    Args:
        tokens: of this pipeline, one for each number of stages from 0.
        parts: of this pipeline.
        theirs: the description of the other pipeline.

    Returns:
        -1 if source, seed, order or error policy differ or are unsure.
    """
    if theirs.get("scheme", 1) != SCHEME:
        return -1
    pairs = enumerate(zip(tokens, theirs["tokens"], strict=False))
    common = max((PARTS_BEFORE_STAGES + stages for stages, (mine, other) in pairs if mine == other), default=0)
    for part, (_, digest, is_sure) in zip(parts[common:], theirs["parts"][common:], strict=False):
        if not (part.is_sure and is_sure) or part.digest != digest:
            break
        common += 1
    return max(common - PARTS_BEFORE_STAGES, -1)


def find_difference(
    tokens: Sequence[str], parts: Sequence[Part], fields: list[Any], theirs: Mapping[str, Any]
) -> Difference | None:
    """Say why two pipelines are not the same; None if they are. Where digests differ the parts do, sure or not.

    Args:
        fields: of this pipeline, as `pipelines.samples.fields.describe_fields` returns them; the others as in
            `count_common_stages`.
    """
    if theirs.get("scheme", 1) != SCHEME:
        return Difference(
            "the consumer and the feeder run versions of ray-ensemble that describe pipelines differently: "
            "install the same version on all nodes"
        )
    stages, others, common = len(tokens) - 1, len(theirs["tokens"]) - 1, count_common_stages(tokens, parts, theirs)
    if common == stages == others:
        if theirs["fields"] in (None, fields):
            return None
        is_sure = all([*(part.is_sure for part in parts), *(is_sure for *_, is_sure in theirs["parts"])])
        reason = f"the fields differ: {theirs['fields']} at the consumer, {fields} at the feeder"
        return Difference(reason, unsure=not is_sure)
    start = 0 if common < 0 else PARTS_BEFORE_STAGES + common
    for part, (name, digest, _) in zip(parts[start:], theirs["parts"][start:], strict=False):
        if part.digest != digest:
            return Difference(f"the pipelines differ: {name} at the consumer, another {part.name} at the feeder")
    if why := explain_unsure(parts) or theirs["why_unsure"]:
        return Difference(f"the pipelines cannot be compared: {why}", unsure=True)
    return Difference(f"the pipelines differ: {others} stages at the consumer, {stages} at the feeder")
