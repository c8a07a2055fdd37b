"""The command `ensemble`: a thin shell over the Python API; every heavy import waits until it is needed."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ensemble.spec import Ensemble
    from ensemble.store import RunState

EXIT_FAILED, EXIT_USAGE = 1, 2
Rows = list[dict[str, Any]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status: 0, 1 for a failed run, 2 for a mistake in what was asked."""
    options = _parser().parse_args(arguments)
    from ensemble.spec import SpecError
    from ensemble.store.errors import StoreError
    from pipelines.errors import PipelineError

    try:
        return int(options.do(options))
    except (SpecError, StoreError, PipelineError) as error:
        print(f"ensemble: {error}", file=sys.stderr)
        return EXIT_USAGE
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ensemble", description="Train an ensemble or a hyperparameter search on one shared data pipeline."
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, do: Callable[[argparse.Namespace], int], says: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=says, description=says)
        added.set_defaults(do=do)
        added.add_argument(
            "--json", metavar="FILE", help="write the table's rows as JSON, '-' for standard output"
        )
        return added

    def running(added: argparse.ArgumentParser, *, executor: str | None) -> None:
        from ensemble.execute import EXECUTORS

        shown = f" (default: {executor})" if executor else " (default: as before)"
        added.add_argument(
            "--executor", choices=list(EXECUTORS), default=executor, help="where members run" + shown
        )

    demo = command("demo", _demo, "Train eight small models on handwritten digits; needs no data and a minute.")
    demo.add_argument("--run-dir", help="where the run is kept (default: runs/demo, made anew)")
    running(demo, executor="ray")
    _settings(demo)

    run = command("run", _run, "Run what a spec file declares: a file that defines spec(**options) -> Ensemble.")
    run.add_argument("spec", metavar="SPEC.py")
    run.add_argument("--run-dir", help="where the run is kept (default: runs/NAME); one that was stopped goes on")
    running(run, executor="ray")
    _settings(run)

    for name, do, says in (
        ("status", _status, "Show a run's members."),
        ("stop", _stop, "Let all members write a checkpoint and end the run; `resume` goes on."),
        ("resume", _resume, "Go on with a run that was stopped or killed."),
        ("report", _report, "Write a run's report and print where it is."),
        ("logs", _logs, "Print what a member, or each of them, said."),
    ):
        added = command(name, do, says)
        added.add_argument("run_dir", metavar="RUN_DIR")
        if name == "logs":
            added.add_argument("member", nargs="?", help="such as member-0 (default: all)")
        if name == "resume":
            running(added, executor=None)

    command("doctor", _doctor, "Say what this machine offers, and why not where it does not.")

    bench = commands.add_parser("bench", help="Studies that can be repeated anywhere.")
    studies = bench.add_subparsers(title="studies", metavar="STUDY", required=True)
    pipelines = studies.add_parser("pipelines", help="what one shared pipeline saves, by design and members")
    pipelines.set_defaults(do=_bench_pipelines)
    pipelines.add_argument("--data", required=True, help="a tar archive of JPEG photographs")
    pipelines.add_argument(
        "--members", default="1,2,4,8,16", help="how many read, as in 1,4,16 (default: %(default)s)"
    )
    pipelines.add_argument("--designs", default="bare ring,node,independent", help="(default: %(default)s)")
    pipelines.add_argument("--prep-workers", type=int, default=1, help="preparation processes (default: 1)")
    pipelines.add_argument("--batch-size", type=int, default=32, help="(default: %(default)s)")
    pipelines.add_argument("--samples", type=int, default=1000, help="each member takes at least (default: 1000)")
    pipelines.add_argument("--size", type=int, default=224, help="pixels of a side (default: %(default)s)")
    pipelines.add_argument(
        "--step-ms", type=float, default=0.0, help="emulated accelerator: wait after each batch"
    )
    pipelines.add_argument("--cores", type=int, help="pin everything to that many cores")
    pipelines.add_argument("--repeats", type=int, default=3, help="medians of that many runs (default: 3)")
    pipelines.add_argument("--plot", metavar="FILE", default="bench-pipelines.html", help="(default: %(default)s)")
    pipelines.add_argument("--json", metavar="FILE", help="write the rows as JSON, '-' for standard output")
    return parser


def _settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="an option of the spec")


# --- runs ------------------------------------------------------------------------------------------------


def _demo(options: argparse.Namespace) -> int:
    import shutil

    from ensemble import demo
    from ensemble.specfile import call_spec
    from ensemble.store import RunDir, StoreError

    ensemble = call_spec(demo.spec, options.set)
    path = Path(options.run_dir or "runs/demo")
    if options.run_dir is None and path.exists():
        if RunDir(path).info.get("name") != ensemble.name:
            raise StoreError(f"{path} holds another run; name a directory with --run-dir")
        shutil.rmtree(path)
    return _train(ensemble, path, options)


def _run(options: argparse.Namespace) -> int:
    from ensemble.specfile import load_spec

    ensemble = load_spec(options.spec, options.set)
    return _train(ensemble, Path(options.run_dir or Path("runs") / ensemble.name), options, spec_file=options.spec)


