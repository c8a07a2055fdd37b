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

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of all its columns."""
        return (self.column,) if self.kind == "array" else (self.column, self.length)


class StructureMismatch(Exception):
    """A sample does not have the structure of the others; the text says where."""


def find_foreign_container(value: Any, path: Path = ()) -> str | None:
    """Says which dict below the sample is of a class of its own; None if none is."""
    if path and isinstance(value, dict) and type(value) is not dict:
        return f"the field {join_path(path)!r} is {type(value).__name__}, not a plain dict"
    parts = value.items() if isinstance(value, dict) else enumerate(value) if type(value) is tuple else ()
    return next((why for name, part in parts if (why := find_foreign_container(part, (*path, name)))), None)


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
        """
        structure = cls(_make_node(sample, (), slots))
        columns = [name for leaf in structure.leaves() for name in leaf.columns]
        repeated = next((name for name in columns if columns.count(name) > 1), None)
        if repeated is not None:
            raise PipelineError(f"two fields of a sample have the path {repeated!r}: rename one")
        return structure

    def is_array(self, field: str) -> bool:
        """Whether a field of the sample itself is an array of one shape."""
        node = self.tree.get(field)
        return isinstance(node, Leaf) and node.kind == "array"

    def leaves(self) -> Iterator[Leaf]:
        """All leaves, in order."""
        return (leaf for _, leaf in iterate_leaves(self.tree))

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
        for leaf, value in self.flatten(sample):
            _store_value(leaf, value, as_array(value), fields[leaf.column], columns, slot)
            if layouts is not None and leaf.column in layouts:
                is_kept = is_kept and has_layout(value, layouts[leaf.column])
            elif layouts is not None:
                is_kept = is_kept and type(value) is (str if leaf.kind == "text" else bytes)
        return is_kept

    def build(self, make: Callable[[Leaf], Any]) -> dict[str, Any]:
        """A dict of this structure, of what `make` gives for each leaf."""
        built: dict[str, Any] = _build(self.tree, make)
        return built

    def read_sample(self, columns: Columns, slot: int, layouts: Mapping[str, MemoryLayout]) -> dict[str, Any]:
        """The sample in a slot, copied, in the memory layouts that it had."""

        def read(leaf: Leaf) -> Any:
            if leaf.kind == "array":
                return copy_in_layout(columns[leaf.column][slot], layouts[leaf.column])
            part = columns[leaf.column][slot][: int(columns[leaf.length][slot])]
            return copy_in_layout(part, layouts[leaf.column]) if leaf.kind == "ragged" else decode(leaf.kind, part)

        return self.build(read)

    def as_record(self) -> Any:
        """The structure as JSON, a leaf as a text of kind and column; see `from_record`."""
        return self.build(lambda leaf: f"{leaf.kind} {leaf.column}")

    @classmethod
    def from_record(cls, record: Any) -> Structure:
        """The structure that `as_record` describes."""
        return cls(_parse_node(record))


def decode(kind: Kind, content: Any) -> str | bytes:
    """The text or bytes in uint8 [n]."""
    raw: bytes = content.tobytes()
    return raw.decode("utf-8", "surrogatepass") if kind == "text" else raw


def encode(kind: Kind, value: Any) -> bytes:
    """The bytes of a text or of bytes, as they are stored."""
    raw: bytes = value.encode("utf-8", "surrogatepass") if kind == "text" else value
    return raw


