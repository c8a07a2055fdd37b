"""Says which name a hyperparameter that nothing reads may be a misspelling of."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

#: What people call options of optimizers.
_OTHER_NAMES = {"learning_rate": "lr", "learningrate": "lr"}


def find_meant(name: str, known: Iterable[str]) -> str | None:
    """Which of the known names a hyperparameter may be a misspelling of; None where none is near."""
    names = {each.lower(): each for each in known}
    names = {other: option for other, option in _OTHER_NAMES.items() if option in names} | names
    close = difflib.get_close_matches(name.lower(), names, n=1)
    return names[close[0]] if close else None


def describe_unused(names: Iterable[str], meant: Mapping[str, str]) -> str:
    """One line about hyperparameters that nothing reads.

    Args:
        meant: by the names of those that may be misspelt, what was looked for.
    """
    hint = " or ".join(repr(name) for name in dict.fromkeys(meant.values()))
    return f"nothing reads the hyperparameter {', '.join(map(repr, names))}" + (
        f"; did you mean {hint}?" if hint else ""
    )
