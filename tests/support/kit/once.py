"""What is to happen once, in whichever process comes there first."""

from __future__ import annotations

from pathlib import Path


def is_first(marker: Path) -> bool:
    """Whether nobody has been here before: of processes that come at the same time one makes the file."""
    try:
        marker.open("x").close()
    except FileExistsError:
        return False
    return True
