"""Which search a run has: what was declared of it, but the number of its trials, its budget and its storage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble.store import RunState, StoreError
from ensemble.user_code.fingerprint import fingerprint_function

if TYPE_CHECKING:
    from ensemble.spec import Ensemble

#: What --accept-code lets a run go on with: their values are computed again for the trials that have finished.
_ACCEPTED = ("constraints", "stop")


def describe_search(ensemble: Ensemble) -> dict[str, str] | None:
    """Return what the search was declared with, as texts by name; None of a list of members."""
    if (search := ensemble.search) is None:
        return None
    space: Mapping[str, Any] | Callable[..., Any] = search.space
    whole = {"space": _describe_object(space)} if callable(space) else {}
    dimensions = {} if callable(space) else {f"space[{name!r}]": str(own) for name, own in space.items()}
    sampler, pruner = search.sampler_options, search.pruner_options
    described = {
        "objective": f"{ensemble.objective} ({ensemble.mode})",
        "Search.objective": search.gain and f"gain in {search.gain}",
        "further_objectives": ", ".join(f"{one.name} ({one.mode})" for one in search.objectives) or None,
        "sampler": sampler if sampler["name"] else _describe_object(search.sampler),
        "pruner": _describe_object(search.pruner) if hasattr(search.pruner, "prune") else pruner,
        "seed": search.seed,
        **{name: _describe_object(getattr(search, name)) for name in ("constraints", "stop", "terminator")},
    }
    return {name: str(of) for name, of in (whole | dimensions | described).items() if of is not None}


def check_same_search(state: RunState, ensemble: Ensemble, path: Path, *, accepts_code: bool = False) -> None:
    """Refuse to go on with another search than the run has trials of.

    Raises:
        StoreError: something was declared otherwise; the message has both values.
    """
    members = state.members.values()
    if all(one.checkpoint is None and not one.has_result and one.state != "pruned" for one in members):
        return  # nothing was trained that another search could be taken to have found
    anew = "--fresh starts a new run beside this one (fresh=True in Python)"
    now, before = describe_search(ensemble), state.header.search
    mode = "list" if now is None else "search"
    if state.mode != mode:
        kinds = {"list": "a list of members", "search": "a search"}
        raise StoreError(f"{path} has {kinds[state.mode]}, and this ensemble declares {kinds[mode]}; {anew}")
    for name in (*before, *now) if before is not None and now is not None else ():
        had, has = (of.get(name, "none") for of in (before, now))  # type: ignore[union-attr]
        is_edited = name in _ACCEPTED and "none" not in (had, has)
        if had != has and not (is_edited and accepts_code):
            accept = "--accept-code goes on with the edited function, " if is_edited else ""
            raise StoreError(f"{path}: the search has {name}={had}, now {has}; {accept}{anew}")


def _describe_object(own: Any) -> str | None:
    """A function by its name and its code, another object by its class and its plain attributes; None of None."""
    if own is None:
        return None
    if (name := getattr(own, "__qualname__", None)) is not None:
        return f"{name} (code {fingerprint_function(own)[:8]})"
    kind = type(own)
    is_plain = kind.__module__.startswith("optuna.")  # objects of others may change while they are used
    plain = {name: one for name, one in vars(own).items() if isinstance(one, bool | int | float | str)}
    return f"{kind.__qualname__}({plain})" if is_plain else kind.__qualname__
