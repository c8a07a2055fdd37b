"""Estimates CPU energy where nothing measures it: busy cores times watts per busy core. Labelled *estimated*.

`WATTS_PER_CORE` is about a server package's thermal design power over its cores (3.8 to 6.8 W of four models); an
idle core costs
nothing. On other machines the truth may be half or twice that: ``ENSEMBLE_WATTS_PER_CORE`` sets it. CPU time that
is reported late
is counted in later readings, so that no interval has more power than all cores busy.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable

from ensemble.meter.power.busy_time import BusyTime, find_busy_time
from ensemble.meter.power.common import Absent, PowerError, PowerSource, Reading
from ensemble.spec import SpecError

WATTS_PER_CORE = 5.0
VARIABLE = "ENSEMBLE_WATTS_PER_CORE"


def watts_per_core() -> float:
    """The constant, or what the environment says instead.

    Raises:
        SpecError: the environment holds something that is no positive number.
    """
    text = os.environ.get(VARIABLE)
    if text is None:
        return WATTS_PER_CORE
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise SpecError(f"{VARIABLE} must be a positive number of watts, got {text!r}")
    return value


def open_estimate(
    busy: BusyTime | Absent | None = None, clock: Callable[[], float] = time.monotonic
) -> PowerSource | Absent:
    """Returns the estimate; absent only where the system does not report its CPU time.

    Args:
        busy: whose CPU time it is made from, by default the widest scope that can be seen. A container's is named.
        clock: seconds, for the length of intervals.

    Raises:
        SpecError: see `watts_per_core`.
    """
    watts = watts_per_core()
    busy = find_busy_time() if busy is None else busy
    if isinstance(busy, Absent):
        return Absent("estimate", f"the system does not report its CPU time: {busy.reason}")
    try:
        counted_s = busy.read()
    except OSError as error:
        return Absent("estimate", f"the system does not report its CPU time: {error}")
    cores, last_read = os.cpu_count() or 1, clock()

    def read() -> list[Reading]:
        nonlocal counted_s, last_read
        try:
            now_s = busy.read()
        except OSError as error:
            raise PowerError(f"the CPU time cannot be read: {error}") from None
        elapsed_s = clock() - last_read
        busy_s = max(0.0, min(now_s - counted_s, cores * elapsed_s))
        counted_s, last_read = counted_s + busy_s, last_read + elapsed_s
        return [Reading("cpu", "cpu", busy_s * watts)]

    of = "" if busy.scope == "host" else " of this container"
    return PowerSource(f"estimate ({watts:g} W per busy core{of})", "cpu", "estimated", read)
