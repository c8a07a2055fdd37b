"""Compares the pipelines of two processes by their descriptions (`Pipeline.describe_for_peers`).

A description has `tokens`, which identify the pipeline object at each number of stages and which its pickled
copies share; `parts`, name and digest of each part, and whether the digest is sure; `fields`, None if no sample
was prepared yet (the consumer then compares what the feeder sends); and `scheme`, the form of the digests (1 if
absent). Two pipelines agree as far as their tokens do, and from there on as far as sure digests do. Where digests
differ the parts do, sure or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipelines.fingerprint import SCHEME, Description, describe, describe_ours
from pipelines.library_settings import find_settings
from pipelines.order import BlockOrder, Generators, epoch_indices

if TYPE_CHECKING:
    from pipelines.pipeline import Pipeline
    from pipelines.stage import Stage

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


def describe_parts(pipeline: Pipeline) -> list[Part]:
    """Returns the parts of a pipeline: source, seed, order, error policy, stages."""

    def part(name: str, what: Any) -> Part:
        described = what if isinstance(what, Description) else Description(what)
        return Part(name, described.digest, described.gaps)

    def stage_part(number: int, stage: Stage) -> Part:
        what, name = stage.description, f"stage {number} {stage.name}"
        return part(name, Description([what.value, settings], what.gaps) if settings else what)

    settings = find_settings(only_of_samples=True)
    source = pipeline.source.describe_for_fingerprint() if pipeline.id is None else None
    return [
        part("source", pipeline.id if source is None else source),
        part("seed", [describe_ours(Generators), pipeline.seed]),
        part("shuffle" if pipeline.sampling is None else "sampling", _describe_order(pipeline)),
        part("on_error", pipeline.on_error),
        *(stage_part(number, stage) for number, stage in enumerate(pipeline.stages)),
    ]


def explain_unsure(parts: Sequence[Part]) -> str | None:
    """Says which part of a pipeline keeps it from having a fingerprint, and what to do; None where none does."""
    part = next((part for part in parts if not part.is_sure), None)
    if part is None:
        return None
    more = f" (and {len(part.gaps) - 1} more)" if len(part.gaps) > 1 else ""
    remedy = "id= to Pipeline()" if part.name == "source" else "id= or version= to map()"
    return f"{part.name} has no sure identity: {part.gaps[0]}{more}; give {remedy}"


def _describe_order(pipeline: Pipeline) -> Any:
    if pipeline.sampling is not None:
        return pipeline.sampling.describe()
    if pipeline.shuffle != "blocks":
        return [describe_ours(epoch_indices), pipeline.shuffle]
    return [describe_ours(BlockOrder), pipeline.shuffle_window, describe(pipeline.source.groups).value]


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
    for part, (_, other, is_sure) in zip(parts[known:], theirs["parts"][known:], strict=False):
        if not (part.is_sure and is_sure) or part.digest != other:
            break
        known += 1
    return known - PARTS_BEFORE_STAGES if known >= PARTS_BEFORE_STAGES else -1


def find_obstacle(pipeline: Pipeline) -> Difference | None:
    """Says why no reader can apply further stages to a pipeline's samples from a ring; None if readers can."""
    why, stages = pipeline.layouts, len(pipeline.stages)
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
        unsure = not all([*(part.is_sure for part in parts), *(is_sure for *_, is_sure in theirs["parts"])])
        reason = f"the fields differ: {theirs['fields']} at the consumer, {fields} at the feeder"
        return Difference(reason, unsure=unsure)
    known = 0 if agreed < 0 else PARTS_BEFORE_STAGES + agreed
    for part, (name, other_digest, _) in zip(parts[known:], theirs["parts"][known:], strict=False):
        if part.digest != other_digest:
            return Difference(f"the pipelines differ: {name} at the consumer, another {part.name} at the feeder")
    if why := explain_unsure(parts) or theirs["why_unsure"]:
        return Difference(f"the pipelines cannot be compared: {why}", unsure=True)
    return Difference(f"the pipelines differ: {other} stages at the consumer, {mine} at the feeder")
