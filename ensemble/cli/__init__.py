"""The command `ensemble`: its options, its commands, its output."""

from __future__ import annotations


def main() -> int:
    """Run the command in `sys.argv`.

    Returns:
        The exit status.
    """
    from pipelines.environment.standard_streams import open_closed_streams

    open_closed_streams()
    from ensemble.interrupts import exit_at_once

    with exit_at_once():
        from ensemble.cli.parser import main as parse_and_run

    return parse_and_run()
