"""The one error of this room."""


class StoreError(RuntimeError):
    """Something about a run on disk; the message is one line that says what, where and what to do next."""
