"""Commands that start and continue runs: each takes its parsed options and returns the exit status.

They call the Python API. Heavy modules are imported only where a command needs them.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble.cli.arguments import (
    Command,
    add_executor,
    add_member,
    add_shared,
    budget,
    count,
    path,
    read_limits,
)
from ensemble.cli.console import find_width, print_styled, write_json
from ensemble.cli.control_commands import POLL_S, send_request
from ensemble.events import Event, RequestAnswered, RunFinished, RunStarted, RunStopped
from ensemble.interrupts import repeat_lost_signals
from ensemble.spec import SpecError
from ensemble.store.files import format_command
from pipelines.providers import import_object

if TYPE_CHECKING:
    from ensemble.run import Run
    from ensemble.spec import Ensemble
    from ensemble.store import RunDir, RunState

EXIT_FAILED, EXIT_SOME_FAILED, EXIT_RESUMABLE = 1, 3, 75  # 75: EX_TEMPFAIL of sysexits.h


#: Options of commands that start or continue a run.
START = (
    "--accept-data", "--trust-folder", "--allow-failed", "--max-gpus", "--max-cpus", "--notify", "--mirror",
)  # fmt: skip


def demo(options: argparse.Namespace) -> int:
    """Train the demo; what an earlier demo left in the default run directory is moved beside it."""
    from ensemble.cli import demo as digits
    from ensemble.controller.start_steps import choose_free_path
    from ensemble.spec.spec_file import call_spec
    from ensemble.store import EventLog, RunDir, StoreError

    ensemble = call_spec(digits.spec, options.set)
    run_dir = RunDir(options.run_dir or "runs/demo")
    if options.run_dir is None and run_dir.path.exists():
        if run_dir.path.is_symlink() or run_dir.info.get("name") != ensemble.name:
            raise StoreError(f"{run_dir.path} is not a run of the demo; give another directory with --run-dir")
        EventLog(run_dir.events).close()  # raises while another demo writes it
        run_dir.path.rename(choose_free_path(run_dir.path))
    return _train(ensemble, run_dir, options)


def run(options: argparse.Namespace) -> int:
    """Run a spec file; continue a run that was stopped."""
    from ensemble.spec.limits import apply_limits
    from ensemble.spec.spec_file import load_spec
    from ensemble.store import RunDir

    ensemble = load_spec(options.spec, options.set)
    run_dir = RunDir(options.run_dir or Path("runs") / ensemble.name)
    if options.dry_run:
        apply_trust(options)
        dry_run = import_object("ensemble.cli.inspect_commands:dry_run")
        return int(dry_run(apply_limits(ensemble, read_limits(options)), run_dir, options))
    return _train(ensemble, run_dir, options, spec_file=options.spec)


def apply_trust(options: argparse.Namespace) -> None:
    from ensemble.store import trust_folder

    if options.trust_folder is not None:
        trust_folder(Path(options.trust_folder))


def _train(ensemble: Ensemble, run_dir: RunDir, options: argparse.Namespace, spec_file: str | None = None) -> int:
    with repeat_lost_signals():
        from ensemble.api import submit
        from ensemble.controller.changes import check_code, check_same
        from ensemble.controller.start_steps import choose_free_path
        from ensemble.controller.unfinished import explain_start_again, is_over
        from ensemble.store import RunDir, read_state
        from ensemble.user_code.fingerprint import code_of

        accept, code = options.accept_code, code_of(ensemble)
    apply_trust(options)
    if options.no_rehearsal:
        ensemble = copy.copy(ensemble)
        object.__setattr__(ensemble, "rehearsal", None)
    if options.fresh and (free := choose_free_path(run_dir)) != run_dir.path:
        print(f"starting a new run in {free}; {run_dir.path} is not changed", file=sys.stderr)
        run_dir = RunDir(free)
    checked = None
    if run_dir.events.exists() and run_dir.find_info().get("name") == ensemble.name:
        state = read_state(run_dir.events)
        if is_over(state, ensemble, code.fingerprint):
            check_same(state, ensemble, run_dir.path, accepts_data=options.accept_data, accepts_code=accept)
            check_code(state, code, run_dir, accept=accept)
            again, checked = explain_start_again(run_dir, state, ensemble, code)
            if again is None:
                return _show_finished(run_dir, state, options)
            print(f"{run_dir.path} has finished; {again}", file=sys.stderr)
    arguments: dict[str, Any] = {
        "notify": _read_addresses(options),
        "accept_code": accept,
        "accept_data": options.accept_data,
        "code": code,
        "checked": checked,
        "mirror": options.mirror,
        "limits": read_limits(options),
    }
    with _serve_page(run_dir, options):
        return run_to_end(
            lambda on_event: submit(ensemble, run_dir, options.executor, on_event, spec_file, **arguments), options
        )


def _read_addresses(options: argparse.Namespace) -> list[str]:
    """The addresses of webhooks that are told how the run has ended."""
    from ensemble.spec.settings import read_value

    return [read_value("--notify", value)[0] for value in options.notify]


def _serve_page(run_dir: RunDir, options: argparse.Namespace) -> contextlib.AbstractContextManager[object]:
    """The live page of a run, where it is asked for."""
    if not options.dashboard and options.dashboard_port is None:
        return contextlib.nullcontext()
    page: contextlib.AbstractContextManager[object]
    page = import_object("ensemble.cli.dashboard:PageProcess")(run_dir.path, options.dashboard_port)
    return page


def resume(options: argparse.Namespace) -> int:
    """Continue a run that was stopped or killed; in a run in progress, members that are paused."""
    from ensemble.api import read_begun
    from ensemble.api import resume as resume_run
    from ensemble.controller.changes import explain_changed_splits
    from ensemble.controller.unfinished import check_declaration, check_ended, explain_rest, is_finished
    from ensemble.store import RunDir, is_locked, read_events
    from ensemble.store.folding import without_garbage_collection
    from ensemble.train.data_identity import renew_data
    from pipelines.environment.library_settings import keep_settings
    from pipelines.errors import PipelineError

    apply_trust(options)
    run_dir = RunDir(options.run_dir)
    if is_locked(run_dir.events) and options.member is None and _is_ending(read_events(run_dir.events)):
        print(f"{run_dir.path} is stopping; this command waits, then continues it", file=sys.stderr)
        while is_locked(run_dir.events):
            time.sleep(POLL_S)
    if is_locked(run_dir.events) and read_limits(options):
        raise SpecError(
            f"{run_dir.path} is in progress: limits are given when a run is started; "
            f"{format_command('stop', options.run_dir)} stops it first"
        )
    if is_locked(run_dir.events) and options.mirror is not None:
        raise SpecError(f"{run_dir.path} is in progress: --mirror is given when it is started or resumed")
    if is_locked(run_dir.events) and options.epochs is None and options.budget is None:
        return send_request(options)
    if options.member is not None:
        command = format_command("resume", options.run_dir)
        raise SpecError(f"{options.run_dir} is not in progress; {command} continues all members")
    begun, checked = read_begun(run_dir), None
    state = begun.update()
    if options.epochs is None and options.budget is None and is_finished(state, state.header.code):
        check_declaration(run_dir, state)
        checked = check_ended(run_dir, state, state.header.code)
        again = explain_rest(state, checked)
        if again is None:
            with keep_settings(), contextlib.suppress(PipelineError):  # the data may be gone: nothing needs them
                if explain_changed_splits(state, renew_data(run_dir.load_ensemble(takes_settings=True))):
                    again = "it goes on"  # the controller says why
        if again is None:
            return _show_finished(run_dir, state, options)
        print(f"{run_dir.path} has finished; {again}", file=sys.stderr)
    accepted = {name: getattr(options, name) for name in ("accept_code", "accept_data")}
    how: dict[str, Any] = {**accepted, "epochs": options.epochs, "checked": checked, "begun": begun}
    how["notify"] = _read_addresses(options)
    how |= {"budget": options.budget, "mirror": options.mirror, "limits": read_limits(options)}
    start = without_garbage_collection()(resume_run)
    return run_to_end(lambda on_event: start(run_dir, options.executor, on_event, **how), options)


def _is_ending(events: Sequence[Event]) -> bool:
    """Whether a run in progress is ending, or was asked to stop."""
    since = max((n for n, event in enumerate(events) if isinstance(event, RunStarted)), default=0)
    return any(
        isinstance(event, RunStopped | RunFinished)
        or (isinstance(event, RequestAnswered) and event.verb == "stop" and event.done)
        for event in events[since:]
    )


def _show_finished(run_dir: RunDir, state: RunState, options: argparse.Namespace) -> int:
    """Show the result of a run that has finished already, and write what is missing of it."""
    from ensemble.controller.unfinished import complete_results
    from ensemble.store import StoreError, WriteError
    from ensemble.store.mirror_status import explain_incomplete

    more = f"{format_command('resume', run_dir.path, '--epochs', 'N')} trains its members on, to N epochs in all"
    again = "`ensemble run --fresh` trains again in a new directory"
    print(f"{run_dir.path} has finished; {more}, {again}", file=sys.stderr)
    try:
        if missing := complete_results(run_dir, state):
            print(f"written again: {', '.join(missing)}", file=sys.stderr)
    except WriteError as error:
        print(f"ensemble: {error}", file=sys.stderr)
        return EXIT_FAILED
    except StoreError as error:
        print(f"ensemble: {error}", file=sys.stderr)
    incomplete = None
    if options.mirror is not None or explain_incomplete(run_dir) is not None:
        incomplete = import_object("ensemble.store.mirror:complete_mirror")(run_dir, options.mirror)
        if incomplete is not None:
            print(f"ensemble: {incomplete}", file=sys.stderr)
    return _show_result(run_dir, options, check=False) or (0 if incomplete is None else EXIT_RESUMABLE)


def run_to_end(
    start: Callable[[Callable[[dict[str, Any]], None]], Run], options: argparse.Namespace, *, show: bool = True
) -> int:
    """Start a run, show its progress, and its result when it has ended."""
    from ensemble.reporting import Progress
    from ensemble.store import RunDir

    shown: list[RunState] = []
    with Progress() as progress:
        # The controller's state includes the events before the handle is returned.
        started = start(lambda _event: progress.update(shown[0]) if shown else None)  # followed or driven here
        shown.append(started.state)
        result = started.wait()
    return _show_result(RunDir(result.run_dir), options, show=show)


def _show_result(run_dir: RunDir, options: argparse.Namespace, *, show: bool = True, check: bool = True) -> int:
    """Show the result of a run.

    Args:
        show: whether a table is printed.  check: whether it is an error that results are missing.

    Returns:
        The exit status: 1 if no member finished, or results could not be written; 3 if an error ended the run, or
        some members failed, or those that finished could not be combined for an error, and that was not allowed;
        else 75 if its mirror is not complete, and 0.
    """
    from ensemble.controller.unfinished import check_complete
    from ensemble.reporting import RunProjection, status_rows
    from ensemble.reporting.sections.quality import describe_failed_combination
    from ensemble.reporting.summary import summary
    from ensemble.store import WriteError, read_events
    from ensemble.store.mirror_status import explain_incomplete

    run = RunProjection.from_events(read_events(run_dir.events))
    state = run.state
    if options.json != "-" and show:
        print_styled(summary(run, run_dir, width=find_width()))
    write_json(options, status_rows(run))
    states = {member.state for member in state.members.values()}
    if not any(member.has_result for member in state.members.values()):
        return EXIT_FAILED
    try:
        if check:
            check_complete(run_dir, state, state.ended.notes if isinstance(state.ended, RunFinished) else [])
    except WriteError as error:
        print(f"ensemble: {error}", file=sys.stderr)
        return EXIT_FAILED
    if isinstance(state.ended, RunStopped) and state.ended.failed:
        print(f"ensemble: the run ended by an error: {state.ended.reason}", file=sys.stderr)
        return EXIT_SOME_FAILED
    uncombined = describe_failed_combination(state)
    if uncombined is not None:
        print(f"ensemble: {uncombined}", file=sys.stderr)
    is_earlier = any(member.outdated or member.unextended for member in state.members.values())
    if ("failed" in states or uncombined or is_earlier) and not options.allow_failed:
        return EXIT_SOME_FAILED
    return EXIT_RESUMABLE if explain_incomplete(run_dir) is not None else 0


def _add_train_options(parser: argparse.ArgumentParser, run_dir: str) -> None:
    parser.add_argument("--run-dir", help=f"run directory (default: {run_dir})")
    add_executor(parser, "ray")
    add_shared(parser, "--accept-code", "--fresh", "--no-rehearsal", *START)
    add_shared(parser, "--dashboard", "--dashboard-port", "--set")


def _add_demo_options(parser: argparse.ArgumentParser) -> None:
    _add_train_options(parser, "runs/demo; an earlier one moves to runs/demo-2 and so on")


def _add_spec_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("spec", metavar="SPEC.py", type=path)
    text = (
        "show what the run would do, need and cost, from one batch and a few steps; writes nothing; 'full' also "
        "prepares all records of all splits"
    )
    parser.add_argument("--dry-run", nargs="?", const="quick", choices=("quick", "full"), help=text)
    _add_train_options(parser, "runs/NAME, with the name of the ensemble")


def _add_resume_options(parser: argparse.ArgumentParser) -> None:
    add_member(parser)
    text = "train the members, those that have finished, too, to N epochs in all, more than were declared"
    parser.add_argument("--epochs", type=count, metavar="N", help=text)
    text = "let a search use so much in all, as in hours=2,cpu_hours=8 (also trials=N, energy_kj=X)"
    parser.add_argument("--budget", type=budget, metavar="LIMITS", help=text)
    add_executor(parser)
    text = (
        "continue although members were trained with other code of modules that are not kept with the run; "
        "`ensemble run` uses edited code"
    )
    parser.add_argument("--accept-code", action="store_true", help=text)
    add_shared(parser, *START)


DEMO = Command(
    demo,
    "Train eight small models on handwritten digits. Takes about a minute and needs no data.",
    _add_demo_options,
)
RUN = Command(
    run,
    "Run a spec file, a Python file with spec(**options) -> Ensemble; continues a run that was stopped.",
    _add_spec_options,
)
RESUME = Command(
    resume, "Continue a run that was stopped or killed, or members that are paused.", _add_resume_options
)
