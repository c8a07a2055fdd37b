"""Turns what the page asks of a run into a request file, the same as the commands write.

The page changes a run in no other way; the controller answers in the log.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from ensemble.reporting.dashboard.feed import LogReader, explain_read_only
from ensemble.store.requests import write_request

#: Fields of an action by its verb.
FIELDS = {
    "stop": frozenset(("at_once",)),
    "pause": frozenset(("member", "members")),
    "resume": frozenset(("member", "members")),
    "cancel": frozenset(("member", "members")),
    "add": frozenset(("from", "warm", "params")),
}
MOST_PARAMS, LONGEST_NAME, LONGEST_VALUE = 200, 200, 10_000


class ActionError(ValueError):
    """An action that no request is written for: its status, and why in one line."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status, self.why = status, why


@dataclass(frozen=True)
class Action:
    """A request, not yet written."""

    verb: str
    fields: dict[str, Any]


def parse_action(body: bytes, members: Collection[str]) -> Action:
    """Returns the request that the body of a POST describes.

    Args:
        members: names of the run's members.

    Raises:
        ActionError: it describes none.
    """
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        raise ActionError(400, "the body is not JSON") from None
    if not isinstance(given, dict):
        raise ActionError(400, "an action is an object with a verb")
    verb = given.pop("verb", None)
    if not isinstance(verb, str) or verb not in FIELDS:
        raise ActionError(400, f"the verb must be one of {', '.join(FIELDS)}")
    given = {name: value for name, value in given.items() if value is not None}
    if unknown := sorted(set(given) - FIELDS[verb]):
        raise ActionError(400, f"{verb} has no {unknown[0][:LONGEST_NAME]!r}")
    for name in ("at_once", "warm"):
        if not isinstance(given.get(name, False), bool):
            raise ActionError(400, f"{name} must be true or false")
    for name in ("member", "from"):
        if name in given and (not isinstance(given[name], str) or given[name] not in members):
            raise ActionError(404, f"there is no member {str(given[name])[:LONGEST_NAME]!r}")
    several = given.get("members")
    if several is not None and (not isinstance(several, list) or not several or "member" in given):
        raise ActionError(400, "members must be a list of names, without a member")
    if unknown := [each for each in several or () if not isinstance(each, str) or each not in members]:
        raise ActionError(404, f"there is no member {str(unknown[0])[:LONGEST_NAME]!r}")
    if verb == "add":
        return Action(verb, _make_addition(given))
    return Action(verb, given)


def _make_addition(given: dict[str, Any]) -> dict[str, Any]:
    """The fields of a request for a further member; `from` makes it a clone."""
    params = given.get("params", {})
    if not isinstance(params, dict) or len(params) > MOST_PARAMS:
        raise ActionError(400, f"params must be an object with at most {MOST_PARAMS} values")
    for name, value in params.items():
        _check_param(name, value)
    if "from" not in given:
        if given.get("warm"):
            raise ActionError(400, "a warm start needs the member that it starts from")
        return {"declared": {"params": params}}
    return {"declared": {"params": params}, "from": given["from"], "warm": given.get("warm", False)}


def _check_param(name: str, value: Any) -> None:
    if not name or len(name) > LONGEST_NAME or not _is_text(name):
        raise ActionError(400, f"a hyperparameter's name has 1 to {LONGEST_NAME} letters")
    is_scalar = value is None or isinstance(value, (bool, int, float))
    if isinstance(value, str):
        is_scalar = len(value) <= LONGEST_VALUE and _is_text(value)
    if not is_scalar or (isinstance(value, float) and not math.isfinite(value)):
        raise ActionError(400, f"the hyperparameter {name!r} must be a number, text, true, false or null")


def _is_text(text: str) -> bool:
    """Whether UTF-8 can encode it."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def perform(reader: LogReader, body: bytes, by: str) -> str:
    """Writes the request that the body of a POST describes; returns its id.

    Args:
        by: who asks, for the run's log.

    Raises:
        ActionError: there is nothing to do it, or it is none.
        StoreError: the request cannot be written.
    """
    reader.read()
    action, state = parse_action(body, reader.members), reader.view.state
    if (why := explain_read_only(reader.run_dir)) is not None:
        raise ActionError(403, why)
    if state.ended is not None:
        raise ActionError(409, "the run has ended; `ensemble resume` goes on")
    if reader.view.driver is not None:
        raise ActionError(409, reader.view.driver)
    return write_request(reader.run_dir, action.verb, by=by, **action.fields).stem
