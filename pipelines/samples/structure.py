"""The structure of prepared samples: nested dicts and tuples, ragged arrays, texts and bytes.

Memory holds *columns*, arrays of one shape and dtype for all samples. A value inside a dict or a tuple is a column
of its own, named by its path, such as "target.boxes" or "target.labels.0". An array whose first axis varies, a
text or bytes have two: a slot of a declared size, and the number of entries or bytes in it, `NAME.length`.

A sample that is a flat dict of arrays has no structure (None): its fields are its columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipelines.errors import PipelineError
from pipelines.samples.fields import Columns, Field
from pipelines.samples.memory_order import MemoryLayout, copy_in_layout, has_layout
from pipelines.samples.nested import Kind, Path, Slot, iterate_leaves, join_path

#: A dict or a tuple of nodes, or a `Leaf`.
Node = Any

LENGTH = ".length"
_KINDS = ("array", "ragged", "text", "binary")


@dataclass(frozen=True)
class Leaf:
    """One value of a sample.

    Attributes:
        column: the name of its column.
        kind: "array" of one shape, "ragged" along the first axis, "text" (str) or "binary" (bytes).
    """

    column: str
    kind: Kind

    @property
    def length(self) -> str:
        """The column of the number of its entries or bytes."""
        return self.column + LENGTH


class StructureMismatch(Exception):
    """A sample does not have the structure of the others; the text says where."""


def find_foreign_container(value: Any, path: Path = ()) -> str | None:
    """Says which dict below the sample is of a class of its own; None if none is."""
    if path and isinstance(value, dict) and type(value) is not dict:
        return f"the field {join_path(path)!r} is {type(value).__name__}, not a plain dict"
    parts = value.items() if isinstance(value, dict) else enumerate(value) if type(value) is tuple else ()
    return next((why for name, each in parts if (why := find_foreign_container(each, (*path, name)))), None)


def is_flat(sample: Mapping[Any, Any], slots: Mapping[str, Slot]) -> bool:
    """Whether a sample is a flat dict without declared fields, which needs no `Structure`."""
    return not any(isinstance(value, dict) or type(value) is tuple for value in sample.values()) and not any(
        _find_slot(slots, (name,), value) for name, value in sample.items()
    )


def _find_slot(slots: Mapping[str, Slot], path: Path, value: Any) -> Slot | None:
    """What is declared of a value: a declaration holds as long as the values are of its kind."""
    slot = slots.get(join_path(path)) if slots else None
    return slot if slot is not None and slot.fits(value) else None


@dataclass(frozen=True)
class Structure:
    """How the columns of memory make up samples and batches.

    Attributes:
        tree: dict of the sample's fields, each a dict, a tuple or a `Leaf`.
    """

    tree: dict[str, Node]

    @classmethod
    def of(cls, sample: dict[str, Any], slots: Mapping[str, Slot]) -> Structure:
        """The structure of a sample.

        Args:
            slots: what stages have declared.

        Raises:
            PipelineError: two values have the same path, or the name of a field is no str.
        """
        made = cls(_make_node(sample, (), slots))
        known: set[str] = set()
        for leaf in made.leaves():
            for column in (leaf.column,) if leaf.kind == "array" else (leaf.column, leaf.length):
                if column in known:
                    raise PipelineError(f"two fields of a sample have the path {column!r}: rename one")
                known.add(column)
        return made

    def is_array(self, field: str) -> bool:
        """Whether a field of the sample itself is an array of one shape."""
        node = self.tree.get(field)
        return isinstance(node, Leaf) and node.kind == "array"

    def leaves(self) -> Iterator[Leaf]:
        """All leaves, in order."""
        for _, leaf in iterate_leaves(self.tree):
            yield leaf

    def columns(
        self, sample: dict[str, Any], slots: Mapping[str, Slot]
    ) -> Iterator[tuple[Leaf, Slot | None, Any]]:
        """Each leaf of a sample, what is declared of it, and its value."""
        for (path, value), leaf in zip(iterate_leaves(sample), self.leaves(), strict=True):
            yield leaf, _find_slot(slots, path, value), value

    def flatten(self, sample: dict[str, Any]) -> Iterator[tuple[Leaf, Any]]:
        """Each leaf with a sample's value.

        Raises:
            StructureMismatch: the sample has another structure.
        """
        return _flatten(self.tree, sample, ())

    def store(
        self,
        sample: dict[str, Any],
        fields: Mapping[str, Field],
        columns: Columns,
        slot: int,
        layouts: Mapping[str, MemoryLayout] | None,
        as_array: Callable[[Any], Any],
    ) -> bool:
        """Store a sample in a slot of the columns.

        Args:
            fields: of the columns.
            layouts: the memory layouts that `read_sample` gives back; None: nobody reads the sample so.
            as_array: a value as an array; None if it is none.

        Returns:
            Whether `read_sample` gives back the same sample.

        Raises:
            StructureMismatch: the sample has another structure, or a value does not fit.
        """
        is_kept = layouts is None or (type(sample) is dict and find_foreign_container(sample) is None)
        for leaf, given in self.flatten(sample):
            _store_value(leaf, given, as_array(given), fields[leaf.column], columns, slot)
            if layouts is not None and leaf.column in layouts:
                is_kept = is_kept and has_layout(given, layouts[leaf.column])
            elif layouts is not None:
                is_kept = is_kept and type(given) is (str if leaf.kind == "text" else bytes)
        return is_kept

    def build(self, make: Callable[[Leaf], Any]) -> dict[str, Any]:
        """A dict of this structure, of what `make` gives for each leaf."""
        return {name: _build(node, make) for name, node in self.tree.items()}

    def read_sample(self, columns: Columns, slot: int, layouts: Mapping[str, MemoryLayout]) -> dict[str, Any]:
        """The sample in a slot, copied, in the memory layouts that it had."""

        def read(leaf: Leaf) -> Any:
            if leaf.kind == "array":
                return copy_in_layout(columns[leaf.column][slot], layouts[leaf.column])
            part = columns[leaf.column][slot][: int(columns[leaf.length][slot])]
            return copy_in_layout(part, layouts[leaf.column]) if leaf.kind == "ragged" else decode(leaf.kind, part)

        return self.build(read)

    def as_record(self) -> Any:
        """The structure as JSON; see `from_record`."""
        return _to_json(self.tree)

    @classmethod
    def from_record(cls, record: Any) -> Structure:
        """The structure that `as_record` describes.

        Raises:
            ValueError: it describes none.
        """
        tree = _from_json(record)
        if not isinstance(tree, dict):
            raise ValueError(f"no structure of a sample: {record!r}")
        return cls(tree)


def decode(kind: Kind, content: Any) -> str | bytes:
    """The text or bytes in uint8 [n]."""
    raw: bytes = content.tobytes()
    return raw.decode("utf-8", "surrogatepass") if kind == "text" else raw


def encode(kind: Kind, value: Any) -> bytes:
    """The bytes of a text or of bytes, as they are stored."""
    raw: bytes = value.encode("utf-8", "surrogatepass") if kind == "text" else value
    return raw


def _store_value(leaf: Leaf, given: Any, value: Any, field: Field, columns: Columns, slot: int) -> None:
    """Store one value of a sample in its columns.

    Args:
        given: the value.
        value: as an array; None if it is none.
        field: of the column.

    Raises:
        StructureMismatch: it does not fit.
    """
    shape, name = field.shape, leaf.column
    if leaf.kind in ("text", "binary"):
        if not isinstance(given, str if leaf.kind == "text" else bytes):
            wanted = "a str" if leaf.kind == "text" else "bytes"
            raise StructureMismatch(f"the field {name!r} is {type(given).__name__}, in other samples {wanted}")
        value = np.frombuffer(encode(leaf.kind, given), np.uint8)
        if len(value) > shape[0]:
            raise StructureMismatch(f"the field {name!r} has {len(value)} bytes, more than most_bytes={shape[0]}")
    elif leaf.kind == "array":
        if value is None or value.shape != shape or value.dtype != columns[name].dtype:
            raise StructureMismatch(describe_shape_mismatch(name, given, value, field))
        columns[name][slot] = value
        return
    elif value is None or value.shape[1:] != shape[1:] or value.ndim != len(shape) or value.dtype != field.dtype:
        got = type(given).__name__ if value is None else f"{value.dtype}{list(value.shape)}"
        raise StructureMismatch(
            f"the field {name!r} is {got}, the pipeline's fields say "
            f"{field.dtype}[{', '.join(map(str, ('n', *shape[1:])))}]"
        )
    elif len(value) > shape[0]:
        raise StructureMismatch(f"the field {name!r} has {len(value)} entries, more than most={shape[0]}")
    columns[name][slot, : len(value)] = value
    columns[leaf.length][slot] = len(value)


def describe_shape_mismatch(name: str, given: Any, value: npt.NDArray[Any] | None, field: Field) -> str:
    """Says how a value differs from the shape and dtype of its field.

    Args:
        given: the value.
        value: as an array; None if it is none.
    """
    got = type(given).__name__ if value is None else f"{value.dtype}{list(value.shape)}"
    said = f"the field {name!r} is {got}, the pipeline's fields say {field.dtype}{list(field.shape)}"
    if value is not None and value.shape != field.shape and value.shape[1:] == field.shape[1:]:
        said += f"; if its length varies: .map(stages.ragged({name!r}, most=...)), or stages.pad"
    elif value is not None and advise_image_size(name, value.shape, field.shape):
        said += f"; all images must be of one size: resize the files, or .map(stages.resize({name!r}, ...)) them"
    elif value is not None and value.ndim == len(field.shape) > 1 and value.shape[0] == field.shape[0]:
        said += (
            "; only the first axis may vary (stages.ragged): where another one does, as in an edge_index [2, n], "
            f"put it first, .map(numpy.transpose, field={name!r}), and transpose it back in the model or collate="
        )
    return said


def advise_image_size(name: str, shape: Sequence[int], wanted: Sequence[Any]) -> str:
    """What to do about images [C, H, W] of another size than a model takes; empty where they are none."""
    if len(shape) != 3 or len(wanted) != 3 or shape[0] != wanted[0] or shape[0] not in (1, 3, 4):
        return ""
    return (
        f"resize the images to {wanted[1]} x {wanted[2]}, or train with .map(stages.resize({name!r}, "
        f"({wanted[1]}, {wanted[2]}))), which is then a part of the model"
    )


def column_fields(leaf: Leaf, field: Field | None, slot: Slot | None) -> dict[str, Field]:
    """The columns of a leaf: name -> shape and dtype.

    Args:
        field: shape and dtype of its value; None for a text.
        slot: what is declared of it; None for an array of one shape.
    """
    if slot is None:
        assert field is not None
        return {leaf.column: field}
    entry = Field((), "uint8") if field is None else Field(field.shape[1:], field.dtype)
    return {leaf.column: Field((slot.most, *entry.shape), entry.dtype), leaf.length: Field((), "int64")}


def _make_node(value: Any, path: Path, slots: Mapping[str, Slot]) -> Node:
    if isinstance(value, dict):
        odd = next((name for name in value if not isinstance(name, str)), None)
        if odd is not None:
            raise PipelineError(f"the field name {odd!r} in {join_path(path) or 'a sample'!r} is no str")
        return {name: _make_node(each, (*path, name), slots) for name, each in value.items()}
    if type(value) is tuple:
        return tuple(_make_node(each, (*path, number), slots) for number, each in enumerate(value))
    slot = _find_slot(slots, path, value)
    return Leaf(join_path(path), "array" if slot is None else slot.kind)


def _flatten(node: Node, value: Any, path: Path) -> Iterator[tuple[Leaf, Any]]:
    if isinstance(node, Leaf):
        yield node, value
        return
    said = repr(join_path(path)) if path else "the sample"
    if isinstance(node, tuple):
        if type(value) is not tuple or len(value) != len(node):
            got = f"a tuple of {len(value)}" if type(value) is tuple else type(value).__name__
            raise StructureMismatch(f"{said} is {got}, in other samples a tuple of {len(node)}")
        for number, each in enumerate(node):
            yield from _flatten(each, value[number], (*path, number))
        return
    if not isinstance(value, dict):
        raise StructureMismatch(f"{said} is {type(value).__name__}, in other samples a dict")
    for name, each in node.items():
        if name not in value:
            raise StructureMismatch(f"the field {join_path((*path, name))!r} is missing")
        yield from _flatten(each, value[name], (*path, name))
    if len(value) != len(node):
        surplus = next(name for name in value if name not in node)
        raise StructureMismatch(
            f"the field {join_path((*path, surplus))!r} is not one of the pipeline's ({', '.join(node)})"
        )


def _build(node: Node, make: Callable[[Leaf], Any]) -> Any:
    if isinstance(node, Leaf):
        return make(node)
    if isinstance(node, dict):
        return {name: _build(each, make) for name, each in node.items()}
    return tuple(_build(each, make) for each in node)


def _to_json(node: Node) -> Any:
    if isinstance(node, Leaf):
        return ["leaf", node.column, node.kind]
    if isinstance(node, dict):
        return ["dict", [[name, _to_json(each)] for name, each in node.items()]]
    return ["tuple", [_to_json(each) for each in node]]


def _from_json(record: Any) -> Node:
    kind, *rest = record
    if kind == "leaf" and rest[1] in _KINDS:
        return Leaf(rest[0], rest[1])
    if kind == "dict":
        return {name: _from_json(each) for name, each in rest[0]}
    if kind == "tuple":
        return tuple(_from_json(each) for each in rest[0])
    raise ValueError(f"no part of a structure: {record!r}")


class Inferred(NamedTuple):
    """What one sample shows of all.

    Attributes:
        fields: see `Pipeline.fields`.
        layouts: see `Pipeline.layouts`.
        structure: how the fields make up a sample; None: they are its values.
    """

    fields: dict[str, Field]
    layouts: dict[str, MemoryLayout] | str
    structure: Structure | None = None
