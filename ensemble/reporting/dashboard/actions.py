"""Turns what the page asks of a run into a request file, the same as the commands write.

The page changes a run in no other way; the controller answers in the log.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from ensemble.reporting.dashboard.feed import LogReader, explain_read_only
from ensemble.store.requests import write_request


class ActionError(ValueError):
    """An action that no request is written for: its status, and why in one line."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status, self.why = status, why


_Name = Annotated[str, Meta(min_length=1, max_length=200)]
_Value = Annotated[str, Meta(max_length=10_000)] | bool | int | float | None


class _Asked(Struct, forbid_unknown_fields=True):
    verb: Literal["stop", "pause", "resume", "cancel", "add"]
    at_once: bool | None = None
    member: str | None = None
    members: Annotated[list[str], Meta(min_length=1)] | None = None
    source: str | None = msgspec.field(default=None, name="from")
    warm: bool | None = None
    params: Annotated[dict[_Name, _Value], Meta(max_length=200)] | None = None


_DECODER = msgspec.json.Decoder(_Asked)
#: Fields of an action by its verb; of others that of one or several members.
_FIELDS = {"stop": {"at_once"}, "add": {"source", "warm", "params"}}


def parse_action(body: bytes, members: Collection[str]) -> tuple[str, dict[str, Any]]:
    """Returns the verb and the fields of the request that the body of a POST describes.

    Args:
        members: names of the run's members.

    Raises:
        ActionError: it describes none.
    """
    try:
        action = _DECODER.decode(body)
    except (ValueError, RecursionError) as error:
        raise ActionError(400, f"this is not an action: {error}"[:200]) from None
    fields = {name: getattr(action, name) for name in action.__struct_fields__ if name != "verb"}
    fields = {name: value for name, value in fields.items() if value is not None}
    if unknown := sorted(set(fields) - _FIELDS.get(action.verb, {"member", "members"})):
        raise ActionError(400, f"{action.verb} has no {unknown[0]!r}")
    for name in (action.member, action.source, *(action.members or ())):
        if name is not None and name not in members:
            raise ActionError(404, f"there is no member {name[:200]!r}")
    if action.member is not None and action.members is not None:
        raise ActionError(400, "members must be a list of names, without a member")
    if action.verb != "add":
        return action.verb, fields
    declared = {"declared": {"params": action.params or {}}}
    if action.source is not None:
        return action.verb, {**declared, "from": action.source, "warm": bool(action.warm)}
    if action.warm:
        raise ActionError(400, "a warm start needs the member that it starts from")
    return action.verb, declared


def perform(reader: LogReader, body: bytes, by: str) -> str:
    """Writes the request that the body of a POST describes; returns its id.

    Args:
        by: who asks, for the run's log.

    Raises:
        ActionError: there is nothing to do it, or it is none.
        StoreError: the request cannot be written.
    """
    reader.read()
    state = reader.view.state
    verb, fields = parse_action(body, state.members)
    if (why := explain_read_only(reader.run_dir)) is not None:
        raise ActionError(403, why)
    if state.ended is not None:
        raise ActionError(409, "the run has ended; `ensemble resume` goes on")
    if reader.view.driver is not None:
        raise ActionError(409, reader.view.driver)
    return write_request(reader.run_dir, verb, by=by, **fields).stem
