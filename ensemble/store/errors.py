"""The errors of this room."""


class StoreError(RuntimeError):
    """Something about a run on disk; the message is one line that says what, where and what to do next."""


class WriteError(StoreError):
    """A file could not be written: nothing is wrong with the run, it can go on once there is room."""
