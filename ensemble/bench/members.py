"""Studies that train many members: one Ensemble on this machine, and what each member came to."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble.spec import Resources

if TYPE_CHECKING:
    from ensemble.spec import Ensemble

# Members that train at one time at most: each is a process, of some 100 MB on the CPU.
AT_ONCE = 16


@dataclass(frozen=True)
class Came:
    """What became of a member.

    Attributes:
        percent: its accuracy after its last epoch; None where it did not finish.
        why: it did not; such as that its loss became infinite.
    """

    percent: float | None
    why: str | None = None


def shares(members: int) -> Resources:
    """What each of so many members asks for, so that as many as may train at one time."""
    at_once = min(members, AT_ONCE)
    return Resources(cpus_per_worker=len(os.sched_getaffinity(0)) / at_once, gpus_per_worker=1 / at_once)


def train_members(ensemble: Ensemble, run_dir: str | None, say: Callable[[str], None]) -> list[Came]:
    """Train an ensemble's members as processes of this machine; what became of each, by number.

    Args:
        run_dir: under which the run is kept, in a directory of the ensemble's name; there is it gone on with, and
            members that have finished are not trained again. None keeps nothing.
        say: gets a line of progress.
    """
    import ensemble as api

    count, why = len(ensemble.members or ()), dict[str, str]()
    ended = [0]

    def told(event: dict[str, Any]) -> None:
        if event["type"] == "failed":
            why[event["member"]] = event["error"]
        if event["type"] in ("finished", "failed"):
            ended[0] += 1
            if ended[0] % max(1, -(-count // 5)) == 0 or ended[0] == count:
                say(f"{ensemble.name}: {ended[0]} of {count} members have ended")

    with contextlib.ExitStack() as owned:
        kept = run_dir or owned.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))
        result = api.submit(ensemble, Path(kept) / ensemble.name, executor="local", on_event=told).wait()
    found = {row["member"]: row for row in result.members}
    return [_came(found[f"member-{number}"], why) for number in range(count)]


def _came(row: dict[str, Any], why: dict[str, str]) -> Came:
    if row["state"] == "finished":
        return Came(100 * row["metric"])
    return Came(None, why.get(row["member"], row["state"]))
