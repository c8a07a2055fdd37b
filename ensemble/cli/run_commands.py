"""What each command of `ensemble` does: takes its parsed options, returns the exit status.

Thin shells over the Python API. Every heavy import waits until a command needs it.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble.cli.console import say, show, write_json

if TYPE_CHECKING:
    from ensemble.run import Run
    from ensemble.spec import Ensemble
    from ensemble.store import RunDir, RunState

EXIT_FAILED = 1


def demo(options: argparse.Namespace) -> int:
    """Train the demo; its usual directory is made anew."""
    import shutil

    from ensemble.cli import demo as digits
    from ensemble.spec.spec_file import call_spec
    from ensemble.store import EventLog, RunDir, StoreError

    ensemble = call_spec(digits.spec, options.set)
    run_dir = RunDir(options.run_dir or "runs/demo")
    if options.run_dir is None and run_dir.path.exists():
        if run_dir.path.is_symlink() or run_dir.info.get("name") != ensemble.name:
            raise StoreError(f"{run_dir.path} is not the demo's; name another directory with --run-dir")
        EventLog(run_dir.events).close()  # refused while another demo writes it
        shutil.rmtree(run_dir.path)
    return _train(ensemble, run_dir, options)


def run(options: argparse.Namespace) -> int:
    """Train what a spec file declares; a run that was stopped goes on."""
    from ensemble.spec.spec_file import load_spec
    from ensemble.store import RunDir

    ensemble = load_spec(options.spec, options.set)
    run_dir = RunDir(options.run_dir or Path("runs") / ensemble.name)
    return _train(ensemble, run_dir, options, spec_file=options.spec)


def submit(options: argparse.Namespace) -> int:
    """Run what a spec file declares as a job on a cluster; a job of that name that is under way is told of."""
    from ensemble.executors.ray.jobs import Jobs

    spec = Path(options.spec).expanduser()
    name = options.name or spec.stem
    run_dir = Path(options.run_dir or Path("runs") / name).expanduser().absolute()
    jobs = Jobs(options.address)
    job = jobs.submit(
        spec,
        name=name,
        run_dir=run_dir,
        settings=options.set,
        working_dir=Path(options.working_dir).expanduser() if options.working_dir else None,
        more=[
            f"--{name.replace('_', '-')}"
            for name in ("accept_code", "fresh", "trust_group")
            if getattr(options, name)
        ],
    )
    if not job.fresh:
        print(f"ensemble: the job {job.id} is under way already", file=sys.stderr)
    if options.json != "-":
        print(job.id, flush=True)
    write_json(options, [{"id": job.id, "fresh": job.fresh, "name": name, "run_dir": str(run_dir)}])
    if not options.follow:
        return 0
    return jobs.follow(job.id, lambda text: print(text, end="", flush=True))


def _trust(options: argparse.Namespace) -> None:
    from ensemble.store import trust_group

    if options.trust_group:
        trust_group()


def _train(ensemble: Ensemble, run_dir: RunDir, options: argparse.Namespace, spec_file: str | None = None) -> int:
    from ensemble.api import beside, submit
    from ensemble.controller.changes import check_code, check_same, mended
    from ensemble.store import RunDir, fold, read_events
    from ensemble.user_code.fingerprint import code_of

    accept, code = options.accept_code, code_of(ensemble)
    _trust(options)
    if options.fresh and (free := beside(run_dir)) != run_dir.path:
        print(f"starting anew in {free}; {run_dir.path} stays as it is", file=sys.stderr)
        run_dir = RunDir(free)
    if run_dir.events.exists() and run_dir.info["name"] == ensemble.name:
        state = fold(read_events(run_dir.events))
        declared = ensemble.search.trials if ensemble.search else len(ensemble.members or ())
        over = _finished(state, code.fingerprint) and not mended(state, ensemble)
        if over and len(state.members) >= declared:
            check_same(state, ensemble, run_dir.path)
            check_code(state, code, run_dir, accept=accept)
            return _nothing_left(run_dir, options)
    return _watch(
        lambda on_event: submit(
            ensemble,
            run_dir,
            options.executor,
            on_event,
            spec_file,
            accept_code=accept,
            group_read=options.group_read,
            code=code,
        ),
        options,
    )


def resume(options: argparse.Namespace) -> int:
    """Go on with a run that was stopped or killed; of one in progress, let go on what is paused."""
    from ensemble.api import resume as go_on
    from ensemble.cli.control_commands import LOOK_EVERY_S, ask
    from ensemble.spec import SpecError
    from ensemble.store import RunDir, fold, is_locked, read_events

    _trust(options)
    run_dir = RunDir(options.run_dir)
    if is_locked(run_dir.events) and options.member is None and _ends(read_events(run_dir.events)):
        print(f"{run_dir.path} is being stopped; waiting for its end to go on with it", file=sys.stderr)
        while is_locked(run_dir.events):
            time.sleep(LOOK_EVERY_S)
    if is_locked(run_dir.events):
        return ask(options)
    if options.member is not None:
        raise SpecError(
            f"{options.run_dir} is not in progress; `ensemble resume {options.run_dir}` goes on with all"
        )
    state = fold(read_events(run_dir.events))
    if _finished(state, state.header.get("code")):
        return _nothing_left(run_dir, options)
    return _watch(
        lambda on_event: go_on(run_dir, options.executor, on_event, accept_code=options.accept_code), options
    )


def _ends(events: Sequence[dict[str, Any]]) -> bool:
    """Whether a run in progress was asked to stop, or has all but gone."""
    since = max((n for n, event in enumerate(events) if event["type"] == "run_started"), default=0)
    return any(
        event["type"] in ("run_stopped", "run_finished")
        or (event["type"] == "asked" and event.get("verb") == "stop" and event.get("done"))
        for event in events[since:]
    )


def _finished(state: RunState, code: str | None) -> bool:
    """Whether a run has come to its end, and a start with that code would take nobody up again."""
    over = state.ended is not None and state.ended["type"] == "run_finished"
    return over and not any(member.returns(code) for member in state.members.values())


def _nothing_left(run_dir: RunDir, options: argparse.Namespace) -> int:
    """A run that has finished is shown again, not trained again."""
    print(f"{run_dir.path} has finished; `ensemble run --fresh` trains anew, beside it", file=sys.stderr)
    return _came_to(run_dir, options)


def _watch(start: Callable[[Callable[[dict[str, Any]], None]], Run], options: argparse.Namespace) -> int:
    """Start a run, show its progress, and when it has ended what it came to."""
    from ensemble.reporting import Progress
    from ensemble.store import RunDir

    shown: list[RunState] = []
    with Progress() as progress:
        # The controller's own state is the fold over the log; events before the handle is there are in it.
        started = start(lambda _event: progress.update(shown[0]) if shown else None)  # followed or driven here
        shown.append(started.state)
        result = started.wait()
    return _came_to(RunDir(result.run_dir), options)


def _came_to(run_dir: RunDir, options: argparse.Namespace) -> int:
    """Show what a run came to; 0, or 1 where no member finished."""
    from ensemble.meter import ledger
    from ensemble.reporting import status_json, status_rows, summary
    from ensemble.store import fold, read_events

    events = read_events(run_dir.events)
    state, used = fold(events), ledger(events)
    if options.json != "-":
        show(summary(state, used, run_dir))
    write_json(options, status_json(state, status_rows(state, used.by_member())))
    return 0 if any(m.state == "finished" for m in state.members.values()) else EXIT_FAILED


def status(options: argparse.Namespace) -> int:
    """Show how the run stands and a row for each member."""
    from ensemble import reporting
    from ensemble.store import RunDir, Standing

    run_dir = RunDir(options.run_dir)
    standing = Standing.of(run_dir)
    state = standing.state
    rows = reporting.status_rows(state, standing.account.members())
    gone = reporting.controller_gone(run_dir, state)
    say(options, reporting.status_head(state, gone is not None))
    if options.json != "-":
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 1000  # a row stays one line
        say(options, *reporting.status_lines(state, rows, width))
        say(options, *reporting.status_notes(state))
    write_json(options, reporting.status_json(state, rows))
    if gone is not None:
        print(gone, file=sys.stderr)
    return 0


def report(options: argparse.Namespace) -> int:
    """Write the report and say where it is."""
    from ensemble.reporting import write_report
    from ensemble.store import RunDir

    path = write_report(RunDir(options.run_dir))
    say(options, str(path))
    write_json(options, [{"report": str(path)}])
    return 0


def doctor(options: argparse.Namespace) -> int:
    """Show what this machine offers."""
    from ensemble.cli.doctor import examine, print_table

    rows = examine(tell=lambda text: print(f"ensemble: {text}", file=sys.stderr, flush=True))
    if options.json != "-":
        print_table(rows)
    write_json(options, [dict(row) for row in rows])
    return 0
