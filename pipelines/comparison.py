"""Compares the pipelines of two processes by their descriptions (`Pipeline.describe_for_peers`).

A description has `tokens`, which identify the pipeline object at each number of stages and which its pickled
copies share; `parts`, the digest of each part, None if it has no sure identity; `fields`, None if no sample was
prepared yet (the consumer then compares what the feeder sends); and `scheme`, the form of the digests (1 if
absent). Two pipelines agree as far as their tokens do, and from there on as far as the digests do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipelines import fingerprint
from pipelines.fingerprint import SCHEME, Unsure, describe, describe_ours
from pipelines.order import BlockOrder, Generators, epoch_indices

if TYPE_CHECKING:
    from pipelines.pipeline import Pipeline

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


def describe_parts(pipeline: Pipeline) -> list[Part]:
    """Returns (name, digest or None, what is unsure or None) of each part of a pipeline."""

    def part(name: str, what: Callable[[], Any]) -> Part:
        try:
            return name, fingerprint.digest(what()), None
        except Unsure as unsure:
            return name, None, str(unsure)

    return [
        part("source", lambda: _describe_source(pipeline)),
        part("seed", lambda: [describe_ours(Generators), pipeline.seed]),
        part("shuffle" if pipeline.sampling is None else "sampling", lambda: _describe_order(pipeline)),
        part("on_error", lambda: pipeline.on_error),
        *(part(f"stage {i} {stage.name}", stage.describe) for i, stage in enumerate(pipeline.stages)),
    ]


def _describe_source(pipeline: Pipeline) -> Any:
    source = pipeline.id if pipeline.id is not None else pipeline.source.identity()
    if source is None:
        raise Unsure(f"the source {pipeline.source!r}")
    return source


def _describe_order(pipeline: Pipeline) -> Any:
    if pipeline.sampling is not None:
        return pipeline.sampling.describe()
    if pipeline.shuffle != "blocks":
        return [describe_ours(epoch_indices), pipeline.shuffle]
    return [describe_ours(BlockOrder), pipeline.shuffle_window, describe(pipeline.source.groups)]


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


def find_obstacle(pipeline: Pipeline) -> Difference | None:
    """Says why no reader can apply further stages to a pipeline's samples from a ring; None if readers can."""
    why, stages = pipeline.forms, len(pipeline.stages)
    if isinstance(why, dict):
        return None
    return Difference(f"no consumer can continue from the {stages} stages at the feeder: {why}", unsure=True)


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
        if theirs["fields"] in (None, fields):
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
