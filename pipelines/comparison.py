"""Compares the pipelines of two processes by their descriptions (`Pipeline.describe_for_peers`).

A description has `tokens`, which identify the pipeline object at each number of stages and which its pickled
copies share; `parts`, the digest of each part, None if it has no sure identity; `fields`; and `scheme`, the form
of the digests (1 if absent). Two pipelines agree as far as their tokens do, and from there on as far as the
digests do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipelines.fingerprint import SCHEME

#: Name, digest or None, and what is unsure or None.
Part = tuple[str, str | None, str | None]

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


def count_common_stages(tokens: Sequence[str], parts: Sequence[Part], theirs: Mapping[str, Any]) -> int:
    """Counts the leading stages that two pipelines have in common.

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
    agreed = max((stages for stages, (mine, other) in pairs if mine == other), default=-1)
    known = 0 if agreed < 0 else PARTS_BEFORE_STAGES + agreed
    for (_, mine, _), (_, other) in zip(parts[known:], theirs["parts"][known:], strict=False):
        if mine is None or mine != other:
            break
        known += 1
    return known - PARTS_BEFORE_STAGES if known >= PARTS_BEFORE_STAGES else -1


def find_difference(
    tokens: Sequence[str], parts: Sequence[Part], fields: list[Any], theirs: Mapping[str, Any]
) -> Difference | None:
    """Says why two pipelines are not the same; None if they are.

    Args:
        fields: of this pipeline, as `pipelines.prepare.fields.describe_fields` returns them; the others as in
            `count_common_stages`.
    """
    if theirs.get("scheme", 1) != SCHEME:
        return Difference(
            "the consumer runs another version of ray-ensemble than the feeder, which describes pipelines "
            "otherwise: install the same version on all nodes"
        )
    mine, other, agreed = len(tokens) - 1, len(theirs["tokens"]) - 1, count_common_stages(tokens, parts, theirs)
    if agreed == mine == other:
        if theirs["fields"] == fields:
            return None
        unsure = any(digest is None for _, digest, *_ in [*parts, *theirs["parts"]])
        reason = f"the fields differ: {theirs['fields']} at the consumer, {fields} at the feeder"
        return Difference(reason, unsure=unsure)
    known = 0 if agreed < 0 else PARTS_BEFORE_STAGES + agreed
    for (name, digest, _), (their_name, their_digest) in zip(parts[known:], theirs["parts"][known:], strict=False):
        if None not in (digest, their_digest) and digest != their_digest:
            return Difference(f"the pipelines differ: {their_name} at the consumer, another {name} at the feeder")
    why = next((f"{why} has no sure identity: give it an id=" for _, _, why in parts if why), theirs["why_unsure"])
    if why:
        return Difference(f"the pipelines cannot be compared: {why}", unsure=True)
    return Difference(f"the pipelines differ: {other} stages at the consumer, {mine} at the feeder")
