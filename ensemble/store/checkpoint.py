"""Saves and loads checkpoints: any nesting of plain values and tensors, in one safetensors file.

The nesting is JSON in the file's metadata: `{"T": name}` a tensor, `{"f": hexadecimal}` a float, `{"l": [...]}`
a list, `{"t": [...]}` a tuple, `{"d": [[key, value], ...]}` a dict. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble.store.digests import open_checked
from ensemble.store.errors import DamagedError, StoreError, explain_format
from ensemble.store.files import make_directory, make_write_error, write_atomically
from ensemble.store.regular_files import open_regular

if TYPE_CHECKING:
    import torch

VERSION = 2
_KEY = "ensemble.checkpoint"


def save_checkpoint(path: str | os.PathLike[str], state: dict[str, Any]) -> str:
    """Write a state, replacing the one that is there only once the new one is wholly on the disk.

    Tensors go to the CPU; one that is in the state several times (tied weights) is stored once. Memory layouts
    such as channels_last are kept.

    Returns:
        The digest of the file.

    Raises:
        TypeError: the state holds something else than dict, list, tuple, str, int, float, bool, None and tensors.
        WriteError: it cannot be written; the former checkpoint is still there.
    """
    from safetensors import SafetensorError

    file, (save, size) = Path(path), _prepare_save(state)
    try:
        make_directory(file.parent)
        return write_atomically(file, save, size)
    except (OSError, SafetensorError) as error:
        raise make_write_error(file, error, size) from None


def rehearse_checkpoint(state: dict[str, Any]) -> None:
    """Allocate, and free, the memory that `save_checkpoint` takes: a copy of each tensor. No file is opened.

    `save_file` writes from these copies by pointer, and needs no memory beside them. It must not be given a
    device such as /dev/null: it renames a temporary file over its target.
    """
    _prepare_save(state)


def _prepare_save(state: dict[str, Any]) -> tuple[Callable[[str | os.PathLike[str]], None], int]:
    """Copies the state's tensors; returns `save(file)`, which writes them, and how many bytes they are."""
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    skeleton = _encode(state, "", tensors, {})
    metadata = {_KEY: json.dumps({"v": VERSION, "state": skeleton}, separators=(",", ":"))}
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    return lambda file: save_file(tensors, file, metadata), size


def load_checkpoint(
    path: str | os.PathLike[str],
    parts: Collection[str] | None = None,
    digest: str | None = None,
    *,
    mapped: bool = False,
) -> dict[str, Any]:
    """Read what `save_checkpoint` wrote; tensors on the CPU, in memory of their own.

    Args:
        parts: the keys of the state that are read; None: all.
        digest: that the file has by the log (`find_digest`); None: not known.
        mapped: tensors are pages of the file, which are not aligned, and not to be written to.

    Raises:
        DamagedError: there is none, or it is damaged.
        StoreError: it is not one of ours, or is of another format.
    """
    from safetensors import SafetensorError

    try:
        with open_checked(path, digest) as name, _open_tensors(name) as file:
            text = (file.metadata() or {}).get(_KEY)
            if text is None:
                raise StoreError(f"{path} is not a checkpoint of this project (a plain safetensors file)")
            outline = json.loads(text)
            if outline["v"] != VERSION:
                raise StoreError(explain_format(path, outline["v"], VERSION))
            skeleton = outline["state"] if parts is None else _select(outline["state"], parts)
            # cloned: a view of the file is only 8-byte aligned, and kernels give other bits on other alignments
            tensors = {name: file.get_tensor(name) for name in _list_tensors(skeleton)}
            if not mapped:
                tensors = {name: tensors.pop(name).clone() for name in list(tensors)}
    except FileNotFoundError:
        raise DamagedError(f"there is no checkpoint {path}") from None
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{path} is damaged: {error}") from None
    state: dict[str, Any] = _decode(skeleton, tensors, {})
    return state


def _open_tensors(name: str) -> Any:
    """Open a file that is there; safetensors calls each error of opening it "no such file"."""
    from safetensors import safe_open

    try:
        return safe_open(name, framework="pt")
    except FileNotFoundError as error:
        with open(name, "rb"):  # raises the error that it was, such as too many open files
            raise OSError(f"it cannot be opened: {error}") from None


