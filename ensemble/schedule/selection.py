"""Which nodes, and which of their GPUs, fit the selection of a member (`ensemble.spec.nodes`)."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ensemble.spec.nodes import (
    GPU_MEMORY,
    GPU_TYPE,
    NODE_GROUP,
    SIZES_GB,
    Selection,
    describe_selection,
    parse_selector,
    selects_gpus,
)

if TYPE_CHECKING:
    from ensemble.schedule.needs import Node

_SHOWN = 0.9  # the part of a GPU's nominal memory that a driver shows at least: a T4 of 16 GB has 14.75 GiB


def is_selected(selection: Selection, node: Node) -> bool:
    """Whether a node has what a selection asks for: its labels, and a GPU, if it is of GPUs."""
    labels = tuple(item for item in selection if not selects_gpus((item,)))
    return has_labels(labels, node.labels) and (labels == selection or any(find_gpus(selection, node)))


def find_gpus(selection: Selection, node: Node) -> list[bool]:
    """Of each GPU of a node, whether it is of the type and has the memory that a selection asks for.

    Before a process runs on a node, the memory of its GPUs is not known: they fit unless none of their type does.
    """
    wanted = dict(selection)
    kind, least = wanted.get(GPU_TYPE), wanted.get(GPU_MEMORY, 0.0)
    sizes = node.gpu_memory_gb if len(node.gpu_memory_gb) == len(node.gpus) else (None,) * len(node.gpus)
    return [
        (kind is None or _is_of_type(kind, node, model))
        and _has_memory(least, gb, node.labels.get(GPU_TYPE, model))
        for model, gb in zip(node.gpus, sizes, strict=True)
    ]


def _accepts(selector: str, value: str | None) -> bool:
    excludes, values = parse_selector(selector)
    return (value in values) != excludes


def _is_of_type(selector: str, node: Node, model: str) -> bool:
    """Whether a GPU is of a type: by its node's label, or by its model where there is none.

    The label is of one GPU. Where a model of the node has its word, GPUs of other models are of no such type.
    """
    excludes, values = parse_selector(selector)
    label, named = node.labels.get(GPU_TYPE), any(_names(model, value) for value in values)
    if label is None:
        return named != excludes
    if excludes:
        return label not in values and not named
    return label in values and (_names(model, label) or not any(_names(other, label) for other in node.gpus))


@functools.cache
def _names(model: str, kind: str) -> bool:
    """Whether the name of a model, "NVIDIA A100-SXM4-40GB", has that of a type, "A100", as a word."""
    words, word = (re.sub("[^A-Za-z0-9]+", "-", text) for text in (model, kind))
    return f"-{word}-" in f"-{words}-"


def _has_memory(least_gb: float, known_gb: float | None, model: str) -> bool:
    if known_gb is None:
        sizes = [most for kind, (_, most) in SIZES_GB.items() if _names(model, kind)]
        return not sizes or max(sizes) >= least_gb
    return known_gb >= _SHOWN * least_gb


def make_label_selector(selection: Selection, misfits: Iterable[Node] = ()) -> Selection:
    """The labels by which Ray finds, or its autoscaler adds, a node that fits.

    Memory is no label. Unless types of GPUs are chosen, those stand for it of which each GPU has as much.

    Args:
        misfits: nodes that were found to have less memory: no other one of their groups is asked for.
    """
    labels = {key: value for key, value in selection if key != GPU_MEMORY}
    least = dict(selection).get(GPU_MEMORY)
    if least is not None:
        excludes, kinds = parse_selector(labels[GPU_TYPE]) if GPU_TYPE in labels else (True, ())
        large = [kind for kind, (smallest, _) in SIZES_GB.items() if smallest >= least and kind not in kinds]
        large = large if excludes else [kind for kind in kinds if _has_memory(least, None, kind)]
        if large:
            labels[GPU_TYPE] = f"in({','.join(large)})"
        groups = sorted({node.labels[NODE_GROUP] for node in misfits if NODE_GROUP in node.labels})
        if groups and NODE_GROUP not in labels:
            labels[NODE_GROUP] = f"!in({','.join(groups)})"
    return tuple(sorted(labels.items()))


def has_labels(selectors: Selection, labels: Mapping[str, str]) -> bool:
    """Whether Ray takes a node with such labels for one that is selected."""
    return all(_accepts(text, labels.get(key)) for key, text in selectors)


def explain_unselected(selection: Selection, nodes: Sequence[Node]) -> str:
    """Say that no node fits, and what those have that do not."""
    if not nodes:
        return "there is no node"
    for item in selection:
        if not any(is_selected((item,), node) for node in nodes):
            return f"no node has {describe_selection((item,))} ({_list_found(item[0], nodes)})"
    missing = [(node.name, tuple(part for part in selection if not is_selected((part,), node))) for node in nodes]
    lacking = (f"{name} lacks {describe_selection(items)}" for name, items in missing)
    return f"no node has all of {describe_selection(selection)} ({_abbreviate(lacking, '; ')})"


def _list_found(key: str, nodes: Sequence[Node]) -> str:
    values: dict[str, list[str]] = {}
    for node in nodes:
        values.setdefault(_describe(key, node), []).append(node.name)
    shown = _abbreviate((f"{_abbreviate(names)}: {what}" for what, names in values.items()), "; ")
    if key not in (GPU_TYPE, GPU_MEMORY) and not any(node.labels for node in nodes):
        shown += "; labels are of the nodes of a Ray cluster"
    return shown


def _describe(key: str, node: Node) -> str:
    if key not in (GPU_TYPE, GPU_MEMORY):
        return node.labels.get(key, "no such label")
    if key == GPU_TYPE and (label := node.labels.get(GPU_TYPE)):
        return label
    values: Iterable[Any] = node.gpus if key == GPU_TYPE else (f"{gb:.1f} GiB" for gb in node.gpu_memory_gb)
    return " + ".join(dict.fromkeys(values)) or ("GPUs of unknown memory" if node.gpus else "no GPU")


def _abbreviate(many: Iterable[str], between: str = ", ", most: int = 3) -> str:
    shown = list(many)
    return between.join(shown[:most]) + (f" and {len(shown) - most} more" if len(shown) > most else "")
