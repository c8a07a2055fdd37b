"""Whether two processes' pipelines are the same, or begin alike: found by what they say of themselves.

A pipeline says of itself (`Pipeline.describe_for_peers`): `tokens`, a name for the very object that it was at each
number of stages, which its pickled copies keep; `scheme`, the form of what follows (1 where it is not said);
`parts`, the digest of each part, None where nobody can say surely what it is; its `fields`. Two pipelines agree
as far as they were one object, and from there on as far as the digests do.
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
    """Why two processes' pipelines are not taken for the same; `unsure`: nobody can say whether they are."""

    reason: str
    unsure: bool = False


def count_common_stages(tokens: Sequence[str], parts: Sequence[Part], theirs: Mapping[str, Any]) -> int:
    """How many leading stages are the same; -1 where not even what comes before them is, or nobody can say so."""
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
    """Why their pipeline cannot be taken for the one of these tokens, parts and fields; None where it is that."""
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
        said = f"the fields differ: {theirs['fields']} at the consumer, {fields} at the feeder"
        return Difference(said, unsure=unsure)
    known = 0 if agreed < 0 else PARTS_BEFORE_STAGES + agreed
    for (name, digest, _), (their_name, their_digest) in zip(parts[known:], theirs["parts"][known:], strict=False):
        if None not in (digest, their_digest) and digest != their_digest:
            return Difference(f"the pipelines differ: {their_name} at the consumer, another {name} at the feeder")
    why = next((f"{why} has no sure identity: give it an id=" for _, _, why in parts if why), theirs["why_unsure"])
    if why:
        return Difference(f"nobody can say that the pipelines are the same: {why}", unsure=True)
    return Difference(f"the pipelines differ: {other} stages at the consumer, {mine} at the feeder")
