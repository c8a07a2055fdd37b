"""Estimates CPU energy where nothing measures it: busy cores times watts per busy core. Labelled *estimated*.

The model has one constant and no idle share: an idle core costs nothing, a busy one `WATTS_PER_CORE`. So it never
credits a run with power that would have flowed anyway, and the energy of work is proportional to its CPU time.

The constant is a server package's thermal design power over its cores, about what a package at full load draws:
EPYC 9654 360 W / 96 = 3.8; EPYC 7763 280 W / 64 = 4.4; Xeon 8480+ 350 W / 56 = 6.3; Xeon 8380 270 W / 40 = 6.8.
The middle of these is near 5 W. A "core" is what the kernel counts as a CPU: with two hardware threads a core, or
on a laptop, the truth may well be half or twice that. Who knows better sets ``ENSEMBLE_WATTS_PER_CORE``.

CPU time is reported late and in clock ticks: what is more than all cores can have spent since the last reading is
counted in the next ones, so that no interval has more power than all cores busy.

It covers the host, or this container where only its own CPU time can be seen (`ensemble.meter.power.busy_time`).
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
    given = os.environ.get(VARIABLE)
    if given is None:
        return WATTS_PER_CORE
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise SpecError(f"{VARIABLE} must be a positive number of watts, got {given!r}")
    return value


def node_busy_s() -> float:
    """CPU-seconds of all processes that can be seen from here, since some moment.

    Raises:
        OSError: the system does not report it.
    """
    busy = find_busy_time()
    if isinstance(busy, Absent):
        raise OSError(busy.reason)
    return busy.read()


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