def _store_value(leaf: Leaf, value: Any, array: Any, field: Field, columns: Columns, slot: int) -> None:
    """Store one value of a sample in its columns.

    Args:
        array: the value as an array; None if it is none.
        field: of the column.

    Raises:
        StructureMismatch: it does not fit.
    """
    shape, name = field.shape, leaf.column
    if leaf.kind == "array":
        if array is None or array.shape != shape or array.dtype != columns[name].dtype:
            raise StructureMismatch(describe_shape_mismatch(name, value, array, field))
        columns[name][slot] = array
        return
    most = f"entries, more than most={shape[0]}"
    if leaf.kind in ("text", "binary"):
        if not isinstance(value, str if leaf.kind == "text" else bytes):
            kind = "a str" if leaf.kind == "text" else "bytes"
            raise StructureMismatch(f"the field {name!r} is {type(value).__name__}, in other samples {kind}")
        array, most = np.frombuffer(encode(leaf.kind, value), np.uint8), f"bytes, more than most_bytes={shape[0]}"
    elif array is None or array.shape[1:] != shape[1:] or array.ndim != len(shape) or array.dtype != field.dtype:
        raise StructureMismatch(
            f"the field {name!r} is {_format_array(value, array)}, the pipeline's fields say "
            f"{field.dtype}[{', '.join(map(str, ('n', *shape[1:])))}]"
        )
    if len(array) > shape[0]:
        raise StructureMismatch(f"the field {name!r} has {len(array)} {most}")
    columns[name][slot, : len(array)] = array
    columns[leaf.length][slot] = len(array)


def _format_array(value: Any, array: npt.NDArray[Any] | None) -> str:
    return type(value).__name__ if array is None else f"{array.dtype}{list(array.shape)}"


def describe_shape_mismatch(name: str, value: Any, array: npt.NDArray[Any] | None, field: Field) -> str:
    """Says how a value differs from the shape and dtype of its field.

    Args:
        array: the value as an array; None if it is none.
    """
    text = f"the field {name!r} is {_format_array(value, array)}, the pipeline's fields say "
    text += f"{field.dtype}{list(field.shape)}"
    if array is not None and array.shape != field.shape and array.shape[1:] == field.shape[1:]:
        text += f"; if its length varies: .map(stages.ragged({name!r}, most=...)), or stages.pad"
    elif array is not None and advise_image_size(name, array.shape, field.shape):
        text += f"; all images must be of one size: resize the files, or .map(stages.resize({name!r}, ...)) them"
    elif array is not None and array.ndim == len(field.shape) > 1 and array.shape[0] == field.shape[0]:
        text += (
            "; only the first axis may vary (stages.ragged): where another one does, as in an edge_index [2, n], "
            f"put it first, .map(numpy.transpose, field={name!r}), and transpose it back in the model or collate="
        )
    return text


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
        return {name: _make_node(part, (*path, name), slots) for name, part in value.items()}
    if type(value) is tuple:
        return tuple(_make_node(part, (*path, number), slots) for number, part in enumerate(value))
    slot = _find_slot(slots, path, value)
    return Leaf(join_path(path), "array" if slot is None else slot.kind)


def _flatten(node: Node, value: Any, path: Path) -> Iterator[tuple[Leaf, Any]]:
    if isinstance(node, Leaf):
        yield node, value
        return
    where = repr(join_path(path)) if path else "the sample"
    if isinstance(node, tuple):
        if type(value) is not tuple or len(value) != len(node):
            kind = f"a tuple of {len(value)}" if type(value) is tuple else type(value).__name__
            raise StructureMismatch(f"{where} is {kind}, in other samples a tuple of {len(node)}")
        for number, part in enumerate(node):
            yield from _flatten(part, value[number], (*path, number))
        return
    if not isinstance(value, dict):
        raise StructureMismatch(f"{where} is {type(value).__name__}, in other samples a dict")
    for name, part in node.items():
        if name not in value:
            raise StructureMismatch(f"the field {join_path((*path, name))!r} is missing")
        yield from _flatten(part, value[name], (*path, name))
    if len(value) != len(node):
        surplus = join_path((*path, next(name for name in value if name not in node)))
        raise StructureMismatch(f"the field {surplus!r} is not one of the pipeline's ({', '.join(node)})")


def _build(node: Node, make: Callable[[Leaf], Any]) -> Any:
    if isinstance(node, dict):
        return {name: _build(part, make) for name, part in node.items()}
    return make(node) if isinstance(node, Leaf) else tuple(_build(part, make) for part in node)


def _parse_node(record: Any) -> Node:
    if isinstance(record, dict):
        return {name: _parse_node(part) for name, part in record.items()}
    if not isinstance(record, str):
        return tuple(map(_parse_node, record))
    kind, _, column = record.partition(" ")
    return Leaf(column, kind)  # type: ignore[arg-type]


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
