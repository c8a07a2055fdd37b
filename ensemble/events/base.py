"""What all events have, and what is said of their fields."""

from __future__ import annotations

import re
from typing import Any, Literal, dataclass_transform

from msgspec import Struct, StructMeta

#: The version of the format.
VERSION = 2

Json = dict[str, Any]
#: What an executor or an agent reports: `type` and fields. A session makes events of reports.
Report = dict[str, Any]
Origin = Literal["measured", "attributed", "estimated", "unavailable"]


def _snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


@dataclass_transform(kw_only_default=True)
class _EventType(StructMeta):
    """Makes classes of events: their fields are given by name."""

    def __new__(mcls, name: str, bases: tuple[type, ...], namespace: Json, **config: Any) -> _EventType:
        return super().__new__(mcls, name, bases, namespace, **{"kw_only": True, **config})


@dataclass_transform(kw_only_default=True)
class Event(
    Struct, metaclass=_EventType, omit_defaults=True, gc=False, weakref=False, tag_field="type", tag=_snake_case
):
    """What happened at one time.

    Attributes:
        v: the version of the format; 0 before it is logged.
        t: Unix seconds; they never fall within a log.
    """

    v: int = 0
    t: float = 0.0

    @property
    def type(self) -> str:
        """The name of its type, as the log has it."""
        return str(self.__struct_config__.tag)


class MemberEvent(Event):
    """What happened to a member."""

    member: str


class AttemptEvent(MemberEvent):
    """What happened to an attempt of a member.

    Attributes:
        attempt: its number, from 0; None in an event that was made without one: the present one.
    """

    attempt: int | None = None


class Unknown(Event):
    """An event of a type that this version does not know; only its time counts."""

    kind: str
    fields: Json = {}

    @property
    def type(self) -> str:
        """The name of its type, as the log has it."""
        return self.kind
