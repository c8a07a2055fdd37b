"""Opens standard streams that a shell has closed (`command >&-`): else other files get their descriptors."""

from __future__ import annotations

import os
import sys


def open_closed_streams() -> None:
    """Open those of descriptors 0 to 2 that are closed on /dev/null, for child processes too."""
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            os.dup2(opened, descriptor)  # inheritable
            os.set_inheritable(descriptor, True)
            if opened != descriptor:
                os.close(opened)
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, mode, closefd=False))  # noqa: SIM115  # for the process's life
