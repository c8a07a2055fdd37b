"""The attempts that have processes or a reserved place, by member."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from ensemble.controller.attempt import Attempt
from ensemble.schedule.needs import Placement
from ensemble.spec import Identity
from ensemble.store import RunState


class AttemptTable(Mapping[str, Attempt]):
    """Member -> its attempt. Others read the table; only `reserve` and `free` change which attempts it has."""

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._live: dict[str, Attempt] = {}

    def __getitem__(self, member: str) -> Attempt:
        return self._live[member]

    def __iter__(self) -> Iterator[str]:
        return iter(self._live)

    def __len__(self) -> int:
        return len(self._live)

    def find(self, event: Mapping[str, Any]) -> Attempt | None:
        """The attempt that an event is about; None where that attempt has ended."""
        live = self._live.get(event.get("member", ""))
        return live if live is not None and live.number == event.get("attempt") else None

    def reserve(self, attempt: Attempt) -> None:
        """Reserve the place of an attempt; the member's previous attempt must have no processes."""
        if attempt.member in self._live:
            raise RuntimeError(f"{attempt.member} was to be launched while its previous attempt has processes")
        self._live[attempt.member] = attempt

    def free(self, member: str) -> None:
        """Free the place of a member: its last process has exited, or none was started."""
        del self._live[member]

    def list_placements(self) -> list[Placement]:
        return [live.start.placement for live in self._live.values()]

    def list_feeders_read(self) -> list[tuple[str, int]]:
        """(node, cohort) of the feeder of each attempt; of both feeders where an attempt is to move."""
        return [key for live in self._live.values() for key in live.feeder_keys]

    def count_readers(self) -> Counter[tuple[str, int]]:
        """(node, cohort) -> attempts that read that feeder, or will, and whose outcome is not known."""
        return Counter(key for live in self._live.values() if not live.is_exiting for key in live.feeder_keys)

    def list_training(self) -> list[tuple[Identity, str, int | None]]:
        """(member, node, cohort) of each attempt on one node that is not asked to move or end.

        The cohort is None where the member prepares its own batches, also because its cohort has no feeder.
        """
        return [
            (
                live.identity,
                live.start.placement.node,
                live.cohort if self._run.members[live.member].feeder else None,
            )
            for live in self._live.values()
            if live.is_active and live.intent is None and not live.is_moving and not live.start.placement.nodes
        ]
