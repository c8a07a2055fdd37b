"""Commands that look at runs before they start and after they have ended."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ensemble.cli.arguments import Command, add_run_dir, path
from ensemble.cli.console import find_width, print_lines, write_json

if TYPE_CHECKING:
    from ensemble.spec import Ensemble
    from ensemble.store import RunDir

EXIT_FAILED, EXIT_SOME_FAILED = 1, 3


def dry_run(ensemble: Ensemble, run_dir: RunDir, options: argparse.Namespace) -> int:
    """Show what a run would do, need and cost; the exit status says whether first steps of members fail."""
    from ensemble.controller.start_steps import choose_free_path
    from ensemble.inspection import dry_run as try_run
    from ensemble.inspection.dry_run_result import format_dry_run

    folder = choose_free_path(run_dir.path) if options.fresh else run_dir.path
    how = {
        "accept_code": options.accept_code,
        "accept_data": options.accept_data,
        "full": options.dry_run == "full",
    }
    result = try_run(ensemble, folder, options.executor, options.spec, **how)
    print_lines(options, *format_dry_run(result, find_width()).splitlines())
    write_json(options, result.as_dict())
    failed = [row["error"] is not None for row in result.members]
    if all(failed):
        return EXIT_FAILED
    return EXIT_SOME_FAILED if any(failed) and not options.allow_failed else 0


def list_runs(options: argparse.Namespace) -> int:
    """Show the runs in a folder."""
    from ensemble.inspection import list_runs as find_runs
    from ensemble.inspection.run_list import count_closed
    from ensemble.reporting import text
    from ensemble.reporting.tables import format_table

    rows, closed = find_runs(options.folder), count_closed(options.folder)
    if closed:
        print(
            f"{closed} directories in {options.folder} are not yours to read: runs there are not listed",
            file=sys.stderr,
        )
    heads = [
        "run",
        "state",
        "finished",
        "failed",
        "best",
        "combined",
        "objective",
        "CPU",
        "energy",
        "started",
        "took",
    ]
    cells = [
        [
            row["run_dir"],
            row["state"],
            f"{row['finished']}/{row['members']}",
            str(row["failed"]),
            text.score(row["best"]),
            text.ABSENT if row["combined"] is None else f"{text.score(row['combined'])} ({row['combined_split']})",
            row["objective"] or text.ABSENT,
            text.cpu(row["cpu_s"]),
            text.ABSENT if row["energy_j"] is None else f"{text.joules(row['energy_j'])} {row['energy_origin']}",
            text.ABSENT
            if row["started"] is None
            else time.strftime("%Y-%m-%d %H:%M", time.localtime(row["started"])),
            text.duration(row["wall_s"]),
        ]
        for row in rows
    ]
    print_lines(
        options,
        *(format_table(heads, cells, find_width()) if rows else f"no runs in {options.folder}").splitlines(),
    )
    write_json(options, [dict(row) for row in rows])
    return 0


def nodes(options: argparse.Namespace) -> int:
    """Show the nodes of a run."""
    from ensemble.inspection import describe_nodes
    from ensemble.reporting.sections.nodes import list_columns, list_notes
    from ensemble.reporting.tables import lay_out

    rows = describe_nodes(options.run_dir)
    if options.json != "-":
        print_lines(options, *(lay_out(list_columns(rows), find_width()) if rows else ["no node has joined yet"]))
        print_lines(options, *list_notes(rows))
    write_json(options, rows)
    return 0


def compare(options: argparse.Namespace) -> int:
    """Show runs side by side."""
    from ensemble.inspection import compare as compare_runs
    from ensemble.reporting.comparison.result import format_comparison

    result = compare_runs(*options.runs)
    print_lines(options, *format_comparison(result, find_width()).splitlines())
    write_json(options, result.as_dict())
    return 0


def usage(options: argparse.Namespace) -> int:
    """Show what the runs in a folder have used, by user, project or month."""
    from ensemble.inspection import sum_usage
    from ensemble.reporting import text
    from ensemble.reporting.tables import format_table

    rows = sum_usage(options.folder, options.by)
    cells = []
    for row in rows:
        running = f" ({row['in_progress']} in progress)" if row["in_progress"] else ""
        hours = [
            text.ABSENT if row[name] is None else text.amount(row[name] / 3600) for name in ("cpu_s", "gpu_s")
        ]
        quantities = [
            _describe_sum(row, "energy_kwh", "without_energy", text.amount, row["energy_origin"]),
            _describe_sum(row, "emissions_g", "without_emissions", text.emissions),
            _describe_sum(row, "price", "without_price", text.amount, row["currency"]),
        ]
        cells.append([*(row[name] for name in options.by), f"{row['runs']}{running}", *hours, *quantities])
    head = [*options.by, "runs", "CPU-hours", "GPU-hours", "kWh", "emissions", "price"]
    shown = format_table(head, cells, find_width()) if rows else f"no run that has begun in {options.folder}"
    print_lines(options, *shown.splitlines())
    write_json(options, [dict(row) for row in rows])
    return 0


def _describe_sum(
    row: Mapping[str, Any], name: str, missing: str, describe: Callable[[float], str], unit: str | None = None
) -> str:
    """A sum, and of how many runs it is not known."""
    from ensemble.reporting import text

    if row[name] is None:
        return text.ABSENT
    without = f"without {text.count(row[missing], 'run')}" if row[missing] else None
    return " ".join(filter(None, (describe(row[name]), unit, without)))


def _add_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", default="runs", type=path, help="folder (default: %(default)s)")


def _add_usage_options(parser: argparse.ArgumentParser) -> None:
    _add_folder(parser)
    text = "what they are summed by: user, month, run, or several (default: user)"
    parser.add_argument("--by", nargs="+", default=["user"], choices=("user", "month", "run"), help=text)


def _add_compare_options(parser: argparse.ArgumentParser) -> None:
    text = "two runs or more; each is compared with the first"
    parser.add_argument("runs", nargs="+", metavar="RUN_DIR", help=text)


LIST = Command(
    list_runs,
    "List the runs in a folder, the newest first: their state, best value, CPU time, energy and duration.",
    _add_folder,
)
USAGE = Command(
    usage,
    "Sum what the runs in a folder have used: CPU-hours, GPU-hours, kWh, emissions and price.",
    _add_usage_options,
)
COMPARE = Command(
    compare,
    "Compare runs: differences of their declarations, figures of the same samples with 95 %% intervals of their "
    "differences, cost.",
    _add_compare_options,
)
NODES = Command(nodes, "Show the nodes of a run, what has failed there, and why one is left out.", add_run_dir)
