"""Converts columns of Arrow tables to values of records."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from pipelines.errors import PipelineError
from pipelines.samples.exact import convert
from pipelines.sources._file_records import MissingValue

# Of Ray Data and of Arrow; each stores a tensor as the list of its numbers.
_TENSORS = ("ray.data.arrow_tensor", "ray.data.arrow_tensor_v2", "arrow.fixed_shape_tensor")
_REFUSED = {
    "ray.data.arrow_variable_shaped_tensor": "tensors of unequal shapes: give all of them one shape before they "
    "are written, or write encoded images, which a stage decodes and resizes",
    "ray.data.arrow_pickled_object": "pickled Python objects, which are not read: write numbers, texts, bytes or "
    "arrays, and an object as a flat dict of these",
}


def resolve_type(kind: Any) -> str | None:
    """The type that a user declares: `"str"`, or the name of a dtype of numbers; None if it is something else."""
    if kind in (str, "str", "string", "text"):
        return "str"
    try:
        dtype = np.dtype(kind)
    except TypeError:
        return None
    return str(dtype.newbyteorder("=").name) if dtype.kind in "biuf" else None


def check_missing(kind: str, missing: str) -> bool:
    """Whether missing values are kept, by the argument `missing` of a source."""
    if missing not in ("error", "nan"):
        raise PipelineError(f"{kind}(): missing must be 'error' or 'nan', got {missing!r}")
    return missing == "nan"


def find_kept_type(kind: Any) -> Any:
    """The type in which a column can say that a value is missing: by NaN, or by an empty text.

    Integers are floats then, and booleans and times are texts. Others, such as lists, have no such value.
    """
    import pyarrow
    from pyarrow import types

    if types.is_integer(kind) or types.is_decimal(kind) or types.is_null(kind):
        return pyarrow.float64()
    return pyarrow.string() if types.is_boolean(kind) or types.is_temporal(kind) or is_text(kind) else kind


def fill_missing(column: Any) -> Any:
    """A column of the kept type without nulls, where that has a value for them."""
    from pyarrow import compute, types

    kind = find_kept_type(column.type)
    if types.is_floating(kind):
        return compute.fill_null(column.cast(kind), float("nan"))
    return compute.fill_null(column.cast(kind), "") if types.is_string(kind) else column


def find_leaf(kind: Any) -> Any:
    """The type of what is in lists of any depth."""
    while is_list(kind):
        kind = kind.value_type
    return kind


def replace_leaf(kind: Any, leaf: Any) -> Any:
    """Lists as deep as those of a type, of another type."""
    import pyarrow

    return pyarrow.list_(replace_leaf(kind.value_type, leaf)) if is_list(kind) else leaf


def cast_floats(column: Any, kind: Any, name: str) -> Any:
    """A column of float64, or of lists of such, in another type of floats."""
    numbers = flatten(column).cast("float64").to_numpy(zero_copy_only=False)
    convert(numbers, find_leaf(kind).to_pandas_dtype(), name, "declare it as float64")
    return column.cast(kind)


def flatten(column: Any) -> Any:
    from pyarrow import compute

    while is_list(column.type):
        column = compute.list_flatten(column)
    return column


def is_image(kind: Any) -> bool:
    import pyarrow

    if not pyarrow.types.is_struct(kind) or {field.name for field in kind} != {"bytes", "path"}:
        return False
    data = kind.field("bytes").type
    return bool(pyarrow.types.is_binary(data) or pyarrow.types.is_large_binary(data))


def is_text(kind: Any) -> bool:
    """Whether values of an Arrow type are texts, also those of a dictionary."""
    from pyarrow import types

    kind = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(kind) or types.is_large_string(kind))


def make_reader(column: Any) -> Callable[[int], Any]:
    """Returns a function row -> value for a column of a row group; it raises `MissingValue` if there is none."""
    import pyarrow
    from pyarrow import types

    array = column
    if column.num_chunks > 1:
        with contextlib.suppress(pyarrow.ArrowInvalid):  # more than an array's 32-bit offsets can reach
            array = column.combine_chunks()
    if isinstance(array, pyarrow.ChunkedArray) and array.num_chunks == 1:
        array = array.chunk(0)
    reason = "is null"
    if types.is_struct(array.type) and {field.name for field in array.type} == {"bytes"}:
        array = array.flatten()[0]
        reason = "has no bytes: the image is kept outside of the file"
    if types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if types.is_decimal(array.type):
        array = array.cast(pyarrow.float64() if array.type.scale > 0 else pyarrow.int64())
    nulls = np.asarray(array.is_null()) if array.null_count else None
    if nulls is None and (types.is_integer(array.type) or types.is_floating(array.type)):
        return array.to_numpy().__getitem__  # type: ignore[no-any-return]
    is_bytes = types.is_binary(array.type) or types.is_large_binary(array.type)
    is_plain = isinstance(array, pyarrow.Array) and (is_bytes or is_text(array.type))
    if nulls is None and is_plain and all(array.buffers()[1:]):
        return _make_bytes_reader(array)

    is_nested = is_list(array.type)
    kind = array.type.value_type if is_nested else array.type
    numeric = is_nested and is_numeric(kind)

    def read(row: int) -> Any:
        if nulls is not None and nulls[row]:
            raise MissingValue(reason)
        scalar = array[row]
        if numeric:
            return _as_array(scalar.values).copy()
        value = scalar.as_py()
        if is_nested:
            if None in value:
                raise MissingValue("has a null in its list")
            return value
        if isinstance(value, bool | int | float):
            return np.dtype(kind.to_pandas_dtype()).type(value)
        return value

    return read


def _make_bytes_reader(array: Any) -> Callable[[int], Any]:
    """Reads an Arrow array of bytes or texts without nulls, at a fraction of the time of a scalar's `as_py`.

    Its offsets and its bytes are two buffers (Arrow Columnar Format, "Variable-size Binary Layout").
    """
    from pyarrow import types

    _, ends, content = array.buffers()
    is_large = types.is_large_binary(array.type) or types.is_large_string(array.type)
    offsets = memoryview(ends).cast("B").cast("q" if is_large else "i")
    offsets = offsets[array.offset : array.offset + len(array) + 1]
    values = memoryview(content).cast("B")
    if is_text(array.type):
        return lambda row: str(values[offsets[row] : offsets[row + 1]], "utf-8")
    return lambda row: bytes(values[offsets[row] : offsets[row + 1]])


def find_storage(field: Any) -> tuple[Any, tuple[int, ...] | None]:
    """The type in which a column's values are stored, and of tensors the shape.

    It is the same in every process; types of Ray Data and `datasets` are known only where these are imported.

    Raises:
        PipelineError: the values cannot be read.
    """
    kind, metadata, shape = field.type, field.metadata or {}, None
    name = metadata.get(b"ARROW:extension:name", b"").decode()
    if _is_stored_otherwise(kind):
        name, shape, order = kind.extension_name, getattr(kind, "shape", None), getattr(kind, "permutation", None)
        kind = kind.storage_type
        if order is not None and order != sorted(order):
            raise PipelineError(f"column {field.name!r} has tensors with permuted axes: write them without")
    if name in _REFUSED:
        raise PipelineError(f"column {field.name!r} has {_REFUSED[name]}")
    if name not in _TENSORS:
        return kind, None
    if not is_list(kind) or is_list(kind.value_type) or not is_numeric(kind):
        raise PipelineError(f"column {field.name!r} has tensors stored as {kind}, not as a list of numbers")
    try:
        return kind, tuple(json.loads(metadata[b"ARROW:extension:metadata"]) if shape is None else shape)
    except ValueError:  # some versions of Ray pickle it
        raise PipelineError(f"column {field.name!r} has tensors of an unknown shape: write them anew") from None


def _is_stored_otherwise(kind: Any) -> bool:
    import pyarrow

    return isinstance(kind, pyarrow.ExtensionType | pyarrow.FixedShapeTensorType)


def make_stored_reader(column: Any, shape: tuple[int, ...] | None) -> Callable[[int], Any]:
    """Returns what `make_reader` does, for values as they are stored; `shape` is that of tensors."""
    import pyarrow.compute

    if _is_stored_otherwise(column.type):
        column = pyarrow.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)
    if shape is None:
        return make_reader(column)
    if column.num_chunks == 1:
        numbers, lengths = column.chunk(0).flatten(), pyarrow.compute.list_value_length(column.chunk(0))
        if not numbers.null_count and lengths.to_pylist() == len(column) * [math.prod(shape)]:
            values = numbers.to_numpy(zero_copy_only=False).reshape(-1, *shape)
            return lambda row: values[row].copy()
    read = make_reader(column)
    return lambda row: read(row).reshape(shape)


def is_list(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def is_numeric(kind: Any) -> bool:
    """Whether values of this type are numbers, or lists of such."""
    from pyarrow import types

    if is_list(kind):
        return is_numeric(kind.value_type)
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def _as_array(values: Any) -> np.ndarray[Any, Any]:
    """An Arrow array of numbers, or of lists of them, as one numpy array of the same dtype."""
    from pyarrow import types

    if values.null_count:
        raise MissingValue("has a null in its list")
    if not is_list(values.type):
        flat: np.ndarray[Any, Any] = values.to_numpy(zero_copy_only=False)
        return flat
    inner = _as_array(values.flatten())
    if types.is_fixed_size_list(values.type):
        return inner.reshape(len(values), values.type.list_size, *inner.shape[1:])
    sizes = values.value_lengths().to_numpy(zero_copy_only=False)
    if len(sizes) and sizes.min() != sizes.max():
        raise MissingValue(
            f"has lists of {sizes.min()} to {sizes.max()} values in one list: an array needs them of one length"
        )
    return inner.reshape(len(values), sizes[0] if len(sizes) else 0, *inner.shape[1:])


def make_nested_reader(chunk: Any) -> Callable[[int], Any]:
    """Returns a function row -> value for an Arrow array of any depth; it raises `MissingValue` if there is none.

    Args:
        chunk: the array. Structs are read as dicts, lists of other things than numbers as lists.
    """
    import pyarrow
    from pyarrow import types

    chunk = unwrap(chunk)
    if is_image(chunk.type):
        return _make_file_reader(chunk)
    if types.is_struct(chunk.type):
        names = [field.name for field in chunk.type]
        parts = {name: make_nested_reader(part) for name, part in zip(names, chunk.flatten(), strict=True)}

        def read(row: int) -> dict[str, Any]:
            name, values = "", {}
            try:
                for name, read_part in parts.items():
                    values[name] = read_part(row)
            except MissingValue as error:
                raise MissingValue(f"has a value {name!r} that {error}") from None
            return values

        return read
    if (types.is_list(chunk.type) or types.is_large_list(chunk.type)) and not is_numeric(chunk.type):
        return _make_list_reader(chunk)
    return make_reader(pyarrow.chunked_array([chunk]))


def unwrap(chunk: Any) -> Any:
    """The storage of an array of an extension type, at any depth that `datasets` has one."""
    import pyarrow

    while isinstance(chunk, pyarrow.ExtensionArray):
        chunk = chunk.storage
    return chunk


def split_file(chunk: Any) -> tuple[Any, Any]:
    """The arrays of bytes and of paths in an Arrow array of files."""
    parts = chunk.flatten()
    return tuple(parts[chunk.type.get_field_index(name)] for name in ("bytes", "path"))


def _make_file_reader(chunk: Any) -> Callable[[int], Any]:
    """Images, and other files: their bytes in the table."""
    data, paths = split_file(chunk)

    def read(row: int) -> bytes:
        value = data[row].as_py()
        if value is None:
            path = paths[row].as_py()
            if path is None:
                raise MissingValue("is null")
            raise MissingValue(
                f"is kept outside of the data, in {path}: sources.image_folder reads folders, and "
                "dataset.save_to_disk(...) takes files in"
            )
        return value  # type: ignore[no-any-return]

    return read


def _make_list_reader(chunk: Any) -> Callable[[int], Any]:
    read_element = make_nested_reader(chunk.values)
    offsets = chunk.offsets.to_numpy()

    def read(row: int) -> list[Any]:
        if not chunk[row].is_valid:
            raise MissingValue("is null")
        return [read_element(place) for place in range(offsets[row], offsets[row + 1])]

    return read
