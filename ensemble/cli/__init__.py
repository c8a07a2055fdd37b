"""The command `ensemble`: its options, what each command does, and what it prints."""

from __future__ import annotations


def main() -> int:
    """Run the command that `sys.argv` gives.

    Returns:
        The exit status.
    """
    from ensemble.cli.parser import main as parse_and_run

    return parse_and_run()
