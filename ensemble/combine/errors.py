"""What goes wrong when members are combined."""

from __future__ import annotations


class CombineError(ValueError):
    """Predictions or checkpoints that cannot be made into one model; the message is one line for the user."""
