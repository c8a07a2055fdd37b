"""The command `ensemble top`: shows a whole Ray cluster, again and again."""

from __future__ import annotations

import argparse
import sys
import time

from ensemble.cli.console import find_width, print_lines, write_json

EVERY_S = 2.0


def top(options: argparse.Namespace) -> int:
    """Show the runs and the nodes of a cluster until Ctrl-C; once, where the output is no terminal or JSON."""
    from ensemble.executors.ray.cluster_view import ClusterReader
    from ensemble.reporting.cluster import list_lines

    reader = ClusterReader(options.address)
    try:
        if options.once or options.json or not sys.stdout.isatty():
            view = reader.read()
            print_lines(options, *(line for line, _ in list_lines(view, find_width())))
            write_json(options, view)
            return 0
        from ensemble.reporting.terminal import LiveLines

        with LiveLines(sys.stdout) as live:
            while True:
                live.draw(list_lines(reader.read(), live.console.width))
                time.sleep(EVERY_S)
    except KeyboardInterrupt:
        print("ensemble: the cluster goes on", file=sys.stderr)
        raise KeyboardInterrupt("reported") from None
    finally:
        reader.close()
