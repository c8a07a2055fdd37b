"""Events as JSON: the table of their types, the decoder and the encoder."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Any, TypeVar, Union

import msgspec

from ensemble.events import members, nodes, run, streams, usage
from ensemble.events.base import AttemptEvent, Event, Json, MemberEvent, Unknown

#: Titles of the tables of the documentation, and the types in each: those of a module.
SECTIONS: dict[str, tuple[type[Event], ...]] = {
    title: tuple(
        kind
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, Event) and kind not in (Event, MemberEvent, AttemptEvent)
    )
    for title, module in {
        "The run": run,
        "Members": members,
        "Data": streams,
        "Nodes and packing": nodes,
        "Usage": usage,
    }.items()
}

E = TypeVar("E", bound=Event)

#: The class of each type.
TYPES: dict[str, type[Event]] = {
    str(each.__struct_config__.tag): each for section in SECTIONS.values() for each in section
}

_DECODER: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Union[tuple(TYPES.values())])  # noqa: UP007


def make_event(type: str, **fields: Any) -> Event:
    """Returns an event of a type, `Unknown` where there is no such type.

    Raises:
        TypeError: the type has no such field, or a field is missing.
    """
    kind = TYPES.get(type)
    return Unknown(kind=type, fields=fields) if kind is None else kind(**fields)


def select_fields(kind: type[E], fields: Mapping[str, Any]) -> E:
    """Returns an event of a type, of those of the fields that it has."""
    return kind(**{name: fields[name] for name in kind.__struct_fields__ if name in fields})


def decode_event(line: bytes) -> Event | None:
    """Returns the event of a JSON text; None where it is none, or a field is not of its type."""
    try:
        return _DECODER.decode(line)
    except (msgspec.MsgspecError, RecursionError):
        pass
    try:  # which knows numbers and texts that the fast decoder refuses
        return read_event(json.loads(line))
    except (ValueError, RecursionError):
        return None


def explain_line(line: bytes) -> str:
    """Returns what is wrong with a JSON text that is no event."""
    try:
        fields = json.loads(line)
        msgspec.convert(fields, TYPES[fields["type"]])
    except msgspec.ValidationError as error:
        return f"the event {fields['type']!r}: {error}"
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        return f"{type(error).__name__}: {error}"
    return f"the event {fields['type']!r} has the format {fields.get('v')}"


def read_event(fields: Any) -> Event | None:
    """Returns the event of a JSON object; None where it is none, or a field is not of its type."""
    if not isinstance(fields, dict) or not isinstance(kind := fields.get("type"), str):
        return None
    try:
        if kind in TYPES:
            return msgspec.convert(fields, TYPES[kind])
        v, t = msgspec.convert((fields.get("v"), fields.get("t")), tuple[int, float])
    except msgspec.ValidationError:
        return None
    return Unknown(
        v=v, t=t, kind=kind, fields={k: e for k, e in fields.items() if k not in ("v", "t", "type", "crc")}
    )


def encode_event(event: Event) -> bytes:
    """Returns an event as JSON: null for NaN and infinities, JSON values for those of numpy and torch, and paths.

    Raises:
        TypeError: it holds a value that JSON has not.
    """
    if isinstance(event, Unknown):
        return _encode_json({"type": event.kind, "v": event.v, "t": event.t, **event.fields})
    try:
        return _ENCODER.encode(event)
    except UnicodeEncodeError:
        return _encode_json(msgspec.to_builtins(event, enc_hook=_to_json_value))


def settle(event: Event, text: bytes | None = None) -> Event:
    """Returns an event as whoever reads its JSON has it: with plain values only.

    Args:
        text: its JSON, where that is known.

    Raises:
        TypeError: a field is not of its type.
    """
    settled = decode_event(encode_event(event) if text is None else text)
    if settled is None:
        raise TypeError(f"no valid event: {event!r:.1000}")
    return settled


def to_dict(event: Event) -> Json:
    """Returns an event with all its fields, as plain JSON values."""
    if isinstance(event, Unknown):
        return {"v": event.v, "t": event.t, "type": event.kind, **event.fields}
    return {"v": event.v, "t": event.t, "type": event.type, **_to_plain(event)}


def _to_plain(value: Any) -> Any:
    """Structs as dicts with all their fields, and keys as texts, as JSON has them."""
    if isinstance(value, msgspec.Struct):
        return {name: _to_plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, Mapping):
        return {str(name): _to_plain(item) for name, item in value.items()}
    return [_to_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _to_json_value(value: Any) -> Any:
    """Converts numpy and torch scalars, arrays, paths and mappings to JSON values."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    for kind in (str, float, int):
        if isinstance(value, kind):
            return kind(value)
    for name in ("item", "tolist"):
        convert = getattr(value, name, None)
        if convert is not None and (name == "tolist" or getattr(value, "size", 1) == 1):
            return convert()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"an event cannot hold {value!r} ({type(value).__name__}); give plain JSON values")


def _encode_json(fields: Json) -> bytes:
    """As `encode_event`, of text that UTF-8 cannot encode (file names, arguments), which becomes JSON escapes."""
    return json.dumps(_replace_nan(fields), separators=(",", ":"), allow_nan=False).encode()


def _replace_nan(value: Any) -> Any:
    """Replaces NaN and infinities, which JSON lacks, by null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _replace_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_replace_nan(item) for item in value]
    return value if value is None or isinstance(value, str | int) else _replace_nan(_to_json_value(value))


_ENCODER = msgspec.json.Encoder(enc_hook=_to_json_value)