def count_bytes(path: str | os.PathLike[str], part: str) -> int:
    """The bytes of the tensors in a part of a checkpoint, by the header of its file.

    Raises:
        DamagedError: it is not a checkpoint.
    """
    try:
        with open_regular(path, follows_link=True) as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        outline = _select(json.loads(header["__metadata__"][_KEY])["state"], (part,))
        spans = [header[name]["data_offsets"] for name in set(_list_tensors(outline))]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{path} is damaged: {error}") from None
    return sum(stop - start for start, stop in spans)


def _select(skeleton: Any, parts: Collection[str]) -> Any:
    return {"d": [pair for pair in skeleton["d"] if pair[0] in parts]}


def is_checkpoint(metadata: Mapping[str, str] | None) -> bool:
    """Whether a safetensors file with this metadata is one of ours."""
    return _KEY in (metadata or {})


def weights_sha256(state_dict: Mapping[str, torch.Tensor]) -> str:
    """A digest of a model's weights: equal exactly if names, shapes, types and all bits are equal."""
    import torch

    digest = hashlib.sha256()
    for name in sorted(state_dict):
        tensor = state_dict[name].detach().cpu().contiguous()
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _encode(value: Any, where: str, tensors: dict[str, torch.Tensor], seen: dict[Any, str]) -> Any:
    """The JSON form of a value; its tensors are put into `tensors`."""
    import torch

    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return {"f": value.hex()}
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value.detach(), where, tensors, seen)
    if isinstance(value, Mapping):
        pairs = [
            [
                _encode(key, where, tensors, seen),
                _encode(item, f"{where}.{key}" if where else str(key), tensors, seen),
            ]
            for key, item in value.items()
        ]
        return {"d": pairs}
    if isinstance(value, list | tuple):
        items = [_encode(item, f"{where}.{number}", tensors, seen) for number, item in enumerate(value)]
        return {"l" if isinstance(value, list) else "t": items}
    raise TypeError(
        f"a checkpoint cannot hold {where or 'the state'}, a {type(value).__name__} ({value!r:.60}); "
        "give dict, list, tuple, str, int, float, bool, None or tensors"
    )


def _encode_tensor(
    tensor: torch.Tensor, where: str, tensors: dict[str, torch.Tensor], seen: dict[Any, str]
) -> dict[str, Any]:
    import torch

    if tensor.layout != torch.strided or tensor.is_quantized:
        raise TypeError(f"a checkpoint cannot hold {where}: a {tensor.layout} tensor; make it dense first")
    entry: dict[str, Any] = {}
    if not tensor.is_contiguous() and _is_dense(tensor):
        entry["s"] = list(tensor.stride())
    place = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
    name = seen.get(place) if tensor.numel() else None
    if name is None:
        name = where
        while name in tensors:  # "a.0" may come from a string key and from a position
            name += "_"
        # a copy of its own: safetensors refuses tensors that share memory
        tensors[name] = tensor.cpu().clone(memory_format=torch.contiguous_format)
        if tensor.numel():
            seen[place] = name
    return {"T": name, **entry}


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill a block of memory without gap or overlap, in some order of its axes."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _list_tensors(outline: Any) -> Iterator[str]:
    """The names of the tensors in the JSON form of a value, some of them several times."""
    if isinstance(outline, list):
        for item in outline:
            yield from _list_tensors(item)
    elif isinstance(outline, dict):
        if "T" in outline:
            yield outline["T"]
        for item in outline.values():
            yield from _list_tensors(item)


def _decode(outline: Any, tensors: dict[str, torch.Tensor], made: dict[Any, torch.Tensor]) -> Any:
    if not isinstance(outline, dict):
        return outline
    if "f" in outline:
        return float.fromhex(outline["f"])
    if "T" in outline:
        name, stride = outline["T"], outline.get("s")
        key = (name, tuple(stride or ()))
        if key not in made:
            made[key] = tensors[name] if stride is None else _with_strides(tensors[name], stride)
        return made[key]
    if "d" in outline:
        return {_decode(k, tensors, made): _decode(v, tensors, made) for k, v in outline["d"]}
    if "l" in outline:
        return [_decode(item, tensors, made) for item in outline["l"]]
    return tuple(_decode(item, tensors, made) for item in outline["t"])


def _with_strides(tensor: torch.Tensor, stride: list[int]) -> torch.Tensor:
    import torch

    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype).copy_(tensor)
