"""Reads again what a file server does not deliver for a while (NFS, FUSE, object stores).

An outage ends with the next read that succeeds. All reads of one outage share its pauses, so that it delays a
process by a minute. Then it is `DataOutOfReach`, whatever `on_error` says: no record that is there is left out.
"""

from __future__ import annotations

import errno
import re
import time
import warnings

from pipelines.errors import DataOutOfReach, SampleError

#: Seconds before each further trial; about a minute in all.
PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0)
_TRANSIENT = (
    *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.ENOTCONN, errno.ECONNRESET),
    *(errno.ECONNABORTED, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH),
)
# As Arrow and HDF5 name it in messages.
_NUMBER = re.compile(r"\berrno(?: = |[ :])(\d+)", re.IGNORECASE)


def find_errno(error: BaseException | None) -> int | None:
    """The number of the system's error that says that data are out of reach; None if it is another error."""
    while error is not None:
        if isinstance(error, OSError):
            named = _NUMBER.search(str(error)) if error.errno is None else None
            number = int(named[1]) if named else error.errno
            if number in _TRANSIENT:
                return number
        error = error.__cause__ or error.__context__
    return None


class Outages:
    """The outages that one process meets while it reads one pipeline.

    Attributes:
        is_on: whether there is one.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._trial = 0  # in the present outage

    def end(self) -> None:
        """A record has been read."""
        self.is_on, self._trial = False, 0

    def wait(self, error: SampleError) -> bool:
        """Pause after an error, which is said once in an outage.

        Returns:
            Whether the record is to be read again; False after an error of another kind.

        Raises:
            DataOutOfReach: the outage is longer than all pauses.
        """
        number = find_errno(error)
        if number is None:
            return False
        name = errno.errorcode.get(number, str(number))
        what, limit = f"{error.where} is out of reach ({name}: {error.reason})", f"{sum(PAUSES_S):.0f} seconds"
        if self._trial == len(PAUSES_S):
            raise DataOutOfReach(
                f"sample {error.index}: {what} although it was tried again for {limit}; it is not skipped: start "
                "again when it can be read"
            ) from error
        self.is_on = True
        if self._trial == 0:
            text = f"{what}: it is read again, with growing pauses, for about {limit}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        time.sleep(PAUSES_S[self._trial])
        self._trial += 1
        return True