def _train(ensemble: Ensemble, path: Path, options: argparse.Namespace, spec_file: str | None = None) -> int:
    from ensemble.api import submit

    return _watch(lambda on_event: submit(ensemble, path, options.executor, on_event, spec_file), options)


def _resume(options: argparse.Namespace) -> int:
    from ensemble.api import resume

    return _watch(lambda on_event: resume(options.run_dir, options.executor, on_event), options)


def _watch(start: Callable[[Callable[[dict[str, Any]], None]], Any], options: argparse.Namespace) -> int:
    """Start a run, show its progress, and when it has ended what it came to."""
    from ensemble.meter import ledger
    from ensemble.store import RunDir, fold, read_events
    from ensemble.watch import Progress, summary

    shown: list[RunState] = []
    with Progress() as progress:
        # The controller's own state is the fold over the log; events before the handle is there are in it.
        run = start(lambda _event: progress.update(shown[0]) if shown else None)
        shown.append(run.state)
        result = run.wait()
    run_dir = RunDir(result.run_dir)
    events = read_events(run_dir.events)
    _print(summary(fold(events), ledger(events), run_dir))
    _write_json(options, result.members)
    return 0 if result.best is not None or result.stopped else EXIT_FAILED


def _status(options: argparse.Namespace) -> int:
    from ensemble.store import RunDir, fold, read_events, status_rows

    rows = status_rows(fold(read_events(RunDir(options.run_dir).events)))
    _table(rows, options)
    return 0


def _logs(options: argparse.Namespace) -> int:
    from ensemble.spec import SpecError, unknown_name
    from ensemble.store import RunDir, fold, read_events

    run_dir = RunDir(options.run_dir)
    members = list(fold(read_events(run_dir.events)).members)
    if options.member is not None and options.member not in members:
        raise SpecError(unknown_name(f"{options.run_dir} has no member", options.member, members))
    rows = []
    for member in [options.member] if options.member else members:
        path = run_dir.log(member)
        text = path.read_text(errors="replace") if path.exists() else ""
        rows += [{"member": member, "line": line} for line in text.splitlines()]
    if options.json:
        _write_json(options, rows)
    else:
        for row in rows:
            print(row["line"] if options.member else f"{row['member']}  {row['line']}")
    return 0


def _stop(options: argparse.Namespace) -> int:
    from ensemble.store import RunDir, fold, read_events, write_request

    run_dir = RunDir(options.run_dir)
    ended = fold(read_events(run_dir.events)).ended
    if ended is not None:
        print(f"{options.run_dir} has ended already")
    else:
        write_request(run_dir, "stop")
        print(f"asked: members write a checkpoint and end; `ensemble resume {options.run_dir}` goes on")
    _write_json(options, [{"run_dir": options.run_dir, "asked": ended is None}])
    return 0


def _report(options: argparse.Namespace) -> int:
    from ensemble.store import RunDir
    from ensemble.watch import write_report

    path = write_report(RunDir(options.run_dir))
    print(path)
    _write_json(options, [{"report": str(path)}])
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from ensemble.doctor import examine, print_table

    rows = examine()
    print_table(rows)
    _write_json(options, [dict(row) for row in rows])
    return 0


def _bench_pipelines(options: argparse.Namespace) -> int:
    import dataclasses

    from ensemble.bench.pipelines import DESIGNS, study
    from ensemble.bench.plot import write_plot
    from ensemble.spec import SpecError, unknown_name

    designs = [name.strip() for name in options.designs.split(",")]
    for name in designs:
        if name not in DESIGNS:
            raise SpecError(unknown_name("--designs has no design", name, DESIGNS))
    members = options.members.split(",")
    if not all(number.strip().isdigit() and int(number) > 0 for number in members):
        raise SpecError(f"--members takes numbers of members such as 1,4,16, got {options.members!r}")
    rows = study(
        options.data,
        [int(number) for number in members],
        designs=designs,
        prep_workers=options.prep_workers,
        batch_size=options.batch_size,
        samples=options.samples,
        size=options.size,
        step_ms=options.step_ms,
        cores=options.cores,
        repeats=options.repeats,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    _table([dataclasses.asdict(row) for row in rows], options)
    write_plot(rows, Path(options.plot))
    print(f"plot: {options.plot}", file=sys.stderr)
    return 0


# --- output ----------------------------------------------------------------------------------------------


def _print(renderable: Any) -> None:
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 120, highlight=False).print(renderable)


def _table(rows: Rows, options: argparse.Namespace) -> None:
    """Rows as a table for people, and as JSON where that is asked for."""
    from rich.table import Table

    if options.json != "-":
        table = Table(box=None, pad_edge=False, header_style="dim")
        for name, value in (rows[0] if rows else {}).items():
            table.add_column(name, justify="right" if isinstance(value, int | float) else "left")
        for row in rows:
            table.add_row(*(_cell(value) for value in row.values()))
        _print(table)
    _write_json(options, rows)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return (
        f"{value:,.4g}"
        if isinstance(value, float) and abs(value) < 1000
        else f"{value:,.0f}"
        if isinstance(value, float)
        else str(value)
    )


def _write_json(options: argparse.Namespace, rows: Rows) -> None:
    if options.json == "-":
        json.dump(rows, sys.stdout, indent=1)
        print()
    elif options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
