"""On which nodes a member may train: labels of nodes, the type and memory of GPUs.

A *selection* is a dict of labels and, for each, a selector as Ray has them: `value`, `!value`, `in(a,b)` or
`!in(a,b)`. A node without the label fits `!value` and `!in(...)` alone. Short words stand for the usual ones:
`gpu_type` for a selector of the label `ray.io/accelerator-type`, `spot` (True or False) for `spot` or `!spot` of
`ray.io/market-type`. `gpu_memory_gb` is no label: the least memory of a GPU, as vendors count it.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Mapping
from typing import Any

from ensemble.spec.validation import SpecError, check_number

GPU_MEMORY = "gpu_memory_gb"
GPU_TYPE = "ray.io/accelerator-type"
MARKET_TYPE = "ray.io/market-type"
NODE_GROUP = "ray.io/node-group"
NODE_ID = "ray.io/node-id"

#: The least and the most memory in GB with which GPUs are sold, by what Ray calls their type.
SIZES_GB = {
    "P4": (8, 8), "K80": (12, 12), "P100": (12, 16), "T4": (16, 16), "V100": (16, 32), "L4": (24, 24),
    "A10G": (24, 24), "A100": (40, 80), "L40S": (48, 48), "RTX-PRO-6000": (96, 96), "H20": (96, 141),
    "H100": (80, 94), "H200": (141, 141), "B200": (180, 192), "GB200": (184, 192), "B300": (270, 288),
    "GB300": (270, 288),
}  # fmt: skip

#: The items of a selection, sorted: labels with selectors, and `GPU_MEMORY` with a number.
Selection = tuple[tuple[str, Any], ...]

_SHORT = {"gpu_type": GPU_TYPE, "spot": MARKET_TYPE, GPU_MEMORY: GPU_MEMORY}
_OF_RAY = [GPU_TYPE, MARKET_TYPE, NODE_GROUP, "ray.io/availability-zone", "ray.io/availability-region"]
_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_KEY = re.compile(rf"(?:{_NAME}(?:\.{_NAME})*/)?{_NAME}")
_SELECTOR = re.compile(rf"(!?)(?:({_NAME})|in\(({_NAME}(?:, ?{_NAME})*)\))")
_FORMS = "'value', '!value', 'in(a,b)' or '!in(a,b)'"


@functools.cache
def parse_selector(text: str) -> tuple[bool, tuple[str, ...]]:
    """Whether a selector excludes values, and which values it names."""
    match = _SELECTOR.fullmatch(text)
    assert match is not None, text
    return bool(match[1]), (match[2],) if match[2] else tuple(re.split(", ?", match[3]))


def as_selection(where: str, declared: object) -> dict[str, Any]:
    """A declared selection with labels in place of the short words for them; None stays: it does not matter.

    Raises:
        SpecError: it is no dict, has a misspelt word or label, or a value that is no selector.
    """
    if not isinstance(declared, Mapping):
        raise SpecError(
            f"{where} must be a dict such as {{'gpu_type': 'H100', 'spot': False}}, got {declared!r:.60}"
        )
    selection: dict[str, Any] = {}
    for word, value in declared.items():
        word = _check_word(where, word)
        key = _SHORT.get(word, word)
        if key in selection:
            raise SpecError(f"{where} has {word!r} and another name of the same property: give one of them")
        selection[key] = None if value is None else _check_value(f"{where}[{word!r}]", word, value)
    return selection


def _check_word(where: str, word: object) -> str:
    if not isinstance(word, str) or not _KEY.fullmatch(word) or len(word.rpartition("/")[0]) > 253:
        raise SpecError(f"{where} has {word!r}, which is neither one of {', '.join(_SHORT)} nor a node's label")
    if word == NODE_ID:
        raise SpecError(f"{where}: nodes cannot be chosen by {NODE_ID}, which changes whenever a node starts")
    valid = _OF_RAY if word.startswith("ray.io/") else () if "/" in word else _SHORT
    near = difflib.get_close_matches(word.lower(), valid, 1, 0.8)
    if near and near[0] != word:
        raise SpecError(f"{where} has no {word!r}; did you mean {near[0]!r}?")
    return word


def _check_value(where: str, word: str, value: Any) -> Any:
    if word == GPU_MEMORY:
        check_number(where, value, low=0, above=True)
        return float(value)
    if word == "spot":
        if not isinstance(value, bool):
            raise SpecError(f"{where} must be True or False, got {value!r}")
        return "spot" if value else "!spot"
    if not isinstance(value, str) or not _SELECTOR.fullmatch(value):
        raise SpecError(f"{where} must be {_FORMS}, got {value!r:.60}")
    return value.replace(" ", "")


def merge_selections(
    ensemble: Mapping[str, Any] | None, member: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """The selection of a member: the ensemble's, and in place of it, label by label, its own; None for none."""
    return {**(ensemble or {}), **(member or {})} or None


def check_selection(where: str, nodes: Mapping[str, Any] | None, gpus_per_worker: float | None) -> None:
    """Raise SpecError for a selection of GPUs that no GPU meets, or of a member that takes none."""
    selection = as_items(nodes)
    if gpus_per_worker == 0 and selects_gpus(selection):
        raise SpecError(
            f"{where} asks for GPUs ({describe_selection(selection)}), but gpus_per_worker=0 or devices='cpu' "
            "uses none: leave one of them out (in a member, by None)"
        )
    least = dict(selection).get(GPU_MEMORY, 0.0)
    excludes, kinds = parse_selector(dict(selection)[GPU_TYPE]) if GPU_TYPE in dict(selection) else (True, ())
    if not excludes and all(SIZES_GB.get(one, (0, least))[1] < least for one in kinds):
        sizes = ", ".join(f"{one} has {SIZES_GB[one][1]} GB" for one in kinds)
        raise SpecError(f"{where}: no GPU has {describe_selection(selection)} ({sizes})")


def as_items(nodes: Mapping[str, Any] | None) -> Selection:
    """The items of a selection that matter, sorted."""
    return tuple(sorted((key, value) for key, value in nodes.items() if value is not None)) if nodes else ()


def selects_gpus(selection: Selection) -> bool:
    """Whether a selection is of GPUs: it is met by a GPU to train on, and by no CPU."""
    return any(key in (GPU_TYPE, GPU_MEMORY) for key, _ in selection)


def describe_selection(selection: Selection) -> str:
    """A selection in the words in which it is declared."""
    parts = []
    for key, value in selection:
        if key == MARKET_TYPE and value in ("spot", "!spot"):
            parts.append(f"spot={value == 'spot'}")
        else:
            value = f"{value:g}" if key == GPU_MEMORY else value
            parts.append(f"{'gpu_type' if key == GPU_TYPE else key}={value}")
    return ", ".join(parts)
