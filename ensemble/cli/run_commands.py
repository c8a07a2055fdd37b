"""Commands that start and continue runs: each takes its parsed options and returns the exit status.

They call the Python API. Heavy modules are imported only where a command needs them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble.cli.arguments import read_limits
from ensemble.cli.console import find_width, print_lines, print_styled, write_json
from ensemble.cli.control_commands import POLL_S, send_request
from ensemble.cli.dashboard import PageProcess
from ensemble.events import Event, RequestAnswered, RunFinished, RunStarted, RunStopped
from ensemble.interrupts import repeat_lost_signals
from ensemble.spec import SpecError
from ensemble.store.files import format_command

if TYPE_CHECKING:
    from ensemble.run import Run
    from ensemble.spec import Ensemble
    from ensemble.store import RunDir, RunState

EXIT_FAILED, EXIT_SOME_FAILED, EXIT_RESUMABLE = 1, 3, 75  # 75: EX_TEMPFAIL of sysexits.h


def demo(options: argparse.Namespace) -> int:
    """Train the demo; its default run directory is replaced."""
    from ensemble.cli import demo as digits
    from ensemble.inspection.run_contents import find_foreign_files
    from ensemble.spec.spec_file import call_spec
    from ensemble.store import EventLog, RunDir, StoreError

    ensemble = call_spec(digits.spec, options.set)
    run_dir = RunDir(options.run_dir or "runs/demo")
    if options.run_dir is None and run_dir.path.exists():
        if run_dir.path.is_symlink() or run_dir.info.get("name") != ensemble.name:
            raise StoreError(f"{run_dir.path} is not a run of the demo; give another directory with --run-dir")
        EventLog(run_dir.events).close()  # raises while another demo writes it
        if foreign := find_foreign_files(run_dir):
            raise StoreError(f"{run_dir.path / foreign[0]} is not of the demo, which would replace it: move it")
        shutil.rmtree(run_dir.path)
    return _train(ensemble, run_dir, options)


def run(options: argparse.Namespace) -> int:
    """Run a spec file; continue a run that was stopped."""
    from ensemble.spec.limits import apply_limits
    from ensemble.spec.spec_file import load_spec
    from ensemble.store import RunDir

    ensemble = load_spec(options.spec, options.set)
    run_dir = RunDir(options.run_dir or Path("runs") / ensemble.name)
    if options.dry_run:
        from ensemble.cli.inspect_commands import dry_run

        _apply_trust(options)
        return dry_run(apply_limits(ensemble, read_limits(options)), run_dir, options)
    return _train(ensemble, run_dir, options, spec_file=options.spec)


def submit(options: argparse.Namespace) -> int:
    """Run a spec file as a job on a cluster, unless a job of that name is running."""
    from ensemble.executors.ray.jobs import JobClient
    from ensemble.store.mirror import NO_MIRROR, check_url

    spec = Path(options.spec).expanduser()
    name = options.name or spec.stem
    run_dir = Path(options.run_dir or Path("runs") / name).expanduser().absolute()
    given = vars(options)
    flags = [
        "--accept-code",
        "--accept-data",
        "--fresh",
        "--trust-group",
        "--allow-failed",
        "--dashboard",
        "--no-samples",
    ]
    page = [] if options.dashboard_port is None else ["--dashboard-port", str(options.dashboard_port)]
    numbers = ("max_gpus", "max_cpus")
    ranks = [f"--{name.replace('_', '-')}={given[name]}" for name in numbers if given[name] is not None]
    trust = [] if options.trust_folder is None else ["--trust-folder", os.path.abspath(options.trust_folder)]
    mirror = [] if options.mirror is None else ["--mirror", options.mirror]
    if options.mirror not in (None, NO_MIRROR):
        check_url(options.mirror)  # before anybody can read it in the list of jobs
    jobs = JobClient(options.address)
    id, fresh = jobs.submit(
        spec,
        name=name,
        run_dir=run_dir,
        settings=options.set,
        working_dir=Path(options.working_dir).expanduser() if options.working_dir else None,
        flags=[
            *(flag for flag in flags if given[flag.lstrip("-").replace("-", "_")]),
            *page,
            *ranks,
            *trust,
            *mirror,
        ],
    )
    if not fresh:
        print(f"ensemble: the job {id} is running already", file=sys.stderr)
    if options.json != "-":
        print(id, flush=True)
    write_json(options, [{"id": id, "fresh": fresh, "name": name, "run_dir": str(run_dir)}])
    return jobs.follow_log(id, lambda text: print(text, end="", flush=True)) if options.follow else 0


def _apply_trust(options: argparse.Namespace) -> None:
    from ensemble.store import trust_folder, trust_group

    if options.trust_group:
        trust_group()
    if options.trust_folder is not None:
        trust_folder(Path(options.trust_folder))


def _switch_on_ray_dashboard(options: argparse.Namespace) -> None:
    """Have a Ray that is started for the run show its dashboard, where that is asked for."""
    from ensemble.executors.ray.session import RAY_DASHBOARD

    if options.ray_dashboard:
        if options.executor != "ray":
            raise SpecError(
                f"--ray-dashboard: the executor {options.executor!r} starts no Ray; leave one of them out"
            )
        os.environ[RAY_DASHBOARD] = "1"


def _train(ensemble: Ensemble, run_dir: RunDir, options: argparse.Namespace, spec_file: str | None = None) -> int:
    with repeat_lost_signals():
        from ensemble.api import choose_free_path, submit
        from ensemble.controller.changes import (
            check_code,
            check_same,
            explain_changed_splits,
            explain_evaluated_again,
            find_code_change,
            has_corrected_member,
            is_combined_otherwise,
        )
        from ensemble.controller.damage import check_ended
        from ensemble.controller.retention import is_more_to_remove
        from ensemble.controller.unfinished import explain_rest
        from ensemble.store import RunDir, read_state
        from ensemble.store.verification import check_kept_code
        from ensemble.user_code.fingerprint import code_of

        accept, code = options.accept_code, code_of(ensemble)
    _apply_trust(options)
    _switch_on_ray_dashboard(options)
    if options.fresh and (free := choose_free_path(run_dir)) != run_dir.path:
        print(f"starting a new run in {free}; {run_dir.path} is not changed", file=sys.stderr)
        run_dir = RunDir(free)
    checked = None
    if run_dir.events.exists() and run_dir.find_info().get("name") == ensemble.name:
        state = read_state(run_dir.events)
        declared = ensemble.search.trials if ensemble.search else len(ensemble.members or ())
        over = _is_finished(state, code.fingerprint) and not has_corrected_member(state, ensemble)
        if over and len(state.members) >= declared:
            check_same(state, ensemble, run_dir.path, accepts_data=options.accept_data)
            check_code(state, code, run_dir, accept=accept)
            checked = check_ended(run_dir, state, code.fingerprint)
            rest = explain_rest(state, [*checked, *check_kept_code(run_dir, state)])
            if rest is None and (
                explain_changed_splits(state, ensemble)
                or explain_evaluated_again(
                    state, find_code_change(state, code, run_dir), ensemble.keep_predictions_gb
                )
            ):
                rest = "it goes on"  # the controller says why
            if rest is None and is_combined_otherwise(state, ensemble):
                rest = "its members are combined again as is declared now"
            if rest is None and is_more_to_remove(state, ensemble.keep_checkpoints):
                rest = f"no more is kept than keep_checkpoints={ensemble.keep_checkpoints!r} says"
            if rest is None:
                return _show_finished(run_dir, state, options)
            print(f"{run_dir.path} has finished; {rest}", file=sys.stderr)
    known: dict[str, Any] = {
        "notify": _read_addresses(options),
        "accept_code": accept,
        "accept_data": options.accept_data,
        "group_read": options.group_read,
        "code": code,
        "checked": checked,
        "mirror": options.mirror,
        "limits": read_limits(options),
    }
    with _serve_page(run_dir, options):
        return _run_to_end(
            lambda on_event: submit(ensemble, run_dir, options.executor, on_event, spec_file, **known), options
        )


def _read_addresses(options: argparse.Namespace) -> list[str]:
    """The addresses of webhooks that are told how the run has ended."""
    from ensemble.spec.settings import read_value

    return [read_value("--notify", value)[0] for value in options.notify]


def _serve_page(run_dir: RunDir, options: argparse.Namespace) -> contextlib.AbstractContextManager[object]:
    """The live page of a run, where it is asked for."""
    if not options.dashboard and options.dashboard_port is None:
        return contextlib.nullcontext()
    return PageProcess(run_dir.path, options.dashboard_port, shows_samples=not options.no_samples)


def resume(options: argparse.Namespace) -> int:
    """Continue a run that was stopped or killed; in a run in progress, members that are paused."""
    from ensemble.api import read_begun
    from ensemble.api import resume as resume_run
    from ensemble.controller.changes import explain_changed_splits
    from ensemble.controller.damage import check_declaration, check_ended
    from ensemble.controller.unfinished import explain_rest
    from ensemble.store import RunDir, is_locked, read_events
    from ensemble.store.folding import without_garbage_collection
    from ensemble.train.data_identity import renew_data
    from pipelines.environment.library_settings import keep_settings
    from pipelines.errors import PipelineError

    _apply_trust(options)
    run_dir = RunDir(options.run_dir)
    if is_locked(run_dir.events) and options.member is None and _is_ending(read_events(run_dir.events)):
        print(f"{run_dir.path} is being stopped; it is continued when it has ended", file=sys.stderr)
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
    if options.epochs is None and options.budget is None and _is_finished(state, state.header.code):
        check_declaration(run_dir, state)
        checked = check_ended(run_dir, state, state.header.code)
        rest = explain_rest(state, checked)
        if rest is None:
            with keep_settings(), contextlib.suppress(PipelineError):  # the data may be gone: nothing needs them
                if explain_changed_splits(state, renew_data(run_dir.load_ensemble(takes_settings=True))):
                    rest = "it goes on"  # the controller says why
        if rest is None:
            return _show_finished(run_dir, state, options)
        print(f"{run_dir.path} has finished; {rest}", file=sys.stderr)
    accepted = {name: getattr(options, name) for name in ("accept_code", "accept_data")}
    how: dict[str, Any] = {**accepted, "epochs": options.epochs, "checked": checked, "begun": begun}
    how["notify"] = _read_addresses(options)
    how |= {"budget": options.budget, "mirror": options.mirror, "limits": read_limits(options)}
    start = without_garbage_collection()(resume_run)
    return _run_to_end(lambda on_event: start(run_dir, options.executor, on_event, **how), options)


def distill(options: argparse.Namespace) -> int:
    """Train one model on what the ensemble of a run predicts, and show what is lost by that."""
    from ensemble.cli.control_commands import parse_params
    from ensemble.distillation import compare
    from ensemble.distillation import distill as start
    from ensemble.reporting.text import number
    from ensemble.spec.spec_file import import_file

    _apply_trust(options)
    model = None
    if options.model is not None:
        model = getattr(import_file(Path(options.model)), "model", None)
        if not callable(model):
            raise SpecError(f"{options.model} defines no function model(params) -> nn.Module")
    given = {
        name: getattr(options, name)
        for name in ("member", "epochs", "temperature", "weight", "executor", "accept_code", "fresh")
    }
    student: list[Run] = []

    def begin(on_event: Callable[[dict[str, Any]], None]) -> Run:
        known = {name: value for name, value in given.items() if value is not None}
        params = parse_params(options.set)
        student.append(
            start(options.run_dir, options.run_dir_to, params=params, model=model, on_event=on_event, **known)
        )
        return student[0]

    status = _run_to_end(begin, argparse.Namespace(**{**vars(options), "json": None}), show=options.json != "-")
    if status == EXIT_FAILED:
        return status
    rows = compare(options.run_dir, student[0].run_dir)
    for row in rows:
        figures = ", ".join(
            f"{name} {number(row[name])}"
            for name in row
            if name not in ("model", "split", "lost", "lost_intervals")
        )
        print_lines(options, f"{row['model']} ({row['split']}): {figures}")
    between = {name: f" ({low:+.4g} ... {high:+.4g})" for name, (low, high) in rows[2]["lost_intervals"].items()}
    lost = ", ".join(f"{name} {value:+.4g}{between.get(name, '')}" for name, value in rows[2]["lost"].items())
    note = ", in brackets 95 % intervals" if between else ""
    print_lines(options, f"the student against the ensemble{note}: {lost}")
    write_json(options, rows)
    return status


def _is_ending(events: Sequence[Event]) -> bool:
    """Whether a run in progress is ending, or was asked to stop."""
    since = max((n for n, event in enumerate(events) if isinstance(event, RunStarted)), default=0)
    return any(
        isinstance(event, RunStopped | RunFinished)
        or (isinstance(event, RequestAnswered) and event.verb == "stop" and event.done)
        for event in events[since:]
    )


def _is_finished(state: RunState, code: str | None) -> bool:
    """Whether a run has finished, and none of its members would be tried again with that code."""
    over = state.ended is not None and isinstance(state.ended, RunFinished)
    return over and not any(member.is_resumable(code) for member in state.members.values())


def _show_finished(run_dir: RunDir, state: RunState, options: argparse.Namespace) -> int:
    """Show the result of a run that has finished already, and write what is missing of it."""
    from ensemble.controller.unfinished import complete_results
    from ensemble.store import EventLog, StoreError, WriteError
    from ensemble.store.mirror import MirrorError, TakenOverError, begin_mirror, explain_incomplete
    from ensemble.store.mirror_copier import Copier

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
    if options.mirror is not None or explain_incomplete(run_dir) is not None:
        try:
            with EventLog(run_dir.events):
                if mirror := begin_mirror(run_dir, options.mirror):
                    Copier(run_dir, mirror).copy(is_last=True)
        except (MirrorError, TakenOverError) as error:
            print(f"ensemble: {error}", file=sys.stderr)
            return _show_result(run_dir, options, check=False) or EXIT_RESUMABLE
    return _show_result(run_dir, options, check=False)


def _run_to_end(
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
        The exit status: 1 if no member finished, or results could not be written; 3 if some failed, or the members
        that finished could not be
        combined for an error, and that was not allowed; else 75 if its mirror is not complete, and 0.
    """
    from ensemble.controller.unfinished import check_complete
    from ensemble.reporting import RunProjection, status_json, status_rows, summary
    from ensemble.reporting.sections.quality import describe_failed_combination
    from ensemble.store import WriteError, read_events
    from ensemble.store.mirror import explain_incomplete

    run = RunProjection.from_events(read_events(run_dir.events))
    state = run.state
    if options.json != "-" and show:
        print_styled(summary(run, run_dir, width=find_width()))
    write_json(options, status_json(run, status_rows(run)))
    states = {member.state for member in state.members.values()}
    if "finished" not in states:
        return EXIT_FAILED
    try:
        if check:
            check_complete(run_dir, state, state.ended.notes if isinstance(state.ended, RunFinished) else [])
    except WriteError as error:
        print(f"ensemble: {error}", file=sys.stderr)
        return EXIT_FAILED
    uncombined = describe_failed_combination(state)
    if uncombined is not None:
        print(f"ensemble: {uncombined}", file=sys.stderr)
    is_outdated = any(member.outdated is not None for member in state.members.values())
    if ("failed" in states or uncombined or is_outdated) and not options.allow_failed:
        return EXIT_SOME_FAILED
    return EXIT_RESUMABLE if explain_incomplete(run_dir) is not None else 0
