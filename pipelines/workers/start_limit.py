"""How long a forked worker may take until it begins: longer after each time that workers were late."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from pipelines.errors import PipelineError

_MAX_LATE = 8  # with the usual limit of 15 s the last of them has had half an hour


class StartLimit:
    """The time within which a forked worker has to begin.

    A late worker waits for a lock, which the next one will probably not, or is slow: it has a large source to
    copy, on a busy machine. For slow ones the limit doubles, whatever other workers prepare meanwhile.

    Args:
        first_s: the limit at first.

    Attributes:
        limit_s: the limit now, for all workers that have not begun.
    """

    def __init__(self, first_s: float) -> None:
        self.limit_s = first_s
        self._first_s = first_s
        self._late = 0  # times in a row
        self._raised_at = float("-inf")

    def report_late(self, pids: Sequence[int], now: float) -> None:
        """Report the workers that were found late together, however many, which are to be replaced.

        Raises:
            PipelineError: that has happened too often in a row.
        """
        said = (
            f"of the preparation workers, forks of this process, {len(pids)} had not begun within "
            f"{self.limit_s:g} s (process {', '.join(map(str, pids))})"
        )
        self._late += 1
        if self._late >= _MAX_LATE:
            raise PipelineError(
                f"{said}, nor had those before them, {_MAX_LATE} times in a row: what the stages and the source "
                "do when they are unpickled waits for something, or takes too long"
            )
        self.limit_s, self._raised_at = 2 * self.limit_s, now
        warnings.warn(
            f"{said} and are replaced, with {self.limit_s:g} s from now on. A slow one has a large source to "
            "copy, or the machine is busy. One that hangs waits for a lock that another thread held at the fork: "
            "if this program starts threads of its own, make its loaders before them",
            stacklevel=3,
        )

    def report_begun(self, started_at: float, now: float) -> None:
        """Report a worker that has begun; one that was started after the last late ones lowers the limit again."""
        if started_at <= self._raised_at:
            return
        self._late = 0
        # Others that were started with it need about as long.
        while self.limit_s > self._first_s and self.limit_s > 4 * (now - started_at):
            self.limit_s /= 2
