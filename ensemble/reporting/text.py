"""Formats durations, rates, joules and other numbers for people. Absent values are a dash, never a zero."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

ABSENT = "–"
ESTIMATED = "Estimated joules are CPU-seconds with a weight, not measured: not evidence of a saving."

# Of ECMA-48: colours and cursor movements, and what sets titles or links; they say nothing to a reader.
_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\))")
# C0 but for tabs and ends of lines, C1, and what reverses the order of letters.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """Returns text without terminal colours, and with other control characters escaped."""
    return _CONTROL.sub(lambda match: repr(match[0])[1:-1], _SEQUENCE.sub("", text))


def duration(seconds: float | None) -> str:
    """`0.4 s`, `12 s`, `3 min 05 s`, `2 h 07 min`, `3 d 4 h`: two units at most."""
    if seconds is None or not math.isfinite(seconds):
        return ABSENT
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def clock(seconds: float) -> str:
    """Seconds since a start as `0:07`, `12:30` or `1:02:03`."""
    whole = max(0, int(seconds))
    hours, remainder = divmod(whole, 3600)
    minutes, seconds_left = divmod(remainder, 60)
    return f"{hours}:{minutes:02d}:{seconds_left:02d}" if hours else f"{minutes}:{seconds_left:02d}"


def number(value: float | None, digits: int = 3) -> str:
    """A number with `digits` significant digits; counts keep all theirs."""
    if value is None or not math.isfinite(value):
        return ABSENT
    if value == int(value) and abs(value) < 1e15 and abs(value) >= 10:
        return f"{int(value):,}"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def count(many: int, what: str) -> str:
    """`1 member`, `3 members`."""
    return f"{many} {what}" if many == 1 else f"{many} {what}s"


def names(words: Sequence[str], most: int = 4) -> str:
    """`member-0, member-1, member-2, member-3 and 5 more`."""
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more


def attempted(word: str, attempts: int) -> str:
    """A member's state, with the number of its attempts where there are several: `finished (2)`."""
    return f"{word} ({attempts})" if attempts > 1 else word


def joules_head(origins: Iterable[str]) -> str:
    """A column's head: `J (estimated)` where all its figures have one origin, else `J`: each says its own."""
    origin_names = set(origins) - {"unavailable"}
    return f"J ({origin_names.pop()})" if len(origin_names) == 1 else "J"


def score(value: float | None) -> str:
    """A metric, to four decimals where it is of order one."""
    if value is None:
        return ABSENT
    if not math.isfinite(value):
        return str(value)
    return f"{value:.4f}" if abs(value) < 100 else f"{value:.4g}"


def interval(low_high: tuple[float, float] | None) -> str:
    """`0.9132 … 0.9405`; of one that was cut off at 0, with nothing above, that the figure is only noise."""
    if low_high is None:
        return ABSENT
    return "0 within noise" if low_high == (0, 0) else f"{score(low_high[0])} … {score(low_high[1])}"


def gain(better: float | None, than: float | None) -> str:
    """The signed difference of two metrics, `+0.0123`."""
    if better is None or than is None or not math.isfinite(better - than):
        return ABSENT
    return f"{better - than:+.4f}".replace("-", "−")


def cpu(seconds: float | None) -> str:
    """CPU-seconds, in seconds up to an hour's worth so that rows compare, then in CPU-hours."""
    if seconds is None or not math.isfinite(seconds):
        return ABSENT
    if seconds >= 36000:
        return f"{seconds / 3600:.1f} CPU-h"
    return f"{seconds:.1f} s" if seconds < 100 else number(round(seconds)) + " s"


def _scale(value: float, units: Sequence[tuple[float, str]], usual: str) -> str:
    """A number with three digits and the largest of the units that it reaches, else the usual one."""
    size, unit = next((pair for pair in units if abs(value) >= pair[0]), (1.0, usual))
    return f"{value / size:.3g} {unit}"


def joules(energy_j: float | None, origin: str | None = None) -> str:
    """Energy in J, kJ, MJ; with its origin where one is given: `201 J (estimated)`."""
    if energy_j is None or not math.isfinite(energy_j):
        return ABSENT
    shown = _scale(energy_j, ((1e9, "GJ"), (1e6, "MJ"), (1e3, "kJ")), "J")
    return shown + (f" ({origin})" if origin else "")


def watts(power_w: float | None) -> str:
    """Power in W, from 10 kW on in kW or MW."""
    if power_w is None or not math.isfinite(power_w):
        return ABSENT
    if abs(power_w) < 1e4:
        return f"{number(power_w)} W"
    return _scale(power_w, ((1e6, "MW"), (1e3, "kW")), "W")


def emissions(grams: float) -> str:
    """Greenhouse gas in mg, g, kg or t of CO2 equivalent."""
    units = ((1e6, "tCO2e"), (1e3, "kgCO2e"), (1.0, "gCO2e"))
    return _scale(grams, units, "gCO2e") if abs(grams) >= 1 else f"{grams * 1e3:.3g} mgCO2e"


def amount(value: float) -> str:
    """A sum, such as of money: to the hundredth from 1 on, below that with two digits and without an exponent."""
    if abs(value) >= 1 or value == 0:
        return f"{value:,.2f}"
    return f"{value:.{1 - math.floor(math.log10(abs(value)))}f}"


def memory(nbytes: float) -> str:
    """Bytes in KiB, MiB, GiB."""
    return _scale(nbytes / 2**10, ((2**20, "GiB"), (2**10, "MiB")), "KiB")


def hyperparameters(params: Mapping[str, Any]) -> str:
    """`lr 0.1, width 32`, in the order declared."""
    return ", ".join(f"{name} {value(v)}" for name, v in params.items())


def value(parameter: Any) -> str:
    """A hyperparameter's value, short."""
    if isinstance(parameter, float):
        return f"{parameter:.4g}"
    return str(parameter)
