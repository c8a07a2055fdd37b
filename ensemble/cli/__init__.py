"""The command `ensemble`: its options, its commands, its output."""

from __future__ import annotations


def main() -> int:
    """Run the command in `sys.argv`.

    Returns:
        The exit status.
    """
    from ensemble.interrupts import exit_at_once

    with exit_at_once():
        from ensemble.cli.parser import main as parse_and_run

    return parse_and_run()
